"""What a row of FAMILIES says: what every Linear of a model is, what shares an input and what stays in 16 bit.

Imports no torch: a row is names only, and tests check the names against the class on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fluxq.recipes.patterns import matches

Kind = Literal["transformer", "text_encoder", "vae"]
Maker = Literal["norm", "attention", "activation", "concatenation", "outside", "unknown"]


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
    "outside" is what comes from another block or model, "unknown" what no row says, and "concatenation" has the
    attention's channels first, as many as the Linear puts out, then the feed-forward's. modulation: of the norm that
    makes it.
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
class OwnAttention:
    """A second attention, of one stream alone, over another modulation of the same norm (SD3.5's `attn2`).

    Its fields say what those of a `Stream` say. A block whose `path` is None has none.
    """

    path: str
    qkv: str
    q_norm: str
    k_norm: str
    out: str


@dataclass(frozen=True)
class CrossAttention:
    """An attention of a stream to text that all blocks read, and to an image's features where the block has room for
    them; the first Linear of a group stands for the group.

    norm: before it. q: the Linear of the stream; kv: the first of the text's, image_kv: of the image's, or None. q_norm
    to image_k_norm: RMSNorm over all heads. text_tokens: those at the end of what is read; the rest is the image's.
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
    """One stream of tokens through a block that `fluxq.optimize` fuses. Modules are paths below the block, and the
    first Linear of an input group stands for the group.

    name: "text" or "image", or "both" for one stream of both. modulation: the modules that the embedded timestep goes
    through, one after another, to become shift, scale and gate of the attention, then of the feed-forward; none where
    a call brings these. norm: LayerNorm before the attention, qkv: the Linears behind it, q_norm, k_norm: RMSNorm of
    each head. out: after the attention; None in a block after which the stream ends. second_norm: LayerNorm before the
    feed-forward, of which `up` is the first Linear, then `act`, a row of ACTS in kernels/producers.py, then `down`.
    Where out, second_norm and up are empty, the Linears of qkv make what the activation reads too, and `down` reads
    attention and feed-forward side by side. clipped: fp16 is kept from overflowing in the end.
    """

    name: str
    norm: str
    qkv: str
    q_norm: str
    k_norm: str
    down: str
    modulation: tuple[str, ...] = ()
    out: str = ""
    second_norm: str = ""
    up: str = ""
    act: str = "gelu_tanh"
    clipped: bool = False
    own: OwnAttention | None = None
    cross: CrossAttention | None = None


@dataclass(frozen=True)
class FusableBlock:
    """A block whose forward `fluxq.optimize` replaces, and which modules in it play which role.

    block: pattern of its path. model: its class. attention: the module that its streams go through, in that order of
    their tokens. attentions: path -> class of the processor that the fused form knows. passed_over: path -> class, what
    the fused form computes itself instead of calling it: several classes with "|" between them, and "None" for what a
    block may lack.

    per_head: norms of q and k are of each head, else of all channels. rotary: q and k are rotated. fp32_modulation:
    shift, scale and gate are in fp32, whatever the tokens are in. dispatched: the processor asks diffusers' dispatcher
    for the attention, else torch. contiguous: it copies each stream's part of the attention before the next Linear,
    which adds a bias in 16 bit to what is not contiguous.
    """

    block: str
    model: str
    attention: str
    attentions: Mapping[str, str]
    streams: tuple[Stream, ...]
    passed_over: Mapping[str, str]
    per_head: bool = True
    rotary: bool = True
    fp32_modulation: bool = False
    dispatched: bool = True
    contiguous: bool = False


@dataclass(frozen=True)
class Family:
    """One row of FAMILIES.

    model: class name, of `library`. kind: what the model does in a pipeline; only a transformer runs at every
    denoising step, so only its activations are worth quantizing. keep: pattern -> reason, Linears that stay in
    16 bit whatever a recipe says about roles. tiny_config: a configuration small enough for tests, every K a
    multiple of 128. fusable: blocks that have a fused form. self_attention: paths of the modules whose q, k and v come
    from the same tokens and go through diffusers' attention dispatcher, without a mask, so that another attention can
    take its place. notes: what every plan warns of.
    """

    name: str
    model: str
    groups: tuple[InputGroup, ...]
    keep: dict[str, str]
    tiny_config: Mapping[str, object] = field(default_factory=dict)
    library: Literal["diffusers", "transformers"] = "diffusers"
    kind: Kind = "transformer"
    fusable: tuple[FusableBlock, ...] = ()
    self_attention: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

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
