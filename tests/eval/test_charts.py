import re
import xml.etree.ElementTree as xml

import example_report
import pytest

from fluxq.eval.metrics.schema import Curve, Estimate, Image, Report
from fluxq.eval.report import charts
from fluxq.eval.report.charts import (
    cost_charts,
    damage_charts,
    dominated,
    drift_charts,
    frame_chart,
    image_chart,
    javascript,
    stage_chart,
)
from fluxq.eval.report.summary import first_speed


@pytest.fixture(scope="module")
def three() -> Report:
    return example_report.example(3)


@pytest.fixture
def no_svg(monkeypatch):
    """For tests of what is drawn and not of the drawing."""
    monkeypatch.setattr(charts, "_svg", lambda spec: "<svg/>")


def rows(drawing, *having):
    """All rows of a drawing's data that have these keys."""
    found = [each for values in _values(drawing.spec) for each in values if set(having) <= each.keys()]
    return [dict(each) for each in dict.fromkeys(tuple(sorted(each.items(), key=str)) for each in found)]


def _values(spec):
    if isinstance(spec, dict):
        for key, value in spec.items():
            if key == "values" and isinstance(value, list):
                yield value
            else:
                yield from _values(value)
    elif isinstance(spec, list):
        for each in spec:
            yield from _values(each)


@pytest.mark.parametrize(
    ("points", "better", "expected"),
    [
        ([(4, 30), (8, 40), (8, 35), (5, 29)], "higher", [False, False, True, True]),
        ([(4, 0.3), (8, 0.1), (8, 0.2)], "lower", [False, False, True]),
        ([(4, 30), (4, 30)], "higher", [False, False]),
        ([(4, 30), (4, 31)], "higher", [True, False]),
        ([], "higher", []),
    ],
)
def test_dominated_is_as_good_or_better_and_no_dearer(points, better, expected):
    assert dominated(points, better) == expected


@pytest.mark.slow
def test_quality_is_drawn_against_compute_where_a_run_leaves_steps_out(three, no_svg):
    plain, cached, fewer = three.runs
    cached = cached.model_copy(update={"cache": "list 0.5", "computed": 0.5})
    fewer = fewer.model_copy(update={"cache": "14 steps", "computed": 0.5})
    drawings = cost_charts(three.model_copy(update={"runs": (plain, cached, fewer)}))
    (drawing,) = [each for each in drawings if each.key == "cost-compute"]
    points = [row for row in rows(drawing, "cost", "value", "front") if row["metric"] == "psnr"]
    assert [(row["run"], row["cost"]) for row in points] == [(plain.name, 1.0), (cached.name, 0.5), (fewer.name, 0.5)]
    assert [row["front"] for row in points] == ["no", "yes", "no"]


@pytest.mark.slow
def test_cost_charts_hold_every_run_with_its_interval_and_cost(three, no_svg):
    bits, latency, memory = cost_charts(three)
    for drawing, expected in ((bits, [4.5, 8.02, 4.3]), (latency, None), (memory, None)):
        points = [row for row in rows(drawing, "cost", "value", "front") if row["metric"] == "psnr"]
        assert [row["run"] for row in points] == [run.name for run in three.runs]
        assert expected is None or [row["cost"] for row in points] == expected
        for row, run in zip(points, three.runs, strict=True):
            value = run.metrics["psnr"].value
            assert (row["value"], row["low"], row["high"]) == (value.mean, value.low, value.high)
    fronts = {
        drawing.key: [row["front"] for row in rows(drawing, "front") if row["metric"] == "psnr"]
        for drawing in (bits, latency)
    }
    assert fronts == {"cost-bits": ["yes", "yes", "yes"], "cost-latency": ["yes", "yes", "no"]}
    fid = {row["run"]: row for row in rows(latency, "front") if row["metric"] == "fid"}
    assert fid["16 bit"]["value"] == 24.1 and fid["schnell-int4-svd"]["front"] == "no"  # lower is better
    floor = [row for row in rows(bits, "remark") if row["remark"].startswith("noise floor") and row["metric"] == "psnr"]
    assert [(row["low"], row["value"], row["high"]) for row in floor] == [(46.0, 47.1, 48.2)]
    assert "lpips" not in bits.choices and next(iter(bits.choices)) == "psnr"


