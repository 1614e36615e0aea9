"""Tests of `fluxq auto`: what is chosen, what is written, and requests that cannot work."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxq import tiny
from fluxq.calibrate.adjoint import PROBES
from fluxq.calibrate.errors import ErrorTable
from fluxq.jobs import choosing
from fluxq.jobs import search as search_module
from fluxq.jobs.choosing import choose
from fluxq.jobs.chosen import chosen_recipe
from fluxq.jobs.job import JobOptions
from fluxq.jobs.menu import Costs, stored_bits
from fluxq.jobs.planning import job_of
from fluxq.jobs.search import AutoOptions, Search, outline_of, search_of
from fluxq.jobs.trials import Bench, Tried
from fluxq.recipes.budget import extremes
from fluxq.recipes.recipe import load_recipe

CALL = {"num_inference_steps": 1}
DOUBLE, SINGLE = "transformer.transformer_blocks.0", "transformer.single_transformer_blocks.0"
VELOCITY = AutoOptions(bits=5.5, measure="velocity", count=1)


def small(folder: Path, changed: Callable[[str, Tensor], Tensor] = lambda _, weight: weight) -> Path:
    """The embedded pipeline with one block of each kind: 10 units."""
    from diffusers import FluxTransformer2DModel

    shutil.copytree(tiny.path(), folder, ignore=shutil.ignore_patterns("transformer"))
    whole: Any = FluxTransformer2DModel.from_pretrained(tiny.path(), subfolder="transformer")
    cut: Any = FluxTransformer2DModel.from_config({**whole.config, "num_single_layers": 1})
    weights = whole.state_dict()
    cut.load_state_dict({name: changed(name, weights[name]) for name in cut.state_dict()})
    cut.to(torch.bfloat16).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def once(model, tmp_path_factory) -> Path:
    """A folder in which a search was made."""
    place = tmp_path_factory.mktemp("once")
    run(model, output=str(place / "small-5.5bits.yaml"))
    return place


@pytest.fixture
def done(once, here) -> dict[str, Any]:
    """The result of a search in the current folder."""
    shutil.copytree(once, here, dirs_exist_ok=True)
    return json.loads((here / "small-5.5bits.json").read_text())


def search(model: Path, options: AutoOptions = VELOCITY, **job: Any) -> Search:
    return search_of(JobOptions(**{"model": str(model), "call": CALL, **job}), options)


def run(model: Path, options: AutoOptions = VELOCITY, **job: Any) -> dict[str, Any]:
    result = choose(search(model, options, **job))
    assert result is not None
    return result


def chosen(result: Mapping[str, Any]) -> dict[str, str]:
    return {each["unit"]: each["option"] for each in result["units"]}


def schemes(recipe: str, model: Path) -> dict[str, str]:
    """Layer -> scheme, as `fluxq plan` has it."""
    job = job_of(JobOptions(model=str(model), recipe=recipe, call=CALL), writes=False, runs=False)
    return {layer.name: str(layer.scheme) for plan in job.plans for layer in plan.layers}


@pytest.mark.slow
def test_the_recipe_gives_the_plan_within_the_budget(model, here, done) -> None:
    result = done
    assert sorted(path.name for path in here.iterdir()) == [
        "small-5.5bits.json",
        "small-5.5bits.yaml",
        "small-velocity-errors.safetensors",
    ]
    assert (
        result["kind"] == "fluxq auto"
        and len(result["units"]) == 10
        and {"nvfp4", "fp8"} <= set(chosen(result).values())
    )
    before, after = schemes("nvfp4", model), schemes("small-5.5bits.yaml", model)
    bits = weights = 0
    job = job_of(JobOptions(model=str(model), recipe="small-5.5bits.yaml", call=CALL), writes=False, runs=False)
    for each in result["units"]:
        for name in each["layers"]:
            layer = next(la for la in job.plans[0].layers if f"transformer.{la.name}" == name)
            assert str(layer.scheme).partition("-")[0].replace("None", "16bit") == each["option"]
            bits, weights = bits + layer.stored_bits, weights + layer.n * layer.k
    assert bits == pytest.approx(result["cost"] * weights) and bits <= 5.5 * weights
    units = {name.partition(".")[2] for each in result["units"] for name in each["layers"]}
    assert {n: s for n, s in before.items() if n not in units} == {n: s for n, s in after.items() if n not in units}
    overrides = load_recipe("small-5.5bits.yaml")[1].components["transformer"].overrides
    assert overrides and all("% of the error" in each.reason and "of the weights" in each.reason for each in overrides)


@pytest.mark.slow
def test_another_budget_takes_the_table_as_it_is_and_the_same_search_nothing(model, here, done, monkeypatch) -> None:
    made = (here / "small-5.5bits.yaml").stat().st_mtime_ns
    monkeypatch.setattr(choosing, "measure_errors", lambda *_, **__: pytest.fail("measured again"))
    assert run(model, replace(VELOCITY, bits=8.0))["cost"] > done["cost"]
    monkeypatch.setattr(choosing, "Bench", lambda *_: pytest.fail("run again"))
    assert run(model) == done and (here / "small-5.5bits.yaml").stat().st_mtime_ns == made


def test_a_search_whose_options_cost_something_else_is_another_one(model, here, done, monkeypatch) -> None:
    """As where a checkpoint's text encoders, or what a card holds, became larger."""
    monkeypatch.setattr(search_module, "stored_bits", lambda offer: replace(stored_bits(offer), fixed=1))
    with pytest.raises(ValueError, match="exists; give another --output, or --overwrite"):
        search(model)


