"""Everything there is to find out on a GPU, in one go: are the kernels right, how fast is a step, which tiles are fast.

    python benchmarks/gpu_session.py --out DIR                on any CUDA machine with torch, Triton, click and pytest
    python benchmarks/gpu_session.py --out DIR --dry-run      anywhere, on the interpreter: that everything runs

Stages run one after the other, each in processes of its own, so that one that crashes takes no other with it. The first
four are what a first call of ten minutes is for: every kernel launched once and compared, what `fluxq doctor` finds,
rates of what a step is made of, and steps of FLUX.1-dev's shapes, of proven kernels alone. Then come the long proofs,
tiles and times. The time is shared out by weight; what a stage leaves goes to the next ones, one that runs out of it
keeps what it has, and one that could not do anything in what is left is not begun. With --resume another call does what
is not done yet, of the same sources. In DIR, written after each stage:

    results.json    every stage: whether it is right, how long it took, what it found; where all this ran
    rates.json      rates of products, attention and passes over memory
    flux_step.json  times of a whole step of FLUX.1-dev's shapes, and whether the goals are met, for benchmarks/
    bench.json      the benchmark of kernels, for benchmarks/
    log.txt         what the stages printed
    report.md       goals and times
    tuned/          kernels/tuned with the best tiles in front
    measured.json   for kernels/measured

With --collect FOLDER the first three files are copied there after each stage, with `session.tar.gz` of all of DIR: four
files, for a machine of which little is brought back. Unpacked, the archive is a DIR to resume.

Result files say what became of the PROOFS. flux_step.json has times of those rows alone whose kernels `first` proved,
and goes again if a later proof finds something wrong. The last three are only written if all PROOFS ran and found
nothing wrong; tiles and measured.json not of a dry run. The exit code is 0 if all is well, 1 if something is wrong,
crashed or not proven yet, 2 where there is no GPU.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # fluxq need not be installed

import click  # noqa: E402
import torch  # noqa: E402

from benchmarks.kernels import tune  # noqa: E402
from benchmarks.kernels.report import goals, measured, report  # noqa: E402
from benchmarks.sources import sources  # noqa: E402
from fluxq.base.devices import commit  # noqa: E402
from fluxq.base.files import write_json, write_text  # noqa: E402
from fluxq.eval.speed.machine import describe  # noqa: E402


@dataclass(frozen=True)
class Session:
    """Settings that stages need: where files go, whether this is a dry run, and where what matters is copied to."""

    out: Path
    dry_run: bool
    collect: Path | None = None

    @property
    def shards(self) -> int:
        """Processes that share a stage: compiling keeps one core busy each, and each takes memory of the GPU."""
        if self.dry_run:
            return 1
        memory = torch.cuda.get_device_properties("cuda").total_memory
        return max(1, min(16, (os.cpu_count() or 2) - 1, memory // (4 << 30)))

    def file(self, stage: str, shard: int = 0) -> Path:
        return self.out / "stages" / f"{stage}.{shard}.json"

    def files(self, stage: str) -> list[Path]:
        return sorted((self.out / "stages").glob(f"{stage}.*.json"))


@dataclass(frozen=True)
class Stage:
    """commands: of its processes, for so many seconds.

    judge: of what they left, "right" (None: it says nothing), "complete", "about" for people, and more for the file.
    least: seconds without which it is not begun. continues: takes up what an earlier call of it left.
    """

    name: str
    weight: float
    commands: Callable[[Session, float], list[Sequence[str]]]
    judge: Callable[[Session], dict[str, Any]]
    least: float = 1
    continues: bool = False


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for what is found."
)
@click.option("--minutes", type=float, default=9.25, show_default=True, help="For everything together.")
@click.option("--dry-run", is_flag=True, help="On the interpreter, tiny: that everything runs.")
@click.option("--only", multiple=True, help="Only this stage (repeatable); what DIR holds of the others stays.")
@click.option("--resume", is_flag=True, help="Only what DIR does not hold of these sources yet, or in part.")
@click.option("--collect", type=click.Path(file_okay=False, path_type=Path), help="Folder for copies: four files.")
def main(out: Path, minutes: float, dry_run: bool, only: tuple[str, ...], resume: bool, collect: Path | None) -> None:
    """Check, measure and tune kernels, fused blocks and whole steps on the GPU at hand."""
    if not dry_run and not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device, or torch does not see it; --dry-run needs none")
    unknown = set(only) - {stage.name for stage in STAGES}
    if unknown:
        raise click.UsageError(f"no stage {', '.join(sorted(unknown))}, only {', '.join(s.name for s in STAGES)}")
    session = Session(out.resolve(), dry_run, collect and collect.resolve())
    stages = [stage for stage in STAGES if not only or stage.name in only]
    if resume:
        stages = unfinished(session, stages)
    kept = forget(session, stages, resume)
    found = run_stages(session, stages, 60 * minutes, kept)
    well = conclude(session, found)
    if not proven(found):
        click.echo("no report: " + ", ".join(f"{name} is {verdict}" for name, verdict in proofs_of(found).items()))
    sys.exit(0 if well else 1)


def unfinished(session: Session, stages: Sequence[Stage]) -> list[Stage]:
    """Those that an earlier session of these sources did not begin or end, or that crashed."""
    verdicts = {row["stage"]: row["verdict"] for row in _earlier(session)}
    return [stage for stage in stages if verdicts.get(stage.name) not in DONE]


def forget(session: Session, stages: Sequence[Stage], resume: bool = False) -> list[dict[str, Any]]:
    """Remove what an earlier session left of these stages, and all that it concluded; its rows of the others.

    resume: files of stages that continue stay. Of other sources nothing is kept.
    """
    earlier = _earlier(session)
    kept = [row for row in earlier if row["stage"] not in {stage.name for stage in stages}]
    stay = {row["stage"] for row in kept} | {stage.name for stage in stages if resume and earlier and stage.continues}
    for file in (session.out / "stages").glob("*"):
        if file.name.partition(".")[0] not in stay and file.is_file():
            file.unlink()
    for name in ("results.json", "log.txt", *CONCLUSIONS):
        (session.out / name).unlink(missing_ok=True)
    shutil.rmtree(session.out / "tuned", ignore_errors=True)
    (session.out / "stages").mkdir(parents=True, exist_ok=True)
    return kept


def _earlier(session: Session) -> list[dict[str, Any]]:
    """Rows of the stages that an earlier session of these sources and this kind ran."""
    found = _read(session.out / "results.json")
    same = (found.get("sources"), found.get("dry_run")) == (sources(), session.dry_run)
    return found["stages"] if same else []


def run_stages(
    session: Session, stages: Sequence[Stage], seconds: float, kept: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Run the stages in their order within so many seconds; what may be concluded is written after each of them.

    A stage gets its share of what is left, or `least` if that is more and there is as much. kept: rows of stages that
    ran before.
    """
    begun = time.monotonic()
    device = torch.device("cpu" if session.dry_run else "cuda")
    found: dict[str, Any] = {"dry_run": session.dry_run, "commit": commit(), "sources": sources()}
    found |= {"device": describe(device), "stages": list(kept)}
    conclude(session, found)
    for number, stage in enumerate(stages):
        left = seconds - (time.monotonic() - begun)
        share = left * stage.weight / sum(later.weight for later in stages[number:])
        row = run_stage(session, stage, max(share, min(stage.least, left)))
        click.echo(f"{stage.name:<12} {row['verdict']:<10} {row['seconds']:>6.1f} s  {row['about']}")
        found["stages"].append(row)
        conclude(session, found)
        collect(session)
    return found


