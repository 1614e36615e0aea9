"""Errors of options at the final latents: a pipeline whose errors are known, and runs of the embedded one."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_pipelines import chroma, flux2, hunyuan_video, ltx, pixart, sana, sdxl, wan, z_image
from safetensors.torch import save_file
from torch import Tensor, nn

from fluxq import tiny
from fluxq.calibrate import adjoint as adjoint_module
from fluxq.calibrate import errors
from fluxq.calibrate.capture import Sampling, run_pipeline
from fluxq.calibrate.errors import ErrorTable, measure_errors
from fluxq.calibrate.stand_ins import Menu, module_of, replaced
from fluxq.kernels.linear import QuantLinear, in_place_of, linears_of
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.quantize.structure import model_family
from fluxq.recipes.formats import FORMATS, Scheme

FAMILY_PIPELINES = (chroma, z_image, sdxl, wan, pixart, flux2, ltx, sana, hunyuan_video)
LENGTHS = (0.5, 0.2, 0.25, 0.05)
ITEMS = [(f"{index}", index) for index in range(3)]
SAMPLING = Sampling({"num_inference_steps": 4}, 4, {"transformer": "m"})


class Field(nn.Module):
    """A velocity v = c that no latent changes, from three Linears that read constants."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.first(torch.zeros_like(x)) + self.second(torch.ones_like(x)) + self.third(torch.ones_like(x)),)


class Euler:
    """Steps of given length along the transformer's velocity; nothing else moves the latent."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.components = transformer, {"transformer": transformer}
        self.scheduler = SimpleNamespace(config={}, sigmas=torch.linspace(1, 0, 5))
        self.runs = 0

    @torch.no_grad()
    def __call__(self, *, prompt, generator, output_type, callback_on_step_end, num_inference_steps=4):
        self.runs += 1
        latents = torch.stack([torch.randn(8, generator=g) for g in generator])
        for step in range(num_inference_steps):
            latents = latents + LENGTHS[step] * self.transformer(latents)[0]
            callback_on_step_end(self, step, None, {"latents": latents})


def shifted(pipe: Euler, units: dict[str, tuple[str, ...]], by: dict[str, float]) -> Menu:
    """Options whose layers add a number to each of their outputs."""

    def layers(unit: str, option: str) -> dict[str, nn.Linear]:
        made = {}
        for name in units[unit]:
            plain = module_of(pipe, name)
            made[name] = nn.Linear(8, 8)
            made[name].load_state_dict({"weight": plain.weight, "bias": plain.bias + by[option]})
        return made

    return Menu(units, dict.fromkeys(units, tuple(by)), layers)


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    return Euler(Field())


class Linear(nn.Module):
    """A velocity v = C B A x: the latents change in proportion to a small change of a layer's output."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.third(self.second(self.first(x)).mul_(1.0)),)  # models write into outputs


def scaled(pipe: Euler, units: dict[str, tuple[str, ...]], by: dict[str, float]) -> Menu:
    """Options whose layers return their output times 1 + a number."""

    def layers(unit: str, option: str) -> dict[str, nn.Linear]:
        made = {}
        for name in units[unit]:
            made[name] = nn.Linear(8, 8, bias=False)
            made[name].load_state_dict({"weight": module_of(pipe, name).weight * (1 + by[option])})
        return made

    return Menu(units, dict.fromkeys(units, tuple(by)), layers)


def final(pipe: Euler, items) -> Tensor:
    return torch.cat([latents for _, latents in run_pipeline(pipe, items, SAMPLING.call)]).double()


UNITS = {"one": ("transformer.first",), "both": ("transformer.second", "transformer.third")}


def signal(pipe) -> float:
    noise = torch.cat([torch.randn(8, generator=torch.Generator().manual_seed(seed)) for _, seed in ITEMS])
    with torch.no_grad():
        return float((noise.view(3, 8) + pipe.transformer(noise.view(3, 8))[0]).double().square().sum())


def velocity(pipe, menu, sampling=SAMPLING, items=ITEMS, **how):
    return measure_errors(pipe, menu, items, sampling, measure="velocity", **how)


