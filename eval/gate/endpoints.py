"""Servers with OpenAI's images API as sources of images: `http://host:port`, `http://host:port/v1#model`.

    POST {base}/images/generations   {"model", "prompt", "n": 1, "size", "response_format": "b64_json", "seed", …}

`seed`, `num_inference_steps`, `guidance_scale` and the other arguments of the call are extensions, under diffusers'
names, which vLLM-Omni and SGLang-Diffusion take. A server may ignore what it does not know. The seed and the size are
tried before anything is compared. Answers are kept as an image folder, so that nothing is asked twice; one image is
asked for anew in each gate, which shows that it is still the same server.

An answer is a stranger's: its bytes, pixels, formats and seconds are bounded, and neither a redirect nor an address in
it leads to another server.

Source of the API: platform.openai.com/docs/api-reference/images.
"""

from __future__ import annotations

import base64
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch
from PIL import Image, UnidentifiedImageError

from fluxq.base.console import first_line, logger, progress, visible
from fluxq.base.files import atomic_path, is_text, sha256_json
from fluxq.base.output import sole_writer
from fluxq.eval.gate.pictures import PROMPTS_FILE, Pictures, line_of, read_pictures
from fluxq.eval.metrics.fidelity import psnr

KEY = "OPENAI_API_KEY"  # environment variable
TIMEOUT, LIST_TIMEOUT = 600.0, 30.0  # seconds for one image, and for the list of models
TRIES, PATIENCE = 3, 600.0  # of a server's own faults; seconds of waiting for a rate limit
LEAST_WAIT, NOTED_WAIT = 1.0, 5.0  # seconds between tries at a limited rate, and from which on a wait is logged
MOST_PIXELS = 1 << 24  # of an image whose size was not asked for
ROOM = 1 << 20  # bytes of an answer besides its image
FORMATS = ("PNG", "JPEG", "WEBP")  # that the API has; PIL reads others by programs that it starts
_ERROR_BYTES = 2000  # bytes of an error's answer that are read
NEARER = 3.0  # dB by which two images of one seed are nearer than those of two seeds, where the seed counts

T = TypeVar("T")


