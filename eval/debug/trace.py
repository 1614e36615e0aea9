"""Traces of quantized layers along a run: their errors, and the health of their rounding.

    free-running    rows of a layer's output in one run against the same rows in another, same prompts and noise
    local           the 16-bit layer's own input through the quantized layer, against what the 16-bit layer made of it
    health          what rounding does to its input in the quantized run (arithmetic.py)

A run is watched through hooks, at a few denoising steps. Of each output some rows per image are kept, on the CPU: all
of them would be terabytes for 57 blocks of FLUX.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxq.calibrate.capture import batches, run_pipeline
from fluxq.calibrate.stand_ins import module_of, moved
from fluxq.eval.debug.arithmetic import health, kernel_error
from fluxq.eval.images.denoiser import hooked
from fluxq.kernels.linear import QuantLinear, channels_last

ROWS = 32  # of each image's output that are kept


@dataclass(frozen=True)
class LayerCall:
    """Call of a layer in batch number `batch`, of so many images: x (…, K) and y (…, N), channels last."""

    name: str
    step: int
    batch: int
    images: int
    layer: nn.Module
    x: Tensor
    y: Tensor


def watch(
    pipe: Any,
    names: Sequence[str],
    items: Sequence[tuple[str, int]],
    call: Mapping[str, Any],
    steps: Sequence[int],
    batch_size: int,
    *observers: Callable[[LayerCall], None],
) -> Tensor:
    """Run the pipeline and show `observers` every call of the layers `names` ("component.path") at `steps`.

    Calls before the denoiser's first count to step 0. Returns the final latents, (images, …) fp64 on the CPU.
    """
    counts = [len(batch) for batch in batches(items, batch_size)]
    now = {"step": 0, "batch": -1}

    def on_step(step: int) -> None:
        now["step"] = step
        now["batch"] += step == 0

    layers = {module_of(pipe, name): name for name in names}

    def see(layer: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
        if now["step"] in steps:
            x, y = channels_last(layer, args[0]), channels_last(layer, y)
            layer_call = LayerCall(layers[layer], now["step"], now["batch"], counts[now["batch"]], layer, x, y)
            for observer in observers:
                observer(layer_call)

    with torch.no_grad(), hooked(layers, after=see):
        run = run_pipeline(pipe, items, call, batch_size=batch_size, on_step=on_step)
        return torch.cat([latents.double().cpu() for _, latents in run])


class Powers:
    """Σ y² and Σ (y' - y)² of a layer's output y and another, y', at a step."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[float, float]] = {}

    def add(self, name: str, step: int, y: Tensor, other: Tensor) -> None:
        """Add two outputs of one shape, on one device."""
        signal, noise = self._sums.get((name, step), (0.0, 0.0))
        y = y.double()
        self._sums[name, step] = signal + float(y.square().sum()), noise + float((other - y).square().sum())

    def noise(self, name: str, step: int) -> float | None:
        """Return noise over signal, NaN where it is not finite; None where nothing was compared."""
        signal, noise = self._sums.get((name, step), (0.0, 0.0))
        return noise / signal if signal else None

    def sqnr_db(self, name: str, steps: Sequence[int]) -> tuple[float | None, ...]:
        """Return the SQNR at each step; None where nothing was compared, nothing was lost, or it is not finite."""
        return tuple(decibels(self.noise(name, step)) for step in steps)


def decibels(noise: float | None) -> float | None:
    """Return noise over signal as SQNR in dB; None where that is no number: no noise, no end of it, or not known."""
    return -10 * math.log10(noise) if noise and math.isfinite(noise) else None


class Outputs:
    """Some rows of the outputs of layers."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], dict[int, list[Tensor]]] = {}  # batch -> calls (images, R, N)

    def __call__(self, layer_call: LayerCall) -> None:
        batches = self._rows.setdefault((layer_call.name, layer_call.step), {})
        batches.setdefault(layer_call.batch, []).append(_some_rows(layer_call.y, layer_call.images).cpu())

    @property
    def order(self) -> tuple[str, ...]:
        """The layers in the order in which they ran first."""
        return tuple(dict.fromkeys(name for name, _ in self._rows))

    def against(self, reference: Outputs) -> Powers:
        """Compare these outputs with those of a reference run, whose batches may be cut in other ways."""
        powers = Powers()
        for name, step in reference._rows.keys() & self._rows.keys():
            y, other = reference._joined(name, step), self._joined(name, step)
            if y.shape == other.shape:  # not where a layer's rows are of no single image
                powers.add(name, step, y, other)
        return powers

    def _joined(self, name: str, step: int) -> Tensor:
        """Return (images, R, N), the rows of an image's calls one after the other."""
        return torch.cat([torch.cat(calls, 1) for _, calls in sorted(self._rows[name, step].items())])


class Local:
    """Errors of quantized layers that read the 16-bit layers' input, and of their kernels.

    powers: of the layers' outputs. kernel_errors: layer -> see `kernel_error`.
    """

    def __init__(self, layers: Mapping[str, QuantLinear]) -> None:
        self.layers, self.powers = layers, Powers()
        self.kernel_errors: dict[str, float] = {}

    def __call__(self, layer_call: LayerCall) -> None:
        with moved(self.layers[layer_call.name], layer_call.x.device) as layer:
            y = layer.of_tokens(layer_call.x)
            if layer_call.name not in self.kernel_errors:
                self.kernel_errors[layer_call.name] = kernel_error(layer, layer_call.x, y)
        self.powers.add(layer_call.name, layer_call.step, layer_call.y, y)


class Health:
    """Worst counts of each quantized layer and step, see `health`."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, int], dict[str, float]] = {}

    def __call__(self, layer_call: LayerCall) -> None:
        counts = self.counts.setdefault((layer_call.name, layer_call.step), {})
        for kind, value in health(layer_call.layer, layer_call.x, layer_call.y).items():
            counts[kind] = max(counts.get(kind, 0.0), value)

    def of(self, name: str, steps: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return kind -> its share at each step."""
        kinds = dict.fromkeys(kind for step in steps for kind in self.counts.get((name, step), {}))
        return {kind: tuple(self.counts.get((name, step), {}).get(kind, 0.0) for step in steps) for kind in kinds}


def _some_rows(y: Tensor, images: int) -> Tensor:
    """Return (images, R, N): rows spread over each image's, or over all where the first axis is not of images."""
    if y.shape[0] % images:
        rows = y.reshape(1, -1, y.shape[-1])
    else:  # several of each image, as with guidance, are a whole batch each
        rows = y.reshape(y.shape[0] // images, images, -1, y.shape[-1]).transpose(0, 1).flatten(1, 2)
    count = rows.shape[1]
    chosen = torch.linspace(0, count - 1, min(ROWS, count), device=y.device, dtype=torch.float32).round()
    return rows[:, chosen.long()]
