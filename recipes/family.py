"""State the facts of a model family: Linears, original names, work and published configurations.

families/ has a file for each family. Imports no torch: a row is names only, and tests check the names against the class
on the meta device. Patterns over module paths are anchored at both ends: `*` is one path segment (or part of one), `**`
any number of segments, and `proj_out` is the module at the top, never `single_transformer_blocks.0.proj_out`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from fluxq.recipes.fusable import FusableBlock
from fluxq.recipes.keymap_rows import Rule

Kind = Literal["transformer", "text_encoder", "vae"]
Maker = Literal["norm", "attention", "activation", "concatenation", "outside", "unknown"]

# Reasons why layers are kept in 16 bit, and members of blocks, that several families have.
EMBEDDER = "embeds the timestep, text or patches: few weights, and every token depends on them"
FINAL = "last projection: its error goes to the image undamped"
SHARED = "modulates every block: few weights, and their error reaches all blocks"
_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
FF = ("ff.net.0.proj", "ff.net.2")
_TEXT_FF = ("ff_context.net.0.proj", "ff_context.net.2")


@dataclass(frozen=True)
class Modulation:
    """Name the adaLN Linear that scales and shifts a norm's output, x = norm · (1 + scale) + shift, for one group.

    linear: its path below the block.
    chunk: place of the shift in its output, a row of chunks, each as wide as x; the scale is the next one.
    """

    linear: str
    chunk: int

    def rows(self, n: int, k: int) -> tuple[slice, slice]:
        """Return the rows of the Linear's weight (n, …) that make shift and scale of an input of k channels."""
        if n == 2 * k:  # diffusers' AdaLayerNormContinuous, which makes nothing else and puts the scale first
            return slice(k, 2 * k), slice(0, k)
        shift = self.chunk * k
        return slice(shift, shift + k), slice(shift + k, shift + 2 * k)


@dataclass(frozen=True)
class Producer:
    """Name a Linear whose outputs become channels of an input one by one, so that factors on its rows come out of it.

    Attention is a mean of its values, x = P V with rows of P that sum to one: P (V - 1 c^T) diag(s) = (x - 1 c^T)
    diag(s). A gated unit is a product, x = act(g) * u: act(g) * (u diag(s)) = x diag(s).

    linear: its path below the block.
    chunk: place of its rows for this input, in chunks as wide as the segment; a negative one counts from the end.
    shifts: whether what is subtracted from its bias is subtracted from the input; it is in attention.
    segment: of an input of two tensors side by side, the one that it makes.
    """

    linear: str
    chunk: int = 0
    shifts: bool = True
    segment: int = 0

    def rows(self, n: int, k: int) -> slice:
        """Return the rows of the Linear's weight (n, ...) that make a segment of k channels."""
        start = self.chunk * k if self.chunk >= 0 else n + self.chunk * k
        return slice(start, start + k)


@dataclass(frozen=True)
class InputGroup:
    """Group Linears of one block that read the same input tensor; those that a configuration lacks are passed over.

    role: their name in recipes.
    block: pattern of the block's path.
    members: paths below the block.
    joined: whether a fused layout concatenates them along N, so that they share NVFP4's global weight scale.
    made_by: maker of the input; "outside" is another block or model, "unknown" one that no row names, and
        "concatenation" has the attention's channels first, as many as the Linear's outputs, then the feed-forward's.
    modulation: of the norm that makes the input.
    producers: of an input that attention or a gated unit makes; those that a configuration lacks are passed over.
        Groups of one block with the same producers read the outputs of one attention.
    """

    role: str
    block: str
    members: tuple[str, ...]
    joined: bool = False
    made_by: Maker = "outside"
    modulation: Modulation | None = None
    producers: tuple[Producer, ...] = ()

    @property
    def split(self) -> bool:
        """Tell whether the input is two tensors side by side, attention and feed-forward, of different statistics."""
        return self.made_by == "concatenation"

    def segments(self, n: int, k: int) -> tuple[int, ...]:
        """Return the widths of the tensors side by side in the input of a member (N, K); attention makes N channels."""
        return (n, k - n) if self.split and n < k else (k,)


