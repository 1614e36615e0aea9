"""Pairs of images for the page: 16 bit and a checkpoint from the same noise, and how they differ.

    map = log2(1 + max over channels |a − b|) / 8        of 255: equal is black, and one scale serves every checkpoint

The worker of `fluxq serve` makes the images, so a checkpoint shows what it serves. Every image is kept: with another
checkpoint of the same model only its own side is made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from fluxq.base.model import PLAN_FILE, ModelFolder
from fluxq.serve.api import ImageRequest, Limits, orders_of, problem_of
from fluxq.serve.orders import Facts, Order, Quantum, Refused
from fluxq.serve.server import names_of, original_of
from fluxq.serve.worker import Settings, Worker

SIXTEEN_BIT = "16 bit"
_KEPT = 64  # images

Tell = Callable[[str, int, int], None]  # name of the side, steps that are finished, and all of them


@dataclass(frozen=True)
class DemoOptions:
    """Options of `fluxq demo`, as the command has them. model: of all; by default what each was made from."""

    outputs: Sequence[str]
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 7860
    device: str = "auto"
    dtype: str = "bfloat16"
    max_memory: int | None = None
    max_steps: int = 100
    max_pixels: int = 1 << 22
    allow_unrecorded: bool = False


@dataclass(frozen=True)
class Side:
    """An image of one pipeline.

    image: uint8 (3, H, W).
    latents: fp32, as they leave the last step.
    seconds: of computing, without loading.
    stepping: seconds of all steps but the first, which also encodes the prompt and warms up; 0.0 for one step.
    """

    image: Tensor
    latents: Tensor
    seconds: float
    stepping: float


@dataclass(frozen=True)
class Pair:
    """Two images from the same noise. order: what was asked of the checkpoint, seed and size filled in."""

    order: Order
    original: Side
    quantized: Side

    @cached_property
    def psnr(self) -> float:
        """PSNR of the images in dB; infinite for the same bytes."""
        from fluxq.eval.metrics.fidelity import psnr

        return float(psnr([self.original.image], [self.quantized.image])[0])

    @cached_property
    def latent_sqnr(self) -> float:
        """SQNR of the final latents in dB."""
        from fluxq.eval.metrics.fidelity import sqnr

        return float(sqnr([self.original.latents], [self.quantized.latents])[0])

    @cached_property
    def difference(self) -> Tensor:
        """Largest difference of the channels at each pixel, uint8 (H, W)."""
        a, b = self.original.image.int(), self.quantized.image.int()
        return (a - b).abs().amax(0).to(torch.uint8)

    @property
    def error_map(self) -> Tensor:
        """Differences on the scale of all maps, uint8 (3, H, W)."""
        shown = torch.log2(1 + self.difference.float()) * (255 / 8)
        return shown.round().to(torch.uint8).expand(3, -1, -1)

    @property
    def speed(self) -> float | None:
        """Speed of the steps after the first, as a multiple of 16 bit's; None where there is but one."""
        return self.original.stepping / self.quantized.stepping if self.quantized.stepping else None


