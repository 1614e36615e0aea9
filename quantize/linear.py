"""QuantLinear: an nn.Linear whose weight is stored in a number format.

It is a subclass of nn.Linear because PEFT and diffusers look for that, and everything it holds is a
Parameter, never a buffer: accelerate's disk offload leaves buffers behind on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fluxq.quantize import ops
from fluxq.quantize.encode import SCALE_DTYPES
from fluxq.quantize.tensor import QuantizedTensor, stored_shapes, unswizzle_scales
from fluxq.recipes.formats import Scheme

if TYPE_CHECKING:
    from fluxq.quantize.prepare import Origin


@dataclass(frozen=True)
class Prepared:
    """What quantize/prepare.py did to a layer for one GPU, and the layer's scheme as stored.

    added_error: of a weight that was encoded anew, relative to the stored one, ||w' - w|| / ||w||. origin, digest:
    where the stored tensors are and the SHA-256 of the codes, for a layer that no longer holds them.
    """

    scheme: Scheme
    how: str
    added_error: float = 0.0
    origin: Origin | None = None
    digest: str = ""


class QuantLinear(nn.Linear):
    """A Linear (K in, N out) under a Scheme; forward takes and returns 16-bit or fp32 activations.

    Parameters, none of which needs a gradient: `weight` (codes), `weight_scale`, and as the scheme asks
    `weight_scale_2` and `input_scale` (both fp32 scalars). In the compute dtype: `bias` (N,), and where the scheme
    has a rank R the low-rank branch `svdquant_lora_a` (R, K) and `svdquant_lora_b` (N, R), which adds B A to W.
    `prepared` says what was changed for one GPU; `scheme` always says what the layer is now.
    """

    prepared: Prepared | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: Scheme, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate a full-size float weight
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.compute_dtype = dtype  # PEFT gives adapters this dtype, not that of the codes
        scheme.weights.check_shape(out_features, in_features, "QuantLinear")
        stored = dict(stored_shapes(scheme.weights, out_features, in_features))
        if scheme.static_input:
            stored["input_scale"] = ((), torch.float32)
        self.scale_names = tuple(name for name in SCALE_NAMES if name in stored)
        for name, (shape, stored_dtype) in stored.items():
            self.register_parameter(name, _frozen(torch.empty(shape, dtype=stored_dtype)))
        if scheme.rank:
            self.svdquant_lora_a = _frozen(torch.empty(scheme.rank, in_features, dtype=dtype))
            self.svdquant_lora_b = _frozen(torch.empty(out_features, scheme.rank, dtype=dtype))
        self.register_parameter("bias", _frozen(torch.empty(out_features, dtype=dtype)) if bias else None)

    @classmethod
    def from_quantized(
        cls, weight: QuantizedTensor, bias: Tensor | None, scheme: Scheme, input_scale: Tensor | None = None
    ) -> QuantLinear:
        """A layer around a quantized weight; `input_scale` is needed exactly when the scheme is static.

        The scheme has no rank: `append_low_rank` adds a branch.
        """
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

    def stored(self, name: str) -> Tensor | None:
        """A stored tensor in its own dtype, None if the scheme has none of that name.

        What a loader must not cast travels, and codes of text encoders stay, as integers of the same bits.
        """
        tensor = getattr(self, name, None)
        if tensor is None or name not in self.stored_names:
            return tensor
        return tensor.view(stored_dtype(self.scheme, name))

    @property
    def stored_scheme(self) -> Scheme:
        """The scheme under which a checkpoint stores this layer: what it is now, adapters fused into it included."""
        if self.prepared is None:
            return self.scheme
        merged = self.prepared.scheme.weights != self.scheme.weights  # its low-rank branch went into the new codes
        return self.prepared.scheme if merged else replace(self.prepared.scheme, rank=self.scheme.rank)

    @property
    def quantized_weight(self) -> QuantizedTensor:
        """The weight (N, K) as a QuantizedTensor that shares this layer's tensors."""
        shape = (self.out_features, self.in_features)
        codes, scale = self.weight.data, self.get_parameter("weight_scale").data
        codes = codes.view(stored_dtype(self.scheme, "weight"))
        scale = scale.view(stored_dtype(self.scheme, "weight_scale"))
        if scale.ndim == 1 and self.scheme.weights.group_size:
            scale = unswizzle_scales(scale, self.out_features, self.in_features // self.scheme.weights.group_size)
        return QuantizedTensor(codes, scale, self.stored("weight_scale_2"), shape, self.scheme.weights)

    @property
    def low_rank(self) -> tuple[Tensor, Tensor] | None:
        """The low-rank branch (A (R, K), B (N, R)), None if there is none."""
        return (self.svdquant_lora_a.data, self.svdquant_lora_b.data) if self.scheme.rank else None

    def append_low_rank(self, a: Tensor, b: Tensor) -> None:
        """Add b a to what the layer computes, exactly: a (r, K) and b (N, r) become the branch's last r ranks."""
        self._require_present()
        r, k = a.shape
        if k != self.in_features or tuple(b.shape) != (self.out_features, r):
            raise ValueError(
                f"low-rank pair {(*a.shape,)}, {(*b.shape,)} does not fit a layer of {self.in_features} inputs and "
                f"{self.out_features} outputs: expected (r, K) and (N, r)"
            )
        held_a, held_b = self.low_rank or (a[:0], b[:, :0])
        with torch.no_grad():
            self._set_low_rank(torch.cat([held_a, a.to(held_a)]), torch.cat([held_b, b.to(held_b)], dim=1))

    def drop_low_rank(self, r: int) -> None:
        """Take away the last r ranks of the branch; what was there before them keeps its bits."""
        if not 0 <= r <= self.scheme.rank:
            raise ValueError(f"cannot drop {r} ranks: the low-rank branch has {self.scheme.rank}")
        self._require_present()
        if r and self.low_rank is not None:
            a, b = self.low_rank
            self._set_low_rank(a[:-r].clone(), b[:, :-r].clone())

    def _require_present(self) -> None:
        if self.weight.is_meta:
            raise ValueError("this layer is offloaded, and a changed one would not come back: fuse before offloading")

    def _set_low_rank(self, a: Tensor, b: Tensor) -> None:
        self.scheme = replace(self.scheme, rank=a.shape[0])
        for name, tensor in (("svdquant_lora_a", a), ("svdquant_lora_b", b)):
            if self.scheme.rank:
                self.register_parameter(name, _frozen(tensor.to(self.compute_dtype)))
            else:
                delattr(self, name)

    def dequantized(self, dtype: torch.dtype) -> nn.Linear:
        """A plain Linear that holds the same weight, low-rank branch included, rounded to `dtype`."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=dtype)
        weight = self.quantized_weight.dequantize()
        if self.low_rank is not None:
            a, b = self.low_rank
            weight += b.float() @ a.float()
        linear.weight = _frozen(weight.to(dtype))
        linear.bias = self.bias
        return linear

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the parameters that must be kept exactly as stored, whatever dtype a model is cast to."""
        return ("weight", *self.scale_names)

    @property
    def operands(self) -> tuple:
        """What `fluxq::quantized_linear` takes beside x, in its order."""
        return (
            self.stored("weight"),
            self.stored("weight_scale"),
            self.stored("weight_scale_2"),
            self.stored("input_scale") if self.scheme.static_input else None,
            self.bias,
            *(self.low_rank or (None, None)),
            str(self.scheme),
            self.stored("weight_row_scale"),
        )

    def forward(self, input: Tensor) -> Tensor:
        return ops.quantized_linear(input, *self.operands)

    def _apply(self, fn, recurse: bool = True):
        """Moves between devices pass; a cast would turn codes and scales into other numbers and is refused.

        A cast to the dtype that the layer computes in is none: libraries ask for it along with a move.
        """
        stored: dict[int, torch.device] = {}  # id of what must only be moved -> where to
        for name in self.stored_names:
            held = getattr(self, name)
            probe = fn(torch.empty(0, dtype=held.dtype, device=held.device))
            if probe.dtype == self.compute_dtype != held.dtype:
                stored[id(held)] = probe.device
            elif probe.dtype != held.dtype:
                raise ValueError(
                    f"a layer quantized as {self.scheme} cannot be cast to {probe.dtype}: its {name} is stored as it "
                    "must be read. Load the checkpoint with another dtype, and leave out layerwise casting"
                )
        return super()._apply(lambda t: t.to(stored[id(t)]) if id(t) in stored else fn(t), recurse)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, scheme={self.scheme}"


def stored_dtype(scheme: Scheme, name: str) -> torch.dtype:
    """The dtype in which the codes (`weight`) or the scale called `name` are stored."""
    if name == "weight":
        return getattr(torch, scheme.weights.element.storage)
    return SCALE_DTYPES[scheme.weights.scale] if name == "weight_scale" else torch.float32


SCALE_NAMES = ("weight_scale", "weight_scale_2", "input_scale")


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
