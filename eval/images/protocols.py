"""Protocols: prompts, seeds, metrics and gates that belong together, one row each in PROTOCOLS.

Numbers of two evaluations compare only where all of this is the same. `smoke` and `standard` are fluxq's own; the
others repeat published ones, so they fix a model's steps and guidance as well and insist on every metric. Their noise
is fluxq's: made on the CPU from each image's own seed, so batch size, rank and device do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluxq.base.model import PROMPTS_FILE, ModelFolder
from fluxq.calibrate.prompts import DATASETS, PromptSet


@dataclass(frozen=True)
class ModelCall:
    """Arguments of a pipeline call that a protocol fixes for one model.

    model: name for readers.
    pipeline: name of its class.
    transformer: values of the transformer's config that tell it from other models of that class.
    """

    model: str
    pipeline: str
    transformer: Mapping[str, Any]
    call: Mapping[str, Any]

    def fits(self, folder: ModelFolder) -> bool:
        """Tell whether `folder` holds this model."""
        if folder.index["_class_name"] != self.pipeline:
            return False
        config = folder.config("transformer") if self.transformer else {}
        return all(config.get(key) == value for key, value in self.transformer.items())


@dataclass(frozen=True)
class ProtocolRow:
    """One protocol.

    prompts: source for `load_prompts`.
    count: number of prompts.
    videos: number of prompts for a model that makes video, None for `count`.
    frames: most frames of a video where nobody says, None for the pipeline's own number.
    seeds: images of each prompt.
    shuffle: seed of the prompts' order, None for their own.
    own_prompts: whether a model that brings prompts gets those instead.
    metrics: keys, None for all that can be taken.
    strict: whether a metric that cannot be taken is an error.
    fid_resize: resizing of images for Inception, a key of the FID variants.
    gates: conditions on the results.
    calls: arguments that are fixed for known models.
    only_known: whether any other model is refused.
    comparable: published results, and what still differs; empty where results compare with one's own only.
    """

    prompts: str
    count: int
    videos: int | None = None
    frames: int | None = None
    seeds: int = 1
    shuffle: int | None = None
    own_prompts: bool = False
    metrics: tuple[str, ...] | None = None
    strict: bool = False
    fid_resize: str | None = None
    gates: tuple[str, ...] = ()
    calls: tuple[ModelCall, ...] = ()
    only_known: bool = False
    comparable: str = ""

    def source(self, folder: ModelFolder) -> str:
        """Return the source of this protocol's prompts for a model."""
        has_own = self.own_prompts and (folder.path / PROMPTS_FILE).is_file()
        return "default" if has_own else self.prompts

    def call(self, folder: ModelFolder) -> dict[str, Any]:
        """Return the pipeline arguments that are fixed for this model; ValueError if the protocol knows only others."""
        for each in self.calls:
            if each.fits(folder):
                return dict(each.call)
        if self.only_known:
            models = ", ".join(each.model for each in self.calls)
            raise ValueError(
                f"{folder.name}: this protocol's numbers are of {models} and compare with no other model's; take "
                "--protocol standard, and with --prompts, --count and --gate what you want of this one"
            )
        return {}

    def departures(
        self, folder: ModelFolder, prompts: PromptSet, count: int, seeds: int, call: Mapping[str, Any]
    ) -> list[str]:
        """Return warnings where an evaluation departs from a published protocol; each makes it less comparable."""
        if not self.comparable:
            return []
        same = {self.prompts, DATASETS[self.prompts].file}
        departures = [] if prompts.source in same else [f"prompts are those of {prompts.source}, not {self.prompts}"]
        settings = {"count": count, "seeds": seeds, **call}
        fixed = {"count": self.count, "seeds": self.seeds, **self.call(folder)}
        departures += [
            f"{key} is {settings.get(key)!r}, the protocol's {value!r}"
            for key, value in fixed.items()
            if settings.get(key) != value
        ]
        if not any(each.fits(folder) for each in self.calls):
            departures.append(f"the protocol fixes no steps and guidance for {folder.name}")
        return [f"{each}: the numbers do not compare with published ones" for each in departures]


