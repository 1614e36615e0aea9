"""Rows of FAMILIES for what runs at every denoising step: diffusers' transformers, and its UNet as one of them."""

from __future__ import annotations

from fluxq.recipes.family import Family, InputGroup, Maker, Modulation
from fluxq.recipes.fusable import FLUX2_BLOCKS, FLUX_BLOCKS, QWEN_IMAGE_BLOCKS, SD3_BLOCKS, WAN_BLOCKS

_EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
_FINAL = "last projection: its error goes to the image undamped"
_SHARED = "modulates every block: few weights, and their error reaches all blocks"
_ENDS = "begins or ends a stack of blocks: few weights, and all of the stack passes through them"

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_HIDREAM_QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")
_HIDREAM_TEXT_QKV = ("attn1.to_q_t", "attn1.to_k_t", "attn1.to_v_t")
_FF = ("ff.net.0.proj", "ff.net.2")
_TEXT_FF = ("ff_context.net.0.proj", "ff_context.net.2")


def _normed(role: str, block: str, members: tuple[str, ...], modulation: str = "", chunk: int = 0) -> InputGroup:
    """Linears behind a norm; modulation: the Linear of the same block that scales and shifts it, if there is one."""
    by = Modulation(modulation, chunk) if modulation else None
    return InputGroup(role, block, members, len(members) > 1, "norm", by)


def _image_and_text(
    block: str,
    image_ff: tuple[str, str],
    text_ff: tuple[str, str],
    modulation: tuple[str, str] = ("", ""),
) -> tuple[InputGroup, ...]:
    """A block of two streams that share one attention (MMDiT). image_ff, text_ff: up and down.

    modulation: of the image, of the text; it makes shift, scale and gate of the attention, then of the feed-forward.
    """
    image, text = modulation
    return (
        _normed("qkv", block, _QKV, image, 0),
        _normed("text_qkv", block, _ADDED_QKV, text, 0),
        InputGroup("attn_out", block, ("attn.to_out.0",), made_by="attention"),
        InputGroup("text_attn_out", block, ("attn.to_add_out",), made_by="attention"),
        _normed("ff_up", block, image_ff[:1], image, 3),
        _normed("text_ff_up", block, text_ff[:1], text, 3),
        InputGroup("ff_down", block, image_ff[1:], made_by="activation"),
        InputGroup("text_ff_down", block, text_ff[1:], made_by="activation"),
        *(InputGroup("modulation", block, (linear,)) for linear in modulation if linear),
    )


def _both_at_once(block: str, members: tuple[str, ...], down: str, modulation: str = "") -> tuple[InputGroup, ...]:
    """A block of one stream whose attention and feed-forward run side by side."""
    return (
        _normed("single_in", block, members, modulation, 0),
        InputGroup("mixed_out", block, (down,), made_by="concatenation"),
        *(InputGroup("modulation", block, (linear,)) for linear in (modulation,) if linear),
    )


