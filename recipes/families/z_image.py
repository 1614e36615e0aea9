"""Describe Z-Image."""

from __future__ import annotations

from fluxq.recipes.family import EMBEDDER, FINAL, Family, InputGroup, Published, Workload, attended, gated, normed
from fluxq.recipes.keymap_rows import TO_QKV, Rule, below, rows


def _block(block: str) -> tuple[InputGroup, ...]:
    return (
        normed("qkv", block, tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v"))),
        attended("attn_out", block, "attention.to_out.0", "attention.to_v"),
        normed("ff_up", block, ("feed_forward.w1", "feed_forward.w3")),
        gated("ff_down", block, "feed_forward.w2", "feed_forward.w3"),
    )


_ORIGINALS = rows(
    {
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        **{f"{name}.**": f"{name}.**" for name in ("t_embedder", "cap_embedder", "siglip_embedder")},
        **{name: name for name in ("x_pad_token", "cap_pad_token", "siglip_pad_token")},
        "*.*.attention.qkv": below("*.*.attention", *TO_QKV),
        "*.*.attention.out": "*.*.attention.to_out.0",
        "*.*.attention.q_norm": "*.*.attention.norm_q",
        "*.*.attention.k_norm": "*.*.attention.norm_k",
        **{f"*.*.feed_forward.{name}": f"*.*.feed_forward.{name}" for name in ("w1", "w2", "w3")},
        **{f"*.*.{name}": f"*.*.{name}" for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")},
        "*.*.adaLN_modulation.0": "*.*.adaLN_modulation.0",
    },
    Rule("norm_final.weight", ()),  # nothing reads it
)

Z_IMAGE = Family(
    name="z_image",
    model="ZImageTransformer2DModel",
    groups=(
        *_block("layers.*"),
        *_block("noise_refiner.*"),
        *_block("context_refiner.*"),
        *_block("siglip_refiner.*"),  # of Z-Image-Omni
        # Its norms are scaled but not shifted, which leaves no place for a mean: nothing is folded.
        InputGroup("modulation", "layers.*", ("adaLN_modulation.0",)),
        InputGroup("modulation", "noise_refiner.*", ("adaLN_modulation.0",)),
    ),
    keep={
        EMBEDDER: ("all_x_embedder.**", "cap_embedder.**", "siglip_embedder.**", "t_embedder.**"),
        FINAL: ("all_final_layer.**",),
    },
    workload=Workload(
        text=512,
        patch=2,  # the configuration lists several
        gated=True,
        streams={"layers.**": "both", "context_refiner.**": "text"},
        attention=(
            ("layers.*.attention.to_q", "both", "both"),
            ("noise_refiner.*.attention.to_q", "image", "image"),
            ("context_refiner.*.attention.to_q", "text", "text"),
        ),
    ),
    originals=_ORIGINALS,
    published=(Published("Z-Image-Turbo", {"n_layers": 30, "dim": 3840}, beside=("Qwen3-4B", "FLUX.1 VAE")),),
    hub_owner="Tongyi-MAI",
)
