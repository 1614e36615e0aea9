"""Model families: one row says what every Linear of a model is, what shares an input and what stays in 16 bit.

A row is one class of diffusers or transformers: a denoising transformer, a text encoder or a VAE. Adding a family
means adding a row to FAMILIES; plan, calibration, loader and tests iterate the table. Imports no torch: a row is
names only, and tests check the names against the class on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fluxq.recipes.patterns import matches


@dataclass(frozen=True)
class InputGroup:
    """Linears of one block that read the same input tensor; those that a configuration lacks are passed over.

    role: what recipes call them. block: pattern of the block's path. members: paths below the block. joined: a
    fused layout concatenates them along N, so they share NVFP4's global weight scale.
    """

    role: str
    block: str
    members: tuple[str, ...]
    joined: bool = False


@dataclass(frozen=True)
class Family:
    """One row of FAMILIES.

    model: class name, of `library`. kind: what the model does in a pipeline; only a transformer runs at every
    denoising step, so only its activations are worth quantizing. keep: pattern -> reason, Linears that stay in
    16 bit whatever a recipe says about roles. tiny_config: a configuration small enough for tests, every K a
    multiple of 128.
    """

    name: str
    model: str
    groups: tuple[InputGroup, ...]
    keep: dict[str, str]
    tiny_config: Mapping[str, object] = field(default_factory=dict)
    library: Literal["diffusers", "transformers"] = "diffusers"
    kind: Literal["transformer", "text_encoder", "vae"] = "transformer"

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles in the order of the row, without repeats."""
        return tuple(dict.fromkeys(group.role for group in self.groups))

    def locate(self, path: str) -> tuple[InputGroup, str] | None:
        """The input group of the Linear at `path` and the path of its block; None if no group names it."""
        segments = path.split(".")
        for group in self.groups:
            depth = len(group.block.split("."))
            block, member = ".".join(segments[:depth]), ".".join(segments[depth:])
            if member in group.members and matches(group.block, block):
                return group, block
        return None

    def kept(self, path: str) -> str | None:
        """Why the Linear at `path` stays in 16 bit, or None."""
        return next((reason for pattern, reason in self.keep.items() if matches(pattern, path)), None)


def family_of(model_class: str) -> Family:
    """The row for a class of diffusers or transformers; ValueError that says how to add one."""
    for family in FAMILIES.values():
        if family.model == model_class:
            return family
    known = ", ".join(family.model for family in FAMILIES.values())
    raise ValueError(
        f"unknown model family: {model_class} has no row in recipes/families.py (known: {known}); "
        "CONTRIBUTING.md, 'Adding a model family', shows how to add one"
    )


_EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
_FINAL = "last projection: its error goes to the image undamped"
_VISION = "vision tower: few weights, and prompts of plain text never pass through it"
_LM_HEAD = "predicts words: no pipeline looks at its output, and it may share the embedding's weight"


def _image_and_text(block: str, image_ff: str, text_ff: str) -> tuple[InputGroup, ...]:
    """A block of two streams that share one attention (MMDiT)."""
    return (
        InputGroup("qkv", block, ("attn.to_q", "attn.to_k", "attn.to_v"), joined=True),
        InputGroup("text_qkv", block, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), joined=True),
        InputGroup("attn_out", block, ("attn.to_out.0",)),
        InputGroup("text_attn_out", block, ("attn.to_add_out",)),
        InputGroup("ff_up", block, (f"{image_ff}.net.0.proj",)),
        InputGroup("text_ff_up", block, (f"{text_ff}.net.0.proj",)),
        InputGroup("ff_down", block, (f"{image_ff}.net.2",)),
        InputGroup("text_ff_down", block, (f"{text_ff}.net.2",)),
    )


def _clip(block: str) -> tuple[InputGroup, ...]:
    return (
        InputGroup("qkv", block, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), joined=True),
        InputGroup("attn_out", block, ("self_attn.out_proj",)),
        InputGroup("ff_up", block, ("mlp.fc1",)),
        InputGroup("ff_down", block, ("mlp.fc2",)),
    )