class Pairs:
    """Checkpoints and their 16-bit pipelines. Its methods may be called from any thread, and wait for each other."""

    def __init__(self, options: DemoOptions) -> None:
        """Load them; models that do not fit together take turns.

        Raises ValueError for a folder that `fluxq verify` refuses, a 16-bit model that is not its own, and a model that
        does not fit; FileNotFoundError for no checkpoint.
        """
        folders = names_of(options.outputs)
        originals = {name: _original(name, folder, options.model) for name, folder in folders.items()}
        self.limits = Limits(pixels=options.max_pixels, steps=options.max_steps, pixel_steps=float("inf"))
        self._originals = {name: f"{SIXTEEN_BIT}: {folder}" for name, folder in originals.items()}
        settings = Settings(
            folders,
            options.device,
            options.dtype,
            options.max_memory,
            originals={self._originals[name]: str(folder) for name, folder in originals.items()},
            unrecorded=options.allow_unrecorded,
        )
        self._worker, self._lock = Worker(settings), threading.Lock()
        self._sides: OrderedDict[tuple[str, str, int, str], Side] = OrderedDict()
        self._numbers = count()
        self._ends = False
        self.facts: dict[str, Facts] = {name: self._worker.load(name) for name in folders}
        for name, facts in self.facts.items():
            if facts.frames:
                raise ValueError(f"{folders[name]}: makes videos, and the demo compares images")
        for original in dict.fromkeys(self._originals.values()):
            self._worker.load(original)

    def end(self) -> None:
        """Let an image that is being made go, at its next step."""
        self._ends = True

    @property
    def device(self) -> str:
        """Device that computes, in torch's words."""
        return self._worker.settings.device

    def make(
        self,
        name: str,
        prompt: str,
        seed: int | None = None,
        steps: int | None = None,
        width: int | None = None,
        height: int | None = None,
        tell: Tell = lambda side, step, steps: None,
        stops: Callable[[], bool] = lambda: False,
    ) -> Pair:
        """Return both images of a request, made or kept; what is None is as the checkpoint has it, a seed drawn.

        name: of a checkpoint. tell: takes news of each step, in another thread. stops: whether nobody wants it any
        more; asked before the first step and after each.

        Raises `Refused`, a ValueError, for a request that cannot work, RuntimeError for one that was stopped, and what
        making an image raises.
        """
        try:
            request = ImageRequest(prompt=prompt, seed=seed, num_inference_steps=steps, width=width, height=height)
        except ValidationError as error:
            raise problem_of(error.errors()) from None
        if name not in self.facts:
            raise Refused(f"there is no checkpoint {name!r}", "model")
        with self._lock:
            (order,) = orders_of(request, self.facts[name], self.limits, {}, self._numbers.__next__)
            original = replace(order, number=next(self._numbers), model=self._originals[name])
            sides = [self._side(each, tell, stops) for each in (original, order)]
            return Pair(order, *sides)

    def _side(self, order: Order, tell: Tell, stops: Callable[[], bool]) -> Side:
        key = order.model, order.prompt, order.seed, repr(sorted(order.call.items()))
        if key not in self._sides:
            self._sides[key] = self._made(order, tell, stops)
            if len(self._sides) > _KEPT:
                self._sides.popitem(last=False)
        self._sides.move_to_end(key)
        return self._sides[key]

    def _made(self, order: Order, tell: Tell, stops: Callable[[], bool]) -> Side:
        quanta: list[Quantum] = []
        side = order.model if order.model in self.facts else SIXTEEN_BIT

        def require_wanted() -> None:
            if self._ends or stops():
                raise RuntimeError("the demo is ending" if self._ends else "stopped")

        def take(quantum: Quantum) -> None:
            quantum.check()
            if quantum.picture is None:  # a finished one is kept
                require_wanted()
            quanta.append(quantum)
            tell(side, quantum.steps, order.steps)

        require_wanted()
        self._worker.run([replace(order, is_kept=True)], take, lambda: False)
        image, latents = self._worker.take(order.number)
        seconds = sum(each.seconds - each.loading for each in quanta)
        return Side(image, latents, seconds, sum(each.seconds for each in quanta[1:-1]))


def _original(name: str, folder: str, model: str | None) -> Path:
    """Return the folder of a checkpoint's 16-bit pipeline; ValueError for none, and for that of another model."""
    from fluxq.quantize.exchange.beside import other_small_files

    try:
        path = original_of(folder, model)
    except OSError as error:
        raise ValueError(f"the 16-bit model of {name} is not here: {error}; give --model DIR") from None
    if (path / PLAN_FILE).exists():
        raise ValueError(f"{path}: was quantized itself, by fluxq; give the 16-bit model as --model")
    base, checkpoint = ModelFolder(path.name, path), ModelFolder(name, Path(folder))
    if base.index.get("_class_name") != checkpoint.index.get("_class_name") or base.components != checkpoint.components:
        raise ValueError(f"{path}: another pipeline than {name}'s; give --model")
    for component in checkpoint.components:
        for what in other_small_files(checkpoint, base, component):
            raise ValueError(f"{path}: its {component} is not what {name} has: {what}; give --model")
    return path