def _self_and_cross(block: str, cross_q: Maker) -> tuple[InputGroup, ...]:
    """The attention to the image itself and the one to the text; cross_q: what makes the input of the latter."""
    return (
        _normed("qkv", block, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        InputGroup("attn_out", block, ("attn1.to_out.0",), made_by="attention"),
        InputGroup("cross_q", block, ("attn2.to_q",), made_by=cross_q),
        InputGroup("cross_kv", block, ("attn2.to_k", "attn2.to_v"), joined=True),
        InputGroup("cross_out", block, ("attn2.to_out.0",), made_by="attention"),
    )


def _z_image(block: str) -> tuple[InputGroup, ...]:
    return (
        _normed("qkv", block, tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v"))),
        InputGroup("attn_out", block, ("attention.to_out.0",), made_by="attention"),
        _normed("ff_up", block, ("feed_forward.w1", "feed_forward.w3")),
        InputGroup("ff_down", block, ("feed_forward.w2",), made_by="activation"),
    )


def _unet(block: str) -> tuple[InputGroup, ...]:
    """Its norms have weights of their own, which no Linear makes: nothing is folded into them."""
    return (*_self_and_cross(block, cross_q="norm"), *_feed_forward(block, *_FF))


def _experts(block: str) -> tuple[InputGroup, ...]:
    """HiDream's feed-forward: each of four experts sees the tokens that are routed to it, a shared one sees all.

    The router reads the same norm and is no Linear: what were folded into that norm would route tokens otherwise.
    """
    paths = ("ff_i.shared_experts", *(f"ff_i.experts.{index}" for index in range(4)))
    ups = [_normed("expert_up", block, (f"{path}.w1", f"{path}.w3")) for path in paths]
    downs = [InputGroup("expert_down", block, (f"{path}.w2",), made_by="activation") for path in paths]
    return (*ups, *downs)


def _feed_forward(block: str, up: str, down: str) -> tuple[InputGroup, ...]:
    return (
        _normed("ff_up", block, (up,)),
        InputGroup("ff_down", block, (down,), made_by="activation"),
    )


DENOISERS = (
    Family(
        name="flux",
        model="FluxTransformer2DModel",
        groups=(
            *_image_and_text("transformer_blocks.*", _FF, _TEXT_FF, ("norm1.linear", "norm1_context.linear")),
            *_both_at_once("single_transformer_blocks.*", (*_QKV, "proj_mlp"), "proj_out", "norm.linear"),
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
        self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    ),
    Family(
        name="flux2",
        model="Flux2Transformer2DModel",
        groups=(
            # Three Linears modulate all blocks: nothing to fold into. Gate and up are one Linear.
            *_image_and_text(
                "transformer_blocks.*",
                ("ff.linear_in", "ff.linear_out"),
                ("ff_context.linear_in", "ff_context.linear_out"),
            ),
            # So are q, k, v, gate and up here.
            *_both_at_once("single_transformer_blocks.*", ("attn.to_qkv_mlp_proj",), "attn.to_out"),
        ),
        keep={
            "x_embedder": _EMBEDDER,
            "context_embedder": _EMBEDDER,
            "time_guidance_embed.**": _EMBEDDER,
            "double_stream_modulation_img.linear": _SHARED,
            "double_stream_modulation_txt.linear": _SHARED,
            "single_stream_modulation.linear": _SHARED,
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
            "timestep_guidance_channels": 32,
            "axes_dims_rope": [16, 16, 16, 16],
        },
        self_attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        fusable=FLUX2_BLOCKS,
    ),
    Family(
        name="sd3",
        model="SD3Transformer2DModel",
        groups=(
            *_image_and_text("transformer_blocks.*", _FF, _TEXT_FF, ("norm1.linear", "norm1_context.linear")),
            # A second attention, over the image alone, in the first blocks of SD3.5 medium.
            _normed("qkv", "transformer_blocks.*", ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "norm1.linear", 6),
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
        fusable=SD3_BLOCKS,
    ),
    Family(
        name="qwen_image",
        model="QwenImageTransformer2DModel",
        groups=_image_and_text(
            "transformer_blocks.*",
            ("img_mlp.net.0.proj", "img_mlp.net.2"),
            ("txt_mlp.net.0.proj", "txt_mlp.net.2"),
            ("img_mod.1", "txt_mod.1"),
        ),
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
        self_attention=("transformer_blocks.*.attn",),
        fusable=QWEN_IMAGE_BLOCKS,
    ),
    Family(
        name="wan",
        model="WanTransformer3DModel",
        groups=(
            # Its norms are modulated by a table and by a projection that all blocks share: nothing to fold into.
            *_self_and_cross("blocks.*", cross_q="norm"),
            # Image-to-video models attend to the first frame's features too.
            InputGroup("image_kv", "blocks.*", ("attn2.add_k_proj", "attn2.add_v_proj"), joined=True),
            *_feed_forward("blocks.*", "ffn.net.0.proj", "ffn.net.2"),
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
        self_attention=("blocks.*.attn1",),
        fusable=WAN_BLOCKS,
    ),
    Family(
        name="chroma",
        model="ChromaTransformer2DModel",
        groups=(
            # FLUX.1 with one network that makes the modulation of all blocks: nothing to fold into.
            *_image_and_text("transformer_blocks.*", _FF, _TEXT_FF),
            *_both_at_once("single_transformer_blocks.*", (*_QKV, "proj_mlp"), "proj_out"),
        ),
        keep={
            "x_embedder": _EMBEDDER,
            "context_embedder": _EMBEDDER,
            "distilled_guidance_layer.**": _SHARED,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "axes_dims_rope": [16, 24, 24],
            "approximator_num_channels": 32,
            "approximator_hidden_dim": 64,
            "approximator_layers": 1,
        },
    ),
    Family(
        name="z_image",
        model="ZImageTransformer2DModel",
        groups=(
            *_z_image("layers.*"),
            *_z_image("noise_refiner.*"),
            *_z_image("context_refiner.*"),
            *_z_image("siglip_refiner.*"),  # of Z-Image-Omni
            # Its norms are scaled but not shifted, which leaves no place for a mean: nothing is folded.
            InputGroup("modulation", "layers.*", ("adaLN_modulation.0",)),
            InputGroup("modulation", "noise_refiner.*", ("adaLN_modulation.0",)),
        ),
        keep={
            "all_x_embedder.**": _EMBEDDER,
            "cap_embedder.**": _EMBEDDER,
            "siglip_embedder.**": _EMBEDDER,
            "t_embedder.**": _EMBEDDER,
            "all_final_layer.**": _FINAL,
        },
        tiny_config={
            "in_channels": 4,
            "dim": 384,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 6,
            "n_kv_heads": 6,
            "cap_feat_dim": 64,
            "axes_dims": [16, 24, 24],
            "axes_lens": [128, 16, 16],
        },
    ),
    Family(
        name="pixart",
        model="PixArtTransformer2DModel",
        groups=(
            # One Linear and a table modulate all blocks: nothing to fold into.
            *_self_and_cross("transformer_blocks.*", cross_q="outside"),  # the residual stream as it is
            *_feed_forward("transformer_blocks.*", *_FF),
        ),
        keep={
            "adaln_single.emb.**": _EMBEDDER,
            "adaln_single.linear": _SHARED,
            "caption_projection.**": _EMBEDDER,
            "proj_out": _FINAL,
        },
        tiny_config={
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "num_layers": 2,
            "cross_attention_dim": 128,
            "sample_size": 8,
            "caption_channels": 64,
        },
    ),
    Family(
        name="ltx",
        model="LTXVideoTransformer3DModel",
        groups=(
            # As PixArt.
            *_self_and_cross("transformer_blocks.*", cross_q="outside"),
            *_feed_forward("transformer_blocks.*", *_FF),
        ),
        keep={
            "proj_in": _EMBEDDER,
            "time_embed.emb.**": _EMBEDDER,
            "time_embed.linear": _SHARED,
            "caption_projection.**": _EMBEDDER,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 16,
            "out_channels": 16,
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "cross_attention_dim": 128,
            "num_layers": 2,
            "caption_channels": 64,
        },
        self_attention=("transformer_blocks.*.attn1",),
    ),
    Family(
        name="hunyuan_video",
        model="HunyuanVideoTransformer3DModel",
        groups=(
            *_image_and_text("transformer_blocks.*", _FF, _TEXT_FF, ("norm1.linear", "norm1_context.linear")),
            # The attention puts image and text together again before q, k and v: another tensor, the same values.
            *_both_at_once("single_transformer_blocks.*", (*_QKV, "proj_mlp"), "proj_out", "norm.linear"),
        ),
        keep={
            "context_embedder.**": _EMBEDDER,
            "time_text_embed.**": _EMBEDDER,
            "norm_out.linear": _FINAL,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 64,
            "pooled_projection_dim": 64,
            "rope_axes_dim": [16, 24, 24],
        },
    ),
    Family(
        name="sana",
        model="SanaTransformer2DModel",
        groups=(
            *_self_and_cross("transformer_blocks.*", cross_q="outside"),
            # 1x1 convolutions, and between them a depthwise one, which is no Linear. A table modulates all blocks.
            *_feed_forward("transformer_blocks.*", "ff.conv_inverted", "ff.conv_point"),
        ),
        keep={
            "patch_embed.proj": _EMBEDDER,
            "time_embed.**": _EMBEDDER,
            "caption_projection.**": _EMBEDDER,
            "proj_out": _FINAL,
        },
        tiny_config={
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 64,
            "cross_attention_dim": 128,
            "caption_channels": 64,
            "sample_size": 4,
            "mlp_ratio": 2.0,
        },
    ),
    Family(
        name="hidream",
        model="HiDreamImageTransformer2DModel",
        groups=(
            _normed("qkv", "double_stream_blocks.*.block", _HIDREAM_QKV, "adaLN_modulation.1", 0),
            _normed("text_qkv", "double_stream_blocks.*.block", _HIDREAM_TEXT_QKV, "adaLN_modulation.1", 6),
            InputGroup("attn_out", "double_stream_blocks.*.block", ("attn1.to_out",), made_by="attention"),
            InputGroup("text_attn_out", "double_stream_blocks.*.block", ("attn1.to_out_t",), made_by="attention"),
            *_experts("double_stream_blocks.*.block"),
            _normed("text_ff_up", "double_stream_blocks.*.block", ("ff_t.w1", "ff_t.w3"), "adaLN_modulation.1", 9),
            InputGroup("text_ff_down", "double_stream_blocks.*.block", ("ff_t.w2",), made_by="activation"),
            InputGroup("modulation", "double_stream_blocks.*.block", ("adaLN_modulation.1",)),
            _normed("qkv", "single_stream_blocks.*.block", _HIDREAM_QKV, "adaLN_modulation.1", 0),
            InputGroup("attn_out", "single_stream_blocks.*.block", ("attn1.to_out",), made_by="attention"),
            *_experts("single_stream_blocks.*.block"),
            InputGroup("modulation", "single_stream_blocks.*.block", ("adaLN_modulation.1",)),
        ),
        keep={
            "t_embedder.**": _EMBEDDER,
            "p_embedder.**": _EMBEDDER,
            "x_embedder.**": _EMBEDDER,
            "caption_projection.**": _EMBEDDER,
            "final_layer.**": _FINAL,
        },
        tiny_config={
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 64,
            "num_attention_heads": 2,
            "caption_channels": [64, 64],
            "text_emb_dim": 64,
            "axes_dims_rope": [32, 16, 16],
            "max_resolution": [8, 8],
            "llama_layers": [0, 1],
            "force_inference_output": True,
        },
    ),
    Family(
        name="unet",
        model="UNet2DConditionModel",  # SDXL; of Stable Diffusion 1.5 two thirds are convolutions
        groups=(
            *_unet("down_blocks.*.attentions.*.transformer_blocks.*"),
            *_unet("mid_block.attentions.*.transformer_blocks.*"),
            *_unet("up_blocks.*.attentions.*.transformer_blocks.*"),
        ),
        keep={
            "time_embedding.**": _EMBEDDER,
            "add_embedding.**": _EMBEDDER,
            "**.time_emb_proj": "adds the timestep to every pixel of a residual block: few weights",
            "**.conv_shortcut": "carries what a block does not change past it: few weights",
            "**.attentions.*.proj_in": _ENDS,
            "**.attentions.*.proj_out": _ENDS,
        },
        tiny_config={
            "sample_size": 8,
            "block_out_channels": [128, 128],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "layers_per_block": 1,
            "attention_head_dim": 2,
            "cross_attention_dim": 256,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 176,
        },
    ),
)
