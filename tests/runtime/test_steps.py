"""Steps in 16 bit: the 16-bit model's own bits in the steps that are kept, the quantized model's in all others."""

import copy
import gc
import logging
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_map_only

import fluxq
from fluxq import tiny
from fluxq.base.devices import free_bytes
from fluxq.base.files import read_json, write_json
from fluxq.eval.images.sides import Side
from fluxq.eval.report.card import model_card
from fluxq.jobs import making
from fluxq.kernels.linear import QuantLinear
from fluxq.quantize.checkpoint import PLAN_FILE, SourceWeights
from fluxq.quantize.record import read_record
from fluxq.quantize.structure import attention_of
from fluxq.recipes.computing import QuantizationConfig, Steps
from fluxq.recipes.recipe import load_recipe
from fluxq.runtime import graphs, originals, steps
from fluxq.runtime.modulation import hoist_modulation
from fluxq.runtime.originals import Originals
from fluxq.runtime.steps import KeptSteps, keep_steps, require_followed
from tests.runtime.test_graphs import Recorder

CPU = torch.device("cpu")
COUNT = 5  # steps of a call
KEPT = {0, 3, 4}  # of those, by the recipe below
COLUMNS = ["16 bit", "fp8", "int4", "int8", "mxfp8", "nvfp4", "nvfp4-max"]  # of docs/diffusers.md
RECIPE = """extends: nvfp4
compat: full
components:
  transformer:
    weights: {four_over_six: false}
    activations: {four_over_six: false}
    transforms: [center, hadamard]
    low_rank: {rank: 1}
    rounding: {method: rtn, scales: amax}
calibration: {count: 2, steps: 1}
gate: {db_per_percent: 0}
steps: {first: 1, last: 2, components: 16bit}
"""
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint whose layers do to their input all that there is, and which keeps steps."""
    root = tmp_path_factory.mktemp("steps")
    (root / "kept.yaml").write_text(RECIPE)
    options = making.JobOptions(model="tiny", recipe=str(root / "kept.yaml"), output=str(root / "out"), check=False)
    making.quantize(making.job_of(options))
    return root / "out"


@pytest.fixture(scope="module")
def loaded(folder) -> diffusers.FluxPipeline:
    pipe = tiny.load(folder=folder)
    schemes = [module.scheme for module in pipe.transformer.modules() if isinstance(module, QuantLinear)]
    assert all(any(getattr(scheme, name) for scheme in schemes) for name in ("center", "hadamard", "rank"))
    return pipe


@pytest.fixture
def pipe(loaded) -> diffusers.FluxPipeline:
    """The checkpoint's pipeline with a transformer and a scheduler of its own."""
    return with_parts(loaded, transformer=copy.deepcopy(loaded.transformer))


@pytest.fixture(scope="module")
def plain(plain_checkpoint) -> diffusers.FluxPipeline:
    """Another checkpoint, of a recipe that keeps no steps; tests leave it as it is."""
    return tiny.load(folder=plain_checkpoint("nvfp4"))


@pytest.fixture(scope="module")
def sixteen() -> diffusers.FluxPipeline:
    """The 16-bit model; tests leave it as it is."""
    return tiny.load()


def with_parts(pipe: Any, **parts: Any) -> diffusers.FluxPipeline:
    made = diffusers.FluxPipeline(**{**pipe.components, "scheduler": copy.deepcopy(pipe.scheduler), **parts})
    made.register_to_config(_name_or_path=pipe.config._name_or_path)
    made.set_progress_bar_config(disable=True)
    return made


