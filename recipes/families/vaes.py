"""Describe the VAEs of pipelines, which run once per image."""

from __future__ import annotations

from typing import Any

from fluxq.recipes.family import Family, InputGroup, Published

_LATENTS = "makes the latents of features, or features of the latents: few weights, and every pixel depends on them"


def _image_attention(block: str) -> tuple[InputGroup, ...]:
    return (
        InputGroup("qkv", block, ("to_q", "to_k", "to_v"), joined=True, made_by="norm"),
        InputGroup("attn_out", block, ("to_out.0",), made_by="attention"),
    )


def _config(**config: Any) -> dict[str, Any]:
    return {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "sample_size": 1024,
        **config,
    }


VAES = (
    Family(
        name="kl",
        model="AutoencoderKL",
        kind="vae",
        groups=(
            *_image_attention("encoder.mid_block.attentions.*"),
            *_image_attention("decoder.mid_block.attentions.*"),
        ),
        keep={
            "carries what a block does not change past it: few weights": ("**.conv_shortcut",),
            _LATENTS: ("quant_conv", "post_quant_conv"),
        },
        published=(
            Published("FLUX.1 VAE", _config(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)),
            Published("SDXL VAE", _config(latent_channels=4)),
        ),
    ),
)
