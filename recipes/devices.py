"""What GPUs can do: one row each in DEVICES, for cost.py. Data-sheet peaks, and what real kernels reach of them.

    attainable time = max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency))

Peaks are dense (data sheets like to quote sparse ones, which are twice as high) and accumulate in fp32 or int32. An
efficiency without a source is assumed, and everything that prints a time says so. Nothing here was measured by this
project. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """The fraction of a peak that real kernels reach. measured: where that was published; "" where it is assumed.

    why: for an assumed one, what the guess leans on.
    """

    fraction: float
    measured: str = ""
    why: str = ""

    @property
    def is_assumed(self) -> bool:
        return not self.measured

    def __str__(self) -> str:
        return f"{self.fraction:.2f} ({self.measured or 'assumed: ' + self.why})"


# FlashAttention-3 reached .60 of an H100's peak (4096 tokens, heads of 128: pytorch/benchmark#2391) to .75 (the best
# case of its paper).
_ATTENTION = Efficiency(0.70, why="one figure for every GPU; FlashAttention-3 reached .60 to .75 on an H100")
_ATTENTION_FP8 = Efficiency(
    0.50, why="one figure for every GPU; less than in 16 bit, because exponentials take the time they took there"
)
_STREAMING = Efficiency(0.85, why="one figure for every GPU")
_SCALAR = Efficiency(
    0.50, why="one figure for every GPU; half of the peak is multiply and add in one, which few steps are"
)


@dataclass(frozen=True)
class Device:
    """A row of DEVICES.

    chip: as kernels/chips.py calls it. memory: GB. bandwidth: GB/s. peaks: dense TFLOP/s (or TOP/s) by arithmetic;
    one that is missing has no instruction. matmul: efficiencies, for the same keys. scalar_peak: fp32 TFLOP/s outside
    the matrix units. source: where peaks, memory and bandwidth stand. attention, attention_fp8, streaming, scalar:
    efficiencies of attention in 16 bit and in fp8, of kernels that only move bytes and of arithmetic outside the matrix
    units.
    """

    name: str
    chip: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    matmul: Mapping[str, Efficiency]
    scalar_peak: float
    source: str
    attention: Efficiency = _ATTENTION
    attention_fp8: Efficiency = _ATTENTION_FP8
    streaming: Efficiency = _STREAMING
    scalar: Efficiency = _SCALAR

    def flops(self, arithmetic: str) -> float:
        """FLOP/s that a matmul attains; ValueError where the chip has no such instruction."""
        if arithmetic not in self.peaks:
            raise ValueError(f"{self.name} does not multiply {arithmetic}; it has {', '.join(self.peaks)}")
        return 1e12 * self.peaks[arithmetic] * self.matmul[arithmetic].fraction

    def attention_flops(self, arithmetic: str) -> float:
        """FLOP/s that attention attains, "bf16" or, in fp8, what the chip multiplies such codes by."""
        efficiency = self.attention if arithmetic == "bf16" else self.attention_fp8
        return 1e12 * self.peaks[arithmetic] * efficiency.fraction

    @property
    def scalar_flops(self) -> float:
        """FLOP/s in fp32 that arithmetic outside the matrix units attains."""
        return 1e12 * self.scalar_peak * self.scalar.fraction

    @property
    def bytes_per_second(self) -> float:
        """What a kernel that only streams attains."""
        return 1e9 * self.bandwidth * self.streaming.fraction


def find_device(name: str) -> Device:
    """The row called `name`, whatever its case, spaces and dashes; ValueError that lists the known ones."""
    wanted = _letters(name)
    for key, device in DEVICES.items():
        if wanted in (_letters(key), _letters(device.name)):
            return device
    raise ValueError(f"unknown GPU {name!r}; known: {', '.join(DEVICES)}; recipes/devices.py shows how to add one")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# One source for both formats, so that their ratio is that of one machine and one shape.
_HOPPER = {
    "bf16": Efficiency(0.763, "755 TFLOP/s on an H100, 6144x8192x8192: pytorch/FBGEMM#2766"),
    "fp8": Efficiency(0.687, "1359 TFLOP/s, Triton, scales per row, on an H100, 6144x8192x8192: pytorch/FBGEMM#2766"),
    "int8": Efficiency(0.687, why="as fp8"),
}
_HOPPER_PEAKS = {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}

DEVICES = {
    "a100": Device(
        name="A100 SXM 80GB",
        chip="sm_80",
        memory=80,
        bandwidth=2039,
        peaks={"bf16": 312, "int8": 624},
        matmul={
            "bf16": Efficiency(0.869, "271 TFLOP/s, the best of many shapes: stas00/ml-engineering, accelerators"),
            "int8": Efficiency(0.75, why="no figure found"),
        },
        scalar_peak=19.5,
        source="NVIDIA A100 data sheet, dense figures",
    ),
    "h100": Device(
        name="H100 SXM",
        chip="sm_90",
        memory=80,
        bandwidth=3350,
        peaks=_HOPPER_PEAKS,
        matmul=_HOPPER,
        scalar_peak=67,
        source="NVIDIA H100 data sheet, sparse figures halved",
    ),
    "h200": Device(
        name="H200 SXM",
        chip="sm_90",
        memory=141,
        bandwidth=4800,
        peaks=_HOPPER_PEAKS,
        matmul=_HOPPER,
        scalar_peak=67,
        source="NVIDIA H200 data sheet, sparse figures halved",
    ),
    "b200": Device(
        name="B200",
        chip="sm_100",
        memory=180,
        bandwidth=7670,
        peaks={"bf16": 2250, "fp8": 4500, "int8": 4500, "mxfp8": 4500, "mxfp4": 9000, "nvfp4": 9000},
        matmul={
            "bf16": Efficiency(0.627, "1410 TFLOP/s at 4096^3: pytorch/ao#2427"),
            "fp8": Efficiency(0.643, why="as mxfp8"),
            "int8": Efficiency(0.643, why="as mxfp8"),
            "mxfp8": Efficiency(0.643, "2895 TFLOP/s, cuBLAS at 8192^3: triton-lang/triton#9697"),
            "mxfp4": Efficiency(0.495, why="as nvfp4"),
            "nvfp4": Efficiency(0.495, "4460 TFLOP/s at 4096^3: pytorch/ao#2427"),
        },
        scalar_peak=75,
        source="NVIDIA HGX B200 data sheet, one GPU of eight, sparse figures halved; "
        "bandwidth as the driver reports it (pytorch/ao#4002)",
    ),
    "rtx4090": Device(
        name="RTX 4090",
        chip="sm_89",
        memory=24,
        bandwidth=1008,
        peaks={"bf16": 165.2, "fp8": 330.3, "int8": 660.6},  # fp8: half of what it does with fp16 sums
        matmul={
            "bf16": Efficiency(0.917, "151.5 TFLOP/s at 4096^3: zzc0721/torch-performance-test-data#78"),
            "fp8": Efficiency(0.90, why="as bf16, whose sums halve its rate too"),
            "int8": Efficiency(0.662, why="as on an RTX 5090"),
        },
        scalar_peak=82.6,
        source="NVIDIA Ada GPU architecture white paper, dense figures",
    ),
    "rtx5090": Device(
        name="RTX 5090",
        chip="sm_120",
        memory=32,
        bandwidth=1792,
        # mxfp8 has an instruction of its own, which fp32 sums do not halve (triton-lang/triton#11320): its peak is the
        # white paper's for fp8 with fp16 sums.
        peaks={"bf16": 209.5, "fp8": 419, "int8": 838, "mxfp8": 838, "mxfp4": 1676, "nvfp4": 1676},
        matmul={
            # bf16 and nvfp4: total time of the three measured shapes of FLUX's size (17, 25 and 52 million weights);
            # cards clock higher than the white paper counts on.
            "bf16": Efficiency(1.001, "185 to 229 TFLOP/s at M = 4096: vllm-project/vllm#38338"),
            "fp8": Efficiency(0.942, "395 TFLOP/s, Triton at 4096x4096x8192: gau-nernst/learn-cuda, 08_row_scaled_mm"),
            "int8": Efficiency(0.662, "555 TOP/s, Triton at 4096x4096x8192: gau-nernst/learn-cuda, 08_row_scaled_mm"),
            "mxfp8": Efficiency(0.73, "1.55 times what fp8 reaches in Triton: triton-lang/triton#11320"),
            "mxfp4": Efficiency(0.472, why="as nvfp4"),
            "nvfp4": Efficiency(0.472, "758 to 815 TFLOP/s, Triton at M = 4096: vllm-project/vllm#38338"),
        },
        scalar_peak=104.8,
        source="NVIDIA RTX Blackwell GPU architecture white paper, dense figures",
    ),
    "mi300x": Device(
        name="MI300X",
        chip="gfx942",
        memory=192,
        bandwidth=5300,
        peaks={"bf16": 1307.4, "int8": 2614.9},  # its fp8 has other codes (FNUZ), which no kernel here writes
        matmul={
            "bf16": Efficiency(0.511, "668 TFLOP/s, the best of many shapes: stas00/ml-engineering, accelerators"),
            "int8": Efficiency(0.511, why="as bf16"),
        },
        scalar_peak=163.4,
        source="AMD Instinct MI300X data sheet, dense figures",
    ),
    "mi355x": Device(
        name="MI355X",
        chip="gfx950",
        memory=288,
        bandwidth=8000,
        peaks={"bf16": 2516.6, "fp8": 5033.2, "int8": 5033.2, "mxfp8": 5033.2, "mxfp4": 10066.3},
        matmul={
            "bf16": Efficiency(0.576, "1450 TFLOP/s at 4096^3: gau-nernst/learn-cuda, 02_matmul_cdna4"),
            "fp8": Efficiency(0.357, why="as mxfp8"),
            "int8": Efficiency(0.357, why="as mxfp8"),
            "mxfp8": Efficiency(0.357, "1797 TFLOP/s on average: AMD-AGI/Primus-Turbo#274"),
            "mxfp4": Efficiency(0.359, "3300 TFLOP/s of an MI350X's 9200, Triton: meta-pytorch/MSLK#379"),
        },
        scalar_peak=157.3,
        source="AMD Instinct MI355X data sheet, dense figures",
    ),
}
