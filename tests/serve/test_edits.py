"""Images that begin with an image: forms, what is refused of them, and what diffusers makes of the same by itself."""

import base64
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from served import ask, events, running

pytest.importorskip("fastapi")
pytest.importorskip("python_multipart")

from fluxq.serve.api import EditRequest, Limits, of_form, source_of

EDITS = "/v1/images/edits"
CALL = {"width": 16, "height": 16, "max_sequence_length": 8, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def server(int8: Path) -> Iterator[Any]:
    with running(int8, max_pixels=4096) as one:
        yield one


def form(fields: dict[str, object], *files: tuple[str, bytes]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a form."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts += [f'name="{name}"; filename="a"\r\n\r\n'.encode() + content for name, content in files]
    body = b"".join(b"--xx\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--xx--\r\n"
    return body, {"Content-Type": "multipart/form-data; boundary=xx"}


def edit(server: Any, fields: dict[str, object], *files: tuple[str, bytes]) -> tuple[int, Any]:
    body, headers = form(fields, *files)
    status, _, answer = ask(server, EDITS, body, **headers)
    return status, answer


def picture(size: tuple[int, int] = (16, 16), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(file, kind)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that says it has side x side pixels."""
    header = side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        file += len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return file


def test_a_photo_is_used_upright() -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (4, 2)).save(file, "JPEG", exif=exif)
    source = source_of(file.getvalue(), Limits())
    assert (source.width, source.height) == (2, 4)
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "WEBP", exif=b"Exif\0\0II*\0")
    assert source_of(file.getvalue(), Limits()).width == 4  # its EXIF data cannot be read


def test_gray_of_16_bits_is_as_light_as_that_of_8() -> None:
    file = io.BytesIO()
    Image.new("I;16", (2, 1), 0x8080).save(file, "PNG")
    assert source_of(file.getvalue(), Limits()).pixels == b"\x80" * 6


@pytest.mark.parametrize(
    "fields", [{"lora": '{"name": "style", "scale": 0.5}'}, {"lora[name]": "style", "lora[scale]": "0.5"}]
)
def test_an_adapter_comes_as_json_or_as_openais_client_writes_it(fields: dict[str, str]) -> None:
    lora = of_form(EditRequest, {"prompt": "a", **fields}).lora
    assert lora is not None and (lora.name, lora.scale) == ("style", 0.5)


@pytest.mark.slow
def test_an_edited_image_is_the_one_of_diffusers_image_to_image(server: Any, int8: Path) -> None:
    from diffusers import FluxImg2ImgPipeline

    fields = {"prompt": "a blue six on red", "seed": 5, "num_inference_steps": 6, "strength": 0.5, "n": 2}
    status, answer = edit(server, fields, ("image", picture()))
    assert status == 200, answer
    pipe: Any = FluxImg2ImgPipeline.from_pretrained(int8, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    image = Image.open(io.BytesIO(picture()))
    for index, row in enumerate(answer["data"]):
        noise = [torch.Generator().manual_seed(5 + index)]
        call = CALL | {"num_inference_steps": 6, "strength": 0.5, "generator": noise}
        expected = pipe(prompt=[fields["prompt"]], image=image, **call).images[0]
        made = Image.open(io.BytesIO(base64.b64decode(row["b64_json"])))
        assert made.tobytes() == expected.tobytes() and row["steps_computed"] == 3
    status, text = edit(server, fields | {"stream": "true", "n": 1}, ("image[]", picture(kind="JPEG")))
    assert [each["type"] for each in events(text)] == ["image_edit.progress"] * 3 + ["image_edit.completed"]


@pytest.mark.parametrize(
    ("fields", "files", "said"),
    [
        ({}, [], "send a PNG, JPEG or WebP"),
        ({}, [("image", b"GIF89a")], "no PNG, JPEG or WebP"),
        ({}, [("image", picture()[:60])], "no PNG, JPEG or WebP"),
        ({}, [("image", bomb(9_000))], "9000 x 9000 are 81000000 pixels, 4096 at most"),
        ({}, [("image", bomb(60_000))], "no PNG, JPEG or WebP"),
        ({}, [("image", picture((80, 80)))], "80 x 80"),
        ({}, [("image", picture()), ("image[]", picture())], "begins with one image, and 2 came"),
        ({}, [("image", picture()), ("mask", picture())], "no file 'mask'"),
        ({"strength": 0}, [("image", picture())], "strength"),
        ({"strength": 1e-300}, [("image", picture())], "strength: of 2 steps it leaves none"),
        ({"strength": "nan"}, [("image", picture())], "strength"),
        ({"strenght": 1}, [("image", picture())], "no field 'strenght'"),
        ({"lora": "style"}, [("image", picture())], "lora: write JSON"),
    ],
)
def test_forms_that_cannot_be_are_refused_by_name(server: Any, fields: dict, files: list, said: str) -> None:
    status, answer = edit(server, {"prompt": "a", "num_inference_steps": 2, **fields}, *files)
    assert status == 400 and said in answer["error"]["message"], answer


def test_a_body_that_is_no_form_is_refused(server: Any) -> None:
    bodies = {"application/json": b"{}", "multipart/form-data": b"--x", "multipart/form-data; boundary=yy": b"x" * 99}
    for kind, body in bodies.items():
        status, _, answer = ask(server, EDITS, body, **{"Content-Type": kind})
        assert status == 400 and "message" in answer["error"], answer
