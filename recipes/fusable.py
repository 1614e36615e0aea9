"""Rows for the blocks that `fluxq.optimize` fuses: which of diffusers' modules play which role in them."""

from __future__ import annotations

from fluxq.recipes.family import FusableBlock, Stream

FLUX_BLOCKS = (
    FusableBlock(
        block="transformer_blocks.*",
        model="FluxTransformerBlock",
        attention="attn",
        processor="FluxAttnProcessor",
        streams=(
            Stream(
                adaln="norm1_context",
                qkv="text_qkv",
                q_norm="attn.norm_added_q",
                k_norm="attn.norm_added_k",
                out="attn.to_add_out",
                second_norm="norm2_context",
                up="text_ff_up",
                down="text_ff_down",
            ),
            Stream(
                adaln="norm1",
                qkv="qkv",
                q_norm="attn.norm_q",
                k_norm="attn.norm_k",
                out="attn.to_out.0",
                second_norm="norm2",
                up="ff_up",
                down="ff_down",
            ),
        ),
        passed_over={
            "norm1": "AdaLayerNormZero",
            "norm1.norm": "LayerNorm",
            "norm1_context": "AdaLayerNormZero",
            "norm1_context.norm": "LayerNorm",
            "attn": "FluxAttention",
            "attn.norm_q": "RMSNorm",
            "attn.norm_k": "RMSNorm",
            "attn.norm_added_q": "RMSNorm",
            "attn.norm_added_k": "RMSNorm",
            "attn.to_out.1": "Dropout",
            "norm2": "LayerNorm",
            "norm2_context": "LayerNorm",
            "ff": "FeedForward",
            "ff.net.0": "GELU",
            "ff.net.1": "Dropout",
            "ff_context": "FeedForward",
            "ff_context.net.0": "GELU",
            "ff_context.net.1": "Dropout",
        },
    ),
    FusableBlock(
        block="single_transformer_blocks.*",
        model="FluxSingleTransformerBlock",
        attention="attn",
        processor="FluxAttnProcessor",
        streams=(Stream(adaln="norm", qkv="single_in", q_norm="attn.norm_q", k_norm="attn.norm_k", down="mixed_out"),),
        passed_over={
            "norm": "AdaLayerNormZeroSingle",
            "norm.norm": "LayerNorm",
            "attn": "FluxAttention",
            "attn.norm_q": "RMSNorm",
            "attn.norm_k": "RMSNorm",
            "act_mlp": "GELU",
        },
    ),
)
