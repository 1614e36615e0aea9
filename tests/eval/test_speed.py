"""Times on a clock that the test turns, and a few on the real one."""

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import example_report
import pytest
import torch
from torch import nn

from fluxq import tiny
from fluxq.base.devices import Instructions
from fluxq.commands import show
from fluxq.eval.images.sides import Side
from fluxq.eval.report import markdown
from fluxq.eval.report.report import render
from fluxq.eval.report.summary import first_speed
from fluxq.eval.speed import speed
from fluxq.eval.speed.machine import HARDWARE, POWER_LIMIT, THERMAL, Machine, machine_of
from fluxq.eval.speed.speed import (
    STEP,
    TEXT,
    VAE,
    WHOLE,
    Setting,
    Timing,
    device_row,
    measure_speed,
    step_at_peak,
    summarize,
)
from fluxq.recipes.all_families import BY_CLASS
from fluxq.recipes.cards import CONTEXT
from fluxq.recipes.cost import LEVELS, cost, forward_pass
from fluxq.recipes.devices import DEVICES
from fluxq.recipes.workloads import CallSize
from fluxq.runtime import graphs

CALL = {"height": 8, "width": 8, "num_inference_steps": 4}
GIB = 2**30


class FakeMachine(Machine):
    """A machine whose clock only moves when a fake module computes. pace: how much slower than it could be."""

    def __init__(self, kind="cpu"):
        super().__init__(torch.device(kind), "a fake")
        self.now, self.pace, self.spent = 0.0, 1.0, 0.0
        self.used = self.most = 0
        self.reasons = frozenset()
        self.log = []

    def work(self, seconds):
        self.now += seconds * self.pace
        self.spent += 100 * seconds

    def mark(self):
        return self.now

    def allocated(self):
        return self.used if self.device.type == "cuda" else None

    def peak(self):
        return self.most if self.device.type == "cuda" else None

    def reset_peak(self):
        self.most = self.used

    def take(self, number):
        self.used += number
        self.most = max(self.most, self.used)

    def joules(self):
        return self.spent

    def slowdowns(self):
        return self.reasons

    def conditions(self):
        return {"clock": f"{self.now:.3f}", "name": "fake"}


class Part(nn.Module):
    def __init__(self, machine, seconds, name):
        super().__init__()
        self.machine, self.cost, self.name = machine, seconds, name
        self.weight = nn.Parameter(torch.zeros(256))  # 1024 bytes

    def forward(self, x):
        self.machine.work(self.cost() if callable(self.cost) else self.cost)
        self.machine.log.append(self.name)
        return (x.clone(),)

    def decode(self, x):
        return self.forward(x)


class FakePipe:
    def __init__(self, side, machine):
        self.side, self.machine = side, machine
        self.text_encoder = Part(machine, side.text, f"{side.name} text")
        self.transformer = Part(machine, side.step, f"{side.name} step")
        self.vae = Part(machine, side.vae, f"{side.name} vae")

    @property
    def components(self):
        return {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae, "tokenizer": None}

    def to(self, device):
        self.machine.take(-self.side.weights if device == "cpu" else self.side.weights)
        self.machine.log.append(f"{self.side.name} to {device}")

    def __call__(self, prompt, generator, output_type, callback_on_step_end, **call):
        assert output_type == "pt"
        self.side.before(len(prompt), self.machine.used)
        x = torch.zeros(len(prompt), 4)
        self.machine.take(len(prompt) * GIB)
        self.text_encoder(x)
        for step in range(call["num_inference_steps"]):
            (x,) = self.transformer(x)
            callback_on_step_end(self, step, 0, {"latents": x})
        self.vae.decode(x)
        self.machine.take(-len(prompt) * GIB)
        return SimpleNamespace(images=torch.zeros(len(prompt), 3, call["height"], call["width"]))


