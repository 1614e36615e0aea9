"""Tests of free memory, and of the processor's name and the instructions that PyTorch uses on machines made up here."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import fluxq
from fluxq.base import devices
from fluxq.base.devices import Instructions, instructions, versions

EPYC = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 avx512f avx512_bf16 avx512_vnni\n\n"
XEON = "model name : Xeon\nflags : avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8\n"
LAPTOP = "model name : Core\nflags : fpu avx2 fma avx_vnni\n"
HASWELL = "model name : Haswell\nflags : avx avx2 fma\n"
GRAVITON = "processor : 0\nFeatures : fp asimd sve i8mm bf16\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def of(listing: str, capability: str) -> None:
        (tmp_path / "cpuinfo").write_text(listing)
        monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    return of


@pytest.mark.parametrize(
    ("listing", "capability", "limit", "text", "multiplies_bf16"),
    [
        (EPYC, "AVX512", "", "AVX512 (VNNI, BF16)", True),
        (EPYC, "AVX512", "DEFAULT", "AVX512 (VNNI, BF16)", True),
        (EPYC, "AVX512", "AVX512_CORE_VNNI", "AVX512 (VNNI)", False),
        (EPYC, "AVX512", "avx512_core_bf16", "AVX512 (VNNI, BF16)", True),
        (EPYC, "AVX512", "AVX512_CORE", "AVX512", False),
        (EPYC, "AVX2", "AVX2", "AVX2", False),
        (EPYC, "AVX512", "AVX2_VNNI", "AVX512", False),
        (XEON, "AVX512", "", "AVX512 (VNNI, BF16, AMX)", True),
        (XEON, "AVX512", "AVX512_CORE_FP16", "AVX512 (VNNI, BF16)", True),
        (LAPTOP, "AVX2", "", "AVX2 (VNNI)", False),
        (LAPTOP, "AVX2", "AVX2", "AVX2", False),
        (HASWELL, "AVX2", "", "AVX2", False),
        (GRAVITON, "SVE256", "", "SVE256 (I8MM, BF16)", True),
    ],
)
def test_instructions_are_those_that_are_there_and_allowed(machine, listing, capability, limit, text, multiplies_bf16):
    machine(listing, capability)
    found = instructions({"ONEDNN_MAX_CPU_ISA": limit} if limit else {})
    assert str(found) == text and found.multiply_bf16 == multiplies_bf16
    assert instructions({"DNNL_MAX_CPU_ISA": limit}) == found  # as oneDNN called it before


def test_a_system_that_lists_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_CPUINFO", tmp_path / "no such file")
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert (devices.cpu_name(), devices.flags(), instructions()) == ("arm64", (), Instructions("arm64"))


def test_flags_are_those_that_matter_in_the_order_of_their_table(machine):
    machine(EPYC, "AVX512")
    assert devices.flags() == ("avx", "avx2", "avx512f", "avx512_vnni", "avx512_bf16")
    assert devices.cpu_name() == "AMD EPYC"


@pytest.mark.slow
def test_variables_that_libraries_read_are_seen():
    code = "from fluxq.base.devices import instructions; print(instructions())"
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", code], env={**devices.os.environ, **limits}, capture_output=True)
    assert done.stdout.decode().strip() == devices.platform.machine(), done.stderr


def test_the_commit_is_unknown_where_git_is_not(monkeypatch):
    devices.commit()
    monkeypatch.setenv("PATH", "")
    assert devices.commit() == "unknown"


def test_the_version_of_the_code_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert fluxq.__version__ == project["version"]


def test_a_package_that_a_result_does_without_is_not_installed():
    assert versions("no-such-package")["no-such-package"] == "not installed"


def test_installed_versions_are_read_once(monkeypatch):
    found = versions()
    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", lambda name: 1 / 0)
    assert versions() == found


def test_free_memory_is_that_of_a_cpu_or_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    monkeypatch.setattr(devices, "_MEMORY", tmp_path / "meminfo")
    assert devices.free_bytes(torch.device("cpu")) == 50 * 1024
    assert devices.free_bytes(torch.device("mps")) is None  # the machine's memory is not that of any other device
    monkeypatch.setattr(devices, "_MEMORY", tmp_path / "no such file")
    assert devices.free_bytes(torch.device("cpu")) is None
