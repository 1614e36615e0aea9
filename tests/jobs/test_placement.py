"""Tests of where a job runs and what it is said to take: `--device auto`, models that do not fit, and forecasts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fluxq.base import devices
from fluxq.base.model import resolve_model
from fluxq.eval.images.sides import Side
from fluxq.jobs import forecast, making, memory, planning
from fluxq.jobs.forecast import Forecast, in_words
from fluxq.jobs.job import Job, Run
from fluxq.jobs.memory import Demand

MIB = 1 << 20


def job_on(device: str = "auto", recipe: str = "nvfp4", **options: object) -> Job:
    return making.job_of(making.JobOptions(recipe=recipe, device=device, **options), writes=False)


def settled(device: str, free: dict[str, int], monkeypatch, asked: str = "auto") -> Run:
    """A job's run on `device` of a machine with so many MiB free, by type of device."""
    job = job_on("cpu")
    monkeypatch.setattr(planning, "free_bytes", lambda place: int(MIB * free[place.type]))
    return planning.settle(replace(job, run=Run(device)), replace(job.options, device=asked), writes=True)


def test_auto_is_the_gpu_if_there_is_one(monkeypatch):
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(devices, "there_is_a_gpu", lambda there=there: there)
        assert devices.choose("auto") == device
    assert devices.describe("cpu", "auto") == "cpu (torch finds no GPU)" and devices.describe("cpu", "cpu") == "cpu"


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_is_held_to_the_bound_with_and_without_its_number(device: str, index: int, monkeypatch):
    shares = []
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=4 * MIB))
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *share: shares.append(share), raising=False)
    with memory.within(MIB, device):
        pass
    assert shares == [(0.25, index), (1.0, index)]


def test_a_model_that_fits_is_left_alone(monkeypatch, caplog):
    for asked in ("auto", "cpu"):
        assert settled("cpu", {"cpu": 1000}, monkeypatch, asked).memory is None
    assert not caplog.records


def test_with_auto_the_weights_of_a_model_that_does_not_fit_wait_for_their_turn(monkeypatch, caplog):
    run = settled("cuda", {"cuda": 47}, monkeypatch)
    assert run.device == "cuda" and run.limit == int(0.9 * 47 * MIB)
    assert "MiB are free on cuda: weights are read when it is their turn, and at most 42.3MiB are used" in caplog.text


def test_with_auto_a_gpu_without_room_is_left_alone(monkeypatch, caplog):
    run = settled("cuda", {"cuda": 4, "cpu": 1000}, monkeypatch)
    assert run == Run("cpu")
    assert "fitting transformer_blocks.0" in caplog.text and "4MiB are free: the CPU is used" in caplog.text


def test_a_model_that_fits_nowhere_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"tiny does not fit on this machine: .*MiB, for fitting .*4MiB are free; `--pro"
    ):
        settled("cpu", {"cpu": 4}, monkeypatch)


def test_a_device_of_ones_own_choice_is_kept_or_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"tiny does not fit on cuda: its weights take 3\.\dMiB, 2MiB are free; leave out"
    ):
        settled("cuda", {"cuda": 2, "cpu": 1000}, monkeypatch, "cuda")
    assert settled("cuda", {"cuda": 5}, monkeypatch, "cuda").memory is None  # what else it needs is an estimate


def test_nothing_has_to_fit_where_nothing_runs(monkeypatch):
    monkeypatch.setattr(planning, "free_bytes", lambda place: 1)
    job = making.job_of(making.JobOptions(recipe="fp8"), writes=False, runs=False)
    assert job.run.memory is None
    job = making.job_of(making.JobOptions(recipe="fp8", profile="rtn", check=False, output="not-made"))
    assert job.run.memory is None


