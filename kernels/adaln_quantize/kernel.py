"""Gated residual, norm, modulation and quantization in one launch, as the reference in op.py has them.

    n = x + gate · branch                            where a branch is given; n is written too
    v = norm(n) · (1 + scale) + shift                norm: LayerNorm (n - mean) · r, or RMSNorm n · r
    codes of v                                       as kernels/quantize_activation/kernel.py makes them

Separate layers round after each step to the dtype of the modulation, x's or fp32, and so does this kernel, in
registers: v differs from theirs only where the norm's sums, added up in another order, do. Codes are, byte for byte,
what kernels/quantize_activation makes of the v that this one writes without a format. A row is read once, and one
program holds all tiles of it; its mean is subtracted before squares are added up, so that nothing cancels.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.adaln_quantize.op import NORMS, OP, NormTensors, modulated_norm
from fluxq.kernels.checks import EXACT, check_device, check_tensor, check_tile
from fluxq.kernels.codes import (
    amax_bits,
    amax_by_blocks,
    computed_once,
    levels_of,
    quantize_blocks_tile,
    quantize_rows_tile,
    rounded,
    row_global,
    row_step,
    transform_tile,
    widened,
)
from fluxq.kernels.compare import Sample, Verdict, of_dtype, picked, same, within, worst
from fluxq.kernels.dispatch import require
from fluxq.kernels.qk_norm_rope.kernel import FLOATS
from fluxq.kernels.quantize_activation.kernel import (
    Coded,
    Source,
    as_coded,
    coded,
    compare_codes,
    new_codes,
    returned,
)
from fluxq.kernels.quantize_activation.op import Rounding, check_steps
from fluxq.kernels.tensor import QuantizedTensor, pack_named, swizzled_size, unpack_named
from fluxq.kernels.tiles import LONGEST_HELD, Tile, cdiv, whole_row_tile
from fluxq.recipes.formats import Format, find_format


def adaln_quantize(
    x: Tensor, tensors: NormTensors, how: Rounding, *, norm: str = "layer", eps: float, tile: Tile
) -> tuple[QuantizedTensor | Tensor, Tensor | None]:
    """Return v of x (M, D), in a format or in x's dtype without one, and n where branch (M, D) and gate are given.

    The op of this name describes the tensors, `quantize_activation` the steps. scale, shift and gate may be chunks of
    one tensor, and rows of x and branch any distance apart. weight has the dtype of scale; RMSNorm rounds before it and
    after it, as diffusers' does. fp8_tensor needs its scale given, for no program here sees all rows. Raises ValueError
    for tensors that do not fit.
    """
    scale, shift, branch, gate, weight, input_scale, smooth, mean = tensors
    row, swizzled = find_format(how.format) if how.format else None, how.swizzled
    _check_layers(x, tensors, norm, tile)
    _check_rounding(x, row, tensors, how, tile)
    check_device("adaln_quantize", x.device)
    m, d = x.shape
    new = residual = None
    if branch is not None and gate is not None:
        new = torch.empty(m, d, dtype=x.dtype, device=x.device)
        residual = Residual(branch, gate, new, branch.stride(0), gate.stride(0))
    modulation = Modulation(scale, shift, weight, m // scale.shape[0], scale.stride(0), shift.stride(0))
    if row is None:
        out = torch.empty(m, d, dtype=x.dtype, device=x.device)
        written = Coded(out, None, None, None)
    else:
        out = new_codes("adaln_quantize", x, d, input_scale, how)
        written = as_coded(out)
    rows = swizzled_size(m, 4) // 4 if swizzled else m  # those that pad swizzled scales included
    adaln_quantize_kernel[(cdiv(rows, tile.rows),)](
        source=Source(x, x.stride(0), None, smooth, mean),
        residual=residual,
        modulation=modulation,
        out=written,
        M=m,
        D=d,
        eps=eps,
        NORM=norm,
        FORMAT=row,
        HADAMARD=levels_of(how.hadamard, how.regular),
        SCALE_GIVEN=input_scale is not None,
        FOUR_OVER_SIX=how.four_over_six,
        SWIZZLED=swizzled,
        EVEN=d % tile.columns == 0,
        TILES=cdiv(d, tile.columns),
        TILE=tile,
        num_warps=tile.warps,
        **EXACT,
    )
    return out, new


class Residual(NamedTuple):
    """A gated residual: branch (M, D) and gate (B, D), rows a stride apart, and n (M, D), which is written to `new`."""

    branch: Any
    gate: Any
    new: Any
    stride_branch: Any
    stride_gate: Any


class Modulation(NamedTuple):
    """scale and shift (B, D), rows a stride apart, one for so many tokens; weight (D,) or None."""

    scale: Any
    shift: Any
    weight: Any
    tokens: Any
    stride_scale: Any
    stride_shift: Any


def launch(
    x: Tensor, tensors: Sequence[Tensor], rounding: str, norm: str, eps: float, *, chip: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the op on a chip; ValueError where it has no kernel."""
    operands, how = unpack_named(NormTensors, tensors, rounding, Rounding.parse)
    require(*cells(x, tensors, rounding, norm, eps, chip=chip)[0], chip)
    many = bool(how.hadamard or (how.format and how.row.group_size))
    tile = whole_row_tile(x.shape[-1], chip, many=many)
    q, new = adaln_quantize(x, operands, how, norm=norm, eps=eps, tile=tile)
    nothing = x.new_empty(0)
    codes = (q, nothing, nothing) if isinstance(q, Tensor) else returned(q, operands.input_scale)
    return *codes, nothing if new is None else new


