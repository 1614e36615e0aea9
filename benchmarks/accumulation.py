"""Emulates fp8 products whose sums stay in Hopper's matrix unit, which `accumulate: fast` allows, and measures them.

    python -m benchmarks.accumulation [--images 64]     measure, then write accumulation.json and the table
    python -m benchmarks.accumulation --tables          the table again, from the result file

The unit adds 32 products to a sum at a time. It shifts all of them to the largest exponent among them and keeps 13 bits
behind the point, so the smallest bits of each are lost (DeepSeek-V3 Technical Report, section 3.5.2; SageAttention2,
section 3.3). A kernel that promotes moves the sum to an fp32 register every so many columns and begins anew.

Each row compares with the same product summed in fp32. Drawn layers have the sizes of FLUX.1's; the pipeline is the
embedded one under the recipe fp8, beside its own 16-bit images.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pages import between
from fluxq import tiny
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.eval.images.generate import generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import paired_interval
from fluxq.jobs import making
from fluxq.kernels import ops
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "accumulation.json", ROOT / "kernels" / "README.md"
STEP, BITS = 32, 13  # columns that one instruction adds, and bits behind the point that it keeps
PROMOTED = {"promoted each 128": 128, "promoted each 512": 512, "fast": 0}  # columns between promotions; 0 is never
DRAWN = (("normal", 3072), ("behind GELU", 12288), ("beside GELU", 15360), ("all of one sign", 12288))
TOKENS, OUTPUTS, SEED = 64, 256, 1000
BEGIN, END = "<!-- accumulation: begin -->\n", "<!-- accumulation: end -->"
CELLS = 1 << 20  # products in memory at a time


def unit_product(x: Tensor, w: Tensor, promote: int = 0) -> Tensor:
    """Multiply values of codes x (M, K) and w (N, K), fp32, as the unit does: (M, N). promote: columns; 0 for never."""
    rows = max(1, CELLS // (len(w) * STEP))
    return torch.cat([_rows_of_product(part, w, promote) for part in x.split(rows)])


def _rows_of_product(x: Tensor, w: Tensor, promote: int) -> Tensor:
    total, sums = (torch.zeros(len(x), len(w)) for _ in range(2))
    for start in range(0, x.shape[1], STEP):
        products = x[:, None, start : start + STEP] * w[None, :, start : start + STEP]  # (M, N, 32)
        largest = torch.maximum(products.abs().amax(-1), sums.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] - 1 - BITS)
        inverse = torch.where(largest > 0, 1 / unit, 0.0)
        kept = torch.trunc(sums * inverse) + torch.trunc(products * inverse[..., None]).sum(-1)
        sums = torch.where(largest > 0, kept * unit, 0.0)
        if promote and (start + STEP) % promote == 0:
            total, sums = total + sums, torch.zeros_like(sums)
    return total + sums


def bound(x: Tensor, w: Tensor, promote: int = 0) -> Tensor:
    """Return the largest error (M, N) that `unit_product` can have, in float64.

    Each of the 33 numbers of a step loses less than the largest one's 13th bit, and no sum on the way is larger than
    the magnitudes before it together.
    """
    magnitudes = x.double().abs() @ w.double().abs().T
    steps = -(-x.shape[1] // STEP)
    return magnitudes * (STEP + 1) * 2.0**-BITS * (min(steps, promote // STEP) if promote else steps)


class _Sums:
    """torch.nn.functional, whose fp32 `linear` adds up as the unit does."""

    def __init__(self, promote: int) -> None:
        self.promote = promote

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype != torch.float32:
            return F.linear(x, w, bias)
        y = unit_product(x, w, self.promote)
        return y if bias is None else y + bias


@contextmanager
def accumulating(promote: int) -> Iterator[None]:
    """Inside the block, quantized layers on the CPU add up as the unit does."""
    with mock.patch.object(ops, "F", _Sums(promote)):
        yield


def drawn_layers() -> list[dict[str, Any]]:
    """Signal to noise of products of FLUX.1's widths: of the sums alone, and of fp8 as a whole.

    Products of one sign are the worst case: their sum grows until single ones are below its last bit.
    """
    rows = []
    noise = torch.Generator().manual_seed(SEED)
    for kind, k in DRAWN:
        x = torch.randn(TOKENS, k, generator=noise) * torch.randn(k, generator=noise).exp()
        w = torch.randn(OUTPUTS, k, generator=noise)
        if "GELU" in kind:
            first = k - 12288
            x[:, first:] = F.gelu(x[:, first:], approximate="tanh")
        elif kind == "all of one sign":
            x, w = x.abs(), w.abs()
        left, right = (QuantizedTensor.quantize(v, FORMATS["fp8"]) for v in (x, w))
        a, b = left.codes.float(), right.codes.float()
        exact, scales = a.double() @ b.double().T, left.scale[:, None] * right.scale
        for name, promote in PROMOTED.items():
            sums = unit_product(a, b, promote)
            rows.append(
                {
                    "inputs": kind,
                    "k": k,
                    "sums": name,
                    "sqnr_of_sums_db": _sqnr(exact, sums),
                    "sqnr_db": _sqnr(x.double() @ w.double().T, sums * scales),
                    "sqnr_db_in_fp32": _sqnr(x.double() @ w.double().T, exact * scales),
                    "share_of_bound": round(float(((sums - exact).abs() / bound(a, b, promote)).max()), 5),
                }
            )
    return rows


def _sqnr(reference: Tensor, found: Tensor) -> float:
    error = (found.double() - reference).square().sum()
    return round(float(10 * torch.log10(reference.square().sum() / error)), 2)


def embedded_pipeline(images: int) -> list[dict[str, Any]]:
    """PSNR of the recipe fp8 beside 16-bit images, with fp32 sums and with the unit's, and the paired differences."""
    items = items_of(tiny.PROMPTS[:images], images, first_seed=SEED)
    reference = generate(load_pipeline(resolve_model("tiny")), items, tiny.CALL_KWARGS)
    psnr: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "fp8")
        making.quantize(making.job_of(making.JobOptions(model="tiny", recipe="fp8", output=output, check=False)))
        pipe = load_pipeline(ModelFolder("fp8", Path(output)))
        psnr["fp32"] = list(fidelity(reference, generate(pipe, items, tiny.CALL_KWARGS))[0])
        for name in ("promoted each 512", "fast"):
            with accumulating(PROMOTED[name]):
                psnr[name] = list(fidelity(reference, generate(pipe, items, tiny.CALL_KWARGS))[0])
            click.echo(f"{name}: {sum(psnr[name]) / images:.2f} dB beside {sum(psnr['fp32']) / images:.2f}")
    rows = []
    for name, values in psnr.items():
        difference = paired_interval([a - b for a, b in zip(values, psnr["fp32"], strict=True)])
        rows.append(
            {
                "sums": name,
                "psnr_db": round(sum(values) / images, 3),
                "difference_db": [round(v, 4) for v in (difference.mean, difference.low, difference.high)],
            }
        )
    return rows