@pytest.mark.parametrize("changed", ["recipe", "scheduler"])
def test_errors_of_other_steps_or_of_another_pipeline_are_not_taken(model, here, done, changed) -> None:
    (here / "base.yaml").write_text("extends: nvfp4\ncalibration: {steps: 3}\n")
    shutil.copytree(model, here / "copy" / "small")
    file = here / "copy" / "small" / "scheduler" / "scheduler_config.json"
    search(here / "copy" / "small", replace(VELOCITY, bits=8.0))
    if changed == "scheduler":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"shift": 2.0}))
    recipe = {"recipe": "base.yaml"} if changed == "recipe" else {}
    with pytest.raises(ValueError, match=r"errors of another model, .* steps looked at"):
        search(here / "copy" / "small", replace(VELOCITY, bits=8.0), **recipe)


@pytest.mark.slow
def test_searches_repeat_to_the_byte_and_go_on_after_an_interruption(model, here, done, monkeypatch) -> None:
    squares, ran = Bench._squares, []

    def interrupted(bench: Any, choice: Any, number: int, listed: Any) -> list[float]:
        ran.append((choice, number))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return squares(bench, choice, number, listed)

    monkeypatch.setattr(Bench, "_squares", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, output="two/small-5.5bits.yaml")
    assert sorted(path.name for path in (here / "two").glob("[!.]*")) == ["small-velocity-errors.safetensors"]
    monkeypatch.setattr(choosing, "measure_errors", lambda *_, **__: pytest.fail("measured again"))
    result = run(model, output="two/small-5.5bits.yaml")
    assert ran.count(ran[0]) == 1 and ran.count(ran[1]) == 2
    for name in ("small-5.5bits.yaml", "small-velocity-errors.safetensors"):
        assert (here / name).read_bytes() == (here / "two" / name).read_bytes()
    assert {**done, "seconds": 0} == {**result, "seconds": 0}
    assert not list((here / "two").glob(".*"))


@pytest.mark.slow
def test_runs_are_kept_where_the_table_was_there(model, here, done, monkeypatch) -> None:
    """And what another search is writing beside it is left alone."""
    squares, ran = Bench._squares, []

    def interrupted(bench: Any, choice: Any, number: int, listed: Any) -> list[float]:
        ran.append((choice, number))
        if len(ran) == 2:
            raise ZeroDivisionError
        return squares(bench, choice, number, listed)

    monkeypatch.setattr(Bench, "_squares", interrupted)
    part = here / ".small-velocity-errors.safetensors.0123abcd.part"
    part.write_bytes(b"")
    with pytest.raises(ZeroDivisionError):
        run(model, replace(VELOCITY, bits=7.0))
    run(model, replace(VELOCITY, bits=7.0))
    assert ran.count(ran[0]) == 1 and ran.count(ran[1]) == 2
    run(model, replace(VELOCITY, bits=8.0), overwrite=True)
    assert part.exists()


@pytest.mark.slow
def test_a_menu_of_one_is_the_recipe(model, here) -> None:
    result = run(model, replace(VELOCITY, menu=("nvfp4",), bits=4.6))
    assert set(chosen(result).values()) == {"nvfp4"} and len(result["tried"]) == 1
    assert schemes("small-4.6bits.yaml", model) == schemes("nvfp4", model)


