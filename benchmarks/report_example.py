"""The report that docs/evaluation.md shows: two recipes on the embedded pipeline, 256 prompts, one of them looked into.

    python benchmarks/report_example.py      # ../docs/report.json and report.png; five minutes on two cores

Not timed: what a CPU takes for 16 x 16 pixels says nothing. The picture is the head of the page, taken by a Chromium of
the system's through playwright (extra `test`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fluxq.base.devices import commit
from fluxq.eval.report.report import write_report
from fluxq.jobs import judge

DOCS = Path(__file__).parent.parent / "docs"
RECIPES = ("nvfp4", "fp8")
METRICS = "psnr,latent_sqnr,feature_distance,fid,clip_score"
WIDTH, HEIGHT = 1280, 1840  # of the picture


def main() -> None:
    """Make both checkpoints, evaluate them, debug one, and keep the report and a picture of it."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"tiny-{recipe}" for recipe in RECIPES]
        for recipe, output in zip(RECIPES, outputs, strict=True):
            fluxq(folder, "quantize", "--recipe", recipe, "-o", output.name)
            fluxq(folder, "eval", output.name, "--count", "256", "--metrics", METRICS)
        fluxq(folder, "debug", outputs[0].name)
        found = judge.report(outputs, Path(folder) / "report.html")
        found = found.model_copy(update={"provenance": {**found.provenance, "commit of fluxq": commit()}})
        page = write_report(Path(folder) / "report.html", found)
        shutil.copy(page.with_suffix(".json"), DOCS / "report.json")
        photograph(page, DOCS / "report.png")


def fluxq(folder: str, *arguments: str) -> None:
    """Run the command in a folder; CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "fluxq", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def photograph(page: Path, target: Path) -> None:
    """The head of a page as a PNG."""
    from playwright.sync_api import sync_playwright

    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers)), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-charts=ready]", state="attached")
        shown.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    main()