def table(found: dict[str, Any]) -> str:
    head = ("inputs", "K", "sums", "SQNR of the sums, dB", "of fp8 with them", "of fp8 with exact sums")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found["layers"]:
        figures = (f"{row[name]:.2f}" for name in ("sqnr_of_sums_db", "sqnr_db", "sqnr_db_in_fp32"))
        lines.append(f"| {row['inputs']} | {row['k']} | {row['sums']} | {' | '.join(figures)} |")
    lines += ["", "| sums | PSNR of the embedded pipeline in fp8, dB | difference, dB |", "|---|---|---|"]
    for row in found["pipeline"]:
        value, low, high = row["difference_db"]
        apart = "" if row["sums"] == "fp32" else f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        lines.append(f"| {row['sums']} | {row['psnr_db']:.2f} | {apart} |")
    return "\n".join(lines)


@click.command()
@click.option("--images", default=64, show_default=True, help="Images of the embedded pipeline.")
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(images: int, tables: bool) -> None:
    """Measure what sums in the matrix unit cost, and write the result file and the table."""
    if not tables:
        torch.set_num_threads(1)
        result = {"layers": drawn_layers(), "pipeline": embedded_pipeline(images), "images": images}
        write_json(RESULT, result | {"commit": commit(), "versions": versions()})
    write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table(read_json(RESULT))))


if __name__ == "__main__":
    main()
