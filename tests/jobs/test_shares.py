"""`fluxq auto --steps`: formats and a number of computed steps in one budget, what is written, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from diffusers import FlowMatchEulerDiscreteScheduler
from family_pipelines import wan_2

import fluxq
from fluxq import tiny
from fluxq.base.files import read_json
from fluxq.calibrate.capture import final_latents
from fluxq.calibrate.paths import Way, levels_of, list_of
from fluxq.calibrate.runs import squares_of
from fluxq.cli import cli
from fluxq.jobs import choosing, listing
from fluxq.jobs.choosing import choose
from fluxq.jobs.job import JobOptions
from fluxq.jobs.menu import Costs
from fluxq.jobs.search import AutoOptions, Search, auto_options, outline_of, search_of
from fluxq.jobs.shares import Lists
from fluxq.jobs.trials import Bench, Tried
from fluxq.recipes.budget import Share, counts_of_shares, extremes
from fluxq.recipes.recipe import Auto, load_recipe
from fluxq.recipes.step_list import StepList
from fluxq.runtime.skip import recorded_lists
from fluxq.runtime.step_trials import TriedList, computed_of
from tests.jobs.test_choosing import Known, small

STEPS = 6
CALL = {"num_inference_steps": STEPS}
LISTED = AutoOptions(ms=1.0, gpu="rtx5090", measure="velocity", count=1, steps=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listing, "IMAGES", 4)
    return tmp_path


def search(model: Path, options: AutoOptions = LISTED, **job: Any) -> Search:
    how = {"model": str(model), "call": CALL, "dtype": "float32", "device": "cpu", **job}
    return search_of(JobOptions(**how), options)


def budget(model: Path, share: float) -> AutoOptions:
    """A share of the time of 16 bit."""
    costs = search(model, replace(LISTED, ms=None, gate="latent_sqnr>=30")).costs
    return replace(LISTED, ms=share * (extremes(costs.numbers)[1] + costs.fixed))


def run(model: Path, options: AutoOptions, **job: Any) -> dict[str, Any]:
    result = choose(search(model, options, **job))
    assert result is not None
    return result


def a_list(computed: tuple[int, ...] = (0, 2, 5), order: int = 1) -> StepList:
    scheduler: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny.path(), subfolder="scheduler")
    scheduler.set_timesteps(STEPS)
    return list_of(scheduler, computed, order, levels_of(scheduler))


@pytest.fixture(scope="module")
def once(model, tmp_path_factory) -> Path:
    """A folder in which a search was made, of a budget that no plan of all steps fits."""
    place = tmp_path_factory.mktemp("once")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "IMAGES", 4)
        run(model, budget(model, 0.4), output=str(place / "out.yaml"))
    return place


@pytest.fixture
def done(once) -> dict[str, Any]:
    return read_json(once / "out.json")


@pytest.mark.slow
def test_what_is_chosen_is_within_the_budget_and_the_recipe_says_it(model, once, done) -> None:
    steps, (winner,) = done["steps"], [each for each in done["tried"] if each["chosen"]]
    assert sorted(path.name for path in once.iterdir()) == ["out.json", "out.yaml", "small-velocity-errors.safetensors"]
    count = steps["computed"]
    assert 2 <= count < STEPS == steps["total"] and steps["list"]["steps"] == STEPS
    assert len(steps["list"]["compute"]) == winner["computed"] == count
    _, recipe = load_recipe(str(once / "out.yaml"))
    assert recipe.steps is not None and computed_of(recipe.steps.compute or 0, STEPS) == count
    assert f"# nvfp4, with formats and {count} of 6 steps chosen for" in (once / "out.yaml").read_text()
    assert recipe.components["transformer"].overrides
    asked = search(model, budget(model, 0.4), output=str(once / "out.yaml"))
    assert asked.job.finished
    for each in done["tried"]:
        choice = {unit["unit"]: unit["option"] for unit in done["units"]} | each["changes"]
        assert each["cost"] == pytest.approx(asked.cost(choice) * each["computed"] / STEPS)
        assert each["cost"] <= asked.limit * (1 + 1e-9) and each["nmse"] > 0
    assert done["cost"] == winner["cost"] and done["cost_unit"] == "ms"


def test_every_number_of_steps_that_was_looked_at_is_reported(done) -> None:
    shares = {each["computed"]: each for each in done["steps"]["shares"]}
    assert {*counts_of_shares(STEPS, 2)} <= {*shares} and [*shares] == sorted(shares, reverse=True)
    assert shares[STEPS]["list_predicted_nmse"] == 0 and shares[STEPS]["cost"] is None  # none of all steps fits
    errors = [each["list_predicted_nmse"] for each in shares.values()]
    assert errors == sorted(errors)
    for count, share in shares.items():
        ran = [each["nmse"] for each in done["tried"] if each["computed"] == count]
        assert share["nmse"] == (min(ran) if ran else None) and (share["list_nmse"] is None) == (not ran)
        if share["cost"] is not None:
            assert share["predicted_nmse"] >= share["list_predicted_nmse"] and share["cost"] <= done["budget"]["value"]
    assert len([share for share in shares.values() if share["nmse"]]) >= 2
    assert {point["computed"] for point in done["front"]} <= {*shares} and done["front"][0]["computed"] == 2


@pytest.mark.slow
def test_without_it_nothing_speaks_of_steps(model, here) -> None:
    plain = search(model, replace(LISTED, ms=None, gate="latent_sqnr>=1", steps=False))
    listed = search(model, replace(LISTED, ms=None, gate="latent_sqnr>=1"), output="out.yaml")
    assert "lists" not in plain.job.identity
    assert listed.job.identity == plain.job.identity | {"lists": True}
    assert plain.table_digest("velocity") == listed.table_digest("velocity")  # one search takes the other's table
    assert plain.job.output.name == "small-1dB.yaml"
    assert search(model, replace(LISTED, ms=None, gate="latent_sqnr>=1")).job.output.name == "small-1dB-steps.yaml"


def of_error(steps: StepList, predicted: float) -> TriedList:
    return TriedList(steps, predicted, squares=[1e-9], signals=[1.0])


def test_a_plan_runs_with_the_steps_of_its_list(model, here) -> None:
    """In 16 bit it makes the error of the list, as `fluxq.skip_steps` makes it."""
    asked = search(model, budget(model, 0.4))
    pipe, steps = asked.job.load_reference(), a_list()
    bench = Bench(asked, pipe, here / "runs.json")
    plain = dict.fromkeys(asked.offer.units, "16bit")
    tried = bench.run(plain, "mine", listed=of_error(steps, 1e-3))
    with torch.no_grad():
        reference = final_latents(pipe, asked.judging[0], asked.job.call)
        with fluxq.skip_steps(pipe, steps):
            expected = squares_of(final_latents(pipe, asked.judging[0], asked.job.call), reference)
    assert tried.squares == expected and min(expected) > 0
    assert tried.cost == asked.cost(plain) * 3 / STEPS and tried.predicted_of_list == 1e-3
    assert bench.run(plain, "mine").error == 0  # another run, of all steps
    other = replace(steps, order=0)
    assert bench.run(plain, "mine", listed=of_error(other, 1e-3)).squares != expected


def test_plans_are_compared_with_the_predicted_error_of_their_lists() -> None:
    bench, steps = Known(), a_list()
    few, more = (bench.plan(name, 1, [0.0] * 16) for name in ("few", "more"))
    predicted = {"few": 1e-5, "more": 1e-3}
    assert bench.winner(predicted, few, more) == "few"
    few.listed = of_error(steps, 2e-3)
    assert bench.winner(predicted, few, more) == "more"


class Solved:
    """Lists whose errors are known, and what is asked of them."""

    def __init__(self, errors: dict[int, float]) -> None:
        self.asked: list[int] = []
        self.trials: Any = SimpleNamespace(proposed=lambda count: (self.asked.append(count), Way(errors[count], ()))[1])
        self.total, self.coarse = max(errors), counts_of_shares(max(errors), 2)
        self.errors = {count: errors[count] for count in self.coarse}


def test_numbers_of_steps_between_those_beside_the_best_are_looked_at(monkeypatch) -> None:
    """Of 28 steps 17 are best: 16 is found first, and 14 to 18 are looked at then."""
    lists: Any = Solved({count: (1 - count / 28) * 1e-3 for count in range(2, 29)})
    lists.search = SimpleNamespace(limit=17.5, costs=Costs({"unit": {"8": 27.0}}, 1.0))
    lists._refined = lambda solve: Lists._refined(lists, solve)
    lists.best = lambda errors: Lists.best(lists, errors)
    found = lists.best({"unit": {"8": 1e-6}})
    assert [share.computed for share in found][:4] == [17, 16, 15, 14] and lists.asked == [14, 15, 17, 18]
    assert [share.computed for share in Lists.to_run(lists, {"unit": {"8": 1e-6}})] == [17, 16, 13, 11]
    assert lists.asked == [14, 15, 17, 18]


def test_the_plan_of_all_steps_runs_too_where_it_fits() -> None:
    shares = [Share(count, {}, count * 1e-3, 1.0) for count in (16, 17, 13, 19, 11, 23, 28)]
    lists = cast(Any, SimpleNamespace(best=lambda _: shares, coarse=counts_of_shares(28, 2), total=28))
    assert [share.computed for share in Lists.to_run(lists, {})] == [16, 13, 19, 11, 28]
    lists.best = lambda _: [shares[-1], *shares[:-1]]
    assert [share.computed for share in Lists.to_run(lists, {})] == [28, 16, 13, 19]


def test_swaps_stay_within_the_time_of_the_steps_that_are_computed(monkeypatch) -> None:
    """Half of the steps are computed, so that a step may take twice the budget; a swap that takes more is none."""
    table: Any = SimpleNamespace(
        gram=lambda costs: torch.tensor([1e-3, 1e-5, 1e-9]).diag(), predicted=lambda choice: 1e-3
    )
    costs = Costs({"unit": {"4": 1.0, "8": 1.9, "16": 3.0}}, 0.0)
    asked: Any = SimpleNamespace(costs=costs, limit=1.0, offer=SimpleNamespace(choices={"unit": ("4", "8", "16")}))
    listed = of_error(a_list(), 0.0)
    monkeypatch.setattr(choosing, "_proposals", lambda *_: [(["mine"], {"unit": "4"}, listed)])
    ran = []

    class Noted(Known):
        def run(self, choice: Any, *names: str, listed: TriedList | None = None) -> Tried:
            ran.append((choice["unit"], listed))
            tried = self.plan(choice["unit"], 1, [len(ran) * 3.0] * 16)
            tried.listed = listed
            self.tried.append(tried)
            return tried

    choosing._decide(asked, Noted(), {"velocity": table})
    assert ran == [("4", listed), ("8", listed)]


@pytest.mark.slow
def test_an_outline_counts_lists_and_the_fewest_steps(model, here) -> None:
    asked = search_of(
        JobOptions(model=str(model), call=CALL), replace(LISTED, ms=None, gate="latent_sqnr>=30"), writes=False
    )
    plain = replace(asked, options=replace(asked.options, steps=False))
    assert outline_of(asked)["passes"]["lists of steps"] > 0 and "lists of steps" not in outline_of(plain)["passes"]
    assert asked.least_part == 2 / STEPS and plain.least_part == 1
    low = extremes(asked.costs.numbers)[0] + asked.costs.fixed
    with pytest.raises(ValueError, match=r"smallest plan takes .* ms with the fewest steps computed; give at"):
        search(model, replace(LISTED, ms=0.99 * low * 2 / STEPS))
    assert search(model, replace(LISTED, ms=1.01 * low * 2 / STEPS)).limit < low


@pytest.mark.parametrize(
    ("options", "job", "words"),
    [
        ({"ms": None, "bits": 5.5}, {}, r"save time, which --bits does not count; give --ms and --gpu, or --gate and"),
        ({"ms": None, "size": 10**9}, {}, "which --size does not count"),
        ({"ms": None, "gate": "latent_sqnr>=30", "gpu": None}, {}, "which --gate does not count; .*--gate and --gpu"),
        ({"dialect": "comfy"}, {}, "files for comfy hold no list of steps; leave out one"),
        ({"fitted": ("one", "two")}, {}, "the list of steps is that of the first checkpoint; leave out --steps"),
        ({}, {"call": {"num_inference_steps": 2}}, "a call has 2: leave out --steps, or give --num-inference-steps 3"),
        ({}, {"call": {"num_inference_steps": 101}}, "a list is of 2 to 100; give another"),
        ({}, {"recipe": "kept.yaml"}, "recipe kept has `steps` of its own; leave out one of the two"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(model, here, options, job, words) -> None:
    (here / "kept.yaml").write_text("extends: nvfp4\nsteps: {first: 1}\n")
    with pytest.raises(ValueError, match=words):
        search(model, replace(LISTED, **options), **job)
    assert [path.name for path in here.iterdir()] == ["kept.yaml"]


def test_a_scheduler_that_no_list_is_of_is_refused(tiny_folder, here) -> None:
    file = tiny_folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({"_class_name": "FlowMatchHeunDiscreteScheduler"}))
    index = tiny_folder / "model_index.json"
    index.write_text(index.read_text().replace("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"))
    with pytest.raises(ValueError, match=r"evaluates the denoiser twice a step.*lists are for those of first order"):
        search(tiny_folder)


def test_two_denoisers_are_refused(here) -> None:
    torch.manual_seed(0)
    pipe, call = wan_2()
    pipe.save_pretrained("model")
    Path("model", "fluxq_generation.json").write_text(json.dumps({**call, "num_inference_steps": STEPS}))
    with pytest.raises(ValueError, match=r"transformer and transformer_2 share the steps of a call.*`fluxq steps`"):
        search(here / "model", call={})


def test_a_recipe_asks_for_it(here) -> None:
    Path("mine.yaml").write_text("extends: nvfp4\nauto: {ms: 70, gpu: h200, steps: true}\n")
    assert auto_options(load_recipe("mine.yaml")[1], {"steps": False}) == AutoOptions(ms=70, gpu="h200", steps=True)
    for budget in ({"bits": 5.5}, {"gate": "latent_sqnr>=30"}):
        with pytest.raises(ValueError, match="steps that are left out save time alone: write ms and gpu, or gate and"):
            Auto.model_validate({**budget, "steps": True})
    assert Auto(gate="latent_sqnr>=30", gpu="h200", steps=True).steps


@pytest.mark.slow
def test_a_checkpoint_of_the_recipe_has_the_list(model, here) -> None:
    chosen = StepList.from_dict(run(model, budget(model, 0.55), output="chosen.yaml")["steps"]["list"])
    how: dict[str, Any] = {"call": CALL, "check": False, "dtype": "float32", "profile": "rtn"}
    made = fluxq.quantize_pipeline(model, "chosen.yaml", output="out", **how)
    (recorded,) = recorded_lists(tiny.load(folder=made.path).transformer)
    assert recorded == chosen and len(chosen.fitted) == STEPS


@pytest.mark.slow
def test_a_gate_is_held_by_the_cheapest_plan_that_was_tried(model, here) -> None:
    result = run(model, replace(LISTED, ms=None, gate="latent_sqnr>=30"))
    (winner,) = (each for each in result["tried"] if each["chosen"])
    holding = [each for each in result["tried"] if each["sqnr_db"] >= 30]
    assert winner["cost"] == min(each["cost"] for each in holding) and winner["computed"] < STEPS
    plain = run(model, replace(LISTED, ms=None, gate="latent_sqnr>=30", steps=False))
    assert winner["cost"] < plain["cost"]


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_writes_the_same(model, once, done, here, monkeypatch) -> None:
    squares, measure, ran, measured = Bench._squares, listing.measure_velocities, [], []

    def interrupted(bench: Any, *arguments: Any) -> list[float]:
        ran.append(arguments)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return squares(bench, *arguments)

    monkeypatch.setattr(Bench, "_squares", interrupted)
    monkeypatch.setattr(listing, "measure_velocities", lambda *args: (measured.append(1), measure(*args))[1])
    with pytest.raises(KeyboardInterrupt):
        run(model, budget(model, 0.4), output="out.yaml")
    result = run(model, budget(model, 0.4), output="out.yaml")
    assert {**result, "seconds": 0} == {**done, "seconds": 0} and len(measured) == 1
    assert (here / "out.yaml").read_bytes() == (once / "out.yaml").read_bytes() and not list(here.glob(".*"))


@pytest.mark.slow
def test_within_a_bound_of_memory_the_same_is_chosen(model, once, done, here) -> None:
    result = run(model, budget(model, 0.4), output="out.yaml", max_memory=1 << 30)
    assert {**result, "seconds": 0} == {**done, "seconds": 0}


@pytest.mark.slow
def test_guidance_in_two_calls_works(model, here) -> None:
    guided = {**CALL, "true_cfg_scale": 2.0, "negative_prompt": ""}
    result = run(model, budget(model, 0.4), call=guided)
    assert result["steps"]["computed"] < STEPS and math.isfinite(result["measured_nmse"])


@pytest.mark.slow
def test_python_and_the_command_have_it(model, here) -> None:
    ms = budget(model, 0.4).ms
    how: dict[str, Any] = {"gpu": "rtx5090", "measure": "velocity", "count": 1, "dtype": "float32", "device": "cpu"}
    recipe = fluxq.auto(model, ms=ms, steps=True, output="python.yaml", call=CALL, **how)
    assert recipe.steps and recipe.steps.compute
    words = f"auto {model} --ms {ms} --gpu rtx5090 --steps --measure velocity --count 1 --num-inference-steps {STEPS}"
    ran = CliRunner().invoke(cli, [*words.split(), *"-o command.yaml --device cpu --dtype float32".split()])
    assert ran.exit_code == 0, ran.output
    assert f"computed of {STEPS}" in ran.output and "steps computed: 0, " in ran.output
    assert load_recipe("command.yaml")[1] == recipe
    report = CliRunner().invoke(cli, ["report", "command.json", "-o", "front.html"])
    assert report.exit_code == 0 and f" of {STEPS} steps" in (here / "front.html").read_text()
