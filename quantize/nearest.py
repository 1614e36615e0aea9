"""Rounding to nearest, which needs no data: weights are read, rounded and handed on in order, several at a time.

    one thread reads ──> workers round ──> the caller takes what is done, in order, and writes it

A unit is a Linear, the Linears that share a global scale, or the tensors of a block that are stored as they are. A few
units are in memory, however large the model. A worker computes with one torch thread, so its results do not depend on
the number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from fluxq.base import devices
from fluxq.kernels import encode
from fluxq.kernels.tensor import QuantizedTensor, largest
from fluxq.kernels.transforms import rotate
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.recipes.plan import LayerPlan

_MOST_WORKERS = 4  # each holds a few hundred MB of a large model
_AHEAD = 2  # units for each worker that may be read or done before their turn
_CACHED = 1 << 17  # elements that are compared at a time
_SAMPLED = 1 << 20  # elements of a weight whose error is looked at

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


@dataclass(frozen=True)
class RoundingUnit:
    """Tensors that are read and rounded in one.

    layers: one, or those of one global scale.
    plain: tensors that are stored as they are.
    """

    layers: tuple[LayerPlan, ...] = ()
    plain: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the source tensors."""
        return [*(f"{layer.name}.weight" for layer in self.layers), *self.plain]


@dataclass(frozen=True)
class Rounded:
    """Tensors after rounding.

    tensors: by their name in the checkpoint.
    weight_sqnr: layer -> dB.
    fingerprints: of source tensors.
    """

    tensors: dict[str, Tensor]
    weight_sqnr: dict[str, float]
    fingerprints: dict[str, str] = field(default_factory=dict)


def units_of(layers: Sequence[LayerPlan], names: Iterable[str]) -> list[RoundingUnit]:
    """Group the quantized `layers`, and all other source tensors among `names`, into units."""
    together: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        together.setdefault(layer.scale_group or layer.name, []).append(layer)
    weights = {f"{layer.name}.weight" for layer in layers}
    plain = tuple(name for name in names if name not in weights)
    units = [RoundingUnit(layers=tuple(members)) for members in together.values()]
    return [*units, RoundingUnit(plain=plain)] if plain else units


def round_units(
    units: Iterable[RoundingUnit],
    source: SourceWeights,
    dtype: torch.dtype,
    input_scales: Mapping[str, Tensor],
    workers: int | None = None,
) -> Generator[Rounded, None, None]:
    """Round each unit as its layers' plans say, cast the rest to `dtype`, and yield them in order.

    ValueError naming the layer for NaN, infinity and shapes that the plan does not have.

    input_scales: by layer, where its scheme has a static one.
    workers: by default as many as torch has threads, up to a few.
    """

    def read(unit: RoundingUnit) -> dict[str, Tensor]:
        tensors = {name: source[name] for name in unit.names}
        source.let_go(unit.names)
        return tensors

    def work(unit: RoundingUnit, tensors: dict[str, Tensor]) -> Rounded:
        return _rounded(unit, tensors, source, dtype, input_scales)

    with devices.used_again():
        yield from in_order(units, read, work, workers or min(_MOST_WORKERS, torch.get_num_threads()))


def in_order(
    items: Iterable[A], read: Callable[[A], B], work: Callable[[A, B], C], workers: int
) -> Generator[C, None, None]:
    """Yield work(item, read(item)) of each item, in order, with one reading thread and `workers` working ones.

    Those threads, and any that they start, compute with one torch thread each. Close it where it is left early.
    """
    before, waiting = torch.get_num_threads(), deque[Future[C]]()
    reader, pool = (ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) for n in (1, workers))

    def on(item: A, read: Future[B]) -> C:
        return work(item, read.result())

    try:
        for item in items:
            waiting.append(pool.submit(on, item, reader.submit(read, item)))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for executor in (reader, pool):  # in this order: workers wait for what is read
            executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def most_at_once(sizes: Sequence[int]) -> int:
    """Return the most bytes that `in_order` has in memory of items of these sizes: those read ahead, and one in use."""
    span = _AHEAD * _MOST_WORKERS + 1
    return max((sum(sizes[at : at + span]) for at in range(len(sizes))), default=0)


def quantize_weight(w: Tensor, layer: LayerPlan) -> QuantizedTensor:
    """Round one weight (N, K), or (N, K, 1, 1) of a convolution, as its plan says, with a scale of its own."""
    return round_matrix(weight_to_round(w, layer), layer)


def weight_to_round(w: Tensor, layer: LayerPlan) -> Tensor:
    """Return the matrix (N, K) that codes stand for: `weight_matrix`, or its rotation in fp32 if the plan has one."""
    matrix, scheme = weight_matrix(w, layer), layer.scheme
    return rotate(matrix, scheme.hadamard, scheme.regular) if scheme else matrix