def _language_model(block: str) -> tuple[InputGroup, ...]:
    return (
        InputGroup("qkv", block, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), joined=True),
        InputGroup("attn_out", block, ("self_attn.o_proj",)),
        InputGroup("ff_up", block, ("mlp.gate_proj", "mlp.up_proj"), joined=True),
        InputGroup("ff_down", block, ("mlp.down_proj",)),
    )


_T5_QKV = ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v")
_T5_GATE_AND_UP = ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1")
_T5_GROUPS = (
    InputGroup("qkv", "encoder.block.*", _T5_QKV, joined=True),
    InputGroup("attn_out", "encoder.block.*", ("layer.0.SelfAttention.o",)),
    InputGroup("ff_up", "encoder.block.*", _T5_GATE_AND_UP, joined=True),
    InputGroup("ff_up", "encoder.block.*", ("layer.1.DenseReluDense.wi",)),  # where the feed-forward has no gate
    InputGroup("ff_down", "encoder.block.*", ("layer.1.DenseReluDense.wo",)),
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

FAMILIES = {
    row.name: row
    for row in (
        Family(
            name="flux",
            model="FluxTransformer2DModel",
            groups=(
                *_image_and_text("transformer_blocks.*", "ff", "ff_context"),
                InputGroup(
                    "single_in",
                    "single_transformer_blocks.*",
                    ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
                    joined=True,
                ),
                InputGroup("mixed_out", "single_transformer_blocks.*", ("proj_out",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1.linear",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1_context.linear",)),
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
        ),
        Family(
            name="sd3",
            model="SD3Transformer2DModel",
            groups=(
                *_image_and_text("transformer_blocks.*", "ff", "ff_context"),
                # A second attention, over the image alone, in the first blocks of SD3.5 medium.
                InputGroup("qkv", "transformer_blocks.*", ("attn2.to_q", "attn2.to_k", "attn2.to_v"), joined=True),
                InputGroup("attn_out", "transformer_blocks.*", ("attn2.to_out.0",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1.linear",)),
                InputGroup("modulation", "transformer_blocks.*", ("norm1_context.linear",)),
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
            groups=(
                *_image_and_text("transformer_blocks.*", "img_mlp", "txt_mlp"),
                InputGroup("modulation", "transformer_blocks.*", ("img_mod.1",)),
                InputGroup("modulation", "transformer_blocks.*", ("txt_mod.1",)),
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
        ),
        Family(
            name="wan",
            model="WanTransformer3DModel",
            groups=(
                InputGroup("qkv", "blocks.*", ("attn1.to_q", "attn1.to_k", "attn1.to_v"), joined=True),
                InputGroup("attn_out", "blocks.*", ("attn1.to_out.0",)),
                InputGroup("cross_q", "blocks.*", ("attn2.to_q",)),
                InputGroup("cross_kv", "blocks.*", ("attn2.to_k", "attn2.to_v"), joined=True),
                # Image-to-video models attend to the first frame's features too.
                InputGroup("image_kv", "blocks.*", ("attn2.add_k_proj", "attn2.add_v_proj"), joined=True),
                InputGroup("cross_out", "blocks.*", ("attn2.to_out.0",)),
                InputGroup("ff_up", "blocks.*", ("ffn.net.0.proj",)),
                InputGroup("ff_down", "blocks.*", ("ffn.net.2",)),
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
                InputGroup("qkv", "encoder.mid_block.attentions.*", ("to_q", "to_k", "to_v"), joined=True),
                InputGroup("attn_out", "encoder.mid_block.attentions.*", ("to_out.0",)),
                InputGroup("qkv", "decoder.mid_block.attentions.*", ("to_q", "to_k", "to_v"), joined=True),
                InputGroup("attn_out", "decoder.mid_block.attentions.*", ("to_out.0",)),
            ),
            keep={},
            tiny_config={"block_out_channels": [128], "norm_num_groups": 8, "sample_size": 8},
        ),
    )
}
