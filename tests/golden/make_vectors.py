"""Vectors for those who write a reader of checkpoints: `python tests/golden/make_vectors.py` writes docs/vectors.

    transformer, text_encoder    a Linear of every format and of every step on x, as either library stores them
    expected                     what their tensors mean, and what activations become

make_refused.py writes beside them what a reader must not take, docs/format.md says what is in all of them. Codes and
scales are drawn from SHAKE-256, so that they are the same everywhere. What they mean is worked out here with torch's
dtypes and numbers written out, in sums of one order, by neither the reader nor the package; activations alone are
rounded by the package's torch reference.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fluxq.kernels import ops
from fluxq.kernels.tensor import stored_shapes
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import FORMATS, Format, Scheme, find_format

VECTORS = Path(__file__).parents[2] / "docs" / "vectors"
ROWS, COLUMNS, TOKENS = 4, 128, 3  # 4 rows of 4-bit codes hold every byte once
_WIDE = ("fp8_1x128", "int4_g128", "nvfp4-nvfp4-hr256")  # with 256 columns: two blocks, or one
_CUT_OFF = 130, 132  # rows and columns of fp8_128x128: four blocks, of which one is whole
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # whose negatives have a zero too
# Of every scheme that a recipe's layers end with there is one that has the same steps, besides each step alone.
PLAIN = tuple(f"{name}-16bit" for name in (*FORMATS, "int4_g128"))
ROUNDED = ("fp8-fp8", "fp8_tensor-fp8_tensor-static", "mxfp8-mxfp8", "mxfp4-mxfp4", "int8-int8", "nvfp4-nvfp4-static")
STEPS = ("center", "smooth", "center-smooth", "d3", "h16", "h32", "h64", "h128", "hr16", "hr64", "hr256", "r2")
TRANSFORMED = (
    *(f"nvfp4-nvfp4-{steps}" for steps in STEPS),
    *("int8-int8-hr64", "int8-int8-smooth-hr16", "int8-int8-center-smooth-hr64"),
    *("int4-16bit-center-smooth", "int4-int4-smooth", "int4-int4-smooth-r2", "int8-int8-center-smooth"),
    *("mxfp4-mxfp4-center-h64-r2", "mxfp4-mxfp4-center-smooth", "mxfp4-mxfp4-center-smooth-d2", "mxfp4-mxfp4-r2"),
    *("mxfp4-mxfp4-center-smooth-h128-r2", "mxfp4-mxfp4-center-smooth-d3-h64-r2", "nvfp4-nvfp4-static-center-smooth"),
    *("nvfp4-nvfp4-static-center-h64-46-r2", "nvfp4-nvfp4-static-center-smooth-h64-r2"),
    *("nvfp4-nvfp4-static-center-smooth-h128-46-r2", "nvfp4-nvfp4-static-center-smooth-d3-h128-46-r2"),
)
TRANSFORMER = (*PLAIN, *ROUNDED, *TRANSFORMED)
TEXT_ENCODER = ("fp8-16bit", "mxfp8-16bit", "mxfp4-16bit", "nvfp4-16bit", "int8-16bit", "int4-16bit", "nvfp4-16bit-r2")


def drawn(name: str, shape: tuple[int, ...], bits: int = 8) -> Tensor:
    """Return whole numbers of 8, 16 or 24 bits, int64, that only the name tells."""
    size, count = bits // 8, int(np.prod(shape))
    raw = np.frombuffer(hashlib.shake_256(name.encode()).digest(size * count), np.uint8).reshape(count, size)
    return torch.from_numpy(raw.astype(np.int64) @ (256 ** np.arange(size))).reshape(shape)


def positive(name: str, shape: tuple[int, ...], least: float) -> Tensor:
    """Return fp32 numbers from `least` to twice that, with bits in all of their mantissa."""
    return ((1 + drawn(name, shape, 24).double() / 2**24) * least).float()


def signed(name: str, shape: tuple[int, ...], most: float) -> Tensor:
    """Return fp32 numbers from -most to most."""
    return ((drawn(name, shape, 16).double() / 2**15 - 1) * most).float()


def codes_of(name: str, row: Format, shape: tuple[int, ...]) -> Tensor:
    """Return codes as stored: first every byte that is a number, then drawn ones."""
    flat = drawn(name, shape).flatten()
    flat[:256] = torch.arange(len(flat))[:256]
    finite = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}.get(row.element.storage, 0x80)
    flat = torch.where((flat & 0x7F) >= finite, flat - 8, flat)
    return flat.to(torch.uint8).reshape(shape).view(getattr(torch, row.element.storage))


def scales_of(name: str, row: Format, shape: tuple[int, ...]) -> Tensor:
    """Return block scales as stored; the first of E8M0 is the smallest."""
    if row.scale == "e8m0":
        bytes_ = (118 + drawn(name, shape) % 12).to(torch.uint8)
        bytes_[0, 0] = 1
        return bytes_
    if row.scale == "e4m3":
        return (1 + drawn(name, shape) % 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)
    return positive(name, shape, 2.0**-9).to(torch.bfloat16 if row.scale == "bf16" else torch.float32)


def layer_of(name: str, text: str, dtype: torch.dtype, n: int, k: int) -> dict[str, Tensor]:
    """Return the stored tensors of an (n, k) layer. It has a bias if its inputs are rounded or centred."""
    scheme = Scheme.parse(text)
    row, d, r = scheme.weights, scheme.deflate, scheme.rank
    shapes = {part: shape for part, (shape, _) in stored_shapes(row, n, k).items()}
    layer = {"weight": codes_of(f"{name}.weight", row, shapes["weight"])}
    layer["weight_scale"] = scales_of(f"{name}.weight_scale", row, shapes["weight_scale"])
    if row.two_level:
        layer["weight_scale_2"] = positive(f"{name}.weight_scale_2", (), 2.0**-13)
    if scheme.static_input:
        layer["input_scale"] = positive(f"{name}.input_scale", (), 2.0**-9)
    sixteen: dict[str, Tensor] = {}
    if scheme.center:
        sixteen["pre_quant_mean"] = signed(f"{name}.mean", (k,), 1)
    if scheme.smooth:
        sixteen["pre_quant_scale"] = positive(f"{name}.smooth", (k,), 0.75)
    if d:
        sixteen["deflate_basis"] = signed(f"{name}.basis", (d, k), (3 / k) ** 0.5)
        sixteen["deflate_out"] = signed(f"{name}.out", (n, d), 1)
    if r:
        sixteen["svdquant_lora_a"] = signed(f"{name}.a", (r, k), 0.5)
        sixteen["svdquant_lora_b"] = signed(f"{name}.b", (n, r), 0.5)
    if scheme.center or scheme.activations is not None:
        sixteen["bias"] = signed(f"{name}.bias", (n,), 1)
    return layer | {part: tensor.to(dtype) for part, tensor in sixteen.items()}


def decoded(layer: dict[str, Tensor], row: Format) -> np.ndarray:
    """Return what codes and scales stand for (N, K), each product rounded to fp32."""
    codes, scale = layer["weight"], layer["weight_scale"]
    if row.element.bits == 4:
        low_first = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        table = [*range(8), *range(-8, 0)] if row.element.is_integer else [*_E2M1, *(-value for value in _E2M1)]
        values = torch.tensor(table, dtype=torch.float32)[low_first]
    else:
        values = codes.float()
    step = scale.float()
    if row.scale == "e8m0":
        step = torch.from_numpy(np.ldexp(np.float32(1), scale.numpy().astype(int) - 127))
    step = step * layer["weight_scale_2"] if row.two_level else step
    n, k = values.shape
    if row.name == "fp8_128x128":
        rows, columns = torch.arange(n) // 128, torch.arange(k) // 128
        return (values * step[rows][:, columns]).numpy()
    blocks = values.reshape(n, step.shape[1] if step.ndim == 2 else 1, -1)
    return (blocks * step.reshape(-1, blocks.shape[1], 1)).reshape(n, k).numpy()


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a b in fp64, added up from the first term to the last: the same on every machine."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


def steps_of(x: np.ndarray, layer: dict[str, np.ndarray], scheme: Scheme) -> tuple[np.ndarray, np.ndarray | None]:
    """Return z (M, K) and t (M, d) of x (M, K), in fp64: the steps on x, before it would be rounded."""
    z = x - layer["pre_quant_mean"] if scheme.center else x
    z = z * layer["pre_quant_scale"] if scheme.smooth else z
    t = None
    if scheme.deflate:
        t = product(z, layer["deflate_basis"].T)
        z = z - product(t, layer["deflate_basis"])
    near, many = 1, 4 if scheme.regular else 2
    while near < scheme.hadamard:  # of neighbours, then of pairs or fours, …
        parts = np.moveaxis(z.reshape(len(z), -1, many, near), 2, 0)
        if scheme.regular:  # the sum of all, less twice the one opposite
            total = (parts[0] + parts[1]) + (parts[2] + parts[3])
            turned = [total - 2 * opposite for opposite in parts[::-1]]
        else:
            turned = [parts[0] + parts[1], parts[0] - parts[1]]
        z = np.stack(turned, 2).reshape(z.shape)
        near *= many
    return (z / np.sqrt(scheme.hadamard) if scheme.hadamard else z), t


def output_of(x: np.ndarray, v: np.ndarray, layer: dict[str, np.ndarray], scheme: Scheme) -> np.ndarray:
    """Return y (M, N) of x (M, K), in fp64, without rounding x; v (N, K): the decoded codes."""
    z, t = steps_of(x, layer, scheme)
    y = product(z, v.astype(np.float64).T)
    if t is not None:
        y = y + product(t, layer["deflate_out"].T)
    if scheme.rank:
        y = y + product(product(x, layer["svdquant_lora_a"].T), layer["svdquant_lora_b"].T)
    return y + layer["bias"] if "bias" in layer else y


def meaning(name: str, layer: dict[str, Tensor], text: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the expected tensors of a layer: `decoded`, and of a transformed one `weight`, `z` and `y`; its `bias`."""
    scheme = Scheme.parse(text)
    v = decoded(layer, scheme.weights)
    held = {part: layer[part].double().numpy() for part in layer if part not in ("weight", "weight_scale")}
    nothing = np.zeros((1, v.shape[1]))
    bias = output_of(nothing, v, held, scheme)[0]
    known = {"decoded": v, **({"bias": bias} if "bias" in layer else {})}
    if scheme.is_transformed or scheme.rank:
        linear = held | {"pre_quant_mean": np.zeros(v.shape[1]), "bias": np.zeros(v.shape[0])}
        known["weight"] = output_of(np.eye(v.shape[1]), v, linear, scheme).T
        known["z"] = steps_of(x[:, : v.shape[1]], held, scheme)[0]
        known["y"] = output_of(x[:, : v.shape[1]], v, held, scheme)
    return {f"{name}.{part}": value.astype(np.float32) for part, value in known.items()}


