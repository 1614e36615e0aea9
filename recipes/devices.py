"""GPUs and their abilities: a row each in DEVICES, for cost.py. Data-sheet peaks, and the fractions that kernels reach.

    attainable time = max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency))

Peaks are dense (data sheets like to quote sparse ones, which are twice as high) and accumulate in fp32 or int32. An
efficiency without a source is assumed, and everything that prints a time says so. This project measured those of an
H200. Imports no torch.

The arithmetic of a chip is in cost.py (NATIVE, EIGHT_BIT, REFERENCE), which tests hold against the kernels that were
compiled. Apple's machines are listed by their CPU: fluxq has no kernel for their GPU, and torch no float8.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fluxq.recipes.formats import FORMATS, Format


@dataclass(frozen=True)
class Efficiency:
    """The fraction of a peak that real kernels reach.

    measured: source of the fraction; "" where it is assumed.
    why: basis of an assumed one.
    """

    fraction: float
    measured: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.fraction:.2f} ({self.measured or 'assumed: ' + self.why})"


def _timed(fraction: float, tflops: float, thread: int) -> Efficiency:
    """Return an efficiency that a user measured in a product of 4096^3."""
    return Efficiency(fraction, f"{tflops} TFLOP/s at 4096^3: zzc0721/torch-performance-test-data#{thread}")


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

    chip: a name of kernels/tiles.py.
    memory: GiB, which are sold as so many GB.
    bandwidth: GB/s.
    peaks: arithmetic -> dense TFLOP/s (or TOP/s); one that is missing has no instruction.
    matmul: efficiencies, for the same keys.
    scalar_peak: fp32 TFLOP/s outside the matrix units.
    source: of peaks, memory and bandwidth.
    attention, attention_fp8: efficiencies of attention in 16 bit and in fp8.
    streaming: efficiency of kernels that only move bytes.
    scalar: efficiency of arithmetic outside the matrix units.
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
        """Return the FLOP/s that a matmul attains; ValueError where the chip has no such instruction."""
        if arithmetic not in self.peaks and arithmetic != "fp32":
            raise ValueError(f"{self.name} does not multiply {arithmetic}; it has {', '.join(self.peaks)}")
        return 1e12 * self.peaks.get(arithmetic, self.scalar_peak) * self.efficiency(arithmetic).fraction

    def efficiency(self, arithmetic: str) -> Efficiency:
        """Return what a matmul reaches; in fp32, which every chip multiplies, torch's where the row has none."""
        return self.matmul.get(arithmetic, _REFERENCE)

    def attention_flops(self, arithmetic: str) -> float:
        """Return the FLOP/s that attention attains, in "bf16" or, for fp8, in the arithmetic of such codes."""
        efficiency = self.attention if arithmetic == "bf16" else self.attention_fp8
        return 1e12 * self.peaks[arithmetic] * efficiency.fraction

    @property
    def scalar_flops(self) -> float:
        """FLOP/s in fp32 that arithmetic outside the matrix units attains."""
        return 1e12 * self.scalar_peak * self.scalar.fraction

    @property
    def instructions_per_second(self) -> float:
        """Instructions of threads that all schedulers begin: one a clock for each fp32 lane, whose peak counts two.

        GA100 begins two: schedulers for 128 threads a multiprocessor, as all have, and 64 such lanes (its white paper).
        """
        return 1e12 * self.scalar_peak / (1 if self.chip == "sm_80" else 2)

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second that a kernel attains if it only streams."""
        return 1e9 * self.bandwidth * self.streaming.fraction


def find_device(name: str) -> Device:
    """Return the row called `name`, whatever its case, spaces, dashes and maker; ValueError that lists the known ones.

    A number alone is enough: "3060", "4060 Ti", "NVIDIA GeForce RTX 3060".
    """
    devices = {spelt: device for key, device in DEVICES.items() for spelt in (_letters(key), _letters(device.name))}
    wanted = _letters(name)
    if wanted not in devices:
        near = [spelt for spelt in devices if wanted and (spelt.startswith(wanted) or wanted.startswith(spelt))]
        near = near or difflib.get_close_matches(wanted, devices, n=2, cutoff=0.7)
        keys = [key for key in DEVICES if any(devices[spelt] is DEVICES[key] for spelt in near)]
        hint = f" (did you mean {' or '.join(keys)}?)" if keys else ""
        raise ValueError(
            f"unknown GPU {name!r}{hint}; known: {', '.join(DEVICES)}; recipes/devices.py shows how to add one"
        )
    return devices[wanted]


def is_called(device: Device, name: str) -> bool:
    """Tell whether a GPU's name, as "H100 80GB HBM3" of its driver, is this row's, whatever memory either says."""
    called = _without_memory(name)
    begun = [key for key in DEVICES if called.startswith(_without_memory(key))]
    longest = max(map(_without_memory, begun), key=len, default="")
    rows = [DEVICES[key].name for key in begun if _without_memory(key) == longest]
    return device.name in rows and not re.match("ti|super|laptop|maxq", called.removeprefix(longest))


def _without_memory(name: str) -> str:
    return _letters(re.sub(r"\b\d+ ?gb\b", "", name.lower()))


def _letters(name: str) -> str:
    """Return the part of a card's name that tells it from others: its number, with the letters behind it."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|rtx|amd|radeon|instinct|\brx|apple", "", name.lower())


