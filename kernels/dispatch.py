"""Chooses what computes a quantized Linear on a GPU, from what was compiled and what was measured.

    int8 x int8, fp8 x fp8 or fp8_1x128           scaled_matmul, or the library's product
    nvfp4, mxfp8, mxfp4 by themselves             block_scaled_matmul or the library's product, where the chip has it
    4-bit weights x int8 or fp8                   w4a8_matmul: how `prepare` holds them for `prefer: memory`
    anything else                                 weight_only_matmul: activations keep their 16 bit
    attention                                     our kernel, or what doctor proved and timed faster here: that with
                                                  warps apart, or a package

Of a scheme's candidates the first that is offered on the chip is taken: kernels/compiled says where a kernel runs on
the right matrix unit without spilling, the `OP` of its folder what it is for, and findings.py what was wrong on the GPU
at hand. Timings of `fluxq doctor` there, or in kernels/measured of that chip, decide between candidates of one
arithmetic. Nothing is tuned or compiled here: see `fluxq warmup`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from fluxq.base.console import logger
from fluxq.base.devices import version_numbers
from fluxq.kernels import findings
from fluxq.kernels.all_ops import ATTENTION_FP8, OPS, QUANTIZE_ACTIVATION, WEIGHT_ONLY_MATMUL, product_of
from fluxq.kernels.attention.op import format_of
from fluxq.kernels.attention_peers import peers_for
from fluxq.kernels.library import LIBRARY, library_refusal
from fluxq.kernels.op import Op
from fluxq.kernels.ops import INT_MM, TORCH
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.tiles import CHIPS
from fluxq.kernels.weight_only_matmul.op import LARGEST_GEMV
from fluxq.recipes.devices import KERNEL_FORMATS
from fluxq.recipes.formats import FORMATS, Scheme


@dataclass(frozen=True)
class Choice:
    """Implementation of a Linear.

    implementation: a kernel, a function of LIBRARY, or "torch reference".
    activations: the format that x is rounded to first, None for none.
    reason: of this choice, and against those before it.
    fallback: whether the chip lacks the scheme's own arithmetic.
    format: of its cell.
    """

    implementation: str
    activations: str | None
    reason: str
    fallback: bool = False
    format: str = field(default="", compare=False)

    @property
    def cell(self) -> tuple[str, str]:
        """(op, format) that findings.py knows the product by; of the torch reference it knows none."""
        return self.implementation, self.format


class NoKernel(ValueError):
    """An op has no kernel for a call on a chip. was_wrong: it had one, whose results were wrong."""

    def __init__(self, message: str, *, was_wrong: bool) -> None:
        super().__init__(message)
        self.was_wrong = was_wrong


@functools.cache
def refusal(op: str, format: str, chip: str) -> str:
    """Return why an op has no kernel for a format on a chip; empty if it has.

    The reason is that of the compiled cells of this Triton, or that its results were wrong on the GPU at hand.
    """
    row = OPS[op]
    if format not in row.formats:
        is_known = format in KERNEL_FORMATS or format not in FORMATS
        return f"{op} has no {format}" if is_known else f"no kernel was written for {format}"
    if chip not in CHIPS:
        return f"never compiled for {chip}"
    cell = row.file, format, chip
    why = _refusals(compiled_with()).get(cell)
    if why is None:
        missing = f"no tile for {chip} was compiled with Triton {compiled_with()}"
        later = (version for version in PROVEN if version_numbers(version) > version_numbers(compiled_with()))
        newer = next((version for version in later if _refusals(version).get(cell) == ""), None)
        return f"{missing}, but with {newer}: update torch, which brings it" if newer else row.elsewhere or missing
    return why or findings.wrong(op, format, chip)


def require(op: str, format: str, chip: str) -> None:
    """Raise ValueError unless an op has a kernel for a format on a chip."""
    if refusal(op, format, chip):
        raise _no_kernel(op, format, chip, refusal(op, format, chip), bool(findings.wrong(op, format, chip)))


def _no_kernel(op: str, format: str, chip: str, why: str, was_wrong: bool) -> NoKernel:
    return NoKernel(
        f"{op}: no kernel for {format} on {chip} ({why}); encode the operands anew with fluxq.prepare, or compute with "
        "their dequantized form",
        was_wrong=was_wrong,
    )


def withdraw(op: str, format: str, chip: str, why: str) -> None:
    """Offer a cell no more in this process, because its results were wrong."""
    findings.withdraw(op, format, chip, why)
    forget()


def forget() -> None:
    """Forget what was chosen: findings have changed."""
    refusal.cache_clear()
    for chooser in (choose, choose_product, choose_attention):
        chooser.cache_clear()


@functools.lru_cache(4096)
def choose(
    scheme: Scheme,
    chip: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "",
    library: bool = True,
) -> Choice:
    """Choose what computes m tokens of `dtype` under a scheme on a chip; the torch reference if no candidate can.

    layout: of the weight, as runtime/layout.py names it: "row scale" with the 8-bit scales per row that W4A8 needs,
    "swizzled" with block scales in the 128x4 layout.
    library: whether its codes lie as the library's products take them, rows at multiples of 16 bytes.
    """
    offered: list[Choice] = []
    refused: list[str] = []
    for choice, why_not in judged(scheme, chip, m, n, k, dtype, layout, library):
        if not why_not and (not offered or choice.activations == offered[0].activations):
            offered.append(choice)  # a later candidate with other activations has another arithmetic
        elif not offered:
            refused.append(f"not {choice.implementation}: {why_not}")
    if not offered:
        return Choice(TORCH, _activation_name(scheme), "; ".join(refused), fallback=True)
    best = _fastest(offered, findings.timings(_timed_as(scheme), chip), m, n, k)
    is_fallback = best.activations != _activation_name(scheme)
    return replace(best, reason="; ".join([best.reason, *refused]), fallback=is_fallback)


def judged(
    scheme: Scheme, chip: str, m: int, n: int, k: int, dtype: torch.dtype, layout: str, library: bool = True
) -> list[tuple[Choice, str]]:
    """List all candidates of `choose` with the reasons against them; empty for those that can serve."""
    choices = []
    for candidate in _candidates(scheme, layout):
        choice = candidate[0]
        why_not = _why_not(candidate, scheme, chip, m, n, k, dtype, layout)
        if not (library or why_not or choice.implementation in (candidate[1].name, INT_MM)):
            why_not = "rows of its codes are not at multiples of 16 bytes"
        choices.append((choice, why_not))
    return choices


@functools.lru_cache(4096)
def choose_product(
    scheme: Scheme, chip: str, m: int, n: int, k: int, dtype: torch.dtype, layout: str, library: bool
) -> Choice:
    """Choose what multiplies codes that are made already, as `choose` would: a kernel, or the library's product.

    library: whether it takes such operands, and what follows them comes after the rounding.

    Raises ValueError where nothing is offered.
    """
    candidates = [c for c in _candidates(scheme, layout)[:-1] if library or c[0].implementation == c[1].name]
    offered = [c[0] for c in candidates if not _why_not(c, scheme, chip, m, n, k, dtype, layout)]
    if not offered:
        op, formats = product_of(scheme.weights.name, _activation_name(scheme), layout == ROW_SCALE) or (None, "")
        if op is None:
            raise ValueError(f"no op multiplies codes of {scheme}")
        why = next(
            _why_not(c, scheme, chip, m, n, k, dtype, layout) for c in candidates if c[0].implementation == op.name
        )
        raise _no_kernel(op.name, formats, chip, why, any(_was_wrong(c[0], chip) for c in candidates))
    return _fastest(offered, findings.timings(_timed_as(scheme), chip), m, n, k)


@functools.lru_cache(4096)
def choose_attention(codes: str, size: int, chip: str, m: int, n: int, k: int, dtype: torch.dtype) -> Choice:
    """Choose what computes attention of m tokens, n channels and k keys from codes, in heads of `size` channels.

    Another has to be vouched for by the file of doctor's of this GPU, and to be faster there than our kernel, at the
    nearest shape that ours was timed at: times of other GPUs do not count.
    """
    form = format_of(codes, size)
    default = Choice(ATTENTION_FP8.name, codes, "attention from codes", format=form)
    reasons = dict.fromkeys(peers_for(codes, chip, dtype), "attention of a package")
    if not warps_refusal(codes, size, chip, dtype):
        reasons[WARPS_APART] = "attention from codes, some warps load while others multiply"
    others = [
        Choice(name, codes, reason, format=form)
        for name, reason in reasons.items()
        if findings.vouched(name, form, chip, findings.alike(m, n, k))
    ]
    rows = findings.own_timings(f"attention {form}", chip) if others else []
    ours = {_shape(row) for row in rows if row["op"] == default.implementation}
    return _fastest([default, *others], [row for row in rows if _shape(row) in ours], m, n, k)


def warps_refusal(codes: str, size: int, chip: str, dtype: torch.dtype) -> str:
    """Return why the kernel of attention/warp_specialized.py takes no such call; empty if it may, once doctor timed it.

    Gluon changes from one Triton to the next: a version without cells of its own is refused, by its name.
    """
    version = minor(triton.__version__)
    if codes != "fp8" or dtype != torch.bfloat16:  # as packages: findings know no dtype
        return f"it takes fp8 codes of bfloat16, not {codes} of {str(dtype).removeprefix('torch.')}"
    if version not in PROVEN:
        return f"its Gluon was never compiled with Triton {version}, only with {', '.join(PROVEN)}"
    why = _refusals(version).get((ATTENTION_FP8.file, f"warps-{size}", chip))
    return f"never compiled for heads of {size} on {chip}" if why is None else why


def layout_of(w: QuantizedTensor, row_scale: Tensor | None) -> str:
    """Return the layout of a weight, as `choose` takes it."""
    return ROW_SCALE if row_scale is not None else "swizzled" if w.is_swizzled else ""


def _activation_name(scheme: Scheme) -> str | None:
    return scheme.activations.name if scheme.activations else None


def _candidates(scheme: Scheme, layout: str) -> list[tuple[Choice, Op, str]]:
    """Return (choice, op and format that must be offered for it), the preferred one first; launch.py computes them.

    The library's product with a scale per row or tensor comes first; exact integers, and block scales, which only
    Blackwell has, wait for a timing.
    """
    weights, activations = scheme.weights.name, _activation_name(scheme)
    candidates = []
    if product := product_of(weights, activations, layout == ROW_SCALE):
        native = f"{weights} matrix units"
        decoded = f"4-bit weights become {activations} in the kernel"
        reason = decoded if layout == ROW_SCALE else native
        candidates.append((Choice(product[0].name, activations, reason, format=product[1]), *product))
    both = weights if weights == activations else f"{weights}-{activations}"
    if activations is not None and both in LIBRARY:
        choice = Choice(LIBRARY[both].function, activations, LIBRARY[both].what, format=both)
        candidates.insert(0 if LIBRARY[both].comes_first else 1, (choice, QUANTIZE_ACTIVATION, activations))
    decoded = "weights are decoded in the kernel, activations keep 16 bit"
    last = Choice(WEIGHT_ONLY_MATMUL.name, None, decoded, format=weights)
    return [*candidates, (last, WEIGHT_ONLY_MATMUL, weights)]


def _why_not(
    candidate: tuple[Choice, Op, str],
    scheme: Scheme,
    chip: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    layout: str,
) -> str:
    """Return the reason why a candidate cannot serve; empty if it can."""
    choice, op, name = candidate
    if op is WEIGHT_ONLY_MATMUL and dtype == torch.float32:
        row_bytes = k * scheme.weights.element.bits // 8
        if m > LARGEST_GEMV or row_bytes % 4:
            return "matrix units would round float32 activations"
    refused = refusal(op.name, name, chip)
    if not refused and (was_wrong := _was_wrong(choice, chip)):
        return was_wrong
    if choice.implementation == op.name:
        return refused
    if why_not := library_refusal(choice.format, layout, chip, m, n, k, dtype):
        return why_not
    if name == "nvfp4" and not scheme.static_input:
        return "the library takes one global scale for all tokens"
    return f"activations cannot be quantized there: {refused}" if refused else ""


def _was_wrong(choice: Choice, chip: str) -> str:
    """Return the reason why the product of a choice, or what quantizes for it, is wrong on this GPU; empty if none."""
    wrong = findings.wrong(*choice.cell, chip)
    if not wrong and choice.activations is not None:
        wrong = findings.wrong(QUANTIZE_ACTIVATION.name, choice.activations, chip)
        wrong = wrong and f"activations cannot be quantized there: {wrong}"
    return wrong


def _timed_as(scheme: Scheme) -> str:
    return f"{scheme.weights.name}-{_activation_name(scheme) or '16bit'}"


def _fastest(candidates: list[Choice], rows: list[dict[str, Any]], m: int, n: int, k: int) -> Choice:
    """Return the first candidate, unless another was measured to be faster at the nearest shape.

    rows: of `findings.timings`.
    """
    if not rows:
        return candidates[0]
    shapes = {_shape(row) for row in rows}
    nearest = min(shapes, key=lambda s: sum(abs(math.log2(a / b)) for a, b in zip(s, (m, n, k), strict=True)))
    timed = {row["op"]: row for row in rows if _shape(row) == nearest}
    ranked = sorted((c for c in candidates if c.implementation in timed), key=lambda c: timed[c.implementation]["us"])
    if not ranked:
        return candidates[0]
    row = timed[ranked[0].implementation]
    measured = f"{row['us']:.0f} us measured on {row['gpu']} at M, N, K = {', '.join(map(str, nearest))}"
    return replace(ranked[0], reason=f"{ranked[0].reason}; {measured}")


def _shape(row: dict[str, Any]) -> findings.Shape:
    return row["m"], row["n"], row["k"]


@functools.cache
def compiled_with() -> str:
    """Return the Triton version whose compiled cells count: this one, or the newest that has some."""
    here = minor(triton.__version__)
    if here in PROVEN:
        return here
    newest = max(PROVEN, key=version_numbers)
    logger.warning("kernels were never compiled with Triton %s: what runs where is taken from Triton %s", here, newest)
    return newest


@functools.cache
def _refusals(version: str) -> dict[tuple[str, str, str], str]:
    """Return why a cell is not ok, or empty, by kernel file, format and chip.

    A cell's format may go on, as in "nvfp4 swizzled": the first that is not ok counts.
    """
    refusals: dict[tuple[str, str, str], str] = {}
    for file, cell in accepted_files(version):
        key = file, cell["format"].split()[0], cell["target"]
        why = "" if cell["ok"] else cell["reason"] or "it did not compile"
        refusals[key] = refusals.get(key) or why
    return refusals


def accepted_files(version: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the kernel file, fields of a `CompiledCell` of benchmarks/kernels/aot.py) for a Triton version."""
    for file in sorted(COMPILED.glob("*.json")):
        for fields in json.loads(file.read_text(encoding="utf-8")).get(minor(version), []):
            yield file.stem, fields


def minor(version: str) -> str:
    """Return the first two numbers of a version, which tell compilers apart."""
    return ".".join(version.split(".")[:2])


WARPS_APART = "attention_fp8 warps apart"  # the name by which findings know the kernel of warp_specialized.py
ROW_SCALE = "row scale"  # the layout of a weight that W4A8 multiplies
SWIZZLED = ("sm_100", "sm_103")  # whose matrix units read scales from memory of their own, a 128x4 block at a time
COMPILED = Path(__file__).parent / "compiled"  # written by `python -m benchmarks.kernels.aot --write`
PROVEN = ("3.6", "3.8", "3.9")  # Triton versions that tests/kernels/test_interpreter.py passes on