def run_stage(session: Session, stage: Stage, seconds: float) -> dict[str, Any]:
    """Run a stage's processes together, and say in one word what became of it: `_verdict`, "no time" or "not here"."""
    row: dict[str, Any] = {"stage": stage.name, "verdict": "no time", "seconds": 0.0, "about": ""}
    if seconds < stage.least and not (session.dry_run and seconds >= 1):
        return row
    begun = time.monotonic()
    commands = stage.commands(session, 0.9 * seconds)  # the rest is for starting and writing
    if not commands:
        return row | {"verdict": "not here", "about": stage.judge(session).get("about", "")}
    codes = _run_together(session, stage.name, commands, begun + seconds)
    try:
        judged = stage.judge(session)
    except (OSError, ValueError, LookupError) as problem:
        judged = {"right": None, "complete": False, "about": f"left nothing to read: {problem}"}
    if any(codes):
        judged["about"] += f"; exit codes {sorted(set(codes))}".replace(str(OUT_OF_TIME), "out of time")
    return row | judged | {"verdict": _verdict(judged, codes), "seconds": round(time.monotonic() - begun, 1)}


def _verdict(judged: dict[str, Any], codes: Sequence[int]) -> str:
    """ "wrong", "crashed", "incomplete" or "right"."""
    if judged["right"] is False:
        return "wrong"
    # A process that found something wrong exits with 1, pytest without a test to run with 5.
    if any(code not in (0, 5, OUT_OF_TIME) for code in codes):
        return "crashed"
    if judged["right"] is None:
        return "incomplete" if OUT_OF_TIME in codes else "crashed"
    return "right" if judged["complete"] else "incomplete"


