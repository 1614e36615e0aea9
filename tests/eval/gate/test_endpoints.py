"""Servers as sources of a gate: real ones of a few lines, sound and hostile."""

import hashlib
import io
import re
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from image_servers import Answer, as_json, bomb, serving
from PIL import Image

from fluxq.base.files import is_text
from fluxq.eval.gate import endpoints
from fluxq.eval.gate.endpoints import EndpointSource, endpoint_of
from fluxq.eval.gate.pictures import PROMPTS_FILE

CALL = {"height": 8, "width": 8, "num_inference_steps": 2}


def picture(prompt: str, seed: int, size: int = 8, kind: str = "PNG") -> bytes:
    noise = hashlib.shake_128(f"{prompt} {seed}".encode()).digest(3 * size * size)
    file = io.BytesIO()
    Image.frombytes("RGB", (size, size), noise).save(file, kind)
    return file.getvalue()


def sound(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return as_json(picture(body["prompt"], body["seed"]))


def server(answer: Answer) -> AbstractContextManager[tuple[str, list[dict[str, Any]]]]:
    """Serve answers, and one image by its address."""
    return serving(answer, picture("by url", 0))


def test_images_are_asked_for_once_and_kept(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server(sound) as (address, asked):
        source = endpoint_of(address, CALL, tmp_path)
        assert source.model == "first" and source.base == f"{address}/v1"
        source.make([("a", 0)])
        listing = source.folder / PROMPTS_FILE
        listing.write_bytes(listing.read_bytes() + b'{"prompt": "torn')
        images = source.make([("b", 1), ("a", 0)])
        source.require_seeds("a", 0)
    assert images.items == (("b", 1), ("a", 0)) and images.images[0].shape == (3, 8, 8)
    assert [(each["prompt"], each["seed"]) for each in asked] == [("a", 0), ("b", 1), ("a", 1), ("a", 0)]
    wanted = {"model": "first", "n": 1, "size": "8x8", "response_format": "b64_json", "num_inference_steps": 2}
    assert wanted.items() <= asked[0].items() and asked[0]["key"] == "Bearer secret"
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda body: as_json(picture("x", 0)), "makes one image for every seed"),
        (lambda body: as_json(picture("x", id(body) + len(CLOCK))), "another image when it is asked again"),
        (lambda body: as_json(picture("x", 0, 8 + body["seed"])), "m at 127.*images of 8 x 8, 9 x 9, 8 x 8 pixels"),
    ],
    ids=["constant", "random", "sizes"],
)
def test_a_server_that_ignores_the_seed_is_found_out(tmp_path: Path, answer: Answer, message: str) -> None:
    def counted(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        CLOCK.append(body)  # kept, so that no two have one id
        return answer(body)

    with server(counted) as (address, _), pytest.raises(ValueError, match=message):
        endpoint_of(f"{address}#m", {}, tmp_path).require_seeds("a", 0)


CLOCK: list[Any] = []


@pytest.mark.often(15)
@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, {}, b"<html><body>hello"), "answers HTML: is it the address"),
        ((200, {}, b"[1]"), "no JSON object"),
        ((200, {}, b'{"data": []}'), "without data"),
        ((200, {}, b'{"data": {"b64_json": 1}}'), "without data"),
        ((200, {}, b'{"data": [{"b64_json": "?"}]}'), "not base64"),
        (as_json(b"not an image"), "no image that can be read"),
        (as_json(picture("a", 0)[:60]), "no image that can be read"),
        ((200, {}, b'{"data": [{"url": "file:///etc/passwd"}]}'), "names an image elsewhere"),
        ((200, {}, b'{"data": [{"url": "http://127.0.0.1:1/x.png"}]}'), "names an image elsewhere"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "answers 302"),
        ((400, {}, b'{"error": {"message": "no such size\\u001b[31m"}}'), r"answers 400 \(no such size"),
        ((401, {}, b"<html>no"), r"answers 401 \(HTML\)"),
        ((401, {}, b'{"error": "bad key s3cret"}'), r"answers 401 \(bad key …\)"),
        ((200, {}, b'{"you_sent": "Bearer s3cret"}'), "without data.*Bearer …"),
        ((200, {}, b'["Bearer s3cret"]'), "no JSON object.*Bearer …"),
        ((200, {}, b'{"data": [{"url": "http://other/?s3cret"}]}'), r"names an image elsewhere \(http://other/\?…\)"),
        ((200, {"Content-Length": "999"}, b"{}"), "ended its answer 997 bytes too early"),
        ((200, {"Content-Length": "x"}, b"{}"), "without data"),
        ((200, {}, b'{"data": [{"url": "http://["}]}'), "names an image elsewhere"),
        ((200, {}, b'{"data": [{"url": "/\\ud800"}]}'), "names an image elsewhere"),
        ((400, {}, b'{"error": "\\ud800"}'), "answers 400"),
        ((200, {}, b'{"data": [{"url": "//127.0.0.1:1/x.png"}]}'), "names an image elsewhere"),
        ((200, {}, b"[" * 100_000), "not JSON"),
        ((200, {}, b'{"data": [{"b64_json": "\xc3\xa9"}]}'), "not base64"),
        ((200, {}, as_json(picture("a", 0))[2][:-8]), "not JSON"),
        (as_json(picture("a", 0, kind="BMP")), "no image that can be read"),  # as EPS, which starts another program
        (as_json(bomb(30_000)), "no image that can be read"),
        (as_json(bomb(8_000)), "an image of 8000 x 8000 pixels, and 8 x 8 were asked for"),
        (as_json(picture("a", 0, 7)), "an image of 7 x 7 pixels, and 8 x 8 were asked for"),
        ((200, {}, b" " * (2 << 20)), "longer than"),
    ],
)
def test_a_bad_answer_is_an_error_that_names_it(tmp_path: Path, monkeypatch, reply: tuple, message: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret\n")  # as a file has it; no header takes the end of a line
    with server(lambda _: reply) as (address, _):
        source = EndpointSource(f"{address}/v1", "m", CALL, tmp_path, timeout=2.0)
        with pytest.raises((RuntimeError, OSError), match=message) as caught:
            source.make([("a", 0)])
    assert not re.search("\x1b|s3cret", str(caught.value)) and is_text(str(caught.value))


def test_limits_of_a_rate_are_waited_for_and_its_own_faults_tried_again(tmp_path: Path, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(endpoints.time, "sleep", slept.append)
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    afters = ("7", "0", "soon", later)
    replies = [(429, {"Retry-After": after}, b"") for after in afters] + [(500, {}, b""), (503, {}, b"")]
    with server(lambda body: replies.pop(0) if replies else sound(body)) as (address, asked):
        EndpointSource(f"{address}/v1", "m", CALL, tmp_path).make([("a", 0)])
    assert slept[:3] == [7.0, 1.0, 1.0] and 15 < slept[3] < 21 and slept[4:] == [0.5, 1.0] and len(asked) == 7
    with (
        server(lambda _: (429, {"Retry-After": "100000"}, b"")) as (address, _),
        pytest.raises(RuntimeError, match="429"),
    ):
        EndpointSource(f"{address}/v1", "m", CALL, tmp_path).make([("a", 0)])
    with server(lambda _: (500, {}, b"")) as (address, asked), pytest.raises(RuntimeError, match="500"):
        EndpointSource(f"{address}/v1", "m", CALL, tmp_path).make([("a", 0)])
    assert len(asked) == endpoints.TRIES


def test_an_image_by_address_is_read_from_the_same_server(tmp_path: Path) -> None:
    with server(lambda _: (200, {}, b'{"data": [{"url": "/files/1.png"}]}')) as (address, _):
        images = EndpointSource(f"{address}/v1", "m", CALL, tmp_path).make([("a", 0)]).images
    assert images[0].shape == (3, 8, 8)


def test_a_size_that_was_not_asked_for_is_bounded_too(tmp_path: Path) -> None:
    with server(lambda _: as_json(bomb(8_000))) as (address, _):
        source = EndpointSource(f"{address}/v1", "m", {}, tmp_path)
        with pytest.raises(RuntimeError, match=r"8000 x 8000 pixels$"):
            source.make([("a", 0)])


@pytest.mark.parametrize("trickles", [True, False])
def test_a_server_that_is_slow_or_trickles_is_not_waited_for(tmp_path: Path, trickles: bool) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        time.sleep(0 if trickles else 0.5)
        code, _, content = sound(body)
        return code, ({"Trickle": "yes"} if trickles else {}), content

    with server(slow) as (address, _), pytest.raises(TimeoutError, match="no answer within"):
        EndpointSource(f"{address}/v1", "m", CALL, tmp_path, timeout=0.2).make([("a", 0)])


def test_a_key_that_cannot_be_sent_and_an_address_where_nobody_is(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConnectionError, match="does not answer"):
        endpoint_of("http://127.0.0.1:1/v1", CALL, tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "s3\ncret")
    with pytest.raises(ValueError, match="OPENAI_API_KEY holds") as caught:
        endpoint_of("http://127.0.0.1:1/v1", CALL, tmp_path)
    assert "cret" not in str(caught.value)


def test_kept_images_of_another_server_at_one_address_are_found_out(tmp_path: Path) -> None:
    version = ["old"]
    with server(lambda body: as_json(picture(version[0] + body["prompt"], body["seed"]))) as (address, _):
        source = endpoint_of(f"{address}#m", CALL, tmp_path)
        source.require_seeds("a", 0)
        version[0] = "new"
        with pytest.raises(ValueError, match=r"changed since .* was made: then give another --work"):
            source.require_seeds("a", 0)


ADDRESSES = ["http://", "http://u:p@host/v1", "http://host/v1?key=1", "http://h:99999", "http://[", "http://a b/v1"]


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="write an address as in"):
        endpoint_of(text, CALL, tmp_path)


def test_half_a_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both --height and --width"):
        endpoint_of("http://host/v1#m", {"height": 8}, tmp_path)
