"""`fluxq eval`, `report`, `bench` and `debug` from the command line to what they leave, and how mistakes end."""

import json
import os
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import ranks
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from fluxq import tiny
from fluxq.base.devices import instructions
from fluxq.base.output import sole_writer
from fluxq.calibrate.prompts import PromptRow, PromptSet
from fluxq.cli import cli
from fluxq.eval.metrics.schema import SCHEMA_VERSION, read_report
from fluxq.eval.report.advice import advice
from fluxq.eval.report.summary import summary
from fluxq.jobs import judge
from fluxq.kernels.ops import int_mm_is_exact

FEW = ("--count", 6, "--num-inference-steps", 2, "--metrics", "psnr,latent_sqnr", "--backends", "native")


def fluxq(*arguments: object):
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.fixture
def quantized(plain_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_checkpoint("nvfp4"), tmp_path / "out"))


@pytest.fixture(scope="module")
def few(plain_checkpoint: Callable[[str], Path], tmp_path_factory) -> Path:
    """A folder with the checkpoint `out`, of which FEW images were evaluated, and with those images."""
    folder = tmp_path_factory.mktemp("few")
    out = Path(shutil.copytree(plain_checkpoint("nvfp4"), folder / "out"))
    assert fluxq("eval", out, *FEW).exit_code == 0
    return folder


@pytest.fixture
def judged(few: Path, tmp_path: Path) -> Path:
    """A checkpoint that `fluxq eval` has judged by FEW images, for a test to damage."""
    return Path(shutil.copytree(few, tmp_path, dirs_exist_ok=True)) / "out"


@pytest.fixture(scope="module")
def evaluated(plain_checkpoint: Callable[[str], Path], tmp_path_factory) -> tuple[Path, object]:
    """A checkpoint that `fluxq eval` has judged with every metric and backend, and what the command said."""
    folder = tmp_path_factory.mktemp("evaluated")
    out = Path(shutil.copytree(plain_checkpoint("nvfp4"), folder / "tiny-nvfp4"))
    return out, fluxq("eval", out, "--protocol", "standard", "--count", 16, "--num-inference-steps", 2)


@pytest.mark.long
def test_eval_judges_every_arithmetic_with_every_metric(evaluated) -> None:
    out, done = evaluated
    assert done.exit_code == 0, done.output
    report = read_report(out / "eval" / "report.json")
    assert [run.name for run in report.runs] == ["tiny-nvfp4", "tiny-nvfp4 as int8"]
    assert [run.backend for run in report.runs] == ["native", "int8"]
    left_out = "tiny-nvfp4 as 8bit makes the same images as tiny-nvfp4 as int8 and is left out"
    assert left_out in report.warnings  # int8 adds less error than fp8 in each of its layers
    for run in report.runs:
        missing = {key for key, metric in run.metrics.items() if metric.missing}
        assert missing == {"lpips", "fid_infinity", "image_reward", "hpsv2"}, run.metrics
        psnr = run.metrics["psnr"]
        assert psnr.value.low < psnr.value.mean < psnr.value.high and psnr.value.n == 16
        assert psnr.floor.mean > psnr.value.mean  # 16 bit differs less from itself
        assert run.drift.curves["velocity_error"].floor is not None
        assert run.verdict.text in done.output
    assert str(out / "eval" / "report.html") in done.output
    assert (out / "eval" / "report.md").is_file()
    assert fluxq("verify", out).exit_code == 0  # its model card was extended


@pytest.mark.long
def test_a_second_eval_makes_no_image_and_says_the_same(evaluated) -> None:
    out, _ = evaluated
    before = read_report(out / "eval" / "report.json")
    images = sorted(path.stat().st_mtime_ns for path in (out.parent / "fluxq-images").rglob("*.png"))
    assert images
    done = fluxq("eval", out, "--protocol", "standard", "--count", 16, "--num-inference-steps", 2)
    assert done.exit_code == 0, done.output
    assert sorted(path.stat().st_mtime_ns for path in (out.parent / "fluxq-images").rglob("*.png")) == images
    after = read_report(out / "eval" / "report.json")
    assert after.model_copy(update={"created": before.created, "time": before.time}) == before