def _run_together(session: Session, name: str, commands: Sequence[Sequence[str]], deadline: float) -> list[int]:
    """Exit codes of processes that run at the same time; what they print goes to the log, one after the other."""
    logs = [session.out / "stages" / f"{name}.{number}.log" for number in range(len(commands))]
    running = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as stream:
            running.append(
                subprocess.Popen(
                    command, stdout=stream, stderr=stream, cwd=ROOT, env=_environment(session), start_new_session=True
                )
            )
    codes = [_wait(process, deadline) for process in running]
    with (session.out / "log.txt").open("ab") as whole:
        for log, code in zip(logs, codes, strict=True):
            whole.write(f"\n=== {log.stem}: exit code {code}\n".encode() + log.read_bytes())
    return codes


def conclude(session: Session, found: dict[str, Any]) -> bool:
    """Write results.json and what may be concluded by now, and remove what may no longer; whether all is well."""
    verdicts = {row["stage"]: row["verdict"] for row in found["stages"]}
    bench, timed, rates, step = (_read(session.file(name)) for name in ("bench", "time", "rates", "step"))
    if bench:
        found["goals"] = goals(bench)
    write_json(session.out / "results.json", found)
    proofs, all_proven = proofs_of(found), proven(found)
    # Each row of step has asked `first` itself: a wrong kernel that it does not launch takes nothing from it.
    held_against = {name: verdicts.get(name, "not run") for name in (*PROOFS, "blocks") if name != "first"}
    step_holds = not {"wrong", "crashed"} & set(held_against.values())
    bench_holds = bool(bench) and all_proven and not bench["wrong"]
    lines = [f"- {row['stage']}: {row['verdict']} ({row['about']})" for row in found["stages"]]
    conclusions = {
        "rates.json": rates and rates | {"proofs": proofs},
        "flux_step.json": step and step_holds and step | {"proofs": proofs | held_against},
        "bench.json": bench and bench | {"proofs": proofs},
        "report.md": bench_holds and "\n".join([report(bench), "", *lines]) + "\n",
        "measured.json": bench_holds and not session.dry_run and measured(bench),
    }
    for name in CONCLUSIONS:
        _put(session.out / name, conclusions[name])
    if timed and all_proven and not session.dry_run:
        tune.write_tuned(timed, session.out / "tuned")
    return all_proven and not {"wrong", "crashed"} & set(verdicts.values())


def collect(session: Session) -> None:
    """Copy results to the folder that was asked for, with everything in one archive; each file is there whole."""
    if session.collect is None:
        return
    session.collect.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=session.collect) as folder:
        made = [Path(shutil.make_archive(str(Path(folder) / "session"), "gztar", session.out))]
        made += [Path(shutil.copy(file, folder)) for file in map(session.out.joinpath, COLLECTED) if file.exists()]
        for name in COLLECTED:
            (session.collect / name).unlink(missing_ok=True)  # what no longer holds
        for file in made:
            file.replace(session.collect / file.name)


