"""fluxq as a quantization backend of diffusers: how `FluxPipeline.from_pretrained(folder)` loads a checkpoint.

diffusers has no entry point for backends, so `register` writes into its two tables; `import fluxq` arranges that.
The loader casts every floating tensor but E4M3 to the model's dtype, which would round fp32 scales through bf16, and
where a device map offloads to disk no backend is asked at all. So scales travel through it as integers of the same
bits: made in `maybe_update_state_dict`, which runs first, and read back when loading is over or, from disk, by the
layer itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from fluxq.quantize.checkpoint import QUANT_METHOD, QuantizationConfig
from fluxq.quantize.linear import SCALE_NAMES, QuantLinear, scale_dtype


class Method(StrEnum):
    """diffusers reads `quant_method.value`, so a plain string will not do."""

    FLUXQ = QUANT_METHOD


class FluxqConfig(QuantizationConfigMixin):
    """`quantization_config` of a checkpoint's config.json as diffusers holds it."""

    def __init__(self, **config: Any) -> None:
        config.pop("quant_method", None)
        self.quant_method = Method.FLUXQ  # pyright: ignore[reportAttributeAccessIssue]  diffusers' enum is closed
        self.config = QuantizationConfig.from_dict(config)

    def to_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class FluxqQuantizer(DiffusersQuantizer):
    """Puts QuantLinears where the checkpoint says and gives them their tensors untouched."""

    use_keep_in_fp32_modules = True
    quantization_config: FluxqConfig

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Every device with a torch runs the reference."""

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        self.dtype = torch_dtype or torch.bfloat16
        return self.dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for name, scheme in self.quantization_config.config.schemes.items():
            old = _submodule(model, name)
            if not isinstance(old, nn.Linear):
                raise ValueError(f"checkpoint quantizes {name!r}, which is no Linear of this {type(model).__name__}")
            scheme.weights.check_shape(old.out_features, old.in_features, name)
            with torch.device("meta"):
                new = QuantLinear(old.in_features, old.out_features, old.bias is not None, scheme, self.dtype)
            for scale in new.scale_names:
                held = new.get_parameter(scale)
                _set(new, scale, torch.empty_like(held, dtype=_SAME_BITS.get(held.dtype, held.dtype)))
            model.set_submodule(name, new)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for layer in model.modules():
            if isinstance(layer, QuantLinear):
                # What is still on the meta device comes from disk later, in the dtype of its placeholder.
                for name in layer.scale_names:
                    if not layer.get_parameter(name).is_meta:
                        _set(layer, name, layer.stored(name))
        return model

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        schemes = self.quantization_config.config.schemes
        for name, tensor in state_dict.items():
            module, _, parameter = name.rpartition(".")
            if module in schemes and parameter in SCALE_NAMES:
                expected = scale_dtype(schemes[module], parameter)
                if tensor.dtype == expected and expected in _SAME_BITS:
                    state_dict[name] = tensor.view(_SAME_BITS[expected])
        return state_dict

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        if missing_keys:
            raise ValueError(f"the weight files lack {missing_keys[0]!r}, which config.json names: copy them again")
        return missing_keys

    def check_if_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        state_dict: dict[str, Any],
        **kwargs: Any,
    ) -> bool:
        module, _, tensor = param_name.rpartition(".")
        layer = _submodule(model, module)
        return isinstance(layer, QuantLinear) and tensor in layer.stored_names

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> None:
        if current_param.shape != loaded_param.shape:
            expected, came = tuple(current_param.shape), tuple(loaded_param.shape)
            raise ValueError(f"{param_name}: shape {came} in the file, {expected} by config.json")

    def create_quantized_param(
        self,
        model: nn.Module,
        param_value: Tensor,
        param_name: str,
        target_device: torch.device,
        state_dict: dict[str, Any],
        unexpected_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        module, _, tensor = param_name.rpartition(".")
        layer: Any = model.get_submodule(module)
        stored = state_dict[param_name]  # param_value has been cast to the model's dtype already
        if stored.dtype != layer.get_parameter(tensor).dtype:
            expected = scale_dtype(layer.scheme, tensor) if tensor in SCALE_NAMES else layer.weight.dtype
            raise ValueError(f"{param_name}: {stored.dtype} in the file, {expected} by config.json")
        _set(layer, tensor, stored.to(target_device))

    def _dequantize(self, model: Any) -> Any:
        for name in self.quantization_config.config.schemes:
            layer = model.get_submodule(name)
            if not isinstance(layer, QuantLinear):
                raise ValueError(f"{name} is not a fluxq layer any more; dequantize before changing modules")
            model.set_submodule(name, layer.dequantized(self.dtype))
        # The base class keeps this key, and a model saved with it would not load again.
        kept = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = type(model.config)(kept)
        return model


def register() -> None:
    """Make diffusers know `quant_method: fluxq`."""
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = FluxqQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = FluxqConfig


def _set(layer: QuantLinear, name: str, tensor: Tensor | None) -> None:
    layer.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))


_SAME_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
