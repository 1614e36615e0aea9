"""Chooses what computes a quantized Linear on a GPU, from what was compiled and what was measured.

    int8 x int8, fp8 x fp8                        scaled_matmul, or the library's product
    nvfp4, mxfp8, mxfp4 by themselves             block_scaled_matmul, where the chip has it
    4-bit weights x int8 or fp8                   w4a8_matmul: how `prepare` holds them for `prefer: memory`
    anything else                                 weight_only_matmul: activations keep their 16 bit

Of a scheme's candidates the first that is offered on the chip is taken: kernels/compiled says where a kernel runs on
the right matrix unit without spilling, KERNELS what each is for. Timings in kernels/measured.json, where there are any
of that chip, decide between candidates of one arithmetic. Nothing is tuned or compiled here: see `fluxq warmup`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from fluxq.base.console import logger
from fluxq.kernels.accepted import PROVEN, Row, accepted_files, minor
from fluxq.kernels.chips import CHIPS
from fluxq.kernels.weight_only_matmul.kernel import LARGEST_GEMV
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Scheme


@dataclass(frozen=True)
class Kernel:
    """The kernel of a torch.library op. file: where it is. formats: what its tuned tiles are called by.

    how: "native" multiplies codes on matrix units of their own kind, "decode" turns them into another type first,
    "memory" moves data and multiplies little. elsewhere: why there are no tiles for some chips.
    """

    op: str
    file: str
    formats: tuple[str, ...]
    how: str
    elsewhere: str = ""


@dataclass(frozen=True)
class Offer:
    """Offer of a kernel for a format on a chip. how: as in Kernel, None where it is not offered; reason: why not."""

    how: str | None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """Implementation of a Linear. implementation: a kernel, "torch._int_mm", "F.scaled_mm" or "torch reference".

    activations: the format that x is rounded to first, None for none. reason: why this, and not what stands before it.
    fallback: the scheme's own arithmetic is not to be had on this chip.
    """

    implementation: str
    activations: str | None
    reason: str
    fallback: bool = False


@functools.cache
def offer(op: str, format: str, chip: str) -> Offer:
    """Return the offer of an op's kernel on a chip, by the accepted rows of this Triton version."""
    row = kernel_row(op)
    if format in FORMATS and format not in KERNEL_FORMATS:
        return Offer(None, f"no kernel was written for {format}")
    if format not in row.formats:
        return Offer(None, f"{op} has no {format}")
    if chip not in CHIPS:
        return Offer(None, f"never compiled for {chip}")
    rows = _rows(compiled_with()).get((row.file, format, chip), ())
    if not rows:
        return Offer(None, row.elsewhere or f"no tile for {chip} was compiled with Triton {compiled_with()}")
    bad = next((found for found in rows if not found.ok), None)
    return Offer(row.how) if bad is None else Offer(None, bad.reason or "it did not compile")


@functools.lru_cache(4096)
def choose(
    scheme: Scheme, chip: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, row_scale: bool = False
) -> Choice:
    """Choose what computes m tokens of `dtype` under a scheme on a chip; the torch reference if no candidate can.

    row_scale: the layer holds the 8-bit scales per row that W4A8 needs.
    """
    offered: list[Choice] = []
    refused: list[str] = []
    for candidate in _candidates(scheme, row_scale):
        why_not = _why_not(candidate, scheme, chip, m, n, k, dtype)
        if not why_not and (not offered or candidate.activations == offered[0].activations):
            offered.append(candidate)  # what comes later with other activations is another arithmetic
        elif not offered:
            refused.append(f"not {candidate.implementation}: {why_not}")
    if not offered:
        return Choice("torch reference", _own(scheme), "; ".join(refused), fallback=True)
    best = _fastest(offered, scheme, chip, m, n, k)
    is_fallback = best.activations != _own(scheme)
    return replace(best, reason="; ".join([best.reason, *refused]), fallback=is_fallback)


def _own(scheme: Scheme) -> str | None:
    return scheme.activations.name if scheme.activations else None


def _candidates(scheme: Scheme, row_scale: bool) -> list[Choice]:
    """In the order of preference; launch.py runs them."""
    weights, activations = scheme.weights.name, _own(scheme)
    found = []
    if weights == activations == "fp8":
        found.append(Choice("F.scaled_mm", "fp8", "the library's product with a scale per row"))
    if weights == activations and weights in kernel_row("scaled_matmul").formats:
        found.append(Choice("scaled_matmul", weights, f"{weights} matrix units"))
    if weights == activations == "int8":
        found.append(Choice("torch._int_mm", "int8", "the library's exact integer product"))
    if weights == activations and weights in kernel_row("block_scaled_matmul").formats:
        found.append(Choice("block_scaled_matmul", weights, f"{weights} matrix units"))
    if row_scale and f"{weights}-{activations}" in kernel_row("w4a8_matmul").formats:
        found.append(Choice("w4a8_matmul", activations, f"4-bit weights become {activations} in the kernel"))
    found.append(Choice("weight_only_matmul", None, "weights are decoded in the kernel, activations keep 16 bit"))
    return found


