import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import example_report
import numpy as np
import pytest
import torch
from PIL import Image

from fluxq.base.output import unsealed
from fluxq.eval.metrics.pictures import choose, wall
from fluxq.eval.metrics.schema import Estimate, Margin, Timed, Verdict, read_report
from fluxq.eval.report import charts, report
from fluxq.eval.report.advice import advice
from fluxq.eval.report.markdown import markdown
from fluxq.eval.report.report import compare_runs, merge, render, write_report
from fluxq.eval.report.summary import summary
from fluxq.eval.report.words import GLOSSARY

VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Collects tags and texts, and checks that every tag is closed where it should be."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text, self.styles = [], [], "", ""
        self.feed(html)
        assert not self.open
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.styles += data
        elif not self.open or self.open[-1] != "script":
            self.text += f" {data}"

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def one():
    return example_report.example(1)


@pytest.fixture(scope="module")
def three():
    return example_report.example(3)


@pytest.fixture(scope="module")
def pages(one, three):
    return {1: render(one), 3: render(three)}


@pytest.fixture
def without_charts(monkeypatch):
    """For tests of text: charts take most of the time that a page takes."""
    for name in ("cost_charts", "drift_charts", "damage_charts"):
        monkeypatch.setattr(report, name, lambda *_: [])
    for name in ("image_chart", "stage_chart"):
        monkeypatch.setattr(report, name, lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 3])
def test_h1_page_refers_to_nothing_outside_itself(pages, runs):
    page = Page(pages[runs])
    names = ("src", "href", "srcset", "action", "data", "poster", "background", "xlink:href")
    references = [value for _, attrs in page.tags for name, value in attrs.items() if name in names]
    assert references and all(re.match(r"data:image/(png|webp);base64,|#", value) for value in references)
    assert "url(" not in page.styles and "@import" not in page.styles
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "embed", "base", "form"}
    assert any("default-src 'none'" in attrs.get("content", "") for attrs in page.named("meta"))
    assert len(pages[runs]) < 15e6


@pytest.mark.parametrize("runs", [1, 3])
def test_h1_tables_charts_and_pictures_stand_in_the_html_itself(pages, runs):
    page = Page(pages[runs])
    drawn = [attrs for attrs in page.named("div") if "data-chart" in attrs]
    assert len(page.named("svg")) == len(drawn) == (7 if runs == 1 else 3 + 1 + 2 + 3 * 2 + 3) - (runs == 1)
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawn)
    alts = [attrs["alt"] for attrs in page.named("img")]
    rows, shown = sum(alt.startswith("16 bit: ") for alt in alts), alts.count("amplified difference")
    assert all(alts) and len(alts) == rows + 2 * shown  # a run's picture comes with its difference
    assert shown >= runs * 9 and rows == pages[runs].count('class="shot"') <= runs * 9
    assert (rows, shown) == (9, 9) if runs == 1 else rows < shown  # one row for a prompt, not one for each run
    assert len(page.named("table")) >= 5
    keys = [attrs["data-chart"] for attrs in drawn]
    assert sorted(json.loads(_script(pages[runs], "specs"))) == sorted(keys)


def test_page_says_what_the_report_holds(one, pages):
    text = Page(pages[1]).text
    psnr = one.runs[0].metrics["psnr"].value
    assert f"{psnr.mean:.2f}" in text and f"{psnr.low:.2f} to {psnr.high:.2f}" in text
    assert "47.10" in text and "46.00 to 48.20" in text  # the noise floor
    assert "To measure more: LPIPS to the 16-bit images: needs alexnet-owt-7be5be79.pth in --weights DIR" in text
    assert "6.71 GB on disk instead of 23.8 GB, 3.55 times less" in text and "4.50 bits per weight" in text
    assert "2.08 (2.05 to 2.11) times as fast end to end, compiled" in text
    assert "no speed-up is given: the spread of 16 bit is 8 % of its median, above 5 %" in text
    assert "not measured: out of memory" in text and "✕ does not fit" in text and "✓ fits" in text
    assert "FID_16 is biased upwards by its small N" in text
    assert (
        "? Undecided: PSNR" in text and "✓ Passed" in text and "✕ Failed" in text and "lpips<=0.1 not measured" in text
    )
    for expected in (one.command, one.license, one.warnings[0], one.noise_floor, "abab", "torch 2.15.0"):
        assert expected in text


