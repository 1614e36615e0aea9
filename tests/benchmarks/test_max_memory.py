"""The benchmark of bounds, cut down: that what a bound loads paints what is painted without one; and what was found."""

import json
import re
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "max_memory.py"
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says what a process held")


@linux
def test_two_ways_are_measured_and_paint_the_same(tmp_path: Path) -> None:
    small = "--width 128 --blocks 3 --bounds 4000 --stored bfloat16".split()
    out = tmp_path / "found.json"
    done = forked.run(SCRIPT, *small, "--ways", "fluxq,accelerate max_memory", "--output", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"commit", "versions", "call"} <= found.keys() and "accelerate" in found["versions"]
    assert [row["way"] for row in found["rows"]] == ["fluxq", "accelerate max_memory"]
    for row in found["rows"]:
        assert row["equal"] and row["stored"] == "bfloat16" and row["bound"] == 4000
        assert row["running"].keys() == {"resident", "anonymous", "mapped", "seconds", "read", "written"}
        assert 0 < row["resident of bound"]["4000"] < 1 > row["anonymous of bound"]["4000"]
    assert found["rows"][0]["running"]["read"] > 1e6 > found["rows"][1]["running"]["read"]  # of mapped files none
