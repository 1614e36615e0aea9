"""Rows for the blocks that `fluxq.optimize` fuses: which of diffusers' modules play which role in them.

A row needs a function in runtime/fused_calls.py that reads what the forward of its class is called with. Paths and
classes are compared with diffusers' own in tests/runtime/test_fused_families.py.
"""

from __future__ import annotations

from fluxq.recipes.family import CrossAttention, FusableBlock, OwnAttention, Stream

_NORM = "LayerNorm"
_HEADS = {"attn.norm_q": "RMSNorm", "attn.norm_k": "RMSNorm"}
_TEXT_HEADS = {"attn.norm_added_q": "RMSNorm", "attn.norm_added_k": "RMSNorm"}


def _feed_forward(path: str, lacking: str = "") -> dict[str, str]:
    """The classes in diffusers' FeedForward with GELU; lacking: "|None" for one that a block may lack."""
    found = {path: "FeedForward", f"{path}.net.0": "GELU", f"{path}.net.1": "Dropout"}
    return {path: kind + lacking for path, kind in found.items()}


FLUX_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="FluxTransformerBlock",
        attention="attn",
        attentions={"attn": "FluxAttnProcessor"},
        contiguous=True,
        streams=(
            Stream(
                name="text",
                modulation=("norm1_context.silu", "norm1_context.linear"),
                norm="norm1_context.norm",
                qkv="attn.add_q_proj",
                q_norm="attn.norm_added_q",
                k_norm="attn.norm_added_k",
                out="attn.to_add_out",
                second_norm="norm2_context",
                up="ff_context.net.0.proj",
                down="ff_context.net.2",
                clipped=True,
            ),
            Stream(
                name="image",
                modulation=("norm1.silu", "norm1.linear"),
                norm="norm1.norm",
                qkv="attn.to_q",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                out="attn.to_out.0",
                second_norm="norm2",
                up="ff.net.0.proj",
                down="ff.net.2",
            ),
        ),
        passed_over={
            "norm1": "AdaLayerNormZero",
            "norm1.norm": _NORM,
            "norm1_context": "AdaLayerNormZero",
            "norm1_context.norm": _NORM,
            "attn": "FluxAttention",
            **_HEADS,
            **_TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "norm2": _NORM,
            "norm2_context": _NORM,
            **_feed_forward("ff"),
            **_feed_forward("ff_context"),
        },
    ),
    FusableBlock(
        block="single_transformer_blocks.*",
        model="FluxSingleTransformerBlock",
        attention="attn",
        attentions={"attn": "FluxAttnProcessor"},
        streams=(
            Stream(
                name="both",
                modulation=("norm.silu", "norm.linear"),
                norm="norm.norm",
                qkv="attn.to_q",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                down="proj_out",
                clipped=True,
            ),
        ),
        passed_over={
            "norm": "AdaLayerNormZeroSingle",
            "norm.norm": _NORM,
            "attn": "FluxAttention",
            **_HEADS,
            "act_mlp": "GELU",
        },
    ),
)

FLUX2_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="Flux2TransformerBlock",
        attention="attn",
        attentions={"attn": "Flux2AttnProcessor"},
        streams=(
            Stream(
                name="text",
                norm="norm1_context",
                qkv="attn.add_q_proj",
                q_norm="attn.norm_added_q",
                k_norm="attn.norm_added_k",
                out="attn.to_add_out",
                second_norm="norm2_context",
                up="ff_context.linear_in",
                act="silu_mul",
                down="ff_context.linear_out",
                clipped=True,
            ),
            Stream(
                name="image",
                norm="norm1",
                qkv="attn.to_q",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                out="attn.to_out.0",
                second_norm="norm2",
                up="ff.linear_in",
                act="silu_mul",
                down="ff.linear_out",
            ),
        ),
        passed_over={
            "norm1": _NORM,
            "norm1_context": _NORM,
            "attn": "Flux2Attention",
            **_HEADS,
            **_TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "norm2": _NORM,
            "norm2_context": _NORM,
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
        attention="attn",
        attentions={"attn": "Flux2ParallelSelfAttnProcessor"},
        streams=(
            Stream(
                name="both",
                norm="norm",
                qkv="attn.to_qkv_mlp_proj",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                act="silu_mul",
                down="attn.to_out",
                clipped=True,
            ),
        ),
        passed_over={
            "norm": _NORM,
            "attn": "Flux2ParallelSelfAttention",
            **_HEADS,
            "attn.mlp_act_fn": "Flux2SwiGLU",
            "attn.mlp_act_fn.gate_fn": "SiLU",
        },
    ),
)

SD3_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="JointTransformerBlock",
        attention="attn",
        attentions={"attn": "JointAttnProcessor2_0", "attn2": "JointAttnProcessor2_0"},
        rotary=False,
        dispatched=False,
        streams=(
            Stream(
                name="image",
                modulation=("norm1.silu", "norm1.linear"),
                norm="norm1.norm",
                qkv="attn.to_q",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                out="attn.to_out.0",
                second_norm="norm2",
                up="ff.net.0.proj",
                down="ff.net.2",
                own=OwnAttention("attn2", "attn2.to_q", "attn2.norm_q", "attn2.norm_k", "attn2.to_out.0"),
            ),
            Stream(
                name="text",
                modulation=("norm1_context.silu", "norm1_context.linear"),
                norm="norm1_context.norm",
                qkv="attn.add_q_proj",
                q_norm="attn.norm_added_q",
                k_norm="attn.norm_added_k",
                out="attn.to_add_out",
                second_norm="norm2_context",
                up="ff_context.net.0.proj",
                down="ff_context.net.2",
            ),
        ),
        passed_over={
            "norm1": "AdaLayerNormZero|SD35AdaLayerNormZeroX",
            "norm1.norm": _NORM,
            "norm1_context": "AdaLayerNormZero|AdaLayerNormContinuous",
            "norm1_context.norm": _NORM,
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
            "norm2": _NORM,
            "norm2_context": f"{_NORM}|None",
            **_feed_forward("ff"),
            **_feed_forward("ff_context", "|None"),
        },
    ),
)

QWEN_IMAGE_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="QwenImageTransformerBlock",
        attention="attn",
        attentions={"attn": "QwenDoubleStreamAttnProcessor2_0"},
        contiguous=True,
        streams=(
            Stream(
                name="text",
                modulation=("txt_mod",),
                norm="txt_norm1",
                qkv="attn.add_q_proj",
                q_norm="attn.norm_added_q",
                k_norm="attn.norm_added_k",
                out="attn.to_add_out",
                second_norm="txt_norm2",
                up="txt_mlp.net.0.proj",
                down="txt_mlp.net.2",
                clipped=True,
            ),
            Stream(
                name="image",
                modulation=("img_mod",),
                norm="img_norm1",
                qkv="attn.to_q",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                out="attn.to_out.0",
                second_norm="img_norm2",
                up="img_mlp.net.0.proj",
                down="img_mlp.net.2",
                clipped=True,
            ),
        ),
        passed_over={
            "img_norm1": _NORM,
            "txt_norm1": _NORM,
            "attn": "Attention",
            **_HEADS,
            **_TEXT_HEADS,
            "attn.to_out.1": "Dropout",
            "img_norm2": _NORM,
            "txt_norm2": _NORM,
            **_feed_forward("img_mlp"),
            **_feed_forward("txt_mlp"),
        },
    ),
)

WAN_BLOCKS = (
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
            **_feed_forward("ffn"),
        },
    ),
)
