"""`save_pretrained` of a quantized model also writes the digest of its tensors, which `fluxq verify` compares."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register_with_diffusers() -> None:
    """Wrap `save_pretrained` of every model of diffusers."""
    from diffusers.models.modeling_utils import ModelMixin

    ModelMixin.save_pretrained = _with_digest(ModelMixin.save_pretrained)


def register_with_transformers() -> None:
    """Wrap `save_pretrained` of every model of transformers."""
    from transformers.modeling_utils import PreTrainedModel

    PreTrainedModel.save_pretrained = _with_digest(PreTrainedModel.save_pretrained)


def _with_digest(save: Callable[..., Any]) -> Callable[..., Any]:
    """A variant gets none, which `verify` does not read; nor does what `push_to_hub=True` uploads before this."""

    @functools.wraps(save)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        result = save(self, save_directory, *args, **kwargs)
        said = inspect.signature(save).bind(self, save_directory, *args, **kwargs).arguments
        if getattr(self, "hf_quantizer", None) is not None and said.get("is_main_process", True):
            if said.get("variant") is None:
                from fluxq.quantize.digests import write_own_digest

                write_own_digest(Path(save_directory))
        return result

    return save_pretrained
