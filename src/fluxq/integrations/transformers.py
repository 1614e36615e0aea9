"""fluxq as a quantization backend of transformers: text encoders, alone or in a diffusers pipeline.

transformers loads a model under a `quant_method` that it does not know as if nothing were quantized, and codes would
become weights. So files hold the codes of a text encoder as [N, K', 1]: a loader that does not know fluxq meets another
shape than it expects and fails. The axis is taken away by a weight conversion, which transformers reverses on saving.

In memory, codes are int8 views of the stored bytes, whatever their type: T5 casts the input of `wo` to the dtype of its
weight, which would be fp8 or uint8, unless that is int8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from fluxq.base.modules import put_tensor, uncompiled_path
from fluxq.base.tensors import DTYPES, TensorFile
from fluxq.integrations.loading import (
    FluxqConfig,
    check_tensor,
    dequantize_layers,
    lacking,
    put_layers,
    quant_layers,
    refuse_unannounced,
    require_present,
    require_whole_set,
    with_stored_tensors,
)
from fluxq.kernels.linear import stored_dtype
from fluxq.recipes.computing import QUANT_METHOD

if TYPE_CHECKING:
    from fluxq.integrations.on_the_fly import Arrivals


class FluxqHfQuantizer(HfQuantizer):
    """Quantizer that puts QuantLinears where the checkpoint or the recipe says, with their tensors untouched.

    On the fly, weights are read one at a time: memory peaks at the quantized model and the fp32 working copies of one
    weight, or of one group of weights that share a global scale.
    """

    is_trainable = is_compileable = True  # pyright: ignore[reportAssignmentType]  properties there
    quantization_config: FluxqConfig  # pyright: ignore[reportIncompatibleVariableOverride]  transformers' is a mixin

    def __init__(self, quantization_config: FluxqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # pyright: ignore[reportArgumentType]
        self.exact: dict[str, Tensor] = {}
        self.arrivals: Arrivals | None = None
        self.device_map: Any = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse an older transformers, which would cast codes and scales; every device runs torch's reference."""
        if not hasattr(HfQuantizer, "get_new_dtype"):
            raise ValueError("text encoders under fluxq need transformers 5.21 or newer: update transformers")
        self.device_map = device_map
        if not self.pre_quantized:
            from fluxq.integrations.on_the_fly import refuse_disk

            refuse_disk(device_map)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            schemes = self.quantization_config.stored.schemes
        else:
            from fluxq.integrations.on_the_fly import Arrivals, plan_for

            plan = plan_for(model, self.quantization_config)
            if plan is None:
                return
            self.arrivals = Arrivals(plan)
            schemes = dict(plan.schemes())
        _refuse_tied(model, schemes)
        stored = put_layers(model, schemes, self.dtype)
        self.exact = {name: t.unsqueeze(-1) if name.endswith(".weight") else t for name, t in stored.items()}
        for name, layer in quant_layers(model):
            if self.dtype == torch.float16 and _is_kept_in_fp32(model, name):
                layer.register_forward_pre_hook(_in_fp32)
            if self.pre_quantized:
                put_tensor(layer, "weight", layer.weight.data.view(torch.int8))
            else:
                # A placeholder of the file's shape; named as fp32, or the weight would be rounded to dtype first.
                shape = (layer.out_features, layer.in_features)
                put_tensor(layer, "weight", torch.empty(shape, dtype=self.dtype, device="meta"))
                model._keep_in_fp32_modules_strict.add(_exactly(f"{name}.weight"))
            parts: list[Any] = [layer, *layer.parameters()]
            for part in parts:
                part._is_hf_initialized = True  # nothing in it may be a random number
        if self.pre_quantized and checkpoint_files is not None:
            self._check_files(model, checkpoint_files)

    def _check_files(self, model: Any, files: list[str]) -> None:
        """Check headers: transformers casts a wrong dtype and puts random numbers where files lack a tensor."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        require_whole_set(files)
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        tensors, dtypes = model.state_dict(), {}
        for file in files:
            for name_in_file, stored in TensorFile(Path(file)).stored.items():
                renamed, _ = rename_source_key(name_in_file, renamings, converters, model.base_model_prefix, tensors)
                name = renamed if renamed in tensors else name_in_file
                dtypes[name] = dtypes[renamed] = dtype = getattr(torch, DTYPES[stored.dtype][0])
                if name in self.exact:
                    check_tensor(name, dtype, stored.shape, self.exact[name])
        refuse_unannounced(dtypes, model)
        for name, layer in quant_layers(model):
            for part, _ in layer.named_parameters():
                if f"{name}.{part}" not in dtypes:
                    raise lacking(f"{name}.{part}")

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that a tensor of a checkpoint is cast to as it is read; None leaves it as it is."""
        return None if converter.target_patterns[0] in self.exact else super().get_new_dtype(converter, param, dtype)

    def get_weight_conversions(self) -> list[WeightConverter]:
        if not self.pre_quantized:
            return []
        codes = {name: tensor.dtype for name, tensor in self.exact.items() if name.endswith(".weight")}
        return [WeightConverter(_exactly(name), name, [_Axis(dtype)]) for name, dtype in codes.items()]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.arrivals is not None and param_name in self.arrivals

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Count a byte at most for a 16-bit placeholder, in a device map that transformers infers."""
        if self.param_needs_quantization(model, param_name):
            return 1
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        if self.arrivals is None:
            raise RuntimeError("a checkpoint's weights are quantized already")
        return _Round(self.arrivals)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.arrivals is not None:
            self.arrivals.require_all()
            model._keep_in_fp32_modules_strict -= {_exactly(name) for name in self.exact}
        for _, layer in quant_layers(model):
            layer.requires_grad_(False)
        self.arrivals, self.exact = None, {}
        require_present(model, self.device_map)
        model.config.quantization_config = self.quantization_config.describing(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors as files hold them; those left on disk by a device map are converted as they are read."""
        tensors = with_stored_tensors(model, model.state_dict())
        for name, layer in quant_layers(model):
            weight = tensors[f"{name}.weight"]
            if not weight.is_meta and weight.ndim == 2:  # one that was read from the file again is as filed
                tensors[f"{name}.weight"] = weight.view(stored_dtype(layer.stored_scheme, "weight")).unsqueeze(-1)
        return {uncompiled_path(name): tensor for name, tensor in tensors.items()}, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        dequantize_layers(model, dtype or self.dtype)
        model._weight_conversions = [c for c in model._weight_conversions or [] if not _takes_axis(c)]
        return model


def register() -> None:
    """Make transformers know `quant_method: fluxq`."""
    auto.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = FluxqHfQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = FluxqConfig


class _Round(ConversionOps):
    """Conversion of 16-bit weights to codes and scales, once all that share a scale have come."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        converted = {}
        for name, tensors in input_dict.items():
            weight = tensors[0] if isinstance(tensors, list) else tensors
            for layer, q in self.arrivals.add(name, weight).items():
                parts = {**q.tensors(), "weight": q.codes.view(torch.int8)}
                converted.update({f"{layer}.{part}": tensor for part, tensor in parts.items()})
        return converted


class _Axis(ConversionOps):
    """Conversion of codes in files, [N, K', 1] of `dtype`, to the layer's int8 [N, K'].

    files: back again, for a layer that a device map left on disk; codes in memory have been converted already.
    """

    def __init__(self, dtype: torch.dtype, files: bool = False) -> None:
        self.dtype, self.files = dtype, files

    def convert(self, input_dict: dict[str, Any], *args: Any, full_layer_name: str, **kwargs: Any) -> dict[str, Any]:
        ((codes,),) = input_dict.values()
        if not self.files:
            codes = codes.squeeze(-1).view(torch.int8)
        elif codes.ndim == 2:
            codes = codes.view(self.dtype).unsqueeze(-1)
        return {full_layer_name: codes}

    @property
    def reverse_op(self) -> ConversionOps:
        return _Axis(self.dtype, not self.files)


def _is_kept_in_fp32(model: Any, name: str) -> bool:
    """Tell whether the class computes this module in fp32 where the rest is fp16: T5's `wo` overflows there."""
    return any(re.search(rf"(^|\.){kept}(\.|$)", name) for kept in model._keep_in_fp32_modules or ())


def _in_fp32(_layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Widen a layer's input: a forward pre-hook; a QuantLinear computes and returns the dtype of its input."""
    return (args[0].float(), *args[1:])


def _takes_axis(entry: Any) -> bool:
    return isinstance(entry, WeightConverter) and isinstance(entry.operations[0], _Axis)


def _exactly(name: str) -> str:
    """Return a pattern for just this name: transformers' patterns end at the end of a name."""
    return f"^{re.escape(name)}"


def _refuse_tied(model: nn.Module, names: Iterable[str]) -> None:
    tied: Any = getattr(model, "all_tied_weights_keys", {})
    for name in names:
        weight = f"{name}.weight"
        if weight in tied or weight in tied.values():
            raise ValueError(f"{name} shares its weight with another module, which needs 16 bit: exclude {name!r}")
