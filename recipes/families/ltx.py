"""Describe LTX-Video."""

from __future__ import annotations

from fluxq.recipes.family import EMBEDDER, FF, FINAL, SHARED, Family, Published, Workload, feed_forward, self_and_cross
from fluxq.recipes.keymap_rows import TO_QKV, rows

_ORIGINALS = rows(
    {
        "patchify_proj": "proj_in",
        "adaln_single.**": "time_embed.**",
        "caption_projection.**": "caption_projection.**",
        **{
            f"transformer_blocks.*.{attn}.{name}": f"transformer_blocks.*.{attn}.{called}"
            for attn in ("attn1", "attn2")
            for name, called in {
                **{name: name for name in (*TO_QKV, "to_out.0")},
                **{"q_norm": "norm_q", "k_norm": "norm_k"},
            }.items()
        },
        "transformer_blocks.*.ff.**": "transformer_blocks.*.ff.**",
        "transformer_blocks.*.scale_shift_table": "transformer_blocks.*.scale_shift_table",
        "scale_shift_table": "scale_shift_table",
        "proj_out": "proj_out",
    }
)

_BESIDE = ("T5-XXL", "AutoencoderKLLTXVideo")

LTX = Family(
    name="ltx",
    model="LTXVideoTransformer3DModel",
    groups=(
        # As PixArt.
        *self_and_cross("transformer_blocks.*", cross_q="outside"),
        *feed_forward("transformer_blocks.*", *FF),
    ),
    keep={
        EMBEDDER: ("proj_in", "time_embed.emb.**", "caption_projection.**"),
        SHARED: ("time_embed.linear",),
        FINAL: ("proj_out",),
    },
    self_attention=("transformer_blocks.*.attn1",),
    workload=Workload(
        size=(512, 704, 161),
        text=128,
        frames_per_latent=8,
        vae_factor=32,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    originals=_ORIGINALS,
    published=(
        Published(
            "LTX-Video-2B", {"num_layers": 28, "attention_head_dim": 64, "cross_attention_dim": 2048}, beside=_BESIDE
        ),
        Published(
            "LTX-Video-13B", {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}, beside=_BESIDE
        ),
    ),
    hub_ids={
        "LTX-Video-2B": ("Lightricks/LTX-Video",),
    },
)
