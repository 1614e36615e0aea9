"""Activations to codes and scales on the GPU, byte for byte what the reference in op.py computes.

    a = x, or act(x)                              gelu(x) in either form, silu(x1) · x2, x1 · silu(x2) for x = (x1, x2)
    a = (beside, a)                               of a row's columns the first D are another matrix's
    h = a · down^T                                the first half of a low-rank branch
    v = (a - mean) · smooth · H / sqrt(size)      every factor optional; H is a Hadamard matrix on blocks of columns
    fp8, int8   s = amax(row) / largest           or of the whole tensor                code = RNE(v / s)
    fp8_1x128   s = amax(block) / 448                                                   code = RNE(v / s)
    mxfp8       s = 2^e, the smallest that does not saturate                            code = RNE(v / s)
    mxfp4       s = 2^e, of three the least squared error                               code = RNE(v / s)
    nvfp4       s = E4M3(amax(block) / 6 / g), g given or amax(row) / (6 · 448)         code = RNE(v / (s · g))
    four over six: s = E4M3(amax(block) / 4 / g) where that has less error, and own g = amax(row) / (6 · 256)

One launch reads x and writes codes, scales and h. Where scales follow from whole rows, a program holds its row, all
tiles of it, and computes act(x) once; longer rows (`is_held`) are read twice. fp8_tensor alone takes two launches,
unless its scale is given. Rounding of v is in kernels/codes.py, which other kernels share.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# Kernels are written in Triton's language: a constexpr parameter takes a plain number, a launch takes num_warps.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fluxq.kernels.checks import EXACT, as_bytes, check_device, check_tensor, check_tile
from fluxq.kernels.codes import (
    amax_bits,
    amax_by_blocks,
    computed_once,
    levels_of,
    magnitude_bits,
    quantize_blocks_tile,
    quantize_rows_tile,
    rounded,
    row_global,
    row_step,
    transform_tile,
    widened,
)
from fluxq.kernels.compare import (
    Product,
    Sample,
    Verdict,
    of_dtype,
    picked,
    product,
    same,
    same_but_few,
    taken,
    within,
    worst,
)
from fluxq.kernels.dispatch import require
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.quantize_activation.op import (
    ACTS,
    GATED,
    OP,
    Rounding,
    RoundingTensors,
    check_beside,
    check_steps,
)
from fluxq.kernels.tensor import QuantizedTensor, pack_named, stored_shapes, swizzled_size, unpack_named
from fluxq.kernels.tiles import Tile, cdiv, find_memory_tile, is_held, whole_row_tile
from fluxq.recipes.formats import Format, find_format

LARGEST_RANK = 128  # one tile of `down` holds every rank
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def quantize_activation(
    x: Tensor, tensors: RoundingTensors, how: Rounding, *, tile: Tile
) -> tuple[QuantizedTensor, Tensor | None]:
    """Quantize x (M, K) in bfloat16, float16 or float32, rows any distance apart, to codes per token, and h of `down`.

    The op of this name describes the tensors and steps. Here smooth and mean are fp32, and so is input_scale: by
    default scales follow from the amax of each token, for fp8_tensor of all. Of act and `down` together act is computed
    twice: call `activate` first. Raises ValueError for input that the kernels do not take.

    act: of `activate`; the codes then are those of activate(x, act), to the byte.
    beside: rows any distance apart.
    down: (R, K) of x's type, of bfloat16 or float16 for float32 x, R at most 128.
    swizzled: a flat tensor of `swizzled_size` elements, padded with zeros.
    tile: with `down` at least 16 rows.
    """
    name, row, hadamard, swizzled = "quantize_activation", find_format(how.format), how.hadamard, how.swizzled
    input_scale, smooth, mean, down, beside = tensors
    m, k = _check_rows(name, x, row, how.act, beside)
    check_steps(name, k, row, how)
    out = new_codes(name, x, k, input_scale, how)
    for what, vector in (("smooth", smooth), ("mean", mean)):
        if vector is not None:
            check_tensor(f"{name}: {what}", vector, (k,), (torch.float32,), x.device)
    rank = _check_down(name, x, k, down)
    h = None if down is None else torch.empty(m, rank, dtype=down.dtype, device=x.device)
    _check_tile(name, tile, row, hadamard, rank, swizzled)
    check_device(name, x.device)
    left = None if beside is None else Beside(beside, beside.shape[1], beside.stride(0))
    read: dict[str, Any] = {"source": Source(x, x.stride(0), left, smooth, mean), "M": m, "K": k, "ACT": how.act}
    read |= {"HADAMARD": levels_of(hadamard, how.regular)}
    read |= {"TILES": cdiv(k, tile.columns), "TILE": tile, "num_warps": tile.warps} | EXACT
    product = None
    if down is not None and h is not None:
        product = Down(down, h, rank, tl.constexpr(max(16, triton.next_power_of_2(rank))))
    programs = cdiv(swizzled_size(m, 4) // 4 if swizzled else m, tile.rows)  # of rows, those that pad included
    if row.group_size:
        _launch_blocks(out, programs, how, input_scale is not None, product, read)
    else:
        _launch_rows(out, programs, input_scale is not None, product, read)
    return out, h


class Beside(NamedTuple):
    """Another matrix (M, D), rows a stride apart, whose columns come first."""

    matrix: Any
    D: Any
    stride: Any


class Source(NamedTuple):
    """The input of a kernel, act(x) of x, rows a stride apart, with its steps.

    x: (M, K - D), or twice as wide for activations of two halves. beside: or None. smooth, mean: (K,) fp32 or None.
    """

    x: Any
    stride_x: Any
    beside: Any
    smooth: Any
    mean: Any


class Down(NamedTuple):
    """The first half of a low-rank branch: down (R, K), and h (M, R), which is written; BLOCK_R: at least R."""

    down: Any
    h: Any
    R: Any
    BLOCK_R: Any


class Coded(NamedTuple):
    """The results of a kernel: codes and scales. A scale, or nvfp4's global scale, that is given is read, not written.

    codes: (M, K) bytes, or (M, K/2) with two codes to a byte. scale: (M,) or () fp32, (M, G) bytes or fp32, or the
    128x4 layout.
    global_scale: (M, 1) or () fp32, or None. stride: between rows of the fp32 one, 0 where they share it; or None.
    """

    codes: Any
    scale: Any
    global_scale: Any
    stride: Any


def as_coded(out: QuantizedTensor) -> Coded:
    """Return codes and scales as a kernel takes them."""
    of_rows = out.global_scale if out.format.two_level else None if out.format.group_size else out.scale
    stride = None if of_rows is None else min(of_rows.ndim, 1)
    return Coded(as_bytes(out.codes), as_bytes(out.scale), out.global_scale, stride)


def _launch_rows(
    out: QuantizedTensor, programs: int, scale_given: bool, down: Down | None, read: dict[str, Any]
) -> None:
    row, amax = out.format, None
    if row.block[0] == 0 and not scale_given:
        amax = torch.zeros((), dtype=torch.int32, device=out.codes.device)
        tensor_amax_kernel[(programs,)](amax=amax, **read)
    quantize_rows_kernel[(programs,)](
        down=down,
        out=as_coded(out),
        amax=amax,
        ELEMENT=row.element.name,
        LARGEST=row.element.max,
        SCALE_GIVEN=scale_given,
        **read,
    )


def _launch_blocks(
    out: QuantizedTensor, programs: int, how: Rounding, scale_given: bool, down: Down | None, read: dict[str, Any]
) -> None:
    # Tokens that take their own global scale, and sums over K, need whole rows; otherwise every tile stands alone.
    own_global = out.format.two_level and not scale_given
    quantize_blocks_kernel[(programs, 1 if own_global or down is not None else read["TILES"])](
        down=down,
        out=as_coded(out),
        FORMAT=out.format.name,
        GROUP=out.format.group_size,
        OWN_GLOBAL=own_global,
        FOUR_OVER_SIX=how.four_over_six,
        SWIZZLED=how.swizzled,
        **read,
    )


def quantize_tuned(
    x: Tensor, tensors: RoundingTensors, how: Rounding, chip: str
) -> tuple[QuantizedTensor, Tensor | None]:
    """Call `quantize_activation` with the tile of its rows, or the one that was tuned for the chip."""
    row, down = find_format(how.format), tensors.down is not None
    own_global = row.two_level and tensors.input_scale is None
    if down or (row.group_size and not own_global):
        name = tile_name(row, how.hadamard, down, tensors.beside is not None, own_global)
        tile = find_memory_tile(OP.file, name, chip, x.shape[0])
        tile = replace(tile, columns=max(tile.columns, how.hadamard))  # which holds whole blocks
    else:
        k = x.shape[1] // (2 if how.act in GATED else 1) + (0 if tensors.beside is None else tensors.beside.shape[1])
        tile = whole_row_tile(k, chip, many=bool(how.hadamard or row.group_size))
    return quantize_activation(x, tensors, how, tile=tile)


def launch(x: Tensor, tensors: Sequence[Tensor], rounding: str, *, chip: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the op on a chip; ValueError where it has no kernel."""
    operands, how = unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)
    for cell in cells(x, tensors, rounding, chip=chip):
        require(*cell, chip)
    q, h = quantize_tuned(x, operands, how, chip)
    return *returned(q, operands.input_scale), x.new_empty(0) if h is None else h


