"""Measures how near attention from codes is to exact attention: each row of CODES of kernels/attention/op.py.

    python -m benchmarks.attention_codes               measure, then write attention_codes.json and the table
    python -m benchmarks.attention_codes --tables      the table again, from the result file

q, k and v are drawn, with what is known to hurt such codes, or those of the embedded pipeline at each step and block.
The torch reference computes attention, float64 the exact one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import fluxq
from benchmarks.pages import between
from fluxq import tiny
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import load_pipeline, resolve_model
from fluxq.kernels.attention.op import CODES, attention_fp8
from fluxq.runtime import attention_choice

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "attention_codes.json", ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- attention codes: begin -->\n", "<!-- attention codes: end -->"
SEED, TOKENS, HEADS, SIZE = 1000, 1024, 4, 128
Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v (B, S, H, D)


def drawn() -> Iterator[tuple[str, Heads]]:
    """Yield heads of normal numbers; those of the later cases have something that stands out."""
    noise = torch.Generator().manual_seed(SEED)

    def normal() -> Heads:
        q, k, v = (torch.randn(1, TOKENS, HEADS, SIZE, generator=noise) for _ in range(3))
        return q, k, v

    q, k, v = normal()
    yield "normal", (q, k, v)
    yield "keys share a mean", (q, k + 30 * (torch.arange(SIZE) // 2 == 3), v)
    sizes = torch.logspace(-1, 0.7, TOKENS)[torch.randperm(TOKENS, generator=noise)][:, None, None]
    yield "tokens differ in size", (q * sizes, k, v)
    outlier = torch.where(torch.arange(SIZE) // 2 == 3, 30.0, 1.0)
    yield "two channels 30 times as large in k", (q / outlier, k * outlier, v)


def embedded() -> list[Heads]:
    """Return q, k and v of each self-attention of the embedded pipeline, in one image."""
    found: list[Heads] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str) -> Tensor:
        found.append((q, k, v))
        return exact(q, k, v, scale)

    pipe: Any = load_pipeline(resolve_model("tiny"))
    fluxq.set_attention(pipe, "fp8")
    with mock.patch.object(attention_choice, "attention_fp8", noted):
        pipe(tiny.PROMPTS[0], generator=torch.Generator().manual_seed(SEED), **tiny.CALL_KWARGS)
    return found


@torch.no_grad()
def sqnr(calls: list[Heads]) -> dict[str, float]:
    """Return row of CODES -> signal to noise in dB, of the outputs of all calls together."""
    signal, noise = 0.0, dict.fromkeys(CODES, 0.0)
    for q, k, v in calls:
        expected = exact(q.double(), k.double(), v.double(), None)
        signal += float(expected.square().sum())
        for codes in CODES:
            found = attention_fp8(q.float(), k.float(), v.float(), None, codes)
            noise[codes] += float((found - expected).square().sum())
    return {codes: round(float(10 * torch.tensor(signal / each).log10()), 2) for codes, each in noise.items()}


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def table(found: dict[str, Any]) -> str:
    head = ("q, k and v", "q and k in fp8, p and v in fp8", "int8, fp8", "int8, fp16")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found["rows"]:
        lines.append(f"| {row['inputs']} | {' | '.join(f'{row[codes]:.1f}' for codes in CODES)} |")
    return "\n".join(lines)


@click.command()
@click.option("--tables", is_flag=True, help="Only write the table, from the result file.")
def main(tables: bool) -> None:
    """Measure attention from codes, and write the result file and the table."""
    if not tables:
        rows: list[dict[str, Any]] = [{"inputs": name} | sqnr([heads]) for name, heads in drawn()]
        calls = embedded()
        rows.append({"inputs": f"the embedded pipeline's, {len(calls)} calls"} | sqnr(calls))
        write_json(RESULT, {"rows": rows, "commit": commit(), "versions": versions()})
    write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, table(read_json(RESULT))))


if __name__ == "__main__":
    main()
