"""OpenAI's images API as values: what a request may say, the images that it asks for, what an answer tells.

    POST /v1/images/generations   {"prompt", "model", "n", "size": "WxH", "output_format", "stream", …}
    POST /v1/images/edits         the same as a form, with files `image` or `image[]`

`seed`, `num_inference_steps`, `guidance_scale`, `true_cfg_scale`, `negative_prompt`, `max_sequence_length`, `lora`,
`width` and `height` are extensions, under the names that vLLM-Omni and SGLang-Diffusion have for them; `deadline_ms`
and `elastic` are of fluxq alone. A field that is unknown is refused, so that nobody believes in what had no effect.

Source of the API: platform.openai.com/docs/api-reference/images.
"""

from __future__ import annotations

import base64
import io
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from PIL import Image
from pydantic import BeforeValidator, Field

from fluxq.base.console import did_you_mean
from fluxq.calibrate.prompts import upright
from fluxq.serve.dispatcher import Made
from fluxq.serve.elastic import Setting
from fluxq.serve.orders import Facts, Order, Refused, Source, Strict

MAX_SEED = (1 << 63) - 1
_RANDOM_SEEDS = 1 << 31
LONGEST = 10_000  # characters of a prompt; no text encoder reads a tenth of it
_OTHER_NAMES = {"steps": "num_inference_steps"} | dict.fromkeys(("cfg", "cfg_scale", "guidance"), "guidance_scale")
_ARGUMENTS = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt", "max_sequence_length")
FPS = 16  # of a video whose request says nothing
_LONGEST_SIDE = {"webp": 16383, "jpeg": 65500}  # pixels that a file holds
NO_HEADER = "the body is read as JSON only with the header Content-Type: application/json"
_STRENGTH = 0.6  # of image-to-image, as most of diffusers' pipelines have it


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    body: bytes. images: of one request. pixels, steps: of one image. pixel_steps: pixels of all steps of all images.
    """

    body: int = 8 << 20
    images: int = 10
    pixels: int = 1 << 22
    steps: int = 100
    pixel_steps: float = 6e8


class Lora(Strict):
    """An adapter of the server's folder, by its name; names of the fields as vLLM-Omni takes them."""

    name: str = Field(min_length=1, max_length=200)
    scale: float = Field(default=1.0, ge=-10, le=10)


class ImageRequest(Strict):
    """Body of a request for images."""

    prompt: str = Field(min_length=1, max_length=LONGEST)
    model: str | None = Field(default=None, max_length=200)
    n: int | None = Field(default=1, ge=1)
    size: str | None = Field(default=None, max_length=20, description='"WxH" in pixels, or "auto"')
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100, description="quality of jpeg and webp")
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3, description="accepted; none is sent")

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: float | None = Field(default=None, ge=0, le=100)
    true_cfg_scale: float | None = Field(default=None, ge=0, le=100)
    negative_prompt: str | None = Field(default=None, max_length=LONGEST)
    max_sequence_length: int | None = Field(default=None, ge=1, le=4096)
    lora: Lora | None = None
    width: int | None = Field(default=None, ge=1)
    height: int | None = Field(default=None, ge=1)
    deadline_ms: int | None = Field(default=None, ge=1, le=86_400_000)
    elastic: bool | None = Field(default=None, description="false: no other setting under a backlog")

    background: Literal["auto", "opaque"] | None = None
    # Without effect here: a checkpoint has one quality, and noise is drawn on the CPU.
    quality: str | None = Field(default=None, max_length=20)
    style: str | None = Field(default=None, max_length=20)
    moderation: str | None = Field(default=None, max_length=20)
    user: str | None = Field(default=None, max_length=200)
    generator_device: str | None = Field(default=None, max_length=20)
    vae_use_slicing: bool | None = None
    vae_use_tiling: bool | None = None


class EditRequest(ImageRequest):
    """Fields of a request to change an image, which come as a form. strength: of image-to-image."""

    strength: float | None = Field(default=None, gt=0, le=1)
    input_fidelity: str | None = Field(default=None, max_length=20, description="without effect")


def _number_of_text(value: Any) -> Any:
    """Return the number that a text holds, as OpenAI's clients write it; anything else as it is."""
    return float(value) if isinstance(value, str) else value


class VideoRequest(ImageRequest):
    """Body, or fields of a form, of a request for a video. `seconds` times `fps` is the number of frames."""

    seconds: Annotated[float | None, Field(gt=0, le=600), BeforeValidator(_number_of_text)] = None
    fps: int | None = Field(default=None, ge=1, le=120)
    num_frames: int | None = Field(default=None, ge=1, le=10_000)


AnyRequest = TypeVar("AnyRequest", bound=ImageRequest)


