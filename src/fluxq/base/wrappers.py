"""Modules and their paths without the wrappers that torch.compile and adapters put around them."""

from __future__ import annotations

from typing import Any


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile put a wrapper around, or the module itself."""
    return getattr(model, "_orig_mod", model)


def uncompiled_path(path: str) -> str:
    """Return a module's path as if nothing were compiled."""
    return path.replace("_orig_mod.", "").removesuffix("._orig_mod")


def path_in_file(path: str) -> str:
    """Return a layer's path as its weights are named in a file: without an adapter's wrapper either."""
    return uncompiled_path(path.removesuffix(".base_layer"))