@dataclass
class FakeSide:
    name: str
    machine: FakeMachine
    step: object = 0.1
    text: float = 0.02
    vae: float = 0.03
    load: float = 7.0
    weights: int = 2 * GIB
    room: int = 1000 * GIB  # of the machine
    most: int = 1000  # images in a batch

    def open(self, device):
        if self.machine.used + self.weights > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it all")
        self.machine.take(self.weights)
        self.machine.work(self.load)
        return FakePipe(self, self.machine)

    def before(self, count, used):
        if count > self.most or used + count * GIB > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a batch")


class FakeVideoPipe(FakePipe):
    """Makes videos, and remembers of how many frames."""

    def __call__(self, prompt, generator, output_type, callback_on_step_end, num_frames=7, **call):
        self.machine.log.append(num_frames)
        (image,) = super().__call__(prompt, generator, output_type, callback_on_step_end, **call).images
        return SimpleNamespace(frames=image[None, None].expand(1, num_frames, *image.shape))


class FakeVideoSide(FakeSide):
    def open(self, device):
        super().open(device)
        return FakeVideoPipe(self, self.machine)


def sides(machine=None, reference=None, quantized=None):
    machine = machine or FakeMachine()
    plain = FakeSide("16-bit", machine, **({"step": 0.2} | (reference or {})))
    return machine, (plain, FakeSide("nvfp4", machine, **({"step": 0.1} | (quantized or {}))))


def measure(pair, machine, **how):
    how = {"rounds": 5, "warmup": 1} | how
    timing = Timing(**{name: value for name, value in how.items() if name != "references"})
    many = {"references": how["references"]} if "references" in how else {}
    return measure_speed(pair, ["a", "b"], CALL, timing, device=machine.device.type, machine=machine, **many)


def test_percentiles_are_those_of_linear_interpolation():
    times = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (times.n, times.p50, times.iqr) == (5, 3.0, 2.0)
    assert times.p95 == pytest.approx(4.8) and times.values == (4.0, 1.0, 3.0, 2.0, 5.0)


def test_each_stage_is_timed_apart():
    machine, pair = sides()
    found = measure(pair, machine)
    row = found.rows[1]
    assert (row.side, row.mode, row.batch, row.height, row.width, row.is_reference) == (
        "nvfp4",
        "eager",
        1,
        8,
        8,
        False,
    )
    means = {stage: times.p50 for stage, times in row.stages.items()}
    assert means == pytest.approx({TEXT: 0.02, STEP: 0.1, VAE: 0.03, WHOLE: 0.45})
    assert all(times.n == 5 and times.p50 <= times.p95 <= max(times.values) for times in row.stages.values())
    assert found.load_seconds == pytest.approx({"16-bit": 7.0, "nvfp4": 7.0})
    assert found.first_image_seconds == pytest.approx({"16-bit": 7.85, "nvfp4": 7.45})
    assert found.measured_on == "a fake" and found.conditions["name"] == "fake"
    assert found.conditions["clock"].startswith("0.000 before, ")


def test_sizes_of_videos_hold_their_frames():
    machine = FakeMachine()
    pair = [FakeVideoSide("16-bit", machine), FakeVideoSide("nvfp4", machine)]
    found = measure(pair, machine, rounds=3, sizes=[(8, 8, 5), (8, 16, 9)])
    assert [(row.height, row.width, row.frames) for row in found.rows] == [(8, 8, 5)] * 2 + [(8, 16, 9)] * 2
    assert [each.frames for each in found.speedups] == [5] * 2 + [9] * 2  # of a step, and end to end
    made = [entry for entry in machine.log if isinstance(entry, int)]
    assert made == [5] * 2 + [5] * 8 + [9] * 8  # first videos, then warm-up and rounds of either size
    machine.log.clear()
    assert {row.frames for row in measure(pair, machine, rounds=3).rows} == {7}  # the pipeline's own
    assert {entry for entry in machine.log if isinstance(entry, int)} == {7}
    _, images = sides()
    with pytest.raises(ValueError, match="a FakePipe takes no number of frames: write its size as HEIGHTxWIDTH"):
        measure(images, images[0].machine, sizes=[(8, 8, 5)])