@pytest.mark.slow
def test_a_file_that_is_re_encoded_in_memory_dominates_nothing_for_its_size_on_disk(three, no_svg):
    stored = three.runs[0]
    as_int8 = three.runs[1].model_copy(
        update={"name": "as int8", "size": stored.size, "served": example_report.served(8.25, "int8"), "speed": None}
    )
    drawing = cost_charts(three.model_copy(update={"runs": (stored, as_int8)}))[0]
    points = [row for row in rows(drawing, "front") if row["metric"] == "psnr" and row["run"] != "16 bit"]
    assert [(row["cost"], row["front"]) for row in points] == [(4.5, "yes"), (8.25, "yes")]
    assert points[1]["value"] > points[0]["value"]  # closer to 16 bit, and not at no more cost
    blind = [run.model_copy(update={"served": None}) for run in (stored, as_int8)]
    drawing = cost_charts(three.model_copy(update={"runs": tuple(blind)}))[0]
    assert "no" in [row["front"] for row in rows(drawing, "front") if row["metric"] == "psnr"]


@pytest.mark.slow
def test_names_that_would_cover_each_other_share_a_label(three, no_svg):
    twin = three.runs[0].model_copy(update={"name": "twin"})
    report = three.model_copy(update={"runs": (*three.runs, twin)})
    labels = {row["run"]: row["label"] for row in rows(cost_charts(report)[0], "label") if row["metric"] == "psnr"}
    assert labels["schnell-nvfp4"] == "schnell-nvfp4, twin" and labels["twin"] == ""
    assert labels["schnell-int8"] == "schnell-int8"


@pytest.mark.slow
def test_time_is_of_the_fastest_mode_per_image(three, no_svg):
    run = three.runs[0]
    fastest = first_speed(run.speed)
    assert fastest.mode == "compiled"
    batched = run.speed.model_copy(
        update={"rows": tuple(row.model_copy(update={"batch": 4}) for row in run.speed.rows)}
    )
    faster = run.model_copy(update={"speed": batched})
    report = three.model_copy(update={"runs": (faster, *three.runs[1:])})
    points = [row for row in rows(cost_charts(report)[1], "front") if row["metric"] == "psnr"]
    assert points[0]["cost"] == pytest.approx(fastest.stages["end to end"].p50 / 4)
    stages = rows(stage_chart(0, faster.speed), "seconds")
    assert sum(row["seconds"] for row in stages if row["side"] == f"{run.name}, compiled") == pytest.approx(
        points[0]["cost"]
    )


def test_only_what_two_runs_have_is_drawn_against_cost(three, no_svg):
    runs = [three.runs[0], three.runs[1].model_copy(update={"speed": None})]
    report = three.model_copy(update={"runs": tuple(runs)})
    assert [drawing.key for drawing in cost_charts(report)] == ["cost-bits"]
    nothing = {
        "psnr": three.runs[1].metrics["psnr"].model_copy(update={"value": Estimate(mean=None, n=0, infinite=16)})
    }
    report = three.model_copy(update={"runs": (runs[0], runs[1].model_copy(update={"metrics": nothing}))})
    assert cost_charts(report) == []


@pytest.mark.slow
def test_a_metric_of_runs_that_were_not_timed_leaves_the_axis_of_time_empty(three, no_svg):
    of_sets = three.runs[0].metrics["fid"].model_copy(update={"baseline": None})  # it has no floor either
    untimed = {"speed": None, "metrics": {**three.runs[0].metrics, "fid_to_16bit": of_sets}}
    others = [run.model_copy(update={"name": f"{run.name} again", **untimed}) for run in three.runs[:2]]
    drawings = cost_charts(three.model_copy(update={"runs": (*three.runs[:2], *others)}))
    assert [drawing.key for drawing in drawings] == ["cost-bits", "cost-latency", "cost-memory"]


def test_a_dot_for_every_image_in_order(three, no_svg):
    drawing = image_chart(three)
    for run in three.runs:
        dots = [row for row in rows(drawing, "rank") if row["run"] == run.name]
        assert len(dots) == 16
        assert [row["value"] for row in sorted(dots, key=lambda row: row["rank"])] == sorted(
            image.values["psnr"] for image in run.images
        )
    same = Image(finite=True, identical=True, values={"psnr": None})
    runs = (three.runs[0].model_copy(update={"images": (same, *three.runs[0].images[1:])}),)
    assert "1 identical or broken images" in image_chart(three.model_copy(update={"runs": runs})).note
    runs = (three.runs[0].model_copy(update={"images": (same,) * 16}),)
    assert image_chart(three.model_copy(update={"runs": runs})) is None


@pytest.mark.slow
def test_many_images_are_drawn_by_evenly_spaced_ranks(no_svg):
    report = example_report.example(1, count=900, wall=None)
    dots = rows(image_chart(report), "rank")
    values = sorted(image.values["psnr"] for image in report.runs[0].images)
    assert len(dots) == 300 and dots[0]["value"] == values[0] and dots[-1]["value"] == values[-1]