def test_several_runs_are_told_apart_and_compared(three, pages):
    text = Page(pages[3]).text
    for run in three.runs:
        assert text.count(run.name) > 5
    assert "Runs compared image by image" in text and "corrected for all 3 comparisons" in text
    assert "Dominated by PSNR to the 16-bit images, dB: schnell-int4-svd" in text


def test_parts_that_were_not_measured_say_so(without_charts):
    text = Page(render(example_report.example(2, speed=None, debug=None, drift=None, wall=None))).text
    text = text.replace(" ,", ",").replace(" .", ".")
    assert "Not measured: run fluxq bench schnell-nvfp4, run fluxq bench schnell-int8." in text
    assert "Not measured: run fluxq debug schnell-nvfp4, run fluxq debug schnell-int8." in text
    assert "No pictures were kept" in text and "Along the denoising steps Not measured." in text and "OUT" not in text


def test_a_report_of_one_run_without_parts_has_a_page():
    html = render(example_report.example(1, speed=None, debug=None, drift=None, wall=None))
    assert "One run: fluxq report RUN…" in Page(html).text and Page(html).text.count("<svg") == 0


def test_the_page_begins_with_what_to_use_and_a_row_for_each_way(pages, three):
    page = Page(pages[3])
    assert advice(three) in page.text
    for text in (advice(three), "Run Verdict", "Parts of this report"):
        assert text in page.text or text in pages[3]
    assert pages[3].index('class="advice"') < pages[3].index('id="runs"') < pages[3].index('class="headline"')
    rows = re.findall(r'<tr>\s*<th scope="row">([^<]+)<', pages[3].split("</table>")[0])
    assert rows == ["16 bit", *(run.name for run in three.runs)]


def test_navigation_names_every_heading(pages):
    for html in pages.values():
        links = re.findall(r'<a href="#([a-z]+)">([^<]+)</a>', html.split("<nav")[1].split("</nav>")[0])
        headings = re.findall(r'<h2 id="([a-z]+)">([^<]+)</h2>', html)
        assert links == headings and len(headings) == 8


@pytest.mark.slow
def test_every_explained_word_is_explained_where_it_stands_and_in_the_glossary(pages):
    terms = {attrs["title"]: attrs["href"] for attrs in Page(pages[3]).named("a") if attrs.get("class") == "term"}
    ids = {f"#{attrs['id']}" for attrs in Page(pages[3]).named("dt") if "id" in attrs}
    assert len(ids) == len(GLOSSARY) and set(terms.values()) <= ids and len(terms) > 10
    assert all(text in GLOSSARY.values() for text in terms)
    for text in GLOSSARY.values():
        assert " ".join(text.split()) in Page(pages[3]).text


def test_a_second_arithmetic_repeats_no_hash(without_charts):
    made = example_report.example(2)
    again = {"name": "schnell-nvfp4 as int8", "checkpoint": "schnell-nvfp4", "provenance": made.runs[0].provenance}
    runs = (made.runs[0], made.runs[0].model_copy(update=again), made.runs[1])
    report_of_three = made.model_copy(update={"runs": runs})
    assert render(report_of_three).count("00" * 32) == 1
    assert markdown(report_of_three).count("00" * 32) == 1


