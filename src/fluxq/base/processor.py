"""Provenance of a result besides its inputs: commit, versions, processor and instructions.

Instructions are those that PyTorch uses in this process. Its own loops choose by ATEN_CPU_CAPABILITY, and oneDNN, which
computes products of 16-bit and int8 numbers, by ONEDNN_MAX_CPU_ISA: these may allow less than the processor has.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "diffusers", "transformers", "safetensors")
_version = cache(version)  # imported packages stay as they are, whatever is installed meanwhile
_CPUINFO = Path("/proc/cpuinfo")


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that compute and of `more`, and the kind of machine."""
    machine = f"{cpu_name()}, {os.cpu_count()} cores, {instructions()}"
    packages = {name: _version(name) for name in (*_PACKAGES, *more)}
    return {"python": platform.python_version(), **packages, "machine": machine}


def commit() -> str:
    """Return the checkout's commit, with "-dirty" if files differ from it; "unknown" outside one."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Instructions:
    """Instructions of a processor; as text: AVX512 (VNNI, BF16).

    vectors: "AVX512", "AVX2", …
    products: those that multiply numbers of 8 and 16 bits: "VNNI", "BF16", "AMX", …
    """

    vectors: str
    products: tuple[str, ...] = ()

    @property
    def multiply_bf16(self) -> bool:
        """True if PyTorch has an instruction to multiply bf16: without one bf16 becomes fp32 on its way."""
        return not {"BF16", "AMX"}.isdisjoint(self.products)

    def __str__(self) -> str:
        return f"{self.vectors} ({', '.join(self.products)})" if self.products else self.vectors


def cpu_name() -> str:
    """Return the operating system's name for the processor."""
    return _listed("model name") or platform.machine()


def flags() -> tuple[str, ...]:
    """Return the processor's instruction sets for vectors and matrices, as Linux lists them; elsewhere none."""
    listed = {*_listed("flags").split(), *_listed("Features").split()}
    return tuple(flag for flag in (*_VECTORS, *FLAGS) if flag in listed)


def instructions(environment: Mapping[str, str] = os.environ) -> Instructions:
    """Find the instructions that PyTorch uses here."""
    import torch

    vectors = torch.backends.cpu.get_cpu_capability()
    limit = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    rows = [FLAGS[flag] for flag in flags() if flag in FLAGS]
    names = [name for name, last_without in rows if limit not in _up_to(last_without)]
    return Instructions(platform.machine() if vectors == "DEFAULT" else vectors, tuple(dict.fromkeys(names)))


def _up_to(limit: str) -> tuple[str, ...]:
    """Return the values of ONEDNN_MAX_CPU_ISA that allow no more than this one."""
    return _LIMITS[: _LIMITS.index(limit) + 1] if limit else ()


def _listed(key: str) -> str:
    """Return the value of a key in /proc/cpuinfo, for the first core; empty where it is not listed."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


_VECTORS = ("avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "asimd", "sve", "sve2")
# oneDNN's names, each allowing more than the one before.
_LIMITS = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX10_1_512", "AVX512_CORE_FP16"),
)
# Flag of the processor -> its name for people, and the largest of oneDNN's limits that goes without it.
FLAGS = {
    "avx_vnni": ("VNNI", "AVX2"),
    "avx512_vnni": ("VNNI", "AVX512_CORE"),
    "avx512_bf16": ("BF16", "AVX512_CORE_VNNI"),
    "amx_bf16": ("AMX", "AVX512_CORE_FP16"),
    "amx_int8": ("AMX", "AVX512_CORE_FP16"),
    "i8mm": ("I8MM", ""),
    "bf16": ("BF16", ""),
}
