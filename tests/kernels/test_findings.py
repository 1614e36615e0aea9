"""Files of doctor's: where they lie, what counts, and that a damaged or foreign one stops nothing."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxq.base import devices
from fluxq.kernels import dispatch, findings
from fluxq.kernels.tiles import TUNED, tuned_rows
from fluxq.kernels.weight_only_matmul.op import LARGEST_GEMV
from fluxq.recipes.formats import Scheme

CHIP = "sm_89"
HERE = {"gpu": "NVIDIA L4", "chip": CHIP, "driver": "570.1", "fluxq": "0.1.0", "torch": "2.11", "triton": "3.6"}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path) -> Iterator[None]:
    """A stand-in for an L4, whose findings lie below tmp_path; nothing is known of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(findings, "devices_of", lambda chip: [torch.device("cuda")] if chip == CHIP else [])
    monkeypatch.setattr(findings, "machine_of", lambda device, chip: HERE)
    monkeypatch.setattr(findings, "_withdrawn", {})
    monkeypatch.setattr(findings, "MEASURED", tmp_path / "measured")
    findings.forget()
    dispatch.forget()
    yield
    findings.forget()
    dispatch.forget()


def keep(*rows: dict[str, Any]) -> Path:
    """Write rows as a run of doctor does."""
    with findings.keeping(HERE) as keeper:
        keeper.write(rows)
    assert not keeper.why_not
    return findings.file_of(HERE)


def vouched(op: str, format: str = "fp8", **shape: int) -> bool:
    return findings.vouched(op, format, CHIP, findings.alike(*({"m": 64, "n": 96, "k": 256} | shape).values()))


def row(op: str, format: str = "fp8", why: str = "", us: float | None = None, **shape: int) -> dict[str, Any]:
    size = {"m": 64, "n": 96, "k": 256} | shape
    return {"op": op, "format": format, "scheme": "fp8-fp8", "share": 0.5, "why": why, "us": us, **size}


def chosen(m: int = 64) -> dispatch.Choice:
    dispatch.forget()
    return dispatch.choose(Scheme.parse("fp8-fp8"), CHIP, m, 96, 256)


def test_a_cell_that_was_wrong_is_not_offered_and_the_reason_said() -> None:
    assert chosen().implementation == "scaled_matmul"
    file = keep(row("scaled_matmul", why="off by 3"))
    assert file.parent.name == "fluxq" and file.name == "nvidia-l4_sm-89_570.1_0.1.0_2.11_3.6.json".replace(
        "-89", "_89"
    )
    assert chosen().implementation == "weight_only_matmul" and "not scaled_matmul: off by 3" in chosen().reason
    assert dispatch.refusal("scaled_matmul", "fp8", CHIP) == "off by 3"
    assert not dispatch.refusal("scaled_matmul", "fp8", "sm_90")
    assert not vouched("scaled_matmul", "int8") and not vouched("scaled_matmul")


def test_a_run_that_cannot_time_a_launch_keeps_its_earlier_time_unless_it_is_wrong() -> None:
    def us() -> list[float | None]:
        return [each["us"] for each in json.loads(findings.file_of(HERE).read_text())["rows"]]

    beside = {"beside": {"bf16": 30.0}}
    keep(row("scaled_matmul", us=20.0) | beside)
    file = keep(row("scaled_matmul") | {"beside": {}})
    assert us() == [20.0] and json.loads(file.read_text())["rows"][0]["beside"] == {"bf16": 30.0}
    keep(row("scaled_matmul", us=25.0) | beside)
    assert us() == [25.0]
    keep(row("scaled_matmul", why="off by 3") | {"beside": {}})
    assert us() == [None]


def test_a_wrong_quantizer_takes_every_product_behind_it_away() -> None:
    keep(row("quantize_activation", why="off by 3"))
    assert chosen().implementation == "weight_only_matmul"
    assert "activations cannot be quantized there: off by 3" in chosen().reason


def test_own_times_order_candidates_before_those_that_come_with_fluxq(tmp_path) -> None:
    scheme = Scheme.parse("fp8_tensor-fp8_tensor-static")
    assert dispatch.choose(scheme, CHIP, 64, 96, 256).implementation == "F.scaled_mm"

    def times(ours: float) -> list[dict[str, Any]]:
        both = (("scaled_matmul", ours), ("F.scaled_mm", 2.0))
        return [row(op, "fp8_tensor", us=us) | {"scheme": "fp8_tensor-fp8_tensor"} for op, us in both]

    (tmp_path / "measured").mkdir()
    shipped = findings.document(HERE | {"gpu": "another L4"}, times(1.0))
    (tmp_path / "measured" / "l4.json").write_text(json.dumps(shipped))
    findings.forget()
    dispatch.forget()
    choice = dispatch.choose(scheme, CHIP, 64, 96, 256)
    assert choice.implementation == "scaled_matmul" and "1 us measured on another L4" in choice.reason
    keep(*times(3.0))
    dispatch.forget()
    assert "2 us measured on NVIDIA L4" in dispatch.choose(scheme, CHIP, 64, 96, 256).reason


