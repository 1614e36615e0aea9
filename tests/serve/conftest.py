"""A checkpoint that the servers of these tests serve, and the images that its pipeline makes by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

CALL = {"width": 16, "height": 16, "max_sequence_length": 8, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def int8(plain_checkpoint) -> Path:
    return plain_checkpoint("int8")


@pytest.fixture(scope="module")
def alone(int8: Path) -> Callable[..., Image.Image]:
    """alone(prompt, seed, steps) is the image that the checkpoint's pipeline makes by itself."""
    from diffusers import DiffusionPipeline

    from fluxq.eval.images.generate import as_picture, generate_batch

    pipe: Any = DiffusionPipeline.from_pretrained(int8, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)

    def make(prompt: str, seed: int, steps: int, **call: Any) -> Image.Image:
        call = CALL | {"num_inference_steps": steps} | call
        return as_picture(generate_batch(pipe, [(prompt, seed)], call).images[0])

    return make
