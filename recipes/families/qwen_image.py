"""Describe Qwen-Image."""

from __future__ import annotations

from dataclasses import replace

from fluxq.recipes.family import EMBEDDER, FINAL, Family, Published, Workload, image_and_text
from fluxq.recipes.fusable import HEADS, IMAGE, NORM, TEXT, TEXT_HEADS, FusableBlock, feed_forward_classes
from fluxq.recipes.keymap_rows import SAME_NAMES

_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="QwenImageTransformerBlock",
        attentions={"attn": "QwenDoubleStreamAttnProcessor2_0"},
        contiguous=True,
        streams=(
            replace(
                TEXT,
                modulation=("txt_mod",),
                norm="txt_norm1",
                second_norm="txt_norm2",
                up="txt_mlp.net.0.proj",
                down="txt_mlp.net.2",
                clipped=True,
            ),
            replace(
                IMAGE,
                modulation=("img_mod",),
                norm="img_norm1",
                second_norm="img_norm2",
                up="img_mlp.net.0.proj",
                down="img_mlp.net.2",
                clipped=True,
            ),
        ),
        passed_over={
            "img_norm1": NORM,
            "txt_norm1": NORM,
            "attn": "Attention",
            **HEADS,
            **TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "img_norm2": NORM,
            "txt_norm2": NORM,
            **feed_forward_classes("img_mlp"),
            **feed_forward_classes("txt_mlp"),
        },
    ),
)


QWEN_IMAGE = Family(
    name="qwen_image",
    model="QwenImageTransformer2DModel",
    groups=image_and_text(
        "transformer_blocks.*",
        ("img_mlp.net.0.proj", "img_mlp.net.2"),
        ("txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ("img_mod.1", "txt_mod.1"),
    ),
    keep={
        EMBEDDER: ("img_in", "txt_in", "time_text_embed.**"),
        FINAL: ("norm_out.linear", "proj_out"),
    },
    self_attention=("transformer_blocks.*.attn",),
    fusable=_BLOCKS,
    workload=Workload(text=512, attention=(("transformer_blocks.*.attn.to_q", "both", "both"),)),
    originals=SAME_NAMES,
    embedded_timestep=lambda t, dtype: t.to(dtype) / 1000,
    published=(
        Published(
            "Qwen-Image",
            {"num_layers": 60},
            also=("Qwen-Image-Edit", "Qwen-Image-Edit-2509"),
            beside=("Qwen2.5-VL-7B", "AutoencoderKLQwenImage"),
        ),
        Published(
            "Qwen-Image-Edit-2511",
            {"num_layers": 60, "zero_cond_t": True},
            beside=("Qwen2.5-VL-7B", "AutoencoderKLQwenImage"),
        ),
    ),
    hub_owner="Qwen",
)
