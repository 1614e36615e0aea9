"""fluxq as a quantization backend of diffusers: `FluxPipeline.from_pretrained(folder)` loads a checkpoint, and
`quantization_config=` quantizes a 16-bit model while it loads.

diffusers has no entry point for backends, so `register` writes into its two tables; `import fluxq` arranges that.
The loader casts every floating tensor but E4M3 to the model's dtype, which would round fp32 scales through bf16, and
where a device map offloads to disk no backend is asked at all. So scales travel through it as integers of the same
bits: made in `maybe_update_state_dict`, which runs first, and read back when loading is over or, from disk, by the
layer itself.

One dtype for a pipeline that is loaded without naming one: without `dtype=` diffusers loads its models in fp32 and
transformers its own in the dtype of the files, so a pipeline fails where two of them meet, at the latest in the VAE,
after all steps. A pipeline with layers of fluxq takes the dtype in which these compute:

- a component whose numbers all are numbers of that dtype, such as fp32 copies of a 16-bit file, is cast to it. Nothing
  is lost, and `save_pretrained` writes the numbers of the file;
- any other, such as a VAE that was published in fp32, stays as it is, and its inputs are cast to its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.base.modules import path_in_file, put_tensor
from fluxq.integrations.loading import (
    FluxqConfig,
    attention_in,
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
from fluxq.integrations.whole import (
    computes_in,
    dtype_in,
    in_words_of_diffusers,
    numbers_of,
    refuse_casting,
    without_dtype,
)
from fluxq.kernels.linear import SCALE_NAMES
from fluxq.recipes.computing import QUANT_METHOD, Attentions, Steps

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from fluxq.integrations.on_the_fly import Arrivals
    from fluxq.recipes.step_list import StepList


_SAME_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_CODERS = ("encode", "decode")  # what pipelines call of a VAE
_CODED = ("x", "z", "sample")  # the first argument of those
_HIDDEN = ("sample", "hidden_states", "encoder_hidden_states", "encoder_hidden_states_image", "pooled_projections")


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
        self.attention: Attentions = "16bit"
        self.steps: Steps | None = None
        self.lists: Collection[StepList] = ()

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Accept every device, since torch runs the reference on it."""
        if not self.pre_quantized:
            from fluxq.integrations.on_the_fly import refuse_disk

            refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        self.dtype = torch_dtype or torch.bfloat16
        return self.dtype

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str] | None) -> list[str]:
        """Refuse files that are no whole set of weights; diffusers 0.37 does not ask."""
        if self.pre_quantized:
            require_whole_set(checkpoint_files or ())
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        if self.pre_quantized:
            self.model = model
            stored = self.quantization_config.stored
            self.exact, self.attention = put_layers(model, stored.schemes, self.dtype), stored.attention
            self.steps, self.lists = stored.steps, (*stored.step_lists.values(),)
            for _, layer in quant_layers(model):
                for name in layer.scale_names:
                    scale = layer.get_parameter(name)
                    put_tensor(layer, name, torch.empty_like(scale, dtype=_SAME_BITS.get(scale.dtype, scale.dtype)))
            return
        from fluxq.integrations.on_the_fly import Arrivals, plan_for

        plan = plan_for(model, self.quantization_config)
        if plan is not None:
            self.arrivals, self.attention, self.steps = Arrivals(plan), plan.attention, plan.steps
            put_layers(model, dict(plan.schemes()), self.dtype)
            for _, layer in quant_layers(model):  # the loader compares a weight's shape before it asks
                shape = layer.plain(False, self.dtype).weight.shape
                put_tensor(layer, "weight", torch.empty(shape, dtype=torch.uint8, device="meta"))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> nn.Module:
        if self.arrivals is not None:
            self.arrivals.require_all()
        for _, layer in quant_layers(model):
            # What is still on the meta device comes from disk later, in the dtype of its placeholder.
            for name in layer.scale_names:
                stored = layer.stored(name)
                if stored is not None and not stored.is_meta:
                    put_tensor(layer, name, stored)
        self.exact, self.arrivals, self.model = {}, None, None
        require_present(model)
        if self.attention != "16bit":
            from fluxq.runtime.attention_choice import set_attention

            set_attention(model, self.attention)
        model.is_quantized = bool(quant_layers(model))
        self.quantization_config = self.quantization_config.describing(model, self.steps)
        if self.steps is not None or self.lists:
            from fluxq.runtime.steps import tell

            tell(self.steps, self.lists)
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
                    put_tensor(model.get_submodule(name), part, value)
            return
        module, _, name = param_name.rpartition(".")
        put_tensor(model.get_submodule(module), name, tensor.to(target_device))

    def get_state_dict_and_metadata(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Return the model's own tensors under its own names, also while adapters are attached."""
        if self.quantization_config.model is not None:
            state_dict = with_stored_tensors(self.quantization_config.model, state_dict)
        tensors = {name: tensor for name, tensor in state_dict.items() if ".lora_" not in name}
        if len(tensors) < len(state_dict):
            logger.warning("adapters are not saved with the model, fused ones are; `save_lora_weights` writes them")
        return {path_in_file(name): tensor for name, tensor in tensors.items()}, {}

    def _dequantize(self, model: Any) -> Any:
        dequantize_layers(model, self.dtype)
        if attention_in(model) != "16bit":
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


def register_with_pipelines() -> None:
    """Make `DiffusionPipeline.from_pretrained` settle one dtype where the caller names none.

    And `DiffusionPipeline.to` refuse a cast before it has cast the components that stand before a quantized one.
    """
    from diffusers import DiffusionPipeline  # only here: models, which come before pipelines, need the quantizer

    load: Any = DiffusionPipeline.from_pretrained.__func__  # pyright: ignore[reportFunctionMemberAccess]  a classmethod
    share: Any = DiffusionPipeline.from_pipe.__func__  # pyright: ignore[reportFunctionMemberAccess]

    @functools.wraps(load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        pipe = load(cls, *args, **in_words_of_diffusers(kwargs))
        named = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if named is None or (isinstance(named, Mapping) and "default" not in named):  # of some components, by name
            settle(pipe, {*(named or ()), *(name for name, value in kwargs.items() if isinstance(value, nn.Module))})
        return pipe

    @functools.wraps(share)
    def from_pipe(cls: type, pipeline: Any, **kwargs: Any) -> Any:
        return share(cls, pipeline, **in_words_of_diffusers(kwargs))

    DiffusionPipeline.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
    DiffusionPipeline.from_pipe = classmethod(from_pipe)  # pyright: ignore[reportAttributeAccessIssue]
    stock_to: Any = DiffusionPipeline.to

    @functools.wraps(stock_to)
    def to(self: DiffusionPipeline, *args: Any, **kwargs: Any) -> DiffusionPipeline:
        dtype, models = dtype_in(args, kwargs), _models(self)
        if dtype is not None and computes_in(models, dtype):  # diffusers refuses this too, of quantized models
            args, kwargs = without_dtype(args, kwargs)
        elif dtype is not None:
            refuse_casting(models, dtype)
        return stock_to(self, *args, **kwargs) if args or kwargs or dtype is None else self

    DiffusionPipeline.to = to


def settle(pipe: DiffusionPipeline, exempt: Collection[str] = ()) -> None:
    """Make the components of a pipeline with quantized layers compute in one dtype, or understand each other's.

    Other pipelines are left alone. A warning names the call that says the dtype. exempt: components that the caller
    brought (they may be in other pipelines too) or named a dtype for; they stay as they are.
    """
    models = _models(pipe)
    dtype = _dtype_of(models)
    if dtype is None:
        return
    wider = []
    for name, model in models.items():
        if quant_layers(model) or all(tensor.dtype == dtype for _, tensor in numbers_of(model)):
            continue
        if name not in exempt and _is_exact(model, dtype):
            for _, tensor in numbers_of(model):
                tensor.data = tensor.data.to(dtype)
        else:
            wider.append(name)
    if wider:
        _let_meet(models, dtype)
    kept = f"; {', '.join(wider)}: kept in their own dtype" if wider else ""
    logger.warning(
        "no dtype= was given: %s is loaded in %s%s; better say so: %s.from_pretrained(…, dtype=%s)",
        *(type(pipe).__name__, str(dtype).removeprefix("torch."), kept, type(pipe).__name__, dtype),
    )


def _models(pipe: DiffusionPipeline) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def _dtype_of(models: Mapping[str, nn.Module]) -> torch.dtype | None:
    """Return the 16-bit dtype of the first quantized model, None if there is none."""
    return next((layer.compute_dtype for model in models.values() for _, layer in quant_layers(model)), None)


def _is_exact(model: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a cast to `dtype` changes no number; False where weights wait elsewhere, as nobody knows them."""
    tensors = [tensor.detach() for _, tensor in numbers_of(model)]
    if any(tensor.is_meta for tensor in tensors):
        return False
    return all(torch.equal(tensor, tensor.to(dtype).to(tensor.dtype)) for tensor in tensors)


def _let_meet(models: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
    """Cast the inputs of VAEs and denoisers to the dtype in which they compute."""
    for model in models.values():
        if all(hasattr(model, name) for name in _CODERS):
            for name in _CODERS:
                setattr(model, name, _Casting(model, name))
        elif quant_layers(model):
            model.register_forward_pre_hook(functools.partial(_cast_hidden, dtype=dtype), with_kwargs=True)


def _cast_hidden(
    _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast latents and embeddings to `dtype`; timesteps, guidance and rotations keep their digits."""
    cast = {name: _as(value, dtype) for name, value in kwargs.items() if name in _HIDDEN}
    return (*(_as(value, dtype) for value in args[:1]), *args[1:]), {**kwargs, **cast}


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _Casting:
    """A method of a model whose first argument is cast to the model's dtype; copied with the model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next(tensor.dtype for _, tensor in numbers_of(self.model))
        args = (*(_as(value, dtype) for value in args[:1]), *args[1:])
        kwargs = {name: _as(value, dtype) if name in _CODED else value for name, value in kwargs.items()}
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Casting:
        return _Casting(deepcopy(self.model, memo), self.name)