def adjoint(pipe, menu, items=ITEMS, **how) -> Any:
    return measure_errors(pipe, menu, items, SAMPLING, measure="adjoint", **how)


def test_a_shift_of_the_velocity_shifts_the_latents_by_the_lengths_of_the_steps(pipe):
    table = velocity(pipe, shifted(pipe, UNITS, {"a": 0.1, "b": -0.3}))
    assert (table.units, table.options, table.residuals) == (("one", "both"), ("a", "b"), None)
    squares = torch.tensor([[0.1, -0.3], [0.2, -0.6]], dtype=torch.float64).square()
    torch.testing.assert_close(table.error, squares * 24 / signal(pipe), rtol=1e-3, atol=0)


def test_steps_that_are_not_looked_at_count_to_the_nearest(pipe):
    """Steps 0 and 3 are looked at; each stands for two."""
    table = velocity(pipe, shifted(pipe, UNITS, {"a": 0.1}), replace(SAMPLING, steps=2))
    expected = (2 * (LENGTHS[0] + LENGTHS[3]) * 0.1) ** 2 * 24 / signal(pipe)
    assert float(table.error[0, 0]) == pytest.approx(expected, rel=1e-3)
    assert table.trajectory["steps_seen"] == [0, 3] and table.trajectory["sigmas"] == [1.0, 0.25]


def test_an_option_that_a_unit_lacks_or_that_is_not_finite_has_an_infinite_error(pipe):
    menu = shifted(pipe, UNITS, {"a": 0.1, "b": math.inf})
    table = velocity(pipe, replace(menu, options={"one": ("a", "b"), "both": ("a",)}))
    assert torch.isinf(table.error).tolist() == [[False, True], [False, True]]
    assert table.predicted({"one": "a", "both": "b"}) == table.predicted_together({"one": "b"}) == math.inf


@pytest.mark.parametrize("batch_size", [1, 2])
def test_batches_change_nothing(pipe, batch_size):
    menu = shifted(pipe, UNITS, {"a": 0.1})
    whole = velocity(pipe, menu, replace(SAMPLING, batch_size=3))
    torch.testing.assert_close(velocity(pipe, menu, replace(SAMPLING, batch_size=batch_size)).error, whole.error)


