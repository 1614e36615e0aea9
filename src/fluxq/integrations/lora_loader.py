"""LoRA files in diffusers: its loader reads the shapes of quantized layers right, and fuses all layers or none.

This module is of the running path: it does without peft, which diffusers asks for once a LoRA is loaded.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from fluxq.kernels.linear import QuantLinear


def register() -> None:
    """Tell diffusers' FLUX LoRA loader the size of a QuantLinear, and let `fuse_lora` fuse all layers or none.

    The loader compares an adapter's with the stored weight's, and would widen a layer whose 4-bit codes are two to a
    byte.
    """
    from diffusers.loaders import lora_pipeline
    from diffusers.loaders.peft import PeftAdapterMixin

    stock_fuse = PeftAdapterMixin.fuse_lora

    @functools.wraps(stock_fuse)
    def fuse_lora(self: Any, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: Any = None) -> Any:
        from fluxq.integrations.peft import IntoBranch

        for module in self.modules():
            if isinstance(module, IntoBranch):
                module.mergeable(adapter_names)
        return stock_fuse(self, lora_scale, safe_fusing, adapter_names)

    PeftAdapterMixin.fuse_lora = fuse_lora
    loader = lora_pipeline.FluxLoraLoaderMixin
    stock_shape, stock_weight = loader._calculate_module_shape, lora_pipeline._maybe_dequantize_weight_for_expanded_lora

    def shape(model: nn.Module, base_module: Any = None, base_weight_param_name: str | None = None) -> Any:
        layer = base_module
        if layer is None and base_weight_param_name is not None:
            layer = model.get_submodule(base_weight_param_name.removesuffix(".weight"))
        if isinstance(layer, QuantLinear):
            return (layer.out_features, layer.in_features)
        return stock_shape(model, base_module, base_weight_param_name)  # pyright: ignore[reportArgumentType]

    def weight(model: Any, module: nn.Module) -> Tensor:
        if isinstance(module, QuantLinear):
            if module.scheme.center:  # diffusers would put the layer's own bias beside this weight
                raise ValueError(
                    f"this LoRA widens a layer quantized as {module.scheme}, whose bias is not that of its weight: "
                    "keep the layer in 16 bit, or quantize it without center"
                )
            return module.dequantized(model.dtype).weight
        return stock_weight(model, module)

    loader._calculate_module_shape = staticmethod(shape)
    lora_pipeline._maybe_dequantize_weight_for_expanded_lora = weight
