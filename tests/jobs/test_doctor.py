"""`fluxq doctor` in the interpreter, on the embedded model: what is right, planted faults, the file to share."""

import getpass
import itertools
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from kernel_tests import sibling
from torch.utils._python_dispatch import TorchDispatchMode

import fluxq
from fluxq.base import console
from fluxq.cli import cli
from fluxq.commands import looking_up
from fluxq.jobs import doctor, sharing
from fluxq.kernels import dispatch, findings, launch, proofs
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.op import REFERENCES

CHIP = "sm_89"  # on which our own kernel multiplies fp8
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
FAULT = "tl.load(x_scale + rows * stride_x_scale", "tl.load(x_scale + rows * 0"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(findings, "_withdrawn", {})


@pytest.fixture
def few(monkeypatch) -> None:
    """Only the modulation, the first layer of a double block and the single block."""
    every = doctor._launches

    def some(*arguments: Any) -> Any:
        groups = every(*arguments)
        yield from itertools.islice(groups, 2)
        *_, last = groups
        yield last

    monkeypatch.setattr(doctor, "_launches", some)


@pytest.fixture
def one(monkeypatch) -> None:
    """Only the first layer, which no block holds, at its one token."""
    every = doctor._launches
    monkeypatch.setattr(doctor, "_launches", lambda *arguments: itertools.islice(every(*arguments), 1))


@pytest.fixture
def kept(monkeypatch) -> None:
    """Findings of the interpreter are kept as if they were a GPU's."""
    every = findings.keeping

    @contextmanager
    def keeping(machine: dict[str, str]) -> Iterator[findings.Keeper]:
        with every(machine | {"gpu": "a GPU"}) as keeper:
            yield keeper

    monkeypatch.setattr(findings, "keeping", keeping)


@pytest.fixture
def planted(monkeypatch, tmp_path) -> None:
    """Products of our own kernel in 8 bits take the scale of another token."""
    quantizers = sibling("test_quantize_activation_kernel", "doctored")
    faulty = quantizers.with_fault("scaled_matmul.py", *FAULT, tmp_path)
    monkeypatch.setitem(sys.modules, "fluxq.kernels.scaled_matmul.kernel", faulty)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, words)])


def on_interpreter(output: Path, *words: object) -> Result:
    return run(output, "--chip", CHIP, "--interpret", *words)