def _put(file: Path, value: Any) -> None:
    """Write a text, or anything else as JSON; remove the file if there is nothing to write."""
    if not value:
        file.unlink(missing_ok=True)
    elif isinstance(value, str):
        write_text(file, value)
    else:
        write_json(file, value)


def proofs_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the verdicts of PROOFS, "not run" for those that no call began."""
    verdicts = {row["stage"]: row["verdict"] for row in found["stages"]}
    return {name: verdicts.get(name, "not run") for name in PROOFS}


def proven(found: dict[str, Any]) -> bool:
    """Tell whether all PROOFS ran, if not to their ends, and found nothing wrong."""
    return all(verdict in ("right", "incomplete") for verdict in proofs_of(found).values())


def _read(file: Path) -> dict[str, Any]:
    """Return what a process left, {} if it left nothing."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _wait(process: subprocess.Popen, deadline: float) -> int:
    """Its exit code; when its time is over it and all that it started are ended."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return OUT_OF_TIME


def _environment(session: Session) -> dict[str, str]:
    """Return the environment of processes, which keep and read findings of `fluxq doctor` in DIR."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Options for another pytest are none of ours: these tests run without conftest.py, which may define them.
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    return os.environ | own | {"XDG_CACHE_HOME": str(session.out / "cache")}


def _module(session: Session, name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", name, *arguments, *["--dry-run"] * session.dry_run]


# The stages: their commands, and what is to be said of what they leave.


def _tests(session: Session, seconds: float) -> list[Sequence[str]]:
    """Every test of the kernels, launched on the device; those of a dry run on the interpreter, on copies."""
    files = sorted(map(str, (ROOT / "tests" / "kernels").glob("test_*_kernel.py")))
    files = files[:2] if session.dry_run else files
    return _pytest(session, "tests", session.shards, "--noconftest", *files)


def _blocks(session: Session, seconds: float) -> list[Sequence[str]]:
    """Tests that want a GPU: fused blocks, attention, graphs, offloading; of a dry run a block on the interpreter."""
    if missing_packages(*DRAWING):
        return []
    if session.dry_run:
        return _pytest(session, "blocks", 1, "--run-all", str(ROOT / "tests" / "runtime" / "test_fused_kernels.py"))
    return _pytest(session, "blocks", min(4, session.shards), "--run-all", *gpu_tests())


def gpu_tests() -> list[str]:
    """The tests marked `gpu`, as pytest takes them; but not those of this script."""
    found = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "@pytest.mark.gpu" in text and path.name != "test_gpu_session.py":
            functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
            marked = (f for f in functions if "pytest.mark.gpu" in map(ast.unparse, f.decorator_list))
            found += [f"{path}::{function.name}" for function in marked]
    return found


def _pytest(session: Session, name: str, shards: int, *arguments: str) -> list[Sequence[str]]:
    """pytest with benchmarks/kernels/on_gpu.py, which writes the outcomes of a shard to a file."""
    # pyproject.toml's options need a plug-in that runs tests side by side; here the shards do.
    options = ["-o", "addopts=--import-mode=importlib --strict-markers"]
    options += ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "benchmarks.kernels.on_gpu"]
    options += ["--on-device", "cpu", "--at-most", "1"] if session.dry_run else ["--on-device", "cuda"]
    return [
        [
            *(sys.executable, "-m", "pytest", *options, "--shard", f"{shard}/{shards}"),
            *("--outcomes", str(session.file(name, shard).with_suffix(".lines")), *arguments),
        ]
        for shard in range(shards)
    ]