def run(pipe: Any, **how: Any) -> list[tuple[tuple, dict[str, Any], Tensor]]:
    """(args, kwargs, output) of each call of the denoiser that an image takes."""
    seen: list[tuple[tuple, dict[str, Any], Tensor]] = []

    def see(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        held = {name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        seen.append((args, held, output[0].clone()))

    hook = pipe.transformer.register_forward_hook(see, with_kwargs=True)
    size = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": COUNT}
    try:
        pipe("a red circle", generator=torch.Generator().manual_seed(0), output_type="latent", **size | how)
    finally:
        hook.remove()
    return seen


def kinds(calls: list, quantized: nn.Module, original: nn.Module) -> str:
    """A letter for each call: "q" for the quantized model's bits, "k" for the original's, "?" for anything else."""
    found = ""
    for args, kwargs, output in calls:
        is_q, is_16 = (torch.equal(model(*args, **kwargs)[0], output) for model in (quantized, original))
        found += "?" if is_q == is_16 else "q" if is_q else "k"
    return found


# --- which steps, with which bits


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_kept_steps_are_the_16_bit_model_and_the_others_the_quantized_one(pipe, loaded, sixteen, weights) -> None:
    before = kinds(run(pipe), loaded.transformer, sixteen.transformer)
    with fluxq.keep_steps(pipe, weights=weights) as kept:
        assert kept.placed == (weights,) and str(kept.steps) == "the first step and the last 2"
        for _ in range(2):
            assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        assert (kept.calls, kept.calls_in_16_bit) == (10, 6)
        assert kinds(run(pipe, num_inference_steps=2), loaded.transformer, sixteen.transformer) == "kk"
    assert before == kinds(run(pipe), loaded.transformer, sixteen.transformer) == "qqqqq"
    assert not pipe.transformer._forward_pre_hooks and not pipe.transformer._forward_hooks
    assert not any("instead" in vars(module) for module in pipe.transformer.modules())
    assert kept.nbytes == 0


@pytest.mark.often(1)
@pytest.mark.feature("fluxq.keep_steps: the 16-bit model's bits in kept steps, the checkpoint's in the others")
@pytest.mark.parametrize("recipe", COLUMNS[1:])
def test_steps_of_every_recipe_can_be_kept(plain_checkpoint, sixteen, recipe) -> None:
    pipe = tiny.load(folder=plain_checkpoint(recipe))
    quantized = copy.deepcopy(pipe.transformer)
    with keep_steps(pipe, first=1):
        assert kinds(run(pipe, num_inference_steps=2), quantized, sixteen.transformer) == "kq"


@pytest.mark.often(1)
@pytest.mark.parametrize(("first", "last", "want"), [(2, 0, "kkqqq"), (0, 1, "qqqqk"), (9, 9, "kkkkk")])
def test_other_steps_than_the_recipes_are_asked_for(pipe, loaded, sixteen, first, last, want) -> None:
    with keep_steps(pipe, first=first, last=last):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == want


@pytest.mark.slow
def test_one_end_is_asked_for_and_the_other_stays_the_recipes(pipe, loaded, sixteen) -> None:
    with keep_steps(pipe, last=0):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqqq"


class Heun(diffusers.FlowMatchHeunDiscreteScheduler):
    """Scheduler to which FLUX's pipeline can hand a schedule."""

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        super().set_timesteps(num_inference_steps or len(sigmas), device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheduler", "want"),
    [
        (Heun(), "kkqqqqkkk"),  # two calls a step, one for the last
        (diffusers.UniPCMultistepScheduler(**FLOW), "kqqkk"),
        (diffusers.FlowMatchLCMScheduler(), "kqqkk"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_pipeline_is_given_another_scheduler(pipe, loaded, sixteen, scheduler, want) -> None:
    with keep_steps(pipe):
        pipe.scheduler = scheduler
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == want


@pytest.mark.slow
def test_guidance_calls_the_denoiser_twice_a_step(pipe, loaded, sixteen) -> None:
    with keep_steps(pipe) as kept:
        calls = run(pipe, negative_prompt="a blue square", true_cfg_scale=2.0)
        assert kinds(calls, loaded.transformer, sixteen.transformer) == "kkqqqqkkkk"
        assert kept.calls_in_16_bit == 6


def test_an_image_to_image_call_counts_its_own_steps(pipe, loaded, sixteen) -> None:
    again = diffusers.FluxImg2ImgPipeline(**pipe.components)
    again.set_progress_bar_config(disable=True)
    with keep_steps(pipe, first=1, last=1):  # both pipelines share transformer and scheduler
        calls = run(again, image=torch.rand(1, 3, 16, 16), strength=0.8)
    assert kinds(calls, loaded.transformer, sixteen.transformer) == "kqqk"


@pytest.mark.slow
def test_two_experts_share_the_steps_of_one_run(pipe, loaded, sixteen) -> None:
    """As Wan 2.2's: one for high noise, one for low."""
    second = copy.deepcopy(loaded.transformer)
    wan = SimpleNamespace(
        components={"transformer": pipe.transformer, "transformer_2": second},
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    source = SourceWeights(fluxq.base.model.resolve_model("tiny"), "transformer")
    inputs = run(sixteen)[0][1]
    calls: list = []
    with KeptSteps(wan, Steps(first=1, last=1), lambda name: source, {}) as kept:
        wan.scheduler.set_timesteps(4)
        for index, t in enumerate(wan.scheduler.timesteps):
            expert = pipe.transformer if index < 2 else second
            output = expert(**inputs)[0]
            calls.append(((), inputs, output))
            wan.scheduler.step(output, t, inputs["hidden_states"])
        assert kept.placed == ("resident", "resident")
    assert kinds(calls, loaded.transformer, sixteen.transformer) == "kqqk"


SCHEDULERS = [
    diffusers.DDIMScheduler(),
    diffusers.DDPMScheduler(),
    diffusers.DPMSolverMultistepScheduler(),
    diffusers.EulerDiscreteScheduler(),
    diffusers.EulerAncestralDiscreteScheduler(),
    diffusers.FlowMatchEulerDiscreteScheduler(),
    diffusers.FlowMatchHeunDiscreteScheduler(),
    diffusers.HeunDiscreteScheduler(),
    diffusers.KDPM2DiscreteScheduler(),
    diffusers.LCMScheduler(),
    diffusers.LMSDiscreteScheduler(),
    diffusers.TCDScheduler(),
    diffusers.UniPCMultistepScheduler(),
]


@pytest.mark.parametrize("begin", [0, 2], ids=["from the start", "from its third step"])
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: type(scheduler).__name__)
def test_schedulers_are_followed_from_wherever_a_pipeline_begins(scheduler, begin, is_told) -> None:
    """As pipelines run them; old ones do not say where they begin."""
    scheduler, model = copy.deepcopy(scheduler), Named()
    follower, order = steps.Follower(lambda: scheduler), scheduler.order
    if begin and order == 2 and not is_told:
        pytest.skip("schedulers of second order ask to be told")
    for count in (COUNT, 4):
        scheduler.set_timesteps(count)
        timesteps = scheduler.timesteps[begin * order :]
        if is_told and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin * order)
        found, x = [], torch.zeros(1, 4)
        for t in timesteps:
            for _ in range(2):  # of guidance
                found.append(follower.step(model, (x, t.expand(1)), {}))
            x = scheduler.step(torch.ones_like(x), t, x).prev_sample
        left = count - begin
        want = [(index // order, left) for index in range(len(timesteps)) for _ in range(2)]
        if not is_told and hasattr(scheduler, "set_begin_index"):
            want[:2] = found[:2]  # before the first step is over nothing says where it is
            assert all(step == 0 for step, _ in found[:2])
        assert found == want
        assert follower.step(model, (x, timesteps[-1:]), {})[0] >= left - 1  # what comes after a run is none of it


class Named(nn.Module):
    """A denoiser that names its timestep."""

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample


def test_sana_sprints_schedule_has_a_timestep_more_than_steps() -> None:
    scheduler = diffusers.SCMScheduler()
    follower = steps.Follower(lambda: scheduler)
    scheduler.set_timesteps(3, max_timesteps=1.57, intermediate_timesteps=None)
    assert follower.step(Named(), (torch.zeros(1), scheduler.timesteps[:1]), {}) == (0, 3)


def test_a_scheduler_that_does_not_tell_its_step_is_refused_by_name(pipe) -> None:
    with pytest.raises(
        ValueError, match=r"steps of a PNDMScheduler cannot be followed.*its timesteps repeat; take one"
    ):
        require_followed(diffusers.PNDMScheduler())
    require_followed(diffusers.DDIMScheduler())
    with pytest.raises(ValueError, match=r"steps of a SimpleNamespace cannot be followed.*no schedule"):
        require_followed(SimpleNamespace())
    ddim = diffusers.DDIMScheduler()
    follower = steps.Follower(lambda: ddim)
    ddim.set_timesteps(COUNT)
    with pytest.raises(ValueError, match=r"DDIMScheduler.*the denoiser is given 0\.8, which is none of its timesteps"):
        follower.step(Named(), (torch.zeros(1), torch.tensor([0.8])), {})
    with pytest.raises(ValueError, match=r"this ReLU is called without a timestep"):
        follower.step(nn.ReLU(), (torch.zeros(1),), {})
    pipe.scheduler = diffusers.PNDMScheduler()
    with pytest.raises(ValueError, match=r"PNDMScheduler"):
        keep_steps(pipe)


def test_a_model_with_such_a_scheduler_is_refused_before_it_is_quantized(tiny_folder, tmp_path) -> None:
    diffusers.PNDMScheduler().save_pretrained(tiny_folder / "scheduler")
    index = read_json(tiny_folder / "model_index.json")
    write_json(tiny_folder / "model_index.json", {**index, "scheduler": ["diffusers", "PNDMScheduler"]})
    (tmp_path / "kept.yaml").write_text("extends: fp8\nsteps: {first: 1}\n")
    with pytest.raises(ValueError, match=r"PNDMScheduler cannot be followed"):
        making.job_of(making.JobOptions(model=str(tiny_folder), recipe=str(tmp_path / "kept.yaml")))


# --- where the weights are


def tensors() -> dict[int, int]:
    """Address -> bytes of every tensor's memory that is alive."""
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, Tensor) and not each.is_meta]
    alive = [each for each in found if not isinstance(each, (FakeTensor, FunctionalTensor))]  # compiled models' own
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}


@pytest.mark.slow
def test_resident_weights_take_the_16_bit_bytes_of_the_quantized_layers(pipe) -> None:
    layers = [module for module in pipe.transformer.modules() if isinstance(module, QuantLinear)]
    wanted = sum(2 * layer.in_features * layer.out_features for layer in layers)
    wanted += sum(2 * layer.out_features for layer in layers if layer.scheme.center)
    before = tensors()
    kept = keep_steps(pipe, weights="resident")
    added = sum(size for address, size in tensors().items() if address not in before)
    assert kept.nbytes == wanted == added
    kept.remove()
    assert sum(size for address, size in tensors().items() if address not in before) == 0


@pytest.mark.slow
def test_streamed_weights_are_two_blocks_at_most_and_none_in_between(pipe, monkeypatch) -> None:
    alive: list[weakref.ref] = []
    most: list[int] = []
    real = Originals.read

    def read(self: Originals, path: str) -> Any:
        made = real(self, path)
        alive.append(weakref.ref(made.weight))
        most.append(sum(weight.nbytes for each in alive if (weight := each()) is not None))
        return made

    advance = originals.Streamed._advance

    def advance_late(self: originals.Streamed, index: int, device: torch.device) -> None:
        """Once the next block is there, however slow its reader is."""
        if self._coming is not None:
            self._coming[2].result()
        advance(self, index, device)

    monkeypatch.setattr(Originals, "read", read)
    monkeypatch.setattr(originals.Streamed, "_advance", advance_late)
    with keep_steps(pipe, weights="streamed") as kept:
        found = kept._put[0].originals
        assert found is not None
        sizes = [sum(found.nbytes(path) for path in block) for block in found.blocks()]
        assert len(sizes) == 5 and kept.nbytes == 0 and not alive
        run(pipe)
        assert len(alive) == 3 * len(found.layers)  # each weight once a step that is kept
        assert max(sizes) < max(most) <= max(a + b for a, b in pairwise(sizes)) < 0.6 * sum(sizes)
        gc.collect()
        assert kept.nbytes == 0 and not any(each() is not None for each in alive)


@pytest.mark.slow
def test_blocks_that_are_called_in_another_order_are_learned(pipe, loaded, sixteen, monkeypatch) -> None:
    """A UNet defines its middle behind its end."""
    asked: list[int] = []
    monkeypatch.setattr(originals.Originals, "blocks", backwards(originals.Originals.blocks))
    with keep_steps(pipe, weights="streamed") as kept:
        store = kept._put[0].store
        assert isinstance(store, originals.Streamed)
        real = store._read
        store._read = lambda index, *how: (asked.append(index), real(index, *how))[1]  # pyright: ignore[reportAttributeAccessIssue]
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        blocks = len(store._blocks)
    assert len(asked) < 3 * blocks + 2 * blocks  # the first of three steps guesses wrong, the others do not


def backwards(blocks: Callable[..., list[list[str]]]) -> Callable[..., list[list[str]]]:
    return lambda self: blocks(self)[::-1]


@pytest.mark.slow
def test_a_failure_in_the_middle_of_a_step_leaves_nothing_behind(pipe, loaded, sixteen) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    for weights in ("resident", "streamed"):
        with keep_steps(pipe, weights=weights) as kept:
            hook = pipe.transformer.single_transformer_blocks[1].register_forward_pre_hook(fails)
            with pytest.raises(RuntimeError, match=r"in the middle"):
                run(pipe)
            hook.remove()
            assert not any("instead" in vars(module) for module in pipe.transformer.modules())
            assert weights == "resident" or kept.nbytes == 0
            assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


def test_auto_asks_what_memory_is_free(pipe, monkeypatch) -> None:
    assert free_bytes(CPU) > 1 << 27
    with keep_steps(pipe) as kept:
        needed = kept.nbytes
        assert kept.placed == ("resident",)
    monkeypatch.setattr(originals, "free_bytes", lambda device: needed)
    with keep_steps(pipe) as kept:
        assert kept.placed == ("streamed",)
    with keep_steps(pipe, weights="resident") as kept:
        assert kept.placed == ("resident",)
    monkeypatch.setattr(originals, "free_bytes", lambda device: 2 * needed)
    with keep_steps(pipe) as kept:
        assert kept.placed == ("resident",)


# --- together with everything else


def test_attention_in_fp8_is_16_bit_meanwhile(pipe, loaded, sixteen) -> None:
    fluxq.set_attention(pipe, "fp8")
    other = copy.deepcopy(loaded.transformer)
    fluxq.set_attention(other, "fp8")
    with keep_steps(pipe):
        assert kinds(run(pipe), other, sixteen.transformer) == "kqqkk"
    assert attention_of(pipe.transformer) == "fp8"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_optimized_blocks_take_no_codes_in_kept_steps(pipe, loaded, sixteen, weights) -> None:
    fluxq.optimize(pipe, device="cpu")
    with keep_steps(pipe, weights=weights):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        fluxq.restore(pipe)
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


@pytest.mark.slow
def test_a_prepared_model_is_the_original_all_the_same(pipe, loaded, sixteen) -> None:
    with keep_steps(pipe):
        assert len(fluxq.prepare(pipe, device="cpu")) > 20
        other = copy.deepcopy(pipe.transformer)
        assert kinds(run(pipe), other, sixteen.transformer) == "kqqkk"
    with keep_steps(pipe):
        assert kinds(run(pipe), other, sixteen.transformer) == "kqqkk"


ADAPTED = ("to_q", "proj_mlp", "ff.net.2", "proj_out")


@pytest.mark.slow
def test_an_adapter_counts_in_kept_steps_too(pipe, loaded, sixteen, lora_file) -> None:
    file = lora_file("style.safetensors", ADAPTED)
    models = []
    for base in (pipe, with_parts(loaded, transformer=copy.deepcopy(loaded.transformer)), tiny.load()):
        if base is pipe:
            keep_steps(pipe)
        base.load_lora_weights(file)
        models.append(base.transformer)
    calls = run(pipe)
    assert kinds(calls, *models[1:]) == "kqqkk"
    assert kinds(calls, loaded.transformer, sixteen.transformer) == "?????"
    pipe.unload_lora_weights()
    assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fused first", "kept first", "without a record"])
def test_a_fused_adapter_counts_in_kept_steps_too(pipe, loaded, sixteen, lora_file, order) -> None:
    """The layers have a low-rank branch of their own too, which belongs to their codes.

    The floor is how far the 16-bit model with the adapter is from the same model in fp32. A kept step is nearer to the
    16-bit model than that. It has not its bits, because sums come in another order.
    """
    assert any(module.scheme.rank for module in pipe.transformer.modules() if isinstance(module, QuantLinear))
    original = tiny.load()
    original.load_lora_weights(lora_file("style.safetensors", ADAPTED))
    if order == "kept first":
        keep_steps(pipe)
    pipe.load_lora_weights(lora_file("style.safetensors", ADAPTED))
    pipe.fuse_lora()
    if order == "fused first":
        keep_steps(pipe)
    if order == "without a record":
        source = SourceWeights(fluxq.base.model.resolve_model("tiny"), "transformer")
        KeptSteps(pipe, Steps(first=1, last=2), lambda name: source)
    in_fp32 = copy.deepcopy(original.transformer).float()
    for index, (args, kwargs, output) in enumerate(run(pipe)):
        args_32, kwargs_32 = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        want = in_fp32(*args_32, **kwargs_32)[0]
        adapted = original.transformer(*args, **kwargs)[0]
        off, floor = distance(output, want), distance(adapted, want)
        if index in KEPT:
            assert distance(output, adapted) < 0.6 * floor and off < 1.2 * floor
            assert distance(output, sixteen.transformer(*args, **kwargs)[0]) > 5 * floor
        else:
            assert off > 5 * floor
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def test_an_adapter_that_went_into_codes_for_one_gpu_is_not_lost_silently(pipe, lora_file) -> None:
    pipe.load_lora_weights(lora_file("style.safetensors", ADAPTED))
    pipe.fuse_lora()
    kept = keep_steps(pipe)
    fluxq.prepare(pipe, device="cpu")
    with pytest.raises(ValueError, match=r"adapter was fused before fluxq.prepare"):
        run(pipe)
    kept.remove()
    with pytest.raises(ValueError, match=r"adapter was fused before fluxq.prepare"):
        keep_steps(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["resident", "streamed"])
def test_hoisted_modulation_is_made_of_the_weights_of_each_step(pipe, loaded, sixteen, weights) -> None:
    """Sums of one product of many rows come in another order, so bits are those of a hoisted model's."""
    put: list[Callable[[], Any]] = [lambda: hoist_modulation(pipe), lambda: keep_steps(pipe, weights=weights)]
    with ExitStack() as placed:
        for each in put if weights == "resident" else put[::-1]:
            placed.enter_context(each())
        calls = run(pipe)
        assert not torch.equal(calls[1][2], calls[2][2])
        for index, (args, kwargs, output) in enumerate(calls):
            near = sixteen if index in KEPT else loaded
            far = loaded if index in KEPT else sixteen
            assert distance(output, near.transformer(*args, **kwargs)[0]) < 0.006
            assert distance(output, far.transformer(*args, **kwargs)[0]) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", "layers", "groups", "groups on disk"])
def test_an_offloaded_model_streams(pipe, loaded, sixteen, tmp_path, how) -> None:
    if how == "model":
        pipe.enable_model_cpu_offload(device="cpu")
    elif how == "layers":
        accelerate.cpu_offload(pipe.transformer, CPU)
    else:
        path = str(tmp_path) if "disk" in how else None
        pipe.transformer.enable_group_offload(CPU, offload_type="leaf_level", offload_to_disk_path=path)
    with pytest.raises(ValueError, match=r"this FluxTransformer2DModel is offloaded.*say weights='streamed'"):
        keep_steps(pipe, weights="resident")
    with keep_steps(pipe) as kept:
        assert kept.placed == ("streamed",)
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


@pytest.mark.slow
def test_where_the_weights_are_is_decided_again_when_a_model_is_offloaded_since(pipe, loaded, sixteen) -> None:
    stays = with_parts(loaded, transformer=copy.deepcopy(loaded.transformer))
    with keep_steps(pipe) as kept, keep_steps(stays, weights="resident"):
        assert kept.placed == ("resident",)
        for each in (pipe, stays):
            each.enable_model_cpu_offload(device="cpu")
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        assert kept.placed == ("streamed",)
        with pytest.raises(ValueError, match=r"this FluxTransformer2DModel is offloaded.*say weights='streamed'"):
            run(stays)


def test_streamed_weights_become_resident_when_the_model_moved_to_where_there_is_room(pipe, monkeypatch) -> None:
    room = [False]
    monkeypatch.setattr("fluxq.runtime.originals.Originals.fits", lambda originals: room[0])
    with keep_steps(pipe) as kept:
        (switch,) = kept._put
        room[0] = True
        switch.choose()
        assert kept.placed == ("streamed",)  # nothing has moved
        switch._chosen_for = (False, torch.device("meta"))
        switch.choose()
        assert kept.placed == ("resident",)


@pytest.fixture
def graphs_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", Recorder)
    monkeypatch.setattr(graphs, "WARM_UPS", 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["captured", "kept"])
def test_captured_steps_are_two_graphs(pipe, loaded, sixteen, graphs_on_the_cpu, first) -> None:
    put = {"captured": lambda: fluxq.capture(pipe), "kept": lambda: keep_steps(pipe, weights="resident")}
    placed = {name: put[name]() for name in sorted(put, reverse=first == "kept")}
    for _ in range(2):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
    captured: Any = placed["captured"]
    assert captured.captures == 2 and sorted(row.replays for row in captured.captured) == [4, 6]
    captured.remove()
    assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


def test_what_cannot_stream_is_refused_by_name(pipe, graphs_on_the_cpu) -> None:
    with fluxq.capture(pipe), pytest.raises(ValueError, match=r"cannot be streamed: its step is captured.*'resident'"):
        keep_steps(pipe, weights="streamed")
    with (
        keep_steps(pipe, weights="streamed"),
        pytest.raises(ValueError, match=r"steps in 16 bit read weights that are"),
    ):
        fluxq.capture(pipe)
    pipe.transformer.transformer_blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"cannot be streamed: it is compiled.*weights='resident'"):
        keep_steps(pipe, weights="streamed")


def test_no_room_and_no_way_to_stream_is_said(pipe, monkeypatch) -> None:
    monkeypatch.setattr(originals, "free_bytes", lambda device: 0)
    pipe.transformer.transformer_blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"have no room beside the codes, and cannot be streamed: it is compiled"):
        keep_steps(pipe)


@pytest.mark.long
@pytest.mark.parametrize("how", ["blocks", "whole", "wrapped"])
def test_a_compiled_model_keeps_its_steps(pipe, loaded, sixteen, how) -> None:
    torch._dynamo.reset()
    counted: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counted.append(1)
        return graph

    if how == "blocks":
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    elif how == "whole":
        pipe.transformer.compile(fullgraph=True, backend=backend)
    else:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)
    with keep_steps(pipe):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        graphs_made = len(counted)
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
        assert len(counted) == graphs_made > 0
    assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "qqqqq"


