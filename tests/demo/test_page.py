"""The page of `fluxq demo` in a browser: what a visitor does with it, and that it asks nobody else."""

import io
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.demo_example import BROWSERS, BUTTON, PROMPT, Visit, visited
from fluxq.base.devices import cpu_name

pytest.importorskip("gradio", reason="needs gradio, of the extra `demo`")
pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `test`")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="needs a Chromium of the distribution's packages"
)

OLDER = "The images are those of the request before."


@pytest.fixture(scope="module")
def visit(plain_checkpoint) -> Iterator[Visit]:
    folders = [plain_checkpoint(name) for name in ("int8", "nvfp4")]
    with visited(folders, max_steps=10) as one:
        yield one


def addresses(visit: Any) -> list[str]:
    """Of the image on the left, that on the right, and the error map; they are those of their contents."""
    both = visit.page.locator("#images img").evaluate_all("all => all.map(one => one.src)")
    assert len(both) == 2
    return [*both, visit.page.locator("#errors img").get_attribute("src")]


def pixels(visit: Any, address: str) -> torch.Tensor:
    """A picture as it was before its pixels were made larger."""
    picture = Image.open(io.BytesIO(visit.page.request.get(address).body()))
    assert picture.size == (512, 512)
    return torch.from_numpy(np.array(picture.resize((16, 16), Image.Resampling.NEAREST))).movedim(-1, 0)


@pytest.mark.slow
def test_a_prompt_is_made_and_another_checkpoint_changes_one_image(visit: Any) -> None:
    visit.make(PROMPT, "tiny-int8")
    first, said = addresses(visit), visit.figures()
    for word in ("PSNR", "latent SQNR", "Seed 0, 8 steps, 16 × 16", "tiny-int8", "times as fast as 16 bit", cpu_name()):
        assert word in said
    visit.switch("tiny-nvfp4")
    second = addresses(visit)
    assert second[0] == first[0] and second[1] != first[1] and second[2] != first[2]
    pair = visit.demo.pairs.make("tiny-nvfp4", PROMPT, 0)  # as kept
    expected = pair.original.image, pair.quantized.image, pair.error_map
    assert all(torch.equal(pixels(visit, url), image) for url, image in zip(second, expected, strict=True))
    visit.switch("tiny-int8")
    assert addresses(visit) == first and visit.figures() == said

    cut = "node => getComputedStyle(node).clipPath"
    right, before = visit.page.locator("#images img").nth(1), visit.page.locator("#images img").nth(1).evaluate(cut)
    assert before.startswith("inset(0")  # cut off on the left, where 16 bit is seen
    box = right.bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2, steps=4)
    visit.page.mouse.up()
    assert right.evaluate(cut) != before

    visit.page.get_by_label("Steps").fill("11")
    visit.page.get_by_role("button", name=BUTTON).click()
    visit.page.locator("#problem", has_text=f"Steps is 11, 10 at most. {OLDER}").wait_for()
    assert addresses(visit) == first and visit.page.title() == "tiny-int8, tiny-nvfp4 - fluxq demo"
    assert len(visit.asked) > 10 and visit.elsewhere() == [] and visit.said == []


def ask(visit: Any, **fields: str) -> None:
    for name, value in fields.items():
        visit.page.get_by_label(name).fill(value)
    visit.page.get_by_role("button", name=BUTTON).click()


@pytest.mark.slow
def test_stop_ends_an_image_and_leaves_what_was_shown(visit: Any) -> None:
    ask(visit, Prompt=PROMPT, Seed="1", Steps="8", Width="16", Height="16")
    visit.page.locator("#figures", has_text="Seed 1, 8 steps").wait_for()
    first, said = addresses(visit), visit.figures()
    ask(visit, Steps="10", Width="192", Height="192")
    visit.page.locator("#images", has_text="/10 steps").wait_for()
    visit.page.get_by_role("button", name="Stop").click()
    visit.page.locator("#problem", has_text=f"Stopped. {OLDER}").wait_for()
    assert addresses(visit) == first and visit.figures() == said
    visit.page.get_by_role("button", name="Stop").click()  # with nothing to stop: the next one is made
    ask(visit, Seed="2", Steps="2", Width="16", Height="16")
    visit.page.locator("#figures", has_text="Seed 2, 2 steps").wait_for()
    assert visit.page.locator("#problem").inner_text() == ""


@pytest.mark.slow
def test_fields_have_the_limits_and_a_problem_goes_when_the_next_image_begins(visit: Any, monkeypatch) -> None:
    bounds = {"Seed": (0, 2**53 - 1), "Steps": (1, 10)} | dict.fromkeys(("Width", "Height"), (4, 4096))
    for label, (least, most) in bounds.items():
        field = visit.page.get_by_label(label)
        assert (field.get_attribute("min"), field.get_attribute("max")) == (str(least), str(most))
    usual = {"Prompt": PROMPT, "Seed": "0", "Steps": "1", "Width": "16", "Height": "16"}
    for label, value, sentence in (
        ("Seed", "1.5", "Seed is 1.5, expected a whole number."),
        ("Seed", "9007199254740993", "Seed is 9007199254740992, 9007199254740991 at most."),
        ("Steps", "2.7", "Steps is 2.7, expected a whole number."),
        ("Steps", "0", "Steps is 0, 1 at least."),
        ("Width", "65536", "Width is 65536, 4096 at most."),
    ):
        ask(visit, **usual | {label: value})
        visit.page.locator("#problem", has_text=sentence).wait_for()
    make, begins = visit.demo.pairs.make, threading.Event()
    monkeypatch.setattr(visit.demo.pairs, "make", lambda *args, **how: begins.wait(60) and make(*args, **how))
    ask(visit, **usual)
    visit.page.wait_for_function("document.querySelector('#problem').innerText === ''")
    begins.set()
    visit.page.locator("#figures", has_text="Seed 0, 1 steps").wait_for()
