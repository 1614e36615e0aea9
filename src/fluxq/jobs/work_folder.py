"""Identity of the job whose folder this is: a finished checkpoint, or the work that an interrupted run goes on with.

A job is known by what decides the bytes it writes (`identity_of`). Its finished blocks lie beside the output in a
hidden folder named by that, with a manifest (`job.json`) that a run with other options compares, to say what differs.
"""

from __future__ import annotations

import glob
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

import fluxq
from fluxq.base.console import logger
from fluxq.base.files import clear_parts, read_json, sha256_json, write_json
from fluxq.base.output import ANY_JOB, Output, is_being_written, job_digest, recover, remove, sole_writer
from fluxq.calibrate.statistics import Statistics
from fluxq.jobs.prepared import Prepared
from fluxq.jobs.requirements import existing_parent, require_free_space
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import SourceWeights, read_plan_file
from fluxq.recipes.plan import Plan

_MANIFEST = "job.json"  # in the work folder: the job whose work it is


def identity_of(prepared: Prepared) -> dict[str, Any]:
    """Return the identity of the job: checkpoints with equal ones are the same.

    Where layers are only rounded and there is no checkpoint to compare with, models go by the stamps of their files:
    they are hashed as they are read, and `with_digests` is what is recorded.
    """
    options = prepared.options
    # A pipeline in memory is written anew each time, and its files have other stamps.
    is_rounded = prepared.recipe.profile == "rtn" and not prepared.loras and not options.in_memory
    hashed_first = not is_rounded or is_taken(prepared)
    name_of = prepared.folder.digest if hashed_first else prepared.folder.stamp
    return {
        "fluxq": fluxq.__version__,
        "recipe": prepared.recipe.digest,
        "model": {plan.component: name_of(plan.component) for plan in prepared.plans},
        "copied": checkpoint.digest_rest(prepared.folder, [plan.component for plan in prepared.plans]),
        "loras": [[lora.component, lora.digest, lora.weight] for lora in prepared.loras],
        "components": sorted(plan.component for plan in prepared.plans),
        "plans": sha256_json({p.component: [[la.name, str(la.scheme)] for la in p.layers] for p in prepared.plans}),
        "prompts": prepared.prompts.digest,
        "calibration": prepared.calibration.model_dump(mode="json"),
        "statistics": prepared.statistics.content_digest if prepared.statistics else None,
        "call": prepared.call,
        "dtype": options.dtype,
        "max_shard_bytes": options.max_shard_bytes,
    }


def finished_checkpoint(prepared: Prepared) -> dict[str, Any] | None:
    """The record of a finished checkpoint at the output that is just what was asked for."""
    output = prepared.output
    if not is_taken(prepared):
        return None
    record = read_plan_file(output) or {}  # `Output.require` has refused what has none
    differing = _differing(with_digests(prepared), record.get("identity", {}))
    if differing:
        raise ValueError(
            f"output folder {output} holds a checkpoint that differs in {differing}; "
            "give another --output, or --overwrite to replace it"
        )
    if prepared.options.check and record.get("check") is None:
        raise ValueError(f"{output} was made with --no-check; pass it again to accept that, or --overwrite to check")
    return record


def finished_statistics(prepared: Prepared) -> dict[str, Any]:
    """Return the record of finished statistics, if they are just what was asked for; ValueError for others."""
    job = Statistics.stored_job(prepared.output)
    if job != job_digest(decisive(prepared)):
        raise ValueError(
            f"output {prepared.output} holds statistics of another run; "
            "give another --output, or --overwrite to replace it"
        )
    return {"job": job}


def is_taken(prepared: Prepared) -> bool:
    """Tell whether something stands at the output that may not be replaced."""
    output = prepared.output
    return not prepared.options.overwrite and output.exists() and (output.is_file() or any(output.iterdir()))


def with_digests(prepared: Prepared, read: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Any]:
    """The identity with digests in place of stamps; read: by component, the tensors that were hashed already."""
    known, folder = read or {}, prepared.folder
    model = {
        component: name if isinstance(name, str) else folder.digest(component, known.get(component))
        for component, name in prepared.identity["model"].items()
    }
    return {**prepared.identity, "model": model}


@contextmanager
def work_of(prepared: Prepared) -> Iterator[Path]:
    """The work folder, for the processes of one job; removed when that is done, kept when it ends otherwise."""
    ranks, work = prepared.ranks, work_folder(prepared)
    with sole_writer(prepared.output) if ranks.leads else nullcontext():
        if ranks.leads:
            _begin(prepared, work)
        ranks.meet()
        if not (work / _MANIFEST).is_file():
            raise RuntimeError(f"{platform.node()}: {work} is not here; use an output that every process can see")
        try:
            yield work
        except BaseException as error:
            if ranks.leads:  # whatever it was: who can tell a fault of the job from trouble that passes
                _keep_what_is_done(work, error)
            raise
        if ranks.leads:
            remove(work)


def work_folder(prepared: Prepared) -> Path:
    """Beside the output: what an interrupted run of the same job goes on with. Another job has one of its own."""
    output = prepared.output.resolve()
    return output.parent / f".{output.name}.{job_digest(decisive(prepared))[:16]}.work"


def decisive(prepared: Prepared) -> dict[str, Any]:
    """Return all that decides the bytes of finished blocks, for `job_digest`; the size of shards does not."""
    decisive = {key: value for key, value in prepared.identity.items() if key != "max_shard_bytes"}
    return {**decisive, "parallel_blocks": prepared.options.parallel_blocks}