@pytest.mark.slow
def test_a_gate_is_held_by_the_cheapest_plan_that_was_tried(model, here) -> None:
    result = run(model, replace(VELOCITY, bits=None, gate="latent_sqnr>=40", gpu="b200"))
    (winner,) = (each for each in result["tried"] if each["chosen"])
    holding = [each for each in result["tried"] if each["nmse"] <= 1e-4]
    assert winner["cost"] == min(each["cost"] for each in holding) and result["cost_unit"] == "ms"
    assert winner["sqnr_db"] >= 40 and "nvfp4" in chosen(result).values()


@pytest.mark.slow
def test_layers_that_the_recipe_sets_apart_stay(model, here) -> None:
    (here / "mine.yaml").write_text(
        "extends: nvfp4\n"
        "components: {transformer: {exclude: ['**.proj_out'], overrides: [\n"
        "  {role: ff_down, weights: {format: int8}, activations: {format: int8}, reason: mine}]}}\n"
    )
    result = run(model, recipe="mine.yaml")
    assert not [unit for unit in chosen(result) if unit.endswith(("0.ff.net.2", "proj_out"))]
    found = schemes("small-5.5bits.yaml", model)
    assert found["transformer_blocks.0.ff.net.2"] == "int8-int8"
    assert found["single_transformer_blocks.0.proj_out"] == "None"


@pytest.mark.slow
def test_layers_that_options_leave_out_are_excluded_by_the_recipe(model, here) -> None:
    kept = {"include": ("transformer_blocks.**",), "exclude": ("**.ff_context.**",)}
    result = run(model, replace(VELOCITY, menu=("nvfp4", "fp8")), **kept)
    assert {name for each in result["units"] for name in each["layers"]} == {
        f"transformer.{name}"
        for name, scheme in schemes("nvfp4", model).items()
        if scheme.startswith("nvfp4") and name.startswith("transformer_blocks") and ".ff_context." not in name
    }
    found = schemes("small-5.5bits.yaml", model)
    assert {found[f"single_transformer_blocks.0.{name}"] for name in ("proj_mlp", "norm.linear")} == {"None"}
    assert found["transformer_blocks.0.ff_context.net.2"] == "None"
    assert found["transformer_blocks.0.norm1.linear"] == schemes("nvfp4", model)["transformer_blocks.0.norm1.linear"]
    assert load_recipe("small-5.5bits.yaml")[1].components["transformer"].exclude[0] == "**.ff_context.**"
    with pytest.raises(ValueError, match=r"pattern 'nothing' matches no"):
        search(model, exclude=("nothing",), output="other.yaml")
    with pytest.raises(ValueError, match="--from takes layers as they were fitted: leave out --include"):
        search(model, replace(VELOCITY, fitted=("out",)), **kept)


@pytest.mark.slow
def test_what_is_loud_gets_the_better_format_and_what_is_silent_nothing(here) -> None:
    """Two units are four times as loud, all else an eighth; weights of one are large, and nothing reads its output."""
    loud = ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.0.proj_out")
    ends = (*loud, "transformer_blocks.0.attn.to_add_out", "ff.net.2", "ff_context.net.2")

    def changed(name: str, weight: Tensor) -> Tensor:
        if "ff_context.net.0.proj" in name:
            return weight * 64
        if "ff_context.net.2" in name:
            return weight * 0
        layer = name.removesuffix(".weight").removesuffix(".bias")
        return weight * (4 if layer.endswith(loud) else 1 / 8 if layer.endswith(ends) else 1)

    planted = small(here / "planted", changed)
    options = replace(VELOCITY, menu=("nvfp4", "fp8"))
    asked = search(planted, replace(options, bits=4.6))
    sizes, units = asked.costs.numbers, [f"transformer.{name}" for name in loud]
    spent = extremes(sizes)[0] + sum(sizes[unit]["fp8"] - sizes[unit]["nvfp4"] for unit in units)
    bits = spent / sum(asked.offer.weights.values()) + 1e-6
    result = run(planted, replace(options, bits=bits, count=2), call={"num_inference_steps": 2})
    assert {unit for unit, option in chosen(result).items() if option == "fp8"} == set(units)
    proposals = {name: each["changes"] for each in result["tried"] for name in each["proposed_by"]}
    assert proposals["weight error"][f"{DOUBLE}.ff_context.net.0.proj"] == "fp8"  # the measure that sees no output