@pytest.mark.long
def test_report_joins_two_evaluations_of_one_model(evaluated, plain_checkpoint, tmp_path: Path) -> None:
    out, _ = evaluated
    other = Path(shutil.copytree(plain_checkpoint("int8"), out.parent / "tiny-int8"))
    assert fluxq("eval", other, "--protocol", "standard", "--count", 16, "--num-inference-steps", 2).exit_code == 0
    done = fluxq("report", out, other, "-o", tmp_path / "both.html")
    assert done.exit_code == 0, done.output
    merged = read_report(tmp_path / "both.json")
    assert [run.recipe for run in merged.runs] == ["nvfp4"] * 2 + ["int8"]
    decided = {(each.first, each.second): each for each in merged.comparisons}
    ahead = decided.get(("tiny-int8", "tiny-nvfp4")) or decided[("tiny-nvfp4", "tiny-int8")]
    assert abs(ahead.difference.mean) > 5 and ahead.p_holm < 0.05
    assert "http://" not in (tmp_path / "both.html").read_text(encoding="utf-8").replace("http://www.w3.org", "")


@pytest.mark.slow
def test_evaluations_with_other_steps_are_not_joined(evaluated, plain_checkpoint, tmp_path: Path) -> None:
    out, _ = evaluated
    other = Path(shutil.copytree(plain_checkpoint("int8"), tmp_path / "tiny-int8"))
    assert fluxq("eval", other, *FEW[:2], "--num-inference-steps", 1, *FEW[4:]).exit_code == 0
    done = fluxq("report", out, other, "-o", tmp_path / "both.html")
    assert done.exit_code != 0 and "call" in done.output and not (tmp_path / "both.html").exists()


def test_gates_set_the_exit_code(quantized: Path) -> None:
    done = fluxq("eval", quantized, *FEW, "--gate", "psnr>=20", "--gate", "5<=latent_sqnr<=6")
    assert done.exit_code == 1 and "gate missed: 5<=latent_sqnr<=6" in done.output
    gates = {gate.gate: gate.passed for gate in read_report(quantized / "eval" / "report.json").runs[0].gates}
    assert gates["psnr>=20"] and not gates["5<=latent_sqnr<=6"]
    assert fluxq("eval", quantized, *FEW, "--gate", "psnr>=20", "--gate", "velocity_error<=0.5").exit_code == 0


def test_a_look_says_what_was_seen_and_judges_nothing(evaluated) -> None:
    """16 images are too few for every verdict; the first line says what to do, and figures come with intervals."""
    out, done = evaluated
    report = read_report(out / "eval" / "report.json")
    assert {run.verdict.outcome for run in report.runs} == {"alike"}
    lines = done.stdout.splitlines()
    first = next(line for line in lines if "looks as good as published" in line)
    assert first.startswith("tiny-nvfp4 looks as good as published on 16 images, with ") and first == advice(report)
    assert first.endswith("Before you rely on it: fluxq eval tiny-nvfp4 --count 64.")
    psnr = report.runs[0].metrics["psnr"].value
    assert (
        f"  PSNR {psnr.mean:.2f} dB ({psnr.low:.2f} to {psnr.high:.2f}); LPIPS not measured; CLIP score " in done.stdout
    )
    assert "Not measured: LPIPS, " in report.runs[0].verdict.text and "more images" not in done.stdout
    assert any("these have 16 x 16" in text for text in report.warnings)