@dataclass(frozen=True)
class EndpointSource:
    """A server that makes images.

    base: address up to `/v1`. model: name that is sent. call: arguments of a pipeline's call, as options name them.
    run: 0; another number for another run, kept apart. has_latents, items, machine: see `sources`.
    """

    base: str
    model: str
    call: Mapping[str, Any]
    root: Path
    run: int = 0
    timeout: float = TIMEOUT
    has_latents: bool = False
    items: None = None
    machine: None = None

    @property
    def name(self) -> str:
        return f"{visible(self.model)} at {urlsplit(self.base).netloc}{f', run {self.run + 1}' if self.run else ''}"

    def again(self) -> EndpointSource:
        """Return it asked once more."""
        return replace(self, run=1)

    def describe(self) -> dict[str, Any]:
        return {"kind": "endpoint", "base": self.base, "model": self.model, "request": self._request("", 0)}

    @property
    def folder(self) -> Path:
        """Image folder of its answers."""
        return self.root / f"endpoint-{sha256_json([self.base, self._request('', 0), self.run])[:16]}"

    def make(self, items: Sequence[tuple[str, int]]) -> Pictures:
        """Ask for what is missing; RuntimeError for an answer that is no image. Answers so far are kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        listing = self.folder / PROMPTS_FILE
        with sole_writer(listing):
            _drop_torn_line(listing)
            has_rows = listing.is_file() and listing.stat().st_size > 0
            made = set(read_pictures(self.folder).items) if has_rows else set()
            missing = [item for item in items if item not in made]
            for prompt, seed in progress(missing, f"Asking: {self.name}", len(missing)):
                name = f"{sha256_json([prompt, seed])[:16]}.png"
                with atomic_path(self.folder / name) as part:
                    self.ask(prompt, seed).save(part, format="PNG")
                with listing.open("a", encoding="utf-8") as file:
                    file.write(line_of(prompt, seed, name))
        return read_pictures(self.folder).make(items)

    def require_seeds(self, prompt: str, seed: int) -> None:
        """Raise ValueError where the server ignores the seed, or is another one than that of the kept images.

        It is asked for one image, for the same once more, in every gate anew, and for one with another seed.
        """
        from torchvision.transforms.functional import pil_to_tensor

        one, other = self.make([(prompt, seed), (prompt, seed ^ 1)]).images
        again = pil_to_tensor(self.ask(prompt, seed))
        if not one.shape == other.shape == again.shape:
            raise ValueError(
                f"{self.name}: images of {', '.join(map(_size_of, (one, other, again)))} pixels of one prompt; give "
                "--height and --width, or another --work if the server was changed"
            )
        if torch.equal(one, other):
            raise ValueError(
                f"{self.name} makes one image for every seed: it ignores the seed, and nothing can be compared"
            )
        same, different = (float(psnr([one], [each])[0]) for each in (again, other))
        if same < different + NEARER:
            raise ValueError(
                f"{self.name} makes another image when it is asked again with the same seed (PSNR {same:.1f} dB; with "
                f"another seed {different:.1f}): it ignores the seed, and nothing can be compared image by image; or "
                f"the server was changed since {self.folder} was made: then give another --work"
            )

    def ask(self, prompt: str, seed: int) -> Image.Image:
        """Return the image of a prompt and a seed, in RGB."""
        answer = _read_json(self._send(f"{self.base}/images/generations", self._request(prompt, seed)), self.base)
        data = answer.get("data")
        row = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        if isinstance(row.get("b64_json"), str):
            try:
                return self._image(base64.b64decode(row["b64_json"], validate=True))
            except ValueError:  # binascii.Error, and letters beyond ASCII
                raise RuntimeError(f"{self.name}: b64_json of its answer is not base64, or ends too early") from None
        if isinstance(row.get("url"), str):
            return self._image(self._fetch(row["url"]))
        raise RuntimeError(f"{self.name}: an answer without data[0].b64_json or data[0].url: {_shown(answer)}")

    def _request(self, prompt: str, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "n": 1,
            "response_format": "b64_json",
            "seed": seed,
        }
        if self._size is not None:
            body["size"] = "x".join(map(str, self._size))
        return body | {name: value for name, value in self.call.items() if name not in ("width", "height")}

    @property
    def _size(self) -> tuple[int, int] | None:
        """Width and height that are asked for."""
        return (self.call["width"], self.call["height"]) if "width" in self.call else None

    @property
    def _most_pixels(self) -> int:
        return MOST_PIXELS if self._size is None else self._size[0] * self._size[1]

    def _fetch(self, address: str) -> bytes:
        """Read an image that an answer names, from the same server only: it could name any other."""
        try:
            target, base = urlsplit(urljoin(f"{self.base}/", address)), urlsplit(self.base)
            is_same = address.isprintable() and (target.scheme, target.netloc) == (base.scheme, base.netloc)
        except ValueError:
            is_same = False
        if not is_same:
            raise RuntimeError(
                f"{self.name}: its answer names an image elsewhere ({_shown(address)}), which is not read"
            )
        return self._send(target.geturl())

    def _send(self, address: str, body: Mapping[str, Any] | None = None) -> bytes:
        longest = ROOM + 5 * self._most_pixels  # three bytes of noise in a pixel are four letters of base64
        return send(address, body, self.timeout, longest)

    def _image(self, content: bytes) -> Image.Image:
        """Decode an image; RuntimeError for one that is none, of another size than was asked for, or too large."""
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if self._size not in (None, image.size) or image.width * image.height > self._most_pixels:
                    remark = "" if self._size is None else f", and {self._size[0]} x {self._size[1]} were asked for"
                    raise RuntimeError(f"{self.name}: an image of {image.width} x {image.height} pixels{remark}")
                if image.mode not in ("RGB", "RGBA", "L", "P"):
                    raise RuntimeError(f"{self.name}: an image of mode {image.mode}, expected 8-bit RGB")
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise RuntimeError(f"{self.name}: its answer is no image that can be read ({first_line(error)})") from None


def endpoint_of(text: str, call: Mapping[str, Any], root: Path) -> EndpointSource:
    """Return the source of an address; without `#model` it is the first that the server lists.

    Raises ValueError for an address that cannot be and half a size, ConnectionError where nothing answers, RuntimeError
    for a server that lists no model.
    """
    address, _, model = text.partition("#")
    try:
        parts = urlsplit(address)
        is_good = parts.hostname and parts.port != 0 and not (parts.username or parts.password or parts.query)
    except ValueError:  # a port of six digits, half a bracket
        is_good, parts = False, urlsplit("")
    if not is_good or not address.isascii() or not address.isprintable() or " " in address:
        raise ValueError(f"{visible(text)}: write an address as in http://localhost:8000/v1 (a key goes into {KEY})")
    if ("width" in call) != ("height" in call):
        raise ValueError(f"{text}: a server is asked for a whole size; give both --height and --width, or neither")
    base = address.rstrip("/")
    base = base if parts.path.rstrip("/") else f"{base}/v1"
    return EndpointSource(base, model or _first_model(base), call, root)


def _first_model(base: str) -> str:
    rows = _read_json(send(f"{base}/models", None, LIST_TIMEOUT, ROOM), base).get("data")
    names = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not names or not isinstance(names[0], str) or not is_text(names[0]):
        raise RuntimeError(f"{base}/models lists no model; name one: {base}#MODEL")
    return names[0]


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: it could lead to another server, with the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def send(address: str, body: Mapping[str, Any] | None, timeout: float, longest: int) -> bytes:
    """Send a request and return the answer's bytes; wait where the server says so, and try again after its own faults.

    timeout: seconds for the whole answer. longest: bytes of it.

    Raises ValueError for a key that no header takes, ConnectionError where nothing answers, TimeoutError, and
    RuntimeError for an error that it answers and for an answer that is too long.
    """
    headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body is not None else {})
    if key := _key():
        headers["Authorization"] = f"Bearer {key}"
    request = Request(address, None if body is None else json.dumps(body).encode(), headers)
    waited, tries = 0.0, 0
    while True:
        try:
            code, after, content = _within(timeout, lambda: _answer(request, timeout, longest))
        except (OSError, HTTPException, ValueError) as error:  # URLError is an OSError
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise TimeoutError(f"{address} gave no answer within {timeout:.0f} s") from None
            raise ConnectionError(f"{address} does not answer: {_shown(first_line(error))}") from None
        if 200 <= code < 300:
            return content
        waits = _seconds_to_wait(code, after, tries)
        tries += code != 429
        waited += waits or 0.0
        if waits is None or waited > PATIENCE:
            raise RuntimeError(f"{address} answers {code} ({_error_text(content)})")
        if waits >= NOTED_WAIT:
            logger.info("%s answers %d; asking again in %.0f s", address, code, waits)
        time.sleep(waits)


def _answer(request: Request, timeout: float, longest: int) -> tuple[int, str, bytes]:
    """Return the status, Retry-After and the content, of an error its beginning."""
    try:
        with build_opener(_NoRedirect()).open(request, timeout=timeout) as answer:
            content = answer.read(longest + 1)
            if len(content) > longest:
                raise RuntimeError(f"{request.full_url}: its answer is longer than {longest} bytes, which no image is")
            if answer.length:
                raise RuntimeError(f"{request.full_url} ended its answer {answer.length} bytes too early")
            return answer.status, "", content
    except HTTPError as error:
        with error:
            return error.code, error.headers.get("Retry-After") or "", error.read(_ERROR_BYTES)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` does; TimeoutError after so many seconds, however many bytes trickle in."""
    done: list[T | BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)  # one that hangs goes with the process
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def _key() -> str:
    """Return the key, "" for none. ValueError for one that cannot be sent: the library's own message would show it."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"{KEY} holds characters that no key has; set it again")
    return key


def _seconds_to_wait(code: int, after: str, tries: int) -> float | None:
    """Return the seconds until the next try; None where there is none."""
    if code == 429:
        return max(LEAST_WAIT, _retry_after(after))
    return max(0.5 * 2**tries, _retry_after(after)) if code >= 500 and tries + 1 < TRIES else None


def _retry_after(text: str) -> float:
    """Return the seconds of Retry-After, a number or a date; 0 for anything else, and at most PATIENCE + 1."""
    text = text.strip()[:100]
    try:
        seconds = float(text) if text.isdecimal() else (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):  # no date, one without a zone, one of another age
        return 0.0
    return min(seconds, PATIENCE + 1)


def _error_text(content: bytes) -> str:
    """Return the server's own words about an error, cut short."""
    text = content.decode(errors="replace")
    try:
        answer = json.loads(text)
        problem = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
    except (ValueError, RecursionError):
        text = "HTML" if "<html" in text.lower() else text
    return _shown(text) or "and says nothing"


def _shown(value: Any) -> str:
    """Return a stranger's value for a message: short, in one line, as UTF-8 can hold it, and without the key."""
    text, key = str(value), _key()
    text = text.replace(key, "…") if key else text
    return visible(" ".join(text.split())[:200]).encode(errors="backslashreplace").decode()


def _read_json(content: bytes, base: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        what = "HTML" if b"<html" in content[:1000].lower() else "something that is not JSON"
        raise RuntimeError(
            f"{base} answers {what}: is it the address of OpenAI's API, as http://localhost:8000/v1?"
        ) from None
    if not isinstance(value, dict):
        raise RuntimeError(f"{base}: an answer that is no JSON object: {_shown(value)}")
    return value


def _size_of(image: torch.Tensor) -> str:
    return f"{image.shape[-1]} x {image.shape[-2]}"


def _drop_torn_line(listing: Path) -> None:
    """Cut off a last line without its end, which a killed process left."""
    if listing.is_file():
        content = listing.read_bytes()
        if content and not content.endswith(b"\n"):
            with atomic_path(listing) as part:
                part.write_bytes(content[: content.rfind(b"\n") + 1])
