"""Tensors that lie side by side in memory, so that several are one without a copy.

layers of a group    their stored tensors: one product computes all (M, K) · (ΣN, K)^T
tokens               of text and image, as a block leaves them that splits its output
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fluxq.kernels.linear import QuantLinear

STORED = ("weight", "weight_scale", "weight_scale_2", "weight_row_scale", "bias")
SCALE_LAID = "fluxq_scale_laid"  # of a layer: where its global scale lay, and how often it had been written
SWIZZLED_ROWS = 128  # that a tile of swizzled scales holds


def lay_side_by_side(layers: Sequence[QuantLinear]) -> bool:
    """Move the stored tensors of layers that read the same codes next to each other; tell whether one product fits all.

    It does not where weights have one scale each, other formats or other global scales. Global scales stay numbers of
    their own: they are equal until one is written, which `operands_of` sees.
    """
    if len(layers) < 2 or not _are_alike(layers):
        return False
    if operands_of(layers) is not None:
        return True
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be trained through
        _lay(layers)
    return True


def _lay(layers: Sequence[QuantLinear]) -> None:
    for name in STORED:
        parameters = [layer.get_parameter(name) for layer in layers if layer._parameters.get(name) is not None]
        if not parameters:
            continue
        if parameters[0].ndim == 0:
            for layer, parameter in zip(layers, parameters, strict=True):
                layer.__dict__[SCALE_LAID] = _written(parameter)
            continue
        kept = parameters[0].dtype
        whole = torch.cat([parameter.data.contiguous().view(torch.uint8) for parameter in parameters]).view(kept)
        for parameter, part in zip(parameters, whole.split([len(each) for each in parameters]), strict=True):
            parameter.data = part


def _are_alike(layers: Sequence[QuantLinear]) -> bool:
    first = layers[0]
    for name in STORED:
        tensors = [layer.stored(name) for layer in layers]
        kinds = {None if t is None else (t.dtype, t.device, t.ndim, t.shape[1:]) for t in tensors}
        if len(kinds) > 1:
            return False
        given = [t for t in tensors if t is not None]
        if any(t.is_inference() for t in given):
            return False
        if given and given[0].ndim == 0 and (name == "weight_scale" or not all(map(given[0].equal, given))):
            return False
    scale = first.stored("weight_scale")
    is_swizzled = bool(first.scheme.weights.group_size) and scale is not None and scale.ndim == 1
    unit = SWIZZLED_ROWS if is_swizzled else first.scheme.weights.block[0] or 1
    if any(layer.out_features % unit for layer in layers[:-1]):
        return False
    return all(layer.scheme == first.scheme for layer in layers)


def operands_of(layers: Sequence[QuantLinear]) -> dict[str, Tensor | None] | None:
    """Return the stored tensors of layers as those of one, by name; None where they do not lie side by side."""
    operands: dict[str, Tensor | None] = {}
    for name in STORED:
        parts = [layer.stored(name) for layer in layers]
        tensors = [part for part in parts if part is not None]
        if not tensors:
            operands[name] = None
        elif len(tensors) < len(parts):
            return None
        elif tensors[0].ndim == 0:
            if any(layer.__dict__.get(SCALE_LAID) != _written(layer.get_parameter(name)) for layer in layers):
                return None
            operands[name] = tensors[0]
        elif are_neighbours(tensors, 0):
            operands[name] = whole(tensors, 0)
        else:
            return None
    return operands


def _written(scale: Tensor) -> tuple[int, int]:
    return scale.data_ptr(), scale._version


def are_neighbours(parts: Sequence[Tensor], dim: int) -> bool:
    """Tell whether tensors follow one another along an axis of the same memory."""
    return not torch.compiler.is_compiling() and all(
        before.stride() == part.stride()
        and before.storage_offset() + before.shape[dim] * before.stride(dim) == part.storage_offset()
        and before.untyped_storage()._cdata == part.untyped_storage()._cdata
        for before, part in itertools.pairwise(parts)
    )


def whole(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return neighbours as one tensor, of their memory."""
    sizes = [*parts[0].shape]
    sizes[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].as_strided(sizes, parts[0].stride())