@pytest.mark.long
def test_a_speed_is_joined_to_the_arithmetic_that_was_timed_and_to_no_other(evaluated, tmp_path: Path) -> None:
    out, _ = evaluated
    bench = fluxq("bench", out, "--rounds", 3, "--warmup", 1, "--num-inference-steps", 1, "--optimize")
    assert bench.exit_code == 0, bench.output
    assert "CPU" in bench.output and "tiny-nvfp4, optimized" in bench.output
    way = "re-encoded to int8" if int_mm_is_exact("cpu") else "as stored"
    assert f"quantized layers were computed {way}: " in bench.output
    assert str(instructions()) in bench.output and "baseline: " in bench.output
    few = ("--budget", 24, "--growth", 1, "--num-inference-steps", 1)
    debug = fluxq("debug", out, "--count", 2, *few, "--patch", tmp_path / "better.yaml")
    assert debug.exit_code == 0, debug.output
    assert fluxq("plan", "tiny", "--recipe", tmp_path / "better.yaml").exit_code == 0
    assert fluxq("debug", out, "--count", 1, "--patch", tmp_path / "better.yaml").exit_code == 2  # another job's
    report = read_report(out / "eval" / "report.json")
    native, as_int8 = report.runs
    timed, other = (as_int8, native) if int_mm_is_exact("cpu") else (native, as_int8)
    assert timed.speed is not None and other.speed is None and report.timed == ()
    assert [row.side for row in timed.speed.rows[:2]] == ["16-bit", "fp32"] and timed.speed.rows[1].missing is None
    assert timed.speed.served == timed.served != other.served
    assert native.debug is not None and native.debug.patch is not None and as_int8.debug is None

    alone = Path(shutil.copytree(out, out.parent / "tiny-alone"))  # evaluated only as it is not served
    backends = "native" if timed is as_int8 else "int8"
    done = fluxq("eval", alone, *FEW[:6], "--backends", backends)
    assert done.exit_code == 0, done.output
    report = read_report(alone / "eval" / "report.json")
    (run,), (speed,) = report.runs, report.timed
    assert run.speed is None and speed.speed == timed.speed and speed.checkpoint == "tiny-alone"
    command = f"fluxq eval tiny-alone --backends native{',int8' if timed is as_int8 else ''}"
    assert f"{speed.name}: timed, its quality was not measured: {command}" in done.output
    page = (alone / "eval" / "report.html").read_text(encoding="utf-8")
    assert f"quality not measured: {command}" in page


@pytest.mark.long
def test_what_an_older_version_found_is_named_and_left_out(judged: Path, caplog) -> None:
    path, debug = judged / "eval" / "report.json", judged / "eval" / "debug.json"
    known = read_report(path).runs[0].provenance["checkpoint (SHA-256)"]
    debug.write_text(json.dumps({"checkpoint": known, "found": {}}), encoding="utf-8")  # as schema 2 wrote it
    assert fluxq("eval", judged, *FEW).exit_code == 0
    assert "debug.json was written by another version of fluxq and is left out: run `fluxq debug` again" in caplog.text
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**value, "schema_version": 2}), encoding="utf-8")
    done = fluxq("bench", judged, "--rounds", 3, "--warmup", 1, "--num-inference-steps", 1)
    assert done.exit_code == 0, done.output
    assert "schema_version is 2, this fluxq reads 3: run `fluxq eval` on its checkpoint again" in caplog.text
    assert json.loads((judged / "eval" / "speed.json").read_text(encoding="utf-8"))["checkpoint"] == known
    assert json.loads(path.read_text(encoding="utf-8"))["schema_version"] == 2  # left as it was


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", '{"checkpoint"', "found", "rows"])
def test_what_bench_left_damaged_costs_no_evaluation(judged: Path, caplog, text: str) -> None:
    digest = read_report(judged / "eval" / "report.json").runs[0].provenance["checkpoint (SHA-256)"]
    known = {"schema_version": SCHEMA_VERSION, "checkpoint": digest}
    damaged = {"found": json.dumps(known), "rows": json.dumps({**known, "found": {"rows": "x"}})}
    (judged / "eval" / "speed.json").write_text(damaged.get(text, text), encoding="utf-8")
    done = fluxq("eval", judged, *FEW)
    assert done.exit_code == 0, done.output
    assert "speed.json is damaged and is left out: run `fluxq bench` again" in caplog.text