def round_matrix(matrix: Tensor, layer: LayerPlan, shared: Tensor | None = None) -> QuantizedTensor:
    """Round what `weight_to_round` returned; ValueError for a layer that stays in 16 bit. shared: of `joined_scale`."""
    if layer.scheme is None:
        raise ValueError(f"{layer.name}: the plan keeps it in 16 bit")
    row = layer.scheme.weights
    return QuantizedTensor.quantize(
        matrix,
        row,
        global_scale=shared if row.two_level else None,
        tensor_scale=None if row.two_level else shared,
        four_over_six=layer.method.weights_46,
        name=layer.name,
    )


def joined_scale(matrices: Sequence[Tensor], layers: Sequence[LayerPlan]) -> Tensor:
    """Return the one scale (fp32, ()) of weights that are joined along N: nvfp4's global, or fp8_tensor's.

    matrices: of `weight_to_round`.
    """
    amax = torch.stack([largest(matrix) for matrix in matrices]).amax()
    row = next(layer.scheme.weights for layer in layers if layer.scheme is not None)
    if row.two_level:
        return encode.global_scale_for(amax, row, any(layer.method.weights_46 for layer in layers))
    return encode.block_scale(amax.reshape(1, 1, 1), row, None).reshape(())


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Return the signal to quantization noise, 10·log10(Σ r² / Σ (a − r)²) in dB; infinite when nothing was lost.

    A few rows at a time, on the device of the approximation.
    """
    rows = max(1, _CACHED * reference.shape[0] // max(1, reference.numel()))
    signal = noise = torch.zeros((), dtype=torch.float64)
    for r, a in zip(reference.split(rows), approximation.split(rows), strict=True):
        r = r.to(a)
        # In fp32 within them, where torch adds in pairs, and in double across them.
        signal = signal.to(a.device) + r.square().sum()
        noise = noise.to(a.device) + (a - r).square().sum()
    return float(10 * torch.log10(signal / noise).detach())


def weight_sqnr(w: Tensor, q: QuantizedTensor) -> float:
    """Return the `sqnr` of a weight (N, K) and its rounded form; of a large one, of rows from all over it.

    Of a million elements it is within a few hundredths of a dB, and all of them would take as long as rounding them.
    """
    step = max(1, w.numel() // _SAMPLED)
    return sqnr(w[::step], q.rows(0, w.shape[0], step).dequantize())


def weight_matrix(w: Tensor, layer: LayerPlan) -> Tensor:
    """View a weight as (N, K); that of a 1x1 convolution is (N, K, 1, 1).

    ValueError for a shape that config.json does not imply.
    """
    if tuple(w.shape) not in ((layer.n, layer.k), (layer.n, layer.k, 1, 1)):
        raise ValueError(f"{layer.name}: weight has shape {tuple(w.shape)}, config.json implies {(layer.n, layer.k)}")
    return w.flatten(1)


def require_finite(name: str, tensor: Tensor) -> None:
    """Raise ValueError for NaN and infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    rows = tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    wide = rows.float() if rows.element_size() == 1 else rows  # torch takes no amax of fp8
    if not torch.isfinite(largest(wide)):
        raise ValueError(f"{name}: holds NaN or infinity; get the source again")


def _rounded(
    unit: RoundingUnit,
    source_tensors: Mapping[str, Tensor],
    source: SourceWeights,
    dtype: torch.dtype,
    input_scales: Mapping[str, Tensor],
) -> Rounded:
    tensors: dict[str, Tensor] = {}
    lost: dict[str, float] = {}
    weights = {layer.name: source_tensors[f"{layer.name}.weight"] for layer in unit.layers}
    matrices = [weight_to_round(weights[layer.name], layer) for layer in unit.layers]
    shared = None
    if any(layer.scale_group for layer in unit.layers):
        shared = joined_scale(matrices, unit.layers)
        if not torch.isfinite(shared):
            for name, w in weights.items():
                require_finite(f"{name}.weight", w)
    for layer, matrix in zip(unit.layers, matrices, strict=True):
        q = round_matrix(matrix, layer, shared)
        lost[layer.name] = weight_sqnr(matrix, q)
        tensors |= {f"{layer.name}.{part}": tensor for part, tensor in q.tensors().items()}
        if layer.scheme is not None and layer.scheme.static_input:
            tensors[f"{layer.name}.input_scale"] = input_scales[layer.name]
    for name in unit.plain:
        tensors[name] = _cast(name, source_tensors[name], source, dtype)
    return Rounded(tensors, lost, source.fingerprints(source_tensors))


def _cast(name: str, tensor: Tensor, source: SourceWeights, dtype: torch.dtype) -> Tensor:
    """Cast a tensor that is not quantized; one that the model's class keeps in fp32 stays as it is in the source."""
    require_finite(name, tensor)
    if not tensor.is_floating_point() or source.stays_fp32(name):
        return tensor
    tensor = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(tensor).all():
        raise ValueError(f"{name}: holds numbers beyond {dtype}; choose another --dtype")
    return tensor
