"""The page of a search: its front, the plans that ran, and the table of input groups."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fluxq.cli import cli
from fluxq.eval.report import charts
from fluxq.eval.report.charts import front_chart
from fluxq.eval.report.front import write_front
from fluxq.jobs import judge

UNITS = {"transformer.a <b>": (300, {"nvfp4": 1e-3, "fp8": 1e-5}), "transformer.c": (100, {"nvfp4": 1e-2, "fp8": None})}


def search(**changes: Any) -> dict[str, Any]:
    """The result of a search of two groups."""
    plans = (("adjoint", True, 5.5, 2e-3), ("velocity", False, 5.0, 4e-3), ("swap", False, 5.2, None))
    return {
        "kind": "fluxq auto",
        "model": "small",
        "recipe": "nvfp4",
        "cost_unit": "bits",
        "cost": 5.5,
        "menu": ["nvfp4", "fp8"],
        "measures": ["adjoint"],
        "units": [
            {"unit": name, "option": "nvfp4", "weights": weights, "nmse": nmse}
            for name, (weights, nmse) in UNITS.items()
        ],
        "tried": [
            {"proposed_by": [name], "chosen": chosen, "cost": cost, "predicted_nmse": 1e-3, "nmse": nmse, "images": 16}
            for name, chosen, cost, nmse in plans
        ],
        "front": [{"cost": 4.5, "predicted_nmse": 1e-2}, {"cost": 8.5, "predicted_nmse": 0.0}],
        "predicted_nmse": 1e-3,
        "measured_nmse": 2e-3,
        "agrees": False,
        "images": {"measured": 8, "judged": 16},
        **changes,
    }


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "small-5.5bits.json"
    path.write_text(json.dumps(search()))
    return path


def test_the_chart_has_the_front_and_every_finite_plan(monkeypatch) -> None:
    monkeypatch.setattr(charts, "_svg", lambda spec: "<svg/>")
    lines, dots = (layer["data"]["values"] for layer in front_chart(search()).spec["layer"])
    assert [(row["bits"], row["dB"]) for row in lines if row["line"] == charts.FRONT] == [(4.5, 20.0)]  # 0 is no point
    mixed = {round(row["bits"], 2): row["dB"] for row in lines if row["line"] == charts.MIXED}
    assert mixed[6.5] == pytest.approx(23.01, abs=0.01)  # half of the energy of 20 dB
    assert [(row["plan"], round(row["dB"], 2)) for row in dots] == [(charts.CHOSEN, 26.99), (charts.RAN, 23.98)]


@pytest.mark.slow
def test_the_page_has_plans_and_groups(file, tmp_path) -> None:
    target = tmp_path / "front.html"
    judge.front([file], target)
    page = target.read_text()
    rows = [re.sub(r"<[^>]+>", "|", row) for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)]
    rows = [[cell.strip() for cell in row.split("|") if cell.strip()] for row in rows]
    assert ["adjoint", "(chosen)", "5.5", "30.00", "26.99", "16"] in rows
    assert ["swap", "5.2", "30.00", "–", "16"] in rows
    assert ["transformer.a &lt;b&gt;", "nvfp4", "75 %", "30.00", "50.00"] in rows
    assert ["transformer.c", "nvfp4", "25 %", "20.00", "–"] in rows
    assert "26.99 dB measured, 30.00 dB predicted: they differ by more than a factor of 1.5" in page
    assert "<svg" in page and 'data-chart="front-0"' in page and '"front-0"' in page


@pytest.mark.parametrize(
    ("checkpoints", "words"), [({}, "rounded to nearest"), ({"nvfp4": "max"}, "as they were fitted")]
)
def test_the_page_says_how_layers_ran(tmp_path, monkeypatch, checkpoints, words) -> None:
    monkeypatch.setattr(charts, "_svg", lambda spec: "<svg/>")
    page = write_front(tmp_path / "front.html", [search(checkpoints=checkpoints)]).read_text()
    assert f"Plans that ran, layers {words}, on images" in page


@pytest.mark.slow
def test_the_command_takes_searches_and_refuses_a_mixture(file, tmp_path) -> None:
    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, ["report", *words])

    target = tmp_path / "front.html"
    assert run(str(file), "-o", str(target)).output.endswith(f"report: {target}\n") and target.is_file()
    made = target.stat().st_mtime_ns
    assert run(str(file), "-o", str(target)).exit_code == 0 and target.stat().st_mtime_ns == made
    (tmp_path / "report.json").write_text('{"schema_version": 0}')
    mixed = run(str(file), str(tmp_path / "report.json"), "-o", str(target), "--overwrite")
    assert mixed.exit_code == 2 and "give searches and evaluations a page each" in mixed.output
    nameless = {key: value for key, value in search().items() if key != "model"}
    for content in (search(front=[]), nameless):
        file.write_text(json.dumps(content))
        broken = run(str(file), "-o", str(tmp_path / "other.html"))
        assert broken.exit_code == 1 and re.search("no page can be made of.*search again", broken.output, re.DOTALL)
    assert not (tmp_path / "other.html").exists()
