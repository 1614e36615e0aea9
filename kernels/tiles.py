"""Chips by name, and tiles: kernels/tuned/<kernel>.json holds their sizes by format, chip and number of tokens.

Each file is a list of rows; the first that fits counts:

    {"format": "fp8", "chips": ["sm_90"], "max_m": 64, "tile": {"m": 64, "n": 128, …}, "measured": "NVIDIA H200"}

chips: names of CHIPS; without it the row is for every chip.
max_m: the largest M; without it the row is for every M.
plain: whether the row is only for products that nothing but a bias follows.
measured: the GPU whose timings chose the tile; without it the tile was chosen because it compiles without spills.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fluxq.base.settings import accumulation

# A100; RTX 30 and A40; RTX 40 and L40S; H100 and H200; B200; B300; RTX 50; MI300; MI350; RX 9070.
CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "gfx1201")
# Chips with the instructions and no less shared memory than another, which stands for them.
SAME_AS = {"sm_87": "sm_86", "sm_121": "sm_120", "gfx1200": "gfx1201"}


@dataclass(frozen=True)
class Tile:
    """Tile of a memory-bound kernel, the work of one program at a time: powers of two, and the warps that share it."""

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class MatmulTile:
    """Tile that one program computes, (m, n) at k columns a step: sizes are powers of two.

    group_m: tiles of rows that are launched side by side, so that they find the same weights in the cache.
    acc_split: fp8 on Hopper only, whose matrix units accumulate in fewer bits than fp32 has: columns after which
        the partial sum moves to a true fp32 one; a divisor or, with descriptors, a multiple of k; 0 for never.
    descriptors: the copy engine of Hopper and Blackwell fetches operands; rows of codes must then be multiples of 16
        bytes.
    halves: the tile is finished and stored one half of its columns after the other, which takes fewer registers.
    unit_scales: fp8 as mxfp8 whose scales are all 1, which consumer Blackwell multiplies faster, to the same bits.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    acc_split: int = 0
    descriptors: bool = False
    halves: bool = False
    unit_scales: bool = False


class NoTile(ValueError):
    """kernels/tuned has no tile for a kernel, format, chip and number of tokens."""


@dataclass(frozen=True)
class TunedRow:
    """A row of kernels/tuned/<kernel>.json, as the top of this file says."""

    format: str
    tile: Tile | MatmulTile
    chips: tuple[str, ...] = ()
    max_m: int | None = None
    measured: str | None = None
    plain: bool = False

    def fits(self, format: str, chip: str, m: int, plain: bool = False) -> bool:
        fitting = self.format == format and (plain or not self.plain)
        return fitting and chip in (self.chips or (chip,)) and (self.max_m is None or m <= self.max_m)


def find_tile(kernel: str, format: str, chip: str, m: int, *, plain: bool = False) -> Tile | MatmulTile:
    """Return the tile for m tokens of a format on a chip ("sm_90"); raises NoTile if kernels/tuned has none.

    plain: whether nothing but a bias follows.
    """
    for row in tuned_rows(kernel):
        if row.fits(format, chip, m, plain):
            return row.tile
    raise NoTile(f"kernels/tuned/{kernel}.json has no row for {format} on {chip} at M = {m}")


def find_matmul_tile(
    kernel: str, format: str, chip: str, m: int, codes: Tensor | None = None, *, plain: bool = False
) -> MatmulTile:
    """Return `find_tile` of a matmul as it may be launched now.

    codes: of the weight. The copy engine is left out unless their rows begin at multiples of 16 bytes, and sums do not
    move to fp32 where `accumulate` is "fast".
    """
    tile = find_tile(kernel, format, chip, m, plain=plain)
    if not isinstance(tile, MatmulTile):
        raise NoTile(f"kernels/tuned/{kernel}.json: the tile of {format} is none of a matmul")
    if codes is not None and tile.acc_split and accumulation() == "fast":
        tile = replace(tile, acc_split=0)
    if codes is not None and tile.descriptors and not rows_are_at(codes, 16):
        tile = replace(tile, descriptors=False)
    return tile


def rows_are_at(codes: Tensor, multiple: int) -> bool:
    """Tell whether each row of codes begins at a multiple of `multiple` bytes."""
    return codes.shape[1] % multiple == 0 and codes.data_ptr() % multiple == 0


def find_memory_tile(kernel: str, format: str, chip: str, m: int) -> Tile:
    """Return `find_tile` of a memory-bound kernel."""
    tile = find_tile(kernel, format, chip, m)
    if not isinstance(tile, Tile):
        raise NoTile(f"kernels/tuned/{kernel}.json: the tile of {format} is one of a matmul")
    return tile


def is_held(elements: int, many: bool) -> bool:
    """Tell whether a program holds its row, of so many elements with those that pad it; many: see whole_row_tile."""
    return elements <= (LONGEST_HELD // 2 if many else LONGEST_HELD)


@functools.cache
def whole_row_tile(k: int, chip: str, *, many: bool = False) -> Tile:
    """Return the tile of a program that holds a row of k elements, as several tiles side by side.

    The widest tiles that leave at most one lane in 14 without an element, or narrow ones where none does; and as
    many warps as leave a thread at most 56 elements.

    many: a Hadamard transform or blocks hold values of their own meanwhile: a thread has at most 28 elements, or 32 of
    the longest rows, in at most 16 warps. A row too long for them is read tile by tile, twice.
    """
    most = 16 if chip in ("gfx942", "gfx950") or (many and chip != "gfx1201") else 32  # those two have warps of 64
    widths = (columns for columns in (8192, 4096, 2048, 1024) if cdiv(k, columns) * columns * 13 <= k * 14)
    columns = next(widths, (1024 if many else 512) if k > 1024 else max(128 if many else 32, 1 << (k - 1).bit_length()))
    elements = cdiv(k, columns) * columns
    if many and not is_held(elements, many):
        return Tile(rows=1, columns=2048, warps=8)
    warps = next(n for n in (1, 2, 4, 8, 16, 32) if n == most or elements <= (28 if many else 56) * 32 * n)
    return Tile(rows=1, columns=columns, warps=warps)


@functools.cache
def tuned_rows(kernel: str) -> tuple[TunedRow, ...]:
    """Return the rows of kernels/tuned/<kernel>.json, in their order."""
    rows = json.loads((TUNED / f"{kernel}.json").read_text(encoding="utf-8"))
    return tuple(
        TunedRow(
            row["format"],
            (Tile if "rows" in row["tile"] else MatmulTile)(**row["tile"]),
            tuple(row.get("chips", ())),
            row.get("max_m"),
            row.get("measured"),
            row.get("plain", False),
        )
        for row in rows
    )


def chip_of(device: torch.device) -> str:
    """Return the name of the chip behind a CUDA or ROCm device; it need not be one of CHIPS."""
    return _chip(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _chip(index: int) -> str:
    if torch.version.hip:
        name = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(index)
        name = f"sm_{major}{minor}"
    return SAME_AS.get(name, name)


def cdiv(size: int, tile: int) -> int:
    """Count the tiles that cover a size; triton.cdiv takes 2 us for it, which launches of few tokens notice."""
    return -(-size // tile)


LONGEST_HELD = 32768  # elements of a row that one program keeps in registers
TUNED = Path(__file__).parent / "tuned"
