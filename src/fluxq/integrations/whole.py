"""All or nothing: a quantized model refuses a call before anything of it has changed.

A module is cast layer by layer, and fused attention by attention, so a layer that refuses comes too late: those before
it have been changed by then. Here the libraries' own model classes ask all layers first. That holds for copies and
unpickled models too, and other models are not touched. `num_parameters` counts weights instead of codes.

Models are loaded one at a time, of both libraries: while one loads, they set torch's default dtype and device for the
whole process, so that of two in threads one stayed on meta, without an error. `save_pretrained` also writes the digest
of a quantized model's tensors, which `fluxq verify` compares.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.recipes.computing import BACKENDS, Attention

if TYPE_CHECKING:
    from fluxq.integrations.peft import IntoBranch

_LOADING = threading.RLock()
_FUSED = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def register_with_diffusers() -> None:
    """Make diffusers' models ask their quantized layers first, count weights, load one at a time and save digests."""
    from diffusers.models.modeling_utils import ModelMixin

    _teach(ModelMixin)
    stock, stock_to = ModelMixin.enable_layerwise_casting, ModelMixin.to

    @functools.wraps(stock_to)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Let pass what casts nothing, as diffusers' `load_ip_adapter` and `save_lora_adapter` ask for it."""
        dtype = dtype_in(args, kwargs)
        if quant_layers(self) and (dtype is None or computes_in({"": self}, dtype)):  # diffusers refuses any dtype
            args, kwargs = without_dtype(args, kwargs)
            if not args and not kwargs:
                return self
        return stock_to(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    ModelMixin.to = to  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(stock)
    def enable_layerwise_casting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        for name, layer in quant_layers(self):
            raise ValueError(
                f"{name} is quantized as {layer.scheme}, and layerwise casting would turn its codes and scales into "
                "other numbers: leave it out; the weights are small already"
            )
        stock(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    ModelMixin.enable_layerwise_casting = enable_layerwise_casting


def register_with_transformers() -> None:
    """Make transformers' models ask their quantized layers first, count weights, load singly and save digests."""
    from transformers.modeling_utils import PreTrainedModel

    _teach(PreTrainedModel)


def register_attention() -> None:
    """Add attention from codes, of runtime/attention_choice.py, to diffusers' enum and table of backends."""
    from diffusers.models import attention_dispatch

    kind: Any = attention_dispatch.AttentionBackendName
    constraints = [attention_dispatch._check_device, attention_dispatch._check_shape]
    for attention, name in BACKENDS.items():
        if name in kind._value2member_map_:
            continue
        member = str.__new__(kind, name)
        member._name_, member._value_ = name.upper(), name
        setattr(kind, member._name_, member)  # before the enum knows the name, which it then protects
        kind._member_names_.append(member._name_)
        kind._member_map_[member._name_] = member
        kind._value2member_map_[name] = member
        attend = _attending(attention)
        # diffusers passes arguments by it
        attend.__signature__ = inspect.signature(attention_dispatch._native_attention)
        attention_dispatch._AttentionBackendRegistry.register(member, constraints)(attend)


def register_with_lora_loader() -> None:
    """Tell diffusers' FLUX LoRA loader the size of a QuantLinear, and let LoRAs fuse, or leave, all layers or none.

    The loader compares an adapter's with the stored weight's, and would widen a layer whose 4-bit codes are two to a
    byte. Nothing here needs peft, which diffusers asks for once a LoRA is loaded.
    """
    from diffusers.loaders import lora_pipeline
    from diffusers.loaders.lora_base import LoraBaseMixin
    from diffusers.loaders.peft import PeftAdapterMixin

    pipelines: Any = LoraBaseMixin
    stock_fuse, stock_unfuse = PeftAdapterMixin.fuse_lora, PeftAdapterMixin.unfuse_lora
    unfuse_stock_components = pipelines.unfuse_lora

    @functools.wraps(stock_fuse)
    def fuse_lora(self: Any, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: Any = None) -> Any:
        for layer in _into_branches(self):
            layer.mergeable(adapter_names)
        return stock_fuse(self, lora_scale, safe_fusing, adapter_names)

    @functools.wraps(stock_unfuse)
    def unfuse_lora(self: Any) -> None:
        for layer in _into_branches(self):
            layer.require_unmergeable()
        stock_unfuse(self)

    @functools.wraps(unfuse_stock_components)
    def unfuse_components(self: Any, components: Sequence[str] = (), **kwargs: Any) -> None:
        for model in (getattr(self, name, None) for name in components or ()):
            for layer in _into_branches(model) if isinstance(model, nn.Module) else ():
                layer.require_unmergeable()
        unfuse_stock_components(self, components, **kwargs)

    PeftAdapterMixin.fuse_lora, PeftAdapterMixin.unfuse_lora = fuse_lora, unfuse_lora
    pipelines.unfuse_lora = unfuse_components
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


def _attending(attention: Attention) -> Any:
    """Return the function of a backend of BACKENDS."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        from fluxq.runtime.attention_choice import dispatched  # only here: most models compute attention in 16 bit

        return dispatched(attention, query, key, value, **how)

    return attend


def _into_branches(model: nn.Module) -> list[IntoBranch]:
    """List the layers of a model whose adapters fuse into the low-rank branch."""
    from fluxq.integrations.peft import IntoBranch

    return [module for module in model.modules() if isinstance(module, IntoBranch)]


def _teach(model_class: Any) -> None:
    stock_apply, stock_count = model_class._apply, model_class.num_parameters

    @functools.wraps(stock_apply)
    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for _, layer in quant_layers(self) if recurse else ():
            layer.require_kept(fn)
        return stock_apply(self, fn, recurse)

    @functools.wraps(stock_count)
    def num_parameters(self: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count = stock_count(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        if only_trainable:  # nothing of a quantized layer is
            return count
        layers = [layer for _, layer in quant_layers(self)]
        return count + sum(layer.weights - sum(t.numel() for t in layer.parameters()) for layer in layers)

    model_class._apply, model_class.num_parameters = _apply, num_parameters
    stock_set = model_class.__setstate__

    @functools.wraps(stock_set)
    def __setstate__(self: nn.Module, state: dict[str, Any]) -> None:
        stock_set(self, state)
        described: Any = getattr(getattr(self, "config", None), "quantization_config", None)
        if hasattr(described, "describe_again"):
            described.describe_again(self)

    model_class.__setstate__ = __setstate__
    stock_state = model_class.load_state_dict

    @functools.wraps(stock_state)
    def load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        _require_stored(self, state_dict)
        return stock_state(self, state_dict, *args, **kwargs)

    model_class.load_state_dict = load_state_dict
    stock_load = model_class.from_pretrained.__func__

    @functools.wraps(stock_load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        if model_class.__module__.startswith("diffusers."):
            kwargs = in_words_of_diffusers(kwargs)
        with _LOADING:
            return stock_load(cls, *args, **kwargs)

    model_class.from_pretrained = classmethod(from_pretrained)
    model_class.save_pretrained = _with_digest(model_class.save_pretrained)


def in_words_of_diffusers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `from_pretrained` with `dtype` as diffusers before 0.40 calls it, which ignores the word."""
    from diffusers import __version__

    if "dtype" not in arguments or tuple(map(int, __version__.split(".")[:2])) >= (0, 40):
        return dict(arguments)
    return {"torch_dtype" if name == "dtype" else name: value for name, value in arguments.items()}


def _with_digest(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `save_pretrained` to write a digest, except into a variant, which `verify` does not read.

    An upload by `push_to_hub=True` comes before it and has none.
    """

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(self, save_directory, *args, **kwargs)
        arguments = inspect.signature(save).bind(self, save_directory, *args, **kwargs).arguments
        if getattr(self, "hf_quantizer", None) is not None and arguments.get("is_main_process", True):
            if arguments.get("variant") is None:
                from fluxq.quantize.record import write_own_digest

                write_own_digest(Path(save_directory))
        return result

    return save_pretrained


def _require_stored(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise ValueError for a state dict whose tensors torch would cast to a quantized layer's codes or scales."""
    for path, layer in quant_layers(model):
        for name in layer.stored_names:
            value, stored = state.get(f"{path}.{name}"), getattr(layer, name)
            if isinstance(value, Tensor) and value.dtype != stored.dtype:
                raise ValueError(
                    f"{path}.{name}: the state dict has {value.dtype}, a layer quantized as {layer.scheme} stores "
                    f"{stored.dtype}, and nothing was loaded. Load a checkpoint by from_pretrained"
                )


def dtype_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a call of `to` names; None if it names none."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)


def without_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `to` without its dtype, nor a `dtype=None`."""
    rest = {name: value for name, value in kwargs.items() if name != "dtype" and not isinstance(value, torch.dtype)}
    return tuple(value for value in args if not isinstance(value, torch.dtype)), rest


def computes_in(models: Mapping[str, nn.Module], dtype: torch.dtype) -> bool:
    """Tell whether quantized models are among these, and nothing in any of them would be cast."""
    layers = {name: dict(quant_layers(model)) for name, model in models.items()}
    others = (
        tensor
        for name, model in models.items()
        for path, tensor in numbers_of(model)
        if path.rpartition(".")[0] not in layers[name]
    )
    dtypes = [layer.compute_dtype for each in layers.values() for layer in each.values()]
    return bool(dtypes) and {dtype, *dtypes} == {dtype} and all(tensor.dtype == dtype for tensor in others)


def numbers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield floating parameters and buffers of the files, except those that the model always has in fp32."""
    always = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(part in always for part in name.split(".")):
            yield name, tensor


def refuse_casting(models: dict[str, nn.Module], dtype: torch.dtype) -> None:
    """Raise ValueError, naming the component, if one of a pipeline's models cannot be cast to `dtype`.

    diffusers casts none of its own that is quantized, not even to the dtype that it has.
    """
    from diffusers import ModelMixin

    for name, model in models.items():
        for _, layer in quant_layers(model):
            if layer.compute_dtype != dtype or (
                isinstance(model, ModelMixin) and getattr(model, "is_quantized", False)
            ):
                raise ValueError(
                    f"{name} is quantized and computes in {layer.compute_dtype}: the pipeline cannot be cast to "
                    f"{dtype}, and nothing of it was. Name the dtype in from_pretrained(…, dtype=) and "
                    "from_pipe(…, dtype=), and only a device in .to()"
                )


def guard_fusing(model: nn.Module) -> None:
    """Make the classes of this model and its attentions refuse to fuse projections that are quantized."""
    for part in {type(module) for module in model.modules()}:
        for name in ("fuse_qkv_projections", "fuse_projections"):
            home = next((base for base in part.__mro__ if name in vars(base)), None)
            if home is not None and not hasattr(getattr(home, name), "asks_first"):
                setattr(home, name, _asking_first(getattr(home, name)))


def _asking_first(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, part in self.named_modules():
            if hasattr(part, "fuse_projections") and getattr(part, "_supports_qkv_fusion", True):
                for projection in _FUSED:
                    for _, layer in quant_layers(getattr(part, projection, None) or nn.Module()):
                        raise ValueError(
                            f"{stock.__name__}: {f'{name}.{projection}'.strip('.')} is quantized as {layer.scheme}, "
                            "and codes are not joined; nothing was fused. Leave this call out, or keep the projections "
                            "in 16 bit (exclude)"
                        )
        return stock(self, *args, **kwargs)

    fuse.asks_first = True  # pyright: ignore[reportAttributeAccessIssue]
    return fuse