def test_a_speed_without_a_run_of_its_arithmetic_has_a_row_of_its_own(without_charts):
    made = example_report.example(1)
    served = example_report.served(8.25, "int8")
    speed = made.runs[0].speed.model_copy(update={"served": served})
    timed = Timed(
        name="schnell-nvfp4 as int8", checkpoint="schnell-nvfp4", recipe="nvfp4", size=made.runs[0].size, speed=speed
    )
    alone = made.model_copy(update={"runs": (made.runs[0].model_copy(update={"speed": None}),), "timed": (timed,)})
    sixteen, stored, as_int8 = summary(alone)
    assert (stored.seconds, stored.unmeasured, stored.outcome) == ((), "timed as schnell-nvfp4 as int8", "inconclusive")
    assert as_int8.seconds and as_int8.psnr is None and sixteen.seconds
    assert as_int8.verdict == "quality not measured: fluxq eval schnell-nvfp4 --backends native,int8"
    assert (stored.resident, as_int8.resident) == (int(1.49e9 * 4.5), int(1.49e9 * 8.25))
    assert stored.bits == as_int8.bits == stored.resident_bits == 4.5 and as_int8.resident_bits == 8.25
    text = Page(render(alone)).text
    assert as_int8.verdict in text and "24 quantized layers, computed re-encoded to int8" in text
    assert "fluxq bench" not in text and as_int8.verdict in markdown(alone)


def test_caches_have_a_table_beside_fewer_steps(three, without_charts):
    plain, cached, fewer = three.runs
    cached = cached.model_copy(update={"cache": "list 0.5", "computed": 0.54, "fewer": fewer.name})
    fewer = fewer.model_copy(update={"cache": "15 steps", "computed": 15 / 28})
    page = Page(render(three.model_copy(update={"runs": (plain, cached, fewer)})))
    assert {"id": "caches", "class": "sortable stack"} in page.named("table")
    assert f"{cached.name} 54 % " in page.text and f"{fewer.name} 53.6 % " in page.text
    assert "caches" not in [each.get("id") for each in Page(render(three)).named("table")]


def test_times_that_spread_say_so(without_charts):
    made = example_report.example(1)
    assert summary(made)[1].about_time == "compiled"
    speed = made.runs[0].speed
    rows = tuple(
        row.model_copy(
            update={"stages": {name: times.model_copy(update={"iqr": times.p50}) for name, times in row.stages.items()}}
        )
        for row in speed.rows
    )
    run = made.runs[0].model_copy(update={"speed": speed.model_copy(update={"rows": rows})})
    assert "compiled, spread by 100%" in Page(render(made.model_copy(update={"runs": (run,)}))).text


@pytest.mark.slow
def test_broken_and_identical_runs_have_a_page(monkeypatch):
    monkeypatch.setattr(charts, "_svg", lambda spec: "")
    nothing = Estimate(mean=None, n=0, infinite=16)
    psnr = example_report.example(1).runs[0].metrics["psnr"].model_copy(update={"value": nothing})
    same = example_report.Image(finite=True, identical=True, values={"psnr": None})
    bad = example_report.Image(finite=False, identical=False, values={"psnr": None})
    verdicts = {name: Verdict(outcome=name, text=f"it is {name}") for name in ("identical", "broken")}
    identical = {
        "status": "identical",
        "gates": (example_report.GateOutcome(gate="psnr>=30", value=None, passed=True),),
        "verdict": verdicts["identical"],
        "images": (same,) * 16,
        "metrics": {"psnr": psnr},
    }
    broken = {
        "status": "broken",
        "verdict": verdicts["broken"],
        "images": (bad,) * 16,
        "metrics": {"psnr": psnr.model_copy(update={"value": None, "missing": "16 images hold NaN"})},
    }
    first, second, third = example_report.example(3).runs
    runs = (first, second.model_copy(update=identical), third.model_copy(update=broken))
    text = Page(render(example_report.example(3).model_copy(update={"runs": runs}))).text
    assert "✓ Passed psnr>=30 identical" in text
    assert "= Identical" in text and "✕ Broken" in text and "16 images hold NaN" in text and "NaN or infinity" in text
    assert "32 identical or broken images have no finite PSNR and are not drawn" in text


def test_no_number_is_nan(pages):
    for html in pages.values():
        page = Page(html)
        assert "nan" not in re.findall(r"[a-z]+", page.text.lower())
        values = [attrs["data-value"] for attrs in page.named("td") if attrs.get("data-value")]
        assert values and all(math.isfinite(float(value)) for value in values)


