"""One layer between its native tensors and those of a dialect: what both sides speak of, and what every dialect checks.

    encode(QuantTensors) -> Encoded                         codes are moved, never rounded again
    decode(tensors, shape, entry) -> QuantTensors | Plain   Plain: no format of ours holds these codes

`tensors` go by what follows the layer's name in a file ("weight", "weight_scale", …), `entry` is what the file says of
the layer elsewhere: in its header, in config.json, in a tensor of JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.kernels.linear import LOW_RANK, QuantLinear
from fluxq.kernels.tensor import stored_shapes
from fluxq.quantize.exchange.layouts import as_bytes, concatenated, require_kept
from fluxq.recipes.formats import Format, Scheme, find_format

Names = tuple[str, ...]


@dataclass(frozen=True)
class QuantTensors:
    """A quantized layer as a native checkpoint stores it.

    tensors: by the names that checkpoints use, the bias included; `weight_scale_2` is () or, in a fused layer whose
    parts have their own, (N, 1). shape: of the weight, (N, K). beside: what a file held that no scheme of ours stores,
    such as the `input_scale` () of fp8 with one scale per tensor; `encode` puts it back.
    """

    tensors: Mapping[str, Tensor]
    shape: tuple[int, int]
    scheme: Scheme
    beside: Mapping[str, Tensor] = field(default_factory=dict)

    def linear(self) -> QuantLinear:
        """The layer that computes with these tensors."""
        return QuantLinear.from_tensors(self.tensors, self.shape, self.scheme)

    @property
    def dtype(self) -> torch.dtype:
        """That of what is in 16 bit: of the bias, else of the low-rank pair; bf16 where there is neither."""
        held = (self.tensors[name].dtype for name in ("bias", "svdquant_lora_b") if name in self.tensors)
        return next(held, torch.bfloat16)

    def collapsed(self) -> tuple[Tensor, Tensor | None]:
        """Weight (N, K) in fp32, and bias (N,): what the layer computes but for the rounding of x."""
        return self.linear().collapsed()

    def reordered(self, rows: Tensor) -> QuantTensors:
        """The same layer with these rows (N,), in this order."""
        tensors = dict(self.tensors)
        for name in tensors.keys() & BY_ROWS:
            tensor = tensors[name]
            if tensor.ndim:
                bits = as_bytes(tensor) if tensor.element_size() == 1 else tensor
                tensors[name] = bits[rows].view(tensor.dtype)
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class Plain:
    """A weight (N, K) in fp32, exactly what the codes of a format that is not ours stand for, and its bias (N,)."""

    weight: Tensor
    bias: Tensor | None
    why: str

    def collapsed(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, as `QuantTensors` has them."""
        return self.weight, self.bias

    def reordered(self, rows: Tensor) -> Plain:
        """The same layer with these rows (N,), in this order."""
        return replace(self, weight=self.weight[rows], bias=None if self.bias is None else self.bias[rows])


Decoded = QuantTensors | Plain
Read = tuple[str, dict[str, Tensor]] | Plain  # our format and native tensors, or what no format of ours holds


@dataclass(frozen=True)
class Encoded:
    """A layer in a dialect. notes: what a reader will compute otherwise than the scheme asks for, or could not hold
    exactly; empty if nothing.
    """

    tensors: dict[str, Tensor]
    entry: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A format of a dialect, and the schemes that it holds.

    name: as the dialect spells it. weights, activations: of ours; activations is what its reader computes in, and what
    `decode` says. also: other activations that `encode` takes, with a note. input_scale: the calibrated global scale.
    smooth, low_rank: whether the reader applies them. multiples: of N and K. needs: tensors that no scheme of ours
    stores. read_by: programs that read just this format.
    factors_stay: its layers all have factors, by which the reader divides x, so that none are folded without need.
    unread: why `export` writes no file of it, although decoders have it and files of others are imported; else empty.
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
    unread: str = ""

    def scheme(self, **features: Any) -> Scheme:
        """Return the scheme of the format, with these features and no others."""
        activations = find_format(self.activations) if self.activations else None
        return Scheme(find_format(self.weights), activations, **features)


