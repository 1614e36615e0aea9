"""Small FLUX models in the dialects of other programs, for the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor

from fluxq.base.model import ModelFolder
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.exchange import comfy, compressed_tensors, modelopt, nunchaku, torchao
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.export import Exported, plan_export
from fluxq.quantize.exchange.layer import QuantTensors
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import Joined, original_names
from tests.recipes.test_families import on_meta

FLUX = FAMILIES["flux"]
Tensors = dict[str, Tensor]


@cache
def base_state(seed: int = 0) -> Tensors:
    """Weights of the tiny FLUX, by diffusers' names, with rows of very different sizes as real ones have."""
    g, state = torch.Generator().manual_seed(seed), {}
    for name, meta in on_meta(FLUX, dict(TINY_CONFIGS[FLUX.name])).state_dict().items():
        value = torch.randn(meta.shape, generator=g) * 0.05
        if meta.ndim == 2:
            value *= torch.exp(torch.randn(meta.shape[0], 1, generator=g))
        state[name] = value.bfloat16()
    return state


def write_base(folder: Path, seed: int = 0) -> Path:
    """The 16-bit component's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"_class_name": FLUX.model, **TINY_CONFIGS[FLUX.name]}
    (folder / "config.json").write_text(json.dumps(config, default=list))
    save_file(base_state(seed), folder / "diffusion_pytorch_model.safetensors")
    return folder


def export(checkpoint: ModelFolder, dialect: str, target: Path, **how: Any) -> Exported:
    """Write a checkpoint for another program. how: as `plan_export` takes it."""
    return plan_export(checkpoint, dialect, target, **how).write()


def tensors_of(weight: Tensor, scheme: Scheme, bias: Tensor | None) -> QuantTensors:
    """A layer rounded to nearest, with whatever the scheme asks for beside."""
    tensors = QuantizedTensor.quantize(weight, scheme.weights).tensors()
    if bias is not None:
        tensors["bias"] = bias
    if scheme.static_input:
        tensors["input_scale"] = torch.tensor(0.0031)
    beside = {} if scheme.weights.name not in ("fp8_tensor", "int8") else {"input_scale": torch.tensor(0.0125)}
    return QuantTensors(tensors, tuple(weight.shape), scheme, beside)  # pyright: ignore[reportArgumentType]


def joined_of(state: Tensors, original: bool) -> list[Joined]:
    return original_names("flux", state.keys()) if original else [Joined(name, (name,)) for name in state]


def write_model(
    path: Path,
    dialect: str,
    scheme: str,
    broken: Callable[[str, Tensors], None] | None = None,
    state: Tensors | None = None,
    **how: Any,
) -> Path:
    """A model in a dialect, as that dialect's writers make one: a file, or the folder `path`.

    broken: (layer's name in the file, its tensors) -> None, changes what is written of it. how: keep, names in
    diffusers that stay in 16 bit (beside what no group of the family has); original, the kind of names; marked, False
    for a file without any mark; header, False for one whose tensors alone say it; also, names to quantize that the
    family keeps; config, what to change in quantization_config.
    """
    state, row = state or base_state(), DIALECTS[dialect]
    original, keep = how.get("original", row.names == "original"), how.get("keep", ("norm", "x_embedder"))
    entries: dict[str, dict[str, Any]] = {}
    held: Tensors = {}
    for whole, parts, order in joined_of(state, original):
        module, _, kind = whole.rpartition(".")
        rows = torch.cat([state[part] for part in parts])
        rows = torch.cat(rows.chunk(2)[::-1]) if order == "halves swapped" else rows
        located = FLUX.locate(parts[0].rpartition(".")[0])
        also = any(word in parts[0] for word in how.get("also", ()))
        if not also and (located is None or any(word in parts[0] for word in keep)):
            held[whole] = rows
        elif kind == "weight":
            bias = torch.cat([state[part.replace(".weight", ".bias")] for part in parts])
            bias = torch.cat(bias.chunk(2)[::-1]) if order == "halves swapped" else bias
            layer = tensors_of(rows, Scheme.parse(scheme), bias)
            assert row.encode is not None
            encoded = row.encode(layer)
            tensors, entries[module] = dict(encoded.tensors), encoded.entry
            if broken:
                broken(module, tensors)
            held |= {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    return _save(path, dialect, held, entries, state, how)


def _save(path: Path, dialect: str, held: Tensors, entries: Any, state: Tensors, how: dict[str, Any]) -> Path:
    metadata: dict[str, str] = {}
    if dialect == "comfy":
        metadata = comfy.metadata(entries)
    elif dialect == "torchao":
        plain = [name for name in held if name.rpartition(".")[0] not in entries or name.endswith("bias")]
        metadata = torchao.metadata(entries, plain)
    elif dialect == "bfl":
        metadata = DIALECT_METADATA["bfl"](entries)
    if how.get("marked") is False:
        held = {name: tensor for name, tensor in held.items() if not name.endswith("comfy_quant")}
        metadata = {}
    if how.get("header") is False:
        metadata = {}
    if how.get("only_header"):
        held = {name: tensor for name, tensor in held.items() if not name.endswith("comfy_quant")}
    if WRITERS[dialect].is_file:
        save_file(held, path, metadata)
        return path
    ignore = [
        name.removesuffix(".weight") for name in held if held[name].ndim == 2 and held[name].dtype == torch.bfloat16
    ]
    configs = {
        "modelopt": lambda: modelopt.config(entries, ignore, "0.47.0"),
        "torchao": lambda: torchao.config(entries, ignore),
        "nunchaku_lite": lambda: nunchaku.config(entries),
        "compressed_tensors": lambda: compressed_tensors.config(entries, ignore),
    }
    path.mkdir(parents=True, exist_ok=True)
    config = {"_class_name": FLUX.model, **TINY_CONFIGS[FLUX.name]}
    config["quantization_config"] = configs[dialect]() | how.get("config", {})
    (path / "config.json").write_text(json.dumps(config, default=list))
    save_file(held, path / "diffusion_pytorch_model.safetensors", metadata or {"format": "pt"})
    return path


def _bfl(entries: Any) -> dict[str, str]:
    from fluxq.quantize.exchange import bfl

    return bfl.metadata(entries)


DIALECT_METADATA = {"bfl": _bfl}