class Known(Bench):
    """Runs with known errors: dB of an image above 30, of two rounds of 8."""

    def __init__(self, prompts: Sequence[int] = range(16)) -> None:
        self.search: Any = SimpleNamespace(judging=[prompts[:8], prompts[8:]], cost=lambda _: 0.0)
        self.decibels: dict[str, Sequence[float]] = {}
        self.tried = []

    def plan(self, name: str, cost: float, decibels: Sequence[float]) -> Tried:
        self.decibels[name] = decibels
        tried = Tried((name,), {"unit": name}, cost)
        self.run_again(tried)
        return tried

    def run_again(self, tried: Tried) -> None:
        new = slice(8 * tried.rounds, 8 * tried.rounds + 8)
        tried.squares += [10 ** (-3 - each / 10) for each in self.decibels[tried.choice["unit"]][new]]
        tried.signals += [1.0] * 8
        tried.prompts += self.search.judging[tried.rounds]
        tried.rounds += 1

    def winner(self, predicted: Mapping[str, float], *tried: Tried) -> str:
        return self.better_of(tried, {"unit": predicted}).choice["unit"]


UNEVEN = [3.0, -3.0, 2.0, -2.0] * 4


def test_runs_refute_plans_and_prediction_chooses_among_the_others() -> None:
    bench, predicted = Known(), {"hoped": 1e-4, "good": 1e-3, "uneven": 2e-3, "broken": 1e-5}
    hoped, good = bench.plan("hoped", 1, [-2.0, -1.0] * 8), bench.plan("good", 9, [0.0] * 16)
    uneven, broken = bench.plan("uneven", 5, UNEVEN), bench.plan("broken", 1, [-math.inf, math.inf, *[9.0] * 14])
    assert bench.winner(predicted, hoped, good, broken) == "good" and good.rounds == 1
    assert bench.winner(predicted, hoped, good, uneven) == "good" and good.rounds == uneven.rounds == 2
    assert bench.winner({**predicted, "uneven": 9e-4}, good, uneven) == "uneven" and hoped.rounds == 1


def test_the_second_round_refutes_what_the_first_leaves_open() -> None:
    bench, predicted = Known(), {"hoped": 1e-4, "good": 1e-3}
    hoped, good = bench.plan("hoped", 1, [*UNEVEN[:8], *[-4.0] * 8]), bench.plan("good", 9, [0.0] * 16)
    assert bench.winner(predicted, hoped, good) == "good"


def test_a_cheaper_plan_is_taken_if_it_loses_next_to_nothing() -> None:
    bench, predicted = Known(), {"good": 1e-3, "level": 2e-3, "less": 3e-3, "exact": 0.0, "same": 0.0}
    good, level = bench.plan("good", 9, [0.0] * 16), bench.plan("level", 7, [-0.06, 0.04] * 8)
    less = bench.plan("less", 5, [-0.16, -0.14, -0.19, 0.1] * 4)
    assert bench.winner(predicted, good, level, less) == "level"
    exact, same = bench.plan("exact", 20, [math.inf] * 16), bench.plan("same", 19, [math.inf] * 16)
    assert bench.winner(predicted, good, level, exact, same) == "same"


def test_a_swap_that_the_table_says_pays_is_taken_unless_runs_refute_it(monkeypatch) -> None:
    table = ErrorTable(("unit",), ("bad", "good"), torch.tensor([[2e-3, 1e-3]]).double(), None, "velocity", {})
    options = {"bad": 0.0, "good": 0.0}
    asked: Any = SimpleNamespace(
        costs=Costs({"unit": options}, 0), limit=1, offer=SimpleNamespace(choices={"unit": tuple(options)})
    )
    monkeypatch.setattr(choosing, "_candidates", lambda *_: {"weight error": {"unit": "bad"}})
    for decibels, winner in ((UNEVEN, "good"), ([-2.0, -1.0] * 8, "bad")):
        bench = Known()
        bench.decibels = {"bad": [0.0] * 16, "good": decibels}
        assert choosing._decide(asked, bench, {"velocity": table}).choice == {"unit": winner}
        assert [each.proposed_by for each in bench.tried] == [("weight error",), ("swap",)]


def test_images_of_one_prompt_refute_nothing() -> None:
    bench, predicted = Known([0] * 16), {"hoped": 1e-4, "good": 1e-3}
    hoped, good = bench.plan("hoped", 1, [-2.0, -1.0] * 8), bench.plan("good", 9, [0.0] * 16)
    assert bench.winner(predicted, hoped, good) == "hoped"


