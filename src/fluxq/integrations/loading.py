"""Code that the loaders of diffusers and transformers share.

A stored checkpoint: QuantLinears are put in place on the meta device, and every tensor that comes for one must have
the dtype and shape of its placeholder. Nothing here makes a checkpoint; on_the_fly.py rounds 16-bit weights while they
are loaded, and only a configuration with a recipe imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fluxq.base.linears import is_linear, linear_size
from fluxq.integrations.whole import guard_fusing
from fluxq.kernels.linear import BRANCHES, SCALE_NAMES, QuantLinear, placeholder, quant_layers
from fluxq.recipes.formats import Scheme


def put_layers(model: nn.Module, schemes: Mapping[str, Scheme], dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace Linears by QuantLinears on the meta device.

    Returns the full name of every tensor that no loader may cast, with a meta tensor of its stored dtype and shape.
    Raises ValueError for a name that is no Linear of this model.
    """
    exact: dict[str, Tensor] = {}
    for name, scheme in schemes.items():
        old = submodule(model, name)
        if old is None or not is_linear(old):
            raise ValueError(f"checkpoint quantizes {name!r}, which is no Linear of this {type(model).__name__}")
        scheme.weights.check_shape(*linear_size(old), name)
        new = placeholder(old, scheme, dtype)
        exact.update({f"{name}.{tensor}": new.get_parameter(tensor).data for tensor in new.stored_names})
        model.set_submodule(name, new)
    guard_fusing(model)
    return exact


def check_tensor(name: str, dtype: torch.dtype, shape: Iterable[int], expected: Tensor) -> None:
    """Raise ValueError unless a file's tensor has the dtype and shape that config.json implies."""
    if dtype != expected.dtype:
        raise ValueError(f"{name}: {dtype} in the file, {expected.dtype} by config.json")
    if tuple(shape) != tuple(expected.shape):
        raise ValueError(f"{name}: shape {tuple(shape)} in the file, {tuple(expected.shape)} by config.json")


def lacking(name: str) -> ValueError:
    """Return the error for a tensor that the weight files lack."""
    return ValueError(f"the weight files lack {name!r}, which config.json names: copy them again")


def refuse_unannounced(dtypes: Mapping[str, torch.dtype], model: nn.Module) -> None:
    """Raise ValueError for quantized tensors of files that would be left over, or be taken for 16-bit weights.

    dtypes: name in the model -> dtype in the file. Other names that no module takes are the library's to judge.
    """
    strays = set()
    for name, dtype in dtypes.items():
        path, _, part = name.rpartition(".")
        layer = submodule(model, path)
        if isinstance(layer, QuantLinear):
            if part in _PARTS and part not in layer._parameters:
                strays.add(name)
        elif layer is not None and is_linear(layer):
            if part in _PARTS or (part == "weight" and dtype in _CODES):
                strays.add(name)
    if strays:
        named = ", ".join(sorted(strays)[:3]) + (f" and {len(strays) - 3} more" if len(strays) > 3 else "")
        raise ValueError(
            f"the weight files hold quantized tensors that config.json does not announce: {named}. The two are not of "
            "one checkpoint: copy config.json and the weights again, from the same place"
        )


def require_present(model: nn.Module, device_map: object = None) -> None:
    """Raise ValueError for tensors that loading left on the meta device, unless a device map keeps some elsewhere.

    device_map: as the caller gave it; the library's own is on the model if it has several devices.
    """
    maps = (getattr(model, "hf_device_map", None), device_map if isinstance(device_map, dict) else {"": device_map})
    places = [{str(place) for place in (places or {}).values()} for places in maps]
    if any(len(devices) > 1 or devices & {"disk", "meta"} for devices in places):
        return
    absent = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if absent:
        named = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ValueError(
            f"loading left tensors without values, on the meta device: {named}. Something else made modules on that "
            "device meanwhile (accelerate.init_empty_weights, torch.device): load the model again, outside of it"
        )


def set_tensor(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a layer a parameter that needs no gradient.

    Not by `register_parameter`: while another thread loads a model, accelerate has its own in that place, and two that
    load at once leave it there, so that every parameter would end on the meta device.
    """
    layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def with_stored_tensors(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state dict with stored tensors of layers that were prepared for a GPU."""
    tensors = dict(state_dict)
    for name, layer in quant_layers(model):
        if layer.prepared is not None:
            from fluxq.runtime.layout import as_stored  # only here: nothing is prepared while it is loaded

            for parameter, _ in layer.named_parameters(recurse=False):
                del tensors[f"{name}.{parameter}"]
            tensors.update({f"{name}.{part}": tensor for part, tensor in as_stored(layer).items()})
    return tensors


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace every QuantLinear by the plain Linear that it stands for."""
    layers = quant_layers(model)
    if any(name.endswith(".base_layer") for name, _ in layers):
        raise ValueError("adapters are attached to this model: unload them (unload_lora_weights) before dequantizing")
    for name, layer in layers:
        model.set_submodule(name, layer.dequantized(dtype))


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module called `name`, None if there is none."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


_PARTS = (*SCALE_NAMES, *BRANCHES)
_CODES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
