"""fluxq as a quantization backend of diffusers: `FluxPipeline.from_pretrained(folder)` loads a checkpoint, and
`quantization_config=` quantizes a 16-bit model while it loads.

diffusers has no entry point for backends, so `register` writes into its two tables; `import fluxq` arranges that.
The loader casts every floating tensor but E4M3 to the model's dtype, which would round fp32 scales through bf16, and
where a device map offloads to disk no backend is asked at all. So scales travel through it as integers of the same
bits: made in `maybe_update_state_dict`, which runs first, and read back when loading is over or, from disk, by the
layer itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.integrations.config import FluxqConfig
from fluxq.integrations.loading import (
    check_tensor,
    dequantize_layers,
    lacking,
    put_layers,
    quant_layers,
    refuse_unannounced,
    require_present,
    set_tensor,
    with_stored_tensors,
)
from fluxq.kernels.linear import SCALE_NAMES
from fluxq.recipes.computing import QUANT_METHOD, Attention, Steps, attention_of

if TYPE_CHECKING:
    from fluxq.integrations.on_the_fly import Arrivals


class FluxqQuantizer(DiffusersQuantizer):
    """Quantizer that puts QuantLinears where the checkpoint or the recipe says, with their tensors untouched.

    On the fly, memory peaks at the quantized model, the files being read (memory-mapped: the system may drop their
    pages) and the fp32 working copies of one weight, or of one group of weights that share a global scale.
    """

    use_keep_in_fp32_modules = True
    is_serializable = is_trainable = is_compileable = True  # pyright: ignore[reportAssignmentType]  properties there
    quantization_config: FluxqConfig  # pyright: ignore[reportIncompatibleVariableOverride]  diffusers' base is a name

    def __init__(self, quantization_config: FluxqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # pyright: ignore[reportArgumentType]
        self.pre_quantized = quantization_config.recipe is None  # from_single_file does not say
        self.exact: dict[str, Tensor] = {}
        self.arrivals: Arrivals | None = None
        self.model: nn.Module | None = None  # while a checkpoint is loaded into it
        self.attention: Attention = "16bit"
        self.steps: Steps | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Accept every device, since torch runs the reference on it."""
        if not self.pre_quantized:
            from fluxq.integrations.on_the_fly import refuse_disk

            refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        self.dtype = torch_dtype or torch.bfloat16
        return self.dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            self.model = model
            stored = self.quantization_config.stored
            self.exact, self.attention = put_layers(model, stored.schemes, self.dtype), stored.attention
            self.steps = stored.steps
            for _, layer in quant_layers(model):
                for name in layer.scale_names:
                    scale = layer.get_parameter(name)
                    set_tensor(layer, name, torch.empty_like(scale, dtype=_SAME_BITS.get(scale.dtype, scale.dtype)))
            return
        from fluxq.integrations.on_the_fly import Arrivals, plan_for

        plan = plan_for(model, self.quantization_config)
        if plan is not None:
            self.arrivals, self.attention, self.steps = Arrivals(plan), plan.attention, plan.steps
            put_layers(model, dict(plan.schemes()), self.dtype)
            for _, layer in quant_layers(model):  # the loader compares a weight's shape before it asks
                shape = layer.plain(False, self.dtype).weight.shape
                set_tensor(layer, "weight", torch.empty(shape, dtype=torch.uint8, device="meta"))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
        if self.arrivals is not None:
            self.arrivals.require_all()
        for _, layer in quant_layers(model):
            # What is still on the meta device comes from disk later, in the dtype of its placeholder.
            for name in layer.scale_names:
                stored = layer.stored(name)
                if stored is not None and not stored.is_meta:
                    set_tensor(layer, name, stored)
        self.exact, self.arrivals, self.model = {}, None, None
        require_present(model)
        if self.attention != "16bit":
            from fluxq.runtime.attention_choice import set_attention

            set_attention(model, self.attention)
        model.is_quantized = bool(quant_layers(model))
        self.quantization_config = self.quantization_config.describing(model, self.steps)
        if self.steps is not None:
            from fluxq.runtime.steps import tell

            tell(self.steps)
        _set_config(model, self.quantization_config if model.is_quantized else None)
        return model

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.model is not None:
            refuse_unannounced({name: tensor.dtype for name, tensor in state_dict.items()}, self.model)
        for name in self.exact.keys() & state_dict.keys():
            expected = self.exact[name]
            check_tensor(name, state_dict[name].dtype, state_dict[name].shape, expected)
            if name.rpartition(".")[2] in SCALE_NAMES:
                state_dict[name] = state_dict[name].view(_SAME_BITS.get(expected.dtype, expected.dtype))
        return state_dict

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        scales = set()
        if self.arrivals is not None:
            scales = {f"{name}.{scale}" for name, layer in quant_layers(model) for scale in layer.scale_names}
        missing = sorted(set(missing_keys) - scales)
        if missing:
            raise lacking(missing[0])
        return missing

    def check_if_quantized_param(self, model: nn.Module, param_value: Tensor, param_name: str, *args, **kwargs) -> bool:
        return param_name in self.exact or (self.arrivals is not None and param_name in self.arrivals)

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
        tensor = state_dict[param_name]  # param_value has been cast to the model's dtype already
        if self.arrivals is not None:
            for name, q in self.arrivals.add(param_name, tensor.to(target_device)).items():
                for part, value in q.tensors().items():
                    set_tensor(model.get_submodule(name), part, value)
            return
        module, _, name = param_name.rpartition(".")
        set_tensor(model.get_submodule(module), name, tensor.to(target_device))

    def get_state_dict_and_metadata(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the model's own tensors under its own names, also while adapters are attached."""
        if self.quantization_config.model is not None:
            state_dict = with_stored_tensors(self.quantization_config.model, state_dict)
        tensors = {name: tensor for name, tensor in state_dict.items() if ".lora_" not in name}
        if len(tensors) < len(state_dict):
            logger.warning("adapters are not saved with the model, fused ones are; `save_lora_weights` writes them")
        return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}, {}

    def _dequantize(self, model: Any) -> Any:
        dequantize_layers(model, self.dtype)
        if attention_of(model) != "16bit":
            from fluxq.runtime.attention_choice import set_attention

            set_attention(model, "16bit")
        _set_config(model, None)  # a model saved with it would not load again
        return model


def register() -> None:
    """Make diffusers know `quant_method: fluxq`."""
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = FluxqQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = FluxqConfig


def _set_config(model: Any, config: FluxqConfig | None) -> None:
    """Make `config` what `model.config` says of quantization; the dictionary itself is frozen."""
    kept = {key: value for key, value in model.config.items() if key != "quantization_config"}
    model._internal_dict = type(model.config)({**kept, "quantization_config": config} if config else kept)


_SAME_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
