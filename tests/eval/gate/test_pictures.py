"""Image folders that a gate reads."""

import json
from pathlib import Path

import pytest
import torch
from image_servers import bomb
from PIL import Image

from fluxq.eval.gate.pictures import PROMPTS_FILE, read_pictures


def write(folder: Path, *rows: object) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(2):
        Image.new("RGB", (4, 3), (index, 0, 0)).save(folder / f"{index}.png")
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / PROMPTS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


ROW = {"prompt": "a", "seed": 0, "image": "0.png"}


def test_images_come_in_the_order_asked_for(tmp_path: Path) -> None:
    pictures = read_pictures(write(tmp_path / "x", ROW, {**ROW, "seed": 1, "image": "1.png", "machine": "M"}))
    images = pictures.make([("a", 1), ("a", 0)]).images
    assert [int(image[0, 0, 0]) for image in images] == [1, 0] and images[0].shape == (3, 3, 4)
    assert images[0].dtype == torch.uint8 and pictures.machine == "M" and pictures.finite.all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "holds no images"),
        (("{",), "prompts.jsonl:1:.*Invalid JSON"),
        (({"prompt": "a", "seed": 0},), "prompts.jsonl:1: image: Field required"),
        (({**ROW, "seed": True},), "seed"),
        (({**ROW, "seed": -1},), "seed"),
        ((ROW, ROW), "comes 2 times"),
        (({**ROW, "image": "../0.png"},), "leaves the folder"),
        (({**ROW, "image": "/etc/passwd"},), "leaves the folder"),
        (({**ROW, "image": "2.png"},), "missing"),
    ],
)
def test_a_bad_list_is_refused_by_its_line(tmp_path: Path, rows: tuple, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_pictures(write(tmp_path / "x", *rows))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 3\n%%EndComments\nshowpage\n"  # PIL starts Ghostscript for it


@pytest.mark.parametrize(
    ("content", "why"), [(EPS, "cannot identify"), (bomb(60_000), "Image size")], ids=["eps", "bomb"]
)
def test_a_file_that_is_no_picture_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    pictures = read_pictures(write(tmp_path / "x", ROW))
    (tmp_path / "x" / "0.png").write_bytes(content)
    with pytest.raises(ValueError, match=rf"0\.png: unreadable image \({why}"):
        _ = pictures.images[0]


def test_an_image_that_was_not_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no image of 'b' with seed 3"):
        read_pictures(write(tmp_path / "x", ROW)).make([("b", 3)])