EVIL = '</script><script>alert(1)</script><img src="http://x.y/z" onerror=alert(1)>\'"&{{ 7 * 7 }}'


def test_untrusted_text_stays_text():
    of_run = {"name": EVIL, "recipe": EVIL, "verdict": Verdict(outcome="worse", text=EVIL)}
    html = render(example_report.example(1, prompts=(EVIL,), model=EVIL, call={EVIL: EVIL}, warnings=(EVIL,), **of_run))
    page = Page(html)
    images = page.named("img")
    assert len(page.named("script")) == 3 and all(attrs["src"].startswith("data:image/") for attrs in images)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert " ".join(EVIL.split()) in page.text and "49" not in page.text.replace(EVIL, "").split("{{")[0][-3:]
    assert json.loads(_script(html, "specs"))["images"]["layer"]


@pytest.mark.slow
def test_h2_json_round_trips_and_alone_draws_the_page(one, pages, tmp_path):
    path = write_report(tmp_path / "all.html", one)
    assert path == tmp_path / "all.html" and sorted(each.name for each in tmp_path.iterdir()) == [
        "all.html",
        "all.json",
        "all.md",
    ]
    text = (tmp_path / "all.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    stored = read_report(tmp_path / "all.json")
    assert stored == one and unsealed(path.read_text(encoding="utf-8")).strip() == pages[1].strip()


@pytest.mark.slow
def test_page_stays_below_15_mb_however_many_runs(without_charts):
    few = example_report.example(2, count=12, size=300)
    picture = (
        few.runs[0].wall.groups["worst"][0].model_copy(update={"difference": "data:image/webp;base64," + "A" * 800_000})
    )
    group = tuple(picture.model_copy(update={"index": index}) for index in range(3))
    heavy = few.runs[0].wall.model_copy(update={"groups": {"worst": group, "median": group, "random": group}})
    for count, rows in ((1, 9), (2, 6), (6, 0)):
        runs = tuple(few.runs[0].model_copy(update={"name": f"run {i}", "wall": heavy}) for i in range(count))
        html = render(few.model_copy(update={"runs": runs, "comparisons": ()}))
        assert len(html) < 15e6 and html.count('class="shot"') == rows
        assert html.count('alt="amplified difference"') == rows * count
        assert ("pictures of each group are shown" in Page(html).text) == (0 < rows < 9)
        assert ("leave no room for pictures" in Page(html).text) == (rows == 0)


def test_page_of_a_large_table_says_what_it_left_out(without_charts):
    html = render(example_report.example(1, count=230))
    assert "Every image : the 200 worst of 230" in Page(html).text.replace("image:", "image :")
    assert html.count('<td class="prompt">') == 200


# merge


def test_merge_joins_runs_and_compares_them_anew(three):
    parts = [
        three.model_copy(update={"runs": (run,), "comparisons": (), "command": f"fluxq eval {run.name}"})
        for run in three.runs
    ]
    merged = merge(parts)
    assert [run.name for run in merged.runs] == [run.name for run in three.runs]
    assert merged.comparisons == three.comparisons and len(merged.comparisons) == 3
    assert merged.command.splitlines() == [f"fluxq eval {run.name}" for run in three.runs]
    assert list(merged.time) == [run.name for run in three.runs] and merged.warnings == three.warnings
    assert "schnell-fp8" not in str(merged.time) and "generating seconds" in " ".join(dict(report._flat(merged.time)))


def test_merge_judges_all_runs_together(three, monkeypatch):
    seen = []
    monkeypatch.setattr(
        report, "with_verdicts", lambda runs, items: seen.append((len(runs), len(items))) or tuple(runs)
    )
    merge([three.model_copy(update={"runs": (run,)}) for run in three.runs])
    assert seen == [(3, 16)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"reference": {"16-bit images (SHA-256)": "00" * 32, "dtype": "bfloat16"}},
            r"16-bit images .SHA-256. is abab.*0000",
        ),
        ({"reference": {"16-bit images (SHA-256)": "ab" * 32}}, r"dtype is bfloat16 and None"),
        ({"items": ()}, "different prompts or seeds"),
        ({}, r"two runs are called 'schnell-nvfp4'"),
    ],
)
def test_merge_refuses_what_does_not_compare(one, change, words):
    with pytest.raises(ValueError, match=words):
        merge([one, one.model_copy(update=change)])


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"how": "Inception v3, clean resize"}, {"value": Estimate(mean=20.0, n=15)}])
def test_b3_fids_of_another_variant_or_n_are_not_compared(three, change, monkeypatch):
    monkeypatch.setattr(charts, "_svg", lambda spec: "")
    first, second, _ = three.runs
    fid = second.metrics["fid"].model_copy(update=change)
    other = second.model_copy(update={"metrics": {**second.metrics, "fid": fid}})
    merged = merge([three.model_copy(update={"runs": (run,)}) for run in (first, other)])
    assert any("FID to held-out images was not measured alike" in text for text in merged.warnings)
    assert all("fid" not in chart.choices and "psnr" in chart.choices for chart in charts.cost_charts(merged))
    alike = merge([three.model_copy(update={"runs": (run,)}) for run in (first, second)])
    assert not any("alike" in text for text in alike.warnings)
    assert all("fid" in chart.choices for chart in charts.cost_charts(alike))


