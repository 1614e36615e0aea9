"""Describe HiDream-I1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxq.recipes.family import EMBEDDER, FINAL, Family, InputGroup, Published, Workload, attended, gated, normed
from fluxq.recipes.keymap_rows import SAME_NAMES

_QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")
_TEXT_QKV = ("attn1.to_q_t", "attn1.to_k_t", "attn1.to_v_t")
_VALUES = ("attn1.to_v", "attn1.to_v_t")


def _experts(block: str) -> tuple[InputGroup, ...]:
    """Group the feed-forward: each of four experts sees the tokens that are routed to it, a shared one sees all.

    The router reads the same norm and is no Linear: what were folded into that norm would route tokens otherwise.
    """
    paths = ("ff_i.shared_experts", *(f"ff_i.experts.{index}" for index in range(4)))
    ups = [normed("expert_up", block, (f"{path}.w1", f"{path}.w3")) for path in paths]
    downs = [gated("expert_down", block, f"{path}.w2", f"{path}.w3") for path in paths]
    return (*ups, *downs)


def _special(rows: int, columns: int, config: Mapping[str, Any]) -> dict[str, Any]:
    height, width = config.get("max_resolution", (128, 128))
    most = height * width // config.get("patch_size", 2) ** 2
    padded = {} if rows == columns else {"image": most}  # other shapes are padded to the square
    return {**padded, "routed": config.get("num_activated_experts", 2) / config.get("num_routed_experts", 4)}


HIDREAM = Family(
    name="hidream",
    model="HiDreamImageTransformer2DModel",
    groups=(
        normed("qkv", "double_stream_blocks.*.block", _QKV, "adaLN_modulation.1", 0),
        normed("text_qkv", "double_stream_blocks.*.block", _TEXT_QKV, "adaLN_modulation.1", 6),
        attended("attn_out", "double_stream_blocks.*.block", "attn1.to_out", *_VALUES),
        attended("text_attn_out", "double_stream_blocks.*.block", "attn1.to_out_t", *_VALUES),
        *_experts("double_stream_blocks.*.block"),
        normed("text_ff_up", "double_stream_blocks.*.block", ("ff_t.w1", "ff_t.w3"), "adaLN_modulation.1", 9),
        gated("text_ff_down", "double_stream_blocks.*.block", "ff_t.w2", "ff_t.w3"),
        InputGroup("modulation", "double_stream_blocks.*.block", ("adaLN_modulation.1",)),
        normed("qkv", "single_stream_blocks.*.block", _QKV, "adaLN_modulation.1", 0),
        attended("attn_out", "single_stream_blocks.*.block", "attn1.to_out", "attn1.to_v"),
        *_experts("single_stream_blocks.*.block"),
        InputGroup("modulation", "single_stream_blocks.*.block", ("adaLN_modulation.1",)),
    ),
    keep={
        EMBEDDER: ("t_embedder.**", "p_embedder.**", "x_embedder.**", "caption_projection.**"),
        FINAL: ("final_layer.**",),
    },
    workload=Workload(
        text=128,
        prompts=3,  # T5's, the last layer of Llama, and another one of Llama for each block
        gated=True,
        streams={
            "double_stream_blocks.*.block.ff_i.experts.**": "routed image",
            "single_stream_blocks.*.block.ff_i.experts.**": "routed both",
            "single_stream_blocks.**": "both",
            "caption_projection.**": "prompt",
            "p_embedder.**": "one",
            "final_layer.adaLN_modulation.*": "one",
        },
        attention=(
            ("double_stream_blocks.*.block.attn1.to_q", "both", "both"),
            ("single_stream_blocks.*.block.attn1.to_q", "both", "both"),
        ),
        special=_special,
    ),
    originals=SAME_NAMES,
    published=(
        Published(
            "HiDream-I1-Full",
            {
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 16,
                "caption_channels": [4096, 4096],
                "axes_dims_rope": [64, 32, 32],
                "llama_layers": [*range(32), *[31] * 16],
            },
            also=("HiDream-I1-Dev", "HiDream-I1-Fast"),
            beside=("CLIP-L with projection", "CLIP-G with projection", "T5-XXL", "Llama-3.1-8B", "FLUX.1 VAE"),
        ),
    ),
    hub_owner="HiDream-ai",
)