def test_a_compiled_model_is_captured_before_steps_are_kept(pipe, graphs_on_the_cpu) -> None:
    pipe.transformer.compile(backend="eager")
    with keep_steps(pipe), pytest.raises(ValueError, match=r"decided before each call.*remove.*capture"):
        fluxq.capture(pipe)


@pytest.mark.slow
def test_a_copy_of_the_model_is_quantized_at_every_step(pipe, loaded, sixteen) -> None:
    with keep_steps(pipe) as kept:
        run(pipe)
        twin = with_parts(loaded, transformer=copy.deepcopy(pipe.transformer))
        seen = kept.calls
        assert kinds(run(twin), loaded.transformer, sixteen.transformer) == "qqqqq"
        assert kept.calls == seen
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"


def test_what_is_saved_is_the_checkpoint(pipe, folder, tmp_path) -> None:
    with keep_steps(pipe):
        run(pipe)
        pipe.transformer.save_pretrained(tmp_path)
    name = "diffusion_pytorch_model.safetensors"
    mine, theirs = (fluxq.base.tensors.TensorFile(where / name) for where in (tmp_path, folder / "transformer"))
    assert sorted(mine.keys()) == sorted(theirs.keys())
    assert all(torch.equal(bits(mine.get_tensor(key)), bits(theirs.get_tensor(key))) for key in mine.keys())
    said = read_json(tmp_path / "config.json")["quantization_config"]
    assert said["steps"] == {"first": 1, "last": 2, "components": "16bit"}


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# --- recipe, checkpoint, commands


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{first: 0}", "3: steps: neither `first` nor `last` names a step to keep"),
        ("{}", "3: steps: neither `first` nor `last`"),
        ("{first: -1}", r"3: steps.first: .*greater than or equal to 0, got -1"),
        ("{last: true}", "3: steps.last: .*valid integer, got True"),
        ("{first: 1, components: 8bit}", "3: steps.components: .*'16bit' or 'a16', got '8bit'"),
        ("{frist: 1}", r"3: unknown key 'frist' \(did you mean 'first'\?\)"),
        ("2", "3: steps: expected a mapping"),
    ],
)
def test_a_wrong_steps_key_is_refused_with_its_line(tmp_path, said, why) -> None:
    (tmp_path / "r.yaml").write_text(f"# for a test\nextends: fp8\nsteps: {said}\n")
    with pytest.raises(ValueError, match=why):
        load_recipe(str(tmp_path / "r.yaml"))


