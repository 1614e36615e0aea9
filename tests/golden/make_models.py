"""Goldens of whole models: a FLUX of one double and one single block as ModelOpt and diffusers write it.

`python tests/golden/make_models.py` needs nvidia-modelopt and diffusers in the versions that the README here lists. The
weights, and the inputs that ModelOpt calibrates on, are drawn from fixed seeds; all runs on a CPU. ModelOpt quantizes,
with the numbers of its own presets, what its readers load quantized: not embedders, norms, modulation and the last
projection. A golden that is there already is not written again.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "in_channels": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 12, 12),
}
IN_16_BIT = re.compile(r"^proj_out|time_text_embed|context_embedder|x_embedder|norm")
Made = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any], dict[str, str]]  # tensors, config, recipe, header


def model() -> nn.Module:
    """The FLUX, in bf16, with rows of very different sizes as real ones have."""
    with torch.device("meta"):
        flux: Any = FluxTransformer2DModel(**CONFIG)
    g = torch.Generator().manual_seed(0)
    state = {}
    for name, meta in sorted(flux.state_dict().items()):
        value = 0.05 * torch.randn(meta.shape, generator=g)
        if meta.ndim == 2:
            value *= torch.exp(torch.randn(meta.shape[0], 1, generator=g))
        state[name] = value.bfloat16()
    flux.load_state_dict(state, assign=True)
    return flux


def run(flux: nn.Module) -> None:
    """Two forward passes, by which input scales are calibrated."""
    g = torch.Generator().manual_seed(1)
    for _ in range(2):
        flux(
            hidden_states=torch.randn(1, 16, 16, generator=g).bfloat16(),
            encoder_hidden_states=torch.randn(1, 5, 32, generator=g).bfloat16(),
            pooled_projections=torch.randn(1, 32, generator=g).bfloat16(),
            timestep=torch.tensor([0.5]).bfloat16(),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(5, 3),
        )


def _modelopt(weights: dict[str, Any], x: dict[str, Any] | None, said: str) -> Made:
    """weights, x: what quantizers of weights and of inputs do. said: the same in words."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    flux = model()
    chosen = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": weights},
        {"quantizer_name": "*input_quantizer", **({"cfg": x} if x else {"enable": False})},
    ]
    mtq.quantize(flux, {"quant_cfg": chosen, "algorithm": "max"}, run)
    mtq.disable_quantizer(flux, lambda name: bool(IN_16_BIT.search(name)))
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(flux, export_dir=folder)
        tensors = load_file(Path(folder, "diffusion_pytorch_model.safetensors"))
        config = json.loads(Path(folder, "config.json").read_text())
    recipe = {"api": "mtq.quantize, mtq.disable_quantizer, export_hf_checkpoint", "quant_cfg": said}
    versions = {name: version(name) for name in ("nvidia-modelopt", "diffusers")}
    return tensors, config, recipe | {"in_16_bit": IN_16_BIT.pattern} | versions, {"format": "pt"}


def modelopt_nvfp4() -> Made:
    numbers = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
    return _modelopt(numbers, numbers, "weights and inputs in NVFP4, as presets/diffusers/nvfp4.yaml")


def modelopt_fp8_pc_pt() -> Made:
    x = {"num_bits": (4, 3), "axis": None, "type": "dynamic", "block_sizes": {-1: None}}
    return _modelopt({"num_bits": (4, 3), "axis": 0}, x, "as FP8_PER_CHANNEL_PER_TOKEN_CFG")


def modelopt_w8a16() -> Made:
    return _modelopt({"num_bits": 8, "axis": 0}, None, "as INT8_WEIGHT_ONLY_CFG")


def bfl_fp8r() -> Made:
    """Black Forest Labs' fp8r, each Linear of a block by diffusers' own quantizer."""
    from diffusers.quantizers.bfl.utils import quantize_fp8r

    flux: Any = model()
    tensors: dict[str, Tensor] = {}
    for name, tensor in flux.state_dict().items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and not IN_16_BIT.search(module):
            tensors[name], tensors[f"{name}_scale"] = quantize_fp8r(tensor)
        else:
            tensors[name] = tensor
    recipe = {"api": "diffusers.quantizers.bfl.utils.quantize_fp8r", "diffusers": version("diffusers")}
    config = json.loads(flux.to_json_string())
    header = {"quantization": "fp8r", "scale": "per_row_fp32"}
    return tensors, config, recipe | {"in_16_bit": IN_16_BIT.pattern}, header


MAKERS: dict[str, Callable[[], Made]] = {
    "flux_modelopt_nvfp4": modelopt_nvfp4,
    "flux_modelopt_fp8_pc_pt": modelopt_fp8_pc_pt,
    "flux_modelopt_w8a16": modelopt_w8a16,
    "flux_bfl_fp8r": bfl_fp8r,
}


def main() -> None:
    for name, make in MAKERS.items():
        file = HERE / f"{name}.safetensors"
        if file.exists():
            continue
        tensors, config, recipe, header = make()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, header)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        recipe |= {"torch": torch.__version__, "device": "cpu", "script": Path(__file__).name}
        text = {"file": file.name, "sha256": digest, "recipe": recipe, "config": config, "safetensors_metadata": header}
        file.with_suffix(".json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
