"""Every command that writes, killed or failing at every call that changes a file, and then run again.

    python tests/crash/harness.py [--every N] [--only COMMAND]… [--jobs N] [--json FILE]

What has to hold, whatever happened:
- a file of the output is the old one or the new one, byte for byte and in its permissions, and of an output that
  appears as a whole all are; only a kill may leave it away, with all that is old kept aside;
- a call that failed makes the exit code 1, or has changed nothing, or is named in a warning;
- the same command again ends with 0, its output equal to an undisturbed one, and nothing is left beside it: also where
  the disturbed one had finished. It keeps what was finished.
Exits with 1 where something did not.

A kill behind a call is one before the next, and only behind the last one a trial of its own. Of consecutive writes to
one file the first, a middle one and the last are disturbed. Folders that are left alike are finished once.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import zygote
from commands import COMMANDS, Command, make, needs
from zygote import CRASHED, Disturbance, Ended

HERE = Path(__file__).parent
TAKES_SPACE = ("open", "write", "mkdir", "rename", "link", "fsync", "truncate")  # what a full disk makes fail
HOWS = ("kill", "torn", "behind", "EIO", "ENOSPC", "SIGTERM", "SIGINT")
CODES = {"EIO": (0, 1), "ENOSPC": (0, 1), **dict.fromkeys(("kill", "torn", "behind"), (-signal.SIGKILL,))}
_TRACES = re.compile(r"^\.(.*\.)?[A-Za-z0-9_]{8}\.part$")  # mkstemp's names: other letters each time
Tree = dict[str, str]  # relative path -> permissions and SHA-256, those alone of a folder


@dataclass(frozen=True)
class Call:
    number: int
    name: str
    path: str


@dataclass
class Found:
    """Results of one command. trials: by kind. calls: of an undisturbed run, by name."""

    command: str
    calls: dict[str, int] = field(default_factory=dict)
    trials: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0


class Place:
    """Folder in which one command runs, again and again."""

    def __init__(self, name: str, command: Command, root: Path) -> None:
        self.name, self.command, self.base = name, command, root / "base"
        self.folder = root / re.sub(r"\W+", "-", name)
        self.words = command.words.format(base=self.base).split()
        self.log = self.folder.with_suffix(".log")

    def begin(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for source, target in self.command.before:
            copy = shutil.copytree if (self.base / source).is_dir() else shutil.copy2
            copy(self.base / source, self.folder / target)

    def run(self, number: int = 0, how: str = "") -> Ended:
        return zygote.run(self.words, self.folder, Disturbance(self.folder, number, how) if how else None)

    def undisturbed(self) -> tuple[Tree, Tree, list[Call]]:
        """The tree before, and after a run; its calls. RuntimeError where two runs differ or it fails."""
        self.begin()
        before, trees = tree(self.folder), []
        for _ in range(2):
            self.begin()
            self.log.unlink(missing_ok=True)
            ended = zygote.run(self.words, self.folder, Disturbance(self.folder, 0, "count", str(self.log)))
            if ended.code != 0:
                raise RuntimeError(f"fluxq {' '.join(self.words)} ended with {ended.code}: {ended.said}")
            trees.append(tree(self.folder))
        if trees[0] != trees[1]:
            raise RuntimeError(f"{self.name}: two runs differ in {differing(*trees)}")
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return before, trees[1], [Call(int(number), *rest) for number, *rest in (line.split(" ", 2) for line in lines)]


def tree(folder: Path) -> Tree:
    """All that lies in a folder, links as such; names that are drawn, and what a lock file says, do not count."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if _TRACES.match(path.name):
            name = re.sub(r"[A-Za-z0-9_]{8}\.part$", "*.part", name)
        told = path.is_file() and not name.endswith((".pid", ".pid.*.part"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if told else ""
        found[name] = f"{stat.filemode(path.lstat().st_mode)} {digest}"
    return found


def differing(one: Tree, other: Tree) -> str:
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def visible(found: Tree) -> Tree:
    """Without what is hidden: work folders, locks, parts."""
    return {name: digest for name, digest in found.items() if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part != ".eval_results" for part in name.split("/"))


def points(calls: list[Call], every: int) -> Iterator[tuple[Call, str]]:
    """Yield each call to disturb, and how: of all trials each `every`-th."""
    number = 0
    for (name, _), group in groupby(calls, lambda call: (call.name, call.path)):
        chosen = list(group)
        if name == "write":
            chosen = [chosen[i] for i in sorted({0, len(chosen) // 2, len(chosen) - 1})]
        for call in chosen:
            for how in HOWS:
                if not _applies(call, how, call.number == calls[-1].number):
                    continue
                number += 1
                if number % every == every // 2:
                    yield call, how


def _applies(call: Call, how: str, is_last: bool) -> bool:
    if how == "torn":
        return call.name == "write"
    if how == "behind":
        return is_last
    if how == "ENOSPC":
        return call.name in TAKES_SPACE
    if how in ("SIGTERM", "SIGINT"):
        return call.number % 6 == (0 if how == "SIGTERM" else 3)
    return True


def try_all(name: str, root: Path, every: int, hows: tuple[str, ...]) -> Found:
    """Run one command undisturbed, and then with each disturbance."""
    began, place, found = time.monotonic(), Place(name, COMMANDS[name], root), Found(name)
    try:
        before, after, calls = place.undisturbed()
    except RuntimeError as error:
        found.faults.append({"how": "undisturbed", "call": "", "fault": str(error)})
        print(f"    {name}, undisturbed: {error}", flush=True)
        return found
    found.calls = dict(sorted(Counter(call.name for call in calls).items()))
    known: dict[str, list[str]] = {}
    for call, how in points(calls, every):
        if how not in hows:
            continue
        place.begin()
        ended = place.run(call.number, how)
        found.trials[how] += 1
        left = tree(place.folder)
        wrong = [*_at_once(place.command, how, ended, before, left, after)]
        key = hashlib.sha256(json.dumps(sorted(left.items())).encode()).hexdigest()
        if key not in known:
            known[key] = [*_again(place, after)]
        wrong += known[key]
        where = {"how": how, "call": f"{call.number} {call.name} {call.path}"}
        for each in wrong:
            found.faults.append({**where, "fault": each})
            print(f"    {name}, {how} at {where['call']}: {each}", flush=True)
    found.seconds = time.monotonic() - began
    shutil.rmtree(place.folder, ignore_errors=True)
    return found


def _at_once(command: Command, how: str, ended: Ended, before: Tree, left: Tree, after: Tree) -> Iterator[str]:
    """Yield the faults that show as soon as the disturbed run has ended."""
    if ended.code is None:
        yield "it hangs"
    if ended.code == CRASHED or "Traceback (most recent call last)" in ended.said:
        yield f"a traceback: {ended.said[-300:]}"
    if ended.code not in (CODES.get(how) or (0, 128 + getattr(signal, how))):
        yield f"exit code {ended.code}: {ended.said[-300:]}"
    seen = visible(left)
    if command.in_place:
        foreign = [name for name, digest in seen.items() if digest not in (before.get(name), after.get(name))]
        foreign = [name for name in foreign if not name.startswith("images/")]  # the next run looks through them
        if foreign or not before.keys() <= left.keys():
            yield f"neither old nor new: {foreign or 'something is gone'}"
    elif seen not in (visible(before), visible(after)):
        is_aside = set(visible(before).values()) <= set(left.values())  # for the next run to put back
        if not (is_aside and how in ("kill", "torn", "behind")):
            yield f"neither the old output nor the new one: {differing(visible(before), seen)}"
    if ended.code == 0:
        if seen != visible(after):
            yield f"exit 0, and its output differs: {differing(visible(after), seen)}"
        unnamed = [name for name in left if name not in after and not _is_named(name, after, ended.said)]
        if unnamed:
            yield f"exit 0, and this is left without a word: {unnamed[:3]}"


def _is_named(name: str, after: Tree, said: str) -> bool:
    """Tell whether a message names what is left, or a folder around it that is itself left."""
    around = [name, *(path.as_posix() for path in PurePosixPath(name).parents)][:-1]
    return any(each not in after and re.search(rf"{re.escape(each)}(?![^\s:;,])", said) for each in around)


def _again(place: Place, after: Tree) -> Iterator[str]:
    """Run the same command again and yield the faults that show then."""
    ended = place.run()
    if ended.code != 0:
        yield f"the same command again ends with {ended.code}: {ended.said[-300:]}"
    for line in re.findall(r".*: (?:this block is made|measured|gathered) again.*", ended.said):
        yield f"the same command again does finished work again: {line}"
    now = tree(place.folder)
    if now != after:
        yield f"after the same command again: {differing(after, now)}"


def build(folder: Path) -> Path | None:
    """Compile interposer.c; None where there is no compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "interposer.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "interposer.c"), "-ldl", "-lpthread"]
    subprocess.run(words, check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="of the trials, one in so many")
    parser.add_argument("--only", action="append", choices=sorted(COMMANDS), help="these commands")
    parser.add_argument("--how", action="append", choices=HOWS, help="these kinds of disturbance")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="where to write what came of it")
    parser.add_argument("--plant", default="", help="Python to run first: a defect that has to be found")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.root is None:
        shared = Path("/dev/shm")
        where = tempfile.mkdtemp(prefix="fluxq-crash-", dir=shared if shared.is_dir() else None)
        try:
            library = build(Path(where))
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            if library is not None:
                environment["LD_PRELOAD"] = str(library)
            words = [sys.executable, __file__, *sys.argv[1:], "--root", where]
            return subprocess.run(words, env=environment).returncode
        finally:
            shutil.rmtree(where, ignore_errors=True)
    return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    os.environ.pop("LD_PRELOAD", None)  # not for what commands start
    by = (
        "interposer.c"
        if zygote.is_interposed()
        else "Python's audit hook: no compiler, so write and fsync are left out"
    )
    print(f"calls are disturbed by {by}", flush=True)
    zygote.warm_up()
    names = asked.only or list(COMMANDS)
    base = asked.root / "base"
    base.mkdir()
    began = time.monotonic()
    for each in sorted({each for name in names for each in needs(COMMANDS[name])}):
        make(base, each)
    exec(asked.plant, {})
    gc.collect()
    gc.freeze()
    how = (asked.root, asked.every, tuple(asked.how or HOWS))
    with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        doing = [pool.submit(try_all, name, *how) for name in names]
        found = []
        for each in doing:
            found.append(each.result())
            _say(found[-1])
    if asked.json:
        _write(asked.json, found, asked.every, by, time.monotonic() - began)
    faults = sum(len(each.faults) for each in found)
    print(f"{sum(each.trials.total() for each in found)} trials, {faults} faults, {time.monotonic() - began:.0f} s")
    return int(faults > 0 or not all(each.trials for each in found))  # without a trial nothing was shown


def _say(found: Found) -> None:
    trials = ", ".join(f"{count} {how}" for how, count in found.trials.items())
    print(f"{found.command}: {sum(found.calls.values())} calls, {trials}; {len(found.faults)} faults,"
          f" {found.seconds:.0f} s", flush=True)  # fmt: skip


def _write(file: Path, found: list[Found], every: int, by: str, seconds: float) -> None:
    from datetime import date

    from fluxq.base.devices import commit, versions
    from fluxq.base.files import write_json

    rows = {
        each.command: {
            "calls": each.calls,
            "trials": dict(each.trials),
            "faults": len(each.faults),
            "found": each.faults,
            "seconds": round(each.seconds),
        }
        for each in found
    }
    about = {
        "commit": os.environ.get("FLUXQ_COMMIT") or commit(),
        "date": date.today().isoformat(),
        "versions": versions(),
        "platform": sys.platform,
        "every": every,
        "disturbed by": by,
        "trials": sum(each.trials.total() for each in found),
        "faults": sum(len(each.faults) for each in found),
        "seconds": round(seconds),
        "how": (__doc__ or "").split("\n\n")[-1].strip().replace("\n", " "),
    }
    write_json(file, {**about, "commands": rows})


if __name__ == "__main__":
    sys.exit(main())