@pytest.mark.slow
def test_what_is_right_is_told_op_by_op(few, plain_checkpoint, tmp_path) -> None:
    done = on_interpreter(plain_checkpoint("int8"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["machine"]["chip"] == CHIP and not (found["file"] or found["left_out"] or found["uncompared"])
    cells = {(row["op"], row["format"]) for row in found["rows"]}
    assert cells >= {
        ("weight_only_matmul", "int8"),
        ("quantize_activation", "int8"),
        ("quantize_activation", "int8-beside"),
        ("scaled_matmul", "int8"),
        ("adaln_quantize", "int8"),
        ("qk_norm_rope", "16bit"),
    }
    assert all(row["share"] <= 1 and row["us"] is None for row in found["rows"])
    alike = [row for row in found["rows"] if row["scheme"] == "int8-int8" and row["m"] == 16]
    assert {row["op"] for row in alike if row["chosen"]} == {"scaled_matmul"} < {row["op"] for row in alike}
    assert not (tmp_path / "cache").exists()  # the interpreter says nothing of a GPU


@pytest.mark.slow
def test_a_planted_fault_is_found_and_the_kernel_not_chosen(few, planted, plain_checkpoint, tmp_path) -> None:
    done = on_interpreter(plain_checkpoint("int8"), "--share", tmp_path / "shared.json")
    assert done.exit_code == 1 and "wrong here: scaled_matmul int8" in done.output, done.output
    document = json.loads((tmp_path / "shared.json").read_text())
    wrong = {(row["op"], row["format"]) for row in document["rows"] if row["why"]}
    assert wrong == {("scaled_matmul", "int8")}
    chosen = {row["op"] for row in document["rows"] if row["scheme"] == "int8-int8" and row["chosen"]}
    assert chosen <= {"torch._int_mm", "weight_only_matmul"} and chosen


class Kernels(TorchDispatchMode):
    """Computes the ops by what the dispatcher offers on a chip, or by their references."""

    def __init__(self, by_kernels: bool) -> None:
        super().__init__()
        self.by_kernels = by_kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fluxq":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("fluxq::")
        return launch.computed_by(name, args, CHIP) if self.by_kernels else REFERENCES[name](*args)


@pytest.mark.long
def test_images_are_right_again_where_a_wrong_kernel_is_known(planted, plain_checkpoint) -> None:
    from diffusers import FluxPipeline

    pipe: Any = FluxPipeline.from_pretrained(plain_checkpoint("int8"), dtype=torch.bfloat16)
    fluxq.optimize(pipe)

    def image(by_kernels: bool) -> torch.Tensor:
        call = {"height": 16, "width": 16, "max_sequence_length": 8, "guidance_scale": 1.0, "num_inference_steps": 1}
        with interpreting(CHIP), Kernels(by_kernels):
            latents = pipe("a red square", **call, generator=torch.Generator().manual_seed(0), output_type="latent")
        return latents.images.float()

    def off(one: torch.Tensor) -> float:
        return float((one - right).norm() / right.norm())

    right = image(by_kernels=False)
    assert not off(image(by_kernels=True)) < 0.02
    found = doctor.examine(doctor.request_of(str(plain_checkpoint("int8")), chip=CHIP))
    with findings.instead(findings.document(found.machine, found.our_rows)):
        dispatch.forget()
        assert off(image(by_kernels=True)) < 0.02
    dispatch.forget()


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "chip"), [("fp8", "sm_90"), ("nvfp4", "sm_120"), ("nvfp4-max", "sm_100")])
def test_a_whole_checkpoint_is_right(recipe: str, chip: str, plain_checkpoint) -> None:
    done = run(plain_checkpoint(recipe), "--chip", chip, "--interpret")
    assert (
        done.exit_code == 0
        and ", 0 wrong, 0 not compared; not kept: the interpreter proves the arithmetic" in done.output
    ), done.output


@pytest.mark.slow
def test_every_shipped_recipe_is_launched_plain_and_with_all_that_it_may_try() -> None:
    subjects = [*doctor._of_recipes(doctor.Machine(torch.device("cpu"), CHIP, "speed", torch.bfloat16))]
    schemes = {str(layer.scheme) for model, *_ in subjects for layer in model.modules() if hasattr(layer, "scheme")}
    assert {"fp8-fp8", "int8-int8", "mxfp8-mxfp8", "nvfp4-nvfp4-static", "fp8-16bit"} <= schemes
    assert any("center-smooth" in scheme and "-h" in scheme for scheme in schemes)
    assert {(tokens.image, tokens.text) for _, _, tokens, _ in subjects if tokens} == {(16, 8)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_what_it_cannot_tell(plain_checkpoint) -> None:
    done = run(plain_checkpoint("int8"))
    assert done.exit_code == 2 and "only there doctor can tell" in done.output and "--interpret proves" in done.output


def test_kernels_are_launched_on_the_gpu_that_was_named(monkeypatch) -> None:
    """Triton launches on the current one, whatever the tensors are on."""
    second, current = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(findings, "machine_of", lambda device, chip: {"gpu": "a GPU", "chip": chip})
    monkeypatch.setattr(doctor, "_is_lost", lambda device: False)
    monkeypatch.setattr(doctor, "_examined", lambda *_: {} if current == [second] else pytest.fail("on another"))
    doctor.examine(doctor.Request(doctor.Machine(second, "sm_90", "speed", torch.bfloat16), None, {}, None))


@pytest.mark.parametrize("words", [("doctor",), ("warmup", "tiny")])
def test_the_second_of_one_gpu_is_refused(words: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = CliRunner().invoke(cli, [*words, "--device", "cuda:1"])
    assert done.exit_code == 2 and "--device cuda:1: " in done.output, done.output
    assert "torch finds no such CUDA or ROCm device" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chip", CHIP), "give both, or neither"),
        (("--interpret",), "give both, or neither"),
        (("--chip", "gfx942", "--interpret"), "--chip gfx942: the interpreter knows sm_80"),
        (("--chip", CHIP, "--interpret", "--op", "dequantize"), "give both"),
        (("--chip", CHIP, "--interpret", "--op", "nope", "--candidate", "a:b"), "--op nope: expected one of adaln_"),
        (("--chip", "sm_1", "--interpret", "--op", "nope", "--candidate", "a:b"), "--op nope"),
    ],
)
def test_a_request_that_cannot_work_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2 and said in done.output, done.output


