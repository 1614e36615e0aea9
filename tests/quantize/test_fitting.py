"""Recipes that are fitted to data, block by block: what is written, what is recorded, and going on after a stop."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fluxq
from benchmarks.layers.synthetic import draw
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.calibrate.inputs import InputsBuilder
from fluxq.calibrate.statistics import Statistics
from fluxq.eval.images.protocols import items_of
from fluxq.jobs import making
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize import run
from fluxq.quantize.group import GroupLayer, fit_group
from fluxq.quantize.record import read_record
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan, Method, with_method
from fluxq.recipes.recipe import load_recipe

ALL_STAGES = """
version: 1
components:
  transformer:
    weights: {format: nvfp4, four_over_six: true}
    activations: {format: nvfp4, four_over_six: true}
    transforms: [center, smooth, hadamard]
    low_rank: {rank: 1/24, deflate: true}
    rounding: {method: gptq, scales: search}
    modulation: {format: fp8}
calibration: {prompts: default, count: 8, steps: 2, seed: 0}
compat: full
gate: {db_per_percent: 0.0}
"""
CALL = {"num_inference_steps": 9}  # of eight or fewer steps all would be looked at
NO_SEARCH = ALL_STAGES.replace("center, smooth, hadamard", "center, hadamard")  # smoothing takes most of the time


def write_recipe(folder: Path, recipe: str) -> Path:
    path = folder / "fitted.yaml"
    path.write_text(recipe)
    return path


def options(folder: Path, recipe: str = ALL_STAGES, **changes) -> making.JobOptions:
    path = write_recipe(folder, recipe)
    made = making.JobOptions(model="tiny", recipe=str(path), output=str(folder / "out"), check=False, call=CALL)
    return replace(made, **changes)


def weights_of(folder: Path) -> bytes:
    return (folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, record) of a job that nothing interrupted."""
    folder = tmp_path_factory.mktemp("fitted")
    record = making.quantize(making.job_of(options(folder)))
    return folder / "out", record


@pytest.fixture(scope="module")
def quickly_finished(tmp_path_factory):
    """The same without the search for factors."""
    folder = tmp_path_factory.mktemp("quickly")
    record = making.quantize(making.job_of(options(folder, NO_SEARCH)))
    return folder / "out", record


@pytest.mark.long
def test_every_stage_is_recorded_with_its_reason(finished):
    folder, record = finished
    part = record.components[0]
    assert read_record(folder) == record
    assert len(part.groups) == 16
    names = {stage.name for group in part.groups for stage in group.stages}
    assert names == {"smooth", "center", "low rank", "hadamard", "4-over-6", "gptq", "scale search"} - (
        set() if "scale search" in names else {"scale search"}
    )
    for group in part.groups:
        assert group.sqnr_db > group.sqnr_before_db + 0.5
        assert all("dB" in stage.reason or "skipped" in stage.reason for stage in group.stages)
    by_name = {layer.name: layer for layer in part.layers}
    query = by_name["transformer_blocks.0.attn.to_q"]
    assert query.scheme.startswith("nvfp4-nvfp4-static-") and "kept: " in query.reason
    assert query.scheme == by_name["transformer_blocks.0.attn.to_k"].scheme
    assert query.bits_per_weight > 4.5


def test_what_was_fitted_is_what_loads(finished):
    folder, record = finished
    pipe = load_pipeline(ModelFolder("out", folder), "bfloat16", "cpu")
    layers = {name: m for name, m in pipe.transformer.named_modules() if isinstance(m, QuantLinear)}
    recorded = {layer.name: layer.scheme for layer in record.components[0].quantized}
    assert {name: str(layer.scheme) for name, layer in layers.items()} == recorded
    assert {feature for layer in layers.values() for feature in layer.scheme.features} >= {"smooth", "center"}


def test_nothing_is_left_beside_the_checkpoint(finished):
    folder, _ = finished
    assert sorted(path.name for path in folder.parent.iterdir()) == ["fitted.yaml", "out"]


