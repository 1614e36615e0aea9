"""Servers with OpenAI's images API as sources of images: `http://host:port`, `http://host:port/v1#model`.

    POST {base}/images/generations   {"model", "prompt", "n": 1, "size", "response_format": "b64_json", "seed", …}

`seed`, `num_inference_steps`, `guidance_scale` and others are extensions, under the names that vLLM-Omni and
SGLang-Diffusion take. A server may ignore what it does not know, the seed too: that is found out by asking, before
anything is compared. Answers are kept as an image folder, so that nothing is asked twice.

Source of the API: platform.openai.com/docs/api-reference/images.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from PIL import Image, UnidentifiedImageError

from fluxq.base.console import first_line, progress, visible
from fluxq.base.files import atomic_path, sha256_json
from fluxq.base.output import sole_writer
from fluxq.eval.gate.pictures import PROMPTS_FILE, Pictures, line_of, read_pictures
from fluxq.eval.metrics.fidelity import psnr

KEY = "OPENAI_API_KEY"  # environment variable
TIMEOUT = 600.0  # seconds for one answer
TRIES, PATIENCE = 3, 600.0  # of a server's own faults; seconds of waiting for a rate limit
LONGEST_ANSWER = 1 << 27  # bytes
MOST_PIXELS = 1 << 26
EXTENSIONS = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt")
NEARER = 3.0  # dB by which two images of one seed are nearer than those of two seeds, where the seed counts


@dataclass(frozen=True)
class EndpointSource:
    """A server that makes images.

    base: address up to `/v1`. model: name that is sent. call: arguments of a pipeline's call, as options name them.
    run: 0, or 1 for the floor. has_latents, items, machine: as `Source` has them.
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
        return f"{self.model} at {urlsplit(self.base).netloc}{' again' * self.run}"

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
            made = {(row.prompt, row.seed) for row in read_pictures(self.folder).rows} if _has_rows(listing) else set()
            missing = [item for item in items if item not in made]
            for prompt, seed in progress(missing, f"Asking: {self.name}", len(missing)):
                name = f"{sha256_json([prompt, seed])[:16]}.png"
                with atomic_path(self.folder / name) as part:
                    self.ask(prompt, seed).save(part, format="PNG")
                with listing.open("a", encoding="utf-8") as file:
                    file.write(line_of(prompt, seed, name))
        return read_pictures(self.folder).of(items)

    def require_seeds(self, prompt: str, seed: int) -> None:
        """Raise ValueError where the server ignores the seed: asked twice for one image, and once with another seed."""
        one, other = self.make([(prompt, seed), (prompt, seed + 1)]).images
        (again,) = self.again().make([(prompt, seed)]).images
        if one.shape != again.shape or one.shape != other.shape:
            return  # sizes are compared, and refused, with the images
        same, different = (float(psnr([one], [each])[0]) for each in (again, other))
        if different == float("inf"):
            raise ValueError(
                f"{self.name} makes one image for every seed: it ignores the seed, and nothing is compared"
            )
        if same < different + NEARER:
            raise ValueError(
                f"{self.name} makes another image when it is asked again with the same seed (PSNR {same:.1f} dB; with "
                f"another seed {different:.1f}): it ignores the seed, and nothing can be compared image by image"
            )

    def ask(self, prompt: str, seed: int) -> Image.Image:
        """Return the image of a prompt and a seed, in RGB."""
        answer = _read_json(self._send("images/generations", self._request(prompt, seed)), self.base)
        data = answer.get("data")
        row = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        if isinstance(row.get("b64_json"), str):
            try:
                return _image(base64.b64decode(row["b64_json"], validate=True), self.name)
            except binascii.Error:
                raise RuntimeError(f"{self.name}: b64_json of its answer is not base64") from None
        if isinstance(row.get("url"), str):
            return _image(self._fetch(row["url"]), self.name)
        raise RuntimeError(f"{self.name}: an answer without data[0].b64_json or data[0].url: {_shown(answer)}")

    def _request(self, prompt: str, seed: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "n": 1,
            "response_format": "b64_json",
            "seed": seed,
        }
        if "width" in self.call and "height" in self.call:
            body["size"] = f"{self.call['width']}x{self.call['height']}"
        return body | {name: self.call[name] for name in EXTENSIONS if name in self.call}

    def _fetch(self, address: str) -> bytes:
        """Read an image that an answer names, from the same server only: it could name any other."""
        target, base = urlsplit(urljoin(f"{self.base}/", address)), urlsplit(self.base)
        if (target.scheme, target.netloc) != (base.scheme, base.netloc):
            raise RuntimeError(
                f"{self.name}: its answer names an image elsewhere ({_shown(address)}), which is not read"
            )
        return self._send(target.geturl())

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        return send(urljoin(f"{self.base}/", path), body, self.timeout)


