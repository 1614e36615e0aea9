"""Whole models between fluxq and other programs: those that the programs wrote, and the files of what fluxq writes."""

import hashlib
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from exchange_files import export
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fluxq.base.model import resolve_model
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.native import NativeComponent
from tests.exchange.test_layers import same_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTS = "diffusion_pytorch_model.safetensors"
LAYOUT = {"group_size", "swap_weight_nibbles", "checkpoint_weight_scale_layout", "checkpoint_uses_packed_qkv"}


def notes_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def pipeline_of(name: str, folder: Path) -> Path:
    """A golden as the only component of a pipeline."""
    component = folder / "transformer"
    component.mkdir(parents=True)
    shutil.copyfile(GOLDEN / f"{name}.safetensors", component / WEIGHTS)
    (component / "config.json").write_text(json.dumps(notes_of(name)["config"]))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert same_bytes(ours[name], tensor), name


# --- what other programs wrote


def test_goldens_of_models_are_the_files_that_were_noted() -> None:
    for path in GOLDEN.glob("flux_*.safetensors"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == notes_of(path.stem)["sha256"], path.name


@pytest.mark.parametrize("name", ["flux_modelopt_nvfp4", "flux_modelopt_fp8_pc_pt", "flux_modelopt_w8a16"])
def test_of_the_same_codes_tensors_and_config_are_what_modelopt_writes(name, tmp_path) -> None:
    import_model(pipeline_of(name, tmp_path / "theirs"), tmp_path / "native")
    done = export(resolve_model(str(tmp_path / "native")), "modelopt", tmp_path / "ours")
    assert not done.dequantized and not done.notes
    require_same(*(load_file(tmp_path / side / "transformer" / WEIGHTS) for side in ("ours", "theirs")))
    ours, theirs = (
        json.loads((tmp_path / side / "transformer" / "config.json").read_text()) for side in ("ours", "theirs")
    )
    said, expected = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert ours == theirs
    assert said.keys() - expected.keys() == (LAYOUT if "nvfp4" in name else set())
    names, patterns = said.pop("ignore"), expected.pop("ignore")
    assert {key: said[key] for key in expected} == expected
    # Theirs are collapsed, ours are exact: the same Linears, and each pattern of ours matches just one.
    linears = NativeComponent(resolve_model(str(tmp_path / "native")), "transformer").linears
    held = [name for name in linears if any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert [[name for name in linears if fnmatchcase(name, pattern)] for pattern in names] == [[name] for name in held]
    assert "proj_out*" in names and "single_transformer_blocks.0.proj_out" not in held


def test_of_the_same_codes_a_bfl_file_is_that_of_diffusers_quantizer(tmp_path) -> None:
    name = "flux_bfl_fp8r"
    import_model(pipeline_of(name, tmp_path / "theirs"), tmp_path / "native")
    target = tmp_path / "ours.safetensors"
    export(resolve_model(str(tmp_path / "native")), "bfl", target)
    require_same(load_file(target), load_file(GOLDEN / f"{name}.safetensors"))
    headers = []
    for path in (target, GOLDEN / f"{name}.safetensors"):
        with safe_open(path, "pt") as stream:
            headers.append({key: value for key, value in stream.metadata().items() if not key.startswith("fluxq_")})
    assert headers[0] == headers[1] == notes_of(name)["safetensors_metadata"]
    assert json.loads(target.with_name("ours.config.json").read_text()) == notes_of(name)["config"]


@pytest.mark.slow
@pytest.mark.reader("ModelOpt", "modelopt")
def test_modelopt_still_writes_the_goldens() -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    from golden import make_models

    for name in ("flux_modelopt_nvfp4", "flux_modelopt_fp8_pc_pt", "flux_modelopt_w8a16"):
        tensors, config, *_ = make_models.MAKERS[name]()
        require_same(tensors, load_file(GOLDEN / f"{name}.safetensors"))
        assert config == notes_of(name)["config"]


# --- files of a folder


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["modelopt", "torchao", "nunchaku_lite"])
def test_folders_are_cut_into_shards_that_hold_the_same(dialect, plain_checkpoint, tmp_path) -> None:
    folder = resolve_model(str(plain_checkpoint("nvfp4")))
    whole = export(folder, dialect, tmp_path / "whole")
    parts = export(folder, dialect, tmp_path / "parts", max_shard_bytes=400_000)
    assert len(parts.dequantized) == (0 if dialect == "torchao" else 6)  # modulation, which only torchao reads in fp8
    component = tmp_path / "parts" / "transformer"
    index = json.loads((component / f"{WEIGHTS}.index.json").read_text())
    shards = sorted(path.name for path in component.glob("*.safetensors"))
    assert len(shards) > 3 and shards == sorted(set(index["weight_map"].values()))
    assert not (component / WEIGHTS).exists() and len(parts.files) == len(whole.files) + len(shards)
    held: dict[str, Tensor] = {}
    for name in shards:
        tensors = load_file(component / name)
        assert sum(t.nbytes for t in tensors.values()) <= 400_000 or len(tensors) == 1
        assert tensors.keys() == {key for key, file in index["weight_map"].items() if file == name}
        held |= tensors
    require_same(held, load_file(tmp_path / "whole" / "transformer" / WEIGHTS))
    import_model(tmp_path / "parts", tmp_path / "native")
    require_same(*(load_file(tmp_path / "native" / "transformer" / WEIGHTS) for _ in range(2)))
    import_model(tmp_path / "whole", tmp_path / "other")
    require_same(*(load_file(tmp_path / name / "transformer" / WEIGHTS) for name in ("native", "other")))
    if dialect == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
        one, other = (
            FluxTransformer2DModel.from_pretrained(tmp_path / name / "transformer", dtype=torch.bfloat16).state_dict()
            for name in ("whole", "parts")
        )
        for name, value in one.items():
            pairs: Any = value, other[name]
            a, b = (t.dequantize() if hasattr(t, "qdata") else t for t in pairs)
            assert torch.equal(a, b), name


def test_one_file_stays_one_file(plain_checkpoint, tmp_path) -> None:
    with pytest.raises(
        ValueError, match="comfy is one file, whatever its size; shards are for formats that are folders"
    ):
        export(
            resolve_model(str(plain_checkpoint("nvfp4"))), "comfy", tmp_path / "x.safetensors", max_shard_bytes=10**6
        )
    assert not list(tmp_path.iterdir())


# --- nunchaku's single file


def nunchaku_file(precision: str, d: int, head: int, rank: int, doubles: int, singles: int) -> dict[str, Any]:
    """(shape, dtype) of every tensor in the blocks of a FLUX.1 file, as nunchaku's loader has them; width d.

    Every Linear that it quantizes has a bias, smoothing and a low-rank branch; modulation is int4 of groups of 64.
    """
    half, group = torch.bfloat16, 64 if precision == "int4" else 16
    scales = half if precision == "int4" else torch.float8_e4m3fn

    def svdq(name: str, n: int, k: int) -> dict[str, Any]:
        found = {
            "qweight": ((n, k // 2), torch.int8),
            "wscales": ((k // group, n), scales),
            "bias": ((n,), half),
            "smooth": ((k,), half),
            "smooth_orig": ((k,), half),
            "lora_down": ((k, rank), half),
            "lora_up": ((n, rank), half),
        }
        if precision == "nvfp4":
            found |= {"wtscale": ((1,), half), "wcscales": ((n,), half)}
        return {f"{name}.{suffix}": value for suffix, value in found.items()}

    def awq(name: str, n: int) -> dict[str, Any]:
        found = {"qweight": ((n // 4, d // 2), torch.int32), "bias": ((n,), half)}
        found |= {suffix: ((d // 64, n), half) for suffix in ("wscales", "wzeros")}
        return {f"{name}.{suffix}": value for suffix, value in found.items()}

    expected: dict[str, Any] = {}
    for index in range(doubles):
        block = f"transformer_blocks.{index}"
        for of, context, stream in (("", "", "norm"), ("_context", "_context", "norm_added")):
            expected |= awq(f"{block}.norm1{of}.linear", 6 * d)
            expected |= svdq(f"{block}.qkv_proj{of}", 3 * d, d) | svdq(f"{block}.out_proj{of}", d, d)
            expected |= svdq(f"{block}.mlp{context}_fc1", 4 * d, d) | svdq(f"{block}.mlp{context}_fc2", d, 4 * d)
            expected |= {f"{block}.{stream}_{x}.weight": ((head,), half) for x in "qk"}
    for index in range(singles):
        block = f"single_transformer_blocks.{index}"
        expected |= awq(f"{block}.norm.linear", 3 * d)
        expected |= svdq(f"{block}.qkv_proj", 3 * d, d) | svdq(f"{block}.out_proj", d, d)
        expected |= svdq(f"{block}.mlp_fc1", 4 * d, d) | svdq(f"{block}.mlp_fc2", d, 4 * d)
        expected |= {f"{block}.norm_{x}.weight": ((head,), half) for x in "qk"}
    return expected


@pytest.mark.parametrize("recipe", ["int4-svd", "nvfp4"])
def test_a_nunchaku_file_has_just_the_tensors_that_its_loader_asks_for(recipe, plain_checkpoint, tmp_path) -> None:
    """Names, shapes and dtypes, strictly; that their bytes lie as its kernels read them, the closed formulas tell."""
    folder = plain_checkpoint(recipe)
    target = tmp_path / "x.safetensors"
    export(resolve_model(str(folder)), "nunchaku", target, requantize=recipe == "nvfp4")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    head, doubles, singles = (config[key] for key in ("attention_head_dim", "num_layers", "num_single_layers"))
    precision = "nvfp4" if recipe == "nvfp4" else "int4"
    expected = nunchaku_file(precision, head * config["num_attention_heads"], head, 16, doubles, singles)
    plain = load_file(folder / "transformer" / WEIGHTS)
    rest = {name for name in plain if not name.startswith(("transformer_blocks.", "single_transformer_blocks."))}
    expected |= {name: (tuple(plain[name].shape), plain[name].dtype) for name in rest}
    found = load_file(target)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == expected
    assert all(torch.equal(found[name], plain[name]) for name in rest)