def test_the_request_is_refused_before_the_candidate_is_imported(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_imported", lambda name: pytest.fail("it was imported"))
    done = run("tiny", "--chip", CHIP, "--interpret", "--op", "dequantize", "--candidate", "a:b")
    assert done.exit_code == 2 and "holds no component that fluxq quantized" in done.output, done.output


# --- the file to share


def test_the_file_to_share_names_nobody_and_no_path(tmp_path) -> None:
    user, host, home = getpass.getuser(), platform.node(), Path.home()
    texts = {
        f"FileNotFoundError: {home}/my models/secret.py is gone": "FileNotFoundError: …",
        "at C:\\Users\\me too\\x.py": "at …",
        "in '../my folder/x.py' and \"a b\\c d\"": "in … and …",
        "hf://me/model": "…",
        "M / tokens in kernels/tuned/a.json has no row": "M … tokens in … has no row",
        f"of {user} on {host}": "of … on …",
        "scaled_matmul: off by 0.25, at most 1e-05 expected": "scaled_matmul: off by 0.25, at most 1e-05 expected",
    }
    row = {"op": "scaled_matmul", "candidate": False, "beside": {"bf16": 2.0, "my:kernel": 1.0}}
    rows = [row | {"why": why} for why in texts] + [row | {"op": "my:kernel", "candidate": True, "why": ""}]
    left_out = {
        "adaln_quantize in my.layer.0": f"{home}/x",
        "my:kernel in my.layer.0": "of mine",
        "adaln_quantize in my.layer.1": f"{home}/y",
    }
    found = doctor.Examination({"gpu": "G", "chip": CHIP}, "my:kernel", rows, left_out, {"my:kernel": "never"})
    sharing.share(found, tmp_path / "shared.json")
    text = (tmp_path / "shared.json").read_text()
    shared = json.loads(text)
    assert [row["why"] for row in shared["rows"]] == [*texts.values()]
    assert all(row["beside"] == {"bf16": 2.0} for row in shared["rows"])
    assert shared["left_out"] == ["adaln_quantize: …"] and shared["uncompared"] == []
    for name in ("my:", "layer.", "Users", str(home)):
        assert name not in text, name


def test_the_file_to_share_has_nothing_of_a_candidate_or_a_whole_host_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "box7.corp.example")
    left_out = {
        "timing of scaled_matmul in my.layer.0": "acme.secret.mm cannot be captured",
        "timing of acme.secret:mm in my.layer.0": "no",
    }
    uncompared = {"scaled_matmul in my.layer.0": "mm: socket to box7.corp.example refused, [/home/me/x y] is gone"}
    found = doctor.Examination({"gpu": "G", "chip": CHIP}, "acme.secret:mm", [], left_out, uncompared)
    sharing.share(found, tmp_path / "shared.json")
    shared = json.loads((tmp_path / "shared.json").read_text())
    assert shared["left_out"] == ["timing of scaled_matmul: ….… cannot be captured"]
    assert shared["uncompared"] == ["scaled_matmul: …: socket to … refused, […"]


