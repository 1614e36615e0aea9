"""Folders of images as a gate reads them."""

from pathlib import Path

from PIL import Image

from fluxq.eval.gate.pictures import PROMPTS_FILE, line_of


def picture_folder(folder: Path, shift: int = 0, count: int = 8, *, size: int = 16, machine: str | None = None) -> Path:
    """Write `count` images, `shift` brighter than another folder's in their green."""
    folder.mkdir()
    lines = []
    for index in range(count):
        image = Image.new("RGB", (size, size), (10 * index, 100 + shift, 0))
        image.putpixel((0, 0), (255, 0, 0))
        image.save(folder / f"{index}.png")
        lines.append(line_of(f"prompt {index}", index, f"{index}.png", machine))
    (folder / PROMPTS_FILE).write_text("".join(lines), encoding="utf-8")
    return folder
