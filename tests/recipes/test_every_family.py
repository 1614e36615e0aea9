"""Tiny random transformers of every family: what holds for the embedded FLUX holds for them."""

import copy
import json
import shutil
from itertools import cycle
from pathlib import Path

import diffusers
import pytest
import torch
from peft import LoraConfig
from shared import SIXTEEN_BIT
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

import fluxq
from fluxq.base.model import ModelFolder
from fluxq.calibrate.blocks import Replay, block_names
from fluxq.quantize.checkpoint import SourceWeights, write_component
from fluxq.quantize.run import Fitting, Outcome, quantize_component
from fluxq.quantize.structure import shapes_of
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family
from fluxq.recipes.plan import make_plan
from fluxq.recipes.recipe import load_recipe, shipped_recipes
from tests.calibrate.test_blocks import Pipe, captured

TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
TAKES_ADAPTERS = [row for row in TRANSFORMERS if hasattr(getattr(diffusers, row.model), "add_adapter")]


class Case:
    """A family's 16-bit model and its checkpoint on disk; of the recipe "16 bit" they are the same."""

    def __init__(self, row: Family, inputs: dict, folder: Path, recipe: str = "nvfp4") -> None:
        self.model_class = getattr(diffusers, row.model)
        self.row, self.inputs, self.recipe = row, inputs, recipe
        self.plain, self.folder = folder / SIXTEEN_BIT, folder / recipe
        torch.manual_seed(0)
        self.model_class.from_config(TINY_CONFIGS[row.name]).to(torch.bfloat16).save_pretrained(self.plain)
        if recipe != SIXTEEN_BIT:
            config = fluxq.FluxqConfig(recipe=recipe, profile="rtn")
            self.load(self.plain, quantization_config=config).save_pretrained(self.folder)

    def load(self, folder: Path | None = None, **how) -> nn.Module:
        return self.model_class.from_pretrained(folder or self.folder, **{"dtype": torch.bfloat16, **how})

    @torch.no_grad()
    def output(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        def cast(value: object) -> object:
            if isinstance(value, list):
                return [cast(item) for item in value]
            floats = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
            return value.to(dtype) if floats else value

        output = model(**{name: cast(value) for name, value in self.inputs.items()}, return_dict=False)[0]
        return output[0] if isinstance(output, list) else output  # Z-Image: a list of images


@pytest.fixture(scope="module", params=TRANSFORMERS, ids=lambda row: row.name)
def case(request, family_inputs, tmp_path_factory) -> Case:
    torch.manual_seed(0)
    return Case(request.param, family_inputs(request.param), tmp_path_factory.mktemp(request.param.name))


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone().contiguous().reshape(-1).view(torch.uint8) for n, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def quantized(model: nn.Module) -> dict[str, fluxq.QuantLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, fluxq.QuantLinear)}


RECIPES = [
    pytest.param(row, recipe, id=f"{row.name}-{recipe}", marks=() if turn == recipe else pytest.mark.slow)
    for row, turn in zip(TRANSFORMERS, cycle(shipped_recipes()), strict=False)
    for recipe in shipped_recipes()
]


@pytest.mark.often(1)
@pytest.mark.parametrize(("case", "recipe"), RECIPES, indirect=["case"])
def test_what_a_recipe_makes_of_it_is_saved_and_loaded(case, recipe, tmp_path):
    """All recipes in every family among the slow ones; each family one of them otherwise."""
    config = fluxq.FluxqConfig(recipe=recipe, profile="rtn")
    made = case.load(case.plain, quantization_config=config)
    made.save_pretrained(tmp_path)
    again = case.load(tmp_path)
    wanted = load_recipe(recipe)[1].components["transformer"]
    held = {layer.scheme.weights for layer in quantized(again).values()}
    assert wanted.weights.row in held <= {wanted.weights.row, wanted.modulation.row}
    assert same(bits(again), bits(made)) and torch.equal(case.output(again), case.output(made))