def cells(x: Tensor, tensors: Sequence[Tensor], rounding: str, *, chip: str) -> tuple[tuple[str, str], ...]:
    """Return the (op, format) that a chip must have for a call."""
    operands, how = unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)
    first = OP.name, how.format if operands.down is None else "down"
    return (first,) if operands.beside is None else (first, (OP.name, f"{how.format}-beside"))


def compare(
    results: Sequence[Tensor], x: Tensor, tensors: Sequence[Tensor], rounding: str, *, chip: str, sample: Sample
) -> Verdict:
    """Compare results of a call: act(x) with float64, codes with the reference's of the kernel's own act(x)."""
    operands, how = unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)
    has_one_scale = how.row.block[0] == 0 and operands.input_scale is None  # which follows from all tokens
    rows = picked(x.shape[0], None if has_one_scale else sample.tokens, x.device)
    a, verdicts = x[rows], []
    if how.act:
        a = activate(a, how.act, tile=Tile(4, 1024, 4))
        exact, bound = exact_activation(how.act, x[rows])
        verdicts.append(within(how.act, a, exact, of_dtype(exact, bound, a.dtype)))
    if operands.beside is not None:
        a = torch.cat([operands.beside[rows], a], dim=1)
    verdicts.append(compare_codes(coded(results, operands, how, rows), a, operands, how, rows))
    if operands.down is not None:
        verdicts.append(product("h", results[3][rows], Product(a.to(operands.down.dtype), operands.down)))
    return worst(*verdicts)


