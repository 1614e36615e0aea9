"""What a row of FAMILIES says: what every Linear of a model is, what shares an input and what stays in 16 bit.

Imports no torch: a row is names only, and tests check the names against the class on the meta device.
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
