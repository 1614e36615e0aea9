"""Tests that columns stay whole, however narrow the terminal, and that long work says how far it is."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxq.base import console
from fluxq.commands import show
from fluxq.jobs.job import JobOptions

HEADER = ("layer", "N", "reason")
NAME = "transformer_blocks.0.attn.to_out.0"
REASON = "the recipe's main format; not centred: its input is made by attention, which nothing can be folded into"
ROWS = [(NAME, "128", REASON), ("x", "3072", "")]


@pytest.fixture
def printed(monkeypatch, capsys):
    """printed(columns, …) is what a terminal of so many columns shows, None: a pipe."""

    def run(columns: int | None, header=HEADER, rows=ROWS, **how) -> list[str]:
        monkeypatch.setattr(show.sys.stdout, "isatty", lambda: columns is not None, raising=False)
        size = os.terminal_size((columns or 80, 24))
        monkeypatch.setattr(show.shutil, "get_terminal_size", lambda *fallback, **named: size)
        show.print_table(header, rows, **how)
        return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_pipe_gets_one_line_for_each_row_without_blanks_at_its_end(printed):
    lines = printed(None)
    assert len(lines) == 3 and lines[1] == f"{NAME}  128   {REASON}" and lines[2] == f"{'x':<34}  3072"


def test_a_wide_terminal_gets_the_last_column_wrapped(printed):
    lines = printed(80)
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    assert lines[1].startswith(f"{NAME}  128   the recipe's main format;") and lines[2].startswith(" " * 42)
    assert " ".join(line[42:] for line in lines[1:-1]) == REASON


@pytest.mark.parametrize("columns", [40, 60])
def test_a_narrow_terminal_gets_it_below_the_row(printed, columns):
    lines = printed(columns)
    assert f"{NAME}  128" in lines and all(line.startswith(("    ", NAME, "layer", "x")) for line in lines)
    assert " ".join(line.strip() for line in lines[lines.index(f"{NAME}  128") + 1 : -1]) == REASON


def test_names_are_never_wrapped_or_cut(printed):
    lines = printed(20, ("layer", "scheme"), [(NAME, "nvfp4-nvfp4-static-center-smooth-h128")])
    assert lines[1] == f"{NAME}  nvfp4-nvfp4-static-center-smooth-h128"


def test_numbers_end_in_line_and_wide_letters_count_twice(printed):
    assert printed(80, ("名前", "MB"), [("a", "1.5"), ("bb", "10")], right=True) == [
        "名前   MB",
        "a     1.5",
        "bb     10",
    ]


# Long work in a log


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Seconds that have passed; a test sets them."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console.sys.stderr, "isatty", lambda: False, raising=False)
    return now


def test_a_log_gets_a_line_a_minute(clock, caplog):
    for _ in console.progress(range(10), "Fitting"):
        clock[0] += 25
    assert caplog.messages == [
        "Fitting: 3 of 10 after 1 min, about 3 min left",
        "Fitting: 6 of 10 after 2 min, about 2 min left",
        "Fitting: 9 of 10 after 3 min, about 1 min left",
    ]


def test_a_log_gets_blocks_by_their_bytes_and_nothing_of_quick_work(clock, caplog):
    with console.blocks_progress("Quantizing", 4, 1000, 1, 400) as advance:
        for size in (100, 100, 400):
            clock[0] += 40
            advance(size)
    assert caplog.messages == ["Quantizing: 3 of 4 blocks after 1 min, about 3 min left"]
    caplog.clear()
    assert list(console.progress(iter("ab"), "Reading")) == ["a", "b"] and caplog.messages == []


def test_work_without_an_end_is_counted(clock, caplog):
    for _ in console.progress(iter(range(3)), "Reading"):
        clock[0] += 61
    assert caplog.messages[-1] == "Reading: 3 after 3 min"


def test_what_a_library_says_of_every_prompt_is_said_once(caplog):
    log, stream = logging.getLogger("a_library"), io.StringIO()
    log.addHandler(logging.StreamHandler(stream))
    log.propagate = False
    for _ in range(2):
        console.say_once("a_library", "The following part")
    child = logging.getLogger("a_library.pipelines")
    for prompt in ("one", "two"):
        child.warning("The following part of your input was truncated: %s", prompt)
        child.warning("something else")
    assert stream.getvalue().count("The following") == 1 and stream.getvalue().count("something else") == 2


def test_the_next_command_has_the_layers_that_statistics_are_of(capsys):
    plan = SimpleNamespace(static_groups=lambda: {"group": ()})
    options = JobOptions("m", include=("a.*",), exclude=("a.b", "a.c"))
    job: Any = SimpleNamespace(finished=True, recipe_name="nvfp4", fitted={}, plans=[plan], options=options)
    show.calibrated(job, Path("s.safetensors"))
    command = "fluxq quantize m --recipe nvfp4 --include 'a.*' --exclude a.b --exclude a.c --statistics s.safetensors"
    assert capsys.readouterr().out.splitlines()[-1] == f"next: {command}"