def row_for(layer: QuantTensors, rows: Sequence[Row], dialect: str) -> tuple[Row, tuple[str, ...]]:
    """The first row that holds a layer, and notes; ValueError that says why the nearest one does not."""
    scheme = layer.scheme
    same = [row for row in rows if row.weights == scheme.weights.name]
    if not same:
        held = dict.fromkeys(row.weights for row in rows)
        own, near = scheme.weights, [name for name in held if find_format(name).element == scheme.weights.element]
        theirs = "".join(f", its {name} {_scales(find_format(name))}" for name in near)
        why = f"; {own.name} has {_scales(own)}{theirs}" if near else ""
        raise ValueError(f"{dialect} has no format for {own.name} weights; it holds {', '.join(held)}{why}")
    activations = scheme.activations.name if scheme.activations else None
    exact = [row for row in same if row.activations == activations]
    near = [row for row in same if activations in row.also]
    if not exact and not near:
        ways = " or ".join(dict.fromkeys(_words(row.activations) for row in same))
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
    activations = scheme.activations.name if scheme.activations else None
    notes = []
    if row.activations != activations:
        notes.append(f"x is computed in {_words(row.activations)} there, the scheme {scheme} has {_words(activations)}")
    if scheme.static_input and row.input_scale == "none":
        notes.append(f"x takes its scale at run time there, the calibrated one of the scheme {scheme} is left out")
    return tuple(notes)