def test_finished_parts_are_kept_and_damaged_ones_measured_again(pipe, tmp_path, caplog, monkeypatch):
    menu = shifted(pipe, UNITS, {"a": 0.1, "b": -0.3})
    whole = velocity(pipe, menu)
    part = errors.VelocityErrors.part
    monkeypatch.setattr(errors.VelocityErrors, "part", lambda self, i: part(self, i) if i == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        velocity(pipe, menu, folder=tmp_path)
    done = []
    monkeypatch.setattr(errors.VelocityErrors, "part", lambda self, i: done.append(i) or part(self, i))
    assert velocity(pipe, menu, folder=tmp_path).content_digest == whole.content_digest
    assert done == [1]
    runs = pipe.runs
    assert velocity(pipe, menu, folder=tmp_path).content_digest == whole.content_digest
    assert pipe.runs == runs
    first, _ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    assert velocity(pipe, menu, folder=tmp_path).content_digest == whole.content_digest
    assert done == [1, 0] and "measured again" in caplog.text


# By the adjoint


class Pair(nn.Module):
    """A module of two tensors and a number that returns two, as joint attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: Tensor, *, other: Tensor, scale: float, mask: None = None) -> tuple[Tensor, Tensor]:
        assert mask is None
        return x @ self.weight * scale, other @ self.weight


class Joint(nn.Module):
    """A velocity from a pair; the second tensor does not depend on the latents."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        one, two = self.pair(x, other=torch.linspace(0, 1, 8), scale=0.5, mask=None)
        return (one + two,)


class Encoded(Euler):
    """Latents that begin with what another model makes of the prompt, once per image."""

    def __init__(self) -> None:
        super().__init__(Linear())
        self.encoder = nn.Sequential(nn.Linear(8, 8))
        self.components["encoder"] = self.encoder

    @torch.no_grad()
    def __call__(self, *, prompt, generator, output_type, callback_on_step_end, num_inference_steps=4):
        latents = torch.stack([torch.randn(8, generator=g) for g in generator]) + self.encoder(torch.ones(8))
        for step in range(num_inference_steps):
            latents = latents + LENGTHS[step] * self.transformer(latents)[0]
            callback_on_step_end(self, step, None, {"latents": latents})


@pytest.mark.parametrize("measure", ["adjoint", "velocity"])
def test_what_runs_once_is_measured_by_whole_runs(monkeypatch, measure):
    torch.manual_seed(0)
    pipe, twin = Encoded(), nn.Linear(8, 8)
    twin.load_state_dict(
        {"weight": pipe.encoder[0].weight, "bias": pipe.encoder[0].bias + torch.linspace(-0.1, 0.1, 8)}
    )
    units = {"one": ("transformer.first",), "encoder": ("encoder.0",)}
    inner = scaled(pipe, {"one": units["one"]}, {"a": 1e-3})

    def layers(unit: str, option: str) -> Any:
        return inner.layers(unit, option) if unit == "one" else {"encoder.0": twin}

    menu = Menu(units, dict.fromkeys(units, ("a",)), layers, once=("encoder",))
    assert menu.components == ("transformer",)
    monkeypatch.setattr(adjoint_module, "PROBES", 8)
    monkeypatch.setattr(adjoint_module, "_probes", lambda latents, _: torch.eye(8)[:, None])
    table, plain = measure_errors(pipe, menu, ITEMS, SAMPLING, measure=measure), final(pipe, ITEMS)
    with replaced(pipe, {"encoder.0": twin}):
        change = final(pipe, ITEMS) - plain
    probes = 8 if measure == "adjoint" else 1  # an axis each: the mean of squares is an eighth of the sum
    expected = float(change.square().sum() / plain.square().sum()) / probes
    assert float(table.error[1, 0]) == pytest.approx(expected, rel=1e-5) and float(table.error[0, 0]) > 0
    if table.residuals is not None:
        scale = plain.square().sum(-1).mean().sqrt()
        torch.testing.assert_close(table.residuals[1, 0], change.flatten() / scale, rtol=1e-5, atol=1e-7)


def test_a_module_may_take_and_return_several_tensors(monkeypatch):
    torch.manual_seed(0)
    pipe: Any = Euler(Joint())
    twin = Pair()
    twin.load_state_dict({"weight": pipe.transformer.pair.weight * (1 + 1e-3)})
    menu = Menu({"pair": ("transformer.pair",)}, {"pair": ("a",)}, lambda *_: {"transformer.pair": twin})
    monkeypatch.setattr(adjoint_module, "PROBES", 8)
    monkeypatch.setattr(adjoint_module, "_probes", lambda latents, _: torch.eye(8)[:, None])
    found, plain = adjoint(pipe, menu).residuals[0, 0], final(pipe, ITEMS)
    with replaced(pipe, menu.layers("pair", "a")):
        change = final(pipe, ITEMS) - plain
    expected = change.flatten() / plain.square().sum(-1).mean().sqrt()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3 * float(expected.abs().max()))


def test_a_residual_is_the_change_of_the_latents_along_its_probe(monkeypatch):
    """A probe along each axis of the latents in place of a Gaussian one: residuals are the change itself, signs too."""
    torch.manual_seed(0)
    pipe = Euler(Linear())
    monkeypatch.setattr(adjoint_module, "PROBES", 8)
    menu = scaled(pipe, UNITS, {"a": 1e-3, "b": -1e-3})
    with monkeypatch.context() as patch:
        patch.setattr(adjoint_module, "_probes", lambda latents, _: torch.eye(8)[:, None])
        table = adjoint(pipe, menu)
    plain = final(pipe, ITEMS)
    for row, unit in zip(table.residuals, UNITS, strict=True):
        for values, option in zip(row, ("a", "b"), strict=True):
            with replaced(pipe, menu.layers(unit, option)):
                change = final(pipe, ITEMS) - plain
            expected = change.flatten() / plain.square().sum(-1).mean().sqrt()
            torch.testing.assert_close(values, expected, rtol=2e-2, atol=1e-3 * float(expected.abs().max()))
    torch.testing.assert_close(table.residuals[:, 0], -table.residuals[:, 1])