def test_a_sleep_of_100_ms_is_reported_as_that():
    class Sleeper(FakeMachine):
        def work(self, seconds):
            time.sleep(seconds)

    machine = Sleeper()
    _, pair = sides(machine, {"step": 0.1, "text": 0, "vae": 0, "load": 0})
    call, timing = CALL | {"num_inference_steps": 1}, Timing(rounds=3, warmup=1)
    found = measure_speed(pair[:1], ["a"], call, timing, machine=machine_of("cpu"))
    times = found.rows[0].stages[STEP]
    assert times.n == 3 and min(times.values) >= 0.1
    assert times.p50 < 0.15  # within 3 ms on a quiet machine
    assert times.p50 <= times.p95 <= max(times.values) <= max(found.rows[0].stages[WHOLE].values)


def test_rounds_run_in_turns_whose_order_changes():
    machine, pair = sides()
    measure(pair, machine, rounds=4)
    whole = [name.split()[0] for name in machine.log if name.endswith("vae")]
    turns = whole[2 + 2 :]  # first images, warm-up
    assert turns == ["16-bit", "nvfp4", "nvfp4", "16-bit"] * 2


def test_what_slows_the_machine_for_a_while_cancels():
    machine, pair = sides()
    begun = []

    def slower(seconds):
        begun.append(seconds)
        machine.pace = 1 + 0.002 * (len(begun) // 8)  # a step each of both sides, four steps
        return seconds

    for side, seconds in zip(pair, (0.2, 0.1), strict=True):
        side.step = lambda seconds=seconds: slower(seconds)
    found = measure(pair, machine, rounds=8)
    step, whole = found.speedups
    assert (step.stage, whole.stage) == (STEP, WHOLE) and step.refused is None
    assert step.ratio.mean == pytest.approx(2, rel=2e-3) and step.ratio.n == 8
    assert step.ratio.high - step.ratio.low < 0.01
    assert whole.ratio.mean == pytest.approx(0.85 / 0.45, rel=4e-3)


def test_a_speedup_is_against_the_fastest_mode_of_the_16_bit_side(monkeypatch):
    machine, pair = sides()

    def halved(model):
        return Part(machine, model.cost / 4 if "16-bit" in model.name else model.cost / 2, model.name)

    monkeypatch.setitem(speed.MODES, "compiled", halved)
    found = measure(pair, machine, modes=("eager", "compiled"))
    assert len(found.rows) == 4
    ratios = {(each.mode, each.stage): (each.against, each.ratio.mean) for each in found.speedups}
    assert ratios["eager", STEP] == ("compiled", pytest.approx(0.5))
    assert ratios["compiled", STEP] == ("compiled", pytest.approx(1.0))


def with_fp32(monkeypatch, vectors, fp32, sixteen=0.2, quantized=0.1, **others):
    """Measure on a CPU with these instructions, whose fp32 step takes so long."""
    monkeypatch.setattr(speed, "instructions", lambda: vectors)
    machine, (plain, small) = sides(None, {"step": sixteen}, {"step": quantized})
    single = FakeSide("fp32", machine, step=fp32, **others)
    single.dtype = "float32"
    return measure((plain, single, small), machine, references=2)


AVX2, BF16 = Instructions("AVX2"), Instructions("AVX512", ("VNNI", "BF16"))


@pytest.mark.parametrize(("fp32", "over", "ratio"), [(0.15, "fp32", 1.5), (0.3, "16-bit", 2.0)])
def test_on_a_cpu_a_speedup_is_over_the_faster_of_fp32_and_16_bit(monkeypatch, fp32, over, ratio):
    found = with_fp32(monkeypatch, AVX2, fp32)
    assert [(row.side, row.is_reference) for row in found.rows] == [("16-bit", True), ("fp32", True), ("nvfp4", False)]
    step, _whole = found.speedups
    assert (step.over, step.ratio.mean) == (over, pytest.approx(ratio))
    assert found.conditions["baseline"] == "the faster of fp32 and 16 bit on AVX2"
    assert {card.side for card in found.cards} == {"16-bit", "nvfp4"}


@pytest.mark.parametrize("fp32", [0.15, 0.3])
def test_where_a_cpu_multiplies_bf16_fp32_is_the_baseline_and_16_bit_stands_beside_it(monkeypatch, fp32):
    found = with_fp32(monkeypatch, BF16, fp32)
    ratios = [(each.stage, each.over, each.ratio.mean) for each in found.speedups]
    assert ratios[:2] == [(STEP, "fp32", pytest.approx(10 * fp32)), (STEP, "16-bit", pytest.approx(2.0))]
    assert [each[:2] for each in ratios[2:]] == [(WHOLE, "fp32"), (WHOLE, "16-bit")]
    said = found.conditions["baseline"]
    assert said == "fp32, with 16 bit beside it: AVX512 (VNNI, BF16) multiplies bf16 by itself"


def test_where_fp32_finds_no_room_16_bit_is_what_is_left(monkeypatch):
    found = with_fp32(monkeypatch, BF16, 0.3, weights=2000 * GIB)
    assert found.rows[1].side == "fp32" and found.rows[1].missing.startswith("out of memory")
    assert {each.over for each in found.speedups} == {"16-bit"} and len(found.speedups) == 2
    assert found.conditions["baseline"] == "16-bit, the only one that could be timed"


def test_a_gpu_has_one_baseline(monkeypatch):
    monkeypatch.setattr(speed, "instructions", lambda: BF16)
    machine, pair = sides(FakeMachine("cuda"))
    found = measure(pair, machine)
    assert {each.over for each in found.speedups} == {"16-bit"} and "baseline" not in found.conditions


@pytest.mark.slow
def test_pages_and_the_terminal_name_the_baseline_and_the_instructions(monkeypatch, capsys):
    found = with_fp32(monkeypatch, BF16, 0.15)
    found = found.model_copy(update={"conditions": {**found.conditions, "instruction set": str(BF16)}})
    report = example_report.example(1)
    run = report.runs[0].model_copy(update={"speed": found})
    first = next(fact for fact in markdown.facts(run) if "end to end" in fact)
    assert first.endswith("times as fast as fp32 end to end, eager, on a CPU with AVX512 (VNNI, BF16)")
    assert first_speed(found, "16-bit").side == "16-bit"
    text = "\n".join(markdown._speed("a", found))
    assert "| fp32 (eager) |" in text and "| 16 bit (eager) |" in text
    page = render(report.model_copy(update={"runs": (run,)}))
    assert "times as fast as fp32 (eager)</b>" in page and "<td>fp32</td>" in page and "<td>16 bit</td>" in page
    show.timed(found)
    printed = capsys.readouterr().out
    assert "baseline: fp32, with 16 bit beside it" in printed and "times as fast as fp32 (eager)" in printed


def test_no_speedup_is_given_where_rounds_spread():
    machine, pair = sides()
    jitter = iter([0.1, 0.112] * 100)
    pair[1].step = lambda: next(jitter)
    pair[1].text = 0
    found = measure(pair, machine, rounds=6)
    assert found.speedups[0].refused is None  # within a call the steps' mean is steady
    slow = iter([0.0, 0.5] * 100)
    pair[1].text = lambda: next(slow)
    found = measure(pair, machine, rounds=6)
    step, whole = found.speedups
    assert step.ratio is not None and whole.ratio is None
    assert "nvfp4, eager: rounds spread by" in whole.refused and "over 5%" in whole.refused


@pytest.mark.parametrize("reason", [THERMAL, HARDWARE])
def test_no_speedup_is_given_where_the_gpu_throttled(reason):
    machine, pair = sides()
    machine.reasons = frozenset({reason})
    found = measure(pair, machine)
    assert all(each.ratio is None and reason in each.refused for each in found.speedups)
    assert found.rows[0].slowed_by == (reason,)
    assert any(reason in warning for warning in found.warnings)


def test_the_power_limit_is_only_noted():
    machine, pair = sides()
    machine.reasons = frozenset({POWER_LIMIT})
    found = measure(pair, machine)
    assert found.speedups[0].ratio is not None
    assert found.warnings == ("the GPU ran at its power limit in some rounds, as it does in large matrix products",)


def test_energy_is_that_of_one_image():
    machine, pair = sides()
    found = measure(pair, machine, batches=(1, 2))
    joules = [row.energy_joules for row in found.rows if row.side == "nvfp4"]
    assert joules == pytest.approx([45.0, 22.5])


def test_memory_at_the_peak_and_the_cards_that_hold_it():
    machine, pair = sides(FakeMachine("cuda"), {"weights": 20 * GIB}, {"weights": 9 * GIB})
    found = measure(pair, machine, batches=(1, 3))
    kilobytes = 3 * 1024
    assert [row.resident_bytes for row in found.rows] == [kilobytes] * 4
    assert [row.peak_bytes for row in found.rows] == [kilobytes + n * GIB for n in (1, 1, 3, 3)]
    lines = [(card.side, card.gigabytes, card.fits) for card in found.cards]
    assert lines[4:] == [("nvfp4", gigabytes, True) for gigabytes in (8, 12, 16, 24)]
    assert found.cards[0].basis == "peak of 1 x 8x8, eager" and found.cards[0].needed == kilobytes + GIB


def test_parts_that_take_turns_are_not_counted_twice_at_the_peak(monkeypatch):
    monkeypatch.setattr(FakePipe, "_all_hooks", ["a hook"], raising=False)
    machine, pair = sides(FakeMachine("cuda"))
    assert [row.peak_bytes for row in measure(pair, machine).rows] == [GIB, GIB]


@pytest.mark.parametrize(("needed", "fits"), [(8 * GIB - int(CONTEXT), True), (8 * GIB - int(CONTEXT) + 1, False)])
def test_what_the_driver_keeps_of_a_card_is_left_free(needed, fits):
    opened = speed.Opened("nvfp4", False, False, resident_bytes=needed)
    first = speed._cards(opened, [])[0]
    assert (first.gigabytes, first.fits) == (8, fits) and first.basis.startswith("weights alone")


def test_a_side_that_does_not_fit_gets_a_row_that_says_so():
    machine, pair = sides(FakeMachine("cuda"), {"weights": 30 * GIB, "room": 24 * GIB}, {"room": 24 * GIB})
    found = measure(pair, machine)
    plain, quantized = found.rows
    assert plain.missing.startswith("out of memory: CUDA out of memory") and not plain.stages
    assert quantized.stages and list(found.load_seconds) == ["nvfp4"]
    assert {each.refused for each in found.speedups} == {"the 16-bit side was not timed: its rows say why"}


def test_nothing_fits():
    machine, pair = sides(FakeMachine("cuda"), {"room": 0}, {"room": 0})
    with pytest.raises(RuntimeError, match="no side runs on cuda: out of memory"):
        measure(pair, machine)


def test_a_batch_that_does_not_fit_leaves_the_rest():
    machine, pair = sides(quantized={"most": 2})
    found = measure(pair, machine, batches=(1, 4))
    assert [row.missing is None for row in found.rows] == [True, True, True, False]
    assert [each.batch for each in found.speedups] == [1, 1]


def test_sides_that_only_fit_one_by_one_change_places():
    room = {"room": 10 * GIB, "weights": 6 * GIB}
    machine, pair = sides(FakeMachine("cuda"), room, room)
    found = measure(pair, machine, rounds=4)
    assert [row.missing for row in found.rows] == [None, None] and found.speedups[0].ratio.mean == pytest.approx(2)
    assert any("changed places" in warning for warning in found.warnings)
    present, moves = {"nvfp4"}, [name.split(" to ") for name in machine.log if " to " in name]
    assert moves[0] == ["nvfp4", "cpu"] and len(moves) > 4  # to make room for the 16-bit side
    for index, (side, device) in enumerate(moves):
        present = present - {side} if device == "cpu" else present | {side}
        present |= {"16-bit"} if index == 0 else set()  # loaded then
        assert len(present) <= 1
    starts = [index for index, name in enumerate(machine.log) if name.endswith(" to cuda")][1:]  # after the warm-up
    after = [machine.log[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    runs = [sum(name.endswith("vae") for name in part) for part in after]
    assert runs == [2, 3, 3, 3, 2]  # 4 rounds of 2, and one more in each turn that begins with a move


def test_a_side_that_runs_out_of_memory_later_loses_its_times():
    machine, pair = sides()
    calls = iter(range(100))

    def third_round(count, used):
        if next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. At last")

    pair[1].before = third_round
    found = measure(pair, machine)
    assert found.rows[1].missing == "out of memory: CUDA out of memory. At last" and not found.rows[1].stages
    assert found.rows[0].stages[STEP].n == 5 and found.speedups == ()


def test_what_components_share_is_counted_once():
    machine, pair = sides()
    pipe = FakePipe(pair[0], machine)
    pipe.vae.weight = pipe.transformer.weight
    pipe.vae.register_buffer("table", torch.zeros(3))
    assert speed.model_bytes(pipe.components) == 2 * 1024 + 12


def test_a_batch_that_only_fits_alone_makes_the_sides_change_places():
    room = {"room": 16 * GIB, "weights": 6 * GIB}
    machine, pair = sides(FakeMachine("cuda"), room, room)
    found = measure(pair, machine, batches=(1, 8, 16))
    assert [row.missing is None for row in found.rows] == [True, True, True, True, False, False]
    assert [row.peak_bytes for row in found.rows[2:4]] == [3 * 1024 + 8 * GIB] * 2
    assert any("changed places" in warning for warning in found.warnings)
    assert [each.batch for each in found.speedups if each.ratio] == [1, 1, 8, 8]


def test_what_compiling_said_stands_in_the_row(monkeypatch):
    def fails(model):
        raise RuntimeError("no compiler here\nmore lines")

    machine, pair = sides()
    monkeypatch.setitem(speed.MODES, "compiled", fails)
    found = measure(pair, machine, modes=("eager", "compiled", "cuda graph", "captured"))
    assert [row.missing for row in found.rows[:4]] == [
        None,
        "RuntimeError: no compiler here",
        "CUDA graphs need a CUDA device",
        "CUDA graphs need a CUDA device",
    ]
    assert len(found.speedups) == 2


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (torch.OutOfMemoryError("HIP out of memory"), "out of memory: HIP out of memory"),
        (MemoryError(), "out of memory: MemoryError"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), "out of memory: [enforce"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out of memory: CUDA error"),
        (RuntimeError("shapes cannot be multiplied"), None),
    ],
)
def test_how_libraries_say_that_memory_ran_out(problem, says):
    found = speed._out_of_memory(problem)
    assert found is None if says is None else found.startswith(says)


def test_any_other_error_is_an_error():
    machine, pair = sides()
    pair[1].before = lambda *_: (_ for _ in ()).throw(KeyError("a fault in the pipeline"))
    with pytest.raises(KeyError, match="a fault"):
        measure(pair, machine)


def test_sides_need_names_of_their_own():
    machine, pair = sides()
    with pytest.raises(ValueError, match="each with its own name"):
        measure((pair[0], replace(pair[1], name="16-bit")), machine)
    assert machine.log == []


class Shared:
    """A side whose pipeline is open already."""

    def __init__(self, name, pipe):
        self.name, self.pipe = name, pipe

    def open(self, device):
        return self.pipe


@pytest.mark.slow
def test_the_embedded_pipeline_is_timed_and_left_as_it_was(pipe, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: real(model, backend="eager", dynamic=False))
    transformer = pipe.transformer
    call = tiny.CALL_KWARGS | {"num_inference_steps": 2}
    found = measure_speed(
        [Shared("16-bit", pipe)], tiny.PROMPTS, call, Timing(("eager", "compiled"), rounds=3, warmup=1)
    )
    for row in found.rows:
        assert row.missing is None and set(row.stages) == {TEXT, STEP, VAE, WHOLE}
        rounds = zip(*(row.stages[stage].values for stage in (TEXT, STEP, VAE, WHOLE)), strict=True)
        for text, step, vae, whole in rounds:
            assert 0.2 * whole < text + 2 * step + vae < whole
    assert (found.rows[0].compile_seconds, found.rows[0].height) == (None, 16)
    assert found.rows[1].compile_seconds > 0
    assert "a CPU (" in found.measured_on and "nothing of how fast it is on a GPU" in found.measured_on
    assert pipe.transformer is transformer and "decode" not in pipe.vae.__dict__
    parts = (pipe.transformer, pipe.text_encoder, pipe.text_encoder_2)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
    weights = sum(
        p.nbytes
        for name in ("transformer", "text_encoder", "text_encoder_2", "vae")
        for p in pipe.components[name].parameters()
    )
    assert weights <= found.rows[0].resident_bytes < 1.01 * weights


def test_a_graphed_model_hands_out_copies(monkeypatch):
    buffer = torch.zeros(2)

    class Replayed(nn.Module):
        def forward(self, x):
            return (buffer.add_(1),)

    begun = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: model)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    model = speed.MODES["cuda graph"](Replayed())
    (first,), (second,) = model(None), model(None)
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2] and len(begun) == 2