JUDGING = {
    "eval": FEW,
    "bench": ("--rounds", 3, "--warmup", 1, "--num-inference-steps", 1),
    "debug": ("--count", 1, "--budget", 24, "--growth", 1, "--num-inference-steps", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", JUDGING)
def test_what_judges_writes_alone_and_clears_what_killed_ones_left(quantized: Path, monkeypatch, command: str) -> None:
    parts = [
        quantized / name
        for name in (".eval_results/.x.yaml.0123abcd.part", "eval/.speed.json.0123abcd.part", ".a.0123abcd.part")
    ]
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.touch()
    monkeypatch.setattr(judge, "_WAIT", 0.0)
    with sole_writer(quantized):
        done = fluxq(command, quantized, *JUDGING[command])
        assert done.exit_code == 1 and "is being written by process" in done.output, done.output
        assert all(part.exists() for part in parts) and not list((quantized / "eval").glob("[!.]*"))
    done = fluxq(command, quantized, *JUDGING[command])
    assert done.exit_code == 0, done.output
    assert not any(part.exists() for part in parts) and list((quantized / "eval").glob("[!.]*"))
    assert {path.name for path in quantized.parent.glob(".*")} == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", JUDGING)
def test_a_checkpoint_that_was_replaced_meanwhile_gets_no_figures_of_another(quantized, monkeypatch, command) -> None:
    record = quantized / "fluxq_plan.json"
    forecast = judge._forecast

    def meanwhile(*arguments, **how):
        record.write_text(
            record.read_text(encoding="utf-8").replace('"dtype": "bfloat16"', '"dtype": "float16"'), encoding="utf-8"
        )
        return forecast(*arguments, **how)

    monkeypatch.setattr(judge, "_forecast", meanwhile)
    done = fluxq(command, quantized, *JUDGING[command])
    assert done.exit_code == 1 and "was replaced while it was judged" in done.output, done.output
    assert not (quantized / "eval").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", JUDGING)
@pytest.mark.parametrize("side", ["checkpoint", "16-bit"])
def test_files_that_change_before_they_are_loaded_are_judged_by_nobody(tmp_path, quantized, monkeypatch, command, side):
    """Their images would lie under the digest of the ones before, and be used again."""
    model = Path(shutil.copytree(tiny.path(), tmp_path / "tiny"))
    weights = (quantized if side == "checkpoint" else model) / "transformer" / "diffusion_pytorch_model.safetensors"
    forecast = judge._forecast

    def meanwhile(*arguments, **how):
        weights.write_bytes(weights.read_bytes())
        return forecast(*arguments, **how)

    with monkeypatch.context() as context:
        context.setattr(judge, "_forecast", meanwhile)
        done = fluxq(command, quantized, "--model", model, *JUDGING[command])
    assert done.exit_code == 1 and "changed while it was judged; run the same command again" in done.output, done.output
    assert not list(quantized.parent.glob("fluxq-images/*/*.png")) or side == "checkpoint"
    assert fluxq(command, quantized, "--model", model, *JUDGING[command]).exit_code == 0


def test_a_file_in_place_of_the_reports_is_refused_before_any_work(quantized) -> None:
    (quantized / "eval").touch()
    done = fluxq("eval", quantized, *FEW)
    assert done.exit_code == 2 and "is a file, where the report's folder would be; move it" in done.output, done.output


@pytest.mark.slow
def test_a_patch_replaces_what_its_own_command_wrote_and_nothing_else(quantized, tmp_path, monkeypatch) -> None:
    patch, forecast = tmp_path / "better.yaml", judge._forecast
    words = ("debug", quantized, "--count", 1, "--budget", 24, "--growth", 1, "--patch", patch)
    words += ("--num-inference-steps", 1)

    def meanwhile(*arguments, **how):
        patch.write_text("theirs")
        return forecast(*arguments, **how)

    with monkeypatch.context() as context:
        context.setattr(judge, "_forecast", meanwhile)
        done = fluxq(*words)
        assert done.exit_code == 1 and "name a new .yaml file" in done.output, done.output
    assert patch.read_text() == "theirs"
    assert fluxq(*words).exit_code == 2
    patch.unlink()
    assert fluxq(*words).exit_code == 0
    written = patch.read_bytes()
    assert fluxq(*words).exit_code == 0 and patch.read_bytes() == written
    patch.write_bytes(written + b"# mine\n")
    assert fluxq(*words).exit_code == 2


@pytest.mark.parametrize("command", JUDGING)
def test_what_lies_where_the_lock_goes_is_refused_before_anything_is_judged(quantized, command) -> None:
    (quantized.parent / ".out.lock").mkdir()
    done = fluxq(command, quantized, *JUDGING[command])
    assert done.exit_code == 2 and ".out.lock is in the way" in done.output, done.output


@pytest.mark.slow
def test_a_checkpoint_in_a_read_only_folder_is_judged(quantized, monkeypatch) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path) != quantized.parent and may(path, *how))
    before = sorted(quantized.parent.iterdir())
    words = "--rounds", 3, "--warmup", 1, "--num-inference-steps", 1
    done = fluxq("bench", quantized, *words)
    assert done.exit_code == 0, done.output
    assert sorted(quantized.parent.iterdir()) == before and not list(quantized.glob(".*.lock"))
    (quantized / ".eval.lock").mkdir()
    done = fluxq("bench", quantized, *words)
    assert done.exit_code == 2 and ".eval.lock is in the way" in done.output, done.output


