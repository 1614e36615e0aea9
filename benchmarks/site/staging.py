"""Sources for Sphinx: a copy of the documents, each where it lies in the checkout, and the made pages.

So a link works on both: on a code host and on the site. In the copy

    README.md                   is the first page, index.md
    recipes/NAME.yaml           of a shipped recipe is its page, recipes/NAME.md
    another file, an image      comes along; Sphinx makes a download of it
    a folder                    is plain text
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.site.links import is_elsewhere, links
from benchmarks.site.made import ROOT, made_pages

__all__ = ["ROOT", "documents", "stage"]


def stage(folder: Path, root: Path = ROOT) -> None:
    """Write a checkout's documents, the files that they link to, and the made pages into an empty folder."""
    texts = made_pages(root)
    for page in documents(root):
        text = page.read_text(encoding="utf-8")
        texts[place_of(page, root)] = "".join(_with_links(text, page, root))
        for file in _linked_files(text, page):
            copy = folder / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    texts["index.md"] += contents([*texts])
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")


def documents(root: Path = ROOT) -> list[Path]:
    """Return the documents of a checkout."""
    patterns = ("*.md", "docs/*.md", "*/README.md", "src/fluxq/*/README.md")
    linked = {path.resolve() for pattern in patterns for path in root.resolve().glob(pattern)}  # rooms are links, too
    return sorted(linked)


def place_of(page: Path, root: Path) -> str:
    """Return the place of a document in the copy."""
    place = page.relative_to(root.resolve()).as_posix()
    return "index.md" if place == "README.md" else place


def contents(places: Sequence[str]) -> str:
    """Return the lists of pages at the side. Those that CONTENTS does not name stand in the last."""
    named = {place for listed in CONTENTS.values() for place in listed}
    rest = sorted({*places} - named - {"index.md"})
    lines = ["\n"]
    for title, listed in {**CONTENTS, "More": rest}.items():
        if pages := [place for place in listed if place in places]:
            lines += ["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""]
    return "\n".join(lines)


def _with_links(text: str, page: Path, root: Path) -> Iterator[str]:
    """Yield the parts of a document, its links as the copy has them."""
    end = 0
    for match in links(text):
        yield text[end : match.start()]
        whole, end = text[match.start() : match.end()], match.end()
        path, _, anchor = match["target"].partition("#")
        file = (page.parent / path).resolve()
        if not path or is_elsewhere(path):
            yield whole
        elif file.is_dir():
            yield text[slice(*match.span("words"))]
        elif file == root.resolve() / "README.md" or _is_recipe(file):
            place = file.with_name("index.md") if file.suffix == ".md" else file.with_suffix(".md")
            target = Path(os.path.relpath(place, page.parent)).as_posix()
            yield f"[{text[slice(*match.span('words'))]}]({target}{f'#{anchor}' if anchor else ''})"
        else:
            yield whole
    yield text[end:]


def _linked_files(text: str, page: Path) -> Iterator[Path]:
    for match in links(text):
        file = (page.parent / match["target"]).resolve()
        if not is_elsewhere(match["target"]) and file.is_file() and file.suffix != ".md" and not _is_recipe(file):
            yield file


def _is_recipe(file: Path) -> bool:
    return file.suffix == ".yaml" and file.parent.name == "recipes"


# Pages at the side, in their order.
CONTENTS: dict[str, tuple[str, ...]] = {
    "Start": (
        "docs/which-recipe.md",
        "docs/cards.md",
        "docs/from-comfyui.md",
        "docs/platforms.md",
        "docs/troubleshooting.md",
        "docs/gallery.md",
    ),
    "Run and serve": (
        "docs/diffusers.md",
        "docs/gpu.md",
        "docs/serving.md",
        "docs/demo.md",
        "docs/steps.md",
        "docs/exchange.md",
        "docs/comfyui.md",
        "docs/engines.md",
    ),
    "Choose and judge": (
        "docs/auto.md",
        "docs/large-models.md",
        "docs/families.md",
        "docs/evaluation.md",
        "docs/gate.md",
        "docs/speed.md",
    ),
    "Recipes": (
        "recipes/README.md",
        *(f"recipes/{name}.md" for name in ("fp8", "fp8-comfy", "mxfp8", "int8", "int8-convrot")),
        *(f"recipes/{name}.md" for name in ("nvfp4", "nvfp4-max", "mxfp4", "mxfp4-max", "int4", "int4-svd")),
    ),
    "Reference": ("commands.md", "api.md", "docs/format.md", "docs/conformance.md"),
    "How it is built": (
        *(f"{room}/README.md" for room in ("kernels", "calibrate", "quantize", "eval")),
        *(f"src/fluxq/{room}/README.md" for room in ("runtime", "jobs", "serve")),
        "benchmarks/README.md",
        "notebooks/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ),
}
