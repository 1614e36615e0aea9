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

Maker = Literal["norm", "attention", "activation", "concatenation", "outside"]


@dataclass(frozen=True)
class Modulation:
    """The adaLN Linear that scales and shifts a norm's output, x = norm · (1 + scale) + shift, for one group.

    linear: its path below the block. chunk: its output is a row of chunks, each as wide as x; the shift is this one,
    the scale the next.
    """

    linear: str
    chunk: int

    def rows(self, n: int, k: int) -> tuple[slice, slice]:
        """Rows of the Linear's weight (n, …) that make shift and scale of an input of k channels."""
        if n == 2 * k:  # diffusers' AdaLayerNormContinuous, which makes nothing else and puts the scale first
            return slice(k, 2 * k), slice(0, k)
        shift = self.chunk * k
        return slice(shift, shift + k), slice(shift + k, shift + 2 * k)


@dataclass(frozen=True)
class InputGroup:
    """Linears of one block that read the same input tensor; those that a configuration lacks are passed over.

    role: what recipes call them. block: pattern of the block's path. members: paths below the block. joined: a
    fused layout concatenates them along N, so they share NVFP4's global weight scale. made_by: what makes the input;
    "outside" is what comes from another block or model, and "concatenation" has the attention's channels first, as many
    as the Linear puts out, then the feed-forward's. modulation: of the norm that makes it.
    """

    role: str
    block: str
    members: tuple[str, ...]
    joined: bool = False
    made_by: Maker = "outside"
    modulation: Modulation | None = None

    @property
    def normalised(self) -> bool:
        """Whether each token was normalised, so that no token is far larger than the others."""
        return self.made_by == "norm"

    @property
    def foldable(self) -> bool:
        """Whether a mean and a factor for each channel fold into the Linear that modulates the input."""
        return self.modulation is not None

    @property
    def split(self) -> bool:
        """Whether the input is two tensors side by side, attention and feed-forward, of different statistics."""
        return self.made_by == "concatenation"


@dataclass(frozen=True)
class Stream:
    """One stream of tokens through a block that `fluxq.optimize` fuses.

    adaln: the module before the attention, with `silu`, `linear` and `norm` in it; it makes shift, scale and gate of
    the attention, then of the feed-forward. qkv, up, down: roles of input groups, of which the members of qkv begin
    with q, k and v. q_norm, k_norm: RMSNorm of each head. out: the Linear after the attention, and second_norm: the
    LayerNorm before the feed-forward. Where both are empty, `up` is the last member of qkv and `down` reads attention
    and feed-forward side by side.
    """

    adaln: str
    qkv: str
    q_norm: str
    k_norm: str
    down: str
    out: str = ""
    second_norm: str = ""
    up: str = ""


@dataclass(frozen=True)
class FusableBlock:
    """A block whose forward `fluxq.optimize` replaces, and which modules in it play which role.

    block: pattern of its path. model: its class. attention, processor: the module with the attention, and the class of
    the processor that the fused form knows. streams: in the order of their tokens in the attention. passed_over: path
    below the block -> class, modules that the fused form computes itself instead of calling them.
    """

    block: str
    model: str
    attention: str
    processor: str
    streams: tuple[Stream, ...]
    passed_over: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """One row of FAMILIES.

    model: class name, of `library`. kind: what the model does in a pipeline; only a transformer runs at every
    denoising step, so only its activations are worth quantizing. keep: pattern -> reason, Linears that stay in
    16 bit whatever a recipe says about roles. tiny_config: a configuration small enough for tests, every K a
    multiple of 128. fusable: blocks that have a fused form.
    """

    name: str
    model: str
    groups: tuple[InputGroup, ...]
    keep: dict[str, str]
    tiny_config: Mapping[str, object] = field(default_factory=dict)
    library: Literal["diffusers", "transformers"] = "diffusers"
    kind: Literal["transformer", "text_encoder", "vae"] = "transformer"
    fusable: tuple[FusableBlock, ...] = ()

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

_FLUX_BLOCKS = (
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

FAMILIES = {
    row.name: row
    for row in (
        Family(
            name="flux",
            model="FluxTransformer2DModel",
            groups=(
                *_image_and_text(
                    "transformer_blocks.*", ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear")
                ),
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
            fusable=_FLUX_BLOCKS,
        ),
        Family(
            name="sd3",
            model="SD3Transformer2DModel",
            groups=(
                *_image_and_text(
                    "transformer_blocks.*", ("ff", "ff_context"), ("norm1.linear", "norm1_context.linear")
                ),
                # A second attention, over the image alone, in the first blocks of SD3.5 medium.
                _modulated(
                    "qkv", "transformer_blocks.*", ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "norm1.linear", 6
                ),
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
                *_image_attention("encoder.mid_block.attentions.*"),
                *_image_attention("decoder.mid_block.attentions.*"),
            ),
            keep={},
            tiny_config={"block_out_channels": [128], "norm_num_groups": 8, "sample_size": 8},
        ),
    )
}
