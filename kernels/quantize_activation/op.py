"""Activations to codes as a torch.library op, with its torch reference; device code is faster.

    fluxq::quantize_activation     a = x, or act(x): gelu, exact or tanh form; silu(x1) · x2 or x1 · silu(x2) for
                                   x = (x1, x2); with `beside` (M, D): a = (beside, act(x)), side by side

and then, in fp32, each step left out where its tensor is None or its number 0:

    h = a · down^T                          the first half of a low-rank branch, in a's type
    v = (a - mean) · smooth                 mean and smooth (K,)
    v = v · H / sqrt(size)                  Sylvester's Hadamard matrix, or the regular one, on each block of columns
    codes, scales                           of v, as `quantize_activation` in ops.py

One call serves all layers that share an input: `down` may hold the rows of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels import ops
from fluxq.kernels.op import Op, launches_on_gpu
from fluxq.kernels.ops import no_autocast, transform
from fluxq.kernels.tensor import stored_shapes, swizzle_scales, swizzled_size, unpack_named
from fluxq.recipes.formats import FORMATS, Format, hadamards

PRODUCED = ("int8", "fp8", "fp8_tensor", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
OP = Op("quantize_activation", (*PRODUCED, "down", "16bit", *(f"{name}-beside" for name in PRODUCED)), "memory")
ACTS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu_mul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "mul_silu": lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
}
GATED = ("silu_mul", "mul_silu")  # of x (M, 2K)


@dataclass(frozen=True)
class Rounding:
    """The steps from activations to codes, as an op takes them in a text.

    format: "" for none.
    act: a key of ACTS, "" for x itself; act(x) is rounded to x's dtype first.
    hadamard: size of its blocks. regular: of its regular matrix, "r" before the size in the text.
    four_over_six: nvfp4's choice between two scales for each block.
    swizzled: block scales in the order of `swizzle_scales`.
    """

    format: str = ""
    act: str = ""
    hadamard: int = 0
    four_over_six: bool = False
    swizzled: bool = False
    regular: bool = False

    def __str__(self) -> str:
        rotation = f"{'r' * self.regular}{self.hadamard}"
        return f"{self.format}/{self.act}/{rotation}/{self.four_over_six:d}/{self.swizzled:d}"

    @classmethod
    def parse(cls, text: str) -> Rounding:
        """Invert `str`."""
        name, act, rotation, four_over_six, swizzled = text.split("/")
        size, regular = int(rotation.removeprefix("r")), rotation.startswith("r")
        return cls(name, act, size, four_over_six == "1", swizzled == "1", regular)

    @property
    def row(self) -> Format:
        """The format's row; ValueError for one that activations are not rounded to."""
        if self.format not in PRODUCED:
            raise ValueError(f"format is {self.format!r}, expected one of {', '.join(PRODUCED)}")
        return FORMATS[self.format]


class RoundingTensors(NamedTuple):
    """The tensors of the steps at the top of this file; those that are left out are None.

    input_scale: of int8 and fp8 (M, 1), of fp8_tensor (), of nvfp4, whose global scale it is, () or (M, 1).
    beside: (M, D) of x's dtype, the first D columns that are quantized.
    """

    input_scale: Tensor | None = None
    smooth: Tensor | None = None
    mean: Tensor | None = None
    down: Tensor | None = None
    beside: Tensor | None = None