@pytest.mark.long
def test_bench_prepares_as_it_is_told_and_leaves_fp32_out_where_there_is_no_room(quantized, monkeypatch, caplog):
    monkeypatch.setattr(judge, "free_bytes", lambda device: 1_000_000)
    few = "--rounds", 3, "--warmup", 1, "--num-inference-steps", 1
    found = json.loads(fluxq("bench", quantized, *few, "--prefer", "memory", "--json").output)
    assert found["conditions"]["quantized layers"].endswith("prefer='memory'")
    assert "GB, 0.0 GB are free" in found["rows"][1]["missing"] and found["rows"][1]["side"] == "fp32"
    stored = found["rows"][2]["resident_bytes"]
    monkeypatch.undo()
    assert fluxq("eval", quantized, *FEW[:6], "--backends", "native").exit_code == 0
    found = json.loads(fluxq("bench", quantized, *few, "--prefer", "decoded", "--json").output)
    assert found["rows"][2]["resident_bytes"] > 3 * stored
    row = summary(read_report(quantized / "eval" / "report.json"))[-1]
    assert row.seconds and row.resident == found["served"]["resident_bytes"] and row.resident_bits > 32
    assert "figures of an earlier bench are replaced" in caplog.text
    in_fp32 = fluxq("bench", quantized, *few, "--dtype", "float32", "--json")
    assert [row["side"] for row in json.loads(in_fp32.output)["rows"]] == ["16-bit", quantized.name]


@pytest.mark.long
def test_eval_as_json_is_the_report_and_step_caches_are_runs_beside_fewer_steps(quantized: Path) -> None:
    caches = ("--num-inference-steps", 4, "--cache", 1000, "--cache", "taylor_lite=2")
    done = fluxq("eval", quantized, *FEW, *caches, "--json")
    stored = json.loads((quantized / "eval" / "report.json").read_text(encoding="utf-8"))
    assert json.loads(done.output) == stored
    rows = {run["name"]: run for run in stored["runs"]}
    lite, cached = rows["out, TaylorSeer lite 2"], rows["out, FirstBlockCache 1000"]
    assert cached["cache"] == "FirstBlockCache 1000" and rows["out"]["cache"] is rows["out"]["computed"] is None
    for run in (cached, lite):
        fewer = rows[run["fewer"]]
        assert 0 < run["computed"] <= fewer["computed"] < 1 and fewer["metrics"]["psnr"]["value"]["mean"]
        assert not fewer["gates"] and fewer["drift"] is None
    assert "--cache 1000 --cache taylor_lite=2" in stored["command"]
    made = {path: path.stat().st_mtime_ns for path in (quantized.parent / "fluxq-images").glob("*/*.png")}
    assert fluxq("eval", quantized, *FEW, *caches, "--json").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (quantized.parent / "fluxq-images").glob("*/*.png")} == made


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--metrics", "psnr,lpips"), ("lpips", "alexnet-owt-7be5be79.pth", "--weights")),
        (("--metrics", "beauty"), ("'beauty' is unknown", "psnr")),
        (("--gate", "psnr=30"), ("psnr=30",)),
        (("--gate", "image_reward>=1"), ("image_reward",)),
        (("--protocol", "quick"), ("'quick'", "smoke")),
        (("--protocol", "paper"), ("FLUX.1-dev", "--protocol standard")),
        (("--backends", "fp4"), ("'fp4'", "native")),
        (("--device", "cuda:7"), ("cuda:7", "--device")),
        (("--engine", "torchrun"), ("torchrun", "--nproc-per-node")),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_image_is_made(quantized: Path, arguments, words) -> None:
    done = fluxq("eval", quantized, "--count", 2, *arguments)
    assert done.exit_code == 2 and all(word in done.output for word in words), done.output
    assert not (quantized / "eval").exists() and not list(quantized.parent.glob("fluxq-images/*/*.png"))