@pytest.mark.slow
def test_gaussian_probes_give_the_norm_of_the_change():
    """24 images of 8 probes: a standard deviation is 10 %."""
    torch.manual_seed(0)
    pipe = Euler(Linear())
    items = [(str(index), index) for index in range(24)]
    menu = scaled(pipe, UNITS, {"a": 1e-3})
    table, plain = adjoint(pipe, menu, items), final(pipe, items)
    for unit, (error,) in zip(UNITS, table.error, strict=True):
        with replaced(pipe, menu.layers(unit, "a")):
            true = (final(pipe, items) - plain).square().sum() / plain.square().sum()
        assert float(error / true) == pytest.approx(1, abs=0.25)
    torch.testing.assert_close(table.error, table.residuals.square().mean(-1))


def test_residuals_of_layers_add_up_to_those_of_their_unit():
    torch.manual_seed(0)
    pipe = Euler(Linear())
    units = {name: (f"transformer.{name}",) for name in ("second", "third")}
    apart = adjoint(pipe, scaled(pipe, units, {"a": 0.1, "b": 0.2}))
    together = adjoint(pipe, scaled(pipe, {"both": UNITS["both"]}, {"a": 0.1, "b": 0.2}))
    torch.testing.assert_close(apart.residuals.sum(0), together.residuals[0], rtol=1e-5, atol=1e-7)
    choice = dict.fromkeys(units, "a")
    assert apart.predicted_together(choice) == pytest.approx(together.predicted({"both": "a"}), rel=1e-5)
    assert apart.predicted_together(choice) > 1.5 * apart.predicted(choice)  # both scale the same velocity


def test_each_image_has_probes_of_its_own():
    latents = torch.zeros(1, 8)
    assert not torch.equal(adjoint_module._probes(latents, 0), adjoint_module._probes(latents, 1))


def test_an_option_whose_output_is_not_finite_has_infinite_residuals():
    torch.manual_seed(0)
    pipe = Euler(Linear())
    table = adjoint(pipe, scaled(pipe, UNITS, {"a": 0.1, "b": math.inf}))
    assert torch.isinf(table.error).tolist() == [[False, True], [False, True]]
    assert torch.isfinite(table.residuals[:, 0]).all() and table.predicted_together({"one": "b"}) == math.inf


class Detached(Euler):
    """Latents without the gradient of what made them."""

    def __init__(self, transformer: nn.Module, place: str) -> None:
        super().__init__(transformer)
        self.place = place

    def __call__(self, *, prompt, generator, output_type, callback_on_step_end, num_inference_steps=4):
        latents = torch.stack([torch.randn(8, generator=g) for g in generator])
        for step in range(num_inference_steps):
            v = self.transformer(latents)[0]
            latents = latents + LENGTHS[step] * (v.detach() if self.place == "scheduler" else v)
            callback_on_step_end(self, step, None, {"latents": latents})
            latents = latents.detach() if self.place == "pipeline" else latents


class Frozen(Linear):
    """A transformer that computes without gradients."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return super().forward(x)


class Numb(Linear):
    """A transformer whose outputs do not depend on those of its layers."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + 0 * super().forward(x)[0],)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Detached(Linear(), "pipeline"), "transformer: its input at step 1 has no gradient"),
        (lambda: Detached(Linear(), "scheduler"), "transformer: its input at step 1 has no gradient"),
        (lambda: Euler(Frozen()), "transformer: its input at step 1 has no gradient"),
        (lambda: Euler(Numb()), "no layer has a gradient of the final latents other than zero"),
    ],
)
def test_a_graph_that_is_cut_is_named_with_the_cure(make, message):
    pipe = make()
    with pytest.raises(ValueError, match=rf"{message}.*measure the errors by velocity instead"):
        adjoint(pipe, scaled(pipe, UNITS, {"a": 0.1}))
    assert all(parameter.requires_grad for parameter in pipe.transformer.parameters())
    assert not any("forward" in vars(module) for module in pipe.transformer.modules())


