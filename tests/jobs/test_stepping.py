"""`fluxq steps`: the list that is written, under a share or a gate, gone on with, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import diffusers
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import fluxq
from fluxq import tiny
from fluxq.calibrate.paths import Velocities, Way
from fluxq.cli import cli
from fluxq.commands.exchanging import OF_LISTS
from fluxq.jobs import listing, stepping
from fluxq.jobs.job import JobOptions
from fluxq.recipes.step_exports import read_mask
from fluxq.recipes.step_list import StepList
from fluxq.runtime import step_trials
from fluxq.runtime.skip import read_list, skip_steps

OPTIONS = JobOptions(model="tiny", dtype="float32", device="cpu", output="out.json", call={"num_inference_steps": 6})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(**how: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"compute": 0.5} | how
    return stepping.make_list(stepping.request_of(OPTIONS, count=4, **given))


@pytest.mark.slow
def test_a_list_is_written_whole_and_runs(here) -> None:
    result = made()
    stored = json.loads(Path("out.json").read_text())
    assert stored == result and [*here.iterdir()] == [here / "out.json"]
    assert (result["kind"], result["model"], result["list"]["steps"]) == ("fluxq steps", "tiny", 6)
    assert [(row["order"], row["fitted"]) for row in result["tried"][:3]] == [(0, False), (1, False), (2, False)]
    plain = min(result["tried"][:3], key=lambda row: row["measured_nmse"])
    assert result["tried"][3]["fitted"] and result["tried"][3]["order"] == plain["order"] == result["list"]["order"]
    assert result["measured_nmse"] < plain["measured_nmse"] / 2 and len(result["list"]["fitted"]) == 6
    assert result["measured_nmse"] == min(row["measured_nmse"] for row in result["tried"])
    assert [row["computed"] for row in result["curve"]] == [2, 3, 4, 5, 6]
    assert result["curve"][-1]["predicted_nmse"] == 0
    steps = read_list(Path("out.json"))
    assert len(steps.computed) == 3 and steps.models.keys() == {"transformer"}
    pipe = tiny.load()
    with skip_steps(pipe, "out.json") as skipped:
        pipe("a red three on black", **{**tiny.CALL_KWARGS, "num_inference_steps": 6})
    assert (skipped.calls, skipped.computed) == (6, 3)


@pytest.mark.slow
def test_the_same_request_is_finished_and_another_one_refused(monkeypatch) -> None:
    first = made()
    before = Path("out.json").read_bytes()
    assert stepping.request_of(OPTIONS, compute=0.5, count=4).job.finished
    assert made() == first and Path("out.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"output out\.json exists; give another --output, or --overwrite"):
        made(compute=0.9)
    Path("out.json").write_text(Path("out.json").read_text().replace('"order": 0', '"order": 1', 1))
    with pytest.raises(ValueError, match=r"output out\.json exists"):
        made()


@pytest.mark.slow
def test_another_text_encoder_is_another_request(tiny_folder) -> None:
    options = replace(OPTIONS, model=str(tiny_folder))
    stepping.make_list(stepping.request_of(options, compute=0.5, count=4))
    assert stepping.request_of(options, compute=0.5, count=4).job.finished
    file = tiny_folder / "text_encoder" / "model.safetensors"
    weights = {name: 2 * weight for name, weight in load_file(file).items()}
    file.unlink()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"output out\.json exists"):
        stepping.request_of(options, compute=0.5, count=4)


def test_an_interrupted_run_goes_on(monkeypatch) -> None:
    measured, ran = [], []
    measure, run = listing.measure_velocities, step_trials.Trials._squares

    def broken(self: Any, steps: Any) -> Any:
        ran.append(steps)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(self, steps)

    monkeypatch.setattr(listing, "measure_velocities", lambda *args: (measured.append(1), measure(*args))[1])
    monkeypatch.setattr(step_trials.Trials, "_squares", broken)
    with pytest.raises(KeyboardInterrupt):
        made()
    assert not Path("out.json").exists() and len([*Path().glob(".out.json.*.work")]) == 1
    with pytest.raises(ValueError, match="interrupted run that differs in compute"):
        made(compute=0.9)
    made()
    assert len(measured) == 1 and len(ran) == 5  # the first list's run is kept
    assert not [*Path().glob(".out.json.*.work")]


@pytest.mark.slow
def test_a_list_is_the_same_within_a_bound_of_memory(tight) -> None:
    plain = made()
    bounded = stepping.request_of(replace(OPTIONS, output="bounded.json", max_memory=1 << 30), compute=0.5, count=4)
    assert stepping.make_list(bounded) == plain
    assert len(tight) == 1 and tight[0].resident_bytes < 1 << 20  # of 7 MB
    with pytest.raises(ValueError, match=r"--max-memory 1MiB: running transformer on .* needs .*; give at least that"):
        stepping.request_of(replace(OPTIONS, output="less.json", max_memory=1 << 20), compute=0.5, count=4)


@pytest.mark.slow
def test_a_gate_takes_the_fewest_steps_that_hold_it() -> None:
    result = made(compute=None, gate="latent_sqnr>=30")
    assert result["sqnr_db"] >= 30
    fewer = made_with(len(result["list"]["compute"]) - 1)
    assert fewer["sqnr_db"] < 30
    with pytest.raises(RuntimeError, match=r"no list that was tried holds latent_sqnr>=90 .*lower the gate"):
        stepping.make_list(stepping.request_of(replace(OPTIONS, output="no.json"), gate="latent_sqnr>=90", count=4))


def test_a_gate_is_held_by_the_fewest_between_those_that_ran() -> None:
    """A number that predictions jump over is run too."""
    decibels = {2: 10.0, 3: 19.9, 4: 21.0, 5: 29.0, 6: 60.0}
    predicted = {2: 0.02, 3: 0.019, 4: 0.018, 5: 0.001, 6: 0.0}
    ran = []

    class Drawn:
        ways: ClassVar = {count: Way(nmse, (0, 5)) for count, nmse in predicted.items()}
        velocities = SimpleNamespace(levels=range(6))

        def best(self, count: int) -> Any:
            ran.append(count)
            return SimpleNamespace(decibels=decibels[count], count=count)

    def fewest(gate: str) -> tuple[int, list[int]]:
        ran.clear()
        made: Any = stepping._under_gate(cast("Any", SimpleNamespace(gate=gate)), cast("Any", Drawn()))
        return made.count, [*ran]

    assert fewest("latent_sqnr>=20") == (4, [5, 2, 4, 3])
    assert fewest("latent_sqnr>=5") == (2, [2])
    with pytest.raises(RuntimeError, match=r"the best has 29\.0 dB"):
        fewest("latent_sqnr>=50")


@pytest.mark.slow
def test_a_mask_is_judged_as_other_lists_are(here) -> None:
    """Its own steps are computed, and a list that was made costs as a mask what it did."""
    result = made(compute=None, mask="1,1,0,1,0,1")
    assert result["list"]["compute"] == [0, 1, 3, 5] and result["list"]["steps"] == 6
    assert result["measured_nmse"] == min(row["measured_nmse"] for row in result["tried"]) > 0
    own = made_with(3)
    mask = [int(step in own["list"]["compute"]) for step in range(6)]
    again = stepping.make_list(stepping.request_of(replace(OPTIONS, output="mask.json"), count=4, mask=mask))
    assert again["tried"] == own["tried"] and again["list"] == own["list"]


@pytest.mark.slow
def test_what_is_predicted_of_the_best_list_is_with_exchanges(monkeypatch) -> None:
    """Of its own number of steps, and of that of a mask, which is compared with it."""
    ways = Velocities.ways
    monkeypatch.setattr(Velocities, "ways", lambda self, _=(): ways(self) | {3: self._way((0, 1, 5))})
    result = made()
    best = result["tried"][3]["predicted_nmse"]
    assert result["list"]["compute"] != [0, 1, 5] and result["curve"][1]["predicted_nmse"] == pytest.approx(
        best, rel=0.01
    )
    options = replace(OPTIONS, output="mask.json")
    judged = stepping.make_list(stepping.request_of(options, count=4, mask="1,1,0,0,0,1"))
    assert judged["curve"] == result["curve"] and judged["tried"][3]["predicted_nmse"] > 1.1 * best


def test_the_steps_of_a_mask_are_those_of_the_call() -> None:
    options = replace(OPTIONS, call={})
    assert stepping.request_of(options, mask="1,1,0,1").job.call["num_inference_steps"] == 4
    with pytest.raises(ValueError, match=r"mask is of 4 steps, and the call has 6: give --num-inference-steps 4"):
        stepping.request_of(OPTIONS, mask="1,1,0,1")


def test_a_mask_that_leaves_out_the_first_step_of_a_denoiser_is_refused() -> None:
    levels = (1.0, 0.8, 0.5, 0.2)
    called = ("transformer", "transformer", "transformer_2", "transformer_2")
    velocities = Velocities(np.eye(4), np.tril(np.ones((4, 4))), called, levels, 1.0)
    trials = step_trials.Trials(None, velocities, (), {})
    with pytest.raises(ValueError, match=r"leaves out the first step of a denoiser; compute step 2 \(transformer_2\)"):
        trials.judged([0, 1, 3])


@pytest.mark.slow
def test_a_list_is_exported_and_its_mask_judged(here) -> None:
    made(compute=None, mask="1,1,0,1,0,1")
    for name in OF_LISTS:
        run = CliRunner().invoke(cli, ["export", "out.json", "--format", name])
        assert run.exit_code == 0 and f"out-{name}.yaml" in run.output, run.output
        again = CliRunner().invoke(cli, ["export", "out.json", "--format", name, "--json"])
        assert json.loads(again.output) == {"list": f"out-{name}.yaml"}
    assert read_mask("out-cache-dit.yaml") == (1, 1, 0, 1, 0, 1)
    diffusers.TaylorSeerCacheConfig(**yaml.safe_load(Path("out-taylorseer.yaml").read_text()))
    Path("out-cache-dit.yaml").write_text("mine: 1")
    for extra, message in (
        ((), "out-cache-dit.yaml exists"),
        (("--requantize",), "is of a list of steps, which has no layers: leave out --requantize"),
        (("-o", "x.json"), "call it x.yaml"),
    ):
        refused = CliRunner().invoke(cli, ["export", "out.json", "--format", "cache-dit", *extra])
        assert refused.exit_code == 2 and message in refused.output
    assert Path("out-cache-dit.yaml").read_text() == "mine: 1"


def test_what_is_exported_of_a_checkpoint_has_its_whole_name(monkeypatch) -> None:
    monkeypatch.setattr(stepping, "_list_at", lambda path: StepList((0, 2), 1, (1.0, 0.5, 0.25), "A"))
    for name in ("FLUX.1-dev-nvfp4", "FLUX.1-dev-nvfp4.json"):  # a folder, and a list of `fluxq steps`
        assert stepping.export_list(Path(name), "cache-dit", overwrite=True) == Path("FLUX.1-dev-nvfp4-cache-dit.yaml")


def made_with(count: int) -> dict[str, Any]:
    request = stepping.request_of(replace(OPTIONS, output="few.json"), compute=count / 6, count=4)
    return stepping.make_list(request)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "give --compute, --gate or --mask"),
        ({"compute": 0.5, "mask": "1,1"}, "one of them alone"),
        ({"compute": 0.5, "gate": "latent_sqnr>=30"}, "one of them alone"),
        ({"compute": 1.5}, "above 0 and at most 1"),
        ({"compute": float("nan")}, "above 0 and at most 1"),
        ({"gate": "psnr>=30"}, "measure the final latents alone"),
        ({"compute": 0.5, "count": 3}, "--count 3: so few images say too little of others; take 4 or more"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(how, message) -> None:
    with pytest.raises(ValueError, match=message):
        stepping.request_of(OPTIONS, **how)
    assert not [*Path().iterdir()]


def test_other_outputs_and_calls_are_refused(tiny_folder) -> None:
    with pytest.raises(ValueError, match=r"a list of steps is a \.json file; call it list\.json"):
        stepping.request_of(replace(OPTIONS, output="list.yaml"), compute=0.5)
    with pytest.raises(ValueError, match="a call of 1 step: a list is of 2 to 100; give another num_inference_steps"):
        stepping.request_of(replace(OPTIONS, call={"num_inference_steps": 1}), compute=0.5)
    with pytest.raises(ValueError, match="lies in"):
        stepping.request_of(replace(OPTIONS, model=str(tiny_folder), output=str(tiny_folder / "s.json")), compute=0.5)
    Path("mine.json").write_text("{}")
    with pytest.raises(ValueError, match=r"nothing marks mine\.json as fluxq's"):
        stepping.request_of(replace(OPTIONS, output="mine.json", overwrite=True), compute=0.5)


@pytest.mark.slow
def test_the_command_prints_the_list_and_the_verb_returns_it() -> None:
    words = ["steps", "tiny", "--compute", "0.5", "--count", "4", "--dtype", "float32", "--num-inference-steps", "6"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert "computed of 6" in done.output and "list: tiny-steps.json" in done.output
    again = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    steps = read_list(Path("tiny-steps.json"))
    assert again["list"] == steps.to_dict()
    call = {"num_inference_steps": 6}
    assert fluxq.choose_steps("tiny", compute=0.5, count=4, call=call, dtype="float32") == steps
    with pytest.raises(TypeError, match="include: no such option"):  # which a search takes
        fluxq.choose_steps("tiny", compute=0.5, include=["a"])
    with pytest.raises(ValueError, match="below 0 dB all is error"):
        fluxq.choose_steps("tiny", gate="latent_sqnr>=-99999")
    with pytest.raises(TypeError, match="bits: no such option"):
        fluxq.choose_steps("tiny", compute=0.5, bits=4)
