"""Activations to codes as torch.library ops, with the torch reference of each; device code is faster.

    fluxq::quantize_activation     a = x
    fluxq::act_quantize            a = gelu(x), exact or tanh form; silu(x1) · x2 or x1 · silu(x2) for x = (x1, x2);
                                   with `beside` (M, D): a = (beside, act(x)), side by side

and then, in fp32, each step left out where its argument is None or 0:

    h = a · down^T                          the first half of a low-rank branch, in a's type
    v = (a - mean) · smooth                 mean and smooth (K,)
    v = v · H / sqrt(size)                  Sylvester's Hadamard matrix on each block of `hadamard` columns
    codes, scales                           of v, as `quantize_activation` in ops.py

One call serves all layers that share an input: `down` may hold the rows of several.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels import ops
from fluxq.kernels.device import launches_on_gpu
from fluxq.kernels.ops import no_autocast, transform
from fluxq.kernels.tensor import stored_shapes, swizzle_scales, swizzled_size
from fluxq.recipes.formats import FORMATS, HADAMARDS, Format

PRODUCED = ("int8", "fp8", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4")
ACTS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu_mul": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "mul_silu": lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
}
GATED = ("silu_mul", "mul_silu")  # of x (M, 2K)


@torch.library.custom_op("fluxq::quantize_activation", mutates_args=())
def quantize_activation(
    x: Tensor,
    input_scale: Tensor | None,
    smooth: Tensor | None,
    mean: Tensor | None,
    down: Tensor | None,
    format: str,
    hadamard: int,
    four_over_six: bool,
    swizzled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (M, K) of a float dtype to (codes, scale, global scale, h), each as its format stores it.

    input_scale: of int8 and fp8 (M, 1), of fp8_tensor (), of nvfp4, whose global scale it is, () or (M, 1).
    four_over_six: nvfp4's choice between two scales for each block. swizzled: block scales as `swizzle_scales` makes
    them. What was given as input_scale, what the format lacks, and h without `down` come back as empty tensors (0,).
    """
    with no_autocast(x):
        return _produce(x, input_scale, smooth, mean, down, format, hadamard, four_over_six, swizzled)


@torch.library.custom_op("fluxq::act_quantize", mutates_args=())
def act_quantize(
    x: Tensor,
    input_scale: Tensor | None,
    smooth: Tensor | None,
    mean: Tensor | None,
    down: Tensor | None,
    format: str,
    act: str,
    hadamard: int,
    four_over_six: bool,
    swizzled: bool,
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_activation` of act(x), which is rounded to x's dtype first; for the gated ones x is twice as wide.

    beside: (M, D) of x's dtype: the first D columns of what is quantized, act(x) makes the others.
    """
    if act not in ACTS:
        raise ValueError(f"act_quantize: act is {act!r}, expected one of {', '.join(ACTS)}")
    with no_autocast(x):
        a = ACTS[act](x)
        if beside is not None:
            check_beside("act_quantize", beside, x)
            a = torch.cat([beside, a], dim=1)
        return _produce(a, input_scale, smooth, mean, down, format, hadamard, four_over_six, swizzled)


@quantize_activation.register_fake
def _(x, input_scale, smooth, mean, down, format, hadamard, four_over_six, swizzled):
    return _empty(x, x.shape[1], input_scale, down, format, swizzled)


@act_quantize.register_fake
def _(x, input_scale, smooth, mean, down, format, act, hadamard, four_over_six, swizzled, beside=None):
    k = x.shape[1] // (2 if act in GATED else 1) + (0 if beside is None else beside.shape[1])
    return _empty(x, k, input_scale, down, format, swizzled)


launches_on_gpu(quantize_activation=quantize_activation, act_quantize=act_quantize)


def check_steps(name: str, k: int, format: Format, hadamard: int, four_over_six: bool, swizzled: bool) -> None:
    """Raise ValueError for steps that the format or the row length K does not allow."""
    if format.name not in PRODUCED or FORMATS[format.name] != format:
        raise ValueError(f"{name}: activations are not quantized to {format.name}, only to {', '.join(PRODUCED)}")
    if hadamard not in (0, *HADAMARDS):
        raise ValueError(f"{name}: hadamard is {hadamard}, expected one of 0, {', '.join(map(str, HADAMARDS))}")
    if hadamard and k % hadamard:
        raise ValueError(f"{name}: K is {k}, no multiple of hadamard {hadamard}: choose a smaller one, or 0")
    if four_over_six and not format.two_level:
        raise ValueError(f"{name}: four_over_six chooses nvfp4's block scales, {format.name} has none: leave it out")
    if swizzled and not format.group_size:
        raise ValueError(f"{name}: swizzled is for block scales, {format.name} has none: leave it out")


def check_beside(name: str, beside: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `beside` has x's rows and dtype."""
    if beside.ndim != 2 or beside.shape[0] != x.shape[0] or not beside.shape[1] or beside.dtype != x.dtype:
        raise ValueError(
            f"{name}: beside is {beside.dtype} {(*beside.shape,)}, expected {x.dtype} ({x.shape[0]}, D), the rows of x"
        )


def _produce(
    a, input_scale, smooth, mean, down, format, hadamard, four_over_six, swizzled
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, expected one of {', '.join(PRODUCED)}")
    row = FORMATS[format]
    check_steps("input", a.shape[-1], row, hadamard, four_over_six, swizzled)
    if a.ndim != 2 or not a.is_floating_point() or a.element_size() < 2:
        raise ValueError(f"input is {a.dtype} {(*a.shape,)}, expected (M, K) of float16, bfloat16 or float32")
    empty = _empty(a, a.shape[1], input_scale, down, format, swizzled)
    if a.shape[0] == 0:
        return empty
    v = transform(a, smooth, mean, hadamard)
    q = ops.quantize_activation(v, row, input_scale, four_over_six)
    global_scale, scale = q.global_scale, swizzle_scales(q.scale) if swizzled else q.scale
    if input_scale is not None:
        scale, global_scale = (scale, None) if row.two_level else (None, None)
    _, no_scale, no_global, no_h = empty
    return (
        q.codes,
        no_scale if scale is None else scale,
        no_global if global_scale is None else global_scale,
        no_h if down is None else F.linear(a.to(down.dtype), down),
    )


def _empty(x, k, input_scale, down, format, swizzled) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of a row length K, not filled."""
    m, row = x.shape[0], FORMATS[format]
    (codes, codes_dtype), (scale, scale_dtype) = list(stored_shapes(row, m, k).values())[:2]
    if swizzled:
        scale = (swizzled_size(m, scale[1]),)
    own = input_scale is None
    return (
        x.new_empty(codes, dtype=codes_dtype),
        x.new_empty(scale if own or row.two_level else (0,), dtype=scale_dtype),
        x.new_empty((m, 1) if own and row.two_level else (0,), dtype=torch.float32),
        x.new_empty(0) if down is None else down.new_empty(m, down.shape[0]),
    )
