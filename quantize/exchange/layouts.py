"""Byte permutations that dialects share. Each has an inverse, and none looks at what the bytes stand for.

    nibbles     two 4-bit codes to a byte, the even column low (ours) or high (ComfyUI): swap_nibbles is its own inverse
    padding     zeros behind the last row and column, up to multiples: pad, crop
    rows        of a scale and a shift, the one first or the other: in_order
    swizzle     block scales in the 128 x 4 tiles that tcgen05 and cuBLAS read: block_scales, unblock_scales

        offset(r, c) = ((r // 128) · ceil(G / 4) + c // 4) · 512 + (r % 32) · 16 + (r % 128 // 32) · 4 + c % 4

No file says which of these it was written with. That is why a dialect's name, and not a shape, chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxq.kernels.tensor import swizzle_scales, swizzled_size, unswizzle_scales
from fluxq.recipes.keymap_rows import Order

BLOCK = 128


def swap_nibbles(packed: Tensor) -> Tensor:
    """uint8 with the halves of each byte exchanged."""
    return (packed << 4) | (packed >> 4)


def pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix of any dtype with zero bytes behind, so that its sides are multiples of `rows` and `columns`."""
    n, k = matrix.shape
    if n % rows == 0 and k % columns == 0:
        return matrix
    padding = (0, -k % columns, 0, -n % rows)
    raw = as_bytes(matrix) if matrix.element_size() == 1 else matrix  # float8 has no padding of its own
    return F.pad(raw, padding).view(matrix.dtype)


def crop(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `pad`: the first rows and columns, in memory of their own."""
    return matrix[:rows, :columns].contiguous()


def block_scales(scale: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
    """Swizzled block scales of one byte each (rows, G); shape: by default that of the padded matrix, (128 x, 4 x)."""
    return swizzle_scales(scale.contiguous()).reshape(shape or padded_tiles(*scale.shape))


def unblock_scales(blocked: Tensor, rows: int, groups: int) -> Tensor:
    """Inverse of `block_scales`, whatever shape it was given; ValueError unless it has just these bytes."""
    if blocked.numel() != swizzled_size(rows, groups):
        raise ValueError(
            f"swizzled scales have {blocked.numel()} elements, ({rows}, {groups}) block scales in tiles of 128 x 4 "
            f"take {swizzled_size(rows, groups)}: the file is of another layer, or its scales are not swizzled"
        )
    return unswizzle_scales(blocked.reshape(-1), rows, groups)


class NeedsPackage(ValueError):
    """Codes that a package decodes which is not installed: this says nothing of the file."""


class LostScales(ValueError):
    """Scales of 0 over codes that are not: the weights would be gone. Writers have such scales over blocks of zeros."""


def require_kept(values: Tensor, scale: Tensor) -> None:
    """Raise LostScales where a scale is 0 and the value that it multiplies is not; shapes broadcast."""
    zero = scale == 0
    if zero.any() and (lost := zero & (values != 0)).any():
        count = int(lost.sum())
        raise LostScales(
            f"scales of 0 over codes that are not, in {count} of {lost.numel()} places; get the file again"
        )


def scaled(values: Tensor, scale: Tensor) -> Tensor:
    """Return the product, in fp32, of what codes stand for and their scales; LostScales as `require_kept`."""
    require_kept(values, scale)
    return values * scale


def padded(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded_tiles(rows: int, groups: int) -> tuple[int, int]:
    """The shape of block scales (rows, groups) in whole tiles of 128 by 4."""
    return padded(rows, 128), padded(groups, 4)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8; of a one-byte dtype only."""
    return tensor.view(torch.uint8)


def concatenated(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return `torch.cat` of tensors of one dtype, which torch has not for every float8."""
    raw = [as_bytes(part) if part.element_size() == 1 else part for part in parts]
    return torch.cat(raw, dim).view(parts[0].dtype)


def in_order(rows: Tensor, order: Order) -> Tensor:
    """Rows (N, …) of diffusers in the order of a file, or the other way round."""
    return rows if order == "as they are" else concatenated(rows.chunk(2)[::-1])