def _begin(prepared: Prepared, work: Path) -> None:
    """Make the work folder, or clear what a killed process left half-made in it.

    ValueError for one of another job, naming what differs; with `overwrite` that is removed.
    """
    output, job = prepared.output.resolve(), decisive(prepared)
    Output(output).put_back()  # whatever command was killed
    Output(output).clear()
    for other in _beside(output):
        if other == work or not (other / _MANIFEST).is_file():
            _remove_if_unbegun(other)
            continue
        recover(output, other)
        if not prepared.options.overwrite:
            _refuse(prepared, other)
        differing = _differing(job, _read_manifest(other / _MANIFEST))
        logger.warning("what an interrupted run that differs in %s had done is removed: %s", differing, other)
        remove(other)
    recover(output, work)
    for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
        clear_parts(folder)
    if (work / _MANIFEST).is_file():
        logger.warning("going on with what an interrupted run left in %s", work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / _MANIFEST, job)


def require_no_other(prepared: Prepared) -> None:
    """Refuse, before any work, what `_begin` would: the work of another job, unless a process is at it just now."""
    begun = [work for work in _beside(prepared.output.resolve()) if (work / _MANIFEST).is_file()]
    if prepared.options.overwrite or not begun or is_being_written(prepared.output):
        return
    prepared = replace(prepared, identity=prepared.identity or identity_of(prepared))
    for other in begun:
        if other != work_folder(prepared):
            _refuse(prepared, other)


def _beside(output: Path) -> list[Path]:
    """The work folders of an output, of whatever job."""
    return sorted(output.parent.glob(f".{glob.escape(output.name)}.{ANY_JOB}.work"))


def _refuse(prepared: Prepared, other: Path) -> NoReturn:
    differing = _differing(decisive(prepared), _read_manifest(other / _MANIFEST))
    raise ValueError(
        f"{prepared.output}: an interrupted run that differs in {differing} is kept in {other}; go on with it "
        "by its own command, give another --output, or --overwrite to remove what it has done"
    )


def _remove_if_unbegun(work: Path) -> None:
    """Remove a work folder that holds no more than half a manifest: its process was killed in between."""
    clear_parts(work, _MANIFEST)
    with suppress(OSError):  # it holds something
        work.rmdir()


def _read_manifest(file: Path) -> dict[str, Any]:
    """A job, {} for one that was damaged: it differs from any other in everything."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def clear_leftovers(prepared: Prepared) -> None:
    """Remove what a process left beside a finished checkpoint because it was killed just then."""
    output = prepared.output.resolve()
    if not any(output.parent.glob(f".{glob.escape(output.name)}.*")):
        return
    stamps = {component: prepared.folder.stamp(component) for component in prepared.identity["model"]}
    with suppress(RuntimeError), sole_writer(output):  # whoever else holds the lock clears away itself
        for model in (prepared.identity["model"], stamps):
            job = replace(prepared, identity={**prepared.identity, "model": model})
            remove(work_folder(job))
        Output(output).put_back()
        Output(output).clear()


def _keep_what_is_done(work: Path, error: BaseException) -> None:
    """Keep finished blocks whatever happened, and say so, of an interruption in its note.

    What was captured alone stays too, but not where the model or the recipe is at fault, which the next run would be.
    """
    has_blocks = any(work.glob("*/[0-9]*.safetensors"))
    if not has_blocks and (isinstance(error, ValueError) or not any(work.rglob("*.safetensors"))):
        remove(work)
        return
    kept = f"what is done is kept in {work}: the same command goes on with it"
    if isinstance(error, KeyboardInterrupt):
        error.add_note(kept)
    else:
        logger.warning(kept)


def _differing(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The keys of `mine` that have another value in `theirs`; of objects in both, which of their keys."""
    found = []
    for key in sorted(key for key, value in mine.items() if theirs.get(key) != value):
        one, other, parts = mine[key], theirs.get(key), []
        if isinstance(one, dict) and isinstance(other, dict):
            parts = sorted(part for part in one.keys() | other.keys() if one.get(part) != other.get(part))
        found.append(f"{key} ({', '.join(parts)})" if parts else key)
    return ", ".join(found)


def require_space(prepared: Prepared, work: Path) -> None:
    """Refuse before the start what would run out of disk."""
    needed = _space_needed(prepared, work)
    require_free_space(existing_parent(prepared.output), needed, "finished blocks and the checkpoint")


def _space_needed(prepared: Prepared, work: Path) -> int:
    """Bytes that are still to be written, without the calls that layers are fitted to."""
    folder = prepared.folder
    planned = {plan.component: plan for plan in prepared.plans}
    dtype = getattr(torch, prepared.options.dtype)
    quantized = sum(_most_bytes(plan, prepared.weights(name), dtype) for name, plan in planned.items())
    copied = sum(_size(folder.path / component) for component in folder.components if component not in planned)
    there = sum(_size(work / component) for component in planned)
    return 2 * quantized + copied - there


def _most_bytes(plan: Plan, source: SourceWeights, dtype: torch.dtype) -> int:
    """Return the bytes that a quantized component takes, if its layers end with all that may be tried."""
    bits = {f"{layer.name}.weight": layer.most_stored_bits for layer in plan.quantized}
    plain = [name for name in source.names if name not in bits]
    stored = [(source.stored(name), source.stays_fp32(name)) for name in plain]
    return sum(bits.values()) // 8 + sum(s.nbytes if as_is else prod(s.shape) * dtype.itemsize for s, as_is in stored)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