def of_form(kind: type[AnyRequest], fields: Mapping[str, str]) -> AnyRequest:
    """Read the texts of a form; pydantic's ValidationError for what cannot be."""
    values: dict[str, Any] = dict(fields)
    if "lora" in values:
        try:
            values["lora"] = json.loads(values["lora"])
        except (ValueError, RecursionError):
            raise Refused('lora: write JSON, as in {"name": "style", "scale": 1}', "lora") from None
    elif lora := {name[5:-1]: values.pop(name) for name in fields if re.fullmatch(r"lora\[\w+\]", name)}:
        values["lora"] = lora  # as OpenAI's client writes it
    return kind.model_validate(values, strict=False)


def source_of(content: bytes, limits: Limits) -> Source:
    """Decode an image of a request; `Refused` for none, and before it is decoded for one of too many pixels."""
    size = None
    try:
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as image:
            size = image.size
            if size[0] * size[1] <= limits.pixels:
                turned = upright(image)  # as phones take photos
                return Source(*turned.size, turned.convert("RGB").tobytes())
    except (OSError, SyntaxError, ValueError, EOFError, MemoryError, Image.DecompressionBombError):
        size = None
    if size is None:
        raise Refused("image: no PNG, JPEG or WebP that can be read", "image")
    raise Refused(f"image: {size[0]} x {size[1]} are {size[0] * size[1]} pixels, {limits.pixels} at most", "image")


def problem_of(errors: Sequence[Mapping[str, Any]]) -> Refused:
    """Return pydantic's first error in words, without the value: it may be a prompt."""
    first = errors[0]
    names = [str(part) for part in first.get("loc", ()) if part != "body"]
    name = ".".join(names)[:80]
    if first.get("type") == "extra_forbidden":
        known = _OTHER_NAMES.get(name)
        meant = f" (did you mean {known!r}?)" if known else did_you_mean(name, ImageRequest.model_fields)
        return Refused(f"there is no field {name!r}{meant}", name)
    if first.get("type") == "json_invalid":
        return Refused("the body is not valid JSON")
    if not names and isinstance(first.get("input"), bytes):
        return Refused(NO_HEADER)
    return Refused(f"{name or 'the body'}: {str(first.get('msg', 'not valid'))[:200]}", name or None)


def orders_of(
    request: ImageRequest,
    facts: Facts,
    limits: Limits,
    adapters: Mapping[str, str],
    number: Callable[[], int],
    sources: tuple[Source, ...] = (),
) -> list[Order]:
    """Return the images of a request; `Refused` names the field that cannot be.

    adapters: known names of LoRAs. number: of the next order. sources: images that come with the request.
    """
    if request.response_format == "url":
        raise Refused("response_format: images come as b64_json; this server keeps none", "response_format")
    count = request.n or 1
    if count > limits.images:
        raise Refused(f"n is {count}, {limits.images} at most", "n")
    call = {**facts.defaults, **_size_of(request, facts), **_arguments_of(request, facts)}
    _require_route(request, facts)
    _require_size(call["width"], call["height"], request, limits)
    if sources:
        call |= _editing_of(request, facts, sources)
    elif facts.edits == "only":
        raise Refused(f"{facts.name} makes no image without another: ask /v1/images/edits", "model")
    steps = int(call["num_inference_steps"])
    if steps > limits.steps:
        raise Refused(f"num_inference_steps is {steps}, {limits.steps} at most", "num_inference_steps")
    frames = int(call.get(facts.frames) or 1)
    pixel_steps = call["width"] * call["height"] * frames * steps * count
    if pixel_steps > limits.pixel_steps:
        product = "width × height × steps × n" if frames == 1 else "width × height × frames × steps"
        raise Refused(f"{product} is {pixel_steps:g}, {limits.pixel_steps:g} at most", "size")
    seed = random_seed() if request.seed is None else request.seed
    if seed + count - 1 > MAX_SEED:
        raise Refused(f"seed: the last of {count} images would have a seed above {MAX_SEED}", "seed")
    lora = _lora_of(request.lora, adapters)
    text = request.prompt
    orders = [Order(number(), facts.name, text, seed + index, call, lora, sources, frames) for index in range(count)]
    if orders[0].steps < 1:
        raise Refused(f"strength: of {steps} steps it leaves none", "strength")
    return orders


def random_seed() -> int:
    """Return a seed for a request that says none."""
    return secrets.randbelow(_RANDOM_SEEDS)


def with_setting(request: ImageRequest, setting: Setting) -> ImageRequest | None:
    """Return a request under a setting; None where it says itself what the setting would change."""
    changes: dict[str, Any] = {}
    for name in ("model", "num_inference_steps"):
        if (value := getattr(setting, name)) is not None:
            if getattr(request, name) is not None:
                return None
            changes[name] = value
    return request.model_copy(update=changes)


def _require_route(request: ImageRequest, facts: Facts) -> None:
    if facts.frames and not isinstance(request, VideoRequest):
        raise Refused(f"{facts.name} makes videos: ask /v1/videos", "model")
    if isinstance(request, VideoRequest):
        if not facts.frames:
            raise Refused(f"{facts.name} makes images: ask /v1/images/generations", "model")
        if (request.n or 1) > 1:
            raise Refused("n: one video of a request", "n")