def test_comparisons_pair_images_and_are_corrected_for_their_number(three):
    items = [(item.prompt, item.seed) for item in three.items]
    found = compare_runs(three.runs, items)
    assert [(each.first, each.second) for each in found] == [
        ("schnell-nvfp4", "schnell-int8"),
        ("schnell-nvfp4", "schnell-int4-svd"),
        ("schnell-int8", "schnell-int4-svd"),
    ]
    values = [[image.values["psnr"] for image in run.images] for run in three.runs]
    assert found[0].difference.mean == pytest.approx(np.mean(values[0]) - np.mean(values[1]))
    assert found[0].difference.mean < 0 < found[1].difference.mean
    assert all(each.p_holm == pytest.approx(3 * each.p) for each in found)


def test_comparisons_of_identical_and_broken_images(three):
    items = [(item.prompt, item.seed) for item in three.items]
    same = example_report.Image(finite=True, identical=True, values={"psnr": None})
    first, second, third = three.runs
    images = (same, *first.images[1:])
    also = (same, *second.images[1:])
    both = [first.model_copy(update={"images": images}), second.model_copy(update={"images": also})]
    difference = compare_runs(both, items)[0].difference
    assert difference.n == 16 and difference.infinite == 0
    difference = compare_runs([both[0], second], items)[0].difference
    assert difference.n == 15 and difference.infinite == 1
    assert compare_runs([first, third.model_copy(update={"status": "broken"})], items) == ()


def test_margin_is_shown_beside_its_metric(without_charts):
    run = example_report.example(1).runs[0]
    metric = run.metrics["psnr"].model_copy(update={"margin": Margin(on="value", low=30.0)})
    text = Page(render(example_report.example(1, metrics={"psnr": metric}))).text
    assert "higher is better; asked: at least 30 dB" in text
    other = run.metrics["psnr"].model_copy(update={"margin": Margin(on="value", low=20.0)})
    runs = [
        run.model_copy(update={"metrics": {"psnr": each}, "name": str(i)}) for i, each in enumerate((metric, other))
    ]
    text = Page(render(example_report.example(1).model_copy(update={"runs": tuple(runs)}))).text
    assert "asked: at least 30 dB or at least 20 dB" in text


# pictures


def test_pictures_are_the_images_and_their_amplified_difference():
    before, after = example_report.images(0, 12, 16)
    values = [example_report.psnr(a, b) for a, b in zip(before.images, after.images, strict=True)]
    made_wall = wall(before, after, values)
    assert made_wall.encoding == "PNG, lossless" and made_wall.shown_pixels == 16
    for pictures in made_wall.groups.values():
        for picture in pictures:
            index = picture.index
            assert np.array_equal(_pixels(picture.reference), before.images[index].permute(1, 2, 0).numpy())
            assert np.array_equal(_pixels(picture.quantized), after.images[index].permute(1, 2, 0).numpy())
            difference = (before.images[index].int() - after.images[index].int()).abs().permute(1, 2, 0).numpy()
            assert np.array_equal(_pixels(picture.difference), (difference * made_wall.gain).clip(max=255))


