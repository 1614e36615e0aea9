"""Count the tokens of a forward pass that an image or video makes, and those that each layer sees.

A stream is a set of tokens, by name: see `ForwardPass.tokens`. The `workload` of a family gives the denoiser's input in
its pipeline, and the stream of a layer whose role does not tell it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Workload, matches
from fluxq.recipes.plan import MODULATION_ROLE


@dataclass(frozen=True)
class Convolution:
    """Describe a convolution that is no Linear.

    n, k: output channels, and the inputs of one output channel.
    channels: of the input.
    stride: input pixels to one output pixel on a side.
    depthwise: each channel by itself.
    """

    name: str
    n: int
    k: int
    channels: int
    stride: int = 1
    depthwise: bool = False


@dataclass(frozen=True)
class ForwardPass:
    """Count the tokens of one forward pass.

    image, text: of one sequence.
    vision: of one sequence's encoded first frame, which image-to-video models also attend to.
    batch: sequences.
    modulations: rows of one sequence in the network that makes the modulation of all blocks.
    normalised: whether queries and keys are normalised.
    gated: whether the activation multiplies two halves of its input.
    prompt: tokens of one text encoder where a block reads several side by side.
    levels: tokens at each resolution of a UNet, the largest first.
    routed: share of the tokens that one expert sees, on average.
    head: channels of a head where attention is linear.
    convolutions: those that take part in the cost.
    """

    family: str
    image: int
    text: int
    vision: int = 0
    batch: int = 1
    modulations: int = 1
    normalised: bool = True
    gated: bool = False
    prompt: int = 0
    levels: tuple[int, ...] = ()
    routed: float = 1.0
    head: int = 0
    convolutions: tuple[Convolution, ...] = ()

    def tokens(self, stream: str) -> float:
        """Count a stream of one sequence: "image", "text", "both", "vision", "prompt", "modulations", "one" (row).

        "level 1" is the second largest resolution, "level -1" the smallest; "routed image" is an expert's part of the
        image.
        """
        if stream.startswith("routed "):
            return self.routed * self.tokens(stream.removeprefix("routed "))
        if stream.startswith("level "):
            return self.levels[int(stream.removeprefix("level "))]
        both = self.image + self.text
        streams = {"image": self.image, "text": self.text, "both": both, "vision": self.vision, "prompt": self.prompt}
        return {**streams, "modulations": self.modulations, "one": 1}[stream]


@dataclass(frozen=True)
class CallSize:
    """A call of a pipeline; None where the pipeline decides.

    images: made together.
    height, width, frames: in pixels, and of a video.
    text: tokens of the prompt after padding.
    """

    images: int = 1
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    text: int | None = None

    def __str__(self) -> str:
        size = f" of {self.height}x{self.width}" if self.height and self.width else ""
        noun = "image" if self.frames is None else "video"
        frames = "" if self.frames is None else f", {self.frames} frames"
        return f"{self.images} {noun}{'s' * (self.images > 1)}{size}{frames}"


def forward_pass(
    family: str,
    config: Mapping[str, Any],
    size: CallSize = CallSize(),
    *,
    vae: Mapping[str, Any] | None = None,
    convolutions: Sequence[Convolution] = (),
) -> ForwardPass:
    """Count the tokens that a call of this size makes.

    There are twice as many sequences as size.images where guidance runs the model twice. ValueError for a family that
    is not modelled.

    config: of the denoiser.
    vae: configuration of the VAE, None for the family's.
    convolutions: of the model, see `convolutions_of`; those of other families than UNets and SANA are left out.
    """
    height, width, frames, batch = size.height, size.width, size.frames, size.images
    if family not in WORKLOADS:
        raise ValueError(f"{family}: its cost is not modelled; known: {', '.join(WORKLOADS)}")
    row = WORKLOADS[family]
    default_height, default_width, default_frames = row.size
    if frames is not None and default_frames == 1:
        raise ValueError(f"{family} makes images, not video: leave out the frames")
    patch = row.patch or config.get("patch_size", 2)
    factor = _vae_factor(vae) if vae else row.vae_factor
    if row.sized and isinstance(config.get("sample_size"), int):
        default_height = default_width = factor * config["sample_size"]
    pixels = factor * (patch if isinstance(patch, int) else patch[-1])
    rows, columns = (height or default_height) // pixels, (width or default_width) // pixels
    latent_frames = ((frames or default_frames) - 1) // row.frames_per_latent + 1
    if rows * columns < 1 or batch < 1 or (frames or 1) < 1:
        raise ValueError(
            f"{family}: {height}x{width}, {batch} images of {frames or 1} frames make no token; one is {pixels} pixels"
        )
    prompt = size.text or row.text
    usual = ForwardPass(
        family,
        image=rows * columns * latent_frames,
        text=prompt * row.prompts + row.extra_text,
        vision=row.vision if config.get("added_kv_proj_dim") else 0,
        batch=batch,
        normalised=bool(config.get("qk_norm", row.normalised)),
        gated=row.gated,
        prompt=prompt if row.prompts > 1 else 0,
        convolutions=_convolutions(family, row, convolutions),
    )
    return replace(usual, **row.special(rows, columns, config)) if row.special else usual


def stream_of(name: str, role: str, family: str) -> str:
    """Name the tokens that a layer sees, by the family's row for its path, else by its role or its path."""
    if role != MODULATION_ROLE:
        for pattern, stream in WORKLOADS[family].streams.items():
            if matches(pattern, name):
                return stream
    if role in STREAMS:
        return STREAMS[role]
    return next((stream for pattern, stream in KEPT_STREAMS.items() if matches(pattern, name)), "image")