def test_drift_charts_hold_each_step_of_each_run_and_the_floor(three, no_svg):
    velocity, _sqnr = drift_charts(three)
    for name, curve in [(run.name, run.drift.curves["velocity_error"]) for run in three.runs]:
        found = [row for row in rows(velocity, "sigma") if row["run"] == name]
        assert [(row["step"], row["value"]) for row in found] == [
            (i + 1, each.mean) for i, each in enumerate(curve.values)
        ]
    floor = [row for row in rows(velocity, "sigma") if row["run"] == "noise floor"]
    assert [row["value"] for row in floor] == [0.004] * 4
    drift = three.runs[0].drift
    curves = {key: curve.model_copy(update={"floor": None}) for key, curve in drift.curves.items()}
    bare = three.runs[0].model_copy(update={"drift": drift.model_copy(update={"curves": curves})})
    assert "noise floor" not in str(drift_charts(three.model_copy(update={"runs": (bare,)}))[0].spec)


def test_the_frame_chart_holds_each_frame_of_each_run_and_the_floor(three, no_svg):
    assert frame_chart(three) is None  # of images
    runs = []
    for number, run in enumerate(three.runs):
        values = tuple(Estimate(mean=30.0 + number - frame, n=4) for frame in range(5))
        floor = tuple(Estimate(mean=50.0, low=49.0, high=51.0, n=4) for _ in values)
        curve = Curve(name="P", unit="dB", digits=".2f", better="higher", how="h", values=values, floor=floor)
        runs.append(run.model_copy(update={"frames": curve}))
    report = three.model_copy(update={"runs": tuple(runs)})
    found = rows(frame_chart(report), "frame")
    for number, run in enumerate(runs):
        mine = [(row["frame"], row["value"]) for row in found if row["run"] == run.name]
        assert mine == [(frame, 30.0 + number - frame) for frame in range(5)]
    assert [row["low"] for row in found if row["run"] == "noise floor"] == [49.0] * 5
    assert "PSNR of each video" in image_chart(report).title and "videos, worst" in str(image_chart(report).spec)


def test_damage_charts_hold_blocks_in_order_and_the_worst_layers(three, no_svg):
    debug = three.runs[0].debug
    blocks, layers = damage_charts(0, debug)
    found = rows(blocks, "share")
    assert {row["block"]: row["order"] for row in found} == {
        block.name.removeprefix("transformer."): i for i, block in enumerate(debug.blocks)
    }
    assert len(found) == 2 * len(debug.blocks)
    cells = rows(layers, "sqnr")
    assert len(cells) == len(debug.layers) * 4
    first = [row["sqnr"] for row in cells if f"transformer.{row['layer']}" == debug.layers[0].name]
    assert first == list(debug.layers[0].local_sqnr_db)
    bare = debug.model_copy(update={"blocks": (), "layers": ()})
    assert damage_charts(0, bare) == []


@pytest.mark.slow
def test_drawings_are_well_formed_with_ids_of_their_own_and_the_pages_colours(three):
    first, second = (damage_charts(index, three.runs[0].debug)[1] for index in (0, 1))
    for drawing in (first, second):
        xml.fromstring(drawing.svg)
        assert "var(--quiet)" in drawing.svg and 'fill="#000"' not in drawing.svg
        ids = set(re.findall(r' id="([^"]+)"', drawing.svg))
        assert ids and set(re.findall(r"url\(#([^)]+)\)", drawing.svg)) <= ids
    assert not set(re.findall(r' id="([^"]+)"', first.svg)) & set(re.findall(r' id="([^"]+)"', second.svg))
    assert damage_charts(0, three.runs[0].debug)[1].svg == first.svg  # the same chart is the same text


def test_a_vega_lite_that_vl_convert_does_not_know_yet_is_drawn_by_the_newest_it_does(monkeypatch):
    newest = charts.vl_convert.get_vegalite_versions()[-1]
    for written, drawn in (("v99.1.0", newest), (f"v{newest}.7", newest), ("v5.8.0", "5.8")):
        monkeypatch.setattr(charts.alt, "SCHEMA_VERSION", written)
        assert charts._vegalite() == drawn


@pytest.mark.slow
def test_script_holds_no_end_of_itself_and_asks_for_nothing():
    script = javascript()
    assert "</script" not in script.lower() and 3e5 < len(script) < 1.5e6
    assert not re.findall(r"https?://(?!www\.w3\.org/|vega\.github\.io/|github\.com/vega)[\w.]+", script)
