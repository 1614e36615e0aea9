"""Advice on which of a report's checkpoints to use, and why, in a sentence or two: the beginning of a page.

Of the checkpoints that are good enough, the one that takes least memory, and of those within ALIKE of it the closest to
16 bit; a closer or faster one is named with what it costs. They are compared as the machine of `fluxq bench` serves
them, where all of them were timed and evaluated so, and else as they are stored.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fluxq.eval.metrics.figures import OUTCOMES, computed, size, stated
from fluxq.eval.metrics.schema import Estimate, Report, Run, Speedup, in_words

GOOD = ("identical", "equivalent", "comparable")
ALIKE = 0.05  # of the memory: no reason to prefer one
_ENOUGH = 64  # prompts that a first judgement is worth
_ALPHA = 0.05


def advice(report: Report) -> str:
    """Return the checkpoint to use and the reason; if nothing decides, what is missing."""
    checkpoints = _by_checkpoint(report).values()
    timed = [run for runs in checkpoints for run in runs if run.speed is not None]
    chosen = timed if len(timed) == len(checkpoints) else [_stored(runs) for runs in checkpoints]
    good = [run for run in chosen if run.verdict.outcome in GOOD]
    if good:
        return _use(report, good, len(chosen))
    otherwise = [run for run in report.runs if run.verdict.outcome in GOOD]
    if otherwise:
        return _use(report, otherwise, len({run.checkpoint for run in report.runs}))
    alike = [run for run in chosen if run.verdict.outcome == "alike"]
    if alike:
        return _look(report, alike)
    undecided = [run for run in chosen if run.verdict.outcome == "inconclusive"]
    if undecided:
        return f"Nothing says yet whether {_listed(undecided)} will do: {_more(undecided)}."
    words = dict.fromkeys(OUTCOMES[run.verdict.outcome][1] for run in chosen)
    return f"Do not use {_listed(chosen)}: {', '.join(words)}."


def _by_checkpoint(report: Report) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for run in report.runs:
        runs.setdefault(run.checkpoint, []).append(run)
    return runs


def _stored(runs: Sequence[Run]) -> Run:
    """Return the run of the weights as they are stored; another one where that was not evaluated."""
    return next((run for run in runs if run.backend == "native" and run.cache is None), runs[0])


def _use(report: Report, good: Sequence[Run], of: int) -> str:
    chosen, why = _choice(report, good)
    word = OUTCOMES[chosen.verdict.outcome][1]
    if of == 1:
        return f"Use {_named(chosen)}: {word}, with {_saving(chosen)}."
    if len(good) == 1:
        return f"Use {_named(chosen)}: of {of} the only one that is {word}, with {_saving(chosen)}."
    reason = f"Use {_named(chosen)}: {word}, and {why} of {len(good)} that are good enough, with {_saving(chosen)}"
    return ". ".join([reason, *_others(report, chosen, good)]) + "."


def _look(report: Report, alike: Sequence[Run]) -> str:
    chosen, why = _choice(report, alike)
    count = f"{len(report.items)} {report.noun}s"
    again = f"fluxq eval {shlex.quote(chosen.checkpoint)} --count {_ENOUGH}"
    if len(alike) == 1:
        opening = f"{_named(chosen)} looks as good as published on {count}, with {_saving(chosen)}"
        return f"{opening}. Before you rely on it: {again}."
    opening = (
        f"Of {len(alike)} that look as good as published on {count}, {_named(chosen)} is {why}, with {_saving(chosen)}"
    )
    sentences = [opening, *_others(report, chosen, alike)]
    return ". ".join([*sentences, f"Before you rely on one, evaluate each on more {report.noun}s: {again}"]) + "."


def _choice(report: Report, good: Sequence[Run]) -> tuple[Run, str]:
    """Return the run to take, and its place among the others in words."""
    least = min(map(resident, good))
    small = [run for run in good if resident(run) <= (1 + ALIKE) * least]
    chosen = min(small, key=resident)
    for run in small:
        chosen = run if _closer(report, run, chosen) else chosen
    if len(small) == 1:
        return chosen, "the smallest"
    closest = "the closest to 16 bit and " if all(_closer(report, chosen, r) for r in good if r is not chosen) else ""
    return chosen, f"{closest}as small as any"


def _others(report: Report, chosen: Run, good: Sequence[Run]) -> list[str]:
    """Return sentences on gains and costs of the closest and the fastest run, only where those were decided."""
    sentences = []
    closer = [(gain, run) for run in good if run is not chosen and (gain := _closer(report, run, chosen)) is not None]
    if closer:
        gain, best = max(closer, key=lambda each: each[0].mean or 0.0)
        by, more = stated(gain, ".1f", "dB"), resident(best) / resident(chosen) - 1
        sentences.append(f"{_named(best)} is closer to 16 bit, by {by} of PSNR, and takes {more:.0%} more memory")
    gains = {run.name: gain for run in good if (gain := speed_up(run)) is not None}
    over = gains[chosen.name].over if chosen.name in gains else ""
    speeds = {name: gain.ratio for name, gain in gains.items() if gain.over == over and gain.ratio is not None}
    if chosen.name in speeds and len(speeds) > 1:
        fastest = max(speeds, key=lambda name: speeds[name].mean or 0.0)
        chosen_speed, fastest_speed = speeds[chosen.name], speeds[fastest]
        if fastest != chosen.name and (chosen_speed.high or chosen_speed.mean or 0.0) < (
            fastest_speed.low or fastest_speed.mean or 0.0
        ):
            than = f"{in_words(over)}'s speed against {stated(chosen_speed, '.2f')}"
            sentences.append(f"{fastest} is faster: {stated(fastest_speed, '.2f')} times {than}")
    return sentences


def _closer(report: Report, run: Run, chosen: Run) -> Estimate | None:
    """Return the gain in PSNR of a run, where the comparison of their images decided that there is one."""
    for each in report.comparisons:
        if {each.first, each.second} != {run.name, chosen.name} or each.p_holm >= _ALPHA:
            continue
        gain = each.difference if each.first == run.name else each.difference.negated
        return gain if gain.low is not None and (gain.mean or 0.0) > 0 else None
    return None


def resident(run: Run) -> int:
    """Return the bytes that a run's quantized components take in memory; on disk where nobody looked."""
    return run.in_memory.resident_bytes if run.in_memory else run.size.bytes_after