@pytest.mark.slow
def test_a_job_within_a_bound_of_its_own_writes_the_same_bytes(monkeypatch, tmp_path, quick_recipe):
    recipe = str(quick_recipe("nvfp4", fitted=False))
    outputs = []
    job = making.job_of(making.JobOptions(recipe=recipe, output=str(tmp_path / "all"), check=False))
    demand = planning.demand(job, "cpu", writes=True)
    between = (demand.least + demand.unbounded(memory.weight_bytes(job.folder, "bfloat16"))) / 2
    for name, free in (("all", 1 << 40), ("turn", round(between / 0.9))):
        monkeypatch.setattr(planning, "free_bytes", lambda place, free=free: free)
        job = making.job_of(making.JobOptions(recipe=recipe, output=str(tmp_path / name), check=False))
        assert (job.run.memory is None) == (name == "all")
        making.quantize(job)
        outputs.append((tmp_path / name / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


# What a job is said to take


@pytest.mark.slow
def test_the_forecast_names_what_takes_long():
    job = job_on(check=True)
    told = forecast.of_quantizing(job)
    assert list(told.parts) == ["calibrating", "fitting", "closing check of 4 images"]
    assert told.parts["fitting"] > 0.4 * 16 and told.memory_bytes > 700_000_000  # sixteen groups
    rounded = forecast.of_quantizing(job_on(recipe="fp8"))
    assert list(rounded.parts) == ["closing check of 4 images"]
    assert forecast.of_quantizing(job_on(recipe="fp8", check=False)).parts == {}
    assert list(forecast.of_calibrating(job).parts) == ["calibrating"]


def test_forecast_flops_are_those_of_a_forward_pass(pipe):
    made = forecast._Forward(resolve_model("tiny"), {"height": 16, "width": 16}, "cpu", "bfloat16")
    # Of attention some releases of torch count its matrix products alone, where they stand by themselves.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        pipe("a red three", height=16, width=16, num_inference_steps=2, guidance_scale=1.0, output_type="latent")
    counted = counter.get_flop_counts()["FluxTransformer2DModel"]
    assert 2 * made.flops("transformer", 1) == pytest.approx(sum(counted.values()), rel=0.02)


def test_a_family_that_is_not_modelled_is_estimated_by_its_weights(monkeypatch):
    made = forecast._Forward(resolve_model("tiny"), {}, "cpu", "bfloat16")
    exact = made.flops("transformer", 1)

    def unknown(*_: object) -> None:
        raise ValueError("not modelled")

    monkeypatch.setattr(forecast.memory, "forward_pass_of", unknown)
    weights = sum(linear.n * linear.k for linear in made.linears["transformer"])
    assert made.flops("transformer", 1) == 2 * weights * made.tokens("transformer", 1) != exact


def test_times_are_said_as_people_say_them():
    said = [in_words(seconds) for seconds in (3, 50, 89, 100, 3600, 6000, 9000, 86400, 200_000)]
    assert said == [
        *("under a minute", "1 minute", "1 minute", "2 minutes", "60 minutes", "2 hours", "2 hours"),
        *("24 hours", "2 days"),
    ]
    assert str(Forecast({"fitting": 3.0})) == "under a minute"
    told = Forecast({"calibrating": 600, "fitting": 7200, "closing check of 4 images": 60})
    assert str(told) == "about 2 hours (calibrating 10 minutes, fitting 2 hours)"
    assert str(Forecast({"calibrating": 600})) == "about 10 minutes"


def test_the_rate_is_what_a_product_reached():
    rate = forecast.rate("cpu", "float32")
    assert 1e8 < rate < 1e13 and forecast.rate("cpu", "float32") == rate
    assert isinstance(torch.get_num_threads(), int)


def test_a_demand_says_what_needs_most():
    demand = Demand("cpu", "bfloat16", {"transformer": 5}, {}, {"running transformer": 5 * MIB, "fitting x": 9 * MIB})
    assert str(demand).endswith("for fitting x")


# Pipelines that are judged


def test_a_pipeline_to_judge_fits_or_takes_turns_or_is_computed_by_the_cpu(monkeypatch, caplog):
    folder = resolve_model("tiny")
    parts, whole = memory.part_bytes(folder), memory.stored_bytes(folder)
    assert whole == sum(parts.values()) and memory.weight_bytes(folder, "bfloat16") == pytest.approx(whole, rel=0.05)

    def placed(device: str, asked: str = "auto", **free: int) -> tuple[str, bool]:
        monkeypatch.setattr(memory, "free_bytes", lambda place: free[place.type])
        return memory.settle_pipeline(folder, device, whole, asked)

    assert placed("cuda", cuda=2 * whole) == ("cuda", False) and placed("cpu", cpu=whole) == ("cpu", False)
    assert not caplog.records
    assert placed("cuda", cuda=round(1.2 * max(parts.values()))) == ("cuda", True)
    assert "free on cuda: its parts take turns there (offload)" in caplog.text
    assert placed("cuda", cuda=max(parts.values()), cpu=2 * whole) == ("cpu", False)
    assert "too little even for its largest part: the CPU is used" in caplog.text
    with pytest.raises(ValueError, match=r"weights of tiny take 3\.\dMiB, .* free on cuda; leave out --device"):
        placed("cuda", "cuda", cuda=whole)
    with pytest.raises(ValueError, match="it does not fit on this machine"):
        placed("cpu", cpu=whole - 1)


def test_an_offloaded_side_is_loaded_on_the_cpu_and_comes_part_by_part(monkeypatch):
    came = []
    monkeypatch.setattr(DiffusionPipeline, "enable_model_cpu_offload", lambda pipe, device: came.append(device))
    side = Side("16-bit", str(resolve_model("tiny").path), "digest", offload=True)
    assert str(side.open("cuda").device) == "cpu" and came == ["cuda"]
    assert side.describe() == replace(side, offload=False).describe()
    side.open("cpu")
    assert came == ["cuda"]


def test_the_forecast_of_images_counts_runs_and_what_lies_in_memory():
    folder, items = resolve_model("tiny"), [("a red three", seed) for seed in range(8)]
    call = {"height": 16, "width": 16, "num_inference_steps": 2}
    runs = {"16 bit": (items, 1.0), "fp8": (items, forecast.QUANTIZED)}
    told = forecast.of_images(folder, call, "cpu", "bfloat16", runs)
    assert told.parts["fp8"] == pytest.approx(forecast.QUANTIZED * told.parts["16 bit"])
    both = forecast.of_images(folder, call, "cpu", "bfloat16", runs, sides=2)
    assert both.memory_bytes - told.memory_bytes == memory.weight_bytes(folder, "bfloat16")
