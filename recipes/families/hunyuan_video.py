"""Describe HunyuanVideo."""

from __future__ import annotations

from fluxq.recipes.family import EMBEDDER, FINAL, Family, Published, Workload, both_at_once, image_and_text
from fluxq.recipes.keymap_rows import ADDED_QKV, SWAPPED_FINAL, TO_QKV, below, rows

_REFINER = "txt_in.individual_token_refiner.blocks.*", "context_embedder.token_refiner.refiner_blocks.*"

_ORIGINALS = rows(
    {
        "img_in.proj": "x_embedder.proj",
        "time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
        "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
        "guidance_in.mlp.0": "time_text_embed.guidance_embedder.linear_1",
        "guidance_in.mlp.2": "time_text_embed.guidance_embedder.linear_2",
        "txt_in.input_embedder": "context_embedder.proj_in",
        "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
        "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
        "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
        "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
        f"{_REFINER[0]}.self_attn_qkv": below(f"{_REFINER[1]}.attn", *TO_QKV),
        f"{_REFINER[0]}.self_attn_proj": f"{_REFINER[1]}.attn.to_out.0",
        f"{_REFINER[0]}.norm1": f"{_REFINER[1]}.norm1",
        f"{_REFINER[0]}.norm2": f"{_REFINER[1]}.norm2",
        f"{_REFINER[0]}.mlp.fc1": f"{_REFINER[1]}.ff.net.0.proj",
        f"{_REFINER[0]}.mlp.fc2": f"{_REFINER[1]}.ff.net.2",
        f"{_REFINER[0]}.adaLN_modulation.1": f"{_REFINER[1]}.norm_out.linear",
        "double_blocks.*.img_mod.linear": "transformer_blocks.*.norm1.linear",
        "double_blocks.*.img_attn_qkv": below("transformer_blocks.*.attn", *TO_QKV),
        "double_blocks.*.img_attn_q_norm": "transformer_blocks.*.attn.norm_q",
        "double_blocks.*.img_attn_k_norm": "transformer_blocks.*.attn.norm_k",
        "double_blocks.*.img_attn_proj": "transformer_blocks.*.attn.to_out.0",
        "double_blocks.*.img_mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
        "double_blocks.*.img_mlp.fc2": "transformer_blocks.*.ff.net.2",
        "double_blocks.*.txt_mod.linear": "transformer_blocks.*.norm1_context.linear",
        "double_blocks.*.txt_attn_qkv": below("transformer_blocks.*.attn", *ADDED_QKV),
        "double_blocks.*.txt_attn_q_norm": "transformer_blocks.*.attn.norm_added_q",
        "double_blocks.*.txt_attn_k_norm": "transformer_blocks.*.attn.norm_added_k",
        "double_blocks.*.txt_attn_proj": "transformer_blocks.*.attn.to_add_out",
        "double_blocks.*.txt_mlp.fc1": "transformer_blocks.*.ff_context.net.0.proj",
        "double_blocks.*.txt_mlp.fc2": "transformer_blocks.*.ff_context.net.2",
        "single_blocks.*.modulation.linear": "single_transformer_blocks.*.norm.linear",
        "single_blocks.*.linear1": below("single_transformer_blocks.*", *below("attn", *TO_QKV), "proj_mlp"),
        "single_blocks.*.linear2": "single_transformer_blocks.*.proj_out",
        "single_blocks.*.q_norm": "single_transformer_blocks.*.attn.norm_q",
        "single_blocks.*.k_norm": "single_transformer_blocks.*.attn.norm_k",
        "final_layer.linear": "proj_out",
    },
    SWAPPED_FINAL,
)

_BESIDE = ("LLaVA-Llama-3-8B, its language model", "CLIP-L", "AutoencoderKLHunyuanVideo")

HUNYUAN_VIDEO = Family(
    name="hunyuan_video",
    model="HunyuanVideoTransformer3DModel",
    groups=(
        *image_and_text("transformer_blocks.*", modulation=("norm1.linear", "norm1_context.linear")),
        # The attention puts image and text together again before q, k and v: another tensor, the same values.
        *both_at_once("single_transformer_blocks.*", modulation="norm.linear"),
    ),
    keep={
        EMBEDDER: ("context_embedder.**", "time_text_embed.**"),
        FINAL: ("norm_out.linear", "proj_out"),
    },
    workload=Workload(
        size=(720, 1280, 129),
        text=256,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
            ("context_embedder.token_refiner.refiner_blocks.*.attn.to_q", "text", "text"),
        ),
    ),
    originals=_ORIGINALS,
    published=(
        Published("HunyuanVideo", {"guidance_embeds": True}, beside=_BESIDE),
        Published(
            "HunyuanVideo-I2V", {"in_channels": 33, "guidance_embeds": False, "image_condition_type": "latent_concat"}
        ),
    ),
    hub_owner="hunyuanvideo-community",
)
