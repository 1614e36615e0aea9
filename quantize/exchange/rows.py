"""Formats of a dialect: which of them holds a layer of ours, and what a layer in a file must be to be one of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.kernels.encode import spread
from fluxq.kernels.tensor import stored_shapes
from fluxq.quantize.exchange.layer import Names, QuantTensors, rank_of
from fluxq.quantize.exchange.layouts import as_bytes, require_kept
from fluxq.recipes.formats import Format, Scheme, find_format

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDE = "16-bit"  # activations that are not rounded


@dataclass(frozen=True)
class Row:
    """A format of a dialect, and the schemes that it holds.

    name: as the dialect spells it. weights, activations: of ours; activations is what its reader computes in, and what
    `decode` says. also: other activations that `encode` takes, with a note. input_scale: the calibrated global scale.
    smooth, low_rank: whether the reader applies them. multiples: of N and K. needs: tensors that no scheme of ours
    stores. read_by: programs that read just this format. row_scales: each row may have a global scale of its own.
    factors_stay: its layers all have factors, by which the reader divides x, so that none are folded without need.
    regular: its reader rotates x by the regular Hadamard matrix where a layer says so.
    unread: why `export` writes no file of it, although decoders have it and files of others are imported; else empty.
    beside: the format of main layers beside which `export` writes it all the same, since what reads these reads it.
    only_moved: `--requantize` rounds no layer into it, since few programs read it.
    """

    name: str
    weights: str
    activations: str | None
    also: tuple[str | None, ...] = ()
    input_scale: Literal["none", "optional", "required"] = "none"
    smooth: bool = False
    low_rank: bool = False
    multiples: tuple[int, int] = (1, 1)
    needs: Names = ()
    read_by: str = ""
    factors_stay: bool = False
    row_scales: bool = False
    regular: bool = False
    unread: str = ""
    beside: str = ""
    only_moved: bool = False

    def scheme(self, **features: Any) -> Scheme:
        """Return the scheme of the format, with these features and no others."""
        activations = find_format(self.activations) if self.activations else None
        return Scheme(find_format(self.weights), activations, **features)


def row_for(layer: QuantTensors, rows: Sequence[Row], dialect: str) -> tuple[Row, tuple[str, ...]]:
    """The first row that holds a layer, and notes; ValueError that says why the nearest one does not."""
    scheme = layer.scheme
    same = [row for row in rows if row.weights == scheme.weights.name]
    if not same:
        names = dict.fromkeys(row.weights for row in rows)
        weights, near = scheme.weights, [name for name in names if find_format(name).element == scheme.weights.element]
        theirs = "".join(f", its {name} {_scales(find_format(name))}" for name in near)
        why = f"; {weights.name} has {_scales(weights)}{theirs}" if near else ""
        raise ValueError(f"{dialect} has no format for {weights.name} weights; it holds {', '.join(names)}{why}")
    activations = scheme.formats[1]
    exact = [row for row in same if row.activations == activations]
    near = [row for row in same if activations in row.also]
    if not exact and not near:
        ways = " or ".join(dict.fromkeys(row.activations or _WIDE for row in same))
        raise ValueError(f"{dialect} computes {scheme.weights.name} weights with {ways} activations, not as {scheme}")
    why = ""
    for row in exact + near:
        problem = _misfit(layer, row)
        if not problem:
            return row, _otherwise(scheme, row)
        why = why or problem
    raise ValueError(f"{dialect}: {why}")


def _otherwise(scheme: Scheme, row: Row) -> tuple[str, ...]:
    """List what a reader of the row computes otherwise than a scheme that it holds."""
    notes, x_format = [], scheme.formats[1]
    if row.activations != x_format:
        notes.append(f"x is computed in {row.activations or _WIDE} there, the scheme {scheme} has {x_format or _WIDE}")
    if scheme.static_input and row.input_scale == "none":
        notes.append(f"x takes its scale at run time there, the calibrated one of the scheme {scheme} is left out")
    return tuple(notes)


def _misfit(layer: QuantTensors, row: Row) -> str:
    scheme = layer.scheme
    matrix = "the regular" if scheme.regular else "Sylvester's"
    for has, words in (
        (scheme.center, "subtracts a mean from x"),
        (scheme.deflate, "takes directions out of x"),
        (scheme.hadamard and not (row.regular and scheme.regular), f"rotates x by {matrix} Hadamard matrix"),
        (scheme.four_over_six, "chooses between two scales for each block of x"),
        (scheme.smooth and not row.smooth, "multiplies x by factors"),
        (scheme.rank and not row.low_rank, "has a low-rank branch"),
    ):
        if has:
            return f"the scheme {scheme} {words} at run time, which no reader of {row.name} does"
    if row.input_scale == "required" and not scheme.static_input:
        return f"{row.name} needs a calibrated input_scale, which the scheme {scheme} lacks; quantize with calibration"
    for name in row.needs:
        if name not in layer.beside:
            return f"{row.name} needs {name}, which the scheme {scheme} does not store: one calibrated scale of x"
    for letter, size, unit in zip("NK", layer.shape, row.multiples, strict=True):
        if size % unit:
            return f"{row.name} needs {letter} in multiples of {unit}, this layer has {letter} = {size}"
    if "weight_scale_2" in layer.tensors and layer.tensors["weight_scale_2"].ndim and not row.row_scales:
        return f"{row.name} has one global scale, and parts of this layer have their own; split the fused layer first"
    return ""


def _scales(weights: Format) -> str:
    rows, columns = weights.block
    if weights.spans_rows:
        return f"a scale for each block of {rows} by {columns}"
    return "one scale" if not rows else f"a scale for each {columns} of a row" if columns else "a scale for each row"


def named_row(rows: Sequence[Row], name: Any, dialect: str) -> Row:
    """The first row of the name that a file gives; ValueError if there is none."""
    for row in rows:
        if row.name == name:
            return row
    known = ", ".join(dict.fromkeys(row.name for row in rows))
    raise ValueError(f"{dialect}: format {name!r} is none that is read here; known are {known}")


class Tensors:
    """The tensors of one layer in a file: each is taken once and must be as expected, and none may be left over."""

    def __init__(self, tensors: Mapping[str, Tensor], dialect: str) -> None:
        self._left, self._dialect = dict(tensors), dialect

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtypes: torch.dtype | Iterable[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """A tensor that must be there, in one of the dtypes and shapes; without shapes, any."""
        if name not in self._left:
            raise ValueError(f"{self._dialect}: the layer has no {name}; it is not of this dialect, or not whole")
        tensor = self._left.pop(name)
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if tensor.dtype not in allowed or (shapes and tuple(tensor.shape) not in shapes):
            expected = f"{' or '.join(map(str, allowed))} {' or '.join(map(str, shapes))}".rstrip()
            raise ValueError(f"{self._dialect}: {name} is {tensor.dtype} {(*tensor.shape,)}, expected {expected}")
        return tensor

    def scale(self, name: str, dtypes: torch.dtype | Iterable[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """`take` of scales: all finite and none below 0."""
        return positive(self.take(name, dtypes, *shapes), f"{self._dialect}: {name}")

    def bias(self, n: int) -> dict[str, Tensor]:
        """{"bias": (n,)}, or nothing."""
        if "bias" not in self:
            return {}
        bias = self.take("bias", (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2), (n,))
        return {"bias": bias if bias.element_size() > 1 else bias.bfloat16()}  # where all was cast to fp8

    def finish(self) -> None:
        """ValueError for what no part of the dialect reads."""
        if self._left:
            raise ValueError(f"{self._dialect}: nothing reads {', '.join(sorted(self._left))} of this layer")


def not_finite(tensor: Tensor) -> int:
    """Count the numbers of a tensor that are NaN or infinite; 0 for integers."""
    if tensor.dtype == torch.float8_e4m3fn:
        return int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
    if not tensor.is_floating_point():
        return 0
    tensor = tensor.float() if tensor.element_size() == 1 else tensor
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def positive(scale: Tensor, name: str) -> Tensor:
    """The same scales; ValueError for NaN, infinite and negative ones. Zeros are for the caller."""
    values = scale.float()
    if not (torch.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name} holds NaN, infinite or negative scales; get the file again")
    return scale


def native(
    row: Row, shape: tuple[int, int], tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor] = {}, regular: int = 0
) -> QuantTensors:
    """A decoded layer: its scheme follows from the row and the tensors, whose shapes and dtypes are checked.

    regular: size of the blocks that the regular Hadamard matrix rotates, 0 for none.
    An input_scale that no reader of the row takes goes `beside`. Scales of 0 become 1, as a native checkpoint has them
    over codes of 0; LostScales over others. An E8M0 byte of 0 is 2^-127, and 0 in ComfyUI.
    """
    if row.input_scale == "none" and "input_scale" in tensors:
        beside = {**beside, "input_scale": tensors["input_scale"]}
        tensors = {name: tensor for name, tensor in tensors.items() if name != "input_scale"}
    scheme = row.scheme(static_input="input_scale" in tensors, smooth="pre_quant_scale" in tensors)
    scheme = replace(scheme, rank=rank_of(tensors), hadamard=regular, regular=regular > 0)
    scheme.weights.check_shape(*shape, f"a {row.name} layer")
    for name, (size, dtype) in stored_shapes(scheme.weights, *shape).items():
        tensor = tensors[name]
        per_row = name == "weight_scale_2" and tuple(tensor.shape) == (shape[0], 1)
        if tensor.dtype != dtype or not (tuple(tensor.shape) == size or per_row):
            raise ValueError(f"{row.name}: {name} is {tensor.dtype} {(*tensor.shape,)}, expected {dtype} {size}")
    for name in ("weight_scale_2", "input_scale", "pre_quant_scale"):
        if name in tensors and not (torch.isfinite(tensors[name]) & (tensors[name] > 0)).all():
            raise ValueError(f"{row.name}: {name} is 0 or infinite, which no writer means; get the file again")
    codes, scale = tensors["weight"], tensors["weight_scale"]
    zero, is_e8m0 = scale.float() == 0, scale.dtype == torch.uint8
    if is_e8m0 and (scale == 255).any():
        raise ValueError("weight_scale holds NaN (E8M0 byte 255); get the file again")
    if zero.any():
        element = scheme.weights.element
        signs = 0 if element.is_integer else 0x88 if element.bits == 4 else 0x80  # bits that a code of 0 may have
        if scheme.weights.spans_rows:
            under = spread(zero, scheme.weights, *shape)
        else:
            rows = zero.reshape(-1, scale.shape[1] if scale.ndim == 2 else 1).expand(shape[0], -1)
            under = rows.repeat_interleave(codes.shape[1] // rows.shape[1], dim=1)  # (N, bytes)
        require_kept(as_bytes(codes) & ~torch.tensor(signs, dtype=torch.uint8), ~under)
        codes = codes if is_e8m0 else as_bytes(codes).masked_fill(under, 0).view(codes.dtype)  # not -0
        scale = torch.where(zero, 127.0 if is_e8m0 else 1.0, scale.float()).to(scale.dtype)
        tensors = {**tensors, "weight": codes, "weight_scale": scale}
    return QuantTensors(dict(tensors), shape, scheme, dict(beside))