class Replays:
    """Stands in for CUDA graphs, whose replays take a tenth of a second."""

    kind = "cpu"

    def __init__(self, device):
        self.device = device

    def warm_up(self, call):
        call()

    def rehearse(self, call):
        call()
        return True

    def record(self, call, beside):
        return None, call(), 0

    def replay(self, graph):
        Replays.machine.work(0.1)


@pytest.fixture
def replays_on(monkeypatch):
    """replays_on(machine) lets captured steps take their time there."""

    def put(machine):
        monkeypatch.setattr(Replays, "machine", machine, raising=False)
        monkeypatch.setattr(graphs, "CudaGraphs", Replays)

    return put


def test_captured_steps_run_beside_the_plain_ones(replays_on):
    machine, pair = sides(FakeMachine("cuda"), {"step": 0.4}, {"step": 0.3})
    replays_on(machine)
    with torch.no_grad():
        found = measure(pair, machine, modes=("eager", "captured"))
    assert [row.missing for row in found.rows] == [None] * 4
    assert [row.stages[STEP].p50 for row in found.rows] == pytest.approx([0.4, 0.1, 0.3, 0.1])
    assert found.rows[1].compile_seconds > 0 and {each.against for each in found.speedups} == {"captured"}


def test_captured_steps_give_way_where_sides_change_places(replays_on):
    room = {"room": 16 * GIB, "weights": 6 * GIB}
    machine, pair = sides(FakeMachine("cuda"), room, room)
    replays_on(machine)
    with torch.no_grad():
        found = measure(pair, machine, modes=("captured", "eager"), batches=(1, 8))
    given_up = ["change places" in (row.missing or "") for row in found.rows]
    assert given_up == [False, False, False, False, True, False, True, False]