def _require_size(width: int, height: int, request: ImageRequest, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise Refused(f"{width} x {height} are {width * height} pixels, {limits.pixels} at most", "size")
    kind = "webp" if isinstance(request, VideoRequest) else request.output_format or "png"
    longest = _LONGEST_SIDE.get(kind, max(width, height))
    if max(width, height) > longest:
        raise Refused(f"{width} x {height}: {kind} holds {longest} pixels a side at most", "size")


def _size_of(request: ImageRequest, facts: Facts) -> dict[str, int]:
    """Return width and height; none where the request leaves them to the checkpoint."""
    width, height = request.width, request.height
    if request.size not in (None, "auto"):
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", request.size or "")
        if match is None:
            raise Refused("size: write WIDTHxHEIGHT in pixels, as in 1024x1024, or auto", "size")
        size = int(match[1]), int(match[2])
        if width not in (None, size[0]) or height not in (None, size[1]):
            raise Refused("size, width and height contradict each other: give one of them", "size")
        width, height = size
    if width is None and height is None:
        return {}
    if width is None or height is None:
        raise Refused("width and height: give both, or neither", "width")
    for name, value in (("width", width), ("height", height)):
        if value % facts.unit:
            raise Refused(f"{name} is {value}, expected a multiple of {facts.unit}", "size")
    return {"width": width, "height": height}


def _arguments_of(request: ImageRequest, facts: Facts) -> dict[str, Any]:
    given = {name: value for name in _ARGUMENTS if (value := getattr(request, name)) is not None}
    if isinstance(request, VideoRequest) and facts.frames:
        seconds, frames = request.seconds, request.num_frames
        if seconds is not None and frames is not None:
            raise Refused("seconds and num_frames: give one of them", "seconds")
        frames = round(seconds * (request.fps or FPS)) if seconds is not None else frames
        given |= {facts.frames: max(1, frames)} if frames is not None else {}
    for name in given:
        if name not in facts.accepts:
            raise Refused(f"{facts.name} takes no {name}: leave it out", name)
    return given


def _editing_of(request: ImageRequest, facts: Facts, sources: tuple[Source, ...]) -> dict[str, float]:
    strength = getattr(request, "strength", None)
    if not facts.edits:
        raise Refused(f"{facts.name} makes images from texts alone", "image")
    if facts.edits != "strength":
        if strength is not None:
            raise Refused(f"{facts.name} takes no strength: leave it out", "strength")
        return {}
    if len(sources) > 1:
        raise Refused(f"{facts.name} begins with one image, and {len(sources)} came", "image")
    return {"strength": _STRENGTH if strength is None else strength}


def _lora_of(lora: Lora | None, adapters: Mapping[str, str]) -> tuple[str, float] | None:
    if lora is None:
        return None
    if lora.name not in adapters:
        raise Refused(f"lora: there is no adapter of that name{did_you_mean(lora.name, adapters)}", "lora")
    return lora.name, lora.scale


def file_of(made: Made, request: ImageRequest) -> str:
    """Return an image's file in base64."""
    picture, kind = made.picture, request.output_format or "png"
    image = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
    file, compression = io.BytesIO(), request.output_compression
    quality = {} if kind == "png" else {"quality": 100 if compression is None else compression}
    image.save(file, kind.upper(), **quality)
    return base64.b64encode(file.getvalue()).decode()


def answer_of(made: Sequence[Made], files: Sequence[str], request: ImageRequest) -> dict[str, Any]:
    """Return the answer to a request: OpenAI's fields, and how each image can be made again."""
    rows = [{"b64_json": file, **told(each)} for each, file in zip(made, files, strict=True)]
    return {"created": int(time.time()), "data": rows, **_shape(made[0], request)}


def completed(made: Made, file: str, request: ImageRequest) -> dict[str, Any]:
    """Return the event of a finished image."""
    row = {"type": f"{_event_of(request)}.completed", "b64_json": file, "created_at": int(time.time())}
    return row | _shape(made, request) | told(made)


def progress(news: Mapping[str, Any], request: ImageRequest) -> dict[str, Any]:
    """Return the event of a step, which is fluxq's own."""
    return {"type": f"{_event_of(request)}.progress", **news}


def _event_of(request: ImageRequest) -> str:
    return "image_edit" if isinstance(request, EditRequest) else "image_generation"


def _shape(made: Made, request: ImageRequest) -> dict[str, Any]:
    width, height = made.order.size
    shape = {"size": f"{width}x{height}", "quality": "auto", "background": "opaque"}
    return shape | {"output_format": request.output_format or "png", "model": made.order.model}


def told(made: Made) -> dict[str, Any]:
    """Return how an image was made. queue_ms: time in which it did not run."""
    return {
        "seed": made.order.seed,
        "checkpoint": made.digest,
        "steps": made.order.steps,
        "steps_computed": made.picture.computed,
        "queue_ms": round(1000 * made.queued, 1),
        "compute_ms": round(1000 * made.computed, 1),
        "predicted_ms": round(1000 * made.predicted, 1),
        **({"setting": made.setting} if made.setting else {}),
    }


def error_of(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
