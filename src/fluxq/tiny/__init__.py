"""The embedded FLUX pipeline: a stock `FluxPipeline` of 1.9 million weights that ships with the package.

    pipe = fluxq.tiny.load()
    images = pipe(list(fluxq.tiny.PROMPTS[:4]), **fluxq.tiny.CALL_KWARGS).images

It draws one object on one background, 16 x 16 pixels, from captions such as "a red three on black". With it
come the networks that judge its images and images that no training saw. `python -m benchmarks.tiny.train` made
all of it.
"""

# pyright: reportPrivateImportUsage=false
# diffusers and transformers fill their top level lazily, which a type checker takes for private names.

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import FluxPipeline
    from torch import Tensor

    from fluxq.tiny.networks import FeatureNetwork

    PROMPTS: tuple[str, ...]
    CALL_KWARGS: dict[str, Any]

__all__ = ["CALL_KWARGS", "PROMPTS", "clip_path", "feature_network", "held_out", "load", "path"]

_HERE = Path(__file__).resolve().parent


def path() -> Path:
    """Return the pipeline's folder, as `FluxPipeline.from_pretrained` reads it."""
    return _HERE / "pipeline"


def load(dtype: str = "bfloat16", folder: Path | None = None) -> FluxPipeline:
    """Load the pipeline on the CPU, without progress bars.

    dtype: name of a floating torch dtype; the weights are stored in bfloat16.
    folder: another pipeline written by `benchmarks.tiny.train`.
    """
    import torch
    from diffusers import FluxPipeline

    from fluxq.base.console import without_loading_bars

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype must be the name of a floating torch dtype such as 'bfloat16', got {dtype!r}")
    with without_loading_bars():
        pipe = FluxPipeline.from_pretrained(folder or path(), dtype=kind, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def feature_network(file: Path | None = None) -> FeatureNetwork:
    """Load the trained classifier, frozen: uint8 images (B, 3, 16, 16) to features (B, 64)."""
    from safetensors.torch import load_file

    from fluxq.tiny.networks import FeatureNetwork

    network = FeatureNetwork()
    network.load_state_dict(load_file(file or _HERE / "features.safetensors"))
    return network.eval().requires_grad_(False)


def clip_path() -> Path:
    """Return the folder of the open_clip model, which needs no network access.

    Load it with `open_clip.create_model_and_transforms(f"local-dir:{clip_path()}")` and
    `open_clip.get_tokenizer(f"local-dir:{clip_path()}")`. The tokenizer is a Hugging Face one, read from
    the folder.
    """
    return _HERE / "clip"


def held_out(file: Path | None = None) -> tuple[Tensor, list[str]]:
    """Load 1,024 images that no training saw, uint8 (1024, 3, 16, 16), and their captions.

    The digits come from source images kept apart; captions, shapes and colours are those of training.
    """
    from safetensors import safe_open

    with safe_open(file or _HERE / "held_out.safetensors", framework="pt") as stored:
        return stored.get_tensor("images"), json.loads(stored.metadata()["captions"])


def __getattr__(name: str) -> Any:
    if name == "PROMPTS":  # every caption of the grammar, in a fixed shuffled order
        return tuple((path() / "fluxq_prompts.txt").read_text(encoding="utf-8").splitlines())
    if name == "CALL_KWARGS":  # the arguments of an ordinary call: size, text tokens, steps
        return json.loads((path() / "fluxq_generation.json").read_text(encoding="utf-8"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