CALIBRATED = [name for name in shipped_recipes() if load_recipe(name)[1].calibration]
QUICK = (("sana", "int4-svd"), ("ltx", "nvfp4-max"))  # fitted in every run
FITTED = [
    pytest.param(row, recipe, id=f"{row.name}-{recipe}", marks=() if (row.name, recipe) in QUICK else pytest.mark.slow)
    for row in TRANSFORMERS
    for recipe in CALIBRATED
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "recipe"), FITTED, indirect=["case"])
def test_what_a_recipe_fits_to_its_calls_is_saved_and_loaded(case, recipe, tmp_path):
    """Plan, calls, fitting, files, loading and a forward pass, with all that the recipe tries."""
    row, wanted = case.row, load_recipe(recipe)[1]
    model = case.load(case.plain)
    plan = make_plan(
        row,
        "transformer",
        wanted.components["transformer"],
        shapes_of(model),
        static_inputs=True,
        profile=wanted.profile,
        compat=wanted.compat,
    )
    calls = captured(Pipe([model], case.inputs), tmp_path / "calls", {"transformer": block_names(row, model)})
    fitting = Fitting(Replay(model, calls["transformer"], tmp_path / "outputs"), wanted.gate)
    (tmp_path / "source").mkdir()
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", row.model]}
    (tmp_path / "source" / "model_index.json").write_text(json.dumps(index))
    shutil.copytree(case.plain, tmp_path / "source" / "transformer")
    folder = ModelFolder("source", tmp_path / "source")
    source = SourceWeights(folder, "transformer")
    files = quantize_component(plan, source, None, torch.bfloat16, tmp_path / "work", fitting)
    outcome = Outcome.read(files)
    part = wanted.components["transformer"]
    tries = bool(part.transforms or part.low_rank or part.rounding.method != "rtn")  # else only scales are calibrated
    assert outcome.groups and any(group.stages for group in outcome.groups.values()) == tries
    write_component(tmp_path / "out", folder, outcome.applied_to(plan), files)
    loaded = case.load(tmp_path / "out")
    assert quantized(loaded).keys() == {layer.name for layer in plan.quantized}
    got, want = case.output(loaded).float(), case.output(case.load(case.plain)).float()
    assert 1e-4 < (got - want).norm() / want.norm() < 0.25


@pytest.mark.often(6)
def test_it_computes_what_the_16_bit_model_computes_up_to_four_bits(case):
    model, plain = case.load(), case.load(case.plain)
    assert len(quantized(model)) > 10
    got, want = case.output(model).float(), case.output(plain).float()
    assert 1e-4 < (got - want).norm() / want.norm() < 0.25


@pytest.mark.often(1)
def test_it_is_saved_and_loaded_bit_for_bit(case, tmp_path):
    model = case.load()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    again = case.load(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same(bits(again), bits(model)) and torch.equal(case.output(again), case.output(model))
    assert torch.equal(case.output(copy.deepcopy(model)), case.output(model))


@pytest.mark.often(1)
def test_blocks_on_disk_compute_alike(case, tmp_path):
    """In fp32, for on disk diffusers casts what a class keeps in fp32, in 16 bit too.

    Up to fp32 rounding: tensors of a mapped file are aligned otherwise, and sums go another way. A scale that went
    through bf16 would be off by 1e-3.
    """
    how = {"dtype": torch.float32}
    whole = case.load(**how)
    names = [*dict(whole.named_children()), *(name for name, _ in whole.named_parameters() if "." not in name)]
    blocks = {name.partition(".")[0] for name in quantized(whole)}
    split = {name: "disk" if name in blocks else "cpu" for name in names}
    model = case.load(device_map=split, offload_folder=tmp_path, **how)
    assert all(layer.weight.is_meta for layer in quantized(model).values())
    torch.testing.assert_close(case.output(model, **how), case.output(whole, **how), rtol=0, atol=1e-5)


@pytest.mark.often(5)
def test_group_offload_computes_alike(case):
    model = case.load()
    want = case.output(model)
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    assert torch.equal(case.output(model), want)


@pytest.mark.often(4)
@pytest.mark.parametrize("case", TAKES_ADAPTERS, ids=lambda row: row.name, indirect=True)
def test_a_lora_fuses_without_loss_and_leaves_no_trace(case):
    model = case.load()
    plain, before = case.output(model), bits(model)
    targets = sorted(quantized(model))
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights=False), "style")
    unfused = case.output(model)
    assert not torch.equal(unfused, plain)
    model.fuse_lora()
    assert torch.equal(case.output(model), unfused)
    model.unfuse_lora()
    model.unload_lora()
    assert same(bits(model), before) and torch.equal(case.output(model), plain)


COMPILED = [  # tests/integrations/test_loading.py compiles FLUX.1; HiDream counts the tokens of each expert on the CPU
    pytest.param(row, id=row.name, marks=() if row.name == "wan" else pytest.mark.slow)
    for row in TRANSFORMERS
    if row.name not in ("flux", "hidream")
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, indirect=True)
def test_compiled_it_is_one_graph(case):
    model = case.load()
    want = case.output(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(case.output(compiled), want)


@pytest.mark.often(3)
def test_dequantized_it_is_a_plain_model(case, tmp_path):
    model = case.load()
    model.dequantize()
    model.save_pretrained(tmp_path)
    plain = case.load(tmp_path)
    assert not quantized(plain) and torch.equal(case.output(plain), case.output(model))
