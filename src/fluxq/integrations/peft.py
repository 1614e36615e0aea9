"""LoRA on quantized layers: PEFT adapters that fuse exactly.

PEFT fuses an adapter by adding B A to the weight, which codes cannot take. Here the pair becomes the last ranks of the
layer's 16-bit low-rank branch: outputs stay those of the unfused adapter, and unfusing gives back the bytes. Neither
library lets others register a layer type, so `register_*` wrap the functions that choose one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from peft.tuners.lora import dora
from peft.tuners.lora import layer as lora
from peft.tuners.lora.model import LoraModel
from peft.tuners.lora.variants import DoraConv2dVariant, DoraLinearVariant
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from fluxq.kernels.linear import PIXELS, QuantLinear, QuantPointwise


class IntoBranch(lora.LoraLayer):
    """An adapter that is merged into the low-rank branch of a quantized layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.merged_ranks: list[int] = []  # of merged_adapters; a hot swap may change an adapter's own

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        variant = self.resolve_lora_variant(config=config)
        if variant is not None and not isinstance(variant, DoraLinearVariant | DoraConv2dVariant):
            raise ValueError(
                f"adapter {adapter_name!r} is a {type(variant).__name__}, which needs the 16-bit weight, and this "
                f"layer holds {self._layer.scheme} codes: fuse it into the 16-bit model and quantize that"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Move adapters into the layer's low-rank branch: A and B · scaling, rounded to the layer's dtype.

        Nothing is rounded, and no output changes, where the adapter has that dtype and its scaling is a power of two.
        """
        for name in self.mergeable(adapter_names):
            down: Any = self.lora_A[name]
            up: Any = self.lora_B[name]
            a, b = down.weight.flatten(1), up.weight.flatten(1) * self.scaling[name]
            if safe_merge and not (a.isfinite().all() and b.isfinite().all()):
                raise ValueError(f"adapter {name!r} holds NaN or infinity; get its file again")
            self._layer.append_low_rank(a.detach(), b.detach())
            self.merged_adapters.append(name)
            self.merged_ranks.append(a.shape[0])

    def mergeable(self, adapter_names: list[str] | None = None) -> list[str]:
        """List the adapters of this layer that `merge` would move; ValueError, before any is moved, for a bad one."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A.keys()]
        if names:
            self._layer.require_present()
        for name in names:
            if name in self.lora_variant:
                raise ValueError(
                    f"adapter {name!r} is a DoRA, which scales the rows of the weight, and codes cannot take that: "
                    "leave it unfused, or fuse it into the 16-bit model and quantize that"
                )
            if self.lora_bias[name]:
                raise ValueError(f"adapter {name!r} has a bias of its own, which cannot be fused and taken out exactly")
        return names

    def unmerge(self) -> None:
        """Take all merged adapters out again; the layer's tensors are what they were, byte for byte."""
        self.require_unmergeable()
        while self.merged_adapters:
            self.merged_adapters.pop()
            self._layer.drop_low_rank(self.merged_ranks.pop())

    def require_unmergeable(self) -> None:
        """Raise ValueError, before any adapter is taken out, where the layer no longer holds all that were merged."""
        if self.merged_adapters:
            self._layer.require_present()
        if sum(self.merged_ranks) > self._layer.scheme.rank:
            raise ValueError(
                "an adapter was fused before fluxq.prepare, which put it into the codes, and it cannot be taken out of "
                "them: load the checkpoint again, call fluxq.prepare, then fuse"
            )

    @property
    def _layer(self) -> QuantLinear:
        return self.get_base_layer()  # pyright: ignore[reportReturnType]


class QuantLora(IntoBranch, lora.Linear):
    """Adapters around a QuantLinear."""


class _PointwiseAdapters(lora.Conv2d):
    """Adapters that are convolutions, as LoRA files of convolutions have them, and compute as those of Linears do."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Let PEFT make adapters for a convolution: it takes the base layer's class and the axes of its weight."""
        base: Any = self.base_layer
        layer: Any = self.get_base_layer()
        self._kernel_dim = 4
        self.base_layer = _Pointwise(
            1, 1, 1, bias=layer.bias is not None, device=layer.weight.device, dtype=layer.compute_dtype
        )
        config: Any = kwargs["config"]
        if config.use_dora:
            self.base_layer.weight = layer.dequantized(layer.compute_dtype).weight
        try:
            super().update_layer(*args, **kwargs)
        finally:
            self.base_layer = base


class _Pointwise(nn.Conv2d):
    """A 1x1 convolution whose bits are those of F.linear, so that its merged form computes the same."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.movedim(PIXELS, -1), self.weight.flatten(1), self.bias).movedim(-1, PIXELS)


class QuantPointwiseLora(IntoBranch, _PointwiseAdapters):
    """Adapters around a QuantPointwise."""


class KeptLora(lora.Linear):
    """Adapters around a Linear that a quantized model keeps in 16 bit: stock, but unfusing gives back the bytes.

    PEFT subtracts what it added, which in 16 bit does not lead back; here the weight is kept aside.
    """

    before: Tensor | None = None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight, as PEFT does."""
        if not self.merged and any(name in self.lora_A for name in check_adapters_to_merge(self, adapter_names)):
            self.before = self._layer.weight.data.clone()
        super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        """Put back the weight that stood before the first adapter was merged."""
        super().unmerge()
        if self.before is not None:
            self._layer.weight.data = self.before.to(self._layer.weight.device)
            self.before = None

    @property
    def _layer(self) -> nn.Linear:
        return self.get_base_layer()  # pyright: ignore[reportReturnType]


def register_with_peft() -> None:
    """Make PEFT put adapters of this file around the Linears of a quantized model."""
    stock = LoraModel._create_new_module

    def create(*arguments: Any, **options: Any) -> nn.Module:
        # PEFT asks through an instance, which says what model it is, or, when it mixes adapters, without one.
        *tuners, lora_config, adapter_name, target = arguments
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QuantLinear):
            around = QuantPointwiseLora if isinstance(base, QuantPointwise) else QuantLora
            return around(target, adapter_name, config=lora_config, **options)
        adapter = stock(lora_config, adapter_name, target, **options)
        if type(adapter) is lora.Linear and any(map(_is_quantized, tuners)):
            adapter.__class__ = KeptLora  # built as PEFT builds it; only merging differs
        return adapter

    LoraModel._create_new_module = create
    for kind, name in ((dora.DoraLinearLayer, "update_layer"), *((kind, "forward") for kind in _DORA)):
        setattr(kind, name, _of_a_16_bit_layer(getattr(kind, name)))
    for name in ("merge_adapter", "_unload_and_optionally_merge"):
        setattr(BaseTuner, name, _refusing_to_merge_into_codes(getattr(BaseTuner, name)))


