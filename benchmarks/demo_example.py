"""The page that docs/demo.md shows: three recipes of the embedded pipeline, one prompt.

    python -m benchmarks.demo_example      # ../docs/demo.png; a minute on two cores

Taken by a Chromium of the system's through playwright (extra `test`), of a page that gradio serves (extra `demo`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "docs" / "demo.png"
RECIPES = ("nvfp4", "int8", "mxfp4")
PROMPT = "a red three on black"
BUTTON = "Make both images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 800  # of the picture
_PATIENCE = 240_000  # ms, on a machine that does much else


@dataclass
class Visit:
    """A visit of the page. asked: addresses that the browser asked. said: what its console said."""

    page: Any
    demo: Any
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def make(self, prompt: str, checkpoint: str) -> None:
        """Make both images of a prompt."""
        self.page.get_by_label("Prompt").fill(prompt)
        self.page.get_by_role("button", name=BUTTON).click()
        self._wait(checkpoint)

    def switch(self, checkpoint: str) -> None:
        """Choose another checkpoint, and wait for its image."""
        self.page.get_by_label(checkpoint, exact=True).check()
        self._wait(checkpoint)

    def figures(self) -> str:
        """Return the words below the images."""
        return self.page.locator("#figures").inner_text()

    def elsewhere(self) -> list[str]:
        """Return what the browser asked that is not of the page's server."""
        return [url for url in self.asked if not url.startswith((self.demo.address, "data:", "blob:"))]

    def _wait(self, checkpoint: str) -> None:
        self.page.locator("#figures td", has_text=checkpoint).wait_for()
        self.page.locator("#images", has_text=f"16 bit | {checkpoint}").wait_for()
        self.page.wait_for_function(
            "[...document.querySelectorAll('#images img, #errors img')].every(one => one.complete && one.naturalWidth)"
        )


@contextmanager
def visited(folders: Sequence[Path], **options: Any) -> Iterator[Visit]:
    """Serve the page of these checkpoints on the CPU, and open it in a browser."""
    from playwright.sync_api import sync_playwright

    from fluxq.demo.page import Demo, DemoOptions

    demo = Demo(DemoOptions([*map(str, folders)], port=0, device="cpu", **options))
    thread = threading.Thread(target=demo.run)
    thread.start()
    try:
        with sync_playwright() as playwright:
            path = next(filter(None, map(shutil.which, BROWSERS)))
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=_PATIENCE)
            visit = Visit(browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}), demo)
            visit.page.set_default_timeout(_PATIENCE)
            visit.page.on("request", lambda request: visit.asked.append(request.url))
            visit.page.on("console", lambda message: visit.said.append(f"{message.type}: {message.text}"))
            visit.page.on("pageerror", lambda error: visit.said.append(str(error)))
            visit.page.goto(demo.address)
            visit.page.get_by_label("Prompt").wait_for()
            yield visit
            demo.end()  # while the page is open
            thread.join()
            browser.close()
    finally:
        demo.end()
        thread.join()


def main() -> None:
    """Make the checkpoints, visit their page, keep a picture of it."""
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            command = [sys.executable, "-m", "fluxq", "quantize", "--recipe", recipe]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with visited([Path(folder) / f"tiny-{recipe}" for recipe in RECIPES]) as visit:
            visit.make(PROMPT, f"tiny-{RECIPES[0]}")
            visit.page.screenshot(path=TARGET)


if __name__ == "__main__":
    main()