def activations() -> dict[str, Tensor]:
    """Return `v`, tokens after all steps, and what each format makes of them: scales, codes and their numbers."""
    v = signed("activations", (5, 256), 4)
    v[1] = 0
    v[2] *= 2.0**-20
    v[3, 7] = 300  # clipped where the scale is given
    v[4] = (drawn("ties", (256,)) - 128).float() / 32  # many half-way between two codes
    held = {"v": v}
    for label in ACTIVATIONS:
        name, *words = label.split("-")
        scale = positive(f"{label}.input_scale", (), 2.0**-9) if "static" in words else None
        q = ops.quantize_activation(v, find_format(name), scale, "46" in words)
        given = {"input_scale": scale} if scale is not None else {"scale": q.scale, "global_scale": q.global_scale}
        given |= {"scale": q.scale} if name == "nvfp4" else {}
        given |= {"codes": q.codes, "decoded": q.dequantize()}
        held |= {f"{label}.{part}": tensor.contiguous() for part, tensor in given.items() if tensor is not None}
    return held


ACTIVATIONS = (
    *("fp8", "fp8_tensor", "fp8_tensor-static", "fp8_1x128", "fp8_e5m2", "mxfp8", "mxfp4", "int8", "int4"),
    *("int4_g128", "nvfp4", "nvfp4-46", "nvfp4-static", "nvfp4-static-46"),
)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write(path: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {name: torch.from_numpy(t.copy()) if isinstance(t, np.ndarray) else t for name, t in tensors.items()}
    save_file(held, path, {"format": "pt"})


def write_model(folder: Path, schemes: tuple[str, ...], dtype: torch.dtype) -> None:
    """Write a model `Layers` with one Linear for each scheme, and one in 16 bit, called `plain`."""
    of_transformers = dtype == torch.float16
    x = signed("x", (TOKENS, 2 * COLUMNS), 2).bfloat16()
    tensors, linears, expected = {}, {}, {"x": x}
    for text in schemes:
        n, k = ROWS, 2 * COLUMNS if text.startswith(_WIDE) else COLUMNS
        n, k = _CUT_OFF if text.startswith("fp8_128x128") else (n, k)
        layer, name = layer_of(f"{folder.name}.{text}", text, dtype, n, k), f"layers.{text}"
        linears[text] = [n, k, "bias" in layer]
        expected |= meaning(name, layer, text, x.double().numpy())
        if of_transformers:
            layer["weight"] = layer["weight"].unsqueeze(-1)
        tensors |= {f"{name}.{part}": tensor for part, tensor in layer.items()}
    tensors |= {"plain.weight": signed("plain.weight", (4, 16), 1).to(dtype), "plain.bias": torch.zeros(4, dtype=dtype)}
    said = QuantizationConfig.of((f"layers.{text}", Scheme.parse(text)) for text in schemes).to_dict()
    write_config(folder, linears, said, of_transformers)
    write(folder.parent / "expected" / f"{folder.name}.safetensors", expected)
    if of_transformers:
        write(folder / "model.safetensors", tensors)
        return
    names, shards = list(tensors), {}
    for index, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"diffusion_pytorch_model-{index + 1:05d}-of-00002.safetensors"
        write(folder / file, {name: tensors[name] for name in part})
        shards |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shards.items()))}
    write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)


def write_config(folder: Path, linears: dict[str, Any], said: dict[str, Any], of_transformers: bool) -> None:
    """Write config.json. linears: name -> [N, K, has a bias]; said: the quantization_config."""
    kind = {"architectures": ["Layers"], "model_type": "layers"} if of_transformers else {"_class_name": "Layers"}
    write_json(folder / "config.json", {**kind, "linears": linears, "quantization_config": said})


def main(folder: Path = VECTORS) -> None:
    """Write the vectors anew."""
    write_model(folder / "transformer", TRANSFORMER, torch.bfloat16)
    write_model(folder / "text_encoder", TEXT_ENCODER, torch.float16)
    write(folder / "expected" / "activations.safetensors", activations())


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