def items_of(prompts: Sequence[str], count: int, seeds: int = 1, first_seed: int = 0) -> list[tuple[str, int]]:
    """Return (prompt, seed) of every image: the first `count` prompts, `seeds` images of each, and no seed twice.

    A shorter list of prompts starts over. ValueError without prompts, for a count below 1, and for seeds that torch
    cannot take.
    """
    if not prompts:
        raise ValueError("nothing to generate: the list of prompts is empty")
    if count < 1 or seeds < 1:
        raise ValueError(f"{count} prompts with {seeds} images each are none: both have to be at least 1")
    if first_seed < 0 or first_seed + count * seeds > 1 << 63:
        raise ValueError(f"seeds from {first_seed} on leave the range 0 to 2^63 - 1: give a smaller --seed")
    return [
        (prompts[index % len(prompts)], first_seed + index * seeds + image)
        for index in range(count)
        for image in range(seeds)
    ]


_SIZE = {"height": 1024, "width": 1024}
_FLUX_DEV = {"num_layers": 19, "num_single_layers": 38, "guidance_embeds": True}
_FLUX_SCHNELL = {"num_layers": 19, "num_single_layers": 38, "guidance_embeds": False}

PROTOCOLS: dict[str, ProtocolRow] = {
    "smoke": ProtocolRow(
        prompts="default",
        count=8,
        videos=4,
        frames=25,  # a latent frame stands for 4 to 8 frames, and one more at the beginning: 25 fits 4, 6 and 8
        metrics=(
            *("psnr", "ssim", "latent_sqnr", "latent_cosine", "feature_distance", "lpips", "clip_score"),
            *("worst_frame_psnr", "temporal_psnr", "flicker"),
        ),
    ),
    "standard": ProtocolRow(prompts="MJHQ-30K", count=1024, shuffle=12345, own_prompts=True),
    "paper": ProtocolRow(
        prompts="MJHQ-30K",
        count=5000,
        shuffle=0,
        metrics=("fid", "image_reward", "lpips", "psnr"),
        strict=True,
        fid_resize="clean",
        calls=(
            ModelCall("FLUX.1-dev", "FluxPipeline", _FLUX_DEV, {"num_inference_steps": 50, "guidance_scale": 3.5}),
            ModelCall("FLUX.1-schnell", "FluxPipeline", _FLUX_SCHNELL, {"num_inference_steps": 4, "guidance_scale": 0}),
            ModelCall("PixArt-Sigma", "PixArtSigmaPipeline", {}, {"num_inference_steps": 20, "guidance_scale": 4.5}),
            ModelCall(
                "SANA-1.6b", "SanaPipeline", {"num_layers": 20}, {"num_inference_steps": 20, "guidance_scale": 4.5}
            ),
        ),
        only_known=True,
        comparable=(
            "the MJHQ columns of the SVDQuant tables (FID, ImageReward, LPIPS, PSNR): the same 5000 prompts, resize "
            "and steps, but other noise, since seeds there come from file names; their second prompt set is "
            "--prompts sDCI"
        ),
    ),
    "drawbench": ProtocolRow(
        prompts="DrawBench",
        count=200,
        metrics=("lpips",),
        strict=True,
        calls=(
            ModelCall(
                "FLUX.1-dev",
                "FluxPipeline",
                _FLUX_DEV,
                {"num_inference_steps": 28, "guidance_scale": 3.5, "max_sequence_length": 512, **_SIZE},
            ),
            ModelCall(
                "Qwen-Image",
                "QwenImagePipeline",
                {},
                {"num_inference_steps": 50, "true_cfg_scale": 4.0, "negative_prompt": " ", **_SIZE},
            ),
        ),
        comparable=(
            "mean LPIPS over DrawBench as published for torchao and diffusers: the same prompts, size and steps, but "
            "noise of its own for each image, where there a whole batch draws from seed 0"
        ),
    ),
    "mlperf-sdxl": ProtocolRow(
        prompts="MLPerf-COCO-2014",
        count=5000,
        metrics=("clip_score", "fid"),
        strict=True,
        fid_resize="pytorch-fid",
        gates=("31.68631873<=clip_score<=31.81331801", "23.01085758<=fid<=23.95007626"),
        calls=(
            ModelCall(
                "Stable Diffusion XL",
                "StableDiffusionXLPipeline",
                {},
                {
                    "num_inference_steps": 20,
                    "guidance_scale": 8,
                    "negative_prompt": "normal quality, low quality, worst quality, low res, blurry, nsfw, nude",
                    **_SIZE,
                },
            ),
        ),
        only_known=True,
        comparable=(
            "the accuracy windows of MLPerf Inference, which a result can leave on the good side too: the same "
            "captions, steps, CLIP (openai ViT-B-32) and FID, to the statistics of val2014.npz; there all images start "
            "from one fixed latent, here each from its own"
        ),
    ),
}
