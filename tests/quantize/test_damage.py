"""Tests of what sees which damage of a tensor, for every format: the table of quantize/README.md against the code.

A hash or a digest sees all of it. Without them there are the checks on values, and what loading compares.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluxq.quantize.record import CONFIG_DIGEST, CONFIG_DIGESTS, DIGEST, DIGESTS
from fluxq.quantize.verify import verify
from fluxq.recipes.recipe import shipped_recipes

PAGE = Path(__file__).parents[2] / "quantize" / "README.md"
LAYER = "transformer_blocks.0.attn.to_k"
OTHER = "transformer_blocks.0.attn.to_v"
WEIGHTS = "diffusion_pytorch_model.safetensors"
SCALES = ("weight_scale_2", "weight_scale")  # the one that is stored in full, where there are two, comes first
FACTORS = ("svdquant_lora_a", "svdquant_lora_b")

Tensors = dict[str, Tensor]
Damage = Callable[[Tensors, dict], object]


def scale_of(tensors: Tensors) -> Tensor:
    return next(tensors[f"{LAYER}.{name}"] for name in SCALES if f"{LAYER}.{name}" in tensors)


def fill(tensor: Tensor, value: float, byte: int) -> None:
    """One value; of E8M0 bytes, which know no other, a byte."""
    flat = tensor.view(-1)
    flat[0] = byte if tensor.dtype == torch.uint8 else value


def replace(tensors: Tensors, name: str, make: Callable[[Tensor], Tensor]) -> None:
    tensors[name] = make(tensors[name]).contiguous()


def exchange(tensors: Tensors, *_: object) -> None:
    for name in [name for name in tensors if name.startswith(f"{LAYER}.")]:
        other = name.replace(LAYER, OTHER)
        tensors[name], tensors[other] = tensors[other], tensors[name]


def forget(tensors: Tensors, config: dict) -> None:
    for members in config["layers"].values():
        if LAYER in members:
            members.remove(LAYER)


def drop(tensors: Tensors, *_: object) -> None:
    del tensors[f"{LAYER}.weight_scale"]


def without_factors(tensors: Tensors, config: dict) -> object:
    held = [name for name in tensors if name.rpartition(".")[2] in FACTORS]
    for name in held:
        del tensors[name]
    return None if held else "no factors"


def claim_none(tensors: Tensors, config: dict) -> object:
    """The factors stay in the file, and config.json says nothing of them."""
    layers = {re.sub(r"-r\d+", "", scheme): members for scheme, members in config["layers"].items()}
    if layers.keys() == config["layers"].keys():
        return "no factors"
    config["layers"] = layers
    config["required_features"] = [each for each in config["required_features"] if each != "low_rank"]
    return None


def swap_nibbles(tensors: Tensors, *_: object) -> object:
    codes = tensors[f"{LAYER}.weight"]
    if codes.dtype != torch.uint8:
        return "no nibbles"
    replace(tensors, f"{LAYER}.weight", lambda t: t << 4 | t >> 4)
    return None


DAMAGES: dict[str, Damage] = {
    "a tensor is missing": drop,
    "a scale of a 16-bit layer": lambda t, _: t.update({"x_embedder.weight_scale": torch.ones(1)}),
    "another dtype": lambda t, _: replace(t, f"{LAYER}.bias", lambda v: v.to(torch.float8_e4m3fn)),
    "another shape": lambda t, _: replace(t, f"{LAYER}.weight", lambda v: v[:64]),
    "a scale that is no number": lambda t, _: fill(scale_of(t), float("nan"), 255),
    "a scale of 0, or the smallest byte": lambda t, _: fill(scale_of(t), 0.0, 0),
    "a scale far too large": lambda t, _: fill(scale_of(t), 3e38, 0xFE),
    "a bias that is no number": lambda t, _: fill(t[f"{LAYER}.bias"], float("nan"), 0),
    "a bias far too large": lambda t, _: fill(t[f"{LAYER}.bias"], 3e38, 0),
    "BF16 tensors called F16": lambda t, _: replace(t, "x_embedder.weight", lambda v: v.view(torch.float16)),
    "config.json forgets a layer": forget,
    "config.json says no low rank": claim_none,
    "the factors are missing": without_factors,
    "codes of zeros": lambda t, _: replace(t, f"{LAYER}.weight", torch.zeros_like),
    "swapped nibbles": swap_nibbles,
    "two layers exchanged": exchange,
    "a bias of another sign": lambda t, _: replace(t, f"{LAYER}.bias", torch.neg),
}


def rows() -> dict[str, tuple[str, str, str]]:
    """Damage -> who sees it, by the page: `verify`, `verify` without hashes and digests, loading."""
    table = re.search(r"\| damage \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", PAGE.read_text(encoding="utf-8"))
    assert table, "quantize/README.md has no table of damages"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    return {damage: (whole, bare, load) for damage, whole, bare, load in cells}


def seen_by(folder: Path) -> tuple[str, str]:
    """("yes" or "no" of `verify`, of loading)."""
    found = any(result.findings for result in verify(folder))
    try:
        FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    except (ValueError, RuntimeError):
        return "yes" if found else "no", "yes"
    return "yes" if found else "no", "no"


def test_the_page_has_every_damage():
    assert list(rows()) == list(DAMAGES)


@pytest.mark.often(1)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "recipe",
    [
        name if name in ("fp8", "nvfp4-max") else pytest.param(name, marks=pytest.mark.slow)
        for name in shipped_recipes()
    ],
)
def test_what_sees_a_damage(checkpoint, tmp_path, recipe, damage):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(recipe) / "transformer", folder)
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    said = config["quantization_config"]
    not_here = DAMAGES[damage](tensors, said)
    if not_here:
        assert recipe != "nvfp4-max", not_here  # which has all that can be damaged
        pytest.skip(f"{recipe} has {not_here}")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    said.pop(DIGESTS)
    (folder / "config.json").write_text(json.dumps(config))
    whole, load = seen_by(folder)
    said.pop(DIGEST), said.pop(CONFIG_DIGEST), said.pop(CONFIG_DIGESTS, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert (whole, seen_by(folder)[0], load) == rows()[damage]
