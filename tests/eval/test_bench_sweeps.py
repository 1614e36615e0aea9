"""`fluxq bench` over a grid, into a history, and as a trace."""

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fluxq.cli import cli
from fluxq.eval.history.rows import read_history
from fluxq.eval.speed.trace import is_trace

CALL = ("--num-inference-steps", "2", "--height", "16", "--width", "16", "--rounds", "3", "--warmup", "1")


def bench(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["bench", *map(str, words), "--device", "cpu"])
    return done.exit_code, done.output


@pytest.mark.slow
def test_a_grid_goes_into_a_history_and_a_trace_has_ranges_by_stage_and_role(plain_checkpoint, tmp_path: Path) -> None:
    checkpoint, history = plain_checkpoint("int8"), tmp_path / "history"
    words = (checkpoint, "--grid", "16x16,16x32/8,16/2", "--history", history, *CALL)
    code, said = bench(*words, "--trace", tmp_path / "trace.json.gz")
    assert code == 0, said
    (row,) = read_history(history)
    steps = [name for name in row.speed if name.startswith("end to end, 16-bit, eager")]
    assert [name.rpartition("eager, ")[2] for name in steps] == [
        f"2 x 16x{width}, {length} tokens" for width in (16, 32) for length in (8, 16)
    ]
    assert all(point.n == 3 and point.value for point in row.speed.values()) and row.digests.keys() == {
        "checkpoint",
        "16 bit",
    }
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    named = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert named.count("call") == named.count("VAE") == named.count("denoiser step 0") == 1
    assert {"text encoders", "denoiser step 1"} <= set(named) and "denoiser step 2" not in named
    assert {"attn_out", "ff_down"} <= set(named), sorted(set(named))


def test_a_damaged_archive_is_no_trace(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(b'{"kind": "fluxq trace", "traceEvents": []}'))
    for place in (0, 10, 30):  # of the header, of the first block, of what is in it
        damaged = tmp_path / f"{place}.json.gz"
        damaged.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        assert not is_trace(damaged)


@pytest.mark.slow
def test_what_cannot_be_swept_or_written_is_refused_before_work(plain_checkpoint, tmp_path: Path) -> None:
    checkpoint, mine = plain_checkpoint("int8"), tmp_path / "mine.json"
    mine.write_text("{}", encoding="utf-8")
    assert not is_trace(mine)
    for words, message in (
        (("--grid", "16x16/8"), "write SIZES/LENGTHS/BATCHES"),
        (("--grid", "16/8/1"), "write height x width"),
        (("--grid", "16x16/-8/1"), "write SIZES/LENGTHS/BATCHES"),
        (("--grid", "//1", "--batch", "2"), "--grid has batches too"),
        (("--trace", mine), "is no trace of fluxq; give another"),
        (("--trace", tmp_path / "trace.pb"), "a trace is a .json or .json.gz file"),
        (("--history", mine), "is a file"),
        (("--history", checkpoint), "is the checkpoint, which would be changed"),
    ):
        code, said = bench(checkpoint, *words)
        assert code == 2 and message in said.replace("\n", " "), said