@pytest.mark.slow
def test_modulation_is_units_of_weights_alone_where_it_is_asked_for(model, here) -> None:
    plain, asked = search(model), search(model, replace(VELOCITY, modulation=True))
    more = asked.offer.units.keys() - plain.offer.units.keys()
    assert more == {f"{DOUBLE}.norm1.linear", f"{DOUBLE}.norm1_context.linear", f"{SINGLE}.norm.linear"}
    assert {asked.offer.choices[unit] for unit in more} == {("nvfp4", "fp8", "16bit")}
    assert plain.table_digest("adjoint") != asked.table_digest("adjoint")
    result = run(model, replace(VELOCITY, modulation=True))
    found, options = schemes("small-5.5bits.yaml", model), chosen(result)
    for unit in more:
        option = options[unit]
        assert found[unit.partition(".")[2]] == ("None" if option == "16bit" else f"{option}-16bit")
    assert {options[unit] for unit in more} - {"16bit"} and result["cost"] <= 5.5


def test_modulation_that_the_recipe_leaves_alone_or_sets_apart(model, here) -> None:
    part = "extends: nvfp4\ncomponents: {transformer: {modulation: null, exclude: ['**.norm.linear']}}\n"
    (here / "mine.yaml").write_text(part)
    asked = search(model, replace(VELOCITY, bits=6.0, modulation=True), recipe="mine.yaml")
    names = {name for names in asked.offer.units.values() for name in names if "norm" in name}
    assert names == {f"{DOUBLE}.norm1.linear", f"{DOUBLE}.norm1_context.linear"}
    assert {unit: str(asked.offer.layers["fp8"][unit].scheme) for unit in names} == dict.fromkeys(names, "fp8-16bit")


def test_a_menu_has_16_bit_where_nothing_else_is_quantized(model, here) -> None:
    (here / "mine.yaml").write_text("extends: nvfp4\ncomponents: {transformer: {modulation: null}}\n")
    assert search(model, recipe="mine.yaml").offer.options == ("nvfp4", "fp8", "16bit")


def test_attention_is_not_chosen_over_a_recipe_that_has_it_in_int8(model, here) -> None:
    (here / "mine.yaml").write_text("extends: fp8\ncomponents: {transformer: {attention: int8}}\n")
    with pytest.raises(ValueError, match="between fp8 and 16bit, and the recipe has attention in int8; write"):
        search(model, AutoOptions(ms=1.5, gpu="b200", attention=True), recipe="mine.yaml")


@pytest.mark.slow
def test_attention_of_each_block_is_a_unit_that_takes_time(model, here, monkeypatch) -> None:
    """Planted times: attention in fp8 takes one less, all else is free; the call is too small for it to pay."""
    modelled = search_module.modelled_ms

    def planted(*arguments: Any) -> Costs:
        options = modelled(*arguments).numbers
        return Costs({u: {o: float(o == "16bit" and u.endswith("attn")) for o in options[u]} for u in options}, 0.5)

    monkeypatch.setattr(search_module, "modelled_ms", planted)
    options = AutoOptions(ms=1.5, gpu="b200", menu=("fp8", "16bit"), count=4, attention=True)
    result = run(model, options, dtype="float32")
    units = {each["unit"]: each for each in result["units"]}
    blocks = {unit: each for unit, each in units.items() if not each["layers"]}
    assert blocks.keys() == {f"{DOUBLE}.attn", f"{SINGLE}.attn"}
    coded = [unit for unit in blocks if chosen(result)[unit] == "fp8"]
    assert len(coded) == 1 and result["cost"] == 1.5 and all(each["nmse"]["fp8"] > 0 for each in blocks.values())
    path = coded[0].partition(".")[2]
    assert load_recipe("small-1.5ms.yaml")[1].components["transformer"].attention == {"fp8": [path]}
    job = job_of(JobOptions(model=str(model), recipe="small-1.5ms.yaml", call=CALL), writes=False, runs=False)
    assert job.plans[0].attention == {"fp8": [path]}
    asked = search(model, options, overwrite=True, dtype="float32")
    bench = Bench(asked, asked.job.load_reference(), here / "runs.json")
    errors = [bench.run(dict.fromkeys(chosen(result), "16bit") | {unit: "fp8"}).error for unit in blocks]
    for unit, error in zip(blocks.values(), errors, strict=True):
        assert 0.4 < unit["nmse"]["fp8"] / error < 2.5  # of other images
    assert bench.run(dict.fromkeys(chosen(result), "16bit")).error == 0


