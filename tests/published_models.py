"""Pipelines of published models' shapes on disk, whose tensors are holes that take none of it."""

import json
from pathlib import Path

from fluxq.base.files import write_json
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.all_families import FAMILIES, PUBLISHED

ROWS = {row.name: row for row in PUBLISHED}
VAE = "FLUX.1 VAE"  # SD3.5's has the same layers
# Model on the page -> class of the pipeline, and by component a published model or a class of diffusers as it stands.
PIPELINES = {
    "FLUX.1-dev": ("FluxPipeline", {"text_encoder": "CLIP-L", "text_encoder_2": "T5-XXL", "vae": VAE}),
    "Stable Diffusion 3.5 large": (
        "StableDiffusion3Pipeline",
        {
            "text_encoder": "CLIP-L with projection",
            "text_encoder_2": "CLIP-G with projection",
            "text_encoder_3": "T5-XXL",
            "vae": VAE,
        },
    ),
    "Z-Image-Turbo": ("ZImagePipeline", {"text_encoder": "Qwen3-4B", "vae": VAE}),
    "Qwen-Image": ("QwenImagePipeline", {"text_encoder": "Qwen2.5-VL-7B", "vae": "AutoencoderKLQwenImage"}),
    "FLUX.2-dev": ("Flux2Pipeline", {"text_encoder": "Mistral-Small-3.2-24B", "vae": "AutoencoderKLFlux2"}),
    "Wan2.2-T2V-A14B": (
        "WanPipeline",
        {"transformer_2": "Wan2.2-T2V-A14B", "text_encoder": "UMT5-XXL", "vae": "AutoencoderKLWan"},
    ),
}


def published(folder: Path, name: str, only: str = "") -> Path:
    """The pipeline of a published model: configurations, and weight files whose tensors are holes that take no disk."""
    pipeline, others = PIPELINES[name]
    index: dict[str, object] = {"_class_name": pipeline}
    for component, what in {"transformer": name, **others}.items():
        if only not in ("", component):
            continue
        row = ROWS.get(what)
        family = FAMILIES[row.family] if row else None
        library, cls = (family.library, family.model) if family else ("diffusers", what)
        model = build_on_meta(library, cls, dict(row.config) if row else {})
        (folder / component).mkdir(parents=True)
        config = model.config if isinstance(model.config, dict) else model.config.to_dict()
        (folder / component / "config.json").write_text(json.dumps(config, default=str))
        header, end = {}, 0
        for key, tensor in model.state_dict().items():
            nbytes = 2 * tensor.numel()
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
            end += nbytes
        text = json.dumps(header).encode()
        stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
        with (folder / component / f"{stem}.safetensors").open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        index[component] = [library, cls]
    write_json(folder / "model_index.json", index)
    return folder
