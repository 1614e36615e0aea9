"""Pipelines that make video through the commands: closing check, eval, bench, debug, report."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from family_pipelines import hunyuan_video, ltx, wan

from fluxq.cli import cli
from fluxq.eval.images.executor import read_video
from fluxq.eval.metrics.schema import Report, read_report
from fluxq.jobs import judge, making

FEW = ("--count", 2, "--backends", "native")
SHORT = {"num_frames": 5}


def fluxq(*arguments: object):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def saved(make, folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    pipe, call = make()
    pipe.save_pretrained(folder)
    (folder / "fluxq_generation.json").write_text(json.dumps({**call, **changes}))
    return folder


def judged(out: Path) -> Report:
    return read_report(out / "eval" / "report.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of a Wan pipeline, and what `fluxq quantize` and `fluxq eval` said of it."""
    folder = tmp_path_factory.mktemp("wan")
    model = saved(wan, folder / "wan", **SHORT)
    quantized = fluxq("quantize", model, "--recipe", "fp8", "-o", folder / "out")
    return folder / "out", quantized, fluxq("eval", folder / "out", *FEW)


@pytest.mark.slow
def test_the_closing_check_compares_videos(made):
    out, quantized, _ = made
    assert quantized.exit_code == 0, quantized.output
    check = json.loads((out / "fluxq_plan.json").read_text())["check"]
    assert check["passed"] and check["finite"] and (check["images"], check["frames"]) == (2, 5)
    assert "(2 videos of 5 frames, 2 steps)" in quantized.output and f"next: fluxq eval {out}" in quantized.output
    assert "2 videos of 5 frames and 2 steps, same prompts and noise" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_gate_of_the_closing_check_is_missed_by_videos(made, tmp_path):
    (tmp_path / "strict.yaml").write_text("extends: fp8\ngates: ['psnr>=90']\n")
    model = made[0].parent / "wan"
    done = fluxq("quantize", model, "--recipe", tmp_path / "strict.yaml", "-o", tmp_path / "out", "--frames", 1)
    assert done.exit_code == 1 and "gate missed: psnr>=90" in done.output and "2 videos of 1 frame," in done.output


@pytest.mark.slow
def test_eval_keeps_the_frames_that_the_pipeline_makes_in_their_order(made):
    out, _, evaluated = made
    assert evaluated.exit_code == 0, evaluated.output
    report = judged(out)
    pipe = DiffusionPipeline.from_pretrained(out.parent / "wan", dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    generators = [torch.Generator().manual_seed(item.seed) for item in report.items]
    call = {**report.call, "prompt": [item.prompt for item in report.items], "generator": generators}
    expected = (pipe(output_type="np", **call).frames * 255).round().astype("uint8")  # (N, F, H, W, 3)
    folders = [path for path in (out.parent / "fluxq-images").glob("*/*") if path.is_dir()]
    kept = [read_video(path).permute(0, 2, 3, 1).numpy() for path in folders]
    assert len(folders) == 2 * 4 and all(each.shape == (5, 16, 16, 3) for each in kept)
    for video in expected:
        assert any((video == each).all() for each in kept)
        assert not any((video[::-1] == each).all() for each in kept)


def test_eval_measures_each_video_frame_by_frame(made):
    report = judged(made[0])
    (run,) = report.runs
    assert report.noun == "video" and report.call["num_frames"] == 5 and len(report.items) == 2
    assert set(run.metrics) >= {"psnr", "worst_frame_psnr", "temporal_psnr", "flicker", "latent_sqnr", "velocity_error"}
    mean = {key: each.value.mean for key, each in run.metrics.items() if each.value}
    assert mean["worst_frame_psnr"] < mean["psnr"] and 0.8 < mean["flicker"] < 1.25
    assert len(run.frames.values) == len(run.frames.floor) == 5
    for image in run.images:
        assert image.values["psnr"] == pytest.approx(sum(image.frame_psnr) / 5)
        assert image.values["worst_frame_psnr"] == min(image.frame_psnr)
    assert run.drift.steps == (0, 1) and run.drift.images == 2
    assert "videos have 5 frames, this pipeline's usually 81" in report.warnings
    assert "missing" in str(run.metrics["lpips"].missing) and "video_distance" not in run.metrics


@pytest.mark.slow
def test_videos_are_short_and_few_where_nobody_says_otherwise(made, tmp_path):
    model, out = saved(wan, tmp_path / "wan"), Path(shutil.copytree(made[0], tmp_path / "out"))
    for folder in (model, out):
        file = folder / "fluxq_generation.json"
        said = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in said.items() if key != "num_frames"}))
    smoke = judge.subject_of(out, judge.JudgeOptions(model=str(model)))
    assert smoke.call["num_frames"] == 25 and len(smoke.items) == 4
    asked = judge.subject_of(out, judge.JudgeOptions(model=str(model), count=3, call={"num_frames": 9}))
    assert asked.call["num_frames"] == 9 and len(asked.items) == 3
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\nb\n")
    standard = judge.subject_of(
        out, judge.JudgeOptions(model=str(model), protocol="standard", prompts=str(prompts), count=2)
    )
    assert standard.call["num_frames"] == 81
    prepared = making.job_of(making.JobOptions(model=str(model), recipe="fp8", output=str(tmp_path / "new")))
    assert prepared.call["num_frames"] == 81 and prepared.check_call["num_frames"] == 25
    assert len(prepared.check_items) == 2