def cells(
    x: Tensor, tensors: Sequence[Tensor], rounding: str, norm: str, eps: float, *, chip: str
) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    return ((OP.name, unpack_named(NormTensors, tensors, rounding, Rounding.parse)[1].format or "16bit"),)


def compare(
    results: Sequence[Tensor],
    x: Tensor,
    tensors: Sequence[Tensor],
    rounding: str,
    norm: str,
    eps: float,
    *,
    chip: str,
    sample: Sample,
) -> Verdict:
    """Compare results of a call: n's bits, v with float64, codes with the reference's of the kernel's v.

    v is of another launch, which a GPU may add up in another order: few codes may be neighbours.
    """
    operands, how = unpack_named(NormTensors, tensors, rounding, Rounding.parse)
    rows = picked(x.shape[0], sample.tokens, x.device)
    images = rows // (x.shape[0] // operands.scale.shape[0])  # each token is an image of its own from here on
    some = NormTensors(operands.scale[images], operands.shift[images], weight=operands.weight)
    if operands.branch is not None and operands.gate is not None:
        some = some._replace(branch=operands.branch[rows], gate=operands.gate[images])
    n, verdicts = modulated_norm(x[rows], some, norm, eps)[1], []
    if n is None:
        n = x[rows]
    else:
        verdicts.append(same("n", results[3][rows], n))
    v = launch(x[rows], *pack_named(some, Rounding()), norm, eps, chip=chip)[0] if how.format else results[0][rows]
    verdicts.append(within("v", v, *_exact(n, some, norm, eps)))
    if how.format:
        of_rounding = operands.of_rounding
        verdicts.append(compare_codes(coded(results, of_rounding, how, rows), v, of_rounding, how, rows, sums=True))
    return worst(*verdicts)


def decoded(
    made: Sequence[Tensor], x: Tensor, tensors: Sequence[Tensor], rounding: str, norm: str, eps: float
) -> Tensor:
    """Return v, or the numbers that a call's codes stand for."""
    operands, how = unpack_named(NormTensors, tensors, rounding, Rounding.parse)
    return coded(made, operands.of_rounding, how).dequantize() if how.format else made[0]