@pytest.mark.slow
def test_interrupted_work_goes_on_and_gives_the_same_bytes(tmp_path, quickly_finished, monkeypatch):
    """Stopped within the third block: two are read again, the others are fitted."""
    fit_block = run._fit_block
    seen = []

    def stops(block, *rest):
        if block.index == 2:
            raise KeyboardInterrupt
        return fit_block(block, *rest)

    monkeypatch.setattr(run, "_fit_block", stops)
    with pytest.raises(KeyboardInterrupt):
        making.quantize(making.job_of(options(tmp_path, NO_SEARCH)))
    assert not (tmp_path / "out").exists()

    monkeypatch.setattr(run, "_fit_block", lambda block, *rest: seen.append(block.index) or fit_block(block, *rest))
    monkeypatch.setattr(making, "noise_level_weights", lambda *_: pytest.fail("weighed again"))
    record = making.quantize(making.job_of(options(tmp_path, NO_SEARCH)))
    assert seen == [2, 3, 4]
    assert weights_of(tmp_path / "out") == weights_of(quickly_finished[0])
    assert record.components[0].groups == quickly_finished[1].components[0].groups


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_whose_outputs_are_gone_is_run_and_not_fitted_again(tmp_path, monkeypatch, parallel):
    """A process may end after a block's file and before its outputs."""
    folders = [tmp_path / "whole", tmp_path / "resumed"]
    for folder in folders:
        folder.mkdir()
    quick = NO_SEARCH.replace("count: 8, steps: 2", "count: 2, steps: 1").replace("{rank: 1/24, deflate: true}", "null")
    quick = quick.replace("[center, hadamard]", "[]").replace("gptq, scales: search", "gptq, scales: amax")
    whole, resumed = (options(folder, quick, parallel_blocks=parallel) for folder in folders)
    making.quantize(making.job_of(whole))
    finish, fit_block, seen = run.finish, run._fit_block, []

    def stops(file, *rest):
        finish(file, *rest)
        if file.name == "0001.safetensors":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "finish", stops)
        making.quantize(making.job_of(resumed))
    (outputs,) = folders[1].glob(".out.*.work/transformer-outputs")
    shutil.rmtree(outputs / "block-001", ignore_errors=True)
    monkeypatch.setattr(run, "_fit_block", lambda block, *rest: seen.append(block.index) or fit_block(block, *rest))
    making.quantize(making.job_of(resumed))
    assert seen == [2, 3, 4]
    assert weights_of(folders[1] / "out") == weights_of(folders[0] / "out")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_a_block_that_was_damaged_since_is_fitted_again_and_no_other(tmp_path, monkeypatch, parallel):
    """Its inputs are gone too, so the blocks before it run again; those after it stay as they are."""
    quick = NO_SEARCH.replace("count: 8, steps: 2", "count: 2, steps: 1").replace("{rank: 1/24, deflate: true}", "null")
    quick = quick.replace("[center, hadamard]", "[]").replace("gptq, scales: search", "gptq, scales: amax")
    how = options(tmp_path, quick, parallel_blocks=parallel)
    fit_block, seen = run._fit_block, []

    def stops(block, *rest):
        if block.index == 4:
            raise KeyboardInterrupt
        return fit_block(block, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "_fit_block", stops)
        making.quantize(making.job_of(how))
    (blocks,) = tmp_path.glob(".out.*.work/transformer")
    before = {path.name: path.read_bytes() for path in blocks.iterdir()}
    kept = {path.name: path.stat().st_ino for path in blocks.iterdir()}
    (blocks / "0002.safetensors").write_bytes(before["0002.safetensors"][:1000])
    monkeypatch.setattr(run, "_fit_block", lambda block, *rest: seen.append(block.index) or fit_block(block, *rest))
    monkeypatch.setattr(making, "hash_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        making.quantize(making.job_of(how))
    assert seen == [2, 4] and len(before) == 4
    assert {name: (blocks / name).read_bytes() for name in before} == before
    assert {name for name in kept if (blocks / name).stat().st_ino != kept[name]} == {"0002.safetensors"}


@pytest.mark.slow
def test_a_run_that_failed_after_the_last_block_fits_nothing_again(tmp_path, quickly_finished, monkeypatch):
    monkeypatch.setattr(making, "hash_files", lambda *_: pytest.fail("disk full"))
    with pytest.raises(pytest.fail.Exception):
        making.quantize(making.job_of(options(tmp_path, NO_SEARCH)))
    monkeypatch.undo()
    monkeypatch.setattr(run, "_fit_block", lambda *_: pytest.fail("fitted again"))
    making.quantize(making.job_of(options(tmp_path, NO_SEARCH)))
    assert weights_of(tmp_path / "out") == weights_of(quickly_finished[0])


@pytest.mark.slow
def test_another_job_does_not_go_on_with_that_work(tmp_path, monkeypatch):
    few = NO_SEARCH.replace("count: 8, steps: 2", "count: 2, steps: 1")
    fit_block = run._fit_block
    seen = []

    def stops_late(block, *rest):
        if block.index == 1:
            raise KeyboardInterrupt
        return fit_block(block, *rest)

    monkeypatch.setattr(run, "_fit_block", stops_late)
    with pytest.raises(KeyboardInterrupt):
        making.quantize(making.job_of(options(tmp_path, few)))
    monkeypatch.setattr(run, "_fit_block", lambda block, *rest: seen.append(block.index) or fit_block(block, *rest))
    other = few.replace("[center, hadamard]", "[center]").replace("{rank: 1/24, deflate: true}", "null")
    with pytest.raises(ValueError, match="an interrupted run that differs in recipe is kept in "):
        making.quantize(making.job_of(options(tmp_path, other)))
    assert seen == []
    making.quantize(making.job_of(options(tmp_path, other, overwrite=True)))
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_parallel_blocks_are_fitted_to_16_bit_ones(tmp_path, quickly_finished):
    record = making.quantize(making.job_of(options(tmp_path, NO_SEARCH, parallel_blocks=True)))
    first, last = (r.components[0].groups for r in (record, quickly_finished[1]))
    assert first[0] == last[0]  # nothing before it
    assert first[-1] != last[-1]


@pytest.mark.slow
def test_one_image_alone_decides_nothing(tmp_path):
    """No image is left to judge by: layers are rounded to nearest, and the record says why."""
    record = making.quantize(making.job_of(options(tmp_path, ALL_STAGES.replace("count: 8", "count: 1"))))
    groups = record.components[0].groups
    assert {stage.reason for group in groups for stage in group.stages} == {"skipped: no held-out token to judge by"}


@pytest.mark.slow
def test_statistics_widen_input_scales(tmp_path, finished, statistics_file, monkeypatch):
    """Of inputs that nothing is done to, the scale covers what the statistics saw."""
    plain = ALL_STAGES.replace("[center, smooth, hadamard]", "[]").replace("{rank: 1/24, deflate: true}", "null")
    plain = plain.replace(", four_over_six: true}", "}")
    making.quantize(making.job_of(options(tmp_path, plain, statistics=str(statistics_file))))
    pipe = load_pipeline(ModelFolder("out", tmp_path / "out"), "bfloat16", "cpu")
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    seen = Statistics.load(statistics_file).amax("transformer_blocks.0.attn.to_q")
    assert layer.input_scale.item() >= (seen / (6 * 448)).item() * (1 - 1e-6)


# Bad input: handled with a reason, or refused with the layer's name and what to do; never a NaN in a checkpoint.

EVERYTHING = Method(
    ("center", "smooth", "hadamard"),
    hadamard=64,
    rank=4,
    deflate=True,
    gptq=True,
    search=True,
    weights_46=True,
    activations_46=True,
    joint=True,
)
SMALL = draw("adaln", k=64, n=32, fit=256, held=64)
ONE_CHANNEL = (torch.arange(64) == 5).float()
BAD_INPUTS = {  # factors of fitting and held-out tokens, what the record says
    "too large for a Gram": (1e25, 1e25, "its input reaches .*e+27, too much for a Gram matrix in fp32"),
    "one channel too large": (1 + 1e20 * ONE_CHANNEL,) * 2 + ("too much for a Gram matrix in fp32",),
    "too small for fp32": (1e-25, 1e-25, "its outputs are too small to be compared in fp32"),
    "dead where it is fitted": (0, 1, "the Gram matrix of this input is zero or not finite"),
    "dead": (0, 0, "its input is always zero"),
    "dead where it is judged": (1, 0, None),
    "one live channel": (ONE_CHANNEL, ONE_CHANNEL, None),
    "a dead half": ((torch.arange(64) % 2).float(),) * 2 + (None,),
}


def fitted(fit, held, weight=SMALL.weight, bias=None, dtype=torch.bfloat16):
    builder = InputsBuilder("x", 64, calls=(1, 1))
    builder.add(fit)
    builder.add(held, held_out=True)
    inputs = builder.finish(lambda: iter([(fit, 1.0)]))
    layer = GroupLayer("blocks.0.a", weight, bias, Scheme.parse("nvfp4-nvfp4-static"))
    group = fit_group([layer], inputs, EVERYTHING, dtype=dtype)
    for name, tensor in group.layers["blocks.0.a"].named_parameters():
        assert torch.isfinite(tensor.float()).all(), name
    return group


def said(group) -> str:
    return "; ".join(stage.reason for stage in group.stages)


@pytest.mark.often(1)
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_cannot_be_fitted_to(case):
    fit, held, reason = BAD_INPUTS[case]
    group = fitted(SMALL.fit * fit, SMALL.held * held)
    assert group.fitted is None or group.fitted.total >= group.rounded.total
    assert reason is None or re.search(reason.replace("+", r"\+"), said(group)), said(group)


@pytest.mark.parametrize("direction", ["constant", "of one direction"])
def test_a_singular_gram_is_no_obstacle(direction):
    """Centred, a constant input has a Gram of zeros; one direction leaves all others without any."""
    fit, held = SMALL.fit[:, :1].expand(-1, 64), SMALL.held[:, :1].expand(-1, 64)
    if direction == "constant":
        fit, held = torch.ones_like(fit), torch.ones_like(held)
    group = fitted(fit.contiguous(), held.contiguous())
    assert group.fitted.total > group.rounded.total + 10


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gram_that_is_not_finite_is_refused_by_name(bad):
    """It would come of NaN in the input, which is where it is noticed."""
    x = SMALL.fit.clone()
    x[3, 3] = bad
    with pytest.raises(ValueError, match=r"^x: its input holds NaN or infinity"):
        fitted(x, SMALL.held)


def test_fewer_tokens_than_channels_leave_the_others_to_decide():
    group = fitted(SMALL.fit[:40], SMALL.held)
    assert "skipped: 40 tokens for 64 channels, 1 for each is asked" in said(group)
    assert group.fitted.total > group.rounded.total


@pytest.mark.parametrize("weight", [0.0, 1e-30, 1e30, ONE_CHANNEL])
def test_weights_at_the_edges_give_numbers(weight):
    """All zero, hardly above, too large for their outputs to be compared, zero channels."""
    group = fitted(SMALL.fit, SMALL.held, SMALL.weight * weight)
    assert isinstance(weight, torch.Tensor) or weight < 1 or "too large to be compared" in said(group)


def test_what_float16_cannot_hold_is_left_out_or_refused():
    group = fitted(SMALL.fit * 1e5, SMALL.held * 1e5, dtype=torch.float16)
    assert "what it stores is beyond torch.float16" in said(group)
    assert not group.layers["blocks.0.a"].scheme.center
    largest = SMALL.weight / SMALL.weight.abs().max() * 6e4
    group = fitted(SMALL.fit * 100, SMALL.held * 100, largest, torch.zeros(32), dtype=torch.float16)
    assert "beyond torch.float16" in said(group)
    with pytest.raises(ValueError, match=r"^blocks\.0\.a\.bias: holds NaN or infinity as torch.float16"):
        fitted(SMALL.fit, SMALL.held, bias=torch.full((32,), 1e5), dtype=torch.float16)


def test_a_hadamard_block_that_does_not_divide_is_smaller_and_the_plan_says_so(tmp_path):
    """And what it says is what the layer has; 24 channels take none."""
    recipe = load_recipe(str(write_recipe(tmp_path, ALL_STAGES.replace("nvfp4, four_over_six: true", "int8"))))[1]
    entry = recipe.components["transformer"].model_copy(update={"transforms": ["hadamard"], "low_rank": None})
    for k, size, words in ((96, 32, "Hadamard blocks of 32"), (24, 0, "no Hadamard")):
        scheme = Scheme.parse("int8-int8")
        layer = LayerPlan("a", 64, k, "", "a", False, scheme, "", made_by="norm")
        planned = with_method(layer, entry, "balanced")
        assert planned.method.hadamard == size and words in planned.reason
        x = torch.randn(512, k)
        x[:, 3] *= 40
        assert fluxq.quantize_linear(torch.nn.Linear(k, 64), x, entry).scheme.hadamard == size


def test_a_rank_that_a_layer_does_not_have_is_refused_with_a_cure(tmp_path):
    with pytest.raises(ValueError, match=r"transformer.*low_rank asks for rank 129, .* at most 128; write a share"):
        making.job_of(options(tmp_path, ALL_STAGES.replace("rank: 1/24", "rank: 129")))


@pytest.mark.slow
def test_dead_inputs_and_zero_weights_of_a_model_leave_numbers_in_its_checkpoint(tmp_path, tiny_folder):
    """The feed-forward of the first block returns zeros: what follows it has nothing to be fitted to."""
    path = tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    dead = "transformer_blocks.0.ff.net.2"
    for name in ("transformer_blocks.0.ff.net.0.proj.weight", "transformer_blocks.0.ff.net.0.proj.bias"):
        tensors[name].zero_()
    tensors["transformer_blocks.0.attn.to_q.weight"][:, :40] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    few = ALL_STAGES.replace("count: 8, steps: 2", "count: 2, steps: 1")
    record = making.quantize(making.job_of(options(tmp_path, few, model=str(tiny_folder))))
    written = load_file(tmp_path / "out" / "transformer" / path.name)
    assert all(torch.isfinite(tensor.float()).all() for tensor in written.values() if tensor.is_floating_point())
    reasons = {group.group: [stage.reason for stage in group.stages] for group in record.components[0].groups}
    assert reasons[dead] == ["skipped: its input is always zero"]
    assert any("1 for each is asked" in reason for reason in reasons["transformer_blocks.0.attn.to_q"])


@pytest.mark.slow
def test_a_model_that_a_fit_cannot_use_leaves_nothing_behind(tmp_path, monkeypatch):
    """Going on later would fail again, so captured calls go too; after an interruption they stay, see above."""

    def fails(*_):
        raise ValueError("blocks.0: its input holds NaN or infinity at step 0")

    monkeypatch.setattr(run, "_fit_block", fails)
    with pytest.raises(ValueError, match="at step 0"):
        making.quantize(making.job_of(options(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["fitted.yaml"]


@pytest.mark.slow
def test_statistics_of_another_recipe_are_refused_before_anything_is_computed(tmp_path):
    """They lack layers that this one quantizes; see also commands/test_cli.py and calibrate/test_statistics.py."""
    few = ALL_STAGES.replace("count: 8", "count: 1").replace("steps: 2", "steps: 1")
    file = str(tmp_path / "s.safetensors")
    how = options(tmp_path, few, include=("transformer_blocks.**",))
    making.calibrate(making.job_of(replace(how, output=file), writes=False))
    with pytest.raises(ValueError, match=r"nothing about the input of single_transformer_blocks\..*: calibrate again"):
        making.job_of(options(tmp_path, few, statistics=file))


def test_the_record_says_what_layers_were_fitted_to(finished):
    folder, record = finished
    assert record.trajectory["steps_seen"] == [0, 8] and len(record.trajectory["items"]) == 8
    assert "8 images, steps 0, 8 of FlowMatchEuler" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_velocity_error_falls_with_rank_and_with_bits(tmp_path_factory, pipe):
    """Mean error of the velocity on held-out noise, rank 0, 1/24 and 1/6 of nvfp4, then 8 bits."""
    recipe = ALL_STAGES.replace("steps: 2", "steps: 4")
    ranks = {"null": "0", "{rank: 1/24, deflate: false}": "1/24", "{rank: 1/6, deflate: false}": "1/6"}
    errors = []
    for rank in ranks:
        text = recipe.replace("{rank: 1/24, deflate: true}", rank)
        errors.append(velocity_error(tmp_path_factory.mktemp("rank"), text, pipe))
    int8 = recipe.replace("format: nvfp4, four_over_six: true", "format: int8")
    int8 = int8.replace("{rank: 1/24, deflate: true}", "null")
    errors.append(velocity_error(tmp_path_factory.mktemp("int8"), int8, pipe))
    assert errors == sorted(errors, reverse=True), errors


def velocity_error(folder: Path, recipe: str, pipe) -> float:
    """|v^ - v|^2 / |v|^2 over the steps of images that calibration has not seen, the inputs those of 16 bit."""
    making.quantize(making.job_of(options(folder, recipe)))
    quantized = load_pipeline(ModelFolder("out", folder / "out"), "bfloat16", "cpu").transformer
    plain = pipe.transformer
    lost = size = 0.0
    own = plain.forward

    def both(*args, **kwargs):
        nonlocal lost, size
        v = own(*args, **kwargs)
        approximate = quantized(*args, **kwargs)
        lost += float((approximate[0].float() - v[0].float()).square().sum())
        size += float(v[0].float().square().sum())
        return v

    plain.forward = both
    try:
        items = items_of(["a red circle", "a blue square on grass", "two green stars"], 6, first_seed=500)
        pipe(
            prompt=[prompt for prompt, _ in items],
            generator=[torch.Generator().manual_seed(seed) for _, seed in items],
            output_type="latent",
            height=64,
            width=64,
            num_inference_steps=4,
        )
    finally:
        del plain.forward
    return lost / size
