"""Published models: the configuration that each is shipped with, so that a plan of it needs no download.

    family row + configuration -> the model on the meta device -> plan, sizes, cost

A configuration says what differs from the defaults of the model's class; models of the same one share a row. Each was
read in what its authors published or in diffusers' conversion scripts, and tests/jobs/test_catalogue.py compares the
number of parameters with the published one. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxq.base.near import did_you_mean
from fluxq.recipes.families import FAMILIES


@dataclass(frozen=True)
class Published:
    """A published model, or the part of it that a family describes.

    name: as people write it. also: models with the same configuration. count: how many of it a pipeline has. size: what
    `forward_pass` is told where the family's usual size is not this model's. beside: the pipeline's text encoders and
    VAE, names of other rows or classes of diffusers as they stand; empty where nobody asked yet.
    """

    name: str
    family: str
    config: Mapping[str, Any]
    also: tuple[str, ...] = ()
    count: int = 1
    size: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def find_published(name: str) -> list[Published]:
    """The models that `name` means: a model, a family of FAMILIES or a model's class, in any case.

    ValueError naming what is near for any other name.
    """
    wanted = _plain(name)
    exact = [row for row in PUBLISHED if wanted in map(_plain, (row.name, *row.also))]
    if exact:
        return exact
    found = [row for row in PUBLISHED if wanted in (_plain(row.family), _plain(FAMILIES[row.family].model))]
    if found:
        return found
    names = [each for row in PUBLISHED for each in (row.name, *row.also)]
    near = [each for each in names if wanted and wanted in _plain(each)]
    known = f"models with that in their name: {', '.join(near)}" if near else f"families: {', '.join(FAMILIES)}"
    hint = did_you_mean(name, names) if not near else ""
    raise ValueError(f"{name}: no published model, family or model class of that name{hint or '; ' + known}")


def hub_ids(name: str) -> tuple[str, ...]:
    """Return where the hub has the published model of that name, in any case; () for a name that is none."""
    wanted = _plain(name)
    return next((repos for known, repos in HUB_IDS.items() if _plain(known) == wanted), ())


def _plain(name: str) -> str:
    return re.sub(r"[\s_.-]", "", name).lower()


def _unet(channels: Sequence[int], attends: Sequence[bool], **config: Any) -> dict[str, Any]:
    """A UNet with so many channels at each resolution; attends: whether it has transformer blocks there."""
    kinds = ["CrossAttn" if there else "" for there in attends]
    return {
        "block_out_channels": [*channels],
        "down_block_types": [f"{kind}DownBlock2D" for kind in kinds],
        "up_block_types": [f"{kind}UpBlock2D" for kind in reversed(kinds)],
        **config,
    }


def _vae(**config: Any) -> dict[str, Any]:
    return {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "sample_size": 1024,
        **config,
    }


def _language_model(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


_T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}
_CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "vocab_size": 49408,
}
_QWEN3_4B = {**_language_model(2560, 9728, 36, 32, 8, 151936), "head_dim": 128, "tie_word_embeddings": True}
_LLAMA3_8B = (4096, 14336, 32, 32, 8)
_SD3_MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
_SANA_1_6B = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_layers": 20,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
}
_SANA_0_6B = {
    **_SANA_1_6B,
    "num_attention_heads": 36,
    "num_layers": 28,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
_SANA_QK = {"qk_norm": "rms_norm_across_heads"}
_WAN_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

PUBLISHED = (
    Published(
        "FLUX.1-dev",
        "flux",
        {"guidance_embeds": True},
        also=("FLUX.1-Kontext-dev", "FLUX.1-Krea-dev"),
        beside=("CLIP-L", "T5-XXL", "FLUX.1 VAE"),
    ),
    Published("FLUX.1-schnell", "flux", {"guidance_embeds": False}),
    Published("FLUX.1-Fill-dev", "flux", {"guidance_embeds": True, "in_channels": 384, "out_channels": 64}),
    Published(
        "FLUX.1-Depth-dev",
        "flux",
        {"guidance_embeds": True, "in_channels": 128, "out_channels": 64},
        also=("FLUX.1-Canny-dev",),
    ),
    Published("FLUX.2-dev", "flux2", {"num_layers": 8, "num_single_layers": 48, "num_attention_heads": 48}),
    Published(
        "FLUX.2-klein-4B",
        "flux2",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    Published(
        "FLUX.2-klein-9B",
        "flux2",
        {
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
    Published("Chroma1-HD", "chroma", {"num_layers": 19, "num_single_layers": 38}, also=("Chroma1-Base",)),
    Published("Stable Diffusion 3 medium", "sd3", {**_SD3_MEDIUM, "pos_embed_max_size": 192}),
    Published(
        "Stable Diffusion 3.5 medium",
        "sd3",
        {
            **_SD3_MEDIUM,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
            "dual_attention_layers": [*range(13)],
        },
    ),
    Published(
        "Stable Diffusion 3.5 large",
        "sd3",
        {
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        also=("Stable Diffusion 3.5 large turbo",),
    ),
    Published("PixArt-Sigma-XL-2", "pixart", {"sample_size": 128, "caption_channels": 4096}),
    Published(
        "Qwen-Image",
        "qwen_image",
        {"num_layers": 60},
        also=("Qwen-Image-Edit", "Qwen-Image-Edit-2509"),
        beside=("Qwen2.5-VL-7B", "AutoencoderKLQwenImage"),
    ),
    Published("Qwen-Image-Edit-2511", "qwen_image", {"num_layers": 60, "zero_cond_t": True}),
    Published("Z-Image-Turbo", "z_image", {"n_layers": 30, "dim": 3840}),
    Published("Wan2.1-T2V-1.3B", "wan", {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}),
    Published(
        "Wan2.1-T2V-14B",
        "wan",
        {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
        beside=("UMT5-XXL", "AutoencoderKLWan"),
    ),
    Published("Wan2.1-I2V-14B", "wan", _WAN_I2V),
    Published("Wan2.2-T2V-A14B", "wan", {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}, count=2),
    Published("Wan2.2-I2V-A14B", "wan", {"in_channels": 36}, count=2),
    Published(
        "Wan2.2-TI2V-5B",
        "wan",
        {"num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
        size={"height": 704, "width": 1280, "frames": 121, "vae": {"scale_factor_spatial": 16}},
    ),
    Published("LTX-Video-2B", "ltx", {"num_layers": 28, "attention_head_dim": 64, "cross_attention_dim": 2048}),
    Published("LTX-Video-13B", "ltx", {"num_layers": 48, "attention_head_dim": 128, "cross_attention_dim": 4096}),
    Published("HunyuanVideo", "hunyuan_video", {"guidance_embeds": True}),
    Published(
        "HunyuanVideo-I2V",
        "hunyuan_video",
        {"in_channels": 33, "guidance_embeds": False, "image_condition_type": "latent_concat"},
    ),
    Published(
        "HiDream-I1-Full",
        "hidream",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "caption_channels": [4096, 4096],
            "axes_dims_rope": [64, 32, 32],
            "llama_layers": [*range(32), *[31] * 16],
        },
        also=("HiDream-I1-Dev", "HiDream-I1-Fast"),
    ),
    Published("SANA-0.6B", "sana", _SANA_0_6B),
    Published("SANA-1.6B", "sana", _SANA_1_6B),
    Published("SANA1.5-1.6B", "sana", {**_SANA_1_6B, **_SANA_QK}),
    Published("SANA1.5-4.8B", "sana", {**_SANA_1_6B, **_SANA_QK, "num_layers": 60}),
    Published("SANA-Sprint-0.6B", "sana", {**_SANA_0_6B, **_SANA_QK, "guidance_embeds": True}),
    Published("SANA-Sprint-1.6B", "sana", {**_SANA_1_6B, **_SANA_QK, "guidance_embeds": True}),
    Published(
        "Stable Diffusion XL",
        "unet",
        _unet(
            (320, 640, 1280),
            (False, True, True),
            sample_size=128,
            transformer_layers_per_block=[1, 2, 10],
            attention_head_dim=[5, 10, 20],
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        ),
        also=("SDXL", "SDXL-Turbo"),
    ),
    Published(
        "Stable Diffusion 1.5",
        "unet",
        _unet((320, 640, 1280, 1280), (True, True, True, False), sample_size=64, cross_attention_dim=768),
        also=("SD1.5",),
    ),
    Published("T5-XXL", "t5", _T5_XXL),
    Published("UMT5-XXL", "umt5", {**_T5_XXL, "vocab_size": 256384}),
    Published("CLIP-L", "clip", _CLIP_L),
    Published("CLIP-L with projection", "clip_projection", _CLIP_L),
    Published(
        "CLIP-G with projection",
        "clip_projection",
        {
            **_CLIP_L,
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 20,
            "projection_dim": 1280,
        },
    ),
    Published(
        "Qwen2.5-VL-7B",
        "qwen2_5_vl",
        {
            "text_config": _language_model(3584, 18944, 28, 28, 4, 152064),
            "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
            "tie_word_embeddings": False,
        },
    ),
    Published("Qwen3-4B", "qwen3", _QWEN3_4B),
    Published("Qwen3-4B for causal LM", "qwen3_lm", _QWEN3_4B),
    Published(
        "Qwen3-8B for causal LM", "qwen3_lm", {**_language_model(4096, 12288, 36, 32, 8, 151936), "head_dim": 128}
    ),
    Published("LLaVA-Llama-3-8B, its language model", "llama", _language_model(*_LLAMA3_8B, 128320)),
    Published("Llama-3.1-8B", "llama_lm", _language_model(*_LLAMA3_8B, 128256)),
    Published("Gemma-2-2B", "gemma2", {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}),
    Published(
        "Gemma-3-12B",
        "gemma3",
        {
            "text_config": {**_language_model(3840, 15360, 48, 16, 8, 262208), "head_dim": 256},
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    Published(
        "Mistral-Small-3.2-24B",
        "mistral3",
        {
            "text_config": {
                **_language_model(5120, 32768, 40, 32, 8, 131072),
                "head_dim": 128,
                "model_type": "mistral",
            },
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "head_dim": 64,
                "image_size": 1540,
                "patch_size": 14,
                "model_type": "pixtral",
            },
            "tie_word_embeddings": False,
        },
    ),
    Published("FLUX.1 VAE", "kl", _vae(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)),
    Published("SDXL VAE", "kl", _vae(latent_channels=4)),
)

# Published model -> its pipelines in diffusers' layout on the Hugging Face hub.
HUB_IDS = {
    "FLUX.1-dev": ("black-forest-labs/FLUX.1-dev",),
    "FLUX.1-Kontext-dev": ("black-forest-labs/FLUX.1-Kontext-dev",),
    "FLUX.1-Krea-dev": ("black-forest-labs/FLUX.1-Krea-dev",),
    "FLUX.1-schnell": ("black-forest-labs/FLUX.1-schnell",),
    "FLUX.1-Fill-dev": ("black-forest-labs/FLUX.1-Fill-dev",),
    "FLUX.1-Depth-dev": ("black-forest-labs/FLUX.1-Depth-dev",),
    "FLUX.1-Canny-dev": ("black-forest-labs/FLUX.1-Canny-dev",),
    "FLUX.2-dev": ("black-forest-labs/FLUX.2-dev",),
    "FLUX.2-klein-4B": ("black-forest-labs/FLUX.2-klein-4B",),
    "FLUX.2-klein-9B": ("black-forest-labs/FLUX.2-klein-9B",),
    "Chroma1-HD": ("lodestones/Chroma1-HD",),
    "Chroma1-Base": ("lodestones/Chroma1-Base",),
    "Stable Diffusion 3 medium": ("stabilityai/stable-diffusion-3-medium-diffusers",),
    "Stable Diffusion 3.5 medium": ("stabilityai/stable-diffusion-3.5-medium",),
    "Stable Diffusion 3.5 large": ("stabilityai/stable-diffusion-3.5-large",),
    "Stable Diffusion 3.5 large turbo": ("stabilityai/stable-diffusion-3.5-large-turbo",),
    "PixArt-Sigma-XL-2": ("PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",),
    "Qwen-Image": ("Qwen/Qwen-Image",),
    "Qwen-Image-Edit": ("Qwen/Qwen-Image-Edit",),
    "Qwen-Image-Edit-2509": ("Qwen/Qwen-Image-Edit-2509",),
    "Qwen-Image-Edit-2511": ("Qwen/Qwen-Image-Edit-2511",),
    "Z-Image-Turbo": ("Tongyi-MAI/Z-Image-Turbo",),
    "Wan2.1-T2V-1.3B": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),
    "Wan2.1-T2V-14B": ("Wan-AI/Wan2.1-T2V-14B-Diffusers",),
    "Wan2.1-I2V-14B": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers"),
    "Wan2.2-T2V-A14B": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
    "Wan2.2-I2V-A14B": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers",),
    "Wan2.2-TI2V-5B": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers",),
    "LTX-Video-2B": ("Lightricks/LTX-Video",),
    "HunyuanVideo": ("hunyuanvideo-community/HunyuanVideo",),
    "HunyuanVideo-I2V": ("hunyuanvideo-community/HunyuanVideo-I2V",),
    "HiDream-I1-Full": ("HiDream-ai/HiDream-I1-Full",),
    "HiDream-I1-Dev": ("HiDream-ai/HiDream-I1-Dev",),
    "HiDream-I1-Fast": ("HiDream-ai/HiDream-I1-Fast",),
    "SANA-0.6B": ("Efficient-Large-Model/Sana_600M_1024px_diffusers",),
    "SANA-1.6B": ("Efficient-Large-Model/Sana_1600M_1024px_diffusers",),
    "SANA1.5-1.6B": ("Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",),
    "SANA1.5-4.8B": ("Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",),
    "SANA-Sprint-0.6B": ("Efficient-Large-Model/Sana_Sprint_0.6B_1024px_diffusers",),
    "SANA-Sprint-1.6B": ("Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",),
    "Stable Diffusion XL": ("stabilityai/stable-diffusion-xl-base-1.0",),
    "SDXL": ("stabilityai/stable-diffusion-xl-base-1.0",),
    "SDXL-Turbo": ("stabilityai/sdxl-turbo",),
    "Stable Diffusion 1.5": ("stable-diffusion-v1-5/stable-diffusion-v1-5",),
    "SD1.5": ("stable-diffusion-v1-5/stable-diffusion-v1-5",),
}
