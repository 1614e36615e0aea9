"""fluxq in SGLang-Diffusion, whose diffusers back end (`--backend diffusers`) loads pipelines by `from_pretrained`.

SGLang calls `plug_in` in its workers and in the process that serves HTTP, and puts hooks in place afterwards. Its
native models know a closed list of quantization methods, which no plug-in extends.
"""

from __future__ import annotations

from typing import Any

from fluxq.integrations.engine import SGLANG, after_loading

LOADER = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline.DiffusersPipeline._load_diffusers_pipeline"


def plug_in() -> None:
    """Register the hook; SGLang itself applies it, and logs and goes on where it has no such method."""
    if SGLANG.is_tried():
        from sglang.multimodal_gen.runtime.platforms.plugins import (  # pyright: ignore[reportMissingImports]
            HookType,
            plugin_hook,
        )

        plugin_hook(LOADER, HookType.AFTER)(_after)


def _after(pipe: Any, *_: Any, **__: Any) -> None:
    """Prepare what was loaded, moved, and compiled if that is asked for; SGLang goes on with the same pipeline."""
    after_loading(pipe, SGLANG)
