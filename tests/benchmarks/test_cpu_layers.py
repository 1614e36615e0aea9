"""The benchmark of layers on a CPU, cut down: that every recipe runs in every layout, and what becomes of its times."""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

from fluxq.base.devices import instructions
from fluxq.recipes.recipe import shipped_recipes

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_layers.py"
RESULT = SCRIPT.with_suffix(".json")


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr("sys.path", [*sys.path])  # the script puts folders in front
    spec = importlib.util.spec_from_file_location("cpu_layers", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_layers", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_recipe_is_timed_in_every_layout(script, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(script, "SMALL", ((5, 64, 384),))
    arguments = ["--small", "--rounds", "2", "--out", str(tmp_path / "found.json")]
    threads = torch.get_num_threads()
    done = CliRunner().invoke(script.main, arguments, catch_exceptions=False)
    torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["instructions"] == str(instructions()) and len(found["goals"]) == len(script.GOALS)
    rows = {(row["layer"], row.get("layout")): row for row in found["rows"]}
    expected = {(recipe, layout) for recipe in shipped_recipes() for layout in ("codes", "decoded")}
    of_codes = {"int8", "int8-convrot"}  # multiplied as they are: nothing is decoded beforehand
    never = {(recipe, "decoded") for recipe in of_codes}
    assert rows.keys() >= (expected - never) | {("fp32", None), ("bf16", None)}
    assert all(row["ms"] > 0 for row in rows.values())
    for recipe in shipped_recipes():
        row = rows[recipe, "codes"]
        alone = "product of codes alone over bf16" if recipe in of_codes else "decoding over fp32"
        assert {"fp32", "bf16", "baseline", alone} <= row.keys()
    assert rows["nvfp4", "decoded"]["bytes"] - rows["nvfp4", "codes"]["bytes"] == 4 * 64 * 384


def test_ratios_are_of_the_same_round_and_goals_judge_the_worst(script) -> None:
    assert script._ratio([2.0, 4.0, 9.0], [1.0, 4.0, 3.0]) == {"ratio": 2.0, "low": 1.0, "high": 3.0}

    def row(layer: str, ratio: float, m: int = 320, layout: str = "codes") -> dict:
        found = {"ratio": ratio, "low": ratio, "high": ratio}
        return {"layer": layer, "m": m, "n": 9, "k": 7, "layout": layout, "fp32": found, "bf16": found}

    rows = [
        row("int8", 1.2),
        row("int8", 1.1),
        row("fp8", 3.0),
        row("int8", 9.0, m=1),
        row("int8", 9.0, layout="speed"),
    ]
    goal = script.Goal("int8", "codes", "int8", "fp32", 1.15, script.NONE)
    found = script._judged(goal, rows, ())
    assert found["verdict"] == "met by 1 of 2 layers" and found["measured"].startswith(
        "1.20 (1.20 to 1.20), int8 at 9 x 7"
    )
    assert script._judged(goal, rows, ("VNNI",))["verdict"] == "not asked of this CPU"
    with_vnni = script.Goal("int8", "codes", "int8", "bf16", 1.2, ("VNNI",))
    assert script._judged(with_vnni, rows, ("VNNI", "BF16"))["verdict"] == "met"
    assert script._judged(with_vnni, rows, ())["verdict"] == "not asked of this CPU"


def test_the_tables_are_those_of_the_result_that_is_kept(script) -> None:
    page, found = script.PAGE.read_text(encoding="utf-8"), json.loads(RESULT.read_text())
    assert script.with_tables(page, found) == page
    worse = copy.deepcopy(found)
    for row in worse["measured"][0]["rows"]:
        if "baseline" in row:
            row["baseline"]["ratio"] += 1
    assert script.with_tables(page, worse) != page
    worse = copy.deepcopy(found)
    worse["measured"][0]["goals"][0]["verdict"] = "missed"
    assert script.with_tables(page, worse) != page
    with pytest.raises(ValueError, match="no marks <!-- cpu layers: begin -->"):
        script.with_tables("nothing", found)


def test_instructions_nobody_knows_are_refused(script) -> None:
    done = CliRunner().invoke(script.main, ["--isa", "mmx"])
    assert done.exit_code == 2 and "no instructions are called 'mmx'; there are: native" in done.output


def test_the_result_that_is_kept_says_what_it_was_measured_with(script) -> None:
    kept = json.loads(RESULT.read_text())
    assert "-dirty" not in kept["commit"] and kept["threads"] == 1
    assert {"torch", "machine"} <= kept["versions"].keys() and "avx2" in kept["flags"]
    measured = {part["isa"]: part for part in kept["measured"]}
    assert script.NATIVE in measured and "avx2" in measured
    for name, part in measured.items():
        variables = {**next(isa for isa in script.ISAS if isa.name == name).variables}
        assert part["limited_by"].items() >= variables.items() and part["instructions"]