def _exact(n: Tensor, operands: NormTensors, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    """Return norm(n) · (1 + scale) + shift in float64, a row of scale for each of n, and its bound.

    (roundings · u + 2^-18) · (|h · (1 + scale)| + |shift|) + u' · |v|, with u and u' half the spacing at 1 of the
    modulation's and of n's dtype. Rounded are h (twice around RMSNorm's weight), 1 + scale, the product, the sum. 2^-18
    covers fp32's own roundings, and 2^-20 · mean |n| those of LayerNorm's mean.
    """
    h, scale, shift = n.double(), 1 + operands.scale.double(), operands.shift.double()
    off = 2.0**-20 * h.abs().mean(-1, keepdim=True) * (norm == "layer")
    h = h - h.mean(-1, keepdim=True) if norm == "layer" else h
    factor = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
    factor = factor if operands.weight is None else factor * operands.weight.double()
    h, unit = h * factor, (5 if norm == "rms" else 4) * torch.finfo(operands.scale.dtype).eps / 2 + 2.0**-18
    bound = (off * factor * scale).abs() + unit * ((h * scale).abs() + shift.abs())
    return h * scale + shift, of_dtype(h * scale + shift, bound, n.dtype)


def _check_layers(x: Tensor, tensors: NormTensors, norm: str, tile: Tile) -> None:
    name = "adaln_quantize"
    scale, shift, branch, gate, weight, *_ = tensors
    if x.ndim != 2 or 0 in x.shape or x.dtype not in FLOATS:
        raise ValueError(f"{name}: x is {x.dtype} {(*x.shape,)}, expected (M, D) of bfloat16, float16 or float32")
    m, d = x.shape
    if norm not in NORMS:
        raise ValueError(f"{name}: unknown norm {norm!r}, expected one of {', '.join(NORMS)}")
    images = scale.shape[0] if scale.ndim == 2 else 0
    if images == 0 or m % images:
        raise ValueError(f"{name}: scale {(*scale.shape,)} does not split {m} tokens into equal images (B, D)")
    if scale.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name}: scale is {scale.dtype}, expected x's {x.dtype} or float32: cast the modulation")
    if (branch is None) != (gate is None):
        raise ValueError(f"{name}: {'gate' if branch is None else 'branch'} is given without the other: give both")
    for what, tensor, shape, dtype in (
        ("x", x, (m, d), x.dtype),
        ("scale", scale, (images, d), scale.dtype),
        ("shift", shift, (images, d), scale.dtype),
        ("gate", gate, (images, d), scale.dtype),
        ("branch", branch, (m, d), x.dtype),
    ):
        if tensor is not None:
            _check_matrix(f"{name}: {what}", tensor, shape, dtype, x.device)
    if weight is not None:
        check_tensor(f"{name}: weight", weight, (d,), (scale.dtype,), x.device)
    if (elements := cdiv(d, tile.columns) * tile.columns) > LONGEST_HELD:
        raise ValueError(f"{name}: a row of {d} takes {elements} elements, expected at most {LONGEST_HELD} to hold it")


def _check_matrix(name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError as `check_tensor` does, but allow rows any distance apart."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        actual = f"{tensor.dtype} {(*tensor.shape,)} on {tensor.device}"
        raise ValueError(f"{name} is {actual}, expected {dtype} {shape} on {device}: cast, reshape or move it")
    if shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}, expected rows of adjacent elements: pass .contiguous()"
        )


def _check_rounding(x: Tensor, format: Format | None, tensors: NormTensors, how: Rounding, tile: Tile) -> None:
    input_scale, smooth, mean = tensors.input_scale, tensors.smooth, tensors.mean
    name = "adaln_quantize"
    m, d = x.shape
    if format is None:
        named = {"input_scale": input_scale, "smooth": smooth, "mean": mean}
        extra = [what for what, tensor in named.items() if tensor is not None]
        extra += [step for step in ("hadamard", "four_over_six", "swizzled") if getattr(how, step)]
        if extra:
            raise ValueError(f"{name}: {extra[0]} is given, but no format to quantize to: leave it out")
        return
    if how.act:
        raise ValueError(f"{name}: {how.act} is no step of it: use quantize_activation")
    check_steps(name, d, format, how)
    format.check_shape(m, d, f"{name}: x")
    check_tile(name, tile, format)
    unit = max(how.hadamard, 4 * format.group_size * how.swizzled, 1)
    if tile.columns % unit:
        raise ValueError(f"{name}: tile.columns is {tile.columns}, expected a multiple of {unit} for these steps")
    for what, vector in (("smooth", smooth), ("mean", mean)):
        if vector is not None:
            check_tensor(f"{name}: {what}", vector, (d,), (torch.float32,), x.device)
    if input_scale is None and format.block[0] == 0:
        raise ValueError(
            f"{name}: {format.name} needs an input_scale (): calibrate it, or quantize v in a pass of its own"
        )


