"""Tensors and steps of the ops that quantize, from keywords: options are fields of either."""

from typing import Any

from torch import Tensor

from fluxq.kernels.adaln_quantize.op import NormTensors
from fluxq.kernels.quantize_activation.op import Rounding, RoundingTensors
from fluxq.kernels.tensor import pack_named


def steps(format: str, **options: Any) -> tuple[RoundingTensors, Rounding]:
    """Tensors and rounding, as the kernel of `quantize_activation` takes them."""
    return _split(RoundingTensors, format, options)


def packed(format: str, **options: Any) -> tuple[list[Tensor], str]:
    """The same as the op takes them."""
    tensors, rounding = steps(format, **options)
    return pack_named(tensors, rounding)


def norm_steps(format: str, **options: Any) -> tuple[NormTensors, Rounding]:
    """Tensors and rounding, as the kernel of `adaln_quantize` takes them."""
    return _split(NormTensors, format, options)


def norm_packed(format: str, **options: Any) -> tuple[list[Tensor], str]:
    """The same as the op takes them."""
    tensors, rounding = norm_steps(format, **options)
    return pack_named(tensors, rounding)


def _split(kind: Any, format: str, options: dict[str, Any]) -> tuple[Any, Rounding]:
    tensors = {name: value for name, value in options.items() if name in kind._fields}
    return kind(**tensors), Rounding(format, **{name: value for name, value in options.items() if name not in tensors})