def endpoint_of(text: str, call: Mapping[str, Any], root: Path) -> EndpointSource:
    """Return the source of an address; without `#model` it is the first that the server lists.

    Raises ValueError for an address that cannot be, ConnectionError where nothing answers, RuntimeError for a server
    that lists no model.
    """
    address, _, model = text.partition("#")
    parts = urlsplit(address)
    if not parts.hostname or parts.username or parts.password or parts.query:
        raise ValueError(f"{text}: write an address as in http://localhost:8000/v1 (a key goes into {KEY})")
    base = address.rstrip("/")
    base = base if parts.path.rstrip("/") else f"{base}/v1"
    if not model:
        rows = _read_json(send(f"{base}/models", None, TIMEOUT), base).get("data")
        names = [row["id"] for row in rows if isinstance(row, dict) and "id" in row] if isinstance(rows, list) else []
        if not names or not isinstance(names[0], str):
            raise RuntimeError(f"{base}/models lists no model; name one: {address}#MODEL")
        model = names[0]
    return EndpointSource(base, model, call, root)


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: it could lead to another server, with the key."""

    def redirect_request(self, *_: Any) -> None:
        return None


def send(address: str, body: Mapping[str, Any] | None, timeout: float) -> bytes:
    """Send a request and return the answer's bytes; wait where the server says so, and try again after its own faults.

    Raises ConnectionError where nothing answers, TimeoutError, and RuntimeError for an error that it answers.
    """
    headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if body is not None else {})
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    waited, tries = 0.0, 0
    while True:
        try:
            with build_opener(_NoRedirect()).open(Request(address, data, headers), timeout=timeout) as answer:
                content = answer.read(LONGEST_ANSWER + 1)
                said = int(answer.headers.get("Content-Length") or 0)
        except HTTPError as error:
            waits = _seconds_to_wait(error, tries)
            tries += error.code != 429
            waited += waits or 0.0
            if waits is None or waited > PATIENCE:
                raise RuntimeError(f"{address} answers {error.code} ({_said(error)})") from None
            time.sleep(waits)
            continue
        except TimeoutError:
            raise TimeoutError(f"{address} gave no answer within {timeout:.0f} s") from None
        except (URLError, OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise TimeoutError(f"{address} gave no answer within {timeout:.0f} s") from None
            raise ConnectionError(f"{address} does not answer: {first_line(error)}") from None
        if len(content) < min(said, LONGEST_ANSWER):
            raise ConnectionError(f"{address} ended its answer after {len(content)} of {said} bytes")
        if len(content) > LONGEST_ANSWER:
            raise RuntimeError(f"{address}: its answer is longer than {LONGEST_ANSWER >> 20} MiB, which no image is")
        return content


def _seconds_to_wait(error: HTTPError, tries: int) -> float | None:
    """Return the seconds until the next try; None where there is none."""
    if error.code == 429:
        after = (error.headers.get("Retry-After") or "").strip()
        return min(float(after), PATIENCE + 1) if after.isascii() and after.isdecimal() else 2.0
    return 0.5 * 2**tries if error.code >= 500 and tries + 1 < TRIES else None


def _said(error: HTTPError) -> str:
    """Return the server's own words about an error, cut short."""
    try:
        content = error.read(2000).decode(errors="replace")
    except (OSError, HTTPException):
        return str(error.reason)
    try:
        said = json.loads(content)
        problem = said.get("error", said) if isinstance(said, dict) else said
        return _shown(problem.get("message", problem) if isinstance(problem, dict) else problem)
    except ValueError:
        return "HTML" if "<html" in content.lower() else _shown(content or error.reason)


def _shown(value: Any) -> str:
    return visible(" ".join(str(value).split())[:200])


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


def _image(content: bytes, name: str) -> Image.Image:
    """Decode an image; RuntimeError for one that is none, or has more than MOST_PIXELS."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                raise RuntimeError(f"{name}: an image of {image.width} x {image.height} pixels, which is not read")
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise RuntimeError(f"{name}: its answer is no image that can be read ({first_line(error)})") from None


def _has_rows(listing: Path) -> bool:
    return listing.is_file() and listing.stat().st_size > 0


def _drop_torn_line(listing: Path) -> None:
    """Cut off a last line without its end, which a killed process left."""
    if listing.is_file():
        content = listing.read_bytes()
        if content and not content.endswith(b"\n"):
            with atomic_path(listing) as part:
                part.write_bytes(content[: content.rfind(b"\n") + 1])
