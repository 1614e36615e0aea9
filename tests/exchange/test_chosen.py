"""Checkpoints in formats that `fluxq auto --for` mixed, read by the programs that they were chosen for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_files import export
from safetensors.torch import load_file
from shared import quick, said_by
from torch import Tensor

import fluxq
from fluxq.base.model import resolve_model
from fluxq.quantize.exchange.dialects import WRITERS
from fluxq.quantize.exchange.export import plan_of
from fluxq.quantize.exchange.native import NativeComponent
from tests.exchange import test_sglang as sglang
from tests.exchange.test_export import require_comfy_kitchen_reads
from tests.jobs.test_choosing import CALL, small


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """mixed("comfy") -> (unit -> option, the checkpoint, what was exported of it)."""
    root = tmp_path_factory.mktemp("mixed")
    model, made = small(root / "small"), {}

    def make(dialect: str, bits: float, *menu: str) -> tuple[dict[str, str], NativeComponent, Any]:
        key = "-".join((dialect, str(bits), *menu))
        if key not in made:
            folder = root / key
            base = quick("nvfp4", root, fitted=False)
            how = {
                "dialect": dialect,
                "measure": "velocity",
                "count": 1,
                "menu": menu,
                "output": folder / "chosen.yaml",
            }
            fluxq.auto(model, base, bits=bits, call=CALL, **how)
            out = fluxq.quantize_pipeline(model, folder / "chosen.yaml", output=folder / "out", check=False, call=CALL)
            result = json.loads((folder / "chosen.json").read_text())
            target = folder / ("x.safetensors" if WRITERS[dialect].is_file else "x")
            done = export(resolve_model(str(out.path)), dialect, target)
            option_of = {name.partition(".")[2]: u["option"] for u in result["units"] for name in u["layers"]}
            made[key] = option_of, NativeComponent(resolve_model(str(out.path)), "transformer"), done
        return made[key]

    return make


def options_in(units: list[Any], option_of: dict[str, str]) -> dict[str, set[str]]:
    """Unit of the file -> options of its layers, of units whose format was chosen."""
    found = {unit.unit.name: {option_of[part] for part in unit.unit.parts if part in option_of} for unit in units}
    return {name: options for name, options in found.items() if options}


@pytest.mark.slow
def test_what_is_chosen_for_comfyui_is_written_as_it_is(mixed) -> None:
    option_of, source, done = mixed("comfy", 6.5)
    assert set(option_of.values()) == {"nvfp4", "fp8_tensor"} and not done.dequantized and not done.requantized
    tensors, options = load_file(done.target), options_in(plan_of(source, "comfy").choices, option_of)
    formats = {"nvfp4": "nvfp4", "float8_e4m3fn": "fp8_tensor"}
    marks = {name: json.loads(bytes(tensors[f"{name}.comfy_quant"].tolist())) for name in options}
    assert {name: {formats[mark["format"]]} for name, mark in marks.items()} == options


@pytest.mark.slow
@pytest.mark.reader("comfy-kitchen", "comfy")
def test_comfy_kitchen_reads_a_mixed_file(mixed) -> None:
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    _, source, done = mixed("comfy", 6.5)
    formats = require_comfy_kitchen_reads(source, done)
    assert {"nvfp4", "float8_e4m3fn"} <= formats.keys() and formats == Counter(done.formats)


@pytest.mark.slow
@pytest.mark.reader("ModelOpt", "modelopt")
def test_modelopt_reads_a_mixed_folder(mixed) -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    option_of, source, done = mixed("modelopt", 8.0, "nvfp4", "16bit")
    assert set(option_of.values()) == {"nvfp4", "16bit"} and not done.requantized
    tensors, _ = sglang.shapes_of(Path(done.target))
    for name, option in option_of.items():
        weight = tensors[f"{name}.weight"]
        if option == "16bit":
            assert weight.dtype == torch.bfloat16 and f"{name}.weight_scale" not in tensors
            continue
        ours: Tensor = source.layer(name).linear().quantized_weight.dequantize()
        read = NVFP4QTensor(ours.shape, torch.float32, weight).dequantize(
            scale=tensors[f"{name}.weight_scale"],
            double_scale=tensors[f"{name}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert torch.equal(read, ours), name


@pytest.mark.slow
@sglang.given
@pytest.mark.reader("SGLang-Diffusion", "modelopt")
def test_sglang_reads_a_mixed_folder(mixed, tmp_path) -> None:
    option_of, _, done = mixed("modelopt", 8.0, "nvfp4", "16bit")
    held, shapes = sglang.shapes_of(Path(done.target))
    asked = json.dumps([[str(done.target), shapes, str(tmp_path / "read.safetensors")]])
    (said,) = json.loads(said_by([sglang.PYTHON, "-c", sglang.READ, asked], tmp_path).splitlines()[-1])["models"]
    in_16_bit = {name for name in shapes if f"{name}.weight_scale" not in held}
    assert said["config"] == "ModelOptFp4Config"
    assert set(said["ignored"]) == set(said["found ignored"]) == in_16_bit
    assert {name for name, option in option_of.items() if option == "16bit"} <= in_16_bit
    sglang.require_rows(load_file(tmp_path / "read.safetensors"), held, shapes.keys() - in_16_bit)


@pytest.mark.slow
@sglang.given
@pytest.mark.reader("SGLang-Diffusion", "comfy")
@pytest.mark.parametrize("menu", [("nvfp4", "int8", "fp8_tensor"), ("nvfp4", "fp8_tensor"), ("nvfp4", "16bit")])
def test_sglang_takes_no_mix_of_comfyuis_formats(mixed, menu, tmp_path) -> None:
    """It reads the markers of all layers, and has no configuration for such a mix; int8 modulation makes the last."""
    option_of, _, done = mixed("comfy", 8.0 if "16bit" in menu else 6.5, *menu)
    held, shapes = sglang.shapes_of(Path(done.target))
    asked = json.dumps([[str(done.target), shapes, str(tmp_path / "read.safetensors")]])
    (said,) = json.loads(said_by([sglang.PYTHON, "-c", sglang.READ, asked], tmp_path).splitlines()[-1])["models"]
    marked = {name.removesuffix(".comfy_quant") for name in held if name.endswith(".comfy_quant")}
    formats = {json.loads(bytes(held[f"{name}.comfy_quant"].tolist()))["format"] for name in marked}
    assert len(set(option_of.values())) > 1 and len(formats) > 1
    if formats == {"int8_tensorwise", "nvfp4"}:
        assert said["error"].startswith("Unsupported quantized linear marker for ")
    else:
        assert said == {"error": f"Unsupported Comfy quantization format(s): {', '.join(sorted(formats))}"}
