"""Describe Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from dataclasses import replace

from fluxq.recipes.family import EMBEDDER, FINAL, Family, Published, Workload, attended, image_and_text, normed
from fluxq.recipes.fusable import IMAGE, NORM, TEXT, FusableBlock, OwnAttention, feed_forward_classes
from fluxq.recipes.keymap_rows import ADDED_QKV, SWAPPED_FINAL, TO_QKV, Rule, below, rows

_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}

_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="JointTransformerBlock",
        attentions={"attn": "JointAttnProcessor2_0", "attn2": "JointAttnProcessor2_0"},
        rotary=False,
        dispatched=False,
        streams=(
            replace(
                IMAGE,
                own_attention=OwnAttention("attn2", "attn2.to_q", "attn2.norm_q", "attn2.norm_k", "attn2.to_out.0"),
            ),
            TEXT,
        ),
        passed_over={
            "norm1": "AdaLayerNormZero|SD35AdaLayerNormZeroX",
            "norm1.norm": NORM,
            "norm1_context": "AdaLayerNormZero|AdaLayerNormContinuous",
            "norm1_context.norm": NORM,
            "attn": "Attention",
            "attn.norm_q": "RMSNorm|None",
            "attn.norm_k": "RMSNorm|None",
            "attn.norm_added_q": "RMSNorm|None",
            "attn.norm_added_k": "RMSNorm|None",
            "attn.to_out.1": "Dropout",
            "attn2": "Attention|None",
            "attn2.norm_q": "RMSNorm|None",
            "attn2.norm_k": "RMSNorm|None",
            "attn2.to_out.1": "Dropout|None",
            "norm2": NORM,
            "norm2_context": f"{NORM}|None",
            **feed_forward_classes("ff"),
            **feed_forward_classes("ff_context", "|None"),
        },
    ),
)

_LAST = "transformer_blocks.*.attn.to_add_out"  # in every block but the last, whose text goes nowhere
_MODULATION = ("joint_blocks.*.context_block.adaLN_modulation.1", ("transformer_blocks.*.norm1_context.linear",))

_ORIGINALS = rows(
    {
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "joint_blocks.*.x_block.attn.qkv": below("transformer_blocks.*.attn", *TO_QKV),
        "joint_blocks.*.x_block.attn.ln_q": "transformer_blocks.*.attn.norm_q",
        "joint_blocks.*.x_block.attn.ln_k": "transformer_blocks.*.attn.norm_k",
        "joint_blocks.*.x_block.attn.proj": "transformer_blocks.*.attn.to_out.0",
        "joint_blocks.*.x_block.attn2.qkv": below("transformer_blocks.*.attn2", *TO_QKV),
        "joint_blocks.*.x_block.attn2.ln_q": "transformer_blocks.*.attn2.norm_q",
        "joint_blocks.*.x_block.attn2.ln_k": "transformer_blocks.*.attn2.norm_k",
        "joint_blocks.*.x_block.attn2.proj": "transformer_blocks.*.attn2.to_out.0",
        "joint_blocks.*.x_block.adaLN_modulation.1": "transformer_blocks.*.norm1.linear",
        "joint_blocks.*.x_block.mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "joint_blocks.*.x_block.mlp.fc2": "transformer_blocks.*.ff.net.2",
        "joint_blocks.*.context_block.attn.qkv": below("transformer_blocks.*.attn", *ADDED_QKV),
        "joint_blocks.*.context_block.attn.ln_q": "transformer_blocks.*.attn.norm_added_q",
        "joint_blocks.*.context_block.attn.ln_k": "transformer_blocks.*.attn.norm_added_k",
        "joint_blocks.*.context_block.attn.proj": _LAST,
        "joint_blocks.*.context_block.mlp.fc1": "transformer_blocks.*.ff_context.net.0.proj",
        "joint_blocks.*.context_block.mlp.fc2": "transformer_blocks.*.ff_context.net.2",
        "final_layer.linear": "proj_out",
    },
    Rule(*_MODULATION, beside=_LAST),
    Rule(*_MODULATION, "halves swapped", unless=_LAST),
    SWAPPED_FINAL,
)

_BESIDE = ("CLIP-L with projection", "CLIP-G with projection", "T5-XXL", "FLUX.1 VAE")

SD3 = Family(
    name="sd3",
    model="SD3Transformer2DModel",
    groups=(
        *image_and_text("transformer_blocks.*", modulation=("norm1.linear", "norm1_context.linear")),
        # A second attention, over the image alone, in the first blocks of SD3.5 medium.
        normed("qkv", "transformer_blocks.*", ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "norm1.linear", 6),
        attended("attn_out", "transformer_blocks.*", "attn2.to_out.0", "attn2.to_v"),
    ),
    keep={
        EMBEDDER: ("context_embedder", "time_text_embed.**"),
        FINAL: ("norm_out.linear", "proj_out"),
    },
    fusable=_BLOCKS,
    workload=Workload(
        sized=True,
        text=256,
        extra_text=77,
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("transformer_blocks.*.attn2.to_q", "image", "image"),
        ),
    ),
    originals=_ORIGINALS,
    embedded_timestep=lambda t, dtype: t.to(dtype),
    published=(
        Published("Stable Diffusion 3 medium", {**_MEDIUM, "pos_embed_max_size": 192}, beside=_BESIDE),
        Published(
            "Stable Diffusion 3.5 medium",
            {**_MEDIUM, "pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": [*range(13)]},
            beside=_BESIDE,
        ),
        Published(
            "Stable Diffusion 3.5 large",
            {
                "num_layers": 38,
                "num_attention_heads": 38,
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "qk_norm": "rms_norm",
            },
            also=("Stable Diffusion 3.5 large turbo",),
            beside=_BESIDE,
        ),
    ),
    hub_ids={
        "Stable Diffusion 3 medium": ("stabilityai/stable-diffusion-3-medium-diffusers",),
        "Stable Diffusion 3.5 medium": ("stabilityai/stable-diffusion-3.5-medium",),
        "Stable Diffusion 3.5 large": ("stabilityai/stable-diffusion-3.5-large",),
        "Stable Diffusion 3.5 large turbo": ("stabilityai/stable-diffusion-3.5-large-turbo",),
    },
)