_ADA = {
    "bf16": _timed(0.917, 151.5, 78),
    "fp8": Efficiency(0.90, why="as bf16, whose sums halve its rate too"),
    "int8": Efficiency(0.662, why="as on an RTX 5090"),
}
_BLACKWELL = {
    # bf16 and nvfp4: total time of the three measured shapes of FLUX's size (17, 25 and 52 million weights);
    # cards clock higher than the white paper counts on.
    "bf16": Efficiency(1.001, "185 to 229 TFLOP/s at M = 4096: vllm-project/vllm#38338"),
    "fp8": Efficiency(0.942, "395 TFLOP/s, Triton at 4096x4096x8192: gau-nernst/learn-cuda, 08_row_scaled_mm"),
    "int8": Efficiency(0.662, "555 TOP/s, Triton at 4096x4096x8192: gau-nernst/learn-cuda, 08_row_scaled_mm"),
    "mxfp8": Efficiency(0.73, "1.55 times what fp8 reaches in Triton: triton-lang/triton#11320"),
    "mxfp4": Efficiency(0.472, why="as nvfp4"),
    "nvfp4": Efficiency(0.472, "758 to 815 TFLOP/s, Triton at M = 4096: vllm-project/vllm#38338"),
}


def _guessed(like: Mapping[str, Efficiency], why: str) -> dict[str, Efficiency]:
    """Return the efficiencies of the same architecture's largest card, but for bf16, of which a card has its own."""
    return {name: Efficiency(efficiency.fraction, why=why) for name, efficiency in like.items() if name != "bf16"}


class _Line(NamedTuple):
    """Cards of one architecture.

    rates: TFLOP/s by arithmetic for each of fp32 outside the matrix units, as the white paper has them. GeForce cards
        halve bf16 and fp8, whose sums are fp32; block-scaled formats have instructions that are not halved.
    matmul: efficiencies but for bf16, of which a card has its own.
    paper: source of cards with a column in the white paper.
    per_core: source of the rates of others, besides their product page.
    """

    chip: str
    rates: Mapping[str, int]
    matmul: Mapping[str, Efficiency]
    paper: str
    per_core: str