def _misfit(layer: QuantTensors, row: Row) -> str:
    scheme = layer.scheme
    for has, words in (
        (scheme.center, "subtracts a mean from x"),
        (scheme.deflate, "takes directions out of x"),
        (scheme.hadamard, "rotates x"),
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
    return ""


def _words(activations: str | None) -> str:
    return activations or "16-bit"


def _scales(weights: Format) -> str:
    rows, columns = weights.block
    return "one scale" if not rows else f"a scale for each {columns} of a row" if columns else "a scale for each row"


def named_row(rows: Sequence[Row], name: Any, dialect: str, activations: str | None = "") -> Row:
    """The row that a file names; activations: to choose among rows of one name. ValueError if there is none."""
    for row in rows:
        if row.name == name and activations in ("", row.activations):
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
    row: Row, shape: tuple[int, int], tensors: Mapping[str, Tensor], beside: Mapping[str, Tensor] = {}
) -> QuantTensors:
    """A decoded layer: its scheme follows from the row and the tensors, whose shapes and dtypes are checked.

    Scales of 0 become 1, as a native checkpoint has them over codes of 0; LostScales over others. An E8M0 byte of 0 is
    2^-127, and 0 in ComfyUI.
    """
    rank = tensors["svdquant_lora_a"].shape[0] if "svdquant_lora_a" in tensors else 0
    scheme = row.scheme(static_input="input_scale" in tensors, smooth="pre_quant_scale" in tensors, rank=rank)
    scheme.weights.check_shape(*shape, f"a {row.name} layer")
    for name, (size, dtype) in stored_shapes(scheme.weights, *shape).items():
        held = tensors[name]
        per_row = name == "weight_scale_2" and tuple(held.shape) == (shape[0], 1)
        if held.dtype != dtype or not (tuple(held.shape) == size or per_row):
            raise ValueError(f"{row.name}: {name} is {held.dtype} {(*held.shape,)}, expected {dtype} {size}")
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
        rows = zero.reshape(-1, scale.shape[1] if scale.ndim == 2 else 1).expand(shape[0], -1)
        under = rows.repeat_interleave(codes.shape[1] // rows.shape[1], dim=1)  # (N, bytes)
        require_kept(as_bytes(codes) & ~torch.tensor(signs, dtype=torch.uint8), ~under)
        codes = codes if is_e8m0 else as_bytes(codes).masked_fill(under, 0).view(codes.dtype)  # not -0
        scale = torch.where(zero, 127.0 if is_e8m0 else 1.0, scale.float()).to(scale.dtype)
        tensors = {**tensors, "weight": codes, "weight_scale": scale}
    return QuantTensors(dict(tensors), shape, scheme, dict(beside))


def join(layers: Sequence[QuantTensors]) -> QuantTensors:
    """Layers that read the same x as one, their rows behind one another, as fused files hold q, k and v.

    Global scales that differ become (N, 1). Low-rank pairs that read x by other A stand side by side, each B in its own
    rows, which is exact and adds up the ranks. What else belongs to x must be the same. ValueError that names what is
    not.
    """
    first = layers[0]
    for layer in layers[1:]:
        if (replace(layer.scheme, rank=0), layer.shape[1]) != (replace(first.scheme, rank=0), first.shape[1]):
            raise ValueError(f"cannot join {layer.scheme} K={layer.shape[1]} to {first.scheme} K={first.shape[1]}")
    if len({"bias" in layer.tensors for layer in layers}) > 1:
        raise ValueError("cannot join layers with a bias to layers without one")
    joined: dict[str, Tensor] = {}
    for name in first.tensors.keys() - set(LOW_RANK):
        parts = [layer.tensors[name] for layer in layers]
        if name == "weight_scale_2" and not _all_equal(parts):
            rows = [part.expand(layer.shape[0], 1) for part, layer in zip(parts, layers, strict=True)]
            joined[name] = torch.cat(rows)
        elif name in BY_ROWS and parts[0].ndim:
            joined[name] = concatenated(parts)
        elif _all_equal(parts):
            joined[name] = parts[0]
        else:
            raise ValueError(f"cannot join layers whose {name} differ; quantize them as one group")
    if not all(_all_equal([layer.beside.get(name) for layer in layers]) for layer in layers for name in layer.beside):
        raise ValueError("cannot join layers whose input_scale differ; quantize them as one group")
    pairs = [layer for layer in layers if layer.scheme.rank]
    if pairs:
        a = [layer.tensors["svdquant_lora_a"] for layer in pairs]
        b = [
            layer.tensors.get("svdquant_lora_b", torch.zeros(layer.shape[0], 0, dtype=torch.float32)).to(a[0])
            for layer in layers
        ]
        shared = len(pairs) == len(layers) and _all_equal(a)
        joined["svdquant_lora_a"] = a[0] if shared else torch.cat(a)
        joined["svdquant_lora_b"] = torch.cat(b) if shared else torch.block_diag(*b)
    rank = joined["svdquant_lora_a"].shape[0] if pairs else 0
    shape = sum(layer.shape[0] for layer in layers), first.shape[1]
    return QuantTensors(joined, shape, replace(first.scheme, rank=rank), first.beside)


def split(layer: QuantTensors, sizes: Sequence[int]) -> list[QuantTensors]:
    """Inverse of `join`: parts of so many rows, without the directions of the low-rank pair that a part leaves idle."""
    if sum(sizes) != layer.shape[0]:
        raise ValueError(f"cannot split {layer.shape[0]} rows into {'+'.join(map(str, sizes))}")
    parts, at = [], 0
    for size in sizes:
        rows = slice(at, at + size)
        tensors = {
            name: tensor[rows].contiguous() if tensor.ndim and name in BY_ROWS else tensor
            for name, tensor in layer.tensors.items()
        }
        if "weight_scale_2" in tensors and tensors["weight_scale_2"].ndim:
            distinct = tensors["weight_scale_2"].unique()
            if len(distinct) != 1:
                raise ValueError(
                    "weight_scale_2 has several values, where one layer has one; split the fused layer first"
                )
            tensors["weight_scale_2"] = distinct[0].clone()
        scheme, tensors = without_idle_ranks(layer.scheme, tensors)
        parts.append(replace(layer, tensors=tensors, shape=(size, layer.shape[1]), scheme=scheme))
        at += size
    return parts


def without_idle_ranks(scheme: Scheme, tensors: dict[str, Tensor]) -> tuple[Scheme, dict[str, Tensor]]:
    """The same without directions of the low-rank pair that add nothing: columns of B, or rows of A, of zeros."""
    if not scheme.rank:
        return scheme, tensors
    a, b = (tensors[name] for name in LOW_RANK)
    used = (a != 0).any(dim=1) & (b != 0).any(dim=0)
    rest = {name: tensor for name, tensor in tensors.items() if name not in LOW_RANK}
    if used.any():
        rest |= {LOW_RANK[0]: a[used].contiguous(), LOW_RANK[1]: b[:, used].contiguous()}
    return replace(scheme, rank=int(used.sum())), rest


def _all_equal(tensors: Sequence[Tensor | None]) -> bool:
    first = tensors[0]
    return all(
        t is not None and first is not None and t.shape == first.shape and torch.equal(t, first) for t in tensors
    )


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BY_ROWS = {"weight", "weight_scale", "weight_scale_2", "bias", "svdquant_lora_b", "deflate_out"}