# Both


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["velocity", "adjoint"])
def test_the_pipeline_is_left_as_it_was(measure):
    pipe = tiny.load(dtype="float32")
    model = pipe.transformer
    frozen = model.proj_out.weight.requires_grad_(False)
    before = state_of(pipe)
    call = {**tiny.CALL_KWARGS, "num_inference_steps": 2}
    menu = rounded(pipe, {"out": ("transformer.transformer_blocks.0.attn.to_out.0",)}, ("int8",))
    items = [(tiny.PROMPTS[0], 1)]
    table = measure_errors(pipe, menu, items, Sampling(call, 2, {"transformer": "m"}), measure=measure)
    assert 0 < float(table.error) < 1e-2 and not frozen.requires_grad
    assert state_of(pipe) == before
    assert torch.is_grad_enabled() and not any(p.grad is not None for p in model.parameters())


def state_of(pipe) -> list:
    """Modules, attributes that a measurement sets meanwhile, parameters, and whether these need gradients."""
    names = ("forward", "gradient_checkpointing", "_gradient_checkpointing_func", "training")
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    modules = [module for part in parts for module in part.modules()]
    return [
        (id(module), {n: v for n, v in vars(module).items() if n in names}, *map(len, hooks_of(module)))
        for module in modules
    ] + [(id(p), p.requires_grad, p._version) for part in parts for p in part.parameters()]


def hooks_of(module: nn.Module) -> tuple:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks


def rounded(pipe, units: dict[str, tuple[str, ...]], options: tuple[str, ...]) -> Menu:
    """Layers rounded to nearest."""

    def layers(unit: str, option: str) -> dict[str, nn.Module]:
        made = {}
        for name in units[unit]:
            plain, form = module_of(pipe, name), FORMATS[option]
            weight = QuantizedTensor.quantize(plain.weight.detach().flatten(1), form)
            bias = None if plain.bias is None else plain.bias.detach()
            made[name] = in_place_of(plain, QuantLinear.from_quantized(weight, bias, Scheme(form, form)))
        return made

    return Menu(units, dict.fromkeys(units, options), layers)


def true_errors(pipe, menu: Menu, items, call) -> Tensor:
    """Run the pipeline with each option of each unit alone."""

    def latents() -> Tensor:
        with torch.no_grad():
            return torch.cat([final.double().flatten() for _, final in run_pipeline(pipe, items, call)])

    plain, true = latents(), []
    for unit, options in menu.options.items():
        for option in options:
            with replaced(pipe, menu.layers(unit, option)):
                true.append((latents() - plain).square().sum() / plain.square().sum())
    return torch.stack(true).view(len(menu.units), -1)


