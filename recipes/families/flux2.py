"""Describe FLUX.2."""

from __future__ import annotations

from dataclasses import replace

from fluxq.recipes.family import (
    EMBEDDER,
    FINAL,
    SHARED,
    Family,
    Producer,
    Published,
    Workload,
    both_at_once,
    image_and_text,
)
from fluxq.recipes.fusable import HEADS, IMAGE, NORM, TEXT, TEXT_HEADS, FusableBlock, Stream
from fluxq.recipes.keymap_rows import BFL_ENDS, BFL_SINGLE, SWAPPED_FINAL, bfl_double, rows

_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="Flux2TransformerBlock",
        attentions={"attn": "Flux2AttnProcessor"},
        streams=(
            replace(
                TEXT,
                modulation=(),
                norm="norm1_context",
                up="ff_context.linear_in",
                act="silu_mul",
                down="ff_context.linear_out",
                clipped=True,
            ),
            replace(IMAGE, modulation=(), norm="norm1", up="ff.linear_in", act="silu_mul", down="ff.linear_out"),
        ),
        passed_over={
            "norm1": NORM,
            "norm1_context": NORM,
            "attn": "Flux2Attention",
            **HEADS,
            **TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "norm2": NORM,
            "norm2_context": NORM,
            "ff": "Flux2FeedForward",
            "ff.act_fn": "Flux2SwiGLU",
            "ff.act_fn.gate_fn": "SiLU",
            "ff_context": "Flux2FeedForward",
            "ff_context.act_fn": "Flux2SwiGLU",
            "ff_context.act_fn.gate_fn": "SiLU",
        },
    ),
    FusableBlock(
        block="single_transformer_blocks.*",
        model="Flux2SingleTransformerBlock",
        attentions={"attn": "Flux2ParallelSelfAttnProcessor"},
        streams=(
            Stream(
                name="both",
                norm="norm",
                qkv="attn.to_qkv_mlp_proj",
                act="silu_mul",
                down="attn.to_out",
                clipped=True,
            ),
        ),
        passed_over={
            "norm": NORM,
            "attn": "Flux2ParallelSelfAttention",
            **HEADS,
            "attn.mlp_act_fn": "Flux2SwiGLU",
            "attn.mlp_act_fn.gate_fn": "SiLU",
        },
    ),
)

_ORIGINALS = rows(
    {
        **BFL_ENDS,
        "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
        "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
        "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
        "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
        "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
        "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
        "single_stream_modulation.lin": "single_stream_modulation.linear",
        **bfl_double("linear_in", "linear_out"),
        **BFL_SINGLE,
        "single_blocks.*.linear1": "single_transformer_blocks.*.attn.to_qkv_mlp_proj",
        "single_blocks.*.linear2": "single_transformer_blocks.*.attn.to_out",
    },
    SWAPPED_FINAL,
)

FLUX2 = Family(
    name="flux2",
    model="Flux2Transformer2DModel",
    groups=(
        # Three Linears modulate all blocks: nothing to fold into. Gate and up are one Linear.
        *image_and_text(
            "transformer_blocks.*",
            ("ff.linear_in", "ff.linear_out"),
            ("ff_context.linear_in", "ff_context.linear_out"),
            gate_first=True,
        ),
        # So are q, k, v, gate and up here.
        *both_at_once(
            "single_transformer_blocks.*",
            ("attn.to_qkv_mlp_proj",),
            "attn.to_out",
            producers=(
                Producer("attn.to_qkv_mlp_proj", chunk=2),
                Producer("attn.to_qkv_mlp_proj", chunk=-1, shifts=False, segment=1),
            ),
        ),
    ),
    keep={
        EMBEDDER: ("x_embedder", "context_embedder", "time_guidance_embed.**"),
        SHARED: (
            "double_stream_modulation_img.linear",
            "double_stream_modulation_txt.linear",
            "single_stream_modulation.linear",
        ),
        FINAL: ("norm_out.linear", "proj_out"),
    },
    self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    fusable=_BLOCKS,
    workload=Workload(
        text=512,
        patch=2,  # as for FLUX.1
        gated=True,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_out", "both", "both"),
        ),
    ),
    originals=_ORIGINALS,
    published=(
        Published(
            "FLUX.2-dev",
            {"num_layers": 8, "num_single_layers": 48, "num_attention_heads": 48},
            beside=("Mistral-Small-3.2-24B", "AutoencoderKLFlux2"),
        ),
        Published(
            "FLUX.2-klein-4B",
            {
                "num_layers": 5,
                "num_single_layers": 20,
                "num_attention_heads": 24,
                "joint_attention_dim": 7680,
                "guidance_embeds": False,
            },
            beside=("Qwen3-4B for causal LM", "AutoencoderKLFlux2"),
        ),
        Published(
            "FLUX.2-klein-9B",
            {
                "num_layers": 8,
                "num_single_layers": 24,
                "num_attention_heads": 32,
                "joint_attention_dim": 12288,
                "guidance_embeds": False,
            },
            beside=("Qwen3-8B for causal LM", "AutoencoderKLFlux2"),
        ),
    ),
    hub_owner="black-forest-labs",
)