_REFERENCE = Efficiency(0.80, why="no figure found for torch")
_AMPERE_INT8 = Efficiency(0.662, why="as on an RTX 5090")
_RTX_20 = _Line(
    "sm_75",
    {"bf16": 1, "fp32": 1},  # bf16: assumed, torch widens it
    {"fp32": _REFERENCE},
    "",
    "two FLOPs a clock and core",
)
_RTX_30 = _Line(
    "sm_86",
    {"bf16": 2, "int8": 8},
    {"int8": _AMPERE_INT8},
    "NVIDIA Ampere GA102 GPU architecture white paper, dense figures",
    "rates per core of the GA102 white paper",
)
_RTX_40 = _Line(
    "sm_89",
    {"bf16": 2, "fp8": 4, "int8": 8},
    _guessed(_ADA, "as on an RTX 4090"),
    "NVIDIA Ada GPU architecture white paper, dense figures",
    "rates per core of the Ada white paper",
)
_RTX_50 = _Line(
    "sm_120",
    {"bf16": 2, "fp8": 4, "int8": 8, "mxfp8": 8, "mxfp4": 16, "nvfp4": 16},
    _guessed(_BLACKWELL, "as on an RTX 5090"),
    "NVIDIA RTX Blackwell GPU architecture white paper, dense figures",
    "rates per core of the RTX Blackwell white paper",
)


def _card(
    line: _Line,
    name: str,
    *,
    memory: float,
    bandwidth: float,
    fp32: float,
    bf16: Efficiency,
    page: tuple[int, float] | None = None,
) -> Device:
    """Return a row whose peaks follow from that of fp32.

    bf16: its efficiency.
    page: cores and GHz of the product page, for a card without a column in the white paper.
    """
    peaks = {arithmetic: fp32 * rate for arithmetic, rate in line.rates.items()}
    source = f"NVIDIA product page ({page[0]} cores, {page[1]} GHz), {line.per_core}" if page else line.paper
    return Device(name, line.chip, memory, bandwidth, peaks, {"bf16": bf16, **line.matmul}, fp32, source)


# One source for bf16 and fp8, so that their ratio is that of one machine and one shape. int8 sums are exact, fp8's here
# are not; those of fp8_1x128 move to fp32 block by block.
_H100 = Device(
    name="H100 SXM",
    chip="sm_90",
    memory=80,
    bandwidth=3350,
    peaks={"bf16": 989.4, "fp8": 1978.9, "fp8_1x128": 1978.9, "int8": 1978.9},
    matmul={
        "bf16": Efficiency(0.763, "755 TFLOP/s on an H100, 6144x8192x8192: pytorch/FBGEMM#2766"),
        "fp8": Efficiency(
            0.687, "1359 TFLOP/s, Triton, fast accumulation, on an H100, 6144x8192x8192: pytorch/FBGEMM#2766"
        ),
        "fp8_1x128": Efficiency(
            0.468, "926 TFLOP/s, Triton, sums moved to fp32, on an H100, 6144x8192x8192: pytorch/FBGEMM#2766"
        ),
        "int8": Efficiency(
            0.668, "1321 TOP/s, CUTLASS, 2048x4096x8192, on an sm_90 card without name: sgl-project/sglang#3035"
        ),
    },
    scalar_peak=67,
    source="NVIDIA H100 data sheet, sparse figures halved",
    attention=Efficiency(0.638, "631 TFLOP/s, cuDNN, (1, 24, 4608, 128) on an H100: pytorch/pytorch#142132"),
    attention_fp8=Efficiency(
        0.306, "605 TFLOP/s, Triton, 4k tokens, heads of 128 on an H100: the FlashAttention-3 paper"
    ),
)
_LIKE_3060 = Efficiency(0.953, why="as on an RTX 3060")
_LIKE_4090 = Efficiency(0.917, why="as on an RTX 4090")
_LIKE_A40 = {
    "bf16": Efficiency(0.77, why="as on an A40, 115 TFLOP/s at 4096^3: zzc0721/torch-performance-test-data#185"),
    "int8": _AMPERE_INT8,
}
_OF_A_STEP = "at the shapes of a step of FLUX.1-dev on an H200: benchmarks/h200_rates.json"
_RTX_4060_TI = _card(
    _RTX_40, "RTX 4060 Ti 16GB", memory=16, bandwidth=288, fp32=22.06, bf16=_timed(1.014, 44.7, 130), page=(4352, 2.535)
)