def test_differences_of_one_row_are_shown_at_one_gain(without_charts):
    """A weak difference at a high gain would look like a strong one beside it."""
    made = example_report.example(2)
    gains = [run.wall.gain for run in made.runs]
    assert len(set(gains)) == 2
    html = render(made)
    shown = re.findall(r'alt="amplified difference"[^>]*?(?:brightness\(([0-9.]+)\))?"?></span>', html)
    assert {float(each) for each in shown if each} == {min(gains) / max(gains)} and "" in shown
    assert set(re.findall(r"\|difference\| × (\d+)", html)) == {str(min(gains))}


def test_runs_that_show_other_frames_of_a_video_have_rows_of_their_own(without_charts):
    made = example_report.example(2)
    walls = [run.wall for run in made.runs]

    def framed(number: int, frames: tuple[int, ...]):
        groups = {
            name: tuple(each.model_copy(update={"frames": frames, "reference": f"data:{number}"}) for each in pictures)
            for name, pictures in walls[number].groups.items()
        }
        return made.runs[number].model_copy(update={"wall": walls[number].model_copy(update={"groups": groups})})

    def references(*runs) -> list[list[str]]:
        html = render(made.model_copy(update={"runs": runs}))
        rows = html.split('<figure class="shot">')[1:]
        return [re.findall(r'src="data:(\d)"', row) + re.findall(r"frames [\d, ]+", row) for row in rows]

    alike = references(framed(0, (0, 4, 8, 2)), framed(1, (0, 4, 8, 2)))
    assert {frames for _, frames in alike} == {"frames 0, 4, 8, 2, "}
    others = references(framed(0, (0, 4, 8, 2)), framed(1, (0, 4, 8, 7)))
    assert {tuple(row) for row in others} == {("0", "frames 0, 4, 8, 2, "), ("1", "frames 0, 4, 8, 7, ")}
    assert len(alike) < len(others) <= 2 * len(alike)


def test_gain_uses_the_scale_without_clipping_most_of_it():
    before, after = example_report.images(2, 9, 32)
    made_wall = wall(before, after, [0.0] * 9)
    errors = [(a.int() - b.int()).abs().numpy() for a, b in zip(before.images, after.images, strict=True)]
    assert 64 <= np.percentile(np.stack(errors), 99) * made_wall.gain <= 255


def test_large_pictures_are_reduced_and_their_difference_is_taken_before():
    checkers = (torch.arange(600)[:, None] + torch.arange(600)[None]) % 2  # a difference that reducing would hide
    before = SimpleNamespace(images=[torch.full((3, 600, 600), 100, dtype=torch.uint8)])
    after = SimpleNamespace(images=[(100 + 4 * checkers.expand(3, 600, 600)).to(torch.uint8)])
    made_wall = wall(before, after, [1.0])
    picture = made_wall.groups["all"][0]
    assert made_wall.shown_pixels == 512 and made_wall.encoding.startswith("WebP")
    assert _pixels(picture.reference).shape == (512, 512, 3) and "image/webp" in picture.quantized
    assert abs(_pixels(picture.difference).mean() - 2 * made_wall.gain) < 2


def test_choice_is_worst_median_and_drawn_alike_for_every_run():
    values = [float(i) for i in range(50)]
    values[40], values[41] = math.nan, math.inf
    groups = choose(values)
    assert groups["worst"] == [40, 0, 1]
    assert [round(values[index]) for index in groups["median"]] == [22, 23, 24]
    assert groups["random"] == choose(values[::-1])["random"] and len(set(groups["random"])) == 3
    assert choose([3.0, 1.0, 2.0]) == {"all": [1, 2, 0]}


def _pixels(uri):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), dtype=int)


def _script(html, name):
    return re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL).group(1)
