"""QuantizedTensor: a matrix in a number format, as plain tensors.

    w ≈ codes · scale                      one-level formats
    w ≈ codes · (scale · global_scale)     nvfp4

encode.py has the arithmetic, recipes/formats.py the formats; this file joins them. Ops with many optional tensors take
them as one list, with a text of the names of those given: `pack_named`, `unpack_named`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.base import devices
from fluxq.kernels import encode
from fluxq.recipes.formats import Format, find_format

Named = TypeVar("Named", bound=tuple)  # a NamedTuple of tensors, None for those that are not there
How = TypeVar("How")

_CACHED = 1 << 18  # elements that a core rounds at a time
_AT_ONCE = 1 << 26  # elements that a GPU does


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized matrix of `shape` (N, K); rows are output features of weights, tokens of activations.

    codes: as stored, (N, K), or (N, K/2) uint8 for 4-bit elements.
    scale: as stored, `Format.scale_shape`: (N, G), (N,) for per-row, () for per-tensor formats, and (⌈N/n⌉, ⌈K/k⌉)
        where blocks span rows.
    global_scale: fp32, () or (N, 1), for two-level formats only.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    shape: tuple[int, int]
    format: Format

    @classmethod
    def quantize(
        cls,
        w: Tensor,
        format: str | Format,
        *,
        group_size: int | None = None,
        global_scale: Tensor | None = None,
        tensor_scale: Tensor | None = None,
        four_over_six: bool = False,
        name: str = "weight",
    ) -> QuantizedTensor:
        """Round a finite matrix w (N, K), any float dtype, to the nearest codes.

        Raises ValueError for shapes that do not fit, NaN and infinity.

        global_scale: positive fp32 () or (N, 1); by default nvfp4 takes amax / (6 · 448) of the whole matrix.
        tensor_scale: positive fp32 (), of a format with one scale; by default it follows from the amax.
        four_over_six: its blocks choose between two scales, and its own global scale leaves room for the larger one.
        name: of the matrix, for errors.
        """
        row = find_format(format) if isinstance(format, str) else format
        if w.ndim != 2 or not w.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point matrix (N, K), got {w.dtype} {(*w.shape,)}")
        row = row.with_group_size(group_size)
        row.check_shape(w.shape[0], w.shape[1], name)
        if global_scale is not None:
            _check_global_scale(global_scale, row, w.shape[0], name)
        if tensor_scale is not None and row.block != (0, 0):
            raise ValueError(f"{name}: {row.name} has not one scale, but tensor_scale was given; leave it out")
        done = quantize_blocks(w, row, global_scale, name, tensor_scale, four_over_six)
        # A search in the scales takes a hundredth of the time of one in w.
        if not encode.all_finite(done.scale, row):
            raise ValueError(f"{name}: holds NaN or infinity; get the source again, or exclude this layer")
        return done

    @classmethod
    def stored(
        cls, codes: Tensor, scale: Tensor | None, global_scale: Tensor | None, format: Format
    ) -> QuantizedTensor:
        """Return the tensors of an op as one matrix: 4-bit codes are two to a byte, block scales may be swizzled."""
        if scale is None:
            raise ValueError(f"codes of {format.name} need a scale")
        if format.two_level and global_scale is None:
            raise ValueError(f"{format.name} needs a global scale, w_scale_2 is None")
        n, columns = codes.shape
        return cls(codes, scale, global_scale, (n, columns * 8 // format.element.bits), format)

    @property
    def is_swizzled(self) -> bool:
        """Tell whether block scales are in the 128x4 layout."""
        return self.format.group_size > 0 and self.scale.ndim == 1

    def unswizzled(self) -> QuantizedTensor:
        """Return the same matrix with block scales (N, G), whatever their order was."""
        group = self.format.group_size
        if not group or self.scale.ndim == 2:
            return self
        return replace(self, scale=unswizzle_scales(self.scale, self.shape[0], self.shape[1] // group))

    @classmethod
    def empty(
        cls, format: Format, n: int, k: int, global_scale: Tensor | None, device: torch.device
    ) -> QuantizedTensor:
        """Return room for a matrix (n, k), for `put` to fill."""
        shapes = stored_shapes(format, n, k)
        codes, scale = (
            devices.empty(shape, dtype, device) for shape, dtype in (shapes["weight"], shapes["weight_scale"])
        )
        return cls(codes, scale, global_scale, (n, k), format)

    def put(self, part: QuantizedTensor, row: int = 0, column: int = 0) -> None:
        """Copy `part` to this matrix, from that row and column on, where a block starts. Global scales are the same."""
        rows, bits = slice(row, row + part.shape[0]), self.format.element.bits
        start = column * bits // 8
        _bytes(self.codes)[rows, start : start + part.codes.shape[1]] = _bytes(part.codes)
        if self.scale.ndim < 2:
            self.scale[rows if self.scale.ndim else ...] = part.scale
        else:
            self.put_scales(part.scale, row, column)

    def put_scales(self, scale: Tensor, row: int = 0, column: int = 0) -> None:
        """Copy scales of blocks to this matrix, of which the first starts at that row and column."""
        top, left = row // self.format.block[0], column // self.format.group_size
        down, across = scale.shape
        _bytes(self.scale)[top : top + down, left : left + across] = _bytes(scale)

    def rows(self, start: int, stop: int, step: int = 1) -> QuantizedTensor:
        """Return rows of the matrix, which share its memory; each has scales of its own where blocks span rows."""
        part = slice(start, stop, step)
        scale, global_scale, row = self.scale, self.global_scale, self.format
        if row.spans_rows:
            numbers = torch.arange(*part.indices(self.shape[0]), device=scale.device)
            scale, row = scale[numbers // row.block[0]], replace(row, block=(1, row.group_size))
        elif scale.ndim:
            scale = scale[part]
        if global_scale is not None and global_scale.ndim:
            global_scale = global_scale[part]
        codes = self.codes[part]
        return QuantizedTensor(codes, scale, global_scale, (codes.shape[0], self.shape[1]), row)

    def multipliers(self) -> Tensor:
        """Return what multiplies codes, fp32: (N, G), (N, 1), or (N, K) where the last group of a row is cut off."""
        if self.format.spans_rows:
            return self.rows(0, self.shape[0]).multipliers()
        (n, k), group = self.shape, self.format.group_size
        of_groups = encode.decode_scale(self.scale, self.format, self.global_scale)
        of_groups = of_groups.expand(n, 1) if of_groups.ndim == 0 else of_groups.reshape(n, -1)
        return of_groups.repeat_interleave(group, 1)[:, :k] if group and k % group else of_groups

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """Return the matrix (N, K) that the codes stand for, computed in fp32 and cast once, in `out` if given."""
        n, k = self.shape
        done = torch.empty(n, k, dtype=dtype, device=self.codes.device) if out is None else out
        groups = self.multipliers()  # (N, G)
        pairs = encode.stored_pairs(self.format.element, self.codes.device)
        for start, part in row_chunks(self.codes):
            at = slice(start, start + part.shape[0])
            values = encode.decode_stored(part, self.format.element, pairs).view(len(part), groups.shape[1], -1)
            torch.mul(values, groups[at].unsqueeze(-1), out=done[at].view(values.shape))
        return done

    def operand(self) -> Tensor:
        """Return `dequantize` in fp32, for one product: on a CPU in scratch memory that is not kept."""
        return self.dequantize(out=devices.scratch(self.shape, torch.float32, self.codes.device))

    @property
    def bits_per_weight(self) -> float:
        """Bits of everything stored, over the number of weights."""
        stored = sum(t.numel() * t.element_size() for t in self.tensors().values())
        return 8 * stored / prod(self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors under the names that checkpoints use."""
        named = {"weight": self.codes, "weight_scale": self.scale, "weight_scale_2": self.global_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def quantize_blocks(
    x: Tensor,
    format: Format,
    global_scale: Tensor | None,
    name: str,
    row_scale: Tensor | None = None,
    four_over_six: bool = False,
    steps: Callable[[Tensor], object] | None = None,
) -> QuantizedTensor:
    """Quantize x as `QuantizedTensor.quantize` without its search for NaN: in activations they decode to blocks of NaN.

    row_scale: fp32 scale of each row (M, 1) of a per-row format, or () of a per-tensor format; by default that of x.
    four_over_six: nvfp4's choice of scales, `encode.four_over_six`.
    steps: applied to rows of x in fp32 first, in place; before the call where a scale follows from all of x.
    """
    how = _Rounding(x, format, global_scale, name, row_scale, four_over_six)
    done = QuantizedTensor.empty(format, x.shape[0], x.shape[1], how.global_scale, x.device)
    for start, scaled, scale, _ in how.scaled_rows(x, steps):
        codes = encode.encode(scaled, format.element, used_up=True).reshape(len(scaled), -1)
        if format.group_size == 0:
            scale = scale.reshape(()) if format.block[0] == 0 else scale.reshape(len(scaled))
        shape = (len(scaled), x.shape[1])
        codes = encode.pack(codes, format.element)
        done.put(QuantizedTensor(codes, scale, how.global_of(start, len(scaled)), shape, format), start)
    return done


def round_blocks(
    x: Tensor,
    format: Format,
    global_scale: Tensor | None,
    name: str,
    row_scale: Tensor | None = None,
    four_over_six: bool = False,
    steps: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return the decoded `quantize_blocks` of the same arguments, (M, K) in fp32, without storing the codes."""
    how = _Rounding(x, format, global_scale, name, row_scale, four_over_six)
    done = devices.scratch(x.shape, torch.float32, x.device)
    for start, scaled, _, step in how.scaled_rows(x, steps):
        rounded = encode.decoded_codes(scaled, format.element)
        torch.mul(rounded, step, out=done[start : start + len(scaled)].view(scaled.shape))
    return done


class _Rounding:
    """Settings for rounding a matrix, with the scales that follow from all of it.

    global_scale: () or (M, 1), of two-level formats. row_scale: for formats whose scales do not follow from blocks.
    """

    def __init__(
        self,
        x: Tensor,
        format: Format,
        global_scale: Tensor | None,
        name: str,
        row_scale: Tensor | None,
        four_over_six: bool,
    ) -> None:
        format.check_shape(x.shape[0], x.shape[1], name)
        if row_scale is not None and format.group_size:
            raise ValueError(f"{name}: {format.name} takes its scales from each block; leave out row_scale")
        if format.two_level and global_scale is None:
            global_scale = encode.global_scale_for(largest(x), format, four_over_six)
        if row_scale is None and format.block[0] == 0:
            row_scale = encode.block_scale(largest(x).reshape(1, 1, 1), format, None)
        self.format, self.global_scale, self.row_scale = format, global_scale, row_scale
        self.four_over_six = four_over_six

    def scaled_rows(
        self, x: Tensor, steps: Callable[[Tensor], object] | None
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield (first row, blocks (rows, G, k) over their scales in fp32, stored scales (rows, G), decoded scales).

        Of a few rows at a time. Scales that do not follow from blocks are (rows, 1), or (1, 1) for all; decoded ones
        are (rows, G, 1). Where blocks span rows, x comes as (rows, 1, K), its scales of whole blocks decoded so, too.
        """
        wide = None
        for start, part in row_chunks(x.detach(), unit=max(1, self.format.block[0])):
            rows, k = part.shape
            wide = torch.empty(part.shape, device=x.device, dtype=torch.float32) if wide is None else wide[:rows]
            wide.copy_(part)
            if steps is not None:
                steps(wide)
            if self.format.spans_rows:
                scale = encode.spanning_scale(wide, self.format)
                step = encode.spread(scale, self.format, rows, k)
                yield start, wide.div_(step).unsqueeze(1), scale, step.unsqueeze(1)
                continue
            blocks = wide.view(rows, -1, self.format.group_size or k)
            global_scale = self.global_of(start, rows)
            scale = self._scale(blocks, start, global_scale)
            step = encode.divisor(scale, self.format, global_scale).unsqueeze(-1)
            yield start, blocks.div_(step), scale, step

    def global_of(self, start: int, rows: int) -> Tensor | None:
        """Return the global scale of these rows."""
        if self.global_scale is None or self.global_scale.ndim == 0:
            return self.global_scale
        return self.global_scale[start : start + rows]

    def _scale(self, blocks: Tensor, start: int, global_scale: Tensor | None) -> Tensor:
        if self.row_scale is not None:
            shared = self.row_scale.numel() == 1
            return (self.row_scale if shared else self.row_scale[start : start + len(blocks)]).reshape(-1, 1)
        scale = encode.block_scale(blocks, self.format, global_scale)
        if self.four_over_six and global_scale is not None:
            scale = encode.four_over_six(blocks, scale, self.format, global_scale)
        return scale


def largest(x: Tensor) -> Tensor:
    """Return max |x| () in fp32: NaN where x holds NaN, infinite where it does or fp32 overflows."""
    ends = torch.stack([end for _, part in row_chunks(x) for end in torch.aminmax(part)])
    return ends.abs().amax().float()


def row_chunks(x: Tensor, cached: int = _CACHED, unit: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of x (M, K): on a CPU few enough to stay in its cache through all steps.

    cached: elements for each core. unit: rows that stay together.
    """
    each = cached * torch.get_num_threads() if x.device.type == "cpu" else _AT_ONCE
    rows = max(1, each // x.shape[1] // unit) * unit
    return ((start, x[start : start + rows]) for start in range(0, x.shape[0], rows))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _check_global_scale(global_scale: Tensor, format: Format, rows: int, name: str) -> None:
    if not format.two_level:
        raise ValueError(f"{name}: {format.name} has no global scale, but one was given; leave it out")
    fits = global_scale.dtype == torch.float32 and global_scale.shape in ((), (rows, 1))
    if not fits or not torch.isfinite(global_scale).all() or not (global_scale > 0).all():
        raise ValueError(
            f"{name}: global_scale must be positive, finite float32, () or ({rows}, 1); "
            f"got {global_scale.dtype} {tuple(global_scale.shape)}"
        )


def stored_shapes(format: Format, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every stored tensor of an (n, k) weight, by checkpoint name."""
    columns = k * format.element.bits // 8
    stored = {
        "weight": ((n, columns), getattr(torch, format.element.storage)),
        "weight_scale": (format.scale_shape(n, k), encode.SCALE_DTYPES[format.scale]),
    }
    if format.two_level:
        stored["weight_scale_2"] = ((), torch.float32)
    return stored


def swizzle_scales(scale: Tensor) -> Tensor:
    """Return one-byte block scales (rows, G) in the order that Blackwell's matrix units read: flat, padded with 0.

    Tiles of 128 rows and 4 groups follow one another, each as 32 lines of 4 quarters (rows 32 apart) of 4 groups.
    """
    if scale.ndim != 2 or scale.element_size() != 1:
        raise ValueError(
            f"swizzle_scales: scale is {scale.dtype} {(*scale.shape,)}, expected block scales (rows, G) of one byte "
            "each, as nvfp4, mxfp8 and mxfp4 have them"
        )
    rows, groups = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale.dtype)


def swizzled_size(rows: int, groups: int) -> int:
    """Count the elements of (rows, groups) block scales in the 128x4 layout: both axes are padded."""
    return -(-rows // 128) * 128 * -(-groups // 4) * 4


def unswizzle_scales(flat: Tensor, rows: int, groups: int) -> Tensor:
    """Invert `swizzle_scales`: (rows, groups), without the padding."""
    tall, wide = -(-rows // 128), -(-groups // 4)
    if flat.shape != (tall * wide * 512,):
        raise ValueError(
            f"swizzled scales are {(*flat.shape,)}, expected ({tall * wide * 512},) for ({rows}, {groups}): "
            "make them with swizzle_scales"
        )
    tiles = flat.view(torch.uint8).reshape(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall * 128, wide * 4)[:rows, :groups].contiguous().view(flat.dtype)


def pack_named(named: Any, text: object = "") -> tuple[list[Tensor], str]:
    """Return (tensors, text) as an op takes them: a NamedTuple's tensors but None, and the text with their names."""
    given = tuple(tensor is not None for tensor in named)
    names_of = _names if torch.compiler.is_compiling() else _kept_names  # tracing warns of a cache
    prefix = text.__str__()  # torch.compile of 2.11 traces this, and no f-string of a dataclass
    return [tensor for tensor in named if tensor is not None], f"{prefix} {names_of(type(named), given)}"


def _names(kind: type, given: tuple[bool, ...]) -> str:
    return ",".join(name for name, is_given in zip(kind._fields, given, strict=True) if is_given)  # pyright: ignore


_kept_names = functools.lru_cache(1024)(_names)


def unpack_named(
    kind: type[Named], tensors: Sequence[Tensor], text: str, parse: Callable[[str], How] = str
) -> tuple[Named, How]:
    """Invert `pack_named` for a NamedTuple of this kind: (the tuple, the parsed text)."""
    before, names = read_named(text, parse)
    fields: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return kind(**fields), before


@functools.lru_cache(1024)
def read_named(text: str, parse: Callable[[str], How] = str) -> tuple[How, tuple[str, ...]]:
    """Return (the parsed text before the names, the names)."""
    before, _, names = text.rpartition(" ")
    return parse(before), tuple(filter(None, names.split(",")))
