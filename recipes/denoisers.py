"""Rows of FAMILIES for what runs at every denoising step: the transformers of diffusers."""

from __future__ import annotations

from fluxq.recipes.family import Family, InputGroup, Modulation
from fluxq.recipes.fusable import FLUX_BLOCKS

_EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
_FINAL = "last projection: its error goes to the image undamped"


def _modulated(role: str, block: str, members: tuple[str, ...], modulation: str, chunk: int) -> InputGroup:
    """Linears behind a norm that a Linear of the same block scales and shifts."""
    return InputGroup(role, block, members, len(members) > 1, "norm", Modulation(modulation, chunk))


def _image_and_text(block: str, ff: tuple[str, str], modulation: tuple[str, str]) -> tuple[InputGroup, ...]:
    """A block of two streams that share one attention (MMDiT); ff, modulation: of the image, of the text.

    A modulation makes shift, scale and gate of the attention, then of the feed-forward.
    """
    image, text = modulation
    return (
        _modulated("qkv", block, ("attn.to_q", "attn.to_k", "attn.to_v"), image, 0),
        _modulated("text_qkv", block, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), text, 0),
        InputGroup("attn_out", block, ("attn.to_out.0",), made_by="attention"),
        InputGroup("text_attn_out", block, ("attn.to_add_out",), made_by="attention"),
        _modulated("ff_up", block, (f"{ff[0]}.net.0.proj",), image, 3),
        _modulated("text_ff_up", block, (f"{ff[1]}.net.0.proj",), text, 3),
        InputGroup("ff_down", block, (f"{ff[0]}.net.2",), made_by="activation"),
        InputGroup("text_ff_down", block, (f"{ff[1]}.net.2",), made_by="activation"),
        InputGroup("modulation", block, (image,)),
        InputGroup("modulation", block, (text,)),
    )


DENOISERS = (
    Family(
        name="flux",
        model="FluxTransformer2DModel",
        groups=(
            *_image_and_text("transformer_blocks.*", ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear")),
            _modulated(
                "single_in",
                "single_transformer_blocks.*",
                ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                "norm.linear",
                0,
            ),
            InputGroup("mixed_out", "single_transformer_blocks.*", ("proj_out",), made_by="concatenation"),
            InputGroup("modulation", "single_transformer_blocks.*", ("norm.linear",)),
        ),
        keep={
            "x_embedder": _EMBEDDER,
            "context_embedder": _EMBEDDER,
            "time_text_embed.**": _EMBEDDER,
            "norm_out.linear": _FINAL,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "axes_dims_rope": [16, 24, 24],
        },
        fusable=FLUX_BLOCKS,
    ),
    Family(
        name="sd3",
        model="SD3Transformer2DModel",
        groups=(
            *_image_and_text("transformer_blocks.*", ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear")),
            # A second attention, over the image alone, in the first blocks of SD3.5 medium.
            _modulated("qkv", "transformer_blocks.*", ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "norm1.linear", 6),
            InputGroup("attn_out", "transformer_blocks.*", ("attn2.to_out.0",), made_by="attention"),
        ),
        keep={
            "context_embedder": _EMBEDDER,
            "time_text_embed.**": _EMBEDDER,
            "norm_out.linear": _FINAL,
            "proj_out": _FINAL,
        },
        tiny_config={
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "dual_attention_layers": [0],
            "qk_norm": "rms_norm",
        },
    ),
    Family(
        name="qwen_image",
        model="QwenImageTransformer2DModel",
        groups=(*_image_and_text("transformer_blocks.*", ("img_mlp", "txt_mlp"), ("img_mod.1", "txt_mod.1")),),
        keep={
            "img_in": _EMBEDDER,
            "txt_in": _EMBEDDER,
            "time_text_embed.**": _EMBEDDER,
            "norm_out.linear": _FINAL,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "axes_dims_rope": [16, 24, 24],
        },
    ),
    Family(
        name="wan",
        model="WanTransformer3DModel",
        groups=(
            # Its norms are modulated by a table and by a projection that all blocks share: nothing to fold into.
            InputGroup("qkv", "blocks.*", ("attn1.to_q", "attn1.to_k", "attn1.to_v"), joined=True, made_by="norm"),
            InputGroup("attn_out", "blocks.*", ("attn1.to_out.0",), made_by="attention"),
            InputGroup("cross_q", "blocks.*", ("attn2.to_q",), made_by="norm"),
            InputGroup("cross_kv", "blocks.*", ("attn2.to_k", "attn2.to_v"), joined=True),
            # Image-to-video models attend to the first frame's features too.
            InputGroup("image_kv", "blocks.*", ("attn2.add_k_proj", "attn2.add_v_proj"), joined=True),
            InputGroup("cross_out", "blocks.*", ("attn2.to_out.0",), made_by="attention"),
            InputGroup("ff_up", "blocks.*", ("ffn.net.0.proj",), made_by="norm"),
            InputGroup("ff_down", "blocks.*", ("ffn.net.2",), made_by="activation"),
        ),
        keep={"condition_embedder.**": _EMBEDDER, "proj_out": _FINAL},
        tiny_config={
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 64,
            "freq_dim": 32,
            "ffn_dim": 256,
            "num_layers": 2,
            "rope_max_seq_len": 32,
            "image_dim": 64,
            "added_kv_proj_dim": 128,
        },
    ),
)
