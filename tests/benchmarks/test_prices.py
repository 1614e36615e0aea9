"""The table of prices: dearer time buys fewer stages."""

import json

from click.testing import CliRunner

from benchmarks import prices


def test_dearer_time_buys_less_of_both(tmp_path):
    file = tmp_path / "prices.json"
    sizes = ("--layers", "drawn", "--drawings", "1", "--size", "128", "--recipe", "nvfp4-max")
    done = CliRunner().invoke(prices.main, [*sizes, "--price", "0", "--price", "1000", "--json", str(file)])
    assert done.exit_code == 0, done.output
    free, dear = json.loads(file.read_text())["rows"]
    assert (free["price"], dear["price"], free["count"]) == (0, 1000, 3)
    assert free["db"] > dear["db"] + 1 and free["microseconds"] > dear["microseconds"]
