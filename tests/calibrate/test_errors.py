"""Errors of options at the final latents: a pipeline whose errors are known, and runs of the embedded one."""

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fluxq.calibrate import errors
from fluxq.calibrate.capture import Sampling
from fluxq.calibrate.errors import ErrorTable, measure_errors
from fluxq.calibrate.stand_ins import Menu, module_of

LENGTHS = (0.5, 0.2, 0.25, 0.05)
ITEMS = [(f"{index}", index) for index in range(3)]
SAMPLING = Sampling({"num_inference_steps": 4}, 4, {"transformer": "m"})


class Field(nn.Module):
    """A velocity v = c that no latent changes, from two Linears that read the latent and a constant."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.first(torch.zeros_like(x)) + self.second(torch.ones_like(x)),)


class Euler:
    """Steps of given length along the transformer's velocity; nothing else moves the latent."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer
        self.scheduler = SimpleNamespace(config={}, sigmas=torch.linspace(1, 0, 5))
        self.runs = 0

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


UNITS = {"one": ("transformer.first",), "both": ("transformer.first", "transformer.second")}


def signal(pipe) -> float:
    noise = torch.cat([torch.randn(8, generator=torch.Generator().manual_seed(seed)) for _, seed in ITEMS])
    with torch.no_grad():
        return float((noise.view(3, 8) + pipe.transformer(noise.view(3, 8))[0]).double().square().sum())


def velocity(pipe, menu, sampling=SAMPLING, items=ITEMS, **how):
    return measure_errors(pipe, menu, items, sampling, measure="velocity", **how)


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


def test_the_pipeline_is_left_as_it_was(pipe):
    before = {name: id(module) for name, module in pipe.transformer.named_modules()}
    velocity(pipe, shifted(pipe, UNITS, {"a": 0.1}))
    assert {name: id(module) for name, module in pipe.transformer.named_modules()} == before
    assert "forward" not in vars(pipe.transformer)


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        ({}, {"measure": "fisher"}, "measure 'fisher': expected one of velocity"),
        ({"options": {}}, {}, "no unit has an option"),
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


def test_several_processes_need_a_folder(pipe):
    with pytest.raises(ValueError, match="through a folder"):
        velocity(pipe, shifted(pipe, UNITS, {"a": 0.1}), ranks=SimpleNamespace(world=2))
    assert "folder" in inspect.signature(measure_errors).parameters
