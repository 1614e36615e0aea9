"""QuantLinear: an nn.Linear whose weight is stored in a number format.

It is a subclass of nn.Linear because PEFT and diffusers look for that, and everything it holds is a
Parameter, never a buffer: accelerate's disk offload leaves buffers behind on the meta device.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fluxq.quantize import ops
from fluxq.quantize.tensor import QuantizedTensor, stored_shapes
from fluxq.recipes.formats import Scheme


class QuantLinear(nn.Linear):
    """A Linear (K in, N out) under a Scheme; forward takes and returns 16-bit or fp32 activations.

    Parameters, none of which needs a gradient: `weight` (codes), `weight_scale`, and as the scheme asks
    `weight_scale_2` and `input_scale` (both fp32 scalars); `bias` (N,) in the compute dtype.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: Scheme, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a full-size float weight
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        scheme.weights.check_shape(out_features, in_features, "QuantLinear")
        stored = dict(stored_shapes(scheme.weights, out_features, in_features))
        if scheme.static_input:
            stored["input_scale"] = ((), torch.float32)
        for name, (shape, stored_dtype) in stored.items():
            self.register_parameter(name, _frozen(torch.empty(shape, dtype=stored_dtype)))
        self.register_parameter("bias", _frozen(torch.empty(out_features, dtype=dtype)) if bias else None)

    @classmethod
    def from_quantized(
        cls, weight: QuantizedTensor, bias: Tensor | None, scheme: Scheme, input_scale: Tensor | None = None
    ) -> QuantLinear:
        """A layer around a quantized weight; `input_scale` is needed exactly when the scheme is static."""
        if (input_scale is not None) != scheme.static_input:
            raise ValueError(f"scheme {scheme} {'needs' if scheme.static_input else 'takes no'} input_scale")
        if weight.format != scheme.weights:
            raise ValueError(f"scheme {scheme} needs a weight in {scheme.weights.name}, got {weight.format.name}")
        n, k = weight.shape
        dtype = torch.bfloat16 if bias is None else bias.dtype
        with torch.device("meta"):
            layer = cls(k, n, bias is not None, scheme, dtype)
        tensors = {**weight.tensors(), "bias": bias, "input_scale": input_scale}
        for name, tensor in tensors.items():
            if tensor is not None:
                layer.register_parameter(name, _frozen(tensor))
        return layer

    @property
    def quantized_weight(self) -> QuantizedTensor:
        """The weight (N, K) as a QuantizedTensor that shares this layer's tensors."""
        shape = (self.out_features, self.in_features)
        global_scale = getattr(self, "weight_scale_2", None)
        scale = self.get_parameter("weight_scale").data
        return QuantizedTensor(self.weight.data, scale, global_scale, shape, self.scheme.weights)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """A plain Linear that holds the same weight, rounded to `dtype`."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=dtype)
        linear.weight = _frozen(self.quantized_weight.dequantize(dtype))
        linear.bias = self.bias
        return linear

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the parameters that must be kept exactly as stored, whatever dtype a model is cast to."""
        return tuple(name for name, _ in self.named_parameters() if name != "bias")

    def forward(self, input: Tensor) -> Tensor:
        return ops.quantized_linear(
            input,
            self.weight,
            self.weight_scale,
            getattr(self, "weight_scale_2", None),
            getattr(self, "input_scale", None),
            self.bias,
            str(self.scheme),
        )

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scheme={self.scheme}"


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