@dataclass(frozen=True)
class Workload:
    """State the input that a family's pipeline feeds its denoiser.

    size: height, width and frames of a call that says nothing of them.
    text, extra_text: tokens that a prompt is padded to, and those of a second encoder.
    prompts: texts of that length that a block reads side by side.
    patch: latents that a token spans on a side, None where the configuration has it.
    sized: whether the pipeline makes images of the configuration's `sample_size`.
    attention: (pattern of a Linear, stream of queries, stream of keys). The Linear has as many outputs as the attention
        has channels: it makes the queries, or keys of its own; where those are fused with others, it reads the
        attention. "own" is the stream that the Linear reads, and keys that are "linear" make a sum over all tokens
        first.
    streams: pattern -> stream, where the role alone does not tell it.
    vae_factor: of the family's VAE.
    convolutions: pattern -> tensors as large as its input that norm and activation before it read and write.
    special: function of rows and columns of tokens and the configuration -> fields of `ForwardPass` that this family
        alone has, or counts in its own way.
    """

    text: int
    attention: tuple[tuple[str, str, str], ...]
    size: tuple[int, int, int] = (1024, 1024, 1)
    extra_text: int = 0
    prompts: int = 1
    patch: int | None = None
    sized: bool = False
    frames_per_latent: int = 4
    vision: int = 0
    normalised: bool = True
    gated: bool = False
    streams: Mapping[str, str] = field(default_factory=dict)
    vae_factor: int = 8
    convolutions: Mapping[str, int] = field(default_factory=dict)
    special: Callable[[int, int, Mapping[str, Any]], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Published:
    """Name a published model, or the part of it that a family describes, and its configuration.

    name: as people write it.
    family: name of the row that lists it, in PUBLISHED.
    also: models with the same configuration.
    count: how many of it a pipeline has.
    size: fields of `CallSize` that differ from the family's usual size.
    vae: configuration of another VAE than the family's.
    beside: the pipeline's text encoders and VAE, names of other rows or classes of diffusers; empty where they are not
        listed yet.
    """

    name: str
    config: Mapping[str, Any]
    also: tuple[str, ...] = ()
    count: int = 1
    size: Mapping[str, Any] = field(default_factory=dict)
    vae: Mapping[str, Any] | None = None
    beside: tuple[str, ...] = ()
    family: str = ""


@dataclass(frozen=True)
class Family:
    """Describe a class of models; a row of FAMILIES.

    model: class name, of `library`.
    kind: part in a pipeline; only a transformer runs at every denoising step, so only its activations are worth
        quantizing.
    keep: reason -> patterns of Linears that stay in 16 bit whatever a recipe says about roles.
    fusable: blocks that have a fused form.
    self_attention: paths of the modules whose q, k and v come from the same tokens and go through diffusers' attention
        dispatcher, without a mask, so that another attention can take its place.
    notes: warnings of every plan.
    workload: of a denoiser, the input from the pipeline.
    originals: of a denoiser, its tensors' names in its authors' code and ComfyUI, see keymaps.py; rows, or a function
        that makes them from the names of a model.
    embedded_timestep: of a denoiser, function of a timestep of the scheduler, a tensor, to the embedder's input: the
        pipeline's arithmetic, then the model's, in the dtype that arrives; a wrong one costs a look-up, not the image.
    published: models of this class, with their configurations.
    hub_ids: published model -> its pipelines in diffusers' layout on the Hugging Face hub.
    hub_owner: owner of all of them there, each under its own name.
    """

    name: str
    model: str
    groups: tuple[InputGroup, ...]
    keep: dict[str, tuple[str, ...]]
    library: Literal["diffusers", "transformers"] = "diffusers"
    kind: Kind = "transformer"
    fusable: tuple[FusableBlock, ...] = ()
    self_attention: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    workload: Workload | None = None
    originals: tuple[Rule, ...] | Callable[[Collection[str]], tuple[Rule, ...]] = ()
    embedded_timestep: Callable[[Any, Any], Any] | None = None
    published: tuple[Published, ...] = ()
    hub_owner: str = ""
    hub_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pipelines(self) -> Mapping[str, tuple[str, ...]]:
        """Return the published models' repositories on the Hugging Face hub, by name."""
        names = [name for model in self.published for name in (model.name, *model.also)]
        return {name: (f"{self.hub_owner}/{name}",) for name in names} if self.hub_owner else self.hub_ids

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles in the order of the row, without repeats."""
        return tuple(dict.fromkeys(group.role for group in self.groups))

    def locate(self, path: str) -> tuple[InputGroup, str] | None:
        """Find the input group of the Linear at `path` and the path of its block; None if no group names it."""
        segments = path.split(".")
        for group in self.groups:
            depth = len(group.block.split("."))
            block, member = ".".join(segments[:depth]), ".".join(segments[depth:])
            if member in group.members and matches(group.block, block):
                return group, block
        return None

    def sharing_vectors(self, group: InputGroup, block: str) -> list[str]:
        """Return the paths of a block's Linears with one mean and one set of factors: of a group, or of one attention.

        A configuration may lack some of them.
        """
        groups = [one for one in self.groups if one.producers == group.producers and matches(one.block, block)]
        same = groups if group.producers and group.modulation is None else [group]
        return [f"{block}.{member}" for one in same for member in one.members]

    def kept(self, path: str) -> str | None:
        """Return the reason why the Linear at `path` stays in 16 bit, or None."""
        return next((why for why, patterns in self.keep.items() if any(matches(p, path) for p in patterns)), None)


def normed(role: str, block: str, members: tuple[str, ...], modulation: str = "", chunk: int = 0) -> InputGroup:
    """Group Linears behind a norm; modulation: the Linear of the same block that scales and shifts it, if any."""
    by = Modulation(modulation, chunk) if modulation else None
    return InputGroup(role, block, members, len(members) > 1, "norm", by)


def attended(role: str, block: str, out: str, *values: str) -> InputGroup:
    """Group the Linear `out` behind an attention to what the Linears `values` make."""
    return InputGroup(role, block, (out,), made_by="attention", producers=tuple(map(Producer, values)))


def gated(role: str, block: str, down: str, up: str, chunk: int = 0) -> InputGroup:
    """Group the Linear `down` behind a gated unit; up, chunk: rows of the factor that passes no activation function."""
    producers = (Producer(up, chunk, shifts=False),)
    return InputGroup(role, block, (down,), made_by="activation", producers=producers)


def image_and_text(
    block: str,
    image_ff: tuple[str, str] = FF,
    text_ff: tuple[str, str] = _TEXT_FF,
    modulation: tuple[str, str] = ("", ""),
    gate_first: bool = False,
) -> tuple[InputGroup, ...]:
    """Group a block of two streams that share one attention (MMDiT). image_ff, text_ff: up and down.

    modulation: of the image, of the text; it makes shift, scale and gate of the attention, then of the feed-forward.
    gate_first: the feed-forward is gated, and its up-projection makes the gate, then the other factor.
    """
    image, text = modulation
    values = ("attn.to_v", "attn.add_v_proj")

    def down(role: str, ff: tuple[str, str]) -> InputGroup:
        return gated(role, block, ff[1], ff[0], 1) if gate_first else activated(role, block, ff[1])

    return (
        normed("qkv", block, _QKV, image, 0),
        normed("text_qkv", block, _ADDED_QKV, text, 0),
        attended("attn_out", block, "attn.to_out.0", *values),
        attended("text_attn_out", block, "attn.to_add_out", *values),
        normed("ff_up", block, image_ff[:1], image, 3),
        normed("text_ff_up", block, text_ff[:1], text, 3),
        down("ff_down", image_ff),
        down("text_ff_down", text_ff),
        *(InputGroup("modulation", block, (linear,)) for linear in modulation if linear),
    )


def both_at_once(
    block: str,
    members: tuple[str, ...] = (*_QKV, "proj_mlp"),
    down: str = "proj_out",
    modulation: str = "",
    producers: tuple[Producer, ...] = (Producer("attn.to_v"),),
) -> tuple[InputGroup, ...]:
    """Group a block of one stream whose attention and feed-forward run side by side."""
    return (
        normed("single_in", block, members, modulation, 0),
        InputGroup("mixed_out", block, (down,), made_by="concatenation", producers=producers),
        *(InputGroup("modulation", block, (linear,)) for linear in (modulation,) if linear),
    )


def self_and_cross(block: str, cross_q: Maker) -> tuple[InputGroup, ...]:
    """Group the attention to the image itself and the one to the text; cross_q: what makes the input of the latter."""
    # Image-to-video models add an attention to the first frame, so its mean is not that of the text's values alone.
    values = (Producer("attn2.to_v"), Producer("attn2.add_v_proj", shifts=False))
    return (
        normed("qkv", block, ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
        attended("attn_out", block, "attn1.to_out.0", "attn1.to_v"),
        InputGroup("cross_q", block, ("attn2.to_q",), made_by=cross_q),
        InputGroup("cross_kv", block, ("attn2.to_k", "attn2.to_v"), joined=True),
        InputGroup("cross_out", block, ("attn2.to_out.0",), made_by="attention", producers=values),
    )


def feed_forward(block: str, up: str, down: str) -> tuple[InputGroup, ...]:
    return normed("ff_up", block, (up,)), activated("ff_down", block, down)


def activated(role: str, block: str, down: str) -> InputGroup:
    """Group the Linear `down` behind an activation function."""
    return InputGroup(role, block, (down,), made_by="activation")


def matches(pattern: str, path: str) -> bool:
    """Tell whether the module path `path` matches `pattern` as a whole."""
    return _compile(pattern).fullmatch("." + path) is not None


def compact(paths: Iterable[str]) -> str:
    """Return module paths as people read them: by their blocks, with * for indices."""
    starred = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", path) for path in paths)
    blocks: dict[str, list[str]] = {}
    for path in starred:
        block, star, rest = path.partition(".*.")
        blocks.setdefault(block if star else "", []).append(rest if star else path)
    return ", ".join(
        ", ".join(rest) if not block else f"{block}.*.{rest[0] if len(rest) == 1 else '{' + ', '.join(rest) + '}'}"
        for block, rest in blocks.items()
    )


def in_every_block(path: str) -> str:
    """Return the pattern of a module's path and of those in its place in other blocks: * for indices."""
    return ".".join("*" if segment.isdigit() else segment for segment in path.split("."))


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> re.Pattern[str]:
    if "" in pattern.split("."):
        raise ValueError(f"pattern {pattern!r} is no module path; write for example 'transformer_blocks.*.attn.to_q'")
    return re.compile("".join(_segment(segment) for segment in pattern.split(".")))


def _segment(segment: str) -> str:
    if segment == "**":
        return r"(?:\.[^.]+)*"
    return r"\." + (r"[^.]+" if segment == "*" else "[^.]*".join(map(re.escape, segment.split("*"))))