def compare_codes(
    q: QuantizedTensor, a: Tensor, operands: RoundingTensors, how: Rounding, rows: Tensor, sums: bool = False
) -> Verdict:
    """Compare codes and scales with those that the torch reference makes of a, the given rows of an input.

    sums: whether another launch than that of the codes computed a, by sums whose order it may choose.
    """
    scale = operands.input_scale
    some = RoundingTensors(
        scale[rows] if scale is not None and scale.ndim == 2 else scale, operands.smooth, operands.mean
    )
    plain = Rounding(how.format, "", how.hadamard, how.four_over_six, regular=how.regular)
    made = coded(REFERENCES[OP.name](a, *pack_named(some, plain)), some, plain)
    parts = zip(q.tensors().items(), made.tensors().values(), strict=True)
    verdict = worst(*(same({"weight": "codes"}.get(name, "scales"), ours, theirs) for (name, ours), theirs in parts))
    return same_but_few(q, made) if sums and verdict.is_wrong else verdict


def coded(
    made: Sequence[Tensor], operands: RoundingTensors, how: Rounding, rows: Tensor | None = None
) -> QuantizedTensor:
    """Return what an op that quantizes made, or rows of it, as a matrix with the scales that were given."""
    codes, scale, global_scale = made[:3]
    if operands.input_scale is not None:
        if how.row.two_level:
            global_scale = operands.input_scale
        else:
            scale = operands.input_scale.reshape(() if how.row.block[0] == 0 else (-1,))
    whole = QuantizedTensor.stored(codes, scale, global_scale if how.row.two_level else None, how.row)
    return whole.unswizzled() if rows is None else taken(whole, rows)