@torch.library.custom_op("fluxq::quantize_activation", mutates_args=())
def quantize_activation(x: Tensor, tensors: Sequence[Tensor], rounding: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize x (M, K) of a float dtype, or (M, 2K) for gated acts; returns (codes, scale, global scale, h) as stored.

    tensors, rounding: of `pack_named(RoundingTensors(…), Rounding(…))`. A scale that was given as input_scale, one that
    the format lacks, and h without `down` come back as empty tensors (0,).
    """
    operands, how = unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)
    with no_autocast(x):
        return _produce(_activated(x, operands.beside, how.act), operands, how)


@quantize_activation.register_fake
def _(x, tensors, rounding):
    operands, how = unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)
    k = x.shape[1] // (2 if how.act in GATED else 1) + (0 if operands.beside is None else operands.beside.shape[1])
    return _empty(x, k, operands, how)


launches_on_gpu(OP.name, quantize_activation)


def _activated(x: Tensor, beside: Tensor | None, act: str) -> Tensor:
    """Return [beside, act(x)] (M, K)."""
    if act and act not in ACTS:
        raise ValueError(f"quantize_activation: act is {act!r}, expected one of {', '.join(ACTS)}")
    a = ACTS[act](x) if act else x
    if beside is None:
        return a
    check_beside("quantize_activation", beside, x)
    return torch.cat([beside, a], dim=1)


def check_steps(name: str, k: int, format: Format, how: Rounding) -> None:
    """Raise ValueError for steps that the format or the row length K does not allow."""
    if format.name not in PRODUCED or FORMATS[format.name] != format:
        raise ValueError(f"{name}: activations are not quantized to {format.name}, only to {', '.join(PRODUCED)}")
    if how.hadamard not in (0, *(sizes := hadamards(how.regular))):
        kind = "regular hadamard" if how.regular else "hadamard"
        raise ValueError(f"{name}: {kind} is {how.hadamard}, expected one of 0, {', '.join(map(str, sizes))}")
    if how.hadamard and k % how.hadamard:
        raise ValueError(f"{name}: K is {k}, no multiple of hadamard {how.hadamard}: choose a smaller one, or 0")
    if how.four_over_six and not format.two_level:
        raise ValueError(f"{name}: four_over_six chooses nvfp4's block scales, {format.name} has none: leave it out")
    if how.swizzled and not format.has_byte_scales:
        raise ValueError(f"{name}: swizzled is for block scales of a byte, {format.name} has none: leave it out")


def check_beside(name: str, beside: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `beside` has x's rows and dtype."""
    if beside.ndim != 2 or beside.shape[0] != x.shape[0] or not beside.shape[1] or beside.dtype != x.dtype:
        raise ValueError(
            f"{name}: beside is {beside.dtype} {(*beside.shape,)}, expected {x.dtype} ({x.shape[0]}, D), the rows of x"
        )


def _produce(a: Tensor, operands: RoundingTensors, how: Rounding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = how.row
    check_steps("input", a.shape[-1], row, how)
    if a.ndim != 2 or not a.is_floating_point() or a.element_size() < 2:
        raise ValueError(f"input is {a.dtype} {(*a.shape,)}, expected (M, K) of float16, bfloat16 or float32")
    empty = _empty(a, a.shape[1], operands, how)
    if a.shape[0] == 0:
        return empty
    v = transform(a, operands.smooth, operands.mean, how.hadamard, how.regular)
    q = ops.quantize_activation(v, row, operands.input_scale, how.four_over_six)
    global_scale, scale = q.global_scale, swizzle_scales(q.scale) if how.swizzled else q.scale
    if operands.input_scale is not None:
        scale, global_scale = (scale, None) if row.two_level else (None, None)
    _, no_scale, no_global, no_h = empty
    return (
        q.codes,
        no_scale if scale is None else scale,
        no_global if global_scale is None else global_scale,
        no_h if operands.down is None else F.linear(a.to(operands.down.dtype), operands.down),
    )


def _empty(x: Tensor, k: int, operands: RoundingTensors, how: Rounding) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs of a row length K, not filled."""
    m, row = x.shape[0], how.row
    (codes, codes_dtype), (scale, scale_dtype) = list(stored_shapes(row, m, k).values())[:2]
    if how.swizzled:
        scale = (swizzled_size(m, scale[1]),)
    dynamic = operands.input_scale is None
    return (
        x.new_empty(codes, dtype=codes_dtype),
        x.new_empty(scale if dynamic or row.two_level else (0,), dtype=scale_dtype),
        x.new_empty((m, 1) if dynamic and row.two_level else (0,), dtype=torch.float32),
        x.new_empty(0) if operands.down is None else operands.down.new_empty(m, operands.down.shape[0]),
    )
