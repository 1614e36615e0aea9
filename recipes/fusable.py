"""Name the modules of diffusers that play each role in the blocks that `fluxq.optimize` fuses.

A block needs a function in runtime/fused_calls.py that reads the arguments of its class's forward. Paths and classes
are compared with diffusers' own in tests/runtime/test_fused_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OwnAttention:
    """Describe a second attention, of one stream alone, over another modulation of the same norm.

    Its fields are those of a `Stream`. A block whose `path` is None has none.
    """

    path: str
    qkv: str
    q_norm: str
    k_norm: str
    out: str


@dataclass(frozen=True)
class CrossAttention:
    """Describe an attention of a stream to text that all blocks read.

    It also reads an image's features where the block has room for them. The first Linear of a group stands for the
    group.

    norm: before the attention.
    q: the Linear of the stream.
    kv, image_kv: the first Linear of the text's keys and values, and of the image's, or None.
    q_norm, k_norm, image_k_norm: RMSNorm over all heads.
    text_tokens: number of text tokens at the end of the attention's input; the rest is the image's.
    """

    path: str
    norm: str
    q: str
    q_norm: str
    kv: str
    k_norm: str
    image_kv: str
    image_k_norm: str
    out: str
    text_tokens: int


@dataclass(frozen=True)
class Stream:
    """Describe one stream of tokens through a block that `fluxq.optimize` fuses.

    Modules are paths below the block, and the first Linear of an input group stands for the group.

    name: "text" or "image", or "both" for one stream of both.
    modulation: the modules that the embedded timestep goes through, one after another, to become shift, scale and gate
        of the attention, then of the feed-forward; none where a call brings these.
    norm: LayerNorm before the attention.
    qkv: the Linears behind it.
    q_norm, k_norm: RMSNorm of each head.
    out: after the attention; None in a block after which the stream ends.
    second_norm: LayerNorm before the feed-forward.
    up, act, down: first Linear of the feed-forward, a row of ACTS of `quantize_activation`, last Linear.
    clipped: fp16 is kept from overflowing in the end.

    Where out, second_norm and up are empty, the Linears of qkv also make the activation's input, and `down` reads
    attention and feed-forward side by side.
    """

    name: str
    norm: str
    qkv: str
    down: str
    q_norm: str = "attn.norm_q"
    k_norm: str = "attn.norm_k"
    modulation: tuple[str, ...] = ()
    out: str = ""
    second_norm: str = ""
    up: str = ""
    act: str = "gelu_tanh"
    clipped: bool = False
    own_attention: OwnAttention | None = None
    cross: CrossAttention | None = None


@dataclass(frozen=True)
class FusableBlock:
    """Describe a block whose forward `fluxq.optimize` replaces, and the roles of the modules in it.

    block: pattern of its path.
    model: its class.
    attention: the module that its streams go through, in that order of their tokens.
    attentions: path -> class of the processor that the fused form knows.
    passed_over: path -> class of a module that the fused form computes instead of calling it: several classes with "|"
        between them, and "None" for one that a block may lack.
    per_head: norms of q and k are of each head, else of all channels.
    rotary: q and k are rotated.
    fp32_modulation: shift, scale and gate are in fp32, whatever the tokens are in.
    dispatched: the attention goes through diffusers' dispatcher, else torch.
    contiguous: the processor copies each stream's part of the attention before the next Linear, which adds a bias in 16
        bit to a tensor that is not contiguous.
    """

    block: str
    model: str
    attentions: Mapping[str, str]
    streams: tuple[Stream, ...]
    passed_over: Mapping[str, str]
    attention: str = "attn"
    per_head: bool = True
    rotary: bool = True
    fp32_modulation: bool = False
    dispatched: bool = True
    contiguous: bool = False


# The streams of an MMDiT block as most families name their modules.
IMAGE = Stream(
    name="image",
    modulation=("norm1.silu", "norm1.linear"),
    norm="norm1.norm",
    qkv="attn.to_q",
    out="attn.to_out.0",
    second_norm="norm2",
    up="ff.net.0.proj",
    down="ff.net.2",
)
TEXT = Stream(
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
)
NORM = "LayerNorm"
HEADS = {"attn.norm_q": "RMSNorm", "attn.norm_k": "RMSNorm"}
TEXT_HEADS = {"attn.norm_added_q": "RMSNorm", "attn.norm_added_k": "RMSNorm"}


def feed_forward_classes(path: str, lacking: str = "") -> dict[str, str]:
    """Name the classes in diffusers' FeedForward with GELU; lacking: "|None" for one that a block may lack."""
    classes = {path: "FeedForward", f"{path}.net.0": "GELU", f"{path}.net.1": "Dropout"}
    return {path: kind + lacking for path, kind in classes.items()}