def _why_not(candidate: Choice, scheme: Scheme, chip: str, m: int, n: int, k: int, dtype: torch.dtype) -> str:
    """Return the reason why a candidate cannot serve; empty if it can."""
    if candidate.implementation == "weight_only_matmul" and dtype == torch.float32:
        row_bytes = k * scheme.weights.element.bits // 8
        if m > LARGEST_GEMV or row_bytes % 4:
            return "matrix units would round float32 activations"
    if candidate.implementation in ("F.scaled_mm", "torch._int_mm"):
        quantizer = offer("quantize_activation", str(candidate.activations), chip)
        if not quantizer.how:
            return f"activations cannot be quantized there: {quantizer.reason}"
    if candidate.implementation == "F.scaled_mm":
        if chip not in ("sm_90", "sm_100", "sm_103"):  # cuBLASLt's scales per row begin with Hopper
            return f"the library has no fp8 product with a scale per row for {chip}"
        if dtype != torch.bfloat16:
            return "the library's product with a scale per row is bfloat16 only"
        return "" if n % 16 == 0 and k % 16 == 0 else f"N and K must be multiples of 16, they are {n} and {k}"
    if candidate.implementation == "torch._int_mm":
        fits = chip.startswith("sm_") and m > 16 and n % 8 == 0 and k % 8 == 0
        return "" if fits else "only for CUDA, more than 16 tokens, and N and K in multiples of 8"
    decoded_to = f"-{candidate.activations}" if candidate.implementation == "w4a8_matmul" else ""
    return offer(candidate.implementation, scheme.weights.name + decoded_to, chip).reason


def _fastest(candidates: list[Choice], scheme: Scheme, chip: str, m: int, n: int, k: int) -> Choice:
    """The first, unless another was measured to be faster on this chip at the nearest shape."""
    name = f"{scheme.weights.name}-{_own(scheme) or '16bit'}"
    rows = [row for row in _measured() if row["chip"] == chip and row["scheme"] == name]
    if not rows:
        return candidates[0]
    shapes = {(row["m"], row["n"], row["k"]) for row in rows}
    nearest = min(shapes, key=lambda s: sum(abs(math.log2(a / b)) for a, b in zip(s, (m, n, k), strict=True)))
    timed = {row["implementation"]: row for row in rows if (row["m"], row["n"], row["k"]) == nearest}
    ranked = sorted((c for c in candidates if c.implementation in timed), key=lambda c: timed[c.implementation]["us"])
    if not ranked:
        return candidates[0]
    row = timed[ranked[0].implementation]
    measured = f"{row['us']:.0f} us measured on {row['gpu']} at M, N, K = {', '.join(map(str, nearest))}"
    return replace(ranked[0], reason=f"{ranked[0].reason}; {measured}")


def table() -> Iterator[tuple[str, str, dict[str, Offer]]]:
    """(op, format, chip -> Offer) of everything in KERNELS: the table in kernels/README.md."""
    for kernel in KERNELS:
        for name in kernel.formats:
            yield kernel.op, name, {chip: offer(kernel.op, name, chip) for chip in CHIPS}


@functools.cache
def compiled_with() -> str:
    """The Triton version whose accepted rows count here: this one's, or the newest that there are rows of."""
    here = minor(triton.__version__)
    if here in PROVEN:
        return here
    newest = max(PROVEN, key=lambda version: tuple(map(int, version.split("."))))
    logger.warning("kernels were never compiled with Triton %s: what runs where is taken from Triton %s", here, newest)
    return newest


def kernel_row(op: str) -> Kernel:
    return next(row for row in KERNELS if row.op == op)


@functools.cache
def _rows(version: str) -> dict[tuple[str, str, str], tuple[Row, ...]]:
    """Accepted rows by kernel file, format and chip; a row's format may go on, as in "nvfp4 swizzled"."""
    found: dict[tuple[str, str, str], tuple[Row, ...]] = {}
    for file, row in accepted_files(version):
        place = file, row.format.split()[0], row.target
        found[place] = (*found.get(place, ()), row)
    return found


@functools.cache
def _measured() -> tuple[dict, ...]:
    return tuple(json.loads(MEASURED.read_text(encoding="utf-8"))) if MEASURED.exists() else ()


SWIZZLED = ("sm_100", "sm_103")  # whose matrix units read scales from memory of their own, a 128x4 block at a time
MEASURED = Path(__file__).parent / "measured.json"
_PRODUCED = ("int8", "fp8", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4")
KERNELS = (
    Kernel(
        "quantize_activation",
        "quantize_activation",
        (*_PRODUCED, "down", "16bit", *(f"{name}-beside" for name in _PRODUCED)),
        "memory",
    ),
    Kernel("adaln_quantize", "adaln_quantize", (*_PRODUCED, "16bit"), "memory"),
    Kernel("qk_norm_rope", "qk_norm_rope", ("16bit",), "memory"),
    Kernel("attention_fp8", "attention", ("64", "128"), "native"),
    Kernel("scaled_matmul", "scaled_matmul", ("int8", "fp8", "fp8_tensor"), "native"),
    Kernel(
        "block_scaled_matmul",
        "block_scaled_matmul",
        ("nvfp4", "mxfp8", "mxfp4"),
        "native",
        elsewhere="no matrix unit there takes block scales of this format",
    ),
    Kernel(
        "w4a8_matmul",
        "w4a8_matmul",
        tuple(f"{w}-{a}" for w in ("nvfp4", "mxfp4", "int4", "int4_g128") for a in ("int8", "fp8")),
        "decode",
    ),
    Kernel("weight_only_matmul", "weight_only_matmul", (*KERNEL_FORMATS, "int4_g128"), "decode"),
    Kernel("dequantize", "dequantize", KERNEL_FORMATS, "memory"),
    Kernel(
        "reencode",
        "reencode",
        (*(f"{w}-{t}" for w in ("nvfp4", "mxfp4", "mxfp8", "int4") for t in ("int8", "fp8")), "fp8-int8"),
        "memory",
    ),
    Kernel("swizzle_scales", "swizzle_scales", ("8bit",), "memory"),
)
