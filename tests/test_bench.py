"""The benchmark's command and its statistics; times themselves are never asserted."""

import json

import pytest
import torch
from click.testing import CliRunner

from fluxq.kernels import bench


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "bench.json"
    arguments = ["--cpu", "--size", "8", "64", "32", "--pairs", "3", "--json", str(file)]
    done = CliRunner().invoke(bench.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    heading, line = done.output.splitlines()
    assert "speedup" in heading and line.startswith("int8-int8") and "8 x 64 x 32" in line
    written = json.loads(file.read_text())
    (result,) = written["results"]
    assert (result["name"], result["baseline"], result["shape"]) == ("int8-int8", "bf16", [8, 64, 32])
    assert result["pairs"] == 3
    assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert result["ours_ms"] > 0 and result["baseline_ms"] > 0
    assert written["threads"] == 1 and {"torch", "machine"} <= set(written["versions"]) and written["commit"]


def test_a_machine_must_be_chosen():
    done = CliRunner().invoke(bench.main, [])
    assert done.exit_code == 2 and "--cpu" in done.output


def test_the_ratio_is_taken_pair_by_pair():
    seconds = [(1.0, 2.0), (10.0, 30.0), (1.0, 4.0)]  # a slow moment in the second pair changes no ratio
    result = bench.summarize("ours", "theirs", (1, 2, 3), seconds)
    assert (result.ratio_low, result.ratio, result.ratio_high) == (2.5, 3.0, 3.5)
    assert (result.ours_ms, result.baseline_ms) == (1000.0, 4000.0)


def test_each_pair_calls_both_once_and_alternates_who_is_first():
    calls = []
    times = bench.time_pairs(lambda: calls.append("ours"), lambda: calls.append("baseline"), pairs=3)
    assert len(times) == 3
    assert calls[2:] == ["ours", "baseline", "baseline", "ours", "ours", "baseline"]


def test_the_number_of_threads_is_restored():
    threads = torch.get_num_threads()
    bench.cpu_int8(4, 32, 16, pairs=2)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("pairs", ["1", "0"])
def test_a_spread_needs_two_pairs(pairs):
    assert CliRunner().invoke(bench.main, ["--cpu", "--pairs", pairs]).exit_code == 2