def _judge_outcomes(name: str) -> Callable[[Session], dict[str, Any]]:
    def judge(session: Session) -> dict[str, Any]:
        outcomes: dict[str, dict[str, Any]] = {}
        for path in sorted((session.out / "stages").glob(f"{name}.*.lines")):
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                outcomes[row["test"]] = row
        counts = {kind: sum(row["outcome"] == kind for row in outcomes.values()) for kind in OUTCOMES}
        failed = [row for row in outcomes.values() if row["outcome"] == "failed"]
        right = not failed if counts["passed"] or failed else None
        return {"right": right, "complete": not counts["not run"], "about": _counts(counts), "failed": failed}

    return judge


def _judge_blocks(session: Session) -> dict[str, Any]:
    missing = missing_packages(*DRAWING)
    about = {"right": None, "complete": True, "about": f"not installed: {', '.join(missing)}"}
    return about if missing else _judge_outcomes("blocks")(session)


def missing_packages(*more: str) -> list[str]:
    """Return those packages that whole models need, kernels do not, and this machine lacks. more: needed besides."""
    return [name for name in ("diffusers", "pydantic", "peft", "accelerate", *more) if find_spec(name) is None]


def _doctor(session: Session, seconds: float) -> list[Sequence[str]]:
    """`fluxq doctor`, which judges kernels as blocks launch them, and whose times decide between them."""
    if missing_packages() or session.dry_run:
        return []
    return [[sys.executable, "-W", "ignore", "-m", "fluxq", "doctor", "--share", str(session.file("doctor"))]]


def _judge_doctor(session: Session) -> dict[str, Any]:
    """Findings that it kept, also where it did not come to its end."""
    if session.dry_run:
        return {"right": None, "complete": True, "about": "it has a dry run of its own: --chip CHIP --interpret"}
    if missing := missing_packages():
        return {"right": None, "complete": True, "about": f"not installed: {', '.join(missing)}"}
    files = sorted((session.out / "cache" / "fluxq").glob("*.json"))
    rows = [row for file in files for row in _read(file)["rows"]]
    wrong = [row for row in rows if row["why"]]
    right = not wrong if rows else None
    counts = {"cells and shapes": len(rows), "wrong": len(wrong)}
    return {"right": right, "complete": session.file("doctor").exists(), "about": _counts(counts), "wrong": wrong}


def _same_bits(name: str) -> Callable[[Session, float], list[Sequence[str]]]:
    def commands(session: Session, seconds: float) -> list[Sequence[str]]:
        shards = session.shards
        return [
            _module(
                session,
                "benchmarks.kernels.same_bits",
                *(name, "--shard", f"{shard}/{shards}", "--json", str(session.file(name, shard))),
            )
            for shard in range(shards)
        ]

    return commands


def _judge_cases(name: str) -> Callable[[Session], dict[str, Any]]:
    def judge(session: Session) -> dict[str, Any]:
        parts = [_read(file) for file in session.files(name)]
        cases = [row for part in parts for row in part["cases"]]
        failed = [row for row in cases if not row["ok"]]
        left_out = sum("left_out" in row for row in cases)
        complete = len(parts) == session.shards and all(part["complete"] for part in parts)
        counts = {"right": len(cases) - len(failed) - left_out, "wrong": len(failed), "not offered": left_out}
        right = not failed if cases else None
        return {"right": right, "complete": complete, "about": _counts(counts), "failed": failed, "cases": cases}

    return judge


def _try(session: Session, seconds: float) -> list[Sequence[str]]:
    limit = ("--seconds", f"{0.8 * seconds:.0f}")  # one that was begun may take a while
    return [
        _module(
            session,
            "benchmarks.kernels.tune",
            *("try", "--shard", f"{shard}/{session.shards}", "--json", str(session.file("try", shard)), *limit),
        )
        for shard in range(session.shards)
    ]


def _judge_try(session: Session) -> dict[str, Any]:
    """Candidates that are unfit are no fault."""
    parts = [_read(file) for file in session.files("try")]
    rows = [row for part in parts for row in part["candidates"]]
    counts = {"fit": sum(row["fit"] for row in rows), "unfit": sum(not row["fit"] for row in rows)}
    complete = len(parts) == session.shards and all(part["complete"] for part in parts)
    unfit = [row for row in rows if not row["fit"]]
    return {"right": True if rows else None, "complete": complete, "about": _counts(counts), "unfit": unfit}