@pytest.fixture(scope="module")
def embedded():
    """The embedded pipeline, a menu for some of its layers, images, a call, and the true errors."""
    pipe = tiny.load(dtype="float32")
    pipe.set_progress_bar_config(disable=True)
    double, single = "transformer.transformer_blocks.0", "transformer.single_transformer_blocks.2"
    units = {
        "qkv": tuple(f"{double}.attn.to_{each}" for each in "qkv"),
        "ff_down": (f"{double}.ff.net.2",),
        "text_up": (f"{double}.ff_context.net.0.proj",),
        "mixed_out": (f"{single}.proj_out",),
    }
    menu = rounded(pipe, units, ("nvfp4", "int8"))
    items = [(prompt, 100 + index) for index, prompt in enumerate(tiny.PROMPTS[:2])]
    call = {**tiny.CALL_KWARGS, "num_inference_steps": 3}
    return pipe, menu, items, call, true_errors(pipe, menu, items, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "low", "high", "farthest"), [("velocity", 0.4, 1.1, 4), ("adjoint", 0.75, 1.33, 2)]
)
def test_errors_are_near_the_true_ones(embedded, measure, low, high, farthest, monkeypatch):
    pipe, menu, items, call, true = embedded
    monkeypatch.setattr(adjoint_module, "PROBES", 32)
    table = measure_errors(pipe, menu, items, Sampling(call, 3, {"transformer": "m"}), measure=measure)
    ratios = table.error / true
    assert low < float(ratios.median()) < high
    assert 1 / farthest < float(ratios.min()) and float(ratios.max()) < farthest
    logs = torch.stack([table.error.flatten().log(), true.flatten().log()])
    assert torch.corrcoef(logs)[0, 1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("make", FAMILY_PIPELINES, ids=lambda make: make.__name__)
def test_the_adjoint_goes_through_pipelines_of_every_family(make, monkeypatch):
    """Guidance in one call and in two, schedulers of higher order, videos, lists of latents."""
    torch.manual_seed(0)
    pipe, call = make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.eval()  # no dropout
    component = "unet" if hasattr(pipe, "unet") else "transformer"
    model = getattr(pipe, component)
    places = {name: model_family(model).locate(name) for name in linears_of(model)}
    units: dict[str, tuple[str, ...]] = {}
    for name, place in places.items():
        if place is not None and place[0].role != "modulation":
            unit = f"{place[1]}.{place[0].members[0]}"
            units[unit] = (*units.get(unit, ()), f"{component}.{name}")
    menu = rounded(pipe, dict(list(units.items())[::3]), ("int8",))
    monkeypatch.setattr(adjoint_module, "PROBES", 64)
    items, call = [("a red circle", 1)], {**call, "num_inference_steps": 3}
    if make is pixart:
        call["use_resolution_binning"] = False  # no table has its size
    table = measure_errors(pipe, menu, items, Sampling(call, 3, {component: "m"}), measure="adjoint")
    true = true_errors(pipe, menu, items, call)
    ratios = table.error / true
    assert 0.6 < float(ratios.median()) < 1.67 and float(ratios.min()) > 0.25 and float(ratios.max()) < 4
    assert torch.corrcoef(torch.cat([table.error, true], 1).log().T)[0, 1] > 0.95


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        ({}, {"measure": "fisher"}, "measure 'fisher': expected one of velocity, adjoint"),
        ({"options": {}}, {}, "no unit has an option"),
        (
            {"units": {**UNITS, "two": UNITS["one"]}},
            {},
            "transformer.first is in the units one and two; a layer can be in one",
        ),
        ({"units": {"one": ("unet.first",)}}, {}, "unet: the pipeline has no such component"),
        ({}, {"items": []}, "no images to measure errors on"),
    ],
)
def test_what_cannot_be_measured_is_named(pipe, change, how, message):
    menu = replace(shifted(pipe, UNITS, {"a": 0.1}), **change)
    arguments = {"items": ITEMS, "sampling": SAMPLING, "measure": "velocity", **how}
    with pytest.raises(ValueError, match=message):
        measure_errors(pipe, menu, **arguments)


# The table


@pytest.fixture
def table():
    residuals = torch.tensor([[[1.0, -3.0], [0.5, 0.5]], [[-1.0, 3.0], [math.inf, math.inf]]], dtype=torch.float64)
    error = residuals.square().mean(-1)
    return ErrorTable(("u", "v"), ("nvfp4", "fp8"), error, residuals, "adjoint", {"items": [["a", 1]]})


def test_a_choice_costs_the_sum_of_its_errors_and_together_what_does_not_cancel(table):
    assert table.predicted({"u": "nvfp4", "v": "16bit"}) == table.predicted_together({"u": "nvfp4"}) == 5.0
    assert table.predicted({"u": "nvfp4", "v": "nvfp4"}) == 10.0
    assert table.predicted_together({"u": "nvfp4", "v": "nvfp4"}) == 0.0
    assert table.predicted({}) == table.predicted_together({"u": "16bit"}) == 0.0
    assert table.predicted_together({"u": "fp8", "v": "fp8"}) == math.inf
    for choice in ({"w": "fp8"}, {"u": "int4"}):
        with pytest.raises(ValueError, match=r"the table has the options nvfp4, fp8 of 2 units"):
            table.predicted(choice)


