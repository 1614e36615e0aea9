import base64
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from fluxq.eval.evaluate import measure
from fluxq.eval.generate import Generated, items_for
from fluxq.eval.report import Facts, choose, render, write_report

FACTS = Facts("a model", "a recipe", 24_000_000_000, 6_400_000_000, 4.27, {"licence": "apache-2.0"})
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Collects tags and texts, and checks that every tag is closed where it should be."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


def sides(count=16, size=16, noise=6, prompts=("a red one", "a blue two")):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(20, 230, (count, 3, size, size), generator=generator)
    scale = torch.linspace(1, noise, count).view(-1, 1, 1, 1)
    other = (images + (scale * torch.randn(images.shape, generator=generator)).round()).clamp(0, 255)
    latents = torch.randn(count, 8, 4, generator=generator)
    items, finite = tuple(items_for(prompts, count, 0)), torch.ones(count, dtype=torch.bool)
    make = [(images, latents), (other, latents + 0.1 * torch.randn(latents.shape, generator=generator))]
    return [Generated(items, pixels.to(torch.uint8), latent, finite, 2.5, "cpu") for pixels, latent in make]


def report_of(pair, call=None):
    return measure(*pair, call or {"height": 16, "width": 16}, metric_networks=None, facts=FACTS)


@pytest.fixture(scope="module")
def report():
    return report_of(sides())


def test_page_is_self_contained_and_well_formed(report, tmp_path):
    path = write_report(tmp_path, report)
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert "http" not in html and "url(" not in html and "@import" not in html
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object"}
    references = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "srcset")]
    assert len(references) == 36 and all(value.startswith("data:image/png;base64,") for value in references)


def test_json_alone_draws_the_page(report, tmp_path):
    path = write_report(tmp_path, report)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored == report
    assert render(stored) == path.read_text(encoding="utf-8")


def test_page_says_what_the_json_holds(report):
    text = " ".join(Page(render(report)).text.split())
    psnr = report["metrics"]["psnr_db"]["value"]
    assert f"{psnr['mean']:.2f}" in text and f"{psnr['low']:.2f} to {psnr['high']:.2f}" in text
    assert "not measured: no CLIP folder was given" in text
    assert "24.00 GB" in text and "6.40 GB" in text and "4.27 bits per weight" in text and "3.75 times less" in text
    assert "no measure of speed" in text and "apache-2.0" in text
    assert f"|difference| × {report['gallery']['gain']}" in text
    for package, version in report["versions"].items():
        assert f"{package} {version}" in text


def test_a_dot_for_every_image_in_order_of_psnr(report):
    dots = [attrs for tag, attrs in Page(render(report)).tags if tag == "circle"]
    heights = [float(dot["cy"]) for dot in dots]
    assert len(dots) == 16 and heights == sorted(heights, reverse=True)
    assert min(heights) >= 12 and max(heights) <= 164


def test_pictures_are_the_images(report):
    before, after = sides()
    for pictures in report["gallery"]["groups"].values():
        for picture in pictures:
            seen = {
                name: np.asarray(Image.open(io.BytesIO(base64.b64decode(picture[name]))), dtype=int)
                for name in ("reference", "quantized", "difference")
            }
            index = picture["index"]
            assert np.array_equal(seen["reference"], before.images[index].permute(1, 2, 0).numpy())
            assert np.array_equal(seen["quantized"], after.images[index].permute(1, 2, 0).numpy())
            amplified = abs(seen["reference"] - seen["quantized"]) * report["gallery"]["gain"]
            assert np.array_equal(seen["difference"], amplified.clip(max=255))


def test_gain_uses_the_scale_without_clipping_most_of_it(report):
    before, after = sides()
    high = np.percentile((before.images.int() - after.images.int()).abs().numpy(), 99)
    assert 64 <= high * report["gallery"]["gain"] <= 255


def test_choice_is_worst_median_best_and_drawn_never_twice():
    values = [float(i) for i in range(50)]
    values[40], values[41] = math.nan, math.inf
    groups = choose(values)
    assert groups["worst"] == [40, 0, 1] and groups["best"] == [41, 49, 48]
    assert [round(values[index]) for index in groups["median"]] == [22, 23, 24]
    chosen = [index for indices in groups.values() for index in indices]
    assert len(chosen) == len(set(chosen)) == 12
    assert choose(values) == groups and choose(values, seed=1)["random"] != groups["random"]
    assert choose([3.0, 1.0, 2.0]) == {"all": [1, 2, 0]}


def test_prompts_cannot_inject_markup():
    evil = '<script>alert(1)</script><img src="x">&'
    html = render(report_of(sides(3, prompts=(evil,)), call={"note": evil}))
    page = Page(html)
    assert "script" not in {tag for tag, _ in page.tags} and evil in page.text


def test_large_pictures_are_reduced_and_said_so():
    made = report_of(sides(2, size=500))
    picture = made["gallery"]["groups"]["all"][0]
    assert Image.open(io.BytesIO(base64.b64decode(picture["reference"]))).size == (384, 384)
    html = render(made)
    assert "reduced here to 384" in " ".join(Page(html).text.split()) and "pixelated" not in html
    assert "pixelated" in render(report_of(sides(2)))


def test_broken_and_identical_images_have_a_page_too():
    before, after = sides(4)
    broken = report_of([before, replace(after, finite=torch.tensor([True, False, True, True]))])
    text = Page(render(broken)).text
    assert "this checkpoint is broken" in text and "NaN or infinity" in text
    assert len(re.findall("<circle", render(broken))) == 3
    same = render(report_of([before, before]))
    assert "identical" in Page(same).text and "<circle" not in same


def test_a_checkpoint_that_grew_is_not_called_smaller():
    grown = measure(*sides(2), {}, metric_networks=None, facts=replace(FACTS, bytes_after=2 * FACTS.bytes_before))
    assert "times less" not in grown["headline"] and "48.00 GB instead of 24.00 GB" in grown["headline"]
    widths = re.findall(r"<i(?: class=\"after\")? style=\"width: ([\d.]+)%", render(grown))
    assert [float(width) for width in widths] == [30, 60]


def test_another_schema_is_refused(report):
    with pytest.raises(ValueError, match="schema_version 99"):
        render({**report, "schema_version": 99})