def decoded(made: Sequence[Tensor], x: Tensor, tensors: Sequence[Tensor], rounding: str) -> Tensor:
    """Return the numbers that a call's results stand for."""
    return coded(made, *unpack_named(RoundingTensors, tensors, rounding, Rounding.parse)).dequantize()


def exact_activation(act: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return act(x) in float64, and what fp32 may lose of it before it is rounded to x's type.

    A few roundings, and of e^t as much of its exponent: (6 + 5 |t|) · 2^-24 of the result; where e^t overflows, a
    result of |x| · 2^-127. Of the exact gelu, whose 1 + erf cancels below zero, 2^-23 of |x| besides.
    """
    v = x.double()
    if act == "gelu":
        y = 0.5 * v * torch.special.erfc(-v / math.sqrt(2.0))
        return y, 2.0**-23 * v.abs() + 2.0**-22 * y.abs()
    if act == "gelu_tanh":
        t = 2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
        y = v / (1 + torch.exp(-t))
        return y, (6 + 5 * t.abs()) * 2.0**-24 * y.abs() + 2.0**-127 * v.abs()
    halves = v.chunk(2, -1)
    gate, other = halves if act == "silu_mul" else halves[::-1]
    y = gate / (1 + torch.exp(-gate)) * other
    lost = (6 + 5 * gate.abs()) * 2.0**-24 + torch.finfo(x.dtype).eps / 2  # silu is rounded before the product
    return y, lost * y.abs() * 1.01 + 2.0**-127 * (gate * other).abs()


def returned(q: QuantizedTensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scale, global scale), without a given scale: an op's results may not alias its arguments."""
    nothing = torch.empty(0, dtype=torch.float32, device=q.codes.device)
    has_scale = input_scale is not None
    scale = nothing if has_scale and not q.format.two_level else q.scale
    return q.codes, scale, nothing if has_scale or q.global_scale is None else q.global_scale


def activate(x: Tensor, act: str, *, tile: Tile) -> Tensor:
    """Return act(x) (M, K) in x's type, computed in fp32 and rounded as torch's layers round.

    x is (M, K) for gelu and gelu_tanh, and (M, 2K) for silu_mul, silu(first half) · second half, and for mul_silu,
    first half · silu(second half).
    """
    m, k = _check_rows("activate", x, None, act)
    out = torch.empty(m, k, dtype=x.dtype, device=x.device)
    check_device("activate", x.device)
    grid = (cdiv(m, tile.rows), cdiv(k, tile.columns))
    source = Source(x, x.stride(0), None, None, None)
    activate_kernel[grid](source, out, m, k, ACT=act, TILE=tile, num_warps=tile.warps, **EXACT)
    return out


def tile_name(format: Format, hadamard: int, down: bool, beside: bool, own_global: bool) -> str:
    """Return the name in kernels/tuned of a tile that is no whole row."""
    if down:
        return f"down {format.name}" + "-beside" * beside + " own global" * own_global
    return format.name + " hadamard" * bool(hadamard)


def _check_rows(name: str, x: Tensor, format: Format | None, act: str, beside: Tensor | None = None) -> tuple[int, int]:
    """Return (M, K) of x, or of act(x), with the columns of `beside`; ValueError for input that does not fit."""
    if act and act not in ACTS:
        raise ValueError(f"{name}: act is {act!r}, expected one of {', '.join(ACTS)}")
    if x.ndim != 2 or x.dtype not in _FLOATS:
        raise ValueError(f"{name}: x is {x.dtype} {(*x.shape,)}, expected (M, K) of bfloat16, float16 or float32")
    m, k = x.shape
    if 0 in (m, k):
        raise ValueError(f"{name}: x {(m, k)} is empty, so there is nothing to launch; return an empty result")
    if k > 1 and x.stride(1) != 1:
        raise ValueError(f"{name}: x has strides {x.stride()}, expected rows of adjacent elements: pass .contiguous()")
    if act in GATED and k % 2:
        raise ValueError(f"{name}: x {(m, k)} has no two halves, expected (M, 2K) for {act}")
    k //= 2 if act in GATED else 1
    if beside is not None:
        check_beside(name, beside, x)
        if beside.device != x.device:
            raise ValueError(f"{name}: beside is on {beside.device}, x on {x.device}: move it")
        if beside.shape[1] > 1 and beside.stride(1) != 1:
            raise ValueError(f"{name}: beside has strides {beside.stride()}, expected rows of adjacent elements")
        k += beside.shape[1]
    if format is not None:
        format.check_shape(m, k, f"{name}: x")
    return m, k


def _check_down(name: str, x: Tensor, k: int, down: Tensor | None) -> int:
    """Return the rank of `down`, 0 for none; ValueError where it does not fit."""
    if down is None:
        return 0
    rank = down.shape[0] if down.ndim == 2 else 0
    if not 1 <= rank <= LARGEST_RANK:
        raise ValueError(
            f"{name}: down is {(*down.shape,)}, expected (R, K) with R from 1 to {LARGEST_RANK}: "
            "multiply by a larger one in a pass of its own"
        )
    dtypes = _FLOATS[:2] if x.dtype == torch.float32 else (x.dtype,)
    check_tensor(f"{name}: down", down, (rank, k), dtypes, x.device)
    return rank


def _check_tile(name: str, tile: Tile, format: Format, hadamard: int, rank: int, swizzled: bool) -> None:
    check_tile(name, tile, format)
    if hadamard and tile.columns % hadamard:
        raise ValueError(f"{name}: tile.columns is {tile.columns}, expected a multiple of hadamard {hadamard}")
    if swizzled and tile.columns % (4 * format.group_size):
        raise ValueError(
            f"{name}: tile.columns is {tile.columns}, expected a multiple of {4 * format.group_size}: "
            "swizzled scales are padded to 4 groups"
        )
    if rank and tile.rows < 16:
        raise ValueError(f"{name}: tile.rows is {tile.rows}, expected at least 16 for a product with `down`")


def new_codes(name: str, x: Tensor, k: int, input_scale: Tensor | None, how: Rounding) -> QuantizedTensor:
    """Return empty tensors for the codes (M, K) of x (M, …); a given scale takes its place among them.

    name: of the kernel, for errors. Raises ValueError for a scale that does not fit.
    """
    row, m, device = find_format(how.format), x.shape[0], x.device
    (codes_shape, codes_dtype), (shape, dtype) = list(stored_shapes(row, m, k).values())[:2]
    if how.swizzled:
        shape = (swizzled_size(m, k // row.group_size),)
    codes = torch.empty(codes_shape, dtype=codes_dtype, device=device)
    scale = torch.empty(shape, dtype=dtype, device=device)
    global_scale = None
    if input_scale is not None:
        if row.group_size and not row.two_level:
            raise ValueError(f"{name}: {row.name} takes its scales from each block; give no input_scale")
        is_of_all = row.block[0] == 0 or (row.two_level and input_scale.ndim == 0)
        check_tensor(f"{name}: input_scale", input_scale, () if is_of_all else (m, 1), (torch.float32,), device)
    if row.two_level:
        global_scale = torch.empty(m, 1, dtype=torch.float32, device=device) if input_scale is None else input_scale
    elif input_scale is not None:
        scale = input_scale.reshape(shape)
    return QuantizedTensor(codes, scale, global_scale, (m, k), row)


holds = triton.constexpr_function(is_held)


@triton.jit
def quantize_rows_kernel(
    source,
    down,  # or None
    out,
    amax,  # () int32 bits of the tensor's amax, or None
    M,
    K,
    ACT: tl.constexpr,
    HADAMARD: tl.constexpr,
    ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_GIVEN: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """code = RNE(v / s), s = amax / LARGEST; reads x, writes codes, scale (or reads it, if given) and h."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    OWN_AMAX: tl.constexpr = amax is None and not SCALE_GIVEN  # pyright: ignore[reportAssignmentType]
    HELD: tl.constexpr = OWN_AMAX and down is None and holds(TILES * COLUMNS, HADAMARD != 0)  # pyright: ignore
    tiles = ()
    if SCALE_GIVEN:
        step = tl.load(out.scale + rows * out.stride, mask=rows < M, other=1.0)  # (ROWS,)
    elif amax is not None:
        step = row_step(tl.load(amax + rows * out.stride, mask=rows < M, other=0), LARGEST)
    elif HELD:
        tiles = held_rows(source, rows, M, K, ACT, HADAMARD, TILES, TILE)
        step = row_step(amax_bits(tiles, TILES), LARGEST)
    else:
        bits, product = scan_rows(source, down, rows, M, K, ACT, HADAMARD, TILES, TILE)
        step = row_step(bits, LARGEST)
    if HELD:
        for tile in tl.static_range(TILES):
            quantize_rows_tile(tiles[tile], step, out.codes, rows, tile, M, K, ELEMENT, SCALE_GIVEN, COLUMNS)
    else:
        if not OWN_AMAX:
            product = no_product(down, ROWS)
        for tile in range(TILES):
            inputs = load_tile(source, rows, tile, M, K, ACT, down is None, COLUMNS)
            if down is not None and not OWN_AMAX:
                product = add_down(product, inputs, down, tile, K, COLUMNS)
            values = transform_tile(inputs, source.smooth, source.mean, tile, K, HADAMARD, ROWS, COLUMNS)
            values = computed_once(values, HADAMARD)
            quantize_rows_tile(values, step, out.codes, rows, tile, M, K, ELEMENT, SCALE_GIVEN, COLUMNS)
    if not SCALE_GIVEN:
        tl.store(out.scale + rows * out.stride, step, mask=rows < M)
    if down is not None:
        store_product(product, down, rows, M)


@triton.jit
def quantize_blocks_kernel(
    source,
    down,  # or None
    out,
    M,
    K,
    ACT: tl.constexpr,
    HADAMARD: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OWN_GLOBAL: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """code = RNE(v / step), one step for each GROUP of a row; reads x, writes codes, scale and h.

    OWN_GLOBAL: also writes global_scale, from the amax of each row. With it or `down`, one program takes whole rows.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    g = tl.full((ROWS,), 1.0, tl.float32)
    product = no_product(down, ROWS)
    HELD: tl.constexpr = OWN_GLOBAL and down is None and holds(TILES * COLUMNS, True)  # pyright: ignore
    tiles = ()
    if HELD:
        tiles = held_rows(source, rows, M, K, ACT, HADAMARD, TILES, TILE)
        g = row_global(amax_by_blocks(tiles, GROUP, TILES, ROWS, COLUMNS), FOUR_OVER_SIX)
    elif OWN_GLOBAL:
        bits, product = scan_rows(source, down, rows, M, K, ACT, HADAMARD, TILES, TILE)
        g = row_global(bits, FOUR_OVER_SIX)
    elif FORMAT == "nvfp4":
        g = tl.load(out.global_scale + rows * out.stride, mask=rows < M, other=1.0)
    if HELD:
        for tile in tl.static_range(TILES):
            quantize_blocks_tile(
                tiles[tile], g, out.codes, out.scale, rows, tile, M, K, FORMAT, GROUP, False, FOUR_OVER_SIX, SWIZZLED,
                ROWS, COLUMNS,
            )  # fmt: skip
    else:
        first = tl.program_id(1)
        for tile in range(first, TILES if OWN_GLOBAL or down is not None else first + 1):
            inputs = load_tile(source, rows, tile, M, K, ACT, down is None, COLUMNS)
            if down is not None and not OWN_GLOBAL:
                product = add_down(product, inputs, down, tile, K, COLUMNS)
            values = transform_tile(inputs, source.smooth, source.mean, tile, K, HADAMARD, ROWS, COLUMNS)
            values = computed_once(values, HADAMARD)
            quantize_blocks_tile(
                values, g, out.codes, out.scale, rows, tile, M, K, FORMAT, GROUP, not OWN_GLOBAL, FOUR_OVER_SIX,
                SWIZZLED, ROWS, COLUMNS,
            )  # fmt: skip
    if OWN_GLOBAL:
        tl.store(out.global_scale + rows, g, mask=rows < M)
    if down is not None:
        store_product(product, down, rows, M)


@triton.jit
def tensor_amax_kernel(
    source,
    amax,  # () int32, zero before the launch
    M,
    K,
    ACT: tl.constexpr,
    HADAMARD: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """amax = bits of the largest |v| of all rows. A maximum of integers is the same in every order of its programs."""
    ROWS: tl.constexpr = TILE.rows
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    bits, _ = scan_rows(source, None, rows, M, K, ACT, HADAMARD, TILES, TILE)
    tl.atomic_max(amax, tl.max(tl.where(rows < M, bits, 0), 0))


@triton.jit
def activate_kernel(
    source,  # of x alone
    y,  # (M, K)
    M,
    K,
    ACT: tl.constexpr,
    TILE: tl.constexpr,
):
    """y = act(x): reads x, writes y."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    value = load_tile(source, rows, tl.program_id(1), M, K, ACT, True, COLUMNS)
    tl.store(y + rows[:, None] * K + columns[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def held_rows(source, rows, M, K, ACT: tl.constexpr, HADAMARD: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr):
    """Return v of whole rows: a tuple of TILES tiles, fp32 (ROWS, COLUMNS)."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    tiles = ()
    for tile in tl.static_range(TILES):
        inputs = load_tile(source, rows, tile, M, K, ACT, True, COLUMNS)
        values = transform_tile(inputs, source.smooth, source.mean, tile, K, HADAMARD, ROWS, COLUMNS)
        tiles += (computed_once(values, HADAMARD),)
    return tiles


@triton.jit
def scan_rows(
    source, down, rows, M, K, ACT: tl.constexpr, HADAMARD: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr
):
    """Return the bits of max |v| of each row (ROWS,), and a · down^T in fp32 (ROWS, BLOCK_R), zeros without `down`."""
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    product = no_product(down, ROWS)
    for tile in range(TILES):
        inputs = load_tile(source, rows, tile, M, K, ACT, down is None, COLUMNS)
        if down is not None:
            product = add_down(product, inputs, down, tile, K, COLUMNS)
        values = transform_tile(inputs, source.smooth, source.mean, tile, K, HADAMARD, ROWS, COLUMNS)
        values = computed_once(values, HADAMARD)
        largest = tl.maximum(largest, magnitude_bits(values))
    return tl.max(largest, 1), product


@triton.jit
def load_tile(source, rows, tile, M, K, ACT: tl.constexpr, WIDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the tile'th COLUMNS columns of a, as fp32: of x, or of act(x) rounded as a separate layer does.

    Zeros beyond M and K. Columns before D are those of the matrix beside, if there is one. WIDEN: by `widened`, not
    where the numbers become 16-bit again for a product: the compiler drops both casts then.
    """
    x, stride_x = source.x, source.stride_x
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    if source.beside is None:
        mask, place, other_half = inside, x + rows[:, None] * stride_x + columns[None, :], K
    else:
        D, stride_beside = source.beside.D, source.beside.stride
        mask = inside & (columns >= D)[None, :]
        place, other_half = x + rows[:, None] * stride_x + (columns - D)[None, :], K - D
    values = tl.load(place, mask=mask, other=0.0)
    values = widened(values) if WIDEN else values.to(tl.float32)
    if ACT == "gelu_tanh":
        values = rounded(gelu_tanh(values), x)
    elif ACT == "gelu":
        values = rounded(gelu(values), x)
    elif ACT == "silu_mul":
        other = widened(tl.load(place + other_half, mask=mask, other=0.0))
        values = rounded(rounded(silu(values), x) * other, x)
    elif ACT == "mul_silu":
        other = widened(tl.load(place + other_half, mask=mask, other=0.0))
        values = rounded(values * rounded(silu(other), x), x)
    if source.beside is not None:
        first = (columns < D)[None, :]
        places = source.beside.matrix + rows[:, None] * stride_beside + columns[None, :]
        left = tl.load(places, mask=inside & first, other=0.0)
        values = tl.where(first, widened(left) if WIDEN else left.to(tl.float32), values)
    return values


@triton.jit
def gelu_tanh(v):
    """v / 2 · (1 + tanh u), u = √(2/π) (v + 0.044715 v³), as v / (1 + e^(-2u))."""
    return sigmoid_product(v, v * tl.fma(v * v, -0.10294324195, -2.30220819813))  # -2u · log2(e)


@triton.jit
def gelu(v):
    """v · (1 + erf(v / √2)) / 2."""
    return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def silu(v):
    """v / (1 + e^-v)."""
    return sigmoid_product(v, v * -1.4426950408889634)


@triton.jit
def sigmoid_product(v, power):
    """v / (1 + 2^power), by the square of a reciprocal root: one instruction, where a division takes ten."""
    root = tl.rsqrt(1.0 + tl.exp2(power))
    return v * root * root


@triton.jit
def no_product(down, ROWS: tl.constexpr):
    """Return zeros in fp32 (ROWS, BLOCK_R); one column without `down`."""
    if down is None:
        return tl.zeros((ROWS, 1), tl.float32)
    else:
        return tl.zeros((ROWS, down.BLOCK_R), tl.float32)


@triton.jit
def add_down(product, inputs, down, tile, K, COLUMNS: tl.constexpr):
    """product (ROWS, BLOCK_R) += x · down^T over the tile'th COLUMNS columns, in down's type with fp32 sums."""
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, down.BLOCK_R)
    mask = (ranks < down.R)[:, None] & (columns < K)[None, :]
    weights = tl.load(down.down + ranks[:, None].to(tl.int64) * K + columns[None, :], mask=mask, other=0.0)
    return tl.dot(inputs.to(weights.dtype), weights.T, product)


@triton.jit
def store_product(product, down, rows, M):
    """h[rows] = product (ROWS, BLOCK_R), rounded to h's type."""
    h, R, ranks = down.h, down.R, tl.arange(0, down.BLOCK_R)
    mask = (rows < M)[:, None] & (ranks < R)[None, :]
    tl.store(h + rows[:, None] * R + ranks[None, :], product.to(h.dtype.element_ty), mask=mask)
