"""Clocks and sensors for timings, and the machine's state meanwhile: clock, memory, energy, throttling.

A GPU's clock is CUDA events in its stream, a CPU's the one on the wall. Energy and the reasons for lowered clocks come
from NVML (nvidia-ml-py); where it does not answer they are unknown, which `conditions` says.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fluxq.base.console import first_line
from fluxq.base.devices import cpu_name, instructions

# Reasons for lowered clocks, of `Machine.slowdowns`. A power limit is where large products usually run.
POWER_LIMIT = "the power limit"
THERMAL, HARDWARE = "its temperature", "a hardware slowdown"


class Machine:
    """A device and its clock: the processor that this process runs on, the clock on the wall, and no sensors."""

    def __init__(self, device: torch.device, about: str) -> None:
        self.device, self.about = device, about  # about: in words, for people

    def mark(self) -> Any:
        """Return a mark of this point of the work that was given to the device."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that `wait` has waited for."""
        return end - start

    def wait(self) -> None:
        """Wait until all work is done."""

    def allocated(self) -> int | None:
        """Return bytes of the device's memory in use by this process's tensors; None where nobody counts them."""
        return None

    def peak(self) -> int | None:
        """Return the most that `allocated` was since `reset_peak`."""
        return None

    def reset_peak(self) -> None:
        """Begin to measure the peak anew."""

    def release(self) -> None:
        """Give memory back that no tensor uses."""

    def joules(self) -> float | None:
        """Return the energy that the device has used since some moment."""
        return None

    def slowdowns(self) -> frozenset[str]:
        """Return the reasons for lowered clocks, now: of POWER_LIMIT, THERMAL and HARDWARE."""
        return frozenset()

    def megahertz(self) -> float | None:
        """Return the clock of the device's processors, now; None where nobody says."""
        return None

    def conditions(self) -> dict[str, str]:
        """Return the conditions that times depend on, as they are now.

        Of a CPU's memory only the peak of the whole process is known, libraries included.
        """
        threads = str(torch.get_num_threads())
        conditions = {"torch": str(torch.__version__), "threads": threads, "instruction set": str(instructions())}
        peak = _process_peak()
        return conditions | ({"peak of the whole process": f"{peak / 1e9:.2f} GB"} if peak else {})


def machine_of(device: str) -> Machine:
    """Return a device's machine; ValueError for one that is neither a CPU nor a CUDA (or ROCm) GPU."""
    place = torch.device(device)
    if place.type == "cuda":
        return Gpu(place)
    if place.type != "cpu":
        raise ValueError(f"device {device!r}: times are taken on cuda and on cpu; give one of them")
    processor = f"{cpu_name()}, {instructions()}, {torch.get_num_threads()} of its threads"
    return Machine(torch.device("cpu"), f"a CPU ({processor}); this says nothing of how fast it is on a GPU")


class Sensors:
    """NVML's view of one GPU. missing: why it does not answer, "" if it does. nvml: the module, for tests."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self.missing, self.handle, self.nvml = "", None, nvml
        try:
            if self.nvml is None:
                import pynvml

                self.nvml = pynvml
            self.nvml.nvmlInit()
            self.handle = self.nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception as problem:  # NVMLError has no base that exists without the library
            self.missing = f"does not answer ({first_line(problem)}): energy and throttling are unknown"

    def joules(self) -> float | None:
        """Return NVML's count since the driver was loaded; None on GPUs that do not count."""
        millijoules = self._ask(lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))
        return None if millijoules is None else millijoules / 1e3

    def slowdowns(self) -> frozenset[str]:
        bits = self._ask(lambda: self.nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle))
        return frozenset(reason for name, reason in REASONS.items() if bits and bits & getattr(self.nvml, name))

    def megahertz(self) -> float | None:
        return self._ask(lambda: self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))

    def _ask(self, question: Callable[[], int]) -> int | None:
        if self.missing:
            return None
        try:
            return question()
        except self.nvml.NVMLError:  # this GPU or driver does not have it
            return None


class Gpu(Sensors, Machine):
    """A CUDA or ROCm device."""

    def __init__(self, device: torch.device) -> None:
        device = torch.device("cuda", device.index or 0)
        Machine.__init__(self, device, torch.cuda.get_device_name(device))
        Sensors.__init__(self, str(torch.cuda.get_device_properties(device).uuid))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def release(self) -> None:
        gc.collect()  # a pipeline's parts may hold each other
        torch.cuda.empty_cache()

    def conditions(self) -> dict[str, str]:
        conditions = {name: str(value) for name, value in describe(self.device).items()}
        products: Any = torch.backends.cuda.matmul  # whose `allow_tf32` raises where the newer word for it was set
        conditions["TF32 in matmul"] = str(products.fp32_precision == "tf32")
        return conditions | ({"NVML": self.missing} if self.missing else {})


def describe(device: torch.device) -> dict[str, Any]:
    """Return the conditions of a timing: GPU, driver, clocks and power as they are now, and versions."""
    triton = import_module("triton").__version__ if find_spec("triton") else "not installed"
    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton, "cuda": torch.version.cuda}
    if device.type != "cuda":
        return {"gpu": "none", **facts}
    properties = torch.cuda.get_device_properties(device)
    facts = {"gpu": properties.name, "multiprocessors": properties.multi_processor_count, **facts}
    return facts | _query(str(properties.uuid))


def _query(uuid: str) -> dict[str, str]:
    """Return what nvidia-smi, which numbers GPUs otherwise, says of one, by field; empty if it is absent or fails."""
    fields = "driver_version clocks.sm clocks.mem clocks.max.sm power.limit power.draw temperature.gpu".split()
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else {}


def _process_peak() -> int | None:
    """Return the peak of this process in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else 1024 * peak


# NVML's name -> its meaning.
REASONS = {
    "nvmlClocksEventReasonSwPowerCap": POWER_LIMIT,
    "nvmlClocksEventReasonSwThermalSlowdown": THERMAL,
    "nvmlClocksEventReasonHwThermalSlowdown": THERMAL,
    "nvmlClocksEventReasonHwSlowdown": HARDWARE,
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": HARDWARE,
}