@pytest.mark.long
def test_compiling_for_real(plain_checkpoint):
    plain = Side("16-bit", str(tiny.path()), "")
    pair = (plain, replace(plain, name="int8", folder=str(plain_checkpoint("int8"))))
    found = measure_speed(
        pair, tiny.PROMPTS, tiny.CALL_KWARGS, Timing(("eager", "compiled"), sizes=((16, 16),), rounds=5)
    )
    assert [row.missing for row in found.rows] == [None] * 4
    assert found.rows[1].compile_seconds > 0.5
    assert found.rows[2].resident_bytes < found.rows[0].resident_bytes
    assert len(found.speedups) == 4 and found.rows[1].roofline_share is None


@pytest.mark.gpu
def test_a_gpu_for_real(plain_checkpoint):
    plain = Side("16-bit", str(tiny.path()), "")
    pair = (plain, replace(plain, name="int8", folder=str(plain_checkpoint("int8"))))
    found = measure_speed(pair, tiny.PROMPTS, tiny.CALL_KWARGS, Timing(tuple(speed.MODES), rounds=5), device="cuda")
    assert [row.missing for row in found.rows] == [None] * 6
    assert all(row.peak_bytes > row.resident_bytes for row in found.rows)
    assert found.rows[2].stages[STEP].p50 < found.rows[0].stages[STEP].p50


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"),
        ("NVIDIA GeForce RTX 4070", "rtx4070"),
        ("NVIDIA GeForce RTX 4070 SUPER", None),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", None),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA L4", "l4"),
        ("Tesla M4", None),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("AMD Radeon RX 7900 GRE", None),
        ("AMD Radeon RX 9070 XT", "rx9070xt"),
        ("AMD Radeon RX 9070", "rx9070"),
    ],
)
def test_a_gpu_is_found_by_the_name_its_driver_gives(name, row):
    assert device_row(name) == (DEVICES[row] if row else None)