@pytest.mark.slow
def test_a_text_encoder_is_a_unit_of_bytes(model, here) -> None:
    how: dict[str, Any] = {"components": ("transformer", "text_encoder_2")}
    options = replace(VELOCITY, bits=None, size=10**12)
    with pytest.raises(ValueError, match="so there is no choice"):
        search(model, options, **how)
    asked = search(model, replace(options, bits=None, size=None, gate="latent_sqnr>=30"), **how)
    costs = asked.costs
    other = costs.numbers["text_encoder_2"]
    size = int(extremes({u: o for u, o in costs.numbers.items() if u != "text_encoder_2"})[0] + costs.fixed)
    size = (size + int(other["fp8"]) + 80_000) // 8
    result = run(model, replace(options, size=size), output="out.yaml", **how)
    unit = next(each for each in result["units"] if each["unit"] == "text_encoder_2")
    assert unit["option"] in ("nvfp4", "fp8") and 0 < unit["nmse"]["fp8"] < unit["nmse"]["nvfp4"] < 1
    assert unit["nmse"]["16bit"] == 0 and 8 * 1e9 * result["cost"] <= 8 * size
    job = job_of(JobOptions(model=str(model), recipe="out.yaml", call=CALL), writes=False, runs=False)
    (plan,) = (plan for plan in job.plans if plan.component == "text_encoder_2")
    assert {str(layer.scheme) for layer in plan.quantized} == {f"{unit['option']}-16bit"}


def test_a_text_encoder_that_stays_in_16_bit_is_not_in_the_recipe(model, here) -> None:
    fp8 = "{weights: {format: fp8}}"
    (here / "mine.yaml").write_text(f"components: {{transformer: {fp8}, text_encoder_2: {fp8}}}\n")
    how: dict[str, Any] = {"recipe": "mine.yaml", "components": ("transformer", "text_encoder_2")}
    asked = search(model, replace(VELOCITY, bits=None, gate="latent_sqnr>=30"), **how)
    choice = {unit: options[0] for unit, options in asked.offer.choices.items()}
    errors = {unit: dict.fromkeys(options, 1.0) for unit, options in asked.offer.choices.items()}
    for option in ("fp8", "16bit"):
        choice["text_encoder_2"] = option
        (here / "out.yaml").write_text(chosen_recipe(asked, choice, errors))
        assert ("text_encoder_2" in load_recipe("out.yaml")[1].components) == (option == "fp8")


def test_a_dialect_decides_what_is_on_the_menu(model, here) -> None:
    assert search(model, replace(VELOCITY, dialect="comfy")).offer.options == ("nvfp4", "fp8_tensor", "16bit")
    assert search(model, replace(VELOCITY, dialect="nunchaku")).offer.options == ("nvfp4",)
    with pytest.raises(ValueError, match=r"no unit can be fp8: comfy has no format for fp8 weights.*leave it out"):
        search(model, replace(VELOCITY, dialect="comfy", menu=("nvfp4", "fp8")))
    with pytest.raises(ValueError, match="no reader of modelopt takes FP8_PER_CHANNEL_PER_TOKEN beside NVFP4"):
        search(model, replace(VELOCITY, dialect="modelopt", menu=("nvfp4", "fp8")))


def test_a_menu_in_python_may_be_words(model, here) -> None:
    import fluxq

    with pytest.raises(ValueError, match=r"the largest plan takes 8\.\d+ bits"):
        fluxq.auto(model, bits=16.0, menu="nvfp4,fp8")


