"""Set-up of every process of a run: its environment, options, and the table of docs/diffusers.md that tests fill.

Fixtures are in shared.py, which imports what is slow to import; a process that only hands out tests does without.
"""

from __future__ import annotations

import gc
import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported: before torch and diffusers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, as in shared.py for this one

from pathlib import Path

import pytest

# What a shell without job control starts in the background ignores Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run slow tests, two parameter sets of each")
    parser.addoption("--run-all", action="store_true", help="also run slow tests, with all their parameter sets")
    parser.addoption("--write-features", action="store_true", help="write the tables of documents that tests make")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no" or config.option.collectonly:  # tests run here, not in other processes
        gc.disable()  # until all is imported and collected, see shared.py
        config.pluginmanager.import_plugin("shared")


_left_out: set[str] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Take from a process of tests the sentence about those that it left out, as shared.py made it."""
    _left_out.update(_left_out_of(node))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which tests were left out, and how they are run."""
    for sentence in _left_out.union(_left_out_of(config)):
        terminalreporter.write_line(sentence)


def _left_out_of(process) -> list[str]:
    sentence = getattr(process, "workeroutput", {}).get("left out")
    return [sentence] if sentence else []


# The table of docs/diffusers.md: a row for each `feature` marker, a column for 16 bit and some recipes. A cell is
# what the tests of that row and column found, as shared.py tells.

FEATURES = Path(__file__).parent.parent / "docs" / "diffusers.md"
_cells: dict[tuple[str, str], set[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the cells, in the process that started the others where tests run in several."""
    for name, value in report.user_properties if report.when == "call" else ():
        if name == "feature":
            row, column, word = value
            _cells.setdefault((row, column), set()).add(word)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compare what ran with the table in the docs, or write it there."""
    if hasattr(session.config, "workerinput"):
        return  # the process that started this one knows all cells
    before, table, after = FEATURES.read_text(encoding="utf-8").split("<!-- features -->\n")
    head, _, *lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    rows = {row: dict(zip(head[1:], words, strict=True)) for row, *words in lines}
    found = {cell: ", ".join(sorted(words)) for cell, words in _cells.items()}
    wrong = {cell: word for cell, word in found.items() if rows.get(cell[0], {}).get(cell[1]) != word}
    if wrong and session.config.getoption("--write-features"):
        from shared import COLUMNS

        for (feature, column), word in wrong.items():
            rows.setdefault(feature, {})[column] = word
        written = [[row, *(words.get(column, "") for column in COLUMNS)] for row, words in rows.items()]
        lines = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1), *written]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        FEATURES.write_text("<!-- features -->\n".join([before, table, after]), encoding="utf-8")
    elif wrong:
        for (feature, column), word in wrong.items():
            print(f"\n{FEATURES.name}: {feature!r} under {column!r} is {word!r}; `pytest --write-features` updates it")
        session.exitstatus = 1
