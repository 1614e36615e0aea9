"""Rows of FAMILIES for what runs once per image, before and after denoising: text encoders and VAEs."""

from __future__ import annotations

from fluxq.recipes.family import Family, InputGroup

_VISION = "vision tower: few weights, and prompts of plain text never pass through it"
_LATENTS = "makes the latents of features, or features of the latents: few weights, and every pixel depends on them"
_LM_HEAD = "predicts words: no pipeline looks at its output, and it may share the embedding's weight"


def _clip(block: str) -> tuple[InputGroup, ...]:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        InputGroup("qkv", block, qkv, joined=True, made_by="norm"),
        InputGroup("attn_out", block, ("self_attn.out_proj",), made_by="attention"),
        InputGroup("ff_up", block, ("mlp.fc1",), made_by="norm"),
        InputGroup("ff_down", block, ("mlp.fc2",), made_by="activation"),
    )


def _language_model(block: str) -> tuple[InputGroup, ...]:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        InputGroup("qkv", block, qkv, joined=True, made_by="norm"),
        InputGroup("attn_out", block, ("self_attn.o_proj",), made_by="attention"),
        InputGroup("ff_up", block, ("mlp.gate_proj", "mlp.up_proj"), joined=True, made_by="norm"),
        InputGroup("ff_down", block, ("mlp.down_proj",), made_by="activation"),
    )


def _image_attention(block: str) -> tuple[InputGroup, ...]:
    return (
        InputGroup("qkv", block, ("to_q", "to_k", "to_v"), joined=True, made_by="norm"),
        InputGroup("attn_out", block, ("to_out.0",), made_by="attention"),
    )


_T5_QKV = ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v")
_T5_GATE_AND_UP = ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1")
_T5_GROUPS = (
    InputGroup("qkv", "encoder.block.*", _T5_QKV, joined=True, made_by="norm"),
    InputGroup("attn_out", "encoder.block.*", ("layer.0.SelfAttention.o",), made_by="attention"),
    InputGroup("ff_up", "encoder.block.*", _T5_GATE_AND_UP, joined=True, made_by="norm"),
    # Where the feed-forward has no gate.
    InputGroup("ff_up", "encoder.block.*", ("layer.1.DenseReluDense.wi",), made_by="norm"),
    InputGroup("ff_down", "encoder.block.*", ("layer.1.DenseReluDense.wo",), made_by="activation"),
)
_T5_TINY = {
    "vocab_size": 64,
    "d_model": 128,
    "d_kv": 64,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
_CLIP_TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LANGUAGE_MODEL_TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION_TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ENCODERS = (
    Family(
        name="t5",
        model="T5EncoderModel",
        library="transformers",
        kind="text_encoder",
        groups=_T5_GROUPS,
        keep={},
        tiny_config=_T5_TINY,
    ),
    Family(
        name="umt5",
        model="UMT5EncoderModel",
        library="transformers",
        kind="text_encoder",
        groups=_T5_GROUPS,
        keep={},
        tiny_config=_T5_TINY,
    ),
    Family(
        name="clip",
        model="CLIPTextModel",
        library="transformers",
        kind="text_encoder",
        groups=_clip("encoder.layers.*"),
        keep={},
        tiny_config=_CLIP_TINY,
    ),
    Family(
        name="clip_projection",
        model="CLIPTextModelWithProjection",
        library="transformers",
        kind="text_encoder",
        groups=_clip("text_model.encoder.layers.*"),
        keep={"text_projection": "projects the pooled prompt: one row per image and few weights"},
        tiny_config=_CLIP_TINY,
    ),
    Family(
        name="qwen2_5_vl",
        model="Qwen2_5_VLForConditionalGeneration",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.language_model.layers.*"),
        keep={"model.visual.**": _VISION, "lm_head": _LM_HEAD},
        tiny_config={
            "text_config": {
                **_LANGUAGE_MODEL_TINY,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [8, 12, 12],
                },
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 128,
                "fullatt_block_indexes": [0],
            },
        },
    ),
    Family(
        name="qwen3",
        model="Qwen3Model",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
    ),
    Family(
        name="qwen3_lm",
        model="Qwen3ForCausalLM",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.layers.*"),
        keep={"lm_head": _LM_HEAD},
        tiny_config=_LANGUAGE_MODEL_TINY,
    ),
    Family(
        name="llama",
        model="LlamaModel",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
    ),
    Family(
        name="llama_lm",
        model="LlamaForCausalLM",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.layers.*"),
        keep={"lm_head": _LM_HEAD},
        tiny_config=_LANGUAGE_MODEL_TINY,
    ),
    Family(
        name="gemma2",
        model="Gemma2Model",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
    ),
    Family(
        name="gemma3",
        model="Gemma3ForConditionalGeneration",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.language_model.layers.*"),
        keep={"model.vision_tower.**": _VISION, "lm_head": _LM_HEAD},
        tiny_config={"text_config": _LANGUAGE_MODEL_TINY, "vision_config": _VISION_TINY},
    ),
    Family(
        name="mistral3",
        model="Mistral3ForConditionalGeneration",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.language_model.layers.*"),
        keep={
            "model.vision_tower.**": _VISION,
            "model.multi_modal_projector.**": _VISION,
            "lm_head": _LM_HEAD,
        },
        tiny_config={
            "text_config": {**_LANGUAGE_MODEL_TINY, "model_type": "mistral"},
            "vision_config": {**_VISION_TINY, "model_type": "pixtral", "head_dim": 32},
        },
    ),
    Family(
        name="kl",
        model="AutoencoderKL",
        kind="vae",
        groups=(
            *_image_attention("encoder.mid_block.attentions.*"),
            *_image_attention("decoder.mid_block.attentions.*"),
        ),
        keep={
            "**.conv_shortcut": "carries what a block does not change past it: few weights",
            "quant_conv": _LATENTS,
            "post_quant_conv": _LATENTS,
        },
        tiny_config={"block_out_channels": [128], "norm_num_groups": 8, "sample_size": 8},
    ),
)
