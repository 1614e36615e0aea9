"""The native checkpoint: every tensor against the design's table, and what a damaged one says when it is loaded."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fluxq import tiny
from fluxq.base.files import atomic_path
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.output import PLAN_FILE, Output, atomic_output, recover
from fluxq.calibrate.statistics import Statistics
from fluxq.jobs import making
from fluxq.quantize import checkpoint as ckpt
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.run import quantize_component
from fluxq.quantize.structure import list_linears
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import shipped_recipes
from fluxq.recipes.step_list import StepList

LAYER = "single_transformer_blocks.0.proj_mlp"
# Stored tensors of an (N, K) weight: name -> (dtype, shape).
STORED = {
    "fp8": lambda n, k: {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n,))},
    "fp8_tensor": lambda n, k: {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, ())},
    "fp8_e5m2": lambda n, k: {"weight": (torch.float8_e5m2, (n, k)), "weight_scale": (torch.float32, (n,))},
    "int8": lambda n, k: {"weight": (torch.int8, (n, k)), "weight_scale": (torch.float32, (n,))},
    "int4": lambda n, k: {"weight": (torch.uint8, (n, k // 2)), "weight_scale": (torch.bfloat16, (n, k // 64))},
    "fp8_1x128": lambda n, k: {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n, k // 128))},
    "fp8_128x128": lambda n, k: {
        "weight": (torch.float8_e4m3fn, (n, k)),
        "weight_scale": (torch.float32, (-(-n // 128), -(-k // 128))),
    },
    "mxfp8": lambda n, k: {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.uint8, (n, k // 32))},
    "mxfp4": lambda n, k: {"weight": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))},
    "nvfp4": lambda n, k: {
        "weight": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
        "weight_scale_2": (torch.float32, ()),
    },
}
MAIN = {
    "fp8": "fp8-fp8",
    "fp8-comfy": "fp8_tensor-fp8_tensor-static",
    "int8": "int8-int8",
    "int8-convrot": "int8-int8-hr64",
    "int4": "int4-16bit",
    "mxfp8": "mxfp8-mxfp8",
    "nvfp4": "nvfp4-nvfp4-static",
    "nvfp4-max": "nvfp4-nvfp4-static",
    "mxfp4": "mxfp4-mxfp4",
    "mxfp4-max": "mxfp4-mxfp4",
    "int4-svd": "int4-int4",
}
SOURCE = load_file(tiny.path() / "transformer" / "diffusion_pytorch_model.safetensors")


def weights_of(folder) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted((folder / "transformer").glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


@pytest.fixture(scope="module")
def checkpoint(plain_checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    return plain_checkpoint


def config_of(folder) -> dict:
    return json.loads((folder / "transformer" / "config.json").read_text())


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """damaged(config=…, tensors=…, recipe=…) is a copy of a checkpoint whose parts were changed by those functions."""

    def make(config=lambda c: None, tensors=lambda t: None, recipe="nvfp4"):
        folder = tmp_path / "damaged"
        copytree(checkpoint(recipe), folder)
        said, held = config_of(folder), weights_of(folder)
        config(said["quantization_config"])
        tensors(held)
        (folder / "transformer" / "config.json").write_text(json.dumps(said))
        save_file(held, folder / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def load(folder) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16, local_files_only=True)


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_config_says_all_that_loading_needs(checkpoint, recipe):
    config = config_of(checkpoint(recipe))
    said = config.pop("quantization_config")
    assert config == config_of(tiny.path())
    layers = said.pop("layers")
    assert len(said.pop("digest")) == 64 and said.pop("digests").keys() == {"text_encoder", "text_encoder_2", "vae"}
    assert len(said.pop("config_digest")) == 64
    others = {"text_encoder", "text_encoder_2", "vae", "scheduler", "tokenizer", "tokenizer_2"}
    assert said.pop("config_digests").keys() == others
    features = ["static_input_scale"] if MAIN[recipe].endswith("-static") else []
    features += ["hadamard", "regular_hadamard"] if recipe == "int8-convrot" else []
    assert said == {"quant_method": "fluxq", "format_version": 1, "required_features": features}
    modulation = {"fp8": "fp8-16bit", "fp8-comfy": "fp8_tensor-16bit", "int4-svd": "int4-16bit"}
    modulation = modulation.get(recipe, "int8-16bit")
    wider = {"int8-int8-hr256"} if recipe == "int8-convrot" else set()  # of K = 512, where others have 128
    assert set(layers) == {MAIN[recipe], modulation} | wider
    assert all("norm" in name for name in layers[modulation])
    names = [name for members in layers.values() for name in members]
    assert len(names) == len(set(names)) and LAYER in layers[MAIN[recipe]]


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_tensor_has_the_name_dtype_and_shape_of_the_design(checkpoint, recipe):
    expected = {}
    schemes = {
        name: s
        for s, members in config_of(checkpoint(recipe))["quantization_config"]["layers"].items()
        for name in members
    }
    for name, tensor in SOURCE.items():
        layer = name.removesuffix(".weight")
        if layer in schemes and name.endswith(".weight"):
            stored = STORED[schemes[layer].split("-")[0]](*tensor.shape)
            expected.update({f"{layer}.{part}": kind for part, kind in stored.items()})
            if schemes[layer].endswith("static"):
                expected[f"{layer}.input_scale"] = (torch.float32, ())
        else:
            expected[name] = (torch.bfloat16, tuple(tensor.shape))
    found = {name: (t.dtype, tuple(t.shape)) for name, t in weights_of(checkpoint(recipe)).items()}
    assert found == expected


def test_what_is_not_quantized_is_untouched(checkpoint):
    written = weights_of(checkpoint("nvfp4"))
    same = [name for name in SOURCE if name in written and written[name].dtype == SOURCE[name].dtype]
    assert any(name.endswith("bias") for name in same) and "proj_out.weight" in same
    assert all(torch.equal(written[name], SOURCE[name]) for name in same)


def test_nvfp4_decodes_to_the_source(checkpoint):
    """Even element in the low nibble, scales row-major along K: decoded here from the bits alone."""
    held = weights_of(checkpoint("nvfp4"))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([values, -values])
    packed = held[f"{LAYER}.weight"].long()
    codes = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)]
    scale = held[f"{LAYER}.weight_scale"].float() * held[f"{LAYER}.weight_scale_2"]
    decoded = codes * scale.repeat_interleave(16, dim=1)
    error = (decoded - SOURCE[f"{LAYER}.weight"].float()).abs()
    assert (error <= scale.repeat_interleave(16, dim=1) * 1.01).all()  # half the widest gap between codes
    assert error.square().sum() < 0.02 * SOURCE[f"{LAYER}.weight"].float().square().sum()


JOINED = {
    "transformer_blocks.0": [
        ["attn.to_q", "attn.to_k", "attn.to_v"],
        ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    ],
    "single_transformer_blocks.0": [["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]],
}


@pytest.mark.parametrize(("block", "members"), [(block, m) for block, groups in JOINED.items() for m in groups])
def test_joined_layers_share_their_scales(checkpoint, statistics_file, block, members):
    held = weights_of(checkpoint("nvfp4"))
    names = [f"{block}.{member}" for member in members]
    amax = max(SOURCE[f"{name}.weight"].abs().max().float() for name in names)
    seen = Statistics.load(statistics_file).amax(names[0])
    for name in names:
        assert held[f"{name}.weight_scale_2"] == amax / (6 * 448)
        assert held[f"{name}.input_scale"] == seen / (6 * 448)


@pytest.mark.often(1)
@pytest.mark.parametrize(("block", "members"), [(block, m) for block, groups in JOINED.items() for m in groups])
def test_joined_layers_in_fp8_share_the_scale_of_a_whole_weight(checkpoint, block, members):
    held = weights_of(checkpoint("fp8-comfy"))
    names = [f"{block}.{member}" for member in members]
    amax = max(SOURCE[f"{name}.weight"].abs().max().float() for name in names)
    assert {float(held[f"{name}.weight_scale"]) for name in names} == {float(amax / 448)}
    (scale,) = {float(held[f"{name}.input_scale"]) for name in names}
    assert math.frexp(scale)[0] == 0.5  # a power of two


def test_other_layers_have_scales_of_their_own(checkpoint):
    held = weights_of(checkpoint("nvfp4"))
    for name in ("transformer_blocks.0.attn.to_out.0", "single_transformer_blocks.0.proj_out"):
        assert held[f"{name}.weight_scale_2"] == SOURCE[f"{name}.weight"].abs().max().float() / (6 * 448)
    scales = {float(t) for name, t in held.items() if name.endswith("input_scale")}
    assert len(scales) > 3


@pytest.mark.slow
def test_two_runs_give_the_same_bytes(checkpoint, tmp_path, quick_recipe, statistics_file):
    folders, recipe = [tmp_path / "1", tmp_path / "2"], str(quick_recipe("nvfp4", fitted=False))
    for folder in folders:
        options = making.JobOptions("tiny", recipe, output=str(folder), check=False, statistics=str(statistics_file))
        making.quantize(making.job_of(options))
    files = [{p.relative_to(f): p for p in f.rglob("*") if p.is_file()} for f in folders]
    assert files[0].keys() == files[1].keys()
    for name, path in files[0].items():
        if name.name != "fluxq_plan.json":  # says how long it took
            assert path.read_bytes() == files[1][name].read_bytes(), name
    records = [json.loads((folder / "fluxq_plan.json").read_text()) for folder in folders]
    for record in records:
        assert record.pop("seconds") >= 0 and record["components"][0].pop("seconds") >= 0
    assert records[0] == records[1]
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (folders[0] / weights).read_bytes() == (checkpoint("nvfp4") / weights).read_bytes()


def write(target, max_shard_bytes, statistics_file, recipe):
    folder = resolve_model("tiny")
    prepared = making.job_of(making.JobOptions(model="tiny", recipe=str(recipe)), writes=False)
    plan = prepared.plans[0]
    source = SourceWeights(folder, "transformer")
    files = quantize_component(plan, source, Statistics.load(statistics_file), torch.bfloat16, target / "work")
    return ckpt.write_component(target / "transformer", folder, plan, files, max_shard_bytes=max_shard_bytes)


def test_shards_load_as_one_file_does(checkpoint, tmp_path, quick_recipe, statistics_file):
    total = write(tmp_path, 200_000, statistics_file, quick_recipe("nvfp4", fitted=False))
    files = sorted(path.name for path in (tmp_path / "transformer").glob("*.safetensors"))
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05d}.safetensors" and len(files) > 4
    index = json.loads((tmp_path / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    held = weights_of(tmp_path)
    assert total == index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in held.values())
    assert index["weight_map"].keys() == held.keys()
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "transformer" / file, framework="pt") as stream:
            assert name in stream.keys()
    one, many = load(checkpoint("nvfp4")).state_dict(), load(tmp_path).state_dict()
    assert one.keys() == many.keys()
    assert all(
        torch.equal(_bytes(one[name]), _bytes(many[name])) and one[name].dtype == many[name].dtype for name in one
    )


def _bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.slow
def test_one_tensor_larger_than_a_shard_gets_a_shard_of_its_own(tmp_path, quick_recipe, statistics_file):
    write(tmp_path, 1, statistics_file, quick_recipe("nvfp4", fitted=False))
    files = list((tmp_path / "transformer").glob("*.safetensors"))
    assert len(files) == len(weights_of(tmp_path))


def test_loaded_tensors_are_those_of_the_file(checkpoint):
    model = load(checkpoint("nvfp4"))
    held = weights_of(checkpoint("nvfp4"))
    state = model.state_dict()
    assert state.keys() == held.keys()
    for name, tensor in held.items():
        assert state[name].dtype == tensor.dtype and torch.equal(_bytes(state[name]), _bytes(tensor)), name


def test_files_may_be_read_by_all_that_may_read_others(checkpoint, tmp_path):
    (tmp_path / "ordinary").write_text("")
    mode = (tmp_path / "ordinary").stat().st_mode
    folder = checkpoint("fp8")
    for file in (
        "transformer/diffusion_pytorch_model.safetensors",
        "transformer/config.json",
        "fluxq_plan.json",
        "README.md",
    ):
        assert (folder / file).stat().st_mode == mode, file


def test_the_rest_of_the_pipeline_travels_along_but_no_code(tiny_folder, tmp_path):
    extra = [
        "NOTICE",
        "LICENSE.md",
        "vae/LICENSE.md",
        "vae/old.bin",
        "vae/run.py",
        "vae/x.ckpt",
        "stray.bin",
        "run.py",
        ".secret",
        "fluxq_export.json",
    ]
    for name in extra:
        (tiny_folder / name).write_text(name)
    (tiny_folder / "stranger").mkdir()
    (tiny_folder / "stranger" / "file").write_text("")
    making.quantize(
        making.job_of(
            making.JobOptions(model=str(tiny_folder), recipe="fp8", output=str(tmp_path / "out"), check=False)
        )
    )
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    source = {str(path.relative_to(tiny_folder)) for path in tiny_folder.rglob("*") if path.is_file()}
    never = {"vae/old.bin", "vae/run.py", "vae/x.ckpt", "stray.bin", "run.py", ".secret", "stranger/file"}
    never |= {"fluxq_export.json"}  # of the source's own making
    assert written == (source - never) | {"fluxq_plan.json"}
    for name in ("LICENSE.txt", "LICENSE.md", "NOTICE", "vae/LICENSE.md", "model_index.json", "fluxq_generation.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_folder / name).read_bytes()


def test_the_plan_file_says_what_was_done(checkpoint):
    record = json.loads((checkpoint("nvfp4") / "fluxq_plan.json").read_text())
    (part,) = record["components"]
    assert [layer["name"] for layer in part["layers"]] == [
        linear.name for linear in list_linears(resolve_model("tiny"), "transformer")
    ]
    assert all(layer["reason"] for layer in part["layers"])
    assert record["trajectory"]["steps_seen"] == list(range(8)) and len(record["trajectory"]["items"]) == 8
    assert record["model"]["license"] == {"license": "apache-2.0"} and record["check"] is None
    held = weights_of(checkpoint("nvfp4"))
    assert part["bytes_after"] == sum(t.numel() * t.element_size() for t in held.values())
    assert part["bytes_before"] == sum(t.numel() * t.element_size() for t in SOURCE.values())
    bits = sum(layer["bits_per_weight"] * layer["shape"][0] * layer["shape"][1] for layer in part["layers"])
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in part["layers"])
    assert part["bits_per_weight"] == pytest.approx(bits / weights, abs=1e-3)


def _rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.update(format_version=2),
            "checkpoint has format version 2, this fluxq reads up to 1: update fluxq",
        ),
        (lambda c: c.update(format_version="1"), "checkpoint has format version '1'"),
        (lambda c: c.pop("format_version"), "checkpoint has format version None"),
        (lambda c: c.update(required_features=["rotation"]), "checkpoint requires rotation, unknown to this version"),
        (lambda c: c.update(format_version=0), "checkpoint has format version 0, expected a whole number from 1"),
        (lambda c: c.update(format_version=True), "checkpoint has format version True"),
        (lambda c: c.update(required_features="smooth"), "required_features is 'smooth', no list"),
        (lambda c: c.pop("required_features"), "required_features is None, no list"),
        (lambda c: c.update(layers={"fp8-fp8": []}), "names no layers"),
        (lambda c: c.update(attention="fp4"), "computes attention in 'fp4', unknown to this version: update fluxq"),
        (lambda c: c.update(layers={}), "names no layers"),
        (lambda c: c.update(layers={"fp8-fp8": LAYER}), "names no layers"),
        (lambda c: c["layers"].update({"fp8-fp8": [LAYER]}), "names a layer under two schemes"),
        (lambda c: c["layers"].update({"nf4-16bit": ["proj_out"]}), "unknown format 'nf4'"),
        (lambda c: c["layers"].update({"fp8-fp8-fp8": ["proj_out"]}), "unknown quantization scheme 'fp8-fp8-fp8'"),
        (
            lambda c: c["layers"]["int8-16bit"].append("blocks.9.to_q"),
            "quantizes 'blocks.9.to_q', which is no Linear of",
        ),
        (lambda c: c["layers"]["int8-16bit"].append("norm_out.norm"), "quantizes 'norm_out.norm', which is no Linear"),
        (lambda c: c["layers"]["int8-16bit"].append("proj_out"), "proj_out.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(damaged, change, message):
    with pytest.raises(ValueError) as caught:
        load(damaged(config=change))
    assert message in str(caught.value)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.weight"), f"lack '{LAYER}.weight'"),
        (lambda t: t.pop(f"{LAYER}.weight_scale"), f"lack '{LAYER}.weight_scale'"),
        (lambda t: t.pop(f"{LAYER}.weight_scale_2"), f"lack '{LAYER}.weight_scale_2'"),
        (lambda t: t.pop(f"{LAYER}.input_scale"), f"lack '{LAYER}.input_scale'"),
        (lambda t: t.pop("proj_out.weight"), "lack 'proj_out.weight'"),
        (lambda t: _rename(t, f"{LAYER}.weight", f"{LAYER}.qweight"), f"lack '{LAYER}.weight'"),
        (
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].view(torch.int8)}),
            f"{LAYER}.weight: torch.int8 in the file, torch.uint8 by config.json",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].float()}),
            f"{LAYER}.weight_scale: torch.float32 in the file, torch.float8_e4m3fn by config.json",
        ),
        (
            lambda t: t.update({f"{LAYER}.input_scale": t[f"{LAYER}.input_scale"].bfloat16()}),
            f"{LAYER}.input_scale: torch.bfloat16 in the file, torch.float32 by config.json",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:, :-1].contiguous()}),
            f"{LAYER}.weight: shape (512, 63) in the file, (512, 64) by config.json",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].T.contiguous()}),
            f"{LAYER}.weight_scale: shape (8, 512) in the file, (512, 8) by config.json",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale_2": t[f"{LAYER}.weight_scale_2"].reshape(1)}),
            f"{LAYER}.weight_scale_2: shape (1,) in the file, () by config.json",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(damaged, change, message):
    with pytest.raises(ValueError) as caught:
        load(damaged(tensors=change))
    assert message in str(caught.value)


def test_a_config_is_read_as_it_was_written():
    said = QuantizationConfig({"fp8-fp8": ["a"], "nvfp4-nvfp4-static": ["b", "c"]}, ("static_input_scale",))
    assert QuantizationConfig.from_dict(json.loads(json.dumps(said.to_dict()))) == said
    assert "attention" not in said.to_dict()
    in_fp8 = replace(said, attention="fp8")
    assert QuantizationConfig.from_dict(json.loads(json.dumps(in_fp8.to_dict()))) == in_fp8
    assert {name: str(scheme) for name, scheme in said.schemes.items()} == {
        "a": "fp8-fp8",
        "b": "nvfp4-nvfp4-static",
        "c": "nvfp4-nvfp4-static",
    }


def test_what_serves_of_a_checkpoint_is_kept_and_its_lists_of_steps_are_read():
    steps = StepList((0, 1, 3), 1, (1.0, 0.75, 0.5, 0.25), "FlowMatchEulerDiscreteScheduler", {"shift": 1.0}, {})
    runtime = {"steps": {"4": steps.to_dict()}, "of another program": [1]}
    said = QuantizationConfig.of([("a", Scheme.parse("fp8-fp8"))], runtime=runtime)
    read = QuantizationConfig.from_dict(json.loads(json.dumps(said.to_dict())))
    assert read == said and read.to_dict()["runtime"] == runtime and read.step_lists == {4: steps}
    assert "runtime" not in QuantizationConfig.of([]).to_dict()


@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        ([1], r"got \[1\]"),
        ({"steps": 7}, r"got \{'steps': 7\}"),
        ({"steps": {"4": [0, 1]}}, "expected {steps"),
        ({"steps": {"2": {"order": 1}}}, "scheduler: None, expected a text"),
        (
            {"steps": {"2": StepList((0, 1), 1, (1.0, 0.5), "A").to_dict() | {"levels": [0, 1]}}},
            "levels of a A do not fall",
        ),
        ({"steps": {"3": StepList((0, 1), 1, (1.0, 0.5), "A").to_dict()}}, r"lists of \[2\] steps stand under \['3'\]"),
    ],
)
def test_lists_of_steps_that_are_damaged_are_refused_with_the_cure(runtime, why):
    said = QuantizationConfig.of([("a", Scheme.parse("fp8-fp8"))]).to_dict()
    with pytest.raises(ValueError, match=rf"runtime in config.json is damaged.*{why}.*remove `runtime`") as refused:
        QuantizationConfig.from_dict({**said, "runtime": runtime})
    assert "take another scheduler" not in str(refused.value)


def test_source_weights_are_found_in_shards_and_never_twice(tmp_path, tiny_folder, statistics_file):
    folder, names = tmp_path / "parts" / "transformer", sorted(SOURCE)
    folder.mkdir(parents=True)
    (tmp_path / "parts" / "model_index.json").write_text((tiny_folder / "model_index.json").read_text())
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}

    def write(shards):
        for file, held in shards.items():
            save_file({name: SOURCE[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
        return SourceWeights(ModelFolder("parts", tmp_path / "parts"), "transformer")

    source = write(shards)
    assert source.names == names and all(torch.equal(source[n], SOURCE[n]) for n in names) and "x" not in source
    assert source.nbytes == sum(t.numel() * t.element_size() for t in SOURCE.values())
    with pytest.raises(ValueError, match=r"the weights lack 'x', which the model's config\.json implies"):
        source["x"]
    with pytest.raises(ValueError, match=rf"c\.safetensors: tensor '{names[0]}' is in two files"):
        write({**shards, "c.safetensors": names[:1]})


def ours(folder):
    """A folder that fluxq wrote."""
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text('{"files": {}}')


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_appears_complete_or_not_at_all(tmp_path, overwrite):
    target = tmp_path / "out"
    if overwrite:
        ours(target)
    work = tmp_path / "work"
    work.mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), atomic_output(Output(target), work, overwrite=overwrite) as part:
        (part / "new").write_text("new")
        assert not (target / "new").exists()
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    with atomic_output(Output(target), work, overwrite=overwrite) as part:
        (part / "new").write_text("new")
    assert [path.name for path in target.iterdir()] == ["new"] and not list(work.iterdir())


def test_a_folder_that_stands_there_is_never_replaced_unasked(tmp_path):
    ours(tmp_path / "out")
    with (
        pytest.raises(RuntimeError, match="put there meanwhile"),
        atomic_output(Output(tmp_path / "out"), tmp_path / "work"),
    ):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == [PLAN_FILE, "out", "work"]


def test_a_replacement_that_fails_puts_the_old_folder_back(tmp_path, monkeypatch):
    ours(tmp_path / "out")
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda p, t: rename(p, t) if p.name != "new" else (_ for _ in ()).throw(OSError())
    )
    with pytest.raises(OSError), atomic_output(Output(tmp_path / "out"), tmp_path / "work", overwrite=True):
        pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == [PLAN_FILE, "out", "work"]


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path):
    ours(tmp_path / "work" / "old" / "out")
    (tmp_path / "work" / "new").mkdir()
    (tmp_path / "work" / "new" / "half").write_text("new")
    recover(tmp_path / "out", tmp_path / "work")
    assert (tmp_path / "out" / PLAN_FILE).is_file()
    with atomic_output(Output(tmp_path / "out"), tmp_path / "work", overwrite=True) as part:
        assert not list(part.iterdir())
        (part / "file").write_text("new")
    assert (tmp_path / "out" / "file").read_text() == "new" and not list((tmp_path / "work").iterdir())


def test_a_file_appears_complete_or_not_at_all(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "f") as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "f").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_an_index_decides_which_weight_files_are_read(tiny_folder):
    folder = tiny_folder / "transformer"
    only = folder / "diffusion_pytorch_model.safetensors"
    copy(only, folder / "diffusion_pytorch_model.fp16.safetensors")
    assert resolve_model(str(tiny_folder)).weight_files("transformer") == [only]
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    for shard, words in (
        ("../vae/diffusion_pytorch_model.safetensors", "leads out"),
        ("absent.safetensors", "missing"),
    ):
        index.write_text(json.dumps({"weight_map": {"proj_out.weight": shard}}))
        with pytest.raises(ValueError, match=words):
            resolve_model(str(tiny_folder)).weight_files("transformer")


def test_an_output_that_is_a_link_stays_one(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big")
    for text, overwrite in (("first", False), ("second", True)):
        with atomic_output(Output(tmp_path / "out"), tmp_path / "work", overwrite=overwrite) as part:
            (part / PLAN_FILE).write_text(f'{{"files": {{}}, "text": "{text}"}}')
        assert (tmp_path / "out").is_symlink() and text in (tmp_path / "big" / PLAN_FILE).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "out", "work"]


@pytest.mark.parametrize(
    ("front", "fields"),
    [
        ("license: mit", {"license": "mit"}),
        ("license: other\nlicense_name: flux-dev\nlicense_link: LICENSE.md",
         {"license": "other", "license_name": "flux-dev", "license_link": "LICENSE.md"}),
        ("license: [unclosed", {}),
        ("tags: [a]", {}),
    ],
)  # fmt: skip
def test_the_licence_is_read_as_far_as_it_can_be(tiny_folder, front, fields):
    (tiny_folder / "README.md").write_text(f"---\n{front}\n---\n# a model\n")
    assert resolve_model(str(tiny_folder)).license == fields
