"""Judge the last commits of this repository by `fluxq gate`, and draw their history.

    python -m benchmarks.past                    20 commits; writes past.jsonl and ../docs/history.svg
    python -m benchmarks.past --images IN OUT    what each worktree runs: the images of a list of prompts and seeds

Each commit rounds the embedded pipeline to nvfp4 with its own code and makes 16 images; the oldest one is A. Where a
line moves, a commit changed what the same command makes.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # a worktree that runs this file may not have it
    from fluxq.eval.history.rows import HistoryRow

ROOT = Path(__file__).resolve().parent.parent
RESULT, PICTURE = Path(__file__).with_suffix(".jsonl"), ROOT / "docs" / "history.svg"
IMAGES = 16


@click.command()
@click.option("--count", default=20, show_default=True, help="Commits, along first parents.")
@click.option("--images", nargs=2, type=click.Path(path_type=Path), help="Make images with the fluxq at hand.")
@click.option("--work", type=click.Path(path_type=Path), help="Where to keep worktrees; by default nowhere.")
def main(count: int, images: tuple[Path, Path] | None, work: Path | None) -> None:
    """Judge commits, or make the images of one."""
    if images:
        make(*images)
        return
    with TemporaryDirectory() as scratch:
        judge(count, work or Path(scratch))


def judge(count: int, work: Path) -> None:
    """Run a gate for each commit and draw the history."""
    from fluxq.base.files import write_text
    from fluxq.eval.history.rows import HISTORY_FILE, read_history

    words = ["git", "log", "--first-parent", f"-{count}", "--format=%H"]
    log = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    oldest, *later = reversed(log.stdout.split())
    folder = work / "history"
    prompts = work / "prompts.txt"
    work.mkdir(parents=True, exist_ok=True)
    bundled = (ROOT / "src" / "fluxq" / "tiny" / "pipeline" / "fluxq_prompts.txt").read_text(encoding="utf-8")
    write_text(prompts, bundled)
    here = shlex.quote(str(Path(__file__).resolve()))
    command = f"PYTHONPATH=src:. {shlex.quote(sys.executable)} {here} --images {{prompts}} {{out}}"
    for commit in (oldest, *later):
        words = [f"git:{oldest}", f"git:{commit}", "--command", command, "--images", str(IMAGES), "--margin", "psnr=3"]
        more = ["--prompts", str(prompts), "--work", str(work / "work"), "--history", str(folder), "--device", "cpu"]
        done = subprocess.run([sys.executable, "-m", "fluxq", "gate", *words, *more], cwd=ROOT)
        if done.returncode not in (0, 1, 3):
            raise SystemExit(done.returncode)
    write_text(RESULT, (folder / HISTORY_FILE).read_text(encoding="utf-8"))
    draw(read_history(folder))


def draw(rows: Sequence[HistoryRow]) -> None:
    """Draw the first series as a picture, in the colours that the page has by day."""
    from fluxq.base.files import write_text
    from fluxq.eval.report.charts import past_chart
    from fluxq.eval.report.past import series_of

    style = (ROOT / "eval" / "report" / "templates" / "style.html").read_text(encoding="utf-8")
    colours = dict(reversed(re.findall(r"(--[\w-]+):\s*(#\w+|[a-z]+);", style)))
    drawing = past_chart(series_of(rows)[0])
    write_text(PICTURE, re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], drawing.svg))


def make(prompts: Path, out: Path) -> None:
    """Round the embedded pipeline with the fluxq at hand, and write its images with `prompts.jsonl`."""
    import torch
    from diffusers import DiffusionPipeline

    import fluxq

    torch.set_num_threads(1)
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    with TemporaryDirectory() as folder:
        output = Path(folder) / "nvfp4"
        fluxq.quantize_pipeline("tiny", "nvfp4", output=output, check=False, device="cpu", profile="rtn")
        pipe: Any = DiffusionPipeline.from_pretrained(output, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    lines = []
    for index, row in enumerate(rows):
        image = pipe(row["prompt"], generator=torch.Generator().manual_seed(row["seed"]), **fluxq.tiny.CALL_KWARGS)
        image.images[0].save(out / f"{index}.png")
        lines.append(json.dumps({**row, "image": f"{index}.png"}) + "\n")
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