def passes_before(convolution: Convolution, family: str) -> int:
    """Count the tensors as large as its input that norm and activation before a convolution read and write."""
    convolutions = WORKLOADS[family].convolutions.items()
    return next((tensors for pattern, tensors in convolutions if matches(pattern, convolution.name)), 0)


def _convolutions(family: str, row: Workload, convolutions: Sequence[Convolution]) -> tuple[Convolution, ...]:
    if not row.convolutions:
        return ()
    priced = tuple(each for each in convolutions if any(matches(pattern, each.name) for pattern in row.convolutions))
    if not priced:
        raise ValueError(
            f"{family}: much of its work is convolutions, and none were given; pass "
            "`convolutions=convolutions_of(model)`"
        )
    return priced


def _vae_factor(vae: Mapping[str, Any]) -> int:
    """Count the pixels that a latent spans on a side: a halving for each step down, or the number of Wan's VAE."""
    if "scale_factor_spatial" in vae:
        return vae["scale_factor_spatial"]
    if "spatio_temporal_scaling" in vae:  # LTX patches before it halves
        return vae["patch_size"] * 2 ** sum(vae["spatio_temporal_scaling"])
    if "temperal_downsample" in vae:  # Qwen-Image's VAE spells it so
        return 2 ** len(vae["temperal_downsample"])
    if "encoder_block_out_channels" in vae:  # SANA's
        return 2 ** (len(vae["encoder_block_out_channels"]) - 1)
    return 2 ** (len(vae["block_out_channels"]) - 1) if "block_out_channels" in vae else 8


# Role -> tokens that it sees; every other role sees the image.
STREAMS = {
    **dict.fromkeys(("text_qkv", "text_attn_out", "text_ff_up", "text_ff_down", "cross_kv"), "text"),
    **dict.fromkeys(("single_in", "mixed_out"), "both"),
    "image_kv": "vision",
    "modulation": "one",
}
# The same for Linears without a role; the first that matches.
KEPT_STREAMS = {
    "txt_in": "text",
    "condition_embedder.text_embedder.**": "text",
    "condition_embedder.image_embedder.**": "vision",
    "condition_embedder.**": "one",
    "time_text_embed.**": "one",
    "time_guidance_embed.**": "one",
    "*_modulation*.linear": "one",
    "distilled_guidance_layer.**": "modulations",
    "context_embedder.time_text_embed.**": "one",
    "context_embedder.token_refiner.refiner_blocks.*.norm_out.linear": "one",
    "context_embedder.**": "text",
    "cap_embedder.**": "text",
    "caption_projection.**": "text",
    "t_embedder.**": "one",
    "all_final_layer.*.adaLN_modulation.*": "one",
    "all_final_layer.*.linear": "both",
    "adaln_single.**": "one",
    "time_embed.**": "one",
    "norm_out.linear": "one",
}

WORKLOADS = {row.name: row.workload for row in FAMILIES.values() if row.workload}