def _time(session: Session, seconds: float) -> list[Sequence[str]]:
    tried = [str(file) for file in session.files("try")]
    options = ("time", "--json", str(session.file("time")), "--seconds", f"{seconds:.0f}")
    return [_module(session, "benchmarks.kernels.tune", *options, *tried)] if tried else []


def _judge_time(session: Session) -> dict[str, Any]:
    found = _read(session.file("time"))
    about = _counts({part: len(found[part]) for part in ("searches", "failed")})
    right = True if found["searches"] else None
    return {"right": right, "complete": found["complete"], "about": about, "failed": found["failed"]}


def _rates(session: Session, seconds: float) -> list[Sequence[str]]:
    """Rates of what a step is made of, with the tiles that are there; of proven kernels alone."""
    options = ["--rates", "--proofs", str(session.out / "stages"), "--json", str(session.file("rates"))]
    return [_module(session, "benchmarks.kernels.bench", *options, "--minutes", f"{seconds / 60:.2f}")]


def _judge_rates(session: Session) -> dict[str, Any]:
    """Kernels that are not proven are left out: that they are wrong was said before."""
    judged, peaks = _judge_timed("rates")(session), _read(session.file("rates"))["peaks"]
    return judged | {"about": ", ".join([judged["about"], *(f"{name} {rate:.0f}" for name, rate in peaks.items())])}


def _bench(session: Session, seconds: float) -> list[Sequence[str]]:
    """With the tiles just found, where there are any."""
    options = ["--json", str(session.file("bench")), "--minutes", f"{seconds / 60:.2f}"]
    if _read(session.file("time")) and not session.dry_run:
        options += ["--tuned", str(_tuned(session))]
    return [_module(session, "benchmarks.kernels.bench", *options)]


def _judge_timed(name: str) -> Callable[[Session], dict[str, Any]]:
    def judge(session: Session) -> dict[str, Any]:
        found = _read(session.file(name))
        counts = {part: len(found[part]) for part in ("results", "left_out", "wrong")}
        right = not found["wrong"] if found["results"] or found["wrong"] else None
        return {"right": right, "complete": found["complete"], "about": _counts(counts), "wrong": found["wrong"]}

    return judge


def _step(session: Session, seconds: float) -> list[Sequence[str]]:
    """A whole step of proven kernels, with the tiles that are there, in whichever call: one file holds its rows."""
    if missing_packages():
        return []
    options = ["--out", str(session.file("step")), "--minutes", f"{seconds / 60:.2f}", "--resume", "--batch", "1"]
    options += ["--proofs", str(session.out / "stages")]
    run = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "flux_step.py"), *options]
    if session.dry_run:
        small = "--device cpu --hidden 128 --blocks 1+1 --pixels 64 --text 16 --rounds 2 --row fp8 --uncompiled"
        return [[*run, *small.split()]]
    return [[*run, "--pixels", "1024"]]


def _judge_step(session: Session) -> dict[str, Any]:
    missing = missing_packages()
    if missing:
        return {"right": None, "complete": True, "about": f"not installed: {', '.join(missing)}"}
    found = _read(session.file("step"))
    timed = [row for row in found["rows"] if "seconds" in row]
    about = [_counts({"rows": len(timed), "missing": len(found["rows"]) - len(timed)})]
    about += [f"no baseline: {found['baseline'][0]['missing']}"] if found["baseline"] else []
    about += [f"not taken apart: {found['unseen']}"] if found.get("unseen") else []
    for goal in found["goals"]:
        if goal["measured"] is not None:
            word = "met" if goal["met"] else "not met"
            about.append(f"{goal['goal']} {goal['measured']:.2f}x of {goal['at_least']}x: {word}")
        elif "refused" in goal:
            about.append(f"{goal['goal']} refused: {goal['refused']}")
    missing_rows = [row for row in found["rows"] if "missing" in row]
    return {
        "right": True if timed else None,
        "complete": found["complete"],
        "about": ", ".join(about),
        "goals": found["goals"],
        "missing": missing_rows,
    }