@pytest.mark.parametrize("command", JUDGING)
def test_a_model_with_another_scheduler_is_refused_before_any_image_is_made(quantized, tmp_path, command) -> None:
    model = Path(shutil.copytree(tiny.path(), tmp_path / "model"))
    said = json.loads((model / "scheduler" / "scheduler_config.json").read_text())
    (model / "scheduler" / "scheduler_config.json").write_text(json.dumps({**said, "shift": 5.0}))
    done = fluxq(command, quantized, "--model", model, *JUDGING[command])
    assert done.exit_code == 2 and "its scheduler is not what" in done.output, done.output
    assert "shift is 1.0, the base's 5.0" in done.output.replace("\n", " "), done.output


@pytest.mark.parametrize("command", ["eval", "bench", "debug"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "fluxq_plan.json").unlink(), ("its fluxq_plan.json is missing", "fetch it too")),
        (lambda folder: shutil.rmtree(folder), ("out is no folder", "fluxq quantize")),
        (lambda folder: (folder / "fluxq_plan.json").write_text("{"), ("not valid JSON",)),
        (lambda folder: (folder / "fluxq_plan.json").write_text("{}"), ("damaged",)),
    ],
)
def test_what_is_no_checkpoint_is_refused(quantized: Path, command: str, damage: Callable, words) -> None:
    damage(quantized)
    done = fluxq(command, quantized)
    assert done.exit_code == 2 and all(word in done.output for word in words), done.output
    assert "Traceback" not in done.output


