"""Describe PixArt-alpha and PixArt-Sigma."""

from __future__ import annotations

from fluxq.recipes.family import EMBEDDER, FF, FINAL, SHARED, Family, Published, Workload, feed_forward, self_and_cross
from fluxq.recipes.keymap_rows import NOT_HELD, TO_QKV, Table, below, rows

SHARED_NAMES: Table = {
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "blocks.*.scale_shift_table": "transformer_blocks.*.scale_shift_table",
    "blocks.*.attn.qkv": below("transformer_blocks.*.attn1", *TO_QKV),
    "blocks.*.attn.proj": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.cross_attn.q_linear": "transformer_blocks.*.attn2.to_q",
    "blocks.*.cross_attn.kv_linear": below("transformer_blocks.*.attn2", "to_k", "to_v"),
    "blocks.*.cross_attn.proj": "transformer_blocks.*.attn2.to_out.0",
    "final_layer.linear": "proj_out",
    "final_layer.scale_shift_table": "scale_shift_table",
}

_ORIGINALS = rows(
    {
        **SHARED_NAMES,
        "x_embedder.proj": "pos_embed.proj",
        "t_block.1": "adaln_single.linear",
        **{
            f"{theirs}.mlp.{index}": f"adaln_single.emb.{ours}.linear_{number}"
            for theirs, ours in {
                **{"t_embedder": "timestep_embedder", "csize_embedder": "resolution_embedder"},
                "ar_embedder": "aspect_ratio_embedder",
            }.items()
            for index, number in ((0, 1), (2, 2))
        },
        "blocks.*.mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "blocks.*.mlp.fc2": "transformer_blocks.*.ff.net.2",
    },
    *NOT_HELD,
)

PIXART = Family(
    name="pixart",
    model="PixArtTransformer2DModel",
    groups=(
        # One Linear and a table modulate all blocks: nothing to fold into.
        *self_and_cross("transformer_blocks.*", cross_q="outside"),  # the residual stream as it is
        *feed_forward("transformer_blocks.*", *FF),
    ),
    keep={
        EMBEDDER: ("adaln_single.emb.**", "caption_projection.**"),
        SHARED: ("adaln_single.linear",),
        FINAL: ("proj_out",),
    },
    workload=Workload(
        sized=True,
        text=300,  # of PixArt-Sigma; 120 of PixArt-alpha
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    originals=_ORIGINALS,
    published=(
        Published("PixArt-Sigma-XL-2", {"sample_size": 128, "caption_channels": 4096}, beside=("T5-XXL", "SDXL VAE")),
    ),
    hub_ids={
        "PixArt-Sigma-XL-2": ("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",),
    },
)