@triton.jit
def adaln_quantize_kernel(
    source,  # of x (M, D)
    residual,  # or None
    modulation,
    out,  # without FORMAT v (M, D) in place of codes
    M,
    D,
    eps,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,  # a Format or None
    HADAMARD: tl.constexpr,
    SCALE_GIVEN: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    EVEN: tl.constexpr,  # D is TILES · COLUMNS
    TILES: tl.constexpr,
    TILE: tl.constexpr,  # a Tile
):
    """n = x + gate · branch; v = norm(n) · (1 + scale) + shift; codes of v. Reads each once, writes n and codes."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    x, stride_x, codes = source.x, source.stride_x, out.codes
    scale, shift = modulation.scale, modulation.shift
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    images = rows // modulation.tokens
    tiles = ()
    for tile in tl.static_range(TILES):
        columns, mask = tile_of(rows, tile, M, D, COLUMNS)
        n = load_rows(x, rows, stride_x, columns, mask)  # (ROWS, COLUMNS)
        if residual is not None:
            gate, new = residual.gate, residual.new
            gated = load_rows(gate, images, residual.stride_gate, columns, mask)
            gated = gated * load_rows(residual.branch, rows, residual.stride_branch, columns, mask)
            n = rounded(n + rounded(gated, gate), x)
            tl.store(new + rows[:, None] * D + columns[None, :], n.to(new.dtype.element_ty), mask=mask)
        tiles += (n,)
    tiles, r = centred(tiles, rows, M, D, eps, NORM, EVEN, TILES, ROWS, COLUMNS)
    modulated = ()
    for tile in tl.static_range(TILES):
        columns, mask = tile_of(rows, tile, M, D, COLUMNS)
        v = tiles[tile] * r[:, None]
        if modulation.weight is not None:
            if NORM == "rms":
                v = rounded(v, scale)
            weight = tl.load(modulation.weight + columns, mask=columns < D, other=0.0)
            v = v * weight.to(tl.float32)[None, :]
        v = rounded(v, scale)
        factor = rounded(1.0 + load_rows(scale, images, modulation.stride_scale, columns, mask), scale)
        v = rounded(v * factor, scale)
        v = rounded(v + load_rows(shift, images, modulation.stride_shift, columns, mask), scale)
        if scale.dtype != x.dtype:
            v = rounded(v, x)
        # beyond the mask zero, or NaN as in all of the row
        if FORMAT is None:
            tl.store(codes + rows[:, None] * D + columns[None, :], v.to(codes.dtype.element_ty), mask=mask)
        else:
            v = transform_tile(v, source.smooth, source.mean, tile, D, HADAMARD, ROWS, COLUMNS)
            modulated += (computed_once(v, HADAMARD),)
    if FORMAT is not None:
        NAME: tl.constexpr = FORMAT.name
        ELEMENT: tl.constexpr = FORMAT.element.name
        GROUP: tl.constexpr = FORMAT.group_size
        if GROUP == 0:
            if SCALE_GIVEN:
                s = tl.load(out.scale + rows * out.stride, mask=rows < M, other=1.0)  # (ROWS,)
            else:
                s = row_step(amax_bits(modulated, TILES), FORMAT.element.max)
                tl.store(out.scale + rows, s, mask=rows < M)
            for tile in tl.static_range(TILES):
                quantize_rows_tile(modulated[tile], s, codes, rows, tile, M, D, ELEMENT, SCALE_GIVEN, COLUMNS)
        else:
            g = tl.full((ROWS,), 1.0, tl.float32)
            if FORMAT.two_level:
                if SCALE_GIVEN:
                    g = tl.load(out.global_scale + rows * out.stride, mask=rows < M, other=1.0)
                else:
                    g = row_global(amax_by_blocks(modulated, GROUP, TILES, ROWS, COLUMNS), FOUR_OVER_SIX)
                    tl.store(out.global_scale + rows, g, mask=rows < M)
            for tile in tl.static_range(TILES):
                quantize_blocks_tile(
                    modulated[tile], g, codes, out.scale, rows, tile, M, D, NAME, GROUP, SCALE_GIVEN,
                    FOUR_OVER_SIX, SWIZZLED, ROWS, COLUMNS,
                )  # fmt: skip


@triton.jit
def tile_of(rows, tile, M, D, COLUMNS: tl.constexpr):
    """Return the columns of a tile (COLUMNS,), and which elements of these rows exist (ROWS, COLUMNS)."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    return columns, (rows < M)[:, None] & (columns < D)[None, :]


@triton.jit
def load_rows(x, rows, stride, columns, mask):
    """Load rows of x as fp32 (ROWS, COLUMNS), zeros beyond the mask."""
    return widened(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))


@triton.jit
def centred(
    tiles,
    rows,
    M,
    D,
    eps,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return rows less their mean, for LayerNorm, and r (ROWS,) = 1 / √(mean square + eps); tiles are zero beyond D."""
    if NORM == "layer":
        total = tiles[0]
        for tile in tl.static_range(1, TILES):
            total = total + tiles[tile]
        mean = tl.div_rn(tl.sum(total, 1), D * 1.0)[:, None]
        moved = ()
        for tile in tl.static_range(TILES):
            n = tiles[tile] - mean
            if not EVEN:
                n = tl.where(tile_of(rows, tile, M, D, COLUMNS)[1], n, 0.0)
            moved += (n,)
        tiles = moved
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.static_range(TILES):
        squares = tl.fma(tiles[tile], tiles[tile], squares)
    variance = tl.div_rn(tl.sum(squares, 1), D * 1.0)
    return tiles, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
