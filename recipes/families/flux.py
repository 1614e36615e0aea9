"""Describe FLUX.1."""

from __future__ import annotations

from dataclasses import replace

from fluxq.recipes.family import EMBEDDER, FINAL, Family, Published, Workload, both_at_once, image_and_text
from fluxq.recipes.fusable import HEADS, IMAGE, NORM, TEXT, TEXT_HEADS, FusableBlock, Stream, feed_forward_classes
from fluxq.recipes.keymap_rows import BFL_ENDS, BFL_SINGLE, SWAPPED_FINAL, bfl_double, rows

_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="FluxTransformerBlock",
        attentions={"attn": "FluxAttnProcessor"},
        contiguous=True,
        streams=(replace(TEXT, clipped=True), IMAGE),
        passed_over={
            "norm1": "AdaLayerNormZero",
            "norm1.norm": NORM,
            "norm1_context": "AdaLayerNormZero",
            "norm1_context.norm": NORM,
            "attn": "FluxAttention",
            **HEADS,
            **TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "norm2": NORM,
            "norm2_context": NORM,
            **feed_forward_classes("ff"),
            **feed_forward_classes("ff_context"),
        },
    ),
    FusableBlock(
        block="single_transformer_blocks.*",
        model="FluxSingleTransformerBlock",
        attentions={"attn": "FluxAttnProcessor"},
        streams=(
            Stream(
                name="both",
                modulation=("norm.silu", "norm.linear"),
                norm="norm.norm",
                qkv="attn.to_q",
                down="proj_out",
                clipped=True,
            ),
        ),
        passed_over={
            "norm": "AdaLayerNormZeroSingle",
            "norm.norm": NORM,
            "attn": "FluxAttention",
            **HEADS,
            "act_mlp": "GELU",
        },
    ),
)

_ORIGINALS = rows(
    {
        **BFL_ENDS,
        "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        **bfl_double("net.0.proj", "net.2"),
        "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
        "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
        **BFL_SINGLE,
        "single_blocks.*.modulation.lin": "single_transformer_blocks.*.norm.linear",
    },
    SWAPPED_FINAL,
)

_BESIDE = ("CLIP-L", "T5-XXL", "FLUX.1 VAE")

FLUX = Family(
    name="flux",
    model="FluxTransformer2DModel",
    groups=(
        *image_and_text("transformer_blocks.*", modulation=("norm1.linear", "norm1_context.linear")),
        *both_at_once("single_transformer_blocks.*", modulation="norm.linear"),
    ),
    keep={
        EMBEDDER: ("x_embedder", "context_embedder", "time_text_embed.**"),
        FINAL: ("norm_out.linear", "proj_out"),
    },
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    fusable=_BLOCKS,
    workload=Workload(
        text=512,
        patch=2,  # the pipeline packs 2 x 2 latents, the configuration says 1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
    ),
    originals=_ORIGINALS,
    embedded_timestep=lambda t, dtype: t.to(dtype) / 1000 * 1000,
    published=(
        Published(
            "FLUX.1-dev", {"guidance_embeds": True}, also=("FLUX.1-Kontext-dev", "FLUX.1-Krea-dev"), beside=_BESIDE
        ),
        Published("FLUX.1-schnell", {"guidance_embeds": False}, beside=_BESIDE),
        Published("FLUX.1-Fill-dev", {"guidance_embeds": True, "in_channels": 384, "out_channels": 64}, beside=_BESIDE),
        Published(
            "FLUX.1-Depth-dev",
            {"guidance_embeds": True, "in_channels": 128, "out_channels": 64},
            also=("FLUX.1-Canny-dev",),
            beside=_BESIDE,
        ),
    ),
    hub_owner="black-forest-labs",
)
