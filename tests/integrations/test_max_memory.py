"""`--max-memory`: models whose weights come when it is their turn compute the same bits, within the bound."""

from __future__ import annotations

import gc
import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import watched
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

from fluxq import tiny
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.base.residence import Residence, device_of, residence_of
from fluxq.base.tensors import save_weights
from fluxq.cli import cli
from fluxq.eval.images.generate import generate
from fluxq.integrations.bounded import load_bounded
from fluxq.jobs import making, memory
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.all_families import FAMILIES

RECIPE = """
version: 1
components:
  transformer:
    weights: {format: nvfp4}
    activations: {format: nvfp4}
    transforms: [hadamard]
    rounding: {method: gptq, scales: amax}
calibration: {prompts: default, count: 2, steps: 1, seed: 0}
compat: full
"""
LAYER = "single_transformer_blocks.*.attn.to_q"
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what a process held")


# A model in parts


class Parts(nn.Module):
    """Four Linears of 4 KiB, one after the other, and weights of its own; what `fail` names raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.attention = nn.MultiheadAttention(32, 2, bias=False)
        self.scale = nn.Parameter(torch.rand(32))
        self.register_buffer("table", torch.rand(32))
        self.register_buffer("made", torch.rand(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale + self.table + self.made
        return self.attention(x, x, x)[0]


UNIT = 4096


@pytest.fixture
def parts() -> tuple[Parts, Parts, list[str], Callable[[str], Tensor]]:
    """(a model, one like it without weights, names read so far, what reads them)."""
    torch.manual_seed(0)
    whole, empty, seen = Parts(), Parts(), []
    stored = whole.state_dict()
    empty.to("meta")
    empty.made = whole.made

    def read(name: str) -> Tensor:
        seen.append(name)
        return stored[name].clone()

    return whole, empty, seen, read


@pytest.mark.parametrize("room", [0, 2, 100])
def test_what_fits_stays_and_the_rest_is_read_at_each_pass(parts, room):
    whole, empty, seen, read = parts
    residence = Residence("cpu", (8 + room) * UNIT + 512)  # MultiheadAttention comes as a whole, and is four of them
    residence.add(empty, read)
    x = torch.rand(5, 32)
    for passed in range(1, 4):
        assert torch.equal(empty(x), whole(x))
        first, last = (sum(name == f"layers.{i}.weight" for name in seen) for i in (0, 3))
        assert last == 1 if room == 100 else last in (passed, passed + 1)  # once more for the pass to come
        assert first == 1 if room else first in (passed, passed + 1)
    assert residence.most_resident_bytes <= residence.limit
    assert residence.resident_bytes >= sum(tensor.nbytes for tensor in empty.parameters() if not tensor.is_meta)
    residence.rest()
    assert residence.resident_bytes == 0 and all(tensor.is_meta for tensor in empty.parameters())
    assert torch.equal(empty.table, whole.table) and seen.count("table") == 1  # pipelines may read it
    assert torch.equal(empty(x), whole(x))


def test_the_next_module_is_read_while_one_computes(parts):
    _, empty, seen, read = parts
    residence = Residence("cpu", 8 * UNIT)
    residence.add(empty, read)
    x, read_by_then = torch.rand(5, 32), []
    empty(x)
    seen.clear()
    original = torch.nn.functional.linear

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        residence._reader.submit(int).result()  # the reader is done with what it was told
        read_by_then.append(len([name for name in seen if name.startswith("layers")]))
        return original(*args, **kwargs)

    torch.nn.functional.linear = slow
    try:
        empty(x)
    finally:
        torch.nn.functional.linear = original
    assert read_by_then[0] > 1


def test_weights_leave_when_a_forward_fails_or_the_source_does(parts):
    whole, empty, _, read = parts
    failing = True

    def sometimes(name: str) -> Tensor:
        if failing and name == "layers.2.weight":
            raise ValueError("the file has changed")
        return read(name)

    residence = Residence("cpu", 8 * UNIT)
    residence.add(empty, sometimes)
    with pytest.raises(ValueError, match="the file has changed"):
        empty(torch.rand(5, 32))
    assert residence.resident_bytes == 0
    failing = False
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        empty(torch.rand(5, 31))
    assert all(tensor.is_meta for tensor in empty.parameters())
    assert torch.equal(empty(torch.ones(5, 32)), whole(torch.ones(5, 32)))


def test_models_that_run_at_every_step_push_out_the_others(parts):
    _, often, seen, read = parts
    once = Parts().to("meta")
    once.made = torch.rand(32)
    residence = Residence("cpu", (8 + 8) * UNIT + 1024)  # one model fits beside what comes
    residence.add(once, read)
    residence.add(often, read, rank=1)
    x = torch.rand(5, 32)
    once(x)
    assert not once.layers[0].weight.is_meta
    often(x)
    assert not often.layers[3].weight.is_meta and once.layers[3].weight.is_meta
    once(x)
    assert once.layers[0].weight.is_meta and residence.most_resident_bytes <= residence.limit
    seen.clear()
    often(x)
    assert seen == []
    residence.set_working(often, 8 * UNIT)
    often(x)
    assert all(tensor.is_meta for name, tensor in often.state_dict().items() if name.startswith("layers"))


def test_a_model_says_where_it_runs_and_a_replaced_layer_takes_its_weights_with_it(parts):
    _, empty, _, read = parts
    residence = Residence("cpu", 100 * UNIT)
    residence.add(empty, read)
    assert residence_of(empty) is residence and device_of(empty) == torch.device("cpu")
    empty(torch.rand(5, 32))
    before = residence.resident_bytes
    empty.layers[1] = nn.Linear(32, 32)
    gc.collect()
    assert residence.resident_bytes == before - UNIT
    residence.drop(empty.layers)
    assert residence.resident_bytes == before - 4 * UNIT and all(layer.weight.is_meta for layer in empty.layers)
    plain = nn.Linear(2, 2)
    assert residence_of(plain) is None and device_of(plain) == torch.device("cpu")
    with pytest.raises(ValueError, match="not looked after"):
        residence.set_working(plain, 1)


# Models of the libraries


@pytest.mark.often(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_built_without_weights_is_the_one_that_is_loaded(name, dtype, tmp_path):
    row = FAMILIES[name]
    if dtype == "float16" and name not in ("t5", "umt5", "wan"):  # what is kept in fp32
        return
    model_class = getattr(importlib.import_module(row.library), row.model)
    torch.manual_seed(0)
    if row.library == "transformers":
        model = model_class(model_class.config_class.from_dict(dict(TINY_CONFIGS[row.name])))
    else:
        model = model_class.from_config(dict(TINY_CONFIGS[row.name]))
    model.save_pretrained(tmp_path / "part")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "X", "part": [row.library, row.model]}))
    folder = ModelFolder("folder", tmp_path)
    want = model_class.from_pretrained(tmp_path / "part", dtype=getattr(torch, dtype))
    got = built(folder, dtype)
    Residence("cpu", 1 << 40).add(got[0], got[1])
    assert got[0].training == want.training
    for (path, a), (other, b) in zip(every(want), every(got[0]), strict=True):
        assert (path, a.dtype, a.shape) == (other, b.dtype, b.shape)
        assert torch.equal(got[1](path).to(b.dtype) if b.is_meta else b, a), path


def built(folder: ModelFolder, dtype: str) -> tuple[nn.Module, Callable[[str], Tensor]]:
    from fluxq.integrations import bounded

    model, tensors = bounded._plain(folder, "part", dtype)
    return model, bounded._reader(tensors, model, ())


def every(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, and tensors that are attributes, with their paths."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    attributes = [
        (f"{path}.{key}", value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    ]
    return [*named, *attributes]


def pictures(pipe: Any) -> tuple[Tensor, Tensor]:
    made = generate(pipe, [("a red cube", 1), ("a dog", 2)], resolve_model("tiny").generation_defaults)
    return made.images, made.latents


@pytest.mark.slow
def test_a_quantized_pipeline_paints_the_same_image(tmp_path):
    """Also with a text encoder whose codes are filed with another shape."""
    options = making.JobOptions("tiny", "int4", "rtn", str(tmp_path / "out"), check=False)
    making.quantize(making.job_of(making.replace(options, components=("transformer", "text_encoder_2"))))
    for path in (tmp_path / "out", Path(tiny.path())):
        folder = ModelFolder("out", path)
        want = pictures(load_pipeline(folder))
        for limit in (1000, 1 << 30):
            residence = Residence("cpu", limit)
            pipe = load_bounded(folder, "bfloat16", residence, ranks={}, working={}, updates={})
            got = pictures(pipe)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            assert (residence.resident_bytes == 0) == (limit == 1000)


def test_a_tensor_that_is_lacking_or_has_another_shape_is_named(tiny_folder):
    path = tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    own = load_file(path)

    def load() -> Any:
        residence = Residence("cpu", 1000)
        folder = ModelFolder("tiny", tiny_folder)
        return load_bounded(folder, "bfloat16", residence, ranks={}, working={}, updates={})

    save_file({name: tensor for name, tensor in own.items() if name != "proj_out.bias"}, path)
    with pytest.raises(ValueError, match=r"lack 'proj_out\.bias'"):
        load()
    save_file({**own, "proj_out.bias": own["proj_out.bias"][:-1].contiguous()}, path)
    with pytest.raises(ValueError, match=r"proj_out\.bias: shape .* in the file"):
        pictures(load())


# The job


@pytest.fixture
def recipe(tmp_path) -> str:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return str(tmp_path / "recipe.yaml")


def files_of(folder: Path) -> dict[str, bytes]:
    skipped = ("fluxq_plan.json", "README.md", "passport.json")  # say when, and how long it took
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in skipped]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{}, pytest.param({"parallel_blocks": True, "check": False}, marks=pytest.mark.slow)], ids=["", "parallel"]
)
def test_the_checkpoint_has_the_same_bytes(tmp_path, recipe, tight, lora_file, how):
    loras = (f"{lora_file('one.safetensors', ('single_transformer_blocks.1.attn.to_q',))}:0.7",) if not how else ()
    options = making.JobOptions("tiny", recipe, lora=loras, call={"num_inference_steps": 2}, **how)
    records = []
    for name, limit in (("whole", None), ("bounded", 1 << 30)):
        chosen = making.replace(options, output=str(tmp_path / name), max_memory=limit)
        records.append(making.quantize(making.job_of(chosen)))
    assert files_of(tmp_path / "bounded") == files_of(tmp_path / "whole")
    assert records[0].check == records[1].check and (records[0].check is None) == bool(how)
    assert len(tight) == (1 if how else 2) and all(residence.resident_bytes == 0 for residence in tight)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_within_a_bound(tmp_path, recipe, tight, monkeypatch):
    from fluxq.quantize import run

    options = making.JobOptions(
        "tiny", recipe, output=str(tmp_path / "out"), check=False, call={"num_inference_steps": 2}
    )
    whole = making.quantize(making.job_of(making.replace(options, output=str(tmp_path / "whole"))))
    own, fitted = run._fit_block, []

    def stops(live: Any, *rest: Any) -> Any:
        if live.index == 3:
            raise KeyboardInterrupt
        return own(live, *rest)

    monkeypatch.setattr(run, "_fit_block", stops)
    with pytest.raises(KeyboardInterrupt):
        making.quantize(making.job_of(options))
    monkeypatch.setattr(run, "_fit_block", lambda live, *rest: fitted.append(live.index) or own(live, *rest))
    record = making.quantize(making.job_of(making.replace(options, max_memory=1 << 30)))
    assert fitted == [3, 4] and record.components[0].groups == whole.components[0].groups
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_statistics_are_the_same(tmp_path, recipe, tight):
    for name, limit in (("whole", None), ("bounded", 1 << 30)):
        options = making.JobOptions("tiny", recipe, output=str(tmp_path / name), call={"num_inference_steps": 2})
        making.calibrate(making.job_of(making.replace(options, max_memory=limit), writes=False))
    assert len(tight) == 1 and (tmp_path / "bounded").read_bytes() == (tmp_path / "whole").read_bytes()


def test_too_little_is_refused_with_the_least_that_does(recipe, tmp_path):
    arguments = ["quantize", "tiny", "--recipe", recipe, "--max-memory", "1MiB", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, arguments)
    said = r"--max-memory 1MiB: fitting (\S+) \((\d+) channels\) needs (\S+)MiB; give at least that"
    found = re.search(said, result.output)
    assert result.exit_code == 2 and found and found.groups()[:2] == ("transformer_blocks.0", "512")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    least = int(float(found[3]) * (1 << 20))
    options = making.JobOptions("tiny", recipe, output=str(tmp_path / "out"), max_memory=least)
    bound = making.job_of(options).run.memory
    assert bound and bound.demand.fitting["transformer"] < least - (64 << 20) < 2 * bound.demand.fitting["transformer"]
    with pytest.raises(ValueError, match=f"needs {found[3]}MiB; give at least"):
        making.job_of(making.replace(options, max_memory=least - (1 << 18)))


def test_images_that_are_too_large_for_it_are_refused(recipe):
    options = making.JobOptions("tiny", recipe, "rtn", max_memory=300 << 20, call={"height": 1024, "width": 1024})
    with pytest.raises(
        ValueError, match=r"running transformer on 1 image of 1024x1024 needs .*, or a smaller --height"
    ):
        making.job_of(options)
    assert making.job_of(making.replace(options, check=False)).run.memory.demand.working == {}  # no pipeline is run


@pytest.mark.parametrize("size", ["8", "lots", "0GB"])
def test_a_size_without_meaning_is_refused(size):
    result = CliRunner().invoke(cli, ["quantize", "tiny", "--max-memory", size])
    assert result.exit_code == 2 and "write a size with its unit" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory_names_the_option(tmp_path, monkeypatch, error):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(making, "generate", fails)
    options = making.JobOptions("tiny", "fp8", "rtn", str(tmp_path / "out"))
    with pytest.raises(RuntimeError, match=r"out of memory on cpu .*: --max-memory SIZE"):
        making.quantize(making.job_of(options))
    with pytest.raises(RuntimeError, match="more was needed than --max-memory 1GiB"):
        making.quantize(making.job_of(making.replace(options, max_memory=1 << 30)))
    with pytest.raises(RuntimeError, match=r"^something else$"):
        with memory.within(None, "cpu"):
            raise RuntimeError("something else")


# What a process holds


def wide_model(folder: Path, double: int, single: int) -> Path:
    """The embedded pipeline with a random transformer of 1024 channels: 76 MB a double block, 32 MB a single one."""
    source = resolve_model("tiny")
    config = {**source.config("transformer"), "num_layers": double, "num_single_layers": single}
    config |= {"num_attention_heads": 8, "attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
    (folder / "transformer").mkdir(parents=True)
    for path in source.path.iterdir():
        if path.is_dir() and path.name != "transformer":
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)
    model = build_on_meta("diffusers", "FluxTransformer2DModel", config)
    described = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    random = torch.Generator().manual_seed(0)
    save_weights(
        described,
        folder / "transformer" / "diffusion_pytorch_model.safetensors",
        {"format": "pt"},
        lambda name: (torch.randn(described[name].shape, generator=random) * 0.02).bfloat16(),
    )
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


@linux
@pytest.mark.long
@pytest.mark.parametrize(
    ("blocks", "bound", "check"),
    [((1, 6), 180, "--no-check"), ((2, 12), 240, "")],
    ids=["small", "large"],
)
def test_a_process_stays_within_the_bound(tmp_path, recipe, blocks, bound, check):
    model = wide_model(tmp_path / "model", *blocks)
    weights = sum(path.stat().st_size for path in (model / "transformer").iterdir())
    how = ("--recipe", recipe, "--include", LAYER, "--num-inference-steps", "2", *([check] if check else []))

    def run(name: str, source: str, *more: str) -> int:
        ended = watched.run(tmp_path, "quantize", source, *how, "-o", str(tmp_path / name), *more)
        assert ended["code"] == 0, ended["err"]
        return ended["peak"]

    base = run("tiny", "tiny", "--max-memory", "1GiB")  # what it takes to run at all
    held = run("bounded", str(model), "--max-memory", f"{bound}MB")
    assert weights > 1.4 * bound * 1e6 and held < base + bound * 1e6
    if not check:
        assert run("whole", str(model)) > base + weights
        assert files_of(tmp_path / "bounded") == files_of(tmp_path / "whole")


# On a GPU


@pytest.mark.gpu
def test_a_gpu_stays_within_the_bound(tmp_path, recipe):
    model = wide_model(tmp_path / "model", 2, 8)
    options = making.JobOptions(str(model), recipe, include=(LAYER,), device="cuda", call={"num_inference_steps": 2})
    peaks = []
    for name, limit in (("whole", None), ("bounded", 250 << 20)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        making.quantize(making.job_of(making.replace(options, output=str(tmp_path / name), max_memory=limit)))
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] > 400e6 and peaks[1] < 250 << 20
    assert files_of(tmp_path / "bounded") == files_of(tmp_path / "whole")