@pytest.mark.parametrize("what", ["folder", "checkpoint", "findings", "pipe", "link", "no folder", "in the checkpoint"])
def test_nothing_else_is_replaced_by_the_file_to_share(what: str, plain_checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda request: pytest.fail("it began to work"))
    checkpoint, place = plain_checkpoint("int8"), tmp_path / "there"
    if what == "folder":
        place.mkdir()
    elif what == "checkpoint":
        shutil.copyfile(checkpoint / "transformer" / "config.json", place)
    elif what == "findings":  # doctor's own, which lack what was left out
        place.write_text(json.dumps(findings.document({}, [])))
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "link":
        sharing.share(doctor.Examination({}), tmp_path / "elsewhere")
        place.symlink_to("elsewhere")
    elif what == "no folder":
        place = tmp_path / "absent" / "there"
    else:
        place = checkpoint / "there.json"
    before = sorted(tmp_path.iterdir())
    done = on_interpreter(checkpoint, "--share", place)
    assert done.exit_code == 2 and f"Error: --share {place}" in done.output, done.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_the_table_is_there_even_if_the_file_to_share_cannot_be_written(one, plain_checkpoint, tmp_path, monkeypatch):
    sharing.share(doctor.Examination({}), tmp_path / "shared.json")  # which may be replaced

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(sharing, "write_json", full)
    done = on_interpreter(plain_checkpoint("int8"), "--share", tmp_path / "shared.json")
    assert done.exit_code == 1 and "1 results, 0 wrong" in done.output and "no space left" in done.output


# --- candidates


