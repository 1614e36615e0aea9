"""Goldens of torchao, comfy-kitchen, diffusers, bitsandbytes and gguf: `python tests/golden/make_exchange.py`.

Needs those packages in the versions that the README here lists. Everything runs on the CPU and is drawn from fixed
seeds; a golden that is there already is not written again.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
Made = tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]  # tensors, recipe, header


def source() -> tuple[Tensor, Tensor, Tensor]:
    """weight (160, 192), bias (160,), tokens (48, 192), all bf16."""
    held = load_file(HERE / "input_linear.safetensors")
    return held["weight"], held["bias"], held["calib_x"]


def bfl_fp8r() -> Made:
    from diffusers.quantizers.bfl.utils import dequantize_fp8r, quantize_fp8r

    weight, bias, _ = source()
    codes, scale = quantize_fp8r(weight)
    tensors = {"layer.weight": codes, "layer.weight_scale": scale, "layer.bias": bias}
    recipe = {"api": "diffusers.quantizers.bfl.utils.quantize_fp8r", "diffusers": version("diffusers")}
    reference = {"__dequant_ref": dequantize_fp8r(codes, scale)}
    return tensors | reference, recipe, {"quantization": "fp8r", "scale": "per_row_fp32"}


def bfl_nvfp4() -> Made:
    from diffusers.quantizers.bfl.utils import dequantize_nvfp4, quantize_nvfp4

    weight, bias, tokens = source()
    codes, scale, global_scale = quantize_nvfp4(weight)
    tensors = {"layer.weight": codes, "layer.weight_scale": scale, "layer.weight_scale_2": global_scale}
    tensors |= {"layer.input_scale": tokens.float().abs().amax() / 2688, "layer.bias": bias}
    recipe = {"api": "diffusers.quantizers.bfl.utils.quantize_nvfp4", "diffusers": version("diffusers")}
    return tensors | {"__dequant_ref": dequantize_nvfp4(codes, scale, global_scale)}, recipe, {}


def torchao_int8() -> Made:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _torchao(Int8DynamicActivationInt8WeightConfig())


def torchao_nvfp4() -> Made:
    from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig

    return _torchao(NVFP4WeightOnlyConfig())


def _torchao(config: Any) -> Made:
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    weight, bias, _ = source()
    linear = nn.Linear(192, 160, dtype=torch.bfloat16)
    linear.load_state_dict({"weight": weight, "bias": bias})
    model = nn.Sequential(linear)
    quantize_(model, config)
    tensors, header = flatten_tensor_state_dict(model.state_dict())
    reference = {"__dequant_ref": model[0].weight.dequantize().contiguous()}
    api = "torchao.quantize_ + flatten_tensor_state_dict"
    recipe = {"api": api, "cfg": config_to_dict(config), "torchao": version("torchao")}
    return tensors | reference, recipe, header


def comfy_int8() -> Made:
    from comfy_kitchen.tensor import QuantizedTensor

    weight, bias, _ = source()
    quantized = QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", per_channel=True)
    text = torch.tensor(list(json.dumps({"format": "int8_tensorwise"}).encode()), dtype=torch.uint8)
    state = quantized.state_dict("layer.weight")
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    tensors |= {"layer.comfy_quant": text, "layer.bias": bias, "__dequant_ref": quantized.dequantize()}
    recipe = {
        "layout": "TensorWiseINT8Layout",
        "quantize_kwargs": "per_channel",
        "comfy_kitchen": version("comfy-kitchen"),
    }
    layers = {"format_version": "1.0", "layers": {"layer": {"format": "int8_tensorwise"}}}
    return tensors, recipe, {"_quantization_metadata": json.dumps(layers)}


def _kitchen(layout: str, entry: dict[str, Any], **how: Any) -> Made:
    """A layer that comfy-kitchen rounded, and the first 32 rows of what it decodes in fp32."""
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    weight, bias, _ = source()
    how |= {"convrot_groupsize": 64}
    codes, params = get_layout_class(layout).quantize(weight, **how)
    quantized = QuantizedTensor(codes, layout, replace(params, orig_dtype=torch.float32))
    tensors = {name: tensor.contiguous() for name, tensor in quantized.state_dict("layer.weight").items()}
    tensors |= _marked(entry | {"convrot_groupsize": 64}) | {"layer.bias": bias}
    tensors["__dequant_ref"] = quantized.dequantize()[:32].clone()
    return tensors, {"layout": layout, "quantize_kwargs": how, "comfy_kitchen": version("comfy-kitchen")}, {}


def _marked(entry: dict[str, Any]) -> dict[str, Tensor]:
    return {"layer.comfy_quant": torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8)}


def comfy_svdquant_w4a4() -> Made:
    """comfy-kitchen has no quantizer of these; what it multiplies, of x on the grid of its codes without sign."""
    from comfy_kitchen.backends.eager.svdquant import _pack_int4_row_major
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    weight, bias, tokens = source()
    smooth = tokens.float().abs().amax(0).clamp(min=0.1).sqrt().bfloat16()
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    down, up = v[:16].T.bfloat16().contiguous(), (u[:, :16] * s[:16]).bfloat16().contiguous()
    groups = ((weight.float() - up.float() @ down.float().T) * smooth.float()).reshape(160, 3, 64)
    scale = (groups.abs().amax(-1) / 7).clamp(min=1e-6).bfloat16()
    codes = _pack_int4_row_major((groups / scale.float().unsqueeze(-1)).round().clamp(-7, 7).reshape(160, 192))
    tensors = {"weight": codes, "weight_scale": scale.T.contiguous(), "weight_smooth_factor": smooth}
    tensors |= {"weight_proj_down": down, "weight_proj_up": up}
    fields = {name.removeprefix("weight_"): tensor.float() for name, tensor in tensors.items() if name != "weight"}
    layout, how = "TensorCoreSVDQuantW4A4Layout", {"orig_dtype": torch.float32, "orig_shape": (160, 192)}
    params = get_layout_class(layout).Params(**fields, **how, act_unsigned=True)
    quantized = QuantizedTensor(codes, layout, params)
    drawn = torch.randint(0, 16, (8, 3, 64), generator=torch.Generator().manual_seed(0)).float()
    drawn[..., 0] = 15
    x = (drawn * torch.tensor([0.01, 0.02, 0.04])[:, None]).reshape(8, 192) * smooth.float() - 0.171875
    made = {f"layer.{name}": tensor for name, tensor in tensors.items()} | {"layer.bias": bias, "__x": x}
    made |= _marked({"format": "svdquant_w4a4", "act_unsigned": True})
    made["__y"] = nn.functional.linear(x, quantized, bias.float())
    made["__dequant_ref"] = quantized.dequantize()[:32].clone()
    return made, {"layout": layout, "params": "act_unsigned", "comfy_kitchen": version("comfy-kitchen")}, {}


def bnb_nf4() -> Made:
    from bitsandbytes import functional

    weight, bias, _ = source()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
    tensors = {f"layer.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    tensors |= {"layer.weight": packed, "layer.bias": bias}
    tensors["__dequant_ref"] = functional.dequantize_4bit(packed, state)
    api = "bitsandbytes.functional.quantize_4bit(nf4, compress_statistics, blocksize 64)"
    return tensors, {"api": api, "bitsandbytes": version("bitsandbytes")}, {}


def _gguf(kind: str) -> Made:
    """Q8_0 and Q4_0 of rows of the input; K-quants, which the package only reads, of bytes that were drawn."""
    import gguf
    from gguf.quants import dequantize, quantize

    number = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    if kind.endswith("_K"):
        data = torch.randint(
            0, 256, (6, 2, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        ).numpy()
        at = {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]  # fp16 factors, which could be NaN: 0.0078 to 0.0156
        for place in at:
            data[..., place + 1] = 0x20
        data = data.reshape(6, 2 * size)
    else:
        data = quantize(source()[0][:32].float().numpy(), number)
    tensors = {"layer.weight": torch.from_numpy(data.copy())}
    tensors["__dequant_ref"] = torch.from_numpy(dequantize(data, number).copy())
    recipe = {"type": kind, "elements": elements, "bytes": size, "gguf": version("gguf")}
    return tensors, recipe, {"type": kind}


MAKERS: dict[str, Callable[[], Made]] = {
    "bfl_fp8r": bfl_fp8r,
    "bfl_nvfp4": bfl_nvfp4,
    "torchao_int8": torchao_int8,
    "torchao_nvfp4": torchao_nvfp4,
    "comfy_int8": comfy_int8,
    "comfy_convrot_w4a4": lambda: _kitchen("TensorCoreConvRotW4A4Layout", {"format": "convrot_w4a4"}),
    "comfy_w4a8": lambda: _kitchen("AsymW4A8Int8Layout", {"format": "asym_w4a8_int8", "group_size": 16}),
    "comfy_w6a8": lambda: _kitchen("AsymW4A8Int8Layout", {"format": "asym_w4a8_int8", "group_size": 16}, bits=6),
    "comfy_svdquant_w4a4": comfy_svdquant_w4a4,
    "bnb_nf4": bnb_nf4,
    "gguf_q8_0": lambda: _gguf("Q8_0"),
    "gguf_q4_0": lambda: _gguf("Q4_0"),
    "gguf_q4_k": lambda: _gguf("Q4_K"),
    "gguf_q6_k": lambda: _gguf("Q6_K"),
}


def main() -> None:
    for name, make in MAKERS.items():
        file = HERE / f"{name}.safetensors"
        if file.exists():
            continue
        tensors, recipe, header = make()
        save_file(tensors, file, header)
        described = {
            key: {
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "sha256": hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[
                    :16
                ],
            }
            for key, t in tensors.items()
        }
        recipe |= {"torch": torch.__version__, "device": "cpu", "script": Path(__file__).name}
        text = {"file": file.name, "recipe": recipe, "tensors": described, "safetensors_metadata": header}
        file.with_suffix(".json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
