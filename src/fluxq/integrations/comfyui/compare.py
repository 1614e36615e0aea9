"""The node *fluxq compare*: two models from the same noise, and how far apart their results are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxq.eval.metrics.fidelity import psnr, sqnr


class FluxqCompare:
    """Sample a 16-bit MODEL and a quantized one from the same noise.

    Returns both LATENTs, an error map as IMAGE (of the images where a VAE is connected, else of the latents), the mean
    of the batch's SQNR of latents in dB, and a text. Without an error the dB are infinite.
    """

    CATEGORY = "fluxq"
    FUNCTION = "compare"
    DESCRIPTION = "Samples both models from the same noise; shows the error of the quantized one."
    RETURN_TYPES = ("LATENT", "LATENT", "IMAGE", "FLOAT", "STRING")
    RETURN_NAMES = ("latent_16bit", "latent_quantized", "error_map", "dB", "text")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        import comfy.samplers  # pyright: ignore[reportMissingImports]

        sampler = comfy.samplers.KSampler
        return {
            "required": {
                "model_16bit": ("MODEL",),
                "model_quantized": ("MODEL",),
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "latent_image": ("LATENT",),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
                "steps": ("INT", {"default": 20, "min": 1, "max": 10000}),
                "cfg": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1}),
                "sampler_name": (sampler.SAMPLERS,),
                "scheduler": (sampler.SCHEDULERS,),
                "denoise": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}),
            },
            "optional": {"vae": ("VAE",)},
        }

    def compare(
        self, model_16bit: Any, model_quantized: Any, latent_image: dict[str, Any], vae: Any = None, **settings: Any
    ) -> tuple[dict[str, Any], dict[str, Any], Tensor, float, str]:
        """Run both; ValueError where they are models of two kinds, or one and the same.

        settings: the other inputs, which are those of ComfyUI's sampler.
        """
        import nodes  # pyright: ignore[reportMissingImports]  ComfyUI's

        _require_comparable(model_16bit, model_quantized)
        ours, theirs = (
            nodes.common_ksampler(model=model, latent=latent_image, **settings)[0]
            for model in (model_16bit, model_quantized)
        )
        a, b = ours["samples"].cpu(), theirs["samples"].cpu()
        ratios = sqnr(list(a), list(b))
        text = f"SQNR of latents {_listed(ratios)} dB"
        if vae is not None:
            a, b = (_images(vae.decode(result["samples"])).cpu() for result in (ours, theirs))
            text += f"; PSNR of images {_listed(psnr(_bytes(a), _bytes(b)))} dB"
        else:
            a, b = (_channels_last(latents.float()) for latents in (a, b))
        error, white = error_map(a, b)
        return ours, theirs, error, ratios.mean().item(), f"{text}; white of the error map is {white:.3g}"


def error_map(a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """Return an image (B, H, W, 3) of the root of the mean squared error over channels, and what white is in it.

    a, b: (B, H, W, C). White is the largest error of the batch; a map without an error is black.
    """
    error = (a.double() - b.double()).square().mean(-1, keepdim=True).sqrt()
    white = error.max().item()
    return (error / (white or 1.0)).float().expand(-1, -1, -1, 3).contiguous(), white


def _require_comparable(a: Any, b: Any) -> None:
    kinds = [type(patcher.model).__name__ for patcher in (a, b)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"fluxq compare: model_16bit is a {kinds[0]}, model_quantized a {kinds[1]}; load one model twice"
        )
    if a.model is b.model and getattr(a, "patches_uuid", None) == getattr(b, "patches_uuid", None):
        raise ValueError("fluxq compare: both inputs are the same model; connect a 16-bit one to model_16bit")


def _channels_last(latents: Tensor) -> Tensor:
    """(B, C, H, W), or (B, C, F, H, W) whose frames become images -> (B·F, H, W, C)."""
    return _images(latents.movedim(1, -1))


def _images(images: Tensor) -> Tensor:
    """(B, H, W, C), or (B, F, H, W, C) -> (B·F, H, W, C)."""
    return images.flatten(0, 1) if images.ndim == 5 else images


def _bytes(images: Tensor) -> list[Tensor]:
    return [image.movedim(-1, 0) for image in (images.float().clamp(0, 1) * 255).round().to(torch.uint8)]


def _listed(ratios: Tensor) -> str:
    return ", ".join(f"{ratio:.1f}" for ratio in ratios.tolist())
