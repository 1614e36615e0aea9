"""Describe the text encoders of pipelines, which run once per image."""

from __future__ import annotations

from collections.abc import Mapping
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


def _encoder(
    name: str,
    model: str,
    groups: tuple[InputGroup, ...],
    published: Mapping[str, Mapping[str, Any]],
    keep: Mapping[str, tuple[str, ...]] | None = None,
) -> Family:
    """Describe a class of transformers. published: name of a model -> its configuration."""
    rows = tuple(Published(called, config) for called, config in published.items())
    return Family(name, model, groups, dict(keep or {}), library="transformers", kind="text_encoder", published=rows)


def _decoder(block: str, out: str, up: tuple[str, ...], down: str) -> tuple[InputGroup, ...]:
    """Group a block of which paths differ behind q, k and v: output of the attention, feed-forward up and down."""
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        InputGroup("qkv", block, qkv, joined=True, made_by="norm"),
        InputGroup("attn_out", block, (f"self_attn.{out}",), made_by="attention"),
        InputGroup("ff_up", block, up, joined=len(up) > 1, made_by="norm"),
        InputGroup("ff_down", block, (down,), made_by="activation"),
    )


def _clip(block: str) -> tuple[InputGroup, ...]:
    return _decoder(block, "out_proj", ("mlp.fc1",), "mlp.fc2")


def _language_model(block: str) -> tuple[InputGroup, ...]:
    return _decoder(block, "o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")


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
    _encoder("t5", "T5EncoderModel", _T5_GROUPS, {"T5-XXL": _T5_XXL}),
    _encoder("umt5", "UMT5EncoderModel", _T5_GROUPS, {"UMT5-XXL": {**_T5_XXL, "vocab_size": 256384}}),
    _encoder("clip", "CLIPTextModel", _clip("encoder.layers.*"), {"CLIP-L": _CLIP_L}),
    _encoder(
        "clip_projection",
        "CLIPTextModelWithProjection",
        _clip("text_model.encoder.layers.*"),
        {
            "CLIP-L with projection": _CLIP_L,
            "CLIP-G with projection": {
                **_CLIP_L,
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_hidden_layers": 32,
                "num_attention_heads": 20,
                "projection_dim": 1280,
            },
        },
        keep={"projects the pooled prompt: one row per image and few weights": ("text_projection",)},
    ),
    _encoder(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        _language_model("model.language_model.layers.*"),
        {
            "Qwen2.5-VL-7B": {
                "text_config": _decoder_config(3584, 18944, 28, 28, 4, 152064),
                "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
                "tie_word_embeddings": False,
            },
        },
        keep={_VISION: ("model.visual.**",), _LM_HEAD: ("lm_head",)},
    ),
    _encoder("qwen3", "Qwen3Model", _language_model("layers.*"), {"Qwen3-4B": _QWEN3_4B}),
    _encoder(
        "qwen3_lm",
        "Qwen3ForCausalLM",
        _language_model("model.layers.*"),
        {
            "Qwen3-4B for causal LM": _QWEN3_4B,
            "Qwen3-8B for causal LM": {**_decoder_config(4096, 12288, 36, 32, 8, 151936), "head_dim": 128},
        },
        keep={_LM_HEAD: ("lm_head",)},
    ),
    _encoder(
        "llama",
        "LlamaModel",
        _language_model("layers.*"),
        {"LLaVA-Llama-3-8B, its language model": _decoder_config(*_LLAMA3_8B, 128320)},
    ),
    _encoder(
        "llama_lm",
        "LlamaForCausalLM",
        _language_model("model.layers.*"),
        {"Llama-3.1-8B": _decoder_config(*_LLAMA3_8B, 128256)},
        keep={_LM_HEAD: ("lm_head",)},
    ),
    _encoder(
        "gemma2",
        "Gemma2Model",
        _language_model("layers.*"),
        {"Gemma-2-2B": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}},
    ),
    _encoder(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        _language_model("model.language_model.layers.*"),
        {
            "Gemma-3-12B": {
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
        },
        keep={_VISION: ("model.vision_tower.**",), _LM_HEAD: ("lm_head",)},
    ),
    _encoder(
        "mistral3",
        "Mistral3ForConditionalGeneration",
        _language_model("model.language_model.layers.*"),
        {
            "Mistral-Small-3.2-24B": {
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
        },
        keep={_VISION: ("model.vision_tower.**", "model.multi_modal_projector.**"), _LM_HEAD: ("lm_head",)},
    ),
)
