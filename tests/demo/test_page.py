"""The page of `fluxq demo` in a browser: what a visitor does with it, and that it asks nobody else."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import demo_example

pytest.importorskip("gradio", reason="needs gradio, of the extra `demo`")
pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra `test`")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, demo_example.BROWSERS)), reason="needs a Chromium of the distribution's packages"
)
STRANGE = "a $x$ <b>three</b> | `on` black"


@pytest.fixture(scope="module")
def visit(plain_checkpoint) -> Iterator[demo_example.Visit]:
    folders = [plain_checkpoint(name) for name in ("int8", "nvfp4")]
    with demo_example.visited(folders, max_steps=10) as one:
        yield one


def pictures(visit: Any) -> dict[str, str]:
    """Addresses of the pictures that are shown; they are those of their contents."""
    images = visit.page.locator("#images img").evaluate_all("all => all.map(one => one.src)")
    return {"images": sorted({*images}), "errors": visit.page.locator("#errors img").get_attribute("src")}


@pytest.mark.slow
def test_a_prompt_is_made_and_another_checkpoint_changes_one_image(visit: Any, tmp_path) -> None:
    visit.make(demo_example.PROMPT, checkpoint="tiny-int8")
    first = pictures(visit)
    assert len(first["images"]) == 2 and first["errors"]
    said = visit.figures()
    assert "PSNR" in said and "latent SQNR" in said and "tiny-int8" in said and "times as fast as 16 bit" in said
    visit.switch("tiny-nvfp4")
    second = pictures(visit)
    assert len({*first["images"]} & {*second["images"]}) == 1  # 16 bit
    assert first["errors"] != second["errors"] and "tiny-nvfp4" in visit.figures()
    left = visit.left()
    visit.switch("tiny-int8")
    assert pictures(visit) == first and visit.left() == left and visit.figures() == said  # as kept

    visit.page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    visit.page.get_by_label("Steps").fill("11")
    visit.page.get_by_role("button", name=demo_example.BUTTON).click()
    visit.page.locator("#problem", has_text="Steps is 11, 10 at most.").wait_for()
    assert pictures(visit) == first

    assert visit.elsewhere() == [] and visit.said == []
