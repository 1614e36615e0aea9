"""Links of documents: where they lead, and which of them are dead. Nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield the links and images of a document outside of code, with the groups `words` and `target`."""
    in_plain = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    yield from _LINK.finditer(in_plain)


def is_elsewhere(target: str) -> bool:
    """Tell whether a link leads out of the checkout."""
    return target.startswith(("http:", "https:", "mailto:"))


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them: a repeated one gets a number."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _FENCED.sub("", text), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = again = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while again in found:
            number += 1
            again = f"{anchor}-{number}"
        found.add(again)
    return found


def dead_links(page: Path) -> Iterator[str]:
    """Yield the links of a document that lead to no file or folder, or to no heading."""
    for match in links(page.read_text(encoding="utf-8")):
        target = match["target"]
        path, _, anchor = target.partition("#")
        if is_elsewhere(target):
            continue
        file = page.parent / path if path else page
        if not file.exists():
            yield f"{page.name} -> {target}: no such file"
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file.read_text(encoding="utf-8"))):
            yield f"{page.name} -> {target}: no such heading"


_FENCED = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
_CODE = re.compile(rf"{_FENCED.pattern}|`(?:[^`\n]|\n(?!\n))+`", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[(?P<words>(?:[^][]|\[[^]]*\])*)\]\((?P<target>[^()\s]+)\)")
