"""One dtype for a pipeline that is loaded without naming one.

Without `dtype=` diffusers loads its models in fp32 and transformers its own in the dtype of the files, so a pipeline
fails where two of them meet, at the latest in the VAE, after all steps. A pipeline with layers of fluxq takes the dtype
in which these compute:

- a component whose numbers all are numbers of that dtype, such as fp32 copies of a 16-bit file, is cast to it. Nothing
  is lost, and `save_pretrained` writes the numbers of the file;
- any other, such as a VAE that was published in fp32, stays as it is, and its inputs are cast to its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from fluxq.base.console import logger
from fluxq.integrations.whole import refuse_casting
from fluxq.kernels.linear import quant_layers

_CODERS = ("encode", "decode")  # what pipelines call of a VAE
_CODED = ("x", "z", "sample")  # the first argument of those
_HIDDEN = ("sample", "hidden_states", "encoder_hidden_states", "encoder_hidden_states_image", "pooled_projections")


def register() -> None:
    """Make `DiffusionPipeline.from_pretrained` settle one dtype where the caller names none.

    And `DiffusionPipeline.to` refuse a cast before it has cast the components that stand before a quantized one.
    """
    load: Any = DiffusionPipeline.from_pretrained.__func__  # pyright: ignore[reportFunctionMemberAccess]  a classmethod

    @functools.wraps(load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        pipe = load(cls, *args, **kwargs)
        named = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if named is None or (isinstance(named, Mapping) and "default" not in named):  # of some components, by name
            settle(pipe, {*(named or ()), *(name for name, value in kwargs.items() if isinstance(value, nn.Module))})
        return pipe

    DiffusionPipeline.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
    stock_to: Any = DiffusionPipeline.to

    @functools.wraps(stock_to)
    def to(self: DiffusionPipeline, *args: Any, **kwargs: Any) -> DiffusionPipeline:
        dtype = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)), None)
        models = _models(self)
        if dtype is not None and _computes_in(models, dtype):  # diffusers refuses this too, of quantized models
            args = tuple(arg for arg in args if arg is not dtype)
            kwargs = {name: arg for name, arg in kwargs.items() if arg is not dtype}
        elif dtype is not None:
            refuse_casting(models, dtype)
        return stock_to(self, *args, **kwargs) if args or kwargs or dtype is None else self

    DiffusionPipeline.to = to


def _computes_in(models: Mapping[str, nn.Module], dtype: torch.dtype) -> bool:
    """Tell whether quantized models are among these, and nothing in any of them would be cast."""
    layers = {name: dict(quant_layers(model)) for name, model in models.items()}
    others = (
        tensor
        for name, model in models.items()
        for path, tensor in _numbers(model)
        if path.rpartition(".")[0] not in layers[name]
    )
    dtypes = [layer.compute_dtype for each in layers.values() for layer in each.values()]
    return bool(dtypes) and {dtype, *dtypes} == {dtype} and all(tensor.dtype == dtype for tensor in others)


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
        if quant_layers(model) or all(tensor.dtype == dtype for _, tensor in _numbers(model)):
            continue
        if name not in exempt and _is_exact(model, dtype):
            for _, tensor in _numbers(model):
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


def _numbers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield floating parameters and buffers of the files, except those that the model always has in fp32."""
    always = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(part in always for part in name.split(".")):
            yield name, tensor


def _is_exact(model: nn.Module, dtype: torch.dtype) -> bool:
    """Tell whether a cast to `dtype` changes no number; False where weights wait elsewhere, as nobody knows them."""
    tensors = [tensor.detach() for _, tensor in _numbers(model)]
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
        dtype = next(tensor.dtype for _, tensor in _numbers(self.model))
        args = (*(_as(value, dtype) for value in args[:1]), *args[1:])
        kwargs = {name: _as(value, dtype) if name in _CODED else value for name, value in kwargs.items()}
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Casting:
        return _Casting(deepcopy(self.model, memo), self.name)