def _tuned(session: Session) -> Path:
    """A folder with kernels/tuned and the best tiles of this session in front."""
    folder = session.out / "stages" / "tuned"
    tune.write_tuned(_read(session.file("time")), folder)
    return folder


def _sanitizer(session: Session, seconds: float) -> list[Sequence[str]]:
    """Every kernel once under the CUDA toolkit's checker, if it is there and works here."""
    why_not = sanitizer_is_missing(min(60.0, seconds / 2))
    write_json(session.file("sanitizer"), {"why_not": why_not})
    if why_not:
        return []
    once = _module(session, "benchmarks.kernels.same_bits", "once")
    checks = ("--tool", "memcheck"), ("--tool", "racecheck")
    return [
        ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", *check, "--error-exitcode", "1", *once]
        for check in checks
    ]


def sanitizer_is_missing(seconds: float) -> str:
    """Return why compute-sanitizer cannot be used, as far as that shows in so many seconds; empty if it can."""
    if not shutil.which("compute-sanitizer"):
        return "compute-sanitizer is not on the PATH"
    touch = [sys.executable, "-c", "import torch; torch.ones(8, device='cuda').sum().item()"]
    try:
        done = subprocess.run(
            ["compute-sanitizer", "--error-exitcode", "1", *touch], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"compute-sanitizer had no result after {seconds:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    return "" if done.returncode == 0 else f"compute-sanitizer does not work here: {lines[-1]}"


def _judge_sanitizer(session: Session) -> dict[str, Any]:
    why_not = _read(session.file("sanitizer"))["why_not"]
    if why_not:
        return {"right": True, "complete": True, "about": f"not available: {why_not}"}
    logs = [
        path.read_text(encoding="utf-8", errors="replace") for path in (session.out / "stages").glob("sanitizer.*.log")
    ]
    summaries = [line.strip("= ") for log in logs for line in log.splitlines() if "SUMMARY" in line]
    right = all(": 0 " in line for line in summaries) if summaries else None
    return {"right": right, "complete": len(summaries) == len(logs), "about": "; ".join(summaries)}


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in counts.items())


OUT_OF_TIME = -1000  # no exit code
DRAWING = ("altair", "vl_convert")  # which the tests of a report import
OUTCOMES = ("passed", "failed", "skipped", "not run")
PROOFS = ("first", "tests", "interpreter", "runs")  # without which nothing is concluded of kernels and tiles
COLLECTED = ("results.json", "rates.json", "flux_step.json")
CONCLUSIONS = ("rates.json", "flux_step.json", "bench.json", "report.md", "measured.json")  # files in DIR
DONE = ("right", "wrong", "not here")  # verdicts that another call would not change
STAGES = (  # the first four get nearly all of a first call, the others of later ones
    Stage("first", 80, _same_bits("first"), _judge_cases("first"), least=45),
    Stage("doctor", 85, _doctor, _judge_doctor, least=45),
    Stage("rates", 60, _rates, _judge_rates, least=45),
    Stage("step", 280, _step, _judge_step, least=150, continues=True),
    Stage("tests", 30, _tests, _judge_outcomes("tests"), least=60),
    Stage("interpreter", 10, _same_bits("interpreter"), _judge_cases("interpreter"), least=15),
    Stage("runs", 15, _same_bits("runs"), _judge_cases("runs"), least=20),
    Stage("blocks", 12, _blocks, _judge_blocks, least=20),
    Stage("try", 18, _try, _judge_try, least=30),
    Stage("time", 7, _time, _judge_time, least=10, continues=True),
    Stage("bench", 20, _bench, _judge_timed("bench"), least=30),
    Stage("sanitizer", 8, _sanitizer, _judge_sanitizer, least=15),
)

if __name__ == "__main__":
    main()