def test_an_outline_says_what_it_takes_and_computes_nothing(model, here) -> None:
    asked = search_of(JobOptions(model=str(model), call=CALL), replace(VELOCITY, gpu="h200"), writes=False)
    found = outline_of(asked)
    assert (found["least"], found["largest"], found["runs"]) == ("4.51 bits", "16.00 bits", 17)
    assert found["passes"] == {"velocity": 1 + 20, "runs": 17 * 4} and found["modelled_seconds"] > 0
    asked = search_of(JobOptions(model=str(model), call=CALL), AutoOptions(bits=5.5, count=2), writes=False)
    assert outline_of(asked)["passes"]["adjoint"] == 2 * (3 + 2 + PROBES)  # of nvfp4 and fp8
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": None}, "no budget: give one of --bits"),
        ({"size": 10**9}, "--bits and --size are 2 budgets: give one"),
        ({"bits": 4.0}, r"the smallest plan takes 4\.50\d\d bits; give at least that"),
        ({"bits": 17.0}, r"fits in 16 bit already, 16\.0000 bits, so there is no choice; leave it"),
        ({"bits": None, "size": 1000}, r"the smallest plan takes 0\.00\d\d GB"),
        ({"bits": None, "ms": 5.0}, "give --gpu too"),
        ({"bits": None, "ms": 5.0, "gpu": "h20000"}, "unknown|no GPU"),
        ({"bits": float("nan")}, "expected a number above 0"),
        ({"bits": None, "size": "9GB"}, "--size '9GB': expected a number above 0"),
        ({"bits": None, "gate": 30}, "gate '30': write metric, comparison and number"),
        ({"bits": None, "gate": "psnr>=30"}, "write 'latent_sqnr>=30'"),
        ({"bits": None, "gate": "latent_sqnr<=30"}, "write 'latent_sqnr>=30'"),
        ({"menu": ("nvfp4", "fp9")}, "unknown format 'fp9'"),
        ({"menu": ("16bit",)}, r"the smallest plan takes 16\.0000 bits"),
        ({"dialect": "comfi"}, "expected one of bfl"),
        ({"bits": None, "gate": "latent_sqnr>=-99999"}, "below 0 dB all is error; write"),
        ({"count": 0}, "at least one image"),
        ({"modulation": True, "fitted": ("one", "two")}, "--from: modulation and attention are those of the first"),
        ({"attention": True}, "takes no bits and no bytes.*give --ms, or --gate with --gpu"),
        ({"attention": True, "bits": None, "gate": "latent_sqnr>=30"}, "give --ms, or --gate with --gpu"),
        (
            {"attention": True, "bits": None, "ms": 1.0, "gpu": "b200", "dialect": "comfy"},
            "files for comfy say nothing",
        ),
        ({"count": 10**9}, "at most 10000"),
        ({"bits": 1e308}, "above 0 and below"),
        ({"bits": 10**400}, "above 0 and below"),
        ({"bits": True}, "above 0 and below"),
        ({"measure": "weights"}, "expected one of velocity, adjoint"),
        ({"bits": None, "ms": 5.0, "gpu": 3}, "unknown GPU '3'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(model, here, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        search(model, replace(VELOCITY, **options))
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("component", "options", "job", "words"),
    [
        ("text_encoder_2", {}, {}, "its bytes count under --size"),
        ("text_encoder", {"bits": None, "size": 10**7, "dialect": "comfy"}, {}, "files for comfy do not hold it"),
        ("text_encoder_2", {"bits": None, "size": 10**7}, {"dtype": "float16"}, "overflow in float16"),
    ],
)
def test_components_that_nothing_weighs_or_measures_stay(model, here, caplog, component, options, job, words) -> None:
    with suppress(ValueError):  # the budget is none of this test's
        asked = search(model, replace(VELOCITY, **options), components=("transformer", component), **job)
        assert component not in asked.offer.units
    assert f"{component}: its format is not chosen: " in caplog.text and words in caplog.text