MINE = """
import sys
from fluxq.kernels.op import REFERENCES
compute = REFERENCES["quantized_linear"]
number = 3

def right(*arguments):
    return compute(*arguments)

def wrong(*arguments):
    return 1.02 * compute(*arguments)

def shape(*arguments):
    return compute(*arguments)[:, :5]

def nothing(*arguments):
    return None

def elsewhere(*arguments):
    return compute(*arguments).to("meta")

def changing(x, tensors, scheme):
    y = compute(x, tensors, scheme)
    tensors[0].zero_()
    tensors.clear()
    return y

def leaving(*arguments):
    sys.exit(0)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    Path("mine.py").write_text(MINE)
    Path("bad.py").write_text("raise RuntimeError('of its own')")
    Path("bye.py").write_text("raise SystemExit(0)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("right", ""),
        ("wrong", "weight_only_matmul: off by "),
        ("shape", "returned torch.bfloat16 (1, 5) on cpu, expected torch.bfloat16 (1, 768) on cpu"),
        ("nothing", "returned NoneType, expected "),
        ("elsewhere", "returned torch.bfloat16 (1, 768) on meta, expected "),
        ("changing", "1 of its inputs changed in place"),
        ("leaving", "SystemExit: 0"),
    ],
)
def test_a_kernel_of_ones_own_is_judged_beside_ours(name: str, why: str, one, mine, plain_checkpoint) -> None:
    words = "--candidate", f"mine:{name}", "--op", "quantized_linear", "--json"
    done = on_interpreter(plain_checkpoint("int8"), *words)
    assert done.exit_code == bool(why), done.output
    ours, theirs = json.loads(done.output.partition("\nError")[0])["rows"]
    assert not ours["why"] and ours["share"] == pytest.approx(0.92, abs=0.1)
    assert theirs["op"] == f"mine:{name}" and theirs["candidate"] and theirs["why"].startswith(why)
    assert done.output.endswith(f"Error: wrong: the candidate mine:{name}\n" if why else "}\n")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone:b", "ModuleNotFoundError: No module named 'gone'"),
        ("bad:b", "RuntimeError: of its own"),
        ("bye:b", "SystemExit: 0"),
        ("mine:absent", "AttributeError: module 'mine' has no attribute 'absent'"),
        ("mine:number", "it is of type int and cannot be called"),
        ("mine", "give MODULE:FUNCTION"),
    ],
)
def test_a_candidate_that_cannot_be_had_is_one_sentence(name: str, said: str, mine, plain_checkpoint) -> None:
    done = on_interpreter(plain_checkpoint("int8"), "--candidate", name, "--op", "quantized_linear")
    assert done.exit_code == 2 and done.output.startswith(f"Error: --candidate {name}: {said}"), done.output
    assert done.output.count("\n") == 1


@pytest.mark.slow
def test_a_candidate_that_nothing_launches_was_not_judged(one, mine, plain_checkpoint) -> None:
    done = on_interpreter(plain_checkpoint("int8"), "--candidate", "mine:right", "--op", "dequantize")
    assert done.exit_code == 1 and "mine:right: no layer or block launches dequantize" in done.output, done.output


# --- runs that do not come to an end


@pytest.mark.slow
def test_a_launch_that_ended_two_runs_is_wrong_until_it_is_asked_for_again(
    one, kept, plain_checkpoint, monkeypatch, caplog
) -> None:
    what = "weight_only_matmul int8 int8-16bit at 1 x 768 x 128"
    checkpoint = plain_checkpoint("int8")
    for _ in range(2):
        child = os.fork()
        if not child:
            monkeypatch.setattr(launch, "linear_by", lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
            on_interpreter(checkpoint)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    file = next(findings.folder().glob("*.json"))
    once = json.loads(file.read_text())
    assert once["unended"] == {what: 2}
    done = on_interpreter(checkpoint)
    assert done.exit_code == 1 and f"WRONG: {what}: 2 runs of doctor ended inside it; remove" in done.output
    assert json.loads(file.read_text())["rows"][0]["why"]
    file.write_text(json.dumps(once | {"unended": {what: 1}}))
    caplog.clear()
    assert on_interpreter(checkpoint).exit_code == 0
    assert f"{what}: the last run of doctor ended inside it" in caplog.text
    assert not json.loads(file.read_text())["unended"]


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_found_and_says_where_it_was(few, kept, plain_checkpoint, monkeypatch) -> None:
    every, calls = launch.linear_by, []

    def third(*arguments: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return every(*arguments, **how)

    monkeypatch.setattr(launch, "linear_by", third)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        doctor.examine(doctor.request_of(str(plain_checkpoint("int8")), chip=CHIP))
    assert interrupted.value.__notes__[0].startswith("what was found before is kept, it was at ")
    document = json.loads(next(findings.folder().glob("*.json")).read_text())
    assert len(document["rows"]) == 1 and document["unended"] == {}


@pytest.mark.slow
def test_the_table_is_there_even_if_nothing_can_be_kept(one, kept, plain_checkpoint, tmp_path) -> None:
    (tmp_path / "cache").write_text("no folder")
    done = on_interpreter(plain_checkpoint("int8"))
    assert done.exit_code == 0 and "1 results, 0 wrong, 0 not compared; not kept: [Errno" in done.output, done.output


@pytest.mark.slow
def test_what_could_not_be_compared_is_no_proof(one, plain_checkpoint, monkeypatch, tmp_path) -> None:
    def short(*_: object, **__: object) -> None:
        raise MemoryError("too little memory")

    monkeypatch.setattr(proofs, "judge_linear", short)
    done = on_interpreter(plain_checkpoint("int8"), "--share", tmp_path / "shared.json")
    assert done.exit_code == 1 and "Error: 1 not compared, each with its reason above; nothing was" in done.output
    assert "not compared: weight_only_matmul in transformer_blocks.0.norm1.linear: too little memory" in done.output
    assert json.loads((tmp_path / "shared.json").read_text())["uncompared"] == ["weight_only_matmul: too little memory"]


def test_progress_counts_layers_and_blocks(few, plain_checkpoint, monkeypatch, caplog) -> None:
    monkeypatch.setattr(console, "_MINUTE", 1e-9)
    monkeypatch.setattr(doctor, "_judged", lambda *_: [])
    on_interpreter(plain_checkpoint("int8"))
    assert [text.partition(" after")[0] for text in caplog.messages] == [
        f"Proving layers and blocks: {done} of 3" for done in (1, 2, 3)
    ]


def test_errors_say_what_is_true_of_ours_of_the_candidate_and_of_what_is_kept() -> None:
    row = {"op": "scaled_matmul", "format": "int8", "why": "off", "candidate": False}
    theirs = row | {"op": "my:kernel", "format": "", "candidate": True}
    found = doctor.Examination({}, "my:kernel", [row, theirs], file="/there")
    both = (
        "wrong here: scaled_matmul int8; fluxq does without on this GPU; wrong: the candidate my:kernel. Please report"
    )
    assert looking_up._complaint(found).startswith(both)
    assert looking_up._complaint(doctor.Examination({}, rows=[row])).startswith(
        "wrong here: scaled_matmul int8; nothing is kept of it. Please report"
    )
    assert looking_up._complaint(doctor.Examination({}, "my:kernel", [theirs])) == "wrong: the candidate my:kernel"
    assert looking_up._complaint(doctor.Examination({}, rows=[row | {"why": ""}])) == ""
