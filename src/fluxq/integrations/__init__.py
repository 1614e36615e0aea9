"""fluxq inside diffusers, transformers and peft, and in engines that serve.

They learn of it once their modules are imported: `import fluxq` must not load any of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Call the functions of `_REGISTRATIONS`."""
    call_after_import(_REGISTRATIONS)


def call_after_import(functions: Mapping[str, tuple[str, ...]]) -> None:
    """Call functions of modules here, `file:name`, each once the module that is its key is imported, or at once."""
    waiting = dict(functions)
    for name in [name for name in waiting if name in sys.modules]:
        _call(waiting.pop(name))
    sys.meta_path.insert(0, _Finder(waiting))


def _call(functions: tuple[str, ...]) -> None:
    for function in functions:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(f"fluxq.integrations.{module}"), name)()


class _Finder(importlib.abc.MetaPathFinder):
    """Finder of the modules that are waited for, once each; it asks the other finders and wraps their loaders."""

    def __init__(self, waiting: dict[str, tuple[str, ...]]) -> None:
        self.waiting = waiting

    def find_spec(self, fullname, path, target=None) -> ModuleSpec | None:
        functions = self.waiting.pop(fullname, None)
        if functions is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, functions, self.waiting)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, functions: tuple[str, ...], waiting: dict[str, tuple[str, ...]]
    ) -> None:
        self.loader, self.functions, self.waiting = loader, functions, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self.loader.exec_module(module)
            _call(self.functions)
        except BaseException:  # after Ctrl-C, say, the next import makes the module anew
            self.waiting[module.__name__] = self.functions
            raise


# A library's module -> the functions here that tell it of fluxq.
_REGISTRATIONS = {
    "diffusers.models.attention_dispatch": ("whole:register_attention",),
    "diffusers.models.modeling_utils": ("whole:register_with_diffusers",),
    "diffusers.quantizers.auto": ("diffusers:register",),
    "diffusers.pipelines.pipeline_utils": ("diffusers:register_with_pipelines",),
    "diffusers.loaders.lora_pipeline": ("whole:register_with_lora_loader",),
    "peft.tuners.lora.model": ("peft:register_with_peft",),
    "transformers.modeling_utils": ("whole:register_with_transformers",),
    "transformers.quantizers.auto": ("transformers:register",),
}