def test_a_step_at_the_peak_is_that_of_the_model_of_costs(pipe, plain_checkpoint):
    setting, row = Setting(2, 16, 16), DEVICES["h100"]
    flops, seconds = step_at_peak(pipe, setting, tiny.CALL_KWARGS, 2, row)
    plan = speed.plan_in_memory("transformer", pipe.transformer)
    assert not plan.quantized and {layer.role for layer in plan.layers} >= {"qkv", "mixed_out", "modulation"}
    forward = forward_pass("flux", pipe.transformer.config, CallSize(2, 16, 16, text=8), vae=pipe.vae.config)
    modelled = cost(plan, forward, row).total
    assert flops == pytest.approx(modelled.flops)
    assert 0 < seconds < min(modelled.seconds[level] for level in LEVELS)
    quantized = Side("int8", str(plain_checkpoint("int8")), "").open()
    same, shorter = step_at_peak(quantized, setting, tiny.CALL_KWARGS, 2, row)
    assert same == pytest.approx(flops) and shorter < seconds
    assert speed.plan_in_memory("transformer", quantized.transformer).quantized


def test_the_share_of_the_roofline_stands_in_the_row(pipe):
    class FakeGpu(FakeMachine):
        def mark(self):
            return time.perf_counter()

    machine = FakeGpu("cuda")
    machine.about = "NVIDIA H200"
    call = tiny.CALL_KWARGS | {"num_inference_steps": 1}
    timing = Timing(batches=(2,), rounds=3, warmup=1)
    (plain,) = measure_speed([Shared("16-bit", pipe)], ["a"], call, timing, machine=machine).rows
    flops, seconds = step_at_peak(pipe, Setting(2, 16, 16), call, 2, DEVICES["h200"])
    assert plain.flops == flops and plain.roofline_share == pytest.approx(seconds / plain.stages[STEP].p50)
    assert 0 < plain.roofline_share < 1


def test_a_model_that_is_not_modelled_has_no_share(pipe, monkeypatch):
    monkeypatch.delitem(BY_CLASS, "FluxTransformer2DModel")
    assert step_at_peak(pipe, Setting(1, 16, 16), {}, 1, DEVICES["h100"]) is None
