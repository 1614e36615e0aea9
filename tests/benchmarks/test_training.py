"""Tests of the tables on training: from the committed file and the model; and of how bytes are counted."""

import pytest
import torch

from benchmarks import training
from fluxq.base.files import read_json


@pytest.mark.slow
def test_the_tables_are_those_of_the_committed_file_and_of_the_model() -> None:
    found = read_json(training.RESULT)
    page = training.PAGE.read_text(encoding="utf-8")
    text = training.tables(found)
    assert training.between(page, training.BEGIN, training.END, text) == page, "python -m benchmarks.training --tables"
    assert found["modelled"] == training.modelled(), "python -m benchmarks.training"
    assert "dirty" not in found["commit"]


def test_bytes_are_counted_as_long_as_they_live() -> None:
    x = torch.zeros(1000)

    def call() -> torch.Tensor:
        a = x + 1
        b = a + 1
        del a
        return (b.view(10, 100) + 1).mul_(2)

    assert training.allocated(call) == 2 * x.nbytes
    assert training.allocated(lambda: x.view(10, 100).mul_(2)) == 0


def test_a_kernel_allocates_its_result_alone_and_codes_what_they_need() -> None:
    m, n, k = 64, 1024, 512
    found = {row["way"]: 1e6 * row["mb"] for row in training.of_a_layer((m, n, k))}
    result, slack = 2 * m * k, 5e4  # figures are rounded
    assert found["bf16 Linear"] == pytest.approx(result, abs=slack)
    for name in ("fp8", "nvfp4"):
        assert found[f"{name}, decoded in the kernel"] == pytest.approx(result, abs=slack)
        assert found[f"{name}, decoded to fp32 first"] > 4 * n * k
    assert found["fp8, gradients as codes"] == pytest.approx(result + m * n + n * k, abs=2 * slack)


@pytest.mark.slow
def test_the_graph_holds_no_more_than_that_of_16_bit() -> None:
    rows = training.embedded()
    assert len({row["held_mb"] for row in rows}) == 1
    assert {row["recipe"] for row in rows if row["error_in_8_bit"]} == {"fp8", "int8"}
