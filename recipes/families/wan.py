"""Describe Wan 2.1 and 2.2."""

from __future__ import annotations

from fluxq.recipes.family import EMBEDDER, FINAL, Family, InputGroup, Published, Workload, feed_forward, self_and_cross
from fluxq.recipes.fusable import CrossAttention, FusableBlock, Stream, feed_forward_classes
from fluxq.recipes.keymap_rows import rows

_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

_BLOCKS = (
    FusableBlock(
        block="blocks.*",
        model="WanTransformerBlock",
        attention="attn1",
        attentions={"attn1": "WanAttnProcessor", "attn2": "WanAttnProcessor"},
        per_head=False,
        fp32_modulation=True,
        streams=(
            Stream(
                name="image",
                norm="norm1",
                qkv="attn1.to_q",
                q_norm="attn1.norm_q",
                k_norm="attn1.norm_k",
                out="attn1.to_out.0",
                second_norm="norm3",
                up="ffn.net.0.proj",
                down="ffn.net.2",
                cross=CrossAttention(
                    path="attn2",
                    norm="norm2",
                    q="attn2.to_q",
                    q_norm="attn2.norm_q",
                    kv="attn2.to_k",
                    k_norm="attn2.norm_k",
                    image_kv="attn2.add_k_proj",
                    image_k_norm="attn2.norm_added_k",
                    out="attn2.to_out.0",
                    text_tokens=512,
                ),
            ),
        ),
        passed_over={
            "norm1": "FP32LayerNorm",
            "attn1": "WanAttention",
            "attn1.to_out.1": "Dropout",
            "attn2": "WanAttention",
            "attn2.to_out.1": "Dropout",
            "norm3": "FP32LayerNorm",
            **feed_forward_classes("ffn"),
        },
    ),
)

_ORIGINALS = rows(
    {
        "patch_embedding": "patch_embedding",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
        "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
        "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
        "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
        **{
            f"blocks.*.{theirs}.{name}": f"blocks.*.{ours}.{called}"
            for theirs, ours in {"self_attn": "attn1", "cross_attn": "attn2"}.items()
            for name, called in {
                **{"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"},
                **{"norm_q": "norm_q", "norm_k": "norm_k"},
            }.items()
        },
        "blocks.*.cross_attn.k_img": "blocks.*.attn2.add_k_proj",
        "blocks.*.cross_attn.v_img": "blocks.*.attn2.add_v_proj",
        "blocks.*.cross_attn.norm_k_img": "blocks.*.attn2.norm_added_k",
        "blocks.*.norm3": "blocks.*.norm2",  # the one before the attention to the text; the others have no weights
        "blocks.*.ffn.0": "blocks.*.ffn.net.0.proj",
        "blocks.*.ffn.2": "blocks.*.ffn.net.2",
        "blocks.*.modulation": "blocks.*.scale_shift_table",
        "head.modulation": "scale_shift_table",
        "head.head": "proj_out",
    }
)

_BESIDE = ("UMT5-XXL", "AutoencoderKLWan")

WAN = Family(
    name="wan",
    model="WanTransformer3DModel",
    groups=(
        # Its norms are modulated by a table and by a projection that all blocks share: nothing to fold into.
        *self_and_cross("blocks.*", cross_q="norm"),
        # Image-to-video models attend to the first frame's features too.
        InputGroup("image_kv", "blocks.*", ("attn2.add_k_proj", "attn2.add_v_proj"), joined=True),
        *feed_forward("blocks.*", "ffn.net.0.proj", "ffn.net.2"),
    ),
    keep={
        EMBEDDER: ("condition_embedder.**",),
        FINAL: ("proj_out",),
    },
    self_attention=("blocks.*.attn1",),
    fusable=_BLOCKS,
    workload=Workload(
        size=(480, 832, 81),
        text=512,
        vision=257,
        attention=(
            ("blocks.*.attn1.to_q", "image", "image"),
            ("blocks.*.attn2.to_q", "image", "text"),
            ("blocks.*.attn2.add_k_proj", "image", "vision"),
        ),
    ),
    originals=_ORIGINALS,
    published=(
        Published("Wan2.1-T2V-1.3B", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}, beside=_BESIDE),
        Published("Wan2.1-T2V-14B", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, beside=_BESIDE),
        Published("Wan2.1-I2V-14B", _I2V),
        Published(
            "Wan2.2-T2V-A14B", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, count=2, beside=_BESIDE
        ),
        Published("Wan2.2-I2V-A14B", {"in_channels": 36}, count=2, beside=_BESIDE),
        Published(
            "Wan2.2-TI2V-5B",
            {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
            size={"height": 704, "width": 1280, "frames": 121},
            vae={"scale_factor_spatial": 16},
        ),
    ),
    hub_ids={
        "Wan2.1-T2V-1.3B": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),
        "Wan2.1-T2V-14B": ("Wan-AI/Wan2.1-T2V-14B-Diffusers",),
        "Wan2.1-I2V-14B": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
        "Wan2.2-T2V-A14B": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
        "Wan2.2-I2V-A14B": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
        "Wan2.2-TI2V-5B": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
    },
)