@pytest.mark.slow
def test_a_second_eval_makes_no_video_and_says_the_same(made):
    out = made[0]
    before, folder = judged(out), out.parent / "fluxq-images"
    times = sorted(path.stat().st_mtime_ns for path in folder.rglob("*.png"))
    assert len(times) == 2 * 4 * 5  # both pipelines, and each once more
    assert fluxq("eval", out, *FEW).exit_code == 0
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*.png")) == times
    assert judged(out).model_copy(update={"created": before.created, "time": before.time}) == before


@pytest.mark.slow
def test_bench_times_sizes_with_frames_and_debug_finds_layers(made):
    out = made[0]
    bench = fluxq("bench", out, "--rounds", 3, "--warmup", 1, "--size", "16x16x1")
    assert bench.exit_code == 0 and "1 x 16x16x1" in bench.output, bench.output
    debug = fluxq("debug", out, "--count", 1, "--budget", 4, "--num-inference-steps", 1)
    assert debug.exit_code == 0, debug.output
    report = judged(out)
    (run,) = report.runs
    (speed,) = [each.speed for each in (run, *report.timed) if each.speed]
    assert {row.frames for row in speed.rows} == {1} == {each.frames for each in speed.speedups}
    assert run.debug.layers and run.debug.blocks and run.debug.sqnr_db > 10


@pytest.mark.slow
def test_the_page_speaks_of_videos(made, tmp_path):
    done = fluxq("report", made[0], "-o", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    page, text = (tmp_path / "r.html").read_text(), (tmp_path / "r.md").read_text()
    assert "2 videos of each run against 16 bit" in page and "Worst first" in page
    assert 'data-chart="frames"' in page and "In motion" in page and "the last of them the worst" in page
    assert "PSNR to the 16-bit videos, dB" in text and "| videos |" in text
    assert len(page) < 3_000_000


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("eval", ("--metrics", "video_distance"), ("s3d-d76dad2f.pth", "--weights")),
        ("eval", ("--count", 0), ("--count",)),
        ("bench", ("--size", "16x16x0"), ("480x832x25",)),
    ],
)
def test_what_cannot_be_asked_of_videos(made, command, options, words):
    done = fluxq(command, made[0], *options)
    assert done.exit_code != 0 and all(word in done.output for word in words), done.output


@pytest.mark.slow
def test_frames_are_not_asked_of_images(plain_checkpoint, tmp_path):
    for arguments in (("eval", plain_checkpoint("nvfp4")), ("quantize", "tiny", "-o", tmp_path / "out")):
        done = fluxq(*arguments, "--frames", 5)
        assert done.exit_code == 2 and "a FluxPipeline makes images, which have no frames: leave out" in done.output
    done = fluxq("bench", plain_checkpoint("nvfp4"), "--size", "16x16x5", "--rounds", 3)
    assert done.exit_code == 2
    assert "tiny makes images, which have no frames: write --size as HEIGHTxWIDTH" in done.output
    done = fluxq("eval", plain_checkpoint("nvfp4"), "--metrics", "temporal_psnr")
    assert done.exit_code != 0 and "it is taken of videos, and this model makes images" in done.output


@pytest.mark.long
@pytest.mark.parametrize("make", [ltx, hunyuan_video])
def test_other_families_go_through_all_commands(make, tmp_path):
    model, out = saved(make, tmp_path / "model"), tmp_path / "out"
    for arguments in (
        ("quantize", model, "--recipe", "fp8", "-o", out),
        ("eval", out, *FEW, "--batch-size", 1),
        ("bench", out, "--rounds", 3, "--warmup", 1),
        ("debug", out, "--count", 2, "--budget", 8, "--batch-size", 1),
        ("report", out, "-o", tmp_path / "r.html"),
    ):
        done = fluxq(*arguments)
        assert done.exit_code == 0, done.output
    (run,) = judged(out).runs
    assert run.frames and run.metrics["psnr"].value.mean > 20 and run.debug
    assert run.speed or judged(out).timed  # by itself where other arithmetic was timed than judged
    assert "one with 1 video in a batch" in judged(out).noise_floor  # never two at once
    assert run.debug.floor_sqnr_db > run.debug.sqnr_db  # attention was computed in another way all the same