def _is_quantized(tuner: Any) -> bool:
    return any(isinstance(module, QuantLinear) for module in tuner.model.modules())


def _of_a_16_bit_layer(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of DoRA, which scales the rows of W + B A by their norms: it is given W and the bias, decoded."""

    @functools.wraps(stock)
    def call(self: nn.Module, *args: Any, base_layer: nn.Module, **kwargs: Any) -> Any:
        if isinstance(base_layer, QuantLinear):
            base_layer = base_layer.dequantized(base_layer.compute_dtype)
        return stock(self, *args, base_layer=base_layer, **kwargs)

    return call


_DORA = (dora.DoraLinearLayer, dora._DoraConvNdLayer)  # each with a forward of its own


def _refusing_to_merge_into_codes(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a merging method to refuse adapters other than LoRA, which rotate, scale or add to `weight`: codes here."""

    @functools.wraps(stock)
    def merge(self: BaseTuner, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(stock).bind(self, *args, **kwargs).arguments
        for name, module in self.model.named_modules() if given.get("merge", True) else ():
            if isinstance(module, IntoBranch):
                module.mergeable(given.get("adapter_names"))
            elif isinstance(module, BaseTunerLayer):
                if isinstance(module.get_base_layer(), QuantLinear):
                    raise ValueError(
                        f"{name}: a {type(module).__name__} adapter cannot be merged into a quantized layer; only LoRA "
                        "can. Merge it into the 16-bit model and quantize that"
                    )
        return stock(self, *args, **kwargs)

    return merge
