"""Gives the ops of fluxq their GPU kernels, where there is a GPU and a Triton."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from fluxq.base.console import logger


def register() -> None:
    """Called once the ops are there; without a GPU nothing of Triton is loaded."""
    if not torch.cuda.is_available():
        return
    if find_spec("triton") is None:
        logger.warning("no Triton on this system: quantized layers run the torch reference, exact but slow")
        return
    from fluxq.kernels.launch import register as register_kernels

    register_kernels()
