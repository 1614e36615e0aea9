"""Arguments of calls of fused blocks: a function for each class of blocks, with the arguments of its forward.

Each returns the inputs of the forms in fused_forms.py, or names an argument that they do not know; then the block's own
forward computes the call. Nothing heavy is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockInputs:
    """Inputs that a call gives a block, by names of the row's streams.

    unknown: argument that the forms do not know, or empty; with one the rest may be empty.
    streams: tokens (B, S, D), first those that the block changes.
    modulation: the embedded timestep (B, D), or shift, scale and gate side by side (B, n · D).
    rope: cos and sin of all tokens of the attention, (S, D) fp32 where heads have norms, or None.
    mask: of the attention.
    text_tokens: where to split the output of a joined stream; None for one that stays whole.
    """

    unknown: str = ""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    modulation: Mapping[str, Tensor] = field(default_factory=dict)
    rope: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None
    text_tokens: int | None = None

    @property
    def x(self) -> Tensor:
        """First stream, with the dtype, device and number of images of the call."""
        return next(iter(self.streams.values()))


def _flux(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
    streams = {"text": encoder_hidden_states, "image": hidden_states}
    return _with_rope(streams, {"text": temb, "image": temb}, image_rotary_emb, joint_attention_kwargs)


def _flux_single(block, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
    streams, text_tokens = {"text": encoder_hidden_states, "image": hidden_states}, encoder_hidden_states.shape[1]
    return _with_rope(streams, {"both": temb}, image_rotary_emb, joint_attention_kwargs, text_tokens)


def _flux2(
    block,
    hidden_states,
    encoder_hidden_states,
    temb_mod_img,
    temb_mod_txt,
    image_rotary_emb=None,
    joint_attention_kwargs=None,
):
    streams = {"text": encoder_hidden_states, "image": hidden_states}
    modulation = {"text": _per_image(temb_mod_txt), "image": _per_image(temb_mod_img)}
    return _with_rope(streams, modulation, image_rotary_emb, joint_attention_kwargs)


def _flux2_single(
    block,
    hidden_states,
    encoder_hidden_states,
    temb_mod,
    image_rotary_emb=None,
    joint_attention_kwargs=None,
    split_hidden_states=False,
    text_seq_len=None,
):
    streams = {"image": hidden_states}
    if encoder_hidden_states is not None:
        streams, text_seq_len = {"text": encoder_hidden_states, **streams}, encoder_hidden_states.shape[1]
    if split_hidden_states and text_seq_len is None:
        return BlockInputs("a stream to split at text_seq_len None")
    text_tokens = text_seq_len if split_hidden_states else None
    return _with_rope(streams, {"both": _per_image(temb_mod)}, image_rotary_emb, joint_attention_kwargs, text_tokens)


def _with_rope(
    streams: Mapping[str, Tensor],
    modulation: Mapping[str, Tensor],
    rope: tuple[Tensor, Tensor] | None,
    attention_arguments: dict[str, Any] | None,
    text_tokens: int | None = None,
) -> BlockInputs:
    """Return the inputs of a block with rotary embeddings, unless something of them is unknown."""
    if rope is None or attention_arguments:
        return BlockInputs(_why_unknown(attention_arguments))
    if any(chunks.ndim != 2 for chunks in modulation.values()):
        return BlockInputs(PER_TOKEN)
    return BlockInputs(streams=streams, modulation=modulation, rope=rope, text_tokens=text_tokens)


def _sd3(block, hidden_states, encoder_hidden_states, temb, joint_attention_kwargs=None):
    if joint_attention_kwargs:
        return BlockInputs(_why_unknown(joint_attention_kwargs))
    if block._chunk_size is not None:
        return BlockInputs("a feed-forward in chunks (enable_forward_chunking)")
    return BlockInputs(
        streams={"image": hidden_states, "text": encoder_hidden_states},
        modulation={"image": temb, "text": temb},
    )


def _qwen_image(
    block,
    hidden_states,
    encoder_hidden_states,
    encoder_hidden_states_mask,
    temb,
    image_rotary_emb=None,
    joint_attention_kwargs=None,
    modulate_index=None,
):
    if image_rotary_emb is None or joint_attention_kwargs:
        return BlockInputs(_why_unknown(joint_attention_kwargs))
    if block.zero_cond_t or modulate_index is not None:
        return BlockInputs(PER_TOKEN)
    image, text = image_rotary_emb
    if image.dtype != torch.complex64 or text.dtype != torch.complex64:
        return BlockInputs(f"rotary embeddings in {image.dtype} and {text.dtype}, expected complex64")
    mask = encoder_hidden_states_mask
    if mask is not None:
        of_image = torch.ones(hidden_states.shape[:2], dtype=torch.bool, device=hidden_states.device)
        mask = torch.cat([mask, of_image], dim=1)[:, None, None]
    return BlockInputs(
        streams={"text": encoder_hidden_states, "image": hidden_states},
        modulation={"text": temb, "image": temb},
        rope=_real(torch.cat([text, image])),
        mask=mask,
    )


def _wan(block, hidden_states, encoder_hidden_states, temb, rotary_emb):
    if temb.ndim != 3:
        return BlockInputs(PER_TOKEN)
    if rotary_emb is None:
        return BlockInputs(_why_unknown(None))
    return BlockInputs(
        streams={"image": hidden_states, "text": encoder_hidden_states},
        modulation={"image": (block.scale_shift_table + temb.float()).flatten(1)},
        rope=rotary_emb,
    )


def _why_unknown(attention_arguments: dict[str, Any] | None) -> str:
    return f"joint_attention_kwargs {', '.join(attention_arguments)}" if attention_arguments else "no rotary embedding"


def _per_image(modulation: Tensor) -> Tensor:
    """View (B, 1, N) as (B, N)."""
    return modulation.squeeze(1) if modulation.ndim == 3 and modulation.shape[1] == 1 else modulation


def _real(rotations: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin (S, D) of complex rotations (S, D / 2), which turn pairs of neighbours.

    x · (cos + i sin) rounds as x · cos + rotate(x) · sin does where heads are a multiple of 16 wide: torch multiplies
    the remainder of complex vectors with fused multiply-adds.
    """
    cos, sin = torch.view_as_real(rotations).repeat_interleave(2, dim=1).unbind(-1)
    return cos.contiguous(), sin.contiguous()


PER_TOKEN = "modulation that differs from token to token"

CALLS = {
    "FluxTransformerBlock": _flux,
    "FluxSingleTransformerBlock": _flux_single,
    "Flux2TransformerBlock": _flux2,
    "Flux2SingleTransformerBlock": _flux2_single,
    "JointTransformerBlock": _sd3,
    "QwenImageTransformerBlock": _qwen_image,
    "WanTransformerBlock": _wan,
}