@pytest.mark.parametrize("with_residuals", [True, False])
def test_a_table_comes_back_as_it_was_saved(table, tmp_path, with_residuals):
    table = table if with_residuals else replace(table, residuals=None, measure="velocity")
    table.save(tmp_path / "t.safetensors", "job")
    back = ErrorTable.load(tmp_path / "t.safetensors")
    assert (back.units, back.options, back.measure, back.trajectory) == (
        table.units,
        table.options,
        table.measure,
        table.trajectory,
    )
    assert torch.equal(back.error, table.error) and back.content_digest == table.content_digest
    assert ErrorTable.stored_job(tmp_path / "t.safetensors") == "job"
    table.save(tmp_path / "again.safetensors", "job")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_or_foreign_file_is_refused_by_name(table, tmp_path):
    path = tmp_path / "t.safetensors"
    table.save(path, "job")
    data = path.read_bytes()
    for change in (bytes([data[-1] ^ 1]), b""):
        path.write_bytes(data[:-1] + change)
        with pytest.raises(ValueError, match=r"t\.safetensors: .*damaged"):
            ErrorTable.load(path)
    path.write_bytes(data.replace(b"nvfp4", b"mxfp4", 1))
    with pytest.raises(ValueError, match=r"t\.safetensors: damaged since it was written; remove it, and measure again"):
        ErrorTable.load(path)
    save_file({"error": table.error}, path)
    with pytest.raises(ValueError, match="not an error table of this version"):
        ErrorTable.load(path)
    assert ErrorTable.stored_job(path) is None
    with pytest.raises(FileNotFoundError, match="`fluxq auto` writes one"):
        ErrorTable.load(tmp_path / "none")


def test_a_table_of_other_sizes_than_its_names_is_refused(table, tmp_path):
    replace(table, units=("u", "v", "w")).save(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=r"t\.safetensors: damaged since it was written"):
        ErrorTable.load(tmp_path / "t.safetensors")


# Several processes


def test_several_processes_need_a_folder(pipe):
    several: Any = SimpleNamespace(world=2)
    with pytest.raises(ValueError, match="through a folder"):
        velocity(pipe, shifted(pipe, UNITS, {"a": 0.1}), ranks=several)


def threads(count: int) -> list[Any]:
    """Ranks of threads, which meet, agree and add as processes do."""
    barrier, words, terms = threading.Barrier(count, timeout=60), [], []

    def agree(rank: int, value: Any) -> Any:
        if rank == 0:
            words.append(json.dumps(value))
        barrier.wait()
        word = words[-1]
        barrier.wait()
        return json.loads(word)

    def total(values: Tensor) -> Tensor:
        terms.append(values)
        barrier.wait()
        result = torch.stack(terms[-count:]).sum(0)
        barrier.wait()
        return result

    return [
        SimpleNamespace(
            rank=rank,
            world=count,
            leads=rank == 0,
            share=lambda items, rank=rank: items[rank::count],
            agree=lambda value, rank=rank: agree(rank, value),
            meet=barrier.wait,
            sum=total,
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize(("measure", "parts"), [("velocity", [[0], [1]]), ("adjoint", [[0, 2], [1]])])
def test_two_processes_measure_what_one_measures(measure, parts, tmp_path, monkeypatch):
    pipes = [Euler(Linear()) for _ in range(3)]
    for other in pipes[1:]:
        other.transformer.load_state_dict(pipes[0].transformer.state_dict())
    made: dict[int, list[int]] = {}
    kind = errors.MEASURES[measure]
    part = kind.part
    note = lambda self, index: made.setdefault(pipes.index(self.pipe), []).append(index) or part(self, index)  # noqa: E731
    monkeypatch.setattr(kind, "part", note)

    def measured(pipe: Euler, **how) -> ErrorTable:
        menu = scaled(pipe, UNITS, {"a": 0.1, "b": -0.2})
        return measure_errors(pipe, menu, ITEMS, SAMPLING, measure=measure, **how)

    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(measured, pipe, folder=tmp_path, ranks=side)
            for pipe, side in zip(pipes[:2], threads(2), strict=True)
        ]
        tables = [each.result() for each in waiting]
    assert [made[0], made[1]] == parts
    assert {table.content_digest for table in tables} == {measured(pipes[2]).content_digest}