def test_the_key_is_read_extended_and_taken_back(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("extends: fp8\nsteps: {first: 2, last: 1, components: 16bit}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nsteps: {last: 3}\n")
    (tmp_path / "c.yaml").write_text("extends: a.yaml\nsteps: null\n")
    found = [load_recipe(str(tmp_path / f"{name}.yaml"))[1].steps for name in "abc"]
    assert found == [Steps(first=2, last=1), Steps(first=2, last=3), None]
    words = [str(Steps(first=first, last=last)) for first, last in ((1, 0), (0, 1), (2, 1), (3, 0), (1, 4))]
    assert words == [
        "the first step",
        "the last step",
        "the first 2 steps and the last",
        "the first 3 steps",
        "the first step and the last 4",
    ]


def test_a_checkpoint_records_its_steps_and_a_newer_kind_is_refused(folder, caplog) -> None:
    said = read_json(folder / "transformer" / "config.json")["quantization_config"]
    assert QuantizationConfig.from_dict(said).steps == Steps(first=1, last=2)
    assert "steps" not in said["required_features"]
    for steps_said in ({"first": 1, "components": "8bit"}, {"middle": 2}, [1], {"first": 0}):
        with pytest.raises(ValueError, match=r"which this version does not know.*update fluxq"):
            QuantizationConfig.from_dict({**said, "steps": steps_said})
    card = (folder / "README.md").read_text()
    assert "\nfluxq.keep_steps(pipe)\n```" in card
    assert "- kept in 16 bit: the first step and the last 2 of every call, by `fluxq.keep_steps(pipe)`" in card
    record = read_record(folder)
    record.recipe.steps = None  # as a checkpoint's of before
    assert "keep_steps" not in model_card(record)


def test_loading_says_once_what_it_takes(folder, caplog, monkeypatch) -> None:
    steps._tell_once.cache_clear()
    side = Side("kept", str(folder), "digest")
    with caplog.at_level(logging.WARNING, "fluxq"):
        side.open()
        assert caplog.text == ""
        for _ in range(2):
            tiny.load(folder=folder)
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "keeps the first step and the last 2 of every call" in said[0]
    assert "`fluxq.keep_steps(pipe)`" in said[0]


@pytest.mark.slow
def test_a_side_of_an_evaluation_keeps_the_steps(folder, loaded, sixteen, tmp_path) -> None:
    side = Side("kept", str(folder), "digest")
    assert kinds(run(side.open()), loaded.transformer, sixteen.transformer) == "kqqkk"
    assert Side("kept", str(folder), "digest", source="elsewhere").describe() == side.describe()
    with pytest.raises(FileNotFoundError, match=r"nowhere"):
        Side("kept", str(folder), "digest", source=str(tmp_path / "nowhere")).open()


@pytest.mark.slow
def test_the_closing_check_keeps_the_steps(tmp_path) -> None:
    (tmp_path / "all.yaml").write_text("extends: fp8\nsteps: {first: 8}\n")
    options = making.JobOptions(recipe=str(tmp_path / "all.yaml"), output=str(tmp_path / "out"))
    check = making.quantize(making.job_of(options)).check
    assert check.steps == 8 and check.psnr_db == [None] * 4  # the same images


@pytest.mark.slow
def test_a_model_quantized_while_loading_keeps_the_steps_of_the_recipe(tmp_path, sixteen) -> None:
    (tmp_path / "kept.yaml").write_text("extends: fp8\nsteps: {last: 1}\n")
    how = diffusers.PipelineQuantizationConfig(
        quant_backend="fluxq",
        quant_kwargs={"recipe": str(tmp_path / "kept.yaml")},
        components_to_quantize=["transformer"],
    )
    pipe = diffusers.FluxPipeline.from_pretrained(tiny.path(), quantization_config=how, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    other = copy.deepcopy(pipe.transformer)
    with keep_steps(pipe) as kept:
        assert kept.steps == Steps(last=1)
        assert kinds(run(pipe), other, sixteen.transformer) == "qqqqk"


@pytest.mark.slow
def test_fused_lora_files_are_in_the_16_bit_weights(tmp_path, lora_file) -> None:
    file = lora_file("style.safetensors", ADAPTED)
    options = making.JobOptions(recipe="fp8", lora=(str(file),), output=str(tmp_path / "out"), check=False)
    prepared = making.job_of(options)
    making.quantize(prepared)
    pipe, original = tiny.load(folder=tmp_path / "out"), prepared.load_reference().transformer
    other = copy.deepcopy(pipe.transformer)
    with keep_steps(pipe, first=1):
        assert kinds(run(pipe), other, original) == "kqqqq"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"style.safetensors: this LoRA was fused .* put it back"):
        keep_steps(pipe, first=1)


# --- what is refused


def test_what_keeps_no_steps_is_said(pipe, plain, sixteen) -> None:
    with pytest.raises(ValueError, match=r"recipe keeps no steps in 16 bit: say how many"):
        keep_steps(plain)
    with pytest.raises(ValueError, match=r"neither `first` nor `last`"):
        keep_steps(plain, first=0, last=0)
    with pytest.raises(
        ValueError, match=r"needs a pipeline with a scheduler and a quantized denoiser, got FluxPipeline"
    ):
        keep_steps(sixteen, first=1)
    with pytest.raises(ValueError, match=r"needs a pipeline .* got FluxTransformer2DModel"):
        keep_steps(pipe.transformer, first=1)
    with pytest.raises(ValueError, match=r"weights is 'disk', expected 'auto', 'resident' or 'streamed'"):
        keep_steps(pipe, weights="disk")  # pyright: ignore[reportArgumentType]
    with keep_steps(pipe), pytest.raises(ValueError, match=r"FluxTransformer2DModel are kept already: remove"):
        keep_steps(pipe)


def test_another_model_than_the_one_that_was_quantized_is_refused(pipe, tiny_folder, folder) -> None:
    with keep_steps(pipe, source=str(tiny_folder)):
        pass
    weights = next((tiny_folder / "transformer").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"its transformer is not what this checkpoint was made from \(SHA-256 \w{16}…"
    ):
        keep_steps(pipe, source=str(tiny_folder))
    with pytest.raises(ValueError, match=r"is quantized itself; name the 16-bit model as source="):
        keep_steps(pipe, source=str(folder))
    assert not pipe.transformer._forward_pre_hooks


@pytest.mark.slow
def test_without_a_record_weights_are_compared(pipe, tiny_folder, folder, tmp_path, loaded, sixteen) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    (tmp_path / "moved" / PLAN_FILE).unlink()
    pipe = tiny.load(folder=tmp_path / "moved")
    with pytest.raises(ValueError, match=f"is not known.*with a {PLAN_FILE} that says so: name that model's folder"):
        keep_steps(pipe)
    with keep_steps(pipe, source=str(tiny_folder)):
        assert kinds(run(pipe), loaded.transformer, sixteen.transformer) == "kqqkk"
    write_random(tiny_folder / "transformer")
    with pytest.raises(ValueError, match=r"differs from the quantized one by 1\d\d% of its size.*as source="):
        keep_steps(pipe, source=str(tiny_folder))
    write_random(tiny_folder / "transformer", num_single_layers=1)
    with pytest.raises(ValueError, match=r"holds no single_transformer_blocks\.1.*not the model that was quantized"):
        keep_steps(pipe, source=str(tiny_folder))


def write_random(folder: Path, **changed: Any) -> None:
    """A model of a folder's configuration, with weights of its own, in its place."""
    made: Any = diffusers.FluxTransformer2DModel.from_config({**read_json(folder / "config.json"), **changed})
    made.save_pretrained(folder)


def test_the_record_of_a_hub_model_is_asked_for(pipe, folder, monkeypatch) -> None:
    asked: list[tuple[str, str]] = []

    def download(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(folder / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    pipe.register_to_config(_name_or_path="someone/flux-nvfp4")
    pipe.transformer.register_to_config(_name_or_path="")
    with keep_steps(pipe):
        assert asked == [("someone/flux-nvfp4", PLAN_FILE)]
