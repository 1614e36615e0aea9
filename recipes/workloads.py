"""What a forward pass works on: the tokens that an image or video makes, and which of them each layer sees.

A stream is a set of tokens, by name: see `ForwardPass.tokens`. A row of WORKLOADS says what a family's pipeline feeds
its denoiser, and which stream a layer reads where its role does not say it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxq.recipes.patterns import matches
from fluxq.recipes.plan import MODULATION_ROLE


@dataclass(frozen=True)
class Convolution:
    """A convolution that is no Linear. n, k: output channels, and what one output channel reads of the input.

    channels: of the input. stride: input pixels to one output pixel on a side. depthwise: each channel by itself.
    """

    name: str
    n: int
    k: int
    channels: int
    stride: int = 1
    depthwise: bool = False


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of one forward pass. image, text, vision: of one sequence, by stream; batch: sequences.

    vision: tokens of an encoded first frame, which image-to-video models also attend to. modulations: rows that the
    network sees that makes the modulation of all blocks, of one sequence. normalised: whether queries
    and keys are normalised. gated: whether the activation multiplies two halves of what it reads. prompt: tokens of one
    text encoder where a block reads several side by side. levels: tokens at each resolution of a UNet, the largest
    first. routed: share of the tokens that one expert sees, on average. head: channels of a head where attention is
    linear. convolutions: those that take part in the cost.
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
        """Tokens of one sequence in a stream: "image", "text", "both", "vision", "prompt", "modulations", "one" (row).

        "level 1" is the second largest resolution, "level -1" the smallest; "routed image" is what an expert sees of
        the image.
        """
        if stream.startswith("routed "):
            return self.routed * self.tokens(stream.removeprefix("routed "))
        if stream.startswith("level "):
            return self.levels[int(stream.removeprefix("level "))]
        both = self.image + self.text
        streams = {"image": self.image, "text": self.text, "both": both, "vision": self.vision, "prompt": self.prompt}
        return {**streams, "modulations": self.modulations, "one": 1}[stream]


@dataclass(frozen=True)
class Workload:
    """What a family's pipeline feeds its denoiser; a row of WORKLOADS.

    size: height, width and frames if nobody says otherwise. text: tokens that a prompt is padded to; extra_text: more
    of a second encoder; prompts: texts of that length that a block reads side by side. patch: latents that a token
    spans on a side, None where the configuration says so. sized: whether the pipeline makes images of the
    configuration's `sample_size`. attention: pattern of a Linear with as many outputs as the attention has channels (it
    makes the queries, or keys of its own; where those are fused with others, it reads the attention), streams of
    queries and of keys; "own" is what that Linear sees, and keys that are "linear" make a sum over all tokens first.
    streams: pattern -> stream, where the role alone does not say it. vae_factor: of the family's VAE. convolutions:
    pattern -> tensors as large as its input that norm and activation before it read and write.
    """

    size: tuple[int, int, int]
    text: int
    attention: tuple[tuple[str, str, str], ...]
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


def forward_pass(
    family: str,
    config: Mapping[str, Any],
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    text: int | None = None,
    batch: int = 1,
    vae: Mapping[str, Any] | None = None,
    convolutions: Sequence[Convolution] = (),
) -> ForwardPass:
    """The tokens that an image (or video) of that size makes.

    config: of the denoiser; vae: of the VAE, None for the family's. height, width: pixels. text: tokens of
    the prompt after padding. None takes what the family's pipeline takes by itself. batch: images; twice as many
    sequences where guidance runs the model twice. convolutions: of the model, see `convolutions_of`; those of other
    families than UNets and SANA are left out. ValueError for a family that is not modelled.
    """
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
    image, prompt = rows * columns * latent_frames, text or row.text
    if family == "hidream" and rows != columns:
        image = _most_tokens(config)  # what is not square is padded
    return ForwardPass(
        family,
        image=image,
        text=prompt * row.prompts + row.extra_text,
        vision=row.vision if config.get("added_kv_proj_dim") else 0,
        batch=batch,
        modulations=_modulations(config) if family == "chroma" else 1,
        normalised=bool(config.get("qk_norm", row.normalised)),
        gated=row.gated,
        prompt=prompt if row.prompts > 1 else 0,
        levels=_levels(rows, columns, config) if family == "unet" else (),
        routed=_routed(config) if family == "hidream" else 1.0,
        head=config.get("attention_head_dim", 32) if family == "sana" else 0,
        convolutions=_convolutions(family, row, convolutions),
    )


def stream_of(name: str, role: str, family: str) -> str:
    """Which tokens a layer sees: what its family says of its path, else what its role or its path says."""
    if role != MODULATION_ROLE:
        for pattern, stream in WORKLOADS[family].streams.items():
            if matches(pattern, name):
                return stream
    if role in STREAMS:
        return STREAMS[role]
    return next((stream for pattern, stream in KEPT_STREAMS.items() if matches(pattern, name)), "image")


def passes_before(convolution: Convolution, family: str) -> int:
    """Tensors as large as its input that norm and activation before a convolution read and write."""
    found = WORKLOADS[family].convolutions.items()
    return next((tensors for pattern, tensors in found if matches(pattern, convolution.name)), 0)


def _convolutions(family: str, row: Workload, given: Sequence[Convolution]) -> tuple[Convolution, ...]:
    if not row.convolutions:
        return ()
    taken = tuple(each for each in given if any(matches(pattern, each.name) for pattern in row.convolutions))
    if not taken:
        raise ValueError(
            f"{family}: much of its work is convolutions, and none were given; pass "
            "`convolutions=convolutions_of(model)`"
        )
    return taken


def _levels(rows: int, columns: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Pixels at each resolution of a UNet: a step down halves both sides and rounds up."""
    levels = [(rows, columns)]
    for _ in config["down_block_types"][1:]:
        levels.append((-(-levels[-1][0] // 2), -(-levels[-1][1] // 2)))
    return tuple(height * width for height, width in levels)


def _routed(config: Mapping[str, Any]) -> float:
    return config.get("num_activated_experts", 2) / config.get("num_routed_experts", 4)


def _most_tokens(config: Mapping[str, Any]) -> int:
    height, width = config.get("max_resolution", (128, 128))
    return height * width // config.get("patch_size", 2) ** 2


def _modulations(config: Mapping[str, Any]) -> int:
    """Vectors that Chroma's network makes: shift, scale and gate of each norm, and two of the last."""
    return 12 * config["num_layers"] + 3 * config["num_single_layers"] + 2


def _vae_factor(vae: Mapping[str, Any]) -> int:
    """Pixels that a latent spans on a side: as Wan's VAE says, or a halving for each step down of the others."""
    if "scale_factor_spatial" in vae:
        return vae["scale_factor_spatial"]
    if "spatio_temporal_scaling" in vae:  # LTX patches before it halves
        return vae["patch_size"] * 2 ** sum(vae["spatio_temporal_scaling"])
    if "temperal_downsample" in vae:  # Qwen-Image's VAE spells it so
        return 2 ** len(vae["temperal_downsample"])
    if "encoder_block_out_channels" in vae:  # SANA's
        return 2 ** (len(vae["encoder_block_out_channels"]) - 1)
    return 2 ** (len(vae["block_out_channels"]) - 1) if "block_out_channels" in vae else 8


_MOST_LEVELS = 8  # of a UNet; published ones have three or four

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

WORKLOADS = {
    "flux": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # the pipeline packs 2 x 2 latents, the configuration says 1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
    ),
    "flux2": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # as for FLUX.1
        gated=True,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_out", "both", "both"),
        ),
    ),
    "sd3": Workload(
        size=(1024, 1024, 1),
        sized=True,
        text=256,
        extra_text=77,
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("transformer_blocks.*.attn2.to_q", "image", "image"),
        ),
    ),
    "qwen_image": Workload(
        size=(1024, 1024, 1),
        text=512,
        attention=(("transformer_blocks.*.attn.to_q", "both", "both"),),
    ),
    "wan": Workload(
        size=(480, 832, 81),
        text=512,
        vision=257,
        attention=(
            ("blocks.*.attn1.to_q", "image", "image"),
            ("blocks.*.attn2.to_q", "image", "text"),
            ("blocks.*.attn2.add_k_proj", "image", "vision"),
        ),
    ),
    "chroma": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # as for FLUX.1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
    ),
    "z_image": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # the configuration lists several
        gated=True,
        streams={"layers.**": "both", "context_refiner.**": "text"},
        attention=(
            ("layers.*.attention.to_q", "both", "both"),
            ("noise_refiner.*.attention.to_q", "image", "image"),
            ("context_refiner.*.attention.to_q", "text", "text"),
        ),
    ),
    "pixart": Workload(
        size=(1024, 1024, 1),
        sized=True,
        text=300,  # of PixArt-Sigma; 120 of PixArt-alpha
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    "ltx": Workload(
        size=(512, 704, 161),
        text=128,
        frames_per_latent=8,
        vae_factor=32,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    "hunyuan_video": Workload(
        size=(720, 1280, 129),
        text=256,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
            ("context_embedder.token_refiner.refiner_blocks.*.attn.to_q", "text", "text"),
        ),
    ),
    "sana": Workload(
        size=(1024, 1024, 1),
        text=300,
        vae_factor=32,
        normalised=False,
        gated=True,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "linear"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
        convolutions={"transformer_blocks.*.ff.conv_depth": 2},  # an activation
    ),
    "hidream": Workload(
        size=(1024, 1024, 1),
        text=128,
        prompts=3,  # T5's, the last layer of Llama, and another one of Llama for each block
        gated=True,
        streams={
            "double_stream_blocks.*.block.ff_i.experts.**": "routed image",
            "single_stream_blocks.*.block.ff_i.experts.**": "routed both",
            "single_stream_blocks.**": "both",
            "caption_projection.**": "prompt",
            "p_embedder.**": "one",
            "final_layer.adaLN_modulation.*": "one",
        },
        attention=(
            ("double_stream_blocks.*.block.attn1.to_q", "both", "both"),
            ("single_stream_blocks.*.block.attn1.to_q", "both", "both"),
        ),
    ),
    "unet": Workload(
        size=(1024, 1024, 1),
        text=77,
        patch=1,
        sized=True,
        normalised=False,
        gated=True,
        streams={
            "**.attn2.to_k": "text",
            "**.attn2.to_v": "text",
            "**.time_emb_proj": "one",
            "time_embedding.**": "one",
            "add_embedding.**": "one",
            **{f"down_blocks.{i}.downsamplers.**": f"level {i + 1}" for i in range(_MOST_LEVELS)},
            **{f"up_blocks.{i}.upsamplers.**": f"level {-2 - i}" for i in range(_MOST_LEVELS)},
            **{f"down_blocks.{i}.**": f"level {i}" for i in range(_MOST_LEVELS)},
            **{f"up_blocks.{i}.**": f"level {-1 - i}" for i in range(_MOST_LEVELS)},
            "mid_block.**": "level -1",
        },
        attention=(("**.attn1.to_q", "own", "own"), ("**.attn2.to_q", "own", "text")),
        convolutions={"**.resnets.*.conv1": 4, "**.resnets.*.conv2": 4, "conv_out": 4, "**": 0},  # norm, activation
    ),
}
