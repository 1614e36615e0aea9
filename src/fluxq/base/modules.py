"""Modules: paths without the wrappers of torch.compile and adapters, and a tensor put in the place of another."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile put a wrapper around, or the module itself."""
    return getattr(model, "_orig_mod", model)


def uncompiled_path(path: str) -> str:
    """Return a module's path as if nothing were compiled."""
    return path.replace("_orig_mod.", "")


def path_in_file(path: str) -> str:
    """Return a layer's path as its weights are named in a file: without an adapter's wrapper either."""
    return uncompiled_path(f"{path}.").replace(".base_layer.", ".").removesuffix(".")


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer of a module; no gradient is kept for it.

    Not by `register_parameter`: while another thread loads a model, accelerate has its own in that place, and two that
    load at once leave it there, so that every parameter would end on the meta device.
    """
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor
