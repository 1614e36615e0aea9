"""`fluxq doctor` in the interpreter, on the embedded model: what is right, planted faults, the file to share."""

import getpass
import importlib.util
import itertools
import json
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils._python_dispatch import TorchDispatchMode

import fluxq
from fluxq.cli import cli
from fluxq.jobs import doctor
from fluxq.kernels import dispatch, findings, launch
from fluxq.kernels.interpreter import interpreting
from fluxq.kernels.op import REFERENCES

CHIP = "sm_89"  # on which our own kernel multiplies fp8
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
FAULT = "tl.load(x_scale + rows * stride_x_scale", "tl.load(x_scale + rows * 0"


def sibling(name: str) -> ModuleType:
    """A test file of the kernels, for what it defines."""
    path = Path(__file__).parents[1] / "kernels" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"doctored_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
def planted(monkeypatch, tmp_path) -> None:
    """Products of our own kernel in 8 bits take the scale of another token."""
    quantizers = sibling("test_quantize_activation_kernel")
    faulty = quantizers.with_fault("scaled_matmul.py", *FAULT, tmp_path)
    monkeypatch.setitem(sys.modules, "fluxq.kernels.scaled_matmul.kernel", faulty)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, words)])


def on_interpreter(output: Path, *words: object) -> Result:
    return run(output, "--chip", CHIP, "--interpret", *words)


def test_what_is_right_is_told_op_by_op(few, plain_checkpoint, tmp_path) -> None:
    done = on_interpreter(plain_checkpoint("int8"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["machine"]["chip"] == CHIP and found["file"] is None and not found["left_out"]
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


@pytest.mark.slow
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
    found = doctor.examine(str(plain_checkpoint("int8")), chip=CHIP)
    with findings.instead(found.document):
        dispatch.forget()
        assert off(image(by_kernels=True)) < 0.02
    dispatch.forget()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "chip"), [("fp8", "sm_90"), ("nvfp4", "sm_120"), ("nvfp4-max", "sm_100")])
def test_a_whole_checkpoint_is_right(recipe: str, chip: str, plain_checkpoint) -> None:
    done = run(plain_checkpoint(recipe), "--chip", chip, "--interpret")
    assert done.exit_code == 0 and ", 0 wrong; the interpreter proves the arithmetic" in done.output, done.output


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chip", CHIP), "give both, or neither"),
        (("--interpret",), "give both, or neither"),
        (("--chip", "gfx942", "--interpret"), "--chip gfx942: the interpreter knows sm_80"),
        (("--chip", CHIP, "--interpret", "--op", "dequantize"), "give both"),
        (("--chip", CHIP, "--interpret", "--op", "nope", "--candidate", "a:b"), "--op nope: expected one of adaln_"),
        (("--chip", CHIP, "--interpret", "--op", "dequantize", "--candidate", "gone:b"), "No module named 'gone'"),
    ],
)
def test_a_request_that_cannot_work_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2 and said in done.output, done.output


def test_the_file_to_share_names_nobody_and_no_path(tmp_path) -> None:
    why = f"FileNotFoundError: {Path.home()}/models/secret.py is gone, so is C:\\Users\\me\\x.py; M / tokens"
    row = {"op": "scaled_matmul", "why": why, "candidate": False}
    found = doctor.Examination({"gpu": "G", "chip": CHIP}, [row, row | {"op": "my:kernel", "candidate": True}])
    doctor.share(found, tmp_path / "shared.json")
    text = (tmp_path / "shared.json").read_text()
    assert json.loads(text)["rows"][0]["why"] == "FileNotFoundError: … is gone, so is … M … tokens"
    assert "my:kernel" not in text
    for name in (getpass.getuser(), platform.node(), str(Path.home()), "Users"):
        assert not name or name not in text.replace("FileNotFoundError", ""), name


def test_a_kernel_of_ones_own_is_judged_beside_ours(few, plain_checkpoint, tmp_path, monkeypatch) -> None:
    some = doctor._launches
    monkeypatch.setattr(doctor, "_launches", lambda *a: ([o for o in g if o.op == "qk_norm_rope"] for g in some(*a)))
    (tmp_path / "mine.py").write_text(
        "from fluxq.kernels.op import REFERENCES\n"
        "right = REFERENCES['qk_norm_rope']\n"
        "def wrong(*arguments):\n"
        "    q, k = right(*arguments)\n"
        "    return q, 1.01 * k\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (("right", 0), ("wrong", 1)):
        done = on_interpreter(plain_checkpoint("int8"), "--candidate", f"mine:{name}", "--op", "qk_norm_rope", "--json")
        assert done.exit_code == code, done.output
        (row,) = [row for row in json.loads(done.output.partition("\nError")[0])["rows"] if row["candidate"]]
        assert row["op"] == f"mine:{name}" and bool(row["why"]) == bool(code)