def test_later_rows_take_the_place_of_those_of_the_same_launch_alone() -> None:
    keep(row("scaled_matmul", why="off by 3"), row("F.scaled_mm"))
    keep(row("scaled_matmul", m=65))
    assert findings.wrong("scaled_matmul", "fp8", CHIP) == "off by 3" and not vouched("scaled_matmul", m=65)
    keep(row("scaled_matmul"))
    assert not findings.wrong("scaled_matmul", "fp8", CHIP) and vouched("scaled_matmul") and vouched("F.scaled_mm")


def test_a_cell_is_vouched_for_at_the_shapes_that_were_compared_alone() -> None:
    keep(row("scaled_matmul", m=65))
    assert vouched("scaled_matmul", m=65) and vouched("scaled_matmul", m=128)
    others = ({"m": 64}, {"m": 129}, {"m": 65, "n": 97}, {"m": 65, "k": 512})
    assert not any(vouched("scaled_matmul", "fp8", **other) for other in others)


def test_tokens_that_are_alike_have_one_tile() -> None:
    most = {row.max_m for file in TUNED.glob("*.json") for row in tuned_rows(file.stem) if row.max_m}
    assert most >= {1, 16, 64} and all(findings.alike(m, 1, 1)[0] == m for m in (*most, LARGEST_GEMV))


def test_two_runs_at_once_are_one_too_many() -> None:
    with (
        findings.keeping(HERE) as keeper,
        pytest.raises(RuntimeError, match="is being written by process"),
        findings.keeping(HERE),
    ):
        pytest.fail("both write")
    assert keeper.why_not == ""


def test_a_killed_run_leaves_what_it_had_found_and_names_what_it_was_at() -> None:
    for times in (1, 2):
        findings.Keeper(HERE).begin("another", [row("scaled_matmul")])  # and no end
        assert findings.Keeper(HERE).unended == {"another": times} and vouched("scaled_matmul")
    with findings.keeping(HERE) as keeper:
        keeper.begin("another", [])
        keeper.end()  # one of this name, or by Ctrl-C
        keeper.begin("a third", [row("F.scaled_mm")])
        keeper.end()
        keeper.write([])
    assert findings.Keeper(HERE).unended == {"another": 2} and vouched("scaled_matmul") and vouched("F.scaled_mm")
    with findings.keeping(HERE) as keeper:
        keeper.begin("another", [])
        keeper.end()
        keeper.settle()
        keeper.write([])
    assert not findings.Keeper(HERE).unended


def test_a_folder_that_cannot_be_written_is_a_reason_and_no_error(tmp_path) -> None:
    (tmp_path / "fluxq").write_text("no folder")
    with findings.keeping(HERE) as keeper:
        keeper.begin("one", [])
        keeper.write([row("scaled_matmul")])
    assert "File exists" in keeper.why_not or "Not a directory" in keeper.why_not
    (tmp_path / "fluxq").unlink()
    with findings.keeping(HERE) as keeper:  # of a disk that is full in the middle
        findings.file_of(HERE).mkdir()
        keeper.write([row("scaled_matmul")])
    assert "directory" in keeper.why_not


def test_a_relative_cache_folder_counts_as_none(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for cache in ("here", "", "./cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert findings.folder() == tmp_path / "home" / ".cache" / "fluxq"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "[]",
        lambda text: text.replace("570.1", "571.0"),
        lambda text: text.replace('"m": 64', '"m": "64"'),
        lambda text: text.replace('"why": "off by 3"', '"why": 3'),
        lambda text: text.replace('"m": 64', f'"m": {10**400}'),
        lambda text: text.replace('"unended": {}', '"unended": {"it": "2"}'),
    ],
    ids=["cut off", "no object", "another driver", "no number", "no text", "no size", "no count"],
)
def test_a_damaged_or_foreign_file_is_named_and_left_out_of_account(damage, caplog) -> None:
    file = keep(row("scaled_matmul", why="off by 3"))
    file.write_text(damage(file.read_text()))
    findings.forget()
    with caplog.at_level(logging.WARNING, "fluxq"):
        assert chosen().implementation == "scaled_matmul"
    (said,) = caplog.messages
    assert str(file) in said and "run `fluxq doctor` again" in said
    keep(row("scaled_matmul"))  # which replaces it
    assert vouched("scaled_matmul")


def test_a_damaged_file_that_came_with_fluxq_stops_no_launch(caplog) -> None:
    findings.MEASURED.mkdir()
    (findings.MEASURED / "h200.json").write_text('{"rows": 1}')
    findings.forget()
    dispatch.forget()
    with caplog.at_level(logging.WARNING, "fluxq"):
        assert chosen().implementation == "scaled_matmul"
    assert "h200.json is no file of `fluxq doctor`" in caplog.messages[0]


def test_without_a_file_no_gpu_is_asked(monkeypatch) -> None:
    monkeypatch.setattr(findings, "devices_of", lambda chip: pytest.fail("it was asked"))
    assert not findings.wrong("scaled_matmul", "fp8", CHIP) and not findings.timings("fp8-fp8", CHIP)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version: gcc 12.3.0",
            "570.86.15",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
    ],
)
def test_the_drivers_version_is_read_where_linux_has_it(text: str, version: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(devices, "_DRIVERS", ((tmp_path / "version", devices._DRIVERS[0][1]),))
    assert devices.driver() == version