def test_prompts_are_needed(model, here) -> None:
    (here / "none.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"none\.txt.*no prompt"):
        search(model, prompts="none.txt")
    assert [path.name for path in here.iterdir()] == ["none.txt"]


def test_other_files_are_not_replaced(model, here, done) -> None:
    table, two = here / "small-velocity-errors.safetensors", {"num_inference_steps": 2}
    before = table.read_bytes()
    with pytest.raises(ValueError, match=r"another model, recipe, menu, .* seed, count or number of steps"):
        search(model, replace(VELOCITY, bits=6.0), call=two)
    with pytest.raises(ValueError, match=r"output small-5\.5bits\.yaml exists; give another --output, or --overwrite"):
        search(model, replace(VELOCITY, gpu="h200"))
    with pytest.raises(ValueError, match=r"a recipe is a \.yaml file; call it out\.yaml"):
        search(model, output="out.json")
    assert table.read_bytes() == before
    run(model, replace(VELOCITY, bits=6.0), call=two, overwrite=True)
    assert table.read_bytes() != before


@pytest.mark.parametrize("content", [None, b"", b"half a file"])
def test_what_is_no_table_is_not_replaced(model, here, content) -> None:
    table = here / "small-velocity-errors.safetensors"
    if content is None:
        table.mkdir()
    else:
        table.write_bytes(content)
    with pytest.raises(ValueError, match=r"small-velocity-errors\.safetensors is no table of errors.*move it"):
        search(model, replace(VELOCITY, bits=6.0), overwrite=True)
    assert table.is_dir() if content is None else table.read_bytes() == content


@pytest.mark.slow
def test_a_link_is_followed_and_stays_one(model, here, done) -> None:
    (here / "link.yaml").symlink_to("small-5.5bits.yaml")
    (here / "ahead.yaml").symlink_to("small-6bits.yaml")
    assert run(model, output="link.yaml") == done
    result = run(model, replace(VELOCITY, bits=6.0), output="ahead.yaml")
    assert json.loads((here / "small-6bits.json").read_text()) == result and (here / "ahead.yaml").is_symlink()


@pytest.mark.slow
def test_a_damaged_table_is_measured_again(model, here, done, caplog) -> None:
    table = here / "small-velocity-errors.safetensors"
    whole = table.read_bytes()
    table.write_bytes(whole[:-8] + bytes(8))
    run(model, replace(VELOCITY, bits=6.0))
    assert "damaged since it was written: measured again" in caplog.text and table.read_bytes() == whole


@pytest.mark.slow
def test_python_has_it_too(model, here) -> None:
    from diffusers import FluxPipeline

    import fluxq

    pipe = FluxPipeline.from_pretrained(model, dtype=torch.bfloat16)
    (here / "prompts.txt").write_text("a red three on black\na blue seven on white\n")
    call = {"num_inference_steps": 1, "height": 16, "width": 16, "max_sequence_length": 16}
    options: dict[str, Any] = {"measure": "velocity", "count": 1, "call": call, "prompts": "prompts.txt"}
    recipe = fluxq.auto(pipe, bits=6.0, **options)
    assert recipe == load_recipe("small-6bits.yaml")[1] and recipe.components["transformer"].overrides
    assert {path.name for path in here.glob("small*")} == {
        "small-6bits.json",
        "small-6bits.yaml",
        "small-velocity-errors.safetensors",
    }
    assert fluxq.auto(pipe, bits=6.0, **options) == recipe and not list(here.glob(".*"))
    with pytest.raises(TypeError, match="lora: no such option"):
        fluxq.auto(str(model), bits=6.0, lora=["x.safetensors"])


@pytest.mark.slow
def test_a_model_whose_graph_is_cut_is_measured_by_the_velocity_alone(model, here, monkeypatch, caplog) -> None:
    measure_errors = choosing.measure_errors

    def refused(*arguments: Any, measure: Any, **options: Any) -> Any:
        if measure == "adjoint":
            raise ValueError("no gradient reaches the latents; use the velocity measure")
        return measure_errors(*arguments, measure=measure, **options)

    monkeypatch.setattr(choosing, "measure_errors", refused)
    assert run(model, replace(VELOCITY, measure=None))["measures"] == ["velocity"]
    assert "velocity is measured alone" in caplog.text
    with pytest.raises(ValueError, match="no gradient reaches the latents"):
        run(model, replace(VELOCITY, measure="adjoint", bits=6.0))


@pytest.mark.long
def test_of_all_plans_hardly_one_is_better(model, here) -> None:
    """8 units of 2 options, on the images that decide."""
    (here / "mine.yaml").write_text(
        "extends: nvfp4\n"
        "components: {transformer: {exclude: ['**.to_add_out', 'single_transformer_blocks.0.proj_out']}}\n"
    )
    how: dict[str, Any] = {"recipe": "mine.yaml", "call": {"num_inference_steps": 2}, "dtype": "float32"}
    options = AutoOptions(bits=6.0, menu=("nvfp4", "fp8"), count=4)
    asked = search(model, options, **how)
    bench = Bench(asked, asked.job.load_reference(), here / "every.json")
    units = asked.offer.units
    choices = [dict(zip(units, each, strict=True)) for each in itertools.product(options.menu, repeat=len(units))]
    every = [bench.run(choice) for choice in choices if asked.cost(choice) <= asked.limit]
    assert len(units) == 8 and len(every) > 80
    result = run(model, options, **how)
    mine = next(each for each in every if each.choice == chosen(result))
    assert 10 * math.log10(mine.error / min(each.error for each in every)) < 0.2
    assert result["agrees"]


@pytest.mark.slow
def test_the_checkpoint_is_no_larger_than_the_budget(model, here) -> None:
    from fluxq.base.tensors import TensorFile
    from fluxq.jobs.making import job_of as making_job
    from fluxq.jobs.making import quantize

    (here / "prompts.txt").write_text("a red three on black\na blue seven on white\n")
    result = run(model, replace(VELOCITY, bits=None, size=1_800_000), prompts="prompts.txt")
    assert result["cost_unit"] == "GB" and result["cost"] <= 1_800_000 / 1e9
    options = JobOptions(
        str(model), "small-0.0018GB.yaml", "fast", "out", prompts="prompts.txt", call=CALL, check=False
    )
    quantize(making_job(options))
    files = [TensorFile(file) for file in (here / "out").rglob("*.safetensors")]
    quantized = sum(
        stored.nbytes for file in files if "transformer" in str(file.path) for stored in file.stored.values()
    )
    copied = sum(file.path.stat().st_size for file in files if "transformer" not in str(file.path))
    assert 0.95 * result["cost"] <= (quantized + copied) / 1e9 <= result["cost"]