def speed_up(run: Run) -> Speedup | None:
    """Return a run's speed-up end to end over the baseline; None where that was not measured or not certain."""
    gains = [each for each in run.speed.speedups if each.stage == "end to end"] if run.speed else []
    return next((each for each in gains if each.ratio is not None), None)


def _saving(run: Run) -> str:
    share = resident(run) / run.size.bytes_before
    memory = f"{size(resident(run))} in memory, {share:.0%} of 16 bit"
    gain = speed_up(run)
    if gain is None:
        return memory if run.speed else f"{memory}; its speed was not measured"
    whose = "its" if in_words(gain.over) == "16 bit" else f"{in_words(gain.over)}'s"
    return f"{memory}, and {stated(gain.ratio, '.2f')} times {whose} speed"


def _more(runs: Sequence[Run]) -> str:
    needed = [run.verdict.more_images for run in runs if run.verdict.more_images is not None]
    decides = len(needed) == len(runs)
    return f"about {max(needed)} more {runs[0].noun}s would decide" if decides else "the verdicts below say why"


def _named(run: Run) -> str:
    """Return the checkpoint, and its arithmetic here where that is not of its own codes."""
    if run.served is None or run.served.arithmetic == "native":
        return run.name
    return f"{run.checkpoint} ({computed(run.served)} here)"


def _listed(runs: Sequence[Run]) -> str:
    *others, last = [_named(run) for run in runs]
    return f"{', '.join(others)} or {last}" if others else last
