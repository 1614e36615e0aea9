"""Tensors and steps of the ops that quantize, from keywords."""

from typing import Any

from torch import Tensor

from fluxq.kernels.norms import NormTensors
from fluxq.kernels.producers import Rounding, RoundingTensors


def steps(format: str, **options: Any) -> tuple[RoundingTensors, Rounding]:
    """Tensors and rounding, as the kernel takes them; options are fields of either."""
    tensors = {name: value for name, value in options.items() if name in RoundingTensors._fields}
    return RoundingTensors(**tensors), Rounding(
        format, **{name: value for name, value in options.items() if name not in tensors}
    )


def packed(format: str, **options: Any) -> tuple[list[Tensor], str]:
    """The same as the op takes them."""
    tensors, rounding = steps(format, **options)
    return tensors.packed(rounding)


def norm_steps(format: str, **options: Any) -> tuple[NormTensors, Rounding]:
    """Tensors and rounding of `adaln_quantize`, as the kernel takes them."""
    tensors = {name: value for name, value in options.items() if name in NormTensors._fields}
    return NormTensors(**tensors), Rounding(
        format, **{name: value for name, value in options.items() if name not in tensors}
    )


def norm_packed(format: str, **options: Any) -> tuple[list[Tensor], str]:
    """The same as the op takes them."""
    tensors, rounding = norm_steps(format, **options)
    return tensors.packed(rounding)
