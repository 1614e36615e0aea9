"""Describe SANA, SANA-1.5 and SANA-Sprint."""

from __future__ import annotations

from fluxq.recipes.families.pixart import SHARED_NAMES
from fluxq.recipes.family import EMBEDDER, FINAL, Family, Published, Workload, feed_forward, self_and_cross
from fluxq.recipes.keymap_rows import NOT_HELD, Rule, rows

_SANA_1_6B = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_layers": 20,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
}

_SANA_0_6B = {
    **_SANA_1_6B,
    "num_attention_heads": 36,
    "num_layers": 28,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}

_QK_NORM = {"qk_norm": "rms_norm_across_heads"}
_SPRINT = "time_embed.guidance_embedder.linear_1"

_ORIGINALS = rows(
    {
        **SHARED_NAMES,
        "x_embedder.proj": "patch_embed.proj",
        "t_block.1": "time_embed.linear",
        "cfg_embedder.mlp.0": _SPRINT,
        "cfg_embedder.mlp.2": "time_embed.guidance_embedder.linear_2",
        "attention_y_norm": "caption_norm",
        **{
            f"blocks.*.{theirs}.{name}_norm": f"transformer_blocks.*.{ours}.norm_{name}"
            for theirs, ours in {"attn": "attn1", "cross_attn": "attn2"}.items()
            for name in ("q", "k")
        },
        "blocks.*.mlp.inverted_conv.conv": "transformer_blocks.*.ff.conv_inverted",
        "blocks.*.mlp.depth_conv.conv": "transformer_blocks.*.ff.conv_depth",
        "blocks.*.mlp.point_conv.conv": "transformer_blocks.*.ff.conv_point",
    },
    Rule("t_embedder.mlp.0", ("time_embed.emb.timestep_embedder.linear_1",), unless=_SPRINT),
    Rule("t_embedder.mlp.2", ("time_embed.emb.timestep_embedder.linear_2",), unless=_SPRINT),
    Rule("t_embedder.mlp.0", ("time_embed.timestep_embedder.linear_1",), beside=_SPRINT),
    Rule("t_embedder.mlp.2", ("time_embed.timestep_embedder.linear_2",), beside=_SPRINT),
    Rule("logvar_linear", ()),
    *NOT_HELD,
)

_BESIDE = ("Gemma-2-2B", "AutoencoderDC")

SANA = Family(
    name="sana",
    model="SanaTransformer2DModel",
    groups=(
        *self_and_cross("transformer_blocks.*", cross_q="outside"),
        # 1x1 convolutions, and between them a depthwise one, which is no Linear. A table modulates all blocks.
        *feed_forward("transformer_blocks.*", "ff.conv_inverted", "ff.conv_point"),
    ),
    keep={
        EMBEDDER: ("patch_embed.proj", "time_embed.**", "caption_projection.**"),
        FINAL: ("proj_out",),
    },
    workload=Workload(
        text=300,
        vae_factor=32,
        normalised=False,
        gated=True,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "linear"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
        convolutions={"transformer_blocks.*.ff.conv_depth": 2},  # an activation
        special=lambda rows, columns, config: {"head": config.get("attention_head_dim", 32)},
    ),
    originals=_ORIGINALS,
    published=(
        Published("SANA-0.6B", _SANA_0_6B, beside=_BESIDE),
        Published("SANA-1.6B", _SANA_1_6B, beside=_BESIDE),
        Published("SANA1.5-1.6B", {**_SANA_1_6B, **_QK_NORM}, beside=_BESIDE),
        Published("SANA1.5-4.8B", {**_SANA_1_6B, **_QK_NORM, "num_layers": 60}, beside=_BESIDE),
        Published("SANA-Sprint-0.6B", {**_SANA_0_6B, **_QK_NORM, "guidance_embeds": True}, beside=_BESIDE),
        Published("SANA-Sprint-1.6B", {**_SANA_1_6B, **_QK_NORM, "guidance_embeds": True}, beside=_BESIDE),
    ),
    hub_ids={
        "SANA-0.6B": ("Efficient-Large-Model/Sana_600M_1024px_diffusers",),
        "SANA-1.6B": ("Efficient-Large-Model/Sana_1600M_1024px_diffusers",),
        "SANA1.5-1.6B": ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",),
        "SANA1.5-4.8B": ("Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",),
        "SANA-Sprint-0.6B": ("Efficient-Large-Model/Sana_Sprint_0.6B_1024px_diffusers",),
        "SANA-Sprint-1.6B": ("Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",),
    },
)