DEVICES = {
    "a100": Device(
        name="A100 SXM 80GB",
        chip="sm_80",
        memory=80,
        bandwidth=2039,
        peaks={"bf16": 312, "int8": 624},
        matmul={
            "bf16": Efficiency(0.869, "271 TFLOP/s, the best of many shapes: stas00/ml-engineering, accelerators"),
            "int8": Efficiency(0.80, "499 TOP/s, CUTLASS, 2048x4096x8192: sgl-project/sglang#2752"),
        },
        scalar_peak=19.5,
        source="NVIDIA A100 data sheet, dense figures",
    ),
    "h100": _H100,
    "h200": replace(
        _H100,
        name="H200 SXM",
        memory=141,
        bandwidth=4800,
        matmul={
            **_H100.matmul,
            "bf16": Efficiency(0.714, f"706 TFLOP/s, the library, {_OF_A_STEP}"),
            "fp8": Efficiency(0.695, f"1375 TFLOP/s, the library, fast accumulation, {_OF_A_STEP}"),
            "int8": Efficiency(0.465, f"920 TOP/s, our kernel, {_OF_A_STEP}"),
        },
        source="NVIDIA H200 data sheet, sparse figures halved",
        attention=Efficiency(0.659, f"652 TFLOP/s, cuDNN, {_OF_A_STEP}"),
        attention_fp8=Efficiency(0.278, f"550 TFLOP/s, our kernel of warps apart, its codes included, {_OF_A_STEP}"),
        streaming=Efficiency(0.618, f"2.97 TB/s, our passes, {_OF_A_STEP}"),
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
            # Our kernel multiplies int8, the library fp8.
            "int8": Efficiency(0.489, why="as mxfp8 in Triton, 2202 TFLOP/s at 8192^3: triton-lang/triton#9044"),
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
        peaks={"bf16": 165.2, "fp8": 330.3, "int8": 660.6},  # fp8: half of its rate with fp16 sums
        matmul=_ADA,
        scalar_peak=82.6,
        source=_RTX_40.paper,
    ),
    "rtx5090": Device(
        name="RTX 5090",
        chip="sm_120",
        memory=32,
        bandwidth=1792,
        # mxfp8 has an instruction of its own, which fp32 sums do not halve (triton-lang/triton#11320): its peak is the
        # white paper's for fp8 with fp16 sums.
        peaks={"bf16": 209.5, "fp8": 419, "int8": 838, "mxfp8": 838, "mxfp4": 1676, "nvfp4": 1676},
        matmul=_BLACKWELL,
        scalar_peak=104.8,
        source=_RTX_50.paper,
    ),
    # Cards that people own. Where the white paper has no column for one, its peaks are cores times clock of the product
    # page times the white paper's rates per core.
    "rtx3060": _card(
        _RTX_30,
        "RTX 3060 12GB",
        memory=12,
        bandwidth=360,
        fp32=12.74,
        bf16=_timed(0.953, 24.3, 131),
        page=(3584, 1.777),
    ),
    "rtx3070": _card(_RTX_30, "RTX 3070", memory=8, bandwidth=448, fp32=20.31, bf16=_LIKE_3060, page=(5888, 1.725)),
    "rtx3080": _card(_RTX_30, "RTX 3080 10GB", memory=10, bandwidth=760, fp32=29.77, bf16=_LIKE_3060),
    "rtx3080-12gb": _card(
        _RTX_30, "RTX 3080 12GB", memory=12, bandwidth=912, fp32=30.64, bf16=_LIKE_3060, page=(8960, 1.71)
    ),
    "rtx3090": _card(_RTX_30, "RTX 3090", memory=24, bandwidth=936, fp32=35.58, bf16=_LIKE_3060),
    "a10": Device(
        name="A10",
        chip="sm_86",
        memory=24,
        bandwidth=600,
        peaks={"bf16": 125, "int8": 250},
        matmul=_LIKE_A40,
        scalar_peak=31.2,
        source="NVIDIA A10 data sheet, sparse figures halved",
    ),
    "a6000": Device(
        name="RTX A6000",
        chip="sm_86",
        memory=48,
        bandwidth=768,
        peaks={"bf16": 154.8, "int8": 309.7},
        matmul=_LIKE_A40,
        scalar_peak=38.7,
        source="NVIDIA RTX A6000 data sheet, sparse figures halved",
    ),
    # No kernel was compiled for Turing: torch decodes every weight and multiplies in fp32. It has no bf16 either.
    "rtx2080": _card(_RTX_20, "RTX 2080", memory=8, bandwidth=448, fp32=10.07, bf16=_REFERENCE, page=(2944, 1.71)),
    "rtx2080ti": _card(
        _RTX_20, "RTX 2080 Ti", memory=11, bandwidth=616, fp32=13.45, bf16=_REFERENCE, page=(4352, 1.545)
    ),
    "rtx4060": _card(
        _RTX_40,
        "RTX 4060",
        memory=8,
        bandwidth=272,
        fp32=15.11,
        bf16=Efficiency(1.014, why="as on an RTX 4060 Ti"),
        page=(3072, 2.46),
    ),
    "rtx4060ti": _RTX_4060_TI,
    "rtx4060ti-8gb": replace(_RTX_4060_TI, name="RTX 4060 Ti 8GB", memory=8),
    "rtx4070": _card(_RTX_40, "RTX 4070", memory=12, bandwidth=504, fp32=29.15, bf16=_LIKE_4090, page=(5888, 2.475)),
    "rtx4080": _card(_RTX_40, "RTX 4080", memory=16, bandwidth=717, fp32=48.74, bf16=_LIKE_4090),
    "l4": Device(
        name="L4",
        chip="sm_89",
        memory=24,
        bandwidth=300,
        peaks={"bf16": 121, "fp8": 242, "int8": 242},
        matmul={  # 72 W hold it back
            "bf16": _timed(0.454, 54.9, 120),
            "fp8": Efficiency(0.454, why="as bf16"),
            "int8": Efficiency(0.454, why="as bf16"),
        },
        scalar_peak=30.3,
        source="NVIDIA L4 data sheet, sparse figures halved",
    ),
    "l40s": Device(
        name="L40S",
        chip="sm_89",
        memory=48,
        bandwidth=864,
        peaks={"bf16": 366.5, "fp8": 733, "int8": 733},
        matmul={
            "bf16": Efficiency(0.734, "269 TFLOP/s, the best of some sizes: zzc0721/torch-performance-test-data#43"),
            "fp8": Efficiency(0.734, why="as bf16"),
            "int8": Efficiency(0.662, why="as on an RTX 5090"),
        },
        scalar_peak=91.6,
        source="NVIDIA L40S data sheet, sparse figures halved",
    ),
    "rtx5060ti": _card(
        _RTX_50,
        "RTX 5060 Ti 16GB",
        memory=16,
        bandwidth=448,
        fp32=23.7,
        bf16=_timed(1.006, 47.7, 136),
        page=(4608, 2.572),
    ),
    "rtx5070": _card(
        _RTX_50, "RTX 5070", memory=12, bandwidth=672, fp32=30.87, bf16=_timed(1.039, 64.1, 194), page=(6144, 2.512)
    ),
    "rtx5070ti": _card(
        _RTX_50, "RTX 5070 Ti", memory=16, bandwidth=896, fp32=43.94, bf16=_timed(0.889, 78.1, 172), page=(8960, 2.452)
    ),
    "rtx5080": _card(_RTX_50, "RTX 5080", memory=16, bandwidth=960, fp32=56.28, bf16=_timed(0.809, 91.1, 104)),
    # No kernel was compiled for RDNA 3: torch decodes every weight and multiplies in fp32.
    "rx7900xt": Device(
        name="RX 7900 XT",
        chip="gfx1100",
        memory=20,
        bandwidth=800,
        peaks={"bf16": 103, "fp32": 51.6},
        matmul={
            "bf16": _timed(0.746, 76.9, 152),
            "fp32": _timed(0.388, 20.0, 152),
        },
        scalar_peak=51.6,
        source="AMD product page; 512 FLOPs a clock and compute unit in bf16 (AMD GPUOpen, WMMA on RDNA 3)",
    ),
    "rx7900xtx": Device(
        name="RX 7900 XTX",
        chip="gfx1100",
        memory=24,
        bandwidth=960,
        peaks={"bf16": 122.8, "fp32": 61.4},
        matmul={
            "bf16": _timed(0.809, 99.4, 58),
            "fp32": _timed(0.437, 26.8, 58),
        },
        scalar_peak=61.4,
        source="AMD product page; 512 FLOPs a clock and compute unit in bf16 (AMD GPUOpen, WMMA on RDNA 3)",
    ),
    "rx9070": Device(
        name="RX 9070",
        chip="gfx1201",
        memory=16,
        bandwidth=640,
        peaks={"bf16": 144.4, "fp8": 288.8, "int8": 288.8},
        matmul=dict.fromkeys(("bf16", "fp8", "int8"), Efficiency(0.684, why="as an RX 9070 XT in bf16")),
        scalar_peak=36.1,
        source="AMD product page, dense matrix figures: 1024 FLOPs a clock and compute unit in bf16, 2048 in 8 bits",
    ),
    "rx9070xt": Device(
        name="RX 9070 XT",
        chip="gfx1201",
        memory=16,
        bandwidth=640,
        peaks={"bf16": 194.8, "fp8": 389.6, "int8": 389.6},
        matmul={
            "bf16": _timed(0.684, 133, 173),
            "fp8": Efficiency(0.684, why="as bf16"),
            "int8": Efficiency(0.684, why="as bf16"),
        },
        scalar_peak=48.7,
        source="AMD product page, dense matrix figures: 1024 FLOPs a clock and compute unit in bf16, 2048 in 8 bits",
    ),
    "m4": Device(
        name="Apple M4 (CPU)",
        chip="apple",
        memory=32,
        bandwidth=120,
        peaks={"bf16": 2.3, "fp32": 2.3},  # bf16: assumed, torch widens it
        matmul=dict.fromkeys(("bf16", "fp32"), _REFERENCE),
        scalar_peak=1.4,
        source="fp32 as measured on its SME units (arXiv 2409.18779), Apple's specifications for memory and bandwidth",
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


def is_decoded(row: Format) -> bool:
    """Tell whether GPU kernels decode weights of a format: its element, under scales of blocks in fewer than 32 bits.

    For any other format no kernel was written: torch's reference computes it, or loading makes it int8 or fp8.
    """
    return row.element.name in KERNEL_ELEMENTS and not (row.group_size and row.scale == "fp32")


KERNEL_ELEMENTS = ("e2m1", "e4m3", "int8", "int4")
KERNEL_FORMATS = tuple(name for name, row in FORMATS.items() if is_decoded(row))


def _by_chip(*counts: float) -> dict[str, float]:
    return dict(zip(("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"), counts, strict=True))


# Instructions that our passes execute for an element on NVIDIA's chips: (what makes the input, its format) -> by chip.
# "norm" with its modulation, "activation" GELU, "concatenation" GELU beside what attention made; "quantize" makes none.
# Counted in machine code without transforms, the most of any Triton version. tests/recipes/test_instructions.py holds
# them against kernels/compiled, and says which cell stands in where none is of just that pass.
INSTRUCTIONS = {
    ("norm", "16bit"): _by_chip(21.4, 21.4, 20.8, 21.2, 19.0, 19.7),
    ("norm", "int8"): _by_chip(30.0, 30.1, 29.5, 29.4, 25.1, 28.4),
    ("norm", "fp8"): _by_chip(39.4, 39.4, 27.2, 27.5, 25.3, 26.1),
    ("norm", "fp8_tensor"): _by_chip(39.6, 39.6, 27.9, 28.8, 26.2, 27.6),
    ("norm", "fp8_1x128"): _by_chip(48.6, 48.6, 35.1, 35.9, 33.4, 34.4),
    ("norm", "mxfp8"): _by_chip(45.7, 45.7, 32.6, 33.3, 31.5, 32.6),
    ("norm", "nvfp4"): _by_chip(55.0, 55.0, 53.3, 53.3, 41.7, 42.3),
    ("norm", "mxfp4"): _by_chip(55.0, 55.0, 53.3, 53.3, 41.7, 42.3),
    ("quantize", "int8"): _by_chip(10.9, 10.9, 10.9, 11.0, 8.5, 11.5),
    ("quantize", "fp8"): _by_chip(20.8, 20.8, 8.6, 8.7, 8.8, 9.2),
    ("quantize", "fp8_tensor"): _by_chip(25.9, 24.4, 8.4, 8.1, 13.3, 12.4),
    ("quantize", "fp8_1x128"): _by_chip(24.8, 24.8, 11.8, 11.1, 10.8, 11.3),
    ("quantize", "mxfp8"): _by_chip(19.7, 19.5, 7.2, 7.2, 7.2, 7.7),
    ("quantize", "mxfp4"): _by_chip(59.4, 59.9, 59.9, 59.9, 34.2, 40.2),
    ("quantize", "nvfp4"): _by_chip(33.4, 33.5, 31.2, 30.1, 22.0, 23.4),
    ("activation", "16bit"): _by_chip(15.6, 15.6, 15.6, 15.8, 16.8, 16.8),
    ("activation", "int8"): _by_chip(20.5, 20.5, 20.5, 20.6, 18.1, 21.1),
    ("activation", "fp8"): _by_chip(30.4, 30.4, 18.2, 18.3, 18.4, 18.8),
    ("activation", "fp8_tensor"): _by_chip(35.4, 35.5, 23.2, 23.0, 23.4, 21.9),
    ("activation", "fp8_1x128"): _by_chip(34.5, 34.5, 21.3, 20.9, 20.8, 20.9),
    ("activation", "mxfp8"): _by_chip(29.9, 29.3, 17.1, 17.1, 17.2, 17.3),
    ("activation", "mxfp4"): _by_chip(69.0, 69.5, 69.5, 69.9, 43.8, 50.1),
    ("activation", "nvfp4"): _by_chip(43.3, 43.3, 41.1, 40.4, 31.5, 32.9),
    ("concatenation", "int8"): _by_chip(25.9, 25.9, 25.9, 26.2, 23.8, 26.8),
    ("concatenation", "fp8"): _by_chip(36.5, 36.5, 23.4, 23.7, 24.0, 24.3),
    ("concatenation", "fp8_tensor"): _by_chip(37.8, 37.7, 25.2, 25.2, 26.2, 25.6),
    ("concatenation", "fp8_1x128"): _by_chip(34.5, 34.5, 21.3, 20.9, 20.8, 20.9),
    ("concatenation", "mxfp8"): _by_chip(29.9, 29.3, 17.1, 17.1, 17.2, 17.3),
    ("concatenation", "mxfp4"): _by_chip(69.0, 69.5, 69.5, 69.9, 43.8, 50.1),
    ("concatenation", "nvfp4"): _by_chip(47.7, 47.7, 45.1, 44.9, 34.0, 34.6),
}
