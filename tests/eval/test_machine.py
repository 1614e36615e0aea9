"""Clocks and sensors: on this CPU, and on an NVML that the test makes up."""

import time
from types import SimpleNamespace

import pytest
import torch

from fluxq.eval.speed import machine
from fluxq.eval.speed.machine import HARDWARE, POWER_LIMIT, REASONS, THERMAL, Gpu, Sensors, machine_of


class NVMLError(Exception):
    pass


def nvml(bits=0, millijoules=None):
    """A module with NVML's own constants."""
    real = pytest.importorskip("pynvml")

    def energy(handle):
        assert handle == "GPU-1234"
        if millijoules is None:
            raise NVMLError("Not Supported")
        return millijoules

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: bits,
        nvmlDeviceGetClockInfo=lambda handle, clock: {real.NVML_CLOCK_SM: 1980}[clock],
        **{name: getattr(real, name) for name in (*REASONS, "NVML_CLOCK_SM")},
    )


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, set()),
        (0x1, set()),  # idle
        (0x4, {POWER_LIMIT}),
        (0x20, {THERMAL}),
        (0x40, {THERMAL}),
        (0x8, {HARDWARE}),
        (0x80, {HARDWARE}),
        (0x24, {POWER_LIMIT, THERMAL}),
    ],
)
def test_nvmls_bits_in_words(bits, reasons):
    assert Sensors("1234", nvml(bits)).slowdowns() == reasons


def test_energy_comes_in_millijoules_and_clocks_in_megahertz():
    sensors = Sensors("1234", nvml(millijoules=2500))
    assert sensors.joules() == 2.5 and sensors.megahertz() == 1980


def test_a_gpu_without_an_energy_counter():
    sensors = Sensors("1234", nvml(0x20))
    assert sensors.joules() is None and sensors.missing == "" and sensors.slowdowns() == {THERMAL}


def test_a_library_that_does_not_answer_says_why():
    def fails():
        raise NVMLError("Driver Not Loaded")

    sensors = Sensors("1234", SimpleNamespace(NVMLError=NVMLError, nvmlInit=fails))
    assert sensors.missing == "does not answer (Driver Not Loaded): energy and throttling are unknown"
    assert sensors.joules() is None and sensors.slowdowns() == frozenset()


def test_the_clock_on_the_wall():
    machine = machine_of("cpu")
    start = machine.mark()
    time.sleep(0.02)
    assert 0.02 <= machine.seconds(start, machine.mark()) < 1


def test_a_cpu_says_what_it_is_and_what_it_does_not_know():
    machine = machine_of("cpu")
    assert machine.about.startswith("a CPU (") and "GPU" in machine.about
    assert (machine.joules(), machine.allocated(), machine.peak(), machine.slowdowns()) == (None, None, None, set())
    found = machine.conditions()
    assert found["threads"] == str(torch.get_num_threads()) and found["torch"] == torch.__version__
    assert float(found["peak of the whole process"].removesuffix(" GB")) > 0.1


def test_nvidia_smi_is_asked_for_the_gpu_itself_and_triton_may_be_absent(monkeypatch):
    """The first GPU that torch sees may be another one for nvidia-smi."""
    seen = SimpleNamespace(name="H200", multi_processor_count=132, uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    commands = []

    def run(command, **_how):
        commands.append(command)
        return SimpleNamespace(returncode=0, stdout="570.1, " + ", ".join("1" * 6))

    monkeypatch.setattr(machine.subprocess, "run", run)
    facts = machine.describe(torch.device("cuda", 0))
    assert (facts["driver_version"], facts["triton"]) == ("570.1", "not installed")
    assert commands[0][:2] == ["nvidia-smi", "--id=GPU-1234"]


def test_tf32_is_told_in_whatever_way_it_was_set(monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda device: {})
    gpu = object.__new__(Gpu)
    gpu.device, gpu.missing = torch.device("cuda"), ""
    products = torch.backends.cuda.matmul
    at_first = products.fp32_precision
    try:
        for word in ("tf32", "none"):
            products.fp32_precision = word
            assert gpu.conditions() == {"TF32 in matmul": str(word == "tf32")}
    finally:
        products.fp32_precision = at_first


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device 'mps': times are taken on cuda and on cpu"):
        machine_of("mps")


@pytest.mark.gpu
def test_a_gpu_times_and_counts():
    machine = machine_of("cuda")
    assert isinstance(machine, Gpu)
    a = torch.randn(4096, 4096, device="cuda")
    machine.wait()
    machine.reset_peak()
    before, start = machine.allocated(), machine.mark()
    for _ in range(20):
        b = a @ a
    end = machine.mark()
    machine.wait()
    assert 0 < machine.seconds(start, end) < 5
    assert machine.peak() - before >= b.nbytes
    assert machine.slowdowns() <= {POWER_LIMIT, THERMAL, HARDWARE} and machine.conditions()["gpu"] == machine.about
