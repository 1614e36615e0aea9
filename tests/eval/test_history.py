"""A history: rows that many writers add, kills, damage, changes of level, its page."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fluxq.cli import cli
from fluxq.eval.history.changes import change_points
from fluxq.eval.history.results import median_limits
from fluxq.eval.history.rows import HISTORY_FILE, Commit, HistoryRow, Point, append, current_commit, read_history
from fluxq.eval.report.past import series_of

ADDING = """
import sys
sys.path.insert(0, {tests!r})
from eval.test_history import row
from fluxq.eval.history.rows import append
from pathlib import Path
for number in range(20):
    append(Path({folder!r}), row(number))
"""


def row(number: int, value: float = 0.5, **how) -> HistoryRow:
    commit = Commit(revision=f"{number:040x}", time=f"2026-01-01T00:{number % 60:02}:00+00:00", is_changed=False)
    point = Point(value=value, low=value - 0.1, high=value + 0.1, n=8, unit="dB", limit=3, distance=5, floor=5 - value)
    return HistoryRow(
        **{
            "command": "gate",
            "created": "2026-11-28T00:00:00+00:00",
            "commit": commit,
            "subject": "b </script> against a",
            "setting": "5" * 16,
            "machine": "a CPU",
            "versions": {"fluxq": "0"},
            "digests": {},
            "verdict": "equivalent",
            "metrics": {"psnr": point},
            "speed": {"speed": point.model_copy(update={"value": None, "low": None, "high": None})},
            "seconds": 1.5,
            **how,
        }
    )


@pytest.mark.long
def test_parallel_writers_lose_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ADDING.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))]
    for done in [subprocess.Popen(words) for _ in range(4)]:
        assert done.wait() == 0
    assert len(read_history(tmp_path)) == 80
    assert [path.name for path in tmp_path.iterdir()] == [HISTORY_FILE]


def test_a_line_that_was_cut_off_is_passed_over_and_the_next_writer_removes_it(tmp_path: Path) -> None:
    path = tmp_path / HISTORY_FILE
    append(tmp_path, row(0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50])
    assert read_history(tmp_path) == (row(0),)
    append(tmp_path, row(1))
    assert read_history(tmp_path) == (row(0), row(1))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))  # a whole row counts
    append(tmp_path, row(2))
    assert read_history(tmp_path) == (row(0), row(1), row(2))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"kind": "fluxq hist', "damaged, no JSON"),
        ("[1]", "no row of a history of fluxq"),
        ("", "damaged, no JSON"),
        (row(1).model_dump_json().replace('"value":0.5', '"value":1e308'), "metrics.psnr.value: .*less than"),
        (
            row(1).model_dump_json().replace('"schema_version":1', '"schema_version":2'),
            "schema 2, and this fluxq reads 1",
        ),
        (row(1).model_dump_json().replace('"n":8', '"n":"many"'), r"metrics.psnr.n: Input should be"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number_and_before_work(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).write_text(f"{row(0).model_dump_json()}\n{line}\n{row(2).model_dump_json()}\n")
    with pytest.raises(ValueError, match=rf"history.jsonl:2: {reason}"):
        read_history(tmp_path)
    done = CliRunner().invoke(cli, ["history", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 2 and f"{HISTORY_FILE}:2" in done.stderr and not (tmp_path / "page.html").exists()
    done = CliRunner().invoke(cli, ["gate", "tiny", "tiny", "--history", str(tmp_path)])
    assert done.exit_code == 2 and f"{HISTORY_FILE}:2" in done.stderr


def test_commits_of_two_time_zones_are_in_the_order_in_which_they_were_made() -> None:
    first, second = "2026-03-02T01:00:00+02:00", "2026-03-01T23:30:00-08:00"
    commits = [
        Commit(revision=str(index) * 40, time=time, is_changed=False) for index, time in enumerate([first, second])
    ]
    (series,) = series_of([row(1, 0.2, commit=commits[1]), row(0, 0.1, commit=commits[0])])
    assert [point.value for point in series.points] == [0.1, 0.2]
    with pytest.raises(ValueError, match="zone"):
        Commit(revision="0" * 40, time="2026-03-02T01:00:00", is_changed=False)


def test_levels_are_told_apart_and_noise_is_not() -> None:
    draws = random.Random(0)
    levels = [1.0] * 8 + [1.2] * 8 + [0.9] * 8
    assert change_points([level + draws.gauss(0, 0.02) for level in levels]) == [8, 16]
    assert change_points([0.0] * 5 + [2.0] * 5) == [5]  # bit for bit, without noise
    assert change_points([0.0] * 9) == change_points([1.0, 2.0, 1.0]) == []
    flat = [change_points([draws.gauss(1, 0.02) for _ in range(20)]) for _ in range(200)]
    assert sum(map(bool, flat)) <= 20


def test_limits_of_a_median_are_those_of_the_binomial() -> None:
    assert median_limits(range(5)) == (None, None)
    assert median_limits(range(6)) == (0, 5) and median_limits(range(10)) == (1, 8)
    assert median_limits(range(30)) == (9, 20)


@pytest.mark.slow
def test_the_page_draws_changes_and_works_offline(tmp_path: Path) -> None:
    for number in range(12):
        append(tmp_path, row(number, 0.5 + 2 * (number >= 6) + 0.01 * (number % 3)))
    words = ["history", str(tmp_path), "-o", str(tmp_path / "page.html")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.stderr
    assert "psnr: from 0.51 to 2.51 dB at 00000000" in done.stdout and "12 runs" in done.stdout
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    specs = json.loads(page.split('id="specs">')[1].split("</script>")[0])
    assert [*specs] == ["past-0"]  # a speed without a value is no series
    assert '"run": 6.5' in json.dumps(specs["past-0"]) and "var(--c2)" in page
    assert (
        "<svg" in page and "b &lt;/script&gt; against a" in page and "<link" not in page and "src=" not in page[:50000]
    )
    assert CliRunner().invoke(cli, words).exit_code == 0  # finished work is found again
    (tmp_path / "page.html").write_text("mine")
    assert CliRunner().invoke(cli, [*words, "--overwrite"]).exit_code == 2


def test_the_commit_is_that_of_the_current_folder(tmp_path: Path) -> None:
    assert current_commit(tmp_path) is None
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    found = current_commit(tmp_path)
    assert found is not None and len(found.revision) == 40 and not found.is_changed and found.time.startswith("20")
    content = subprocess.run(["git", "cat-file", "commit", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    signed = content.replace("\n\n", "\ngpgsig -----BEGIN PGP SIGNATURE-----\n -----END PGP SIGNATURE-----\n\n", 1)
    hashing = ["git", "hash-object", "-t", "commit", "-w", "--stdin"]
    made = subprocess.run(
        hashing, input=signed, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    gpg = tmp_path / "gpg"
    gpg.write_text("#!/bin/sh\necho 'gpg: Signature made now' >&2\nexit 1\n")
    gpg.chmod(0o755)
    for words in (["config", "log.showSignature", "true"], ["config", "gpg.program", str(gpg)], ["reset", "-q", made]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    found = current_commit(tmp_path)
    assert found is not None and found.revision == made