def test_another_model_is_not_compared_with(quantized: Path, tiny_folder: Path) -> None:
    file = next((tiny_folder / "transformer").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["proj_out.bias"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    done = fluxq("eval", quantized, "--model", tiny_folder)
    assert done.exit_code == 2 and "is not what" in done.output and "--model" in done.output
    assert not (quantized / "eval").exists()


def test_the_command_of_a_report_has_all_that_decides_its_figures() -> None:
    given: dict[str, Any] = {"model": "tiny", "revision": "v1", "weights": "nets", "clip": "a/b", "fid_resize": "tf1"}
    options = judge.JudgeOptions(**given, fid_reference=Path("photos"), local_files_only=True)
    subject: Any = SimpleNamespace(options=options, quantized=SimpleNamespace(name="out"), output=Path("out"))
    words = "--model tiny --revision v1 --weights nets --clip a/b --fid-resize tf1 --fid-reference photos"
    assert judge._command(subject) == f"fluxq eval out {words}"


def test_nobodys_home_is_in_a_report(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    options = judge.JudgeOptions(model="/home/someone/flux", weights="hub", fid_reference=Path("/home/someone/photos"))
    reference, quantized = SimpleNamespace(folder="/home/someone/flux"), SimpleNamespace(name="out")
    subject: Any = SimpleNamespace(options=options, reference=reference, quantized=quantized, output=Path("out"))
    words = "--model '~/flux' --weights hub --fid-reference '~/photos'"  # which fluxq reads without a shell
    assert judge._command(subject) == f"fluxq eval out {words}" and judge._source(subject) == "~/flux"


@pytest.mark.parametrize(("count", "words"), [(2, []), (5, ["p.txt has 2 of the 5 prompts: they start over"])])
def test_prompts_that_start_over_are_told(monkeypatch, count: int, words: list[str]) -> None:
    monkeypatch.setattr(judge, "outputs_of", lambda _: ("images",))
    monkeypatch.setattr(judge, "default_frames", lambda _: None)
    prompts = PromptSet("p.txt", (PromptRow("a"), PromptRow("b")))
    protocol = SimpleNamespace(name="smoke", count=count, seeds=1)
    subject: Any = SimpleNamespace(protocol=protocol, prompts=prompts, folder=None, call={})
    reference: Any = SimpleNamespace(images=[SimpleNamespace(shape=(3, 512, 512))])
    warnings = judge._warnings(subject, reference)
    assert len(warnings) == bool(words) and all(word in warnings[0] for word in words)


def test_one_quantized_pipeline_is_in_memory_at_a_time(monkeypatch) -> None:
    class Pipe:
        """An open pipeline."""

    alive, before = weakref.WeakSet(), []

    def opened(_device: str) -> Pipe:
        before.append(len(alive))
        alive.add(pipe := Pipe())
        return pipe

    for name in ("follow", "drift", "served", "makes_video", "_named", "_size", "_origin", "_listed", "_gates"):
        monkeypatch.setattr(judge, name, lambda *_, **__: {})
    record = SimpleNamespace(**dict.fromkeys(("recipe", "identity", "model"), SimpleNamespace(name="", recipe="")))
    record.model.digests = {}
    side = SimpleNamespace(open=opened, fewer=None, cache=None, digest="")
    options = judge.JudgeOptions(device="cpu")
    known = {"options": options, "record": record, "reference": side, "quantized": side, "folder": None, "call": {}}
    subject: Any = SimpleNamespace(items=[("a", 0)], **known)
    sides: list[Any] = [side] * 3
    assert len(judge._candidates(subject, sides, sides[0], 1, 1)) == 3
    assert before == [0] * 5  # the 16-bit one twice, for the path and for its noise floor


def test_the_velocity_error_can_be_named_among_the_metrics(quantized: Path) -> None:
    options = judge.JudgeOptions(metrics=("velocity_error", "ssim"))
    subject = judge.subject_of(quantized, options)
    assert judge._metric_keys(subject, judge._networks(subject))[:2] == ["psnr", "ssim"]


def test_a_report_of_what_was_not_evaluated_names_the_command(quantized: Path, tmp_path: Path) -> None:
    done = fluxq("report", quantized, "-o", tmp_path / "r.html")
    assert done.exit_code != 0 and "fluxq eval" in done.output


def test_a_damaged_report_is_named(evaluated, tmp_path: Path) -> None:
    out, _ = evaluated
    value = json.loads((out / "eval" / "report.json").read_text(encoding="utf-8"))
    for change, words in (({"schema_version": 1}, "schema_version"), ({"surprise": 1}, "surprise")):
        (tmp_path / "report.json").write_text(json.dumps({**value, **change}), encoding="utf-8")
        done = fluxq("report", tmp_path / "report.json", "-o", tmp_path / "r.html")
        assert done.exit_code != 0 and words in done.output and not (tmp_path / "r.html").exists()


@pytest.mark.long  # each engine starts processes of its own
def test_the_engines_give_one_report(quantized: Path, tmp_path: Path) -> None:
    starts = {"local": forked.run, "torchrun": partial(ranks.run, 2), "ray": forked.run}
    reports = {}
    for engine, start in starts.items():
        options = ["--engine", engine, "--images", tmp_path / engine, "--batch-size", 2, *FEW]
        options += ["--workers", 2] if engine == "ray" else []
        done = start("-m", "fluxq", "eval", quantized, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("report:") == 1  # one process speaks
        reports[engine] = json.loads((quantized / "eval" / "report.json").read_text(encoding="utf-8"))
        assert reports[engine].pop("time")["engine"] == engine
        del reports[engine]["created"]
    assert reports["torchrun"] == reports["local"] and reports["ray"] == reports["local"]
