"""Random tiny pipelines of several families, each with the arguments of a small call."""

from __future__ import annotations

from pathlib import Path

import diffusers
import transformers
from diffusers import DiffusionPipeline
from tiny_configs import TINY_CONFIGS
from torch import nn

from fluxq import tiny
from fluxq.recipes.all_families import FAMILIES

SMALL = {"num_inference_steps": 2, "height": 16, "width": 16}
FLOW = diffusers.FlowMatchEulerDiscreteScheduler


def transformer(name: str, **changed) -> nn.Module:
    row = FAMILIES[name]
    return getattr(diffusers, row.model).from_config({**TINY_CONFIGS[row.name], **changed})


def encoder(name: str, **changed) -> nn.Module:
    row = FAMILIES[name]
    model = getattr(transformers, row.model)
    return model(model.config_class.from_dict({**TINY_CONFIGS[row.name], "vocab_size": 2048, **changed}))


def tokenizer(name: str = "tokenizer_2"):
    """The embedded T5's or CLIP's, with a chat template that adds nothing."""
    found = transformers.AutoTokenizer.from_pretrained(Path(tiny.path()) / name)
    found.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return found


def kl(**changed) -> nn.Module:
    return diffusers.AutoencoderKL.from_config({**TINY_CONFIGS["kl"], "latent_channels": 4, **changed})


def sdxl() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=kl(),
        text_encoder=encoder("clip"),
        text_encoder_2=encoder("clip_projection"),
        tokenizer=tokenizer("tokenizer"),
        tokenizer_2=tokenizer("tokenizer"),
        unet=transformer("unet"),
        scheduler=diffusers.EulerDiscreteScheduler(),
    )
    return pipe, SMALL


def z_image() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.ZImagePipeline(
        scheduler=FLOW(),
        vae=kl(shift_factor=0.1),
        text_encoder=encoder("qwen3"),
        tokenizer=tokenizer(),
        transformer=transformer("z_image", cap_feat_dim=128, n_layers=1),
    )
    return pipe, {**SMALL, "guidance_scale": 4.0}


def chroma() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.ChromaPipeline(
        scheduler=FLOW(),
        vae=kl(shift_factor=0.1),
        text_encoder=encoder("t5"),
        tokenizer=tokenizer(),
        transformer=transformer("chroma", joint_attention_dim=128),
    )
    return pipe, {**SMALL, "max_sequence_length": 16}


def flux2() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=FLOW(),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(32,),
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            latent_channels=4,
        ),
        text_encoder=encoder("qwen3_lm"),
        tokenizer=tokenizer(),
        transformer=transformer("flux2", joint_attention_dim=256, guidance_embeds=False),
    )
    return pipe, {**SMALL, "max_sequence_length": 16, "text_encoder_out_layers": [0, 1]}


def ltx() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.LTXPipeline(
        scheduler=FLOW(),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=16,
            block_out_channels=(16, 16, 16, 16),
            decoder_block_out_channels=(16, 16, 16, 16),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=encoder("t5"),
        tokenizer=tokenizer(),
        transformer=transformer("ltx", caption_channels=128),
    )
    return pipe, {"num_inference_steps": 2, "height": 64, "width": 64, "num_frames": 9}


def pixart() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer(),
        text_encoder=encoder("t5"),
        vae=kl(),
        transformer=transformer("pixart", caption_channels=128),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
    )
    return pipe, SMALL  # and no table of resolutions has its size


def sana() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.SanaPipeline(
        tokenizer=tokenizer(),
        text_encoder=encoder("gemma2"),
        vae=diffusers.AutoencoderDC(
            latent_channels=4,
            encoder_block_out_channels=(32, 32),
            decoder_block_out_channels=(32, 32),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_block_types="ResBlock",
            decoder_block_types="ResBlock",
            encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), ()),
        ),
        transformer=transformer("sana", caption_channels=128),
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )
    size = {"height": 32, "width": 32, "use_resolution_binning": False}
    return pipe, {**SMALL, **size, "complex_human_instruction": None}


def fill() -> tuple[DiffusionPipeline, dict]:
    """The embedded pipeline, with a transformer that reads an image and a mask."""
    parts = {name: part for name, part in tiny.load(dtype="float32").components.items() if part is not None}
    read = {name: parts["transformer"].config[name] for name in ("joint_attention_dim", "pooled_projection_dim")}
    parts["transformer"] = transformer("flux", in_channels=48, out_channels=16, **read)
    return diffusers.FluxFillPipeline(**parts), {**SMALL, "max_sequence_length": 8}


def hunyuan_video() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=encoder("llama", hidden_size=256),
        tokenizer=tokenizer(),
        text_encoder_2=encoder("clip"),
        tokenizer_2=tokenizer("tokenizer"),
        transformer=transformer(
            "hunyuan_video", text_embed_dim=256, pooled_projection_dim=128, guidance_embeds=True, patch_size=1
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
        ),
        scheduler=FLOW(),
    )
    return pipe, {**SMALL, "num_frames": 5, "max_sequence_length": 16}


def wan() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=encoder("umt5"),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
        ),
        scheduler=FLOW(),
        transformer=transformer("wan", image_dim=None, added_kv_proj_dim=None, text_dim=128),
    )
    return pipe, {**SMALL, "num_frames": 1, "guidance_scale": 4.0, "max_sequence_length": 8}


def wan_2() -> tuple[DiffusionPipeline, dict]:
    """A transformer for the noisy steps and one for the others."""
    pipe, call = wan()
    second = transformer("wan", image_dim=None, added_kv_proj_dim=None, text_dim=128)
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    parts = {**pipe.components, "transformer_2": second, "scheduler": scheduler, "boundary_ratio": 0.5}
    return diffusers.WanPipeline(**parts), call


def sd3() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer("sd3", joint_attention_dim=128, pooled_projection_dim=64),
        scheduler=FLOW(),
        vae=kl(shift_factor=0.1),
        text_encoder=encoder("clip_projection", hidden_size=64, projection_dim=32),
        text_encoder_2=encoder("clip_projection", hidden_size=64, projection_dim=32),
        text_encoder_3=encoder("t5"),
        tokenizer=tokenizer("tokenizer"),
        tokenizer_2=tokenizer("tokenizer"),
        tokenizer_3=tokenizer(),
    )
    return pipe, {**SMALL, "guidance_scale": 4.0, "max_sequence_length": 8}


def qwen_image() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.QwenImagePipeline(
        scheduler=FLOW(),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        text_encoder=encoder("qwen2_5_vl"),
        tokenizer=tokenizer(),
        transformer=transformer("qwen_image", joint_attention_dim=128),
    )  # fmt: skip
    return pipe, {**SMALL, "true_cfg_scale": 4.0, "negative_prompt": "blue", "max_sequence_length": 8}


def hidream() -> tuple[DiffusionPipeline, dict]:
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=FLOW(),
        vae=kl(shift_factor=0.1),
        text_encoder=encoder("clip_projection", hidden_size=64, projection_dim=32),
        text_encoder_2=encoder("clip_projection", hidden_size=64, projection_dim=32),
        text_encoder_3=encoder("t5"),
        text_encoder_4=encoder("llama_lm"),
        tokenizer=tokenizer("tokenizer"),
        tokenizer_2=tokenizer("tokenizer"),
        tokenizer_3=tokenizer(),
        tokenizer_4=tokenizer(),
        transformer=transformer("hidream", caption_channels=[128, 128]),
    )
    return pipe, {**SMALL, "guidance_scale": 4.0, "max_sequence_length": 8}
