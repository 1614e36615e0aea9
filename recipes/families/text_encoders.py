"""Describe the text encoders of pipelines, which run once per image."""

from __future__ import annotations

from typing import Any

from fluxq.recipes.family import Family, InputGroup, Published

_VISION = "vision tower: few weights, and prompts of plain text never pass through it"
_LM_HEAD = "predicts words: no pipeline looks at its output, and it may share the embedding's weight"
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

_T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}

_CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "vocab_size": 49408,
}


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


def _decoder_config(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


_QWEN3_4B = {**_decoder_config(2560, 9728, 36, 32, 8, 151936), "head_dim": 128, "tie_word_embeddings": True}
_LLAMA3_8B = (4096, 14336, 32, 32, 8)

TEXT_ENCODERS = (
    Family(
        name="t5",
        model="T5EncoderModel",
        library="transformers",
        kind="text_encoder",
        groups=_T5_GROUPS,
        keep={},
        tiny_config=_T5_TINY,
        published=(Published("T5-XXL", "t5", _T5_XXL),),
    ),
    Family(
        name="umt5",
        model="UMT5EncoderModel",
        library="transformers",
        kind="text_encoder",
        groups=_T5_GROUPS,
        keep={},
        tiny_config=_T5_TINY,
        published=(Published("UMT5-XXL", "umt5", {**_T5_XXL, "vocab_size": 256384}),),
    ),
    Family(
        name="clip",
        model="CLIPTextModel",
        library="transformers",
        kind="text_encoder",
        groups=_clip("encoder.layers.*"),
        keep={},
        tiny_config=_CLIP_TINY,
        published=(Published("CLIP-L", "clip", _CLIP_L),),
    ),
    Family(
        name="clip_projection",
        model="CLIPTextModelWithProjection",
        library="transformers",
        kind="text_encoder",
        groups=_clip("text_model.encoder.layers.*"),
        keep={"text_projection": "projects the pooled prompt: one row per image and few weights"},
        tiny_config=_CLIP_TINY,
        published=(
            Published("CLIP-L with projection", "clip_projection", _CLIP_L),
            Published(
                "CLIP-G with projection",
                "clip_projection",
                {
                    **_CLIP_L,
                    "hidden_size": 1280,
                    "intermediate_size": 5120,
                    "num_hidden_layers": 32,
                    "num_attention_heads": 20,
                    "projection_dim": 1280,
                },
            ),
        ),
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
        published=(
            Published(
                "Qwen2.5-VL-7B",
                "qwen2_5_vl",
                {
                    "text_config": _decoder_config(3584, 18944, 28, 28, 4, 152064),
                    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
                    "tie_word_embeddings": False,
                },
            ),
        ),
    ),
    Family(
        name="qwen3",
        model="Qwen3Model",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
        published=(Published("Qwen3-4B", "qwen3", _QWEN3_4B),),
    ),
    Family(
        name="qwen3_lm",
        model="Qwen3ForCausalLM",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.layers.*"),
        keep={"lm_head": _LM_HEAD},
        tiny_config=_LANGUAGE_MODEL_TINY,
        published=(
            Published("Qwen3-4B for causal LM", "qwen3_lm", _QWEN3_4B),
            Published(
                "Qwen3-8B for causal LM",
                "qwen3_lm",
                {**_decoder_config(4096, 12288, 36, 32, 8, 151936), "head_dim": 128},
            ),
        ),
    ),
    Family(
        name="llama",
        model="LlamaModel",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
        published=(Published("LLaVA-Llama-3-8B, its language model", "llama", _decoder_config(*_LLAMA3_8B, 128320)),),
    ),
    Family(
        name="llama_lm",
        model="LlamaForCausalLM",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.layers.*"),
        keep={"lm_head": _LM_HEAD},
        tiny_config=_LANGUAGE_MODEL_TINY,
        published=(Published("Llama-3.1-8B", "llama_lm", _decoder_config(*_LLAMA3_8B, 128256)),),
    ),
    Family(
        name="gemma2",
        model="Gemma2Model",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("layers.*"),
        keep={},
        tiny_config=_LANGUAGE_MODEL_TINY,
        published=(
            Published(
                "Gemma-2-2B", "gemma2", {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
            ),
        ),
    ),
    Family(
        name="gemma3",
        model="Gemma3ForConditionalGeneration",
        library="transformers",
        kind="text_encoder",
        groups=_language_model("model.language_model.layers.*"),
        keep={"model.vision_tower.**": _VISION, "lm_head": _LM_HEAD},
        tiny_config={"text_config": _LANGUAGE_MODEL_TINY, "vision_config": _VISION_TINY},
        published=(
            Published(
                "Gemma-3-12B",
                "gemma3",
                {
                    "text_config": {**_decoder_config(3840, 15360, 48, 16, 8, 262208), "head_dim": 256},
                    "vision_config": {
                        "hidden_size": 1152,
                        "intermediate_size": 4304,
                        "num_hidden_layers": 27,
                        "num_attention_heads": 16,
                        "image_size": 896,
                        "patch_size": 14,
                        "vision_use_head": False,
                    },
                },
            ),
        ),
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
        published=(
            Published(
                "Mistral-Small-3.2-24B",
                "mistral3",
                {
                    "text_config": {
                        **_decoder_config(5120, 32768, 40, 32, 8, 131072),
                        "head_dim": 128,
                        "model_type": "mistral",
                    },
                    "vision_config": {
                        "hidden_size": 1024,
                        "intermediate_size": 4096,
                        "num_hidden_layers": 24,
                        "num_attention_heads": 16,
                        "head_dim": 64,
                        "image_size": 1540,
                        "patch_size": 14,
                        "model_type": "pixtral",
                    },
                    "tie_word_embeddings": False,
                },
            ),
        ),
    ),
)
