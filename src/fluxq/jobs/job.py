"""A job: options of commands that make checkpoints, the plans made of them, its place, its identity and its folder.

The identity is all that decides the bytes that a job writes (`identity_of`). The folder is a finished checkpoint, or
the work that an interrupted run goes on with: finished blocks lie beside the output in a hidden folder named by the
identity, with a manifest (`job.json`). A run with other options compares it and names the differences.
"""

from __future__ import annotations

import errno
import glob
import os
import platform
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

import fluxq
from fluxq.base.console import logger, without_cure
from fluxq.base.files import clear_parts, read_json, sha256_json, write_json
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.base.output import ANY_JOB, NEW, OLD, Output, is_being_written, job_digest, remove, sole_writer
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.capture import watch_shared_inputs
from fluxq.calibrate.prompts import PromptSet
from fluxq.calibrate.statistics import Statistics
from fluxq.eval.images.protocols import PROTOCOLS
from fluxq.jobs.memory import Bound
from fluxq.jobs.requirements import call_of, existing_parent, makes_video, require_free_space, require_steps
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import SourceWeights, read_plan_file
from fluxq.quantize.lora import FusedWeights, LoraFile, Updates, fuse_into
from fluxq.recipes.plan import GENERIC, Plan
from fluxq.recipes.recipe import Calibration, Recipe

_MANIFEST = "job.json"  # in the work folder: the job whose work it is
RUNS = "runs.json"  # there: errors of a search's plans that ran
CHECK_IMAGES, CHECK_VIDEOS = 4, 2
# Calibration and evaluation draw noise from seeds that never meet.
_CALIBRATION_SEEDS = 1 << 20


@dataclass(frozen=True)
class JobOptions:
    """Options of plan, calibrate and quantize; None leaves the recipe's, the folder's or the pipeline's own value."""

    model: str | None = None
    recipe: str = "nvfp4"
    profile: Any = None
    output: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int | None = None
    prompts: str | None = None
    call: dict[str, Any] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    statistics: str | None = None
    lora: tuple[str, ...] = ()
    revision: str | None = None
    local_files_only: bool = False
    overwrite: bool = False
    check: bool = True
    parallel_blocks: bool = False
    push_to_hub: str | None = None
    private: bool = False
    max_shard_bytes: int = checkpoint.MAX_SHARD_BYTES
    max_memory: int | None = None
    in_memory: bool = False  # the pipeline was, and is at `model` for this job alone


@dataclass(frozen=True)
class Run:
    """Place of a job.

    device: device of this process.
    ranks: processes that do the job together.
    memory: bound on memory, None without one.
    """

    device: str
    ranks: Ranks = ALONE
    memory: Bound | None = None

    @property
    def limit(self) -> int | None:
        """Bytes that weights and activations may take on the device, None without a bound."""
        return self.memory.limit if self.memory else None


@dataclass(frozen=True)
class Job:
    """All inputs of a job, read and checked; it has one plan per component to quantize, by default the recipe's."""

    options: JobOptions
    run: Run
    folder: ModelFolder
    recipe_name: str
    recipe: Recipe
    calibration: Calibration
    plans: tuple[Plan, ...]
    prompts: PromptSet
    statistics: Statistics | None
    output: Path
    identity: dict[str, Any]
    loras: tuple[LoraFile, ...] = ()
    updates: dict[str, tuple[Updates, ...]] = field(default_factory=dict)
    finished: bool = False  # the output exists, just as this job would make it
    configs: Mapping[str, str] = field(default_factory=dict)  # component -> SHA-256 of its config.json, likewise
    stamps: Mapping[str, Any] = field(default_factory=dict)  # component -> `ModelFolder.stamps`, when this was begun

    @property
    def calibrated(self) -> dict[str, Plan]:
        """Component -> plan, of the transformers, whose activations calibration looks at."""
        return {plan.component: plan for plan in self.plans if plan.kind == "transformer"}

    @property
    def fitted(self) -> dict[str, Plan]:
        """Component -> plan, of those with layers that are fitted to their inputs."""
        plans = self.calibrated.items()
        return {name: plan for name, plan in plans if any(la.method.needs_data for la in plan.quantized)}

    @property
    def is_listed(self) -> bool:
        """True if the recipe has a list of the steps to compute made."""
        return any(plan.compute for plan in self.plans)

    @property
    def call(self) -> dict[str, Any]:
        """Pipeline arguments: the folder's defaults, the recipe's number of steps, overridden by the command line."""
        return call_of(self.folder, self._defaults, self.options.call)

    @property
    def check_call(self) -> dict[str, Any]:
        """Arguments of the closing check's calls; by default its videos are as short as a smoke evaluation's."""
        frames = PROTOCOLS["smoke"].frames
        return call_of(self.folder, self._defaults, self.options.call, frames)

    @property
    def _defaults(self) -> dict[str, Any]:
        of = self.recipe.steps.of if self.recipe.steps else None
        return {**self.folder.generation_defaults, **({"num_inference_steps": of} if of else {})}

    @property
    def calibration_items(self) -> Sequence[Any]:
        """(row, seed) of each image that calibration looks at."""
        return self.prompts.items(self.calibration.count, _CALIBRATION_SEEDS + self.calibration.seed)

    @property
    def check_items(self) -> Sequence[Any]:
        """(row, seed) of each image of the closing check; of rows with sizes or images only those like the first."""
        count = CHECK_VIDEOS if makes_video(self.folder) else CHECK_IMAGES
        return self.prompts.alike.items(count, self.calibration.seed)

    def weights(self, component: str) -> SourceWeights:
        """Return the component's 16-bit weights, LoRA files fused."""
        if component in self.updates:
            return FusedWeights(self.folder, component, self.updates[component])
        return SourceWeights(self.folder, component)

    def require_unchanged(self, component: str) -> None:
        """Raise RuntimeError if the component's files are not those that this job began with."""
        if component in self.stamps and self.folder.stamps(component) != self.stamps[component]:
            raise RuntimeError(
                f"{self.folder.path / component} has changed since this run began: what was measured is of other "
                "weights. Start again when nothing writes there any more"
            )

    def digest(self, component: str) -> str:
        """Return the SHA-256 of the component's weights, LoRA files included."""
        digest = self.identity.get("model", {}).get(component)
        digest = digest if isinstance(digest, str) else self.folder.digest(component)
        if component not in self.updates:
            return digest
        return sha256_json(
            [digest, *([lora.digest, lora.weight] for lora in self.loras if lora.component == component)]
        )

    def load_reference(self) -> Any:
        """Load the 16-bit pipeline that the checkpoint is made from and measured against."""
        require_steps(self.folder)
        if self.run.memory is not None:
            pipe = self.run.memory.load(self.folder, self.updates)
        else:
            pipe: Any = load_pipeline(self.folder, self.options.dtype, self.run.device)
            for component, updates in self.updates.items():
                fuse_into(getattr(pipe, component), updates)
        for component, plan in self.calibrated.items():
            if plan.family == GENERIC and (component in self.fitted or plan.static_groups()):
                groups = plan.statistics_groups().values()
                watch_shared_inputs(getattr(pipe, component), [[layer.name for layer in group] for group in groups])
        return pipe


def identity_of(job: Job) -> dict[str, Any]:
    """Return the identity of the job: checkpoints with equal identities are the same.

    Where layers are only rounded and there is no checkpoint to compare with, models go by the stamps of their files:
    they are hashed as they are read, and the record has the identity of `with_digests`.
    """
    options = job.options
    # A pipeline in memory is written anew each time, and its files have other stamps.
    is_rounded = job.recipe.profile == "rtn" and not job.loras and not options.in_memory
    hashed_first = not is_rounded or is_taken(job)
    name_of = job.folder.digest if hashed_first else job.folder.stamp
    return {
        "fluxq": fluxq.__version__,
        "recipe": job.recipe.digest,
        "model": {plan.component: name_of(plan.component) for plan in job.plans},
        "copied": checkpoint.digest_rest(job.folder, [plan.component for plan in job.plans]),
        "loras": [[lora.component, lora.digest, lora.weight] for lora in job.loras],
        "components": sorted(plan.component for plan in job.plans),
        "plans": sha256_json({p.component: [[la.name, str(la.scheme)] for la in p.layers] for p in job.plans}),
        "prompts": job.prompts.digest,
        "calibration": job.calibration.model_dump(mode="json"),
        "statistics": job.statistics.content_digest if job.statistics else None,
        "call": job.call,
        "dtype": options.dtype,
        "max_shard_bytes": options.max_shard_bytes,
        "parallel_blocks": (options.parallel_blocks and bool(job.fitted)) or None,  # as in records that lack it
    }


def finished_checkpoint(job: Job) -> bool:
    """Tell whether this job's finished checkpoint is at the output; ValueError for another checkpoint."""
    output = job.output
    if not is_taken(job):
        return False
    record = read_plan_file(output) or {}  # `Output.require` has refused folders without one
    differing = _differing(with_digests(job), record.get("identity", {}))
    if differing:
        raise ValueError(
            f"output folder {output} holds a checkpoint that differs in {differing}; "
            "give another --output, or --overwrite to replace it"
        )
    if job.options.check and record.get("check") is None:
        raise ValueError(f"{output} was made with --no-check; pass it again to accept that, or --overwrite to check")
    return True


def is_finished(job: Job, output: Output) -> bool:
    """Tell whether the file that a job writes is there, with those beside it; ValueError for another one."""
    if job.options.overwrite:
        return False
    output.require_free(overwrite=False, job=job_digest(decisive(job)))
    return output.holds(job_digest(decisive(job)))


def require_same_statistics(job: Job) -> None:
    """Raise ValueError for finished statistics at the output that are not this job's."""
    if Statistics.stored_job(job.output) != job_digest(decisive(job)):
        raise ValueError(
            f"output {job.output} holds statistics of another run; give another --output, or --overwrite to replace it"
        )
    try:
        Statistics.load(job.output)
    except ValueError as error:
        raise ValueError(f"{without_cure(error)}; --overwrite makes it again") from None


def is_taken(job: Job) -> bool:
    """Tell whether something stands at the output that may not be replaced."""
    output = job.output
    return not job.options.overwrite and output.exists() and (output.is_file() or any(output.iterdir()))


def with_digests(job: Job, read: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, Any]:
    """Return the identity with digests in place of stamps. read: component -> fingerprints of hashed tensors."""
    digests, folder = read or {}, job.folder
    model = {
        component: name if isinstance(name, str) else folder.digest(component, digests.get(component))
        for component, name in job.identity["model"].items()
    }
    return {**job.identity, "model": model}


@contextmanager
def work_of(job: Job) -> Iterator[Path]:
    """Yield the work folder to the processes of one job; it is removed when the job is done, and kept when it fails."""
    ranks, work = job.run.ranks, work_folder(job)
    with sole_writer(job.output) if ranks.leads else nullcontext():
        if ranks.leads:
            _begin(job, work)
        ranks.meet()
        if not (work / _MANIFEST).is_file():
            raise RuntimeError(f"{platform.node()}: {work} is not here; use an output that every process can see")
        try:
            yield work
        except BaseException as error:
            if ranks.leads:  # a fault of the job looks like trouble that passes
                _keep_what_is_done(work, error)
            raise
        if ranks.leads:
            remove(work)


def work_folder(job: Job) -> Path:
    """Return the folder beside the output that an interrupted run of the same job, and no other, goes on with."""
    output = job.output.resolve()
    return output.parent / f".{output.name}.{job_digest(decisive(job))[:16]}.work"


def decisive(job: Job) -> dict[str, Any]:
    """Return all that decides the bytes of finished blocks, for `job_digest`; the size of shards does not."""
    decisive = {key: value for key, value in job.identity.items() if key != "max_shard_bytes"}
    return {**decisive, "parallel_blocks": job.options.parallel_blocks}


def _begin(job: Job, work: Path) -> None:
    """Make the work folder, or clear half-made files of a killed process in it.

    Raises ValueError for the folder of another job, naming the differences; with `overwrite` that is removed.
    """
    output, identity = job.output.resolve(), decisive(job)
    for other in _beside(output):
        _clear_obstacles(other)
    Output(output).put_back()  # of any killed command
    Output(output).clear()
    for other in _beside(output):
        if other == work or not (other / _MANIFEST).is_file():
            _remove_if_unbegun(other)
            continue
        if not job.options.overwrite:
            _refuse(job, other)
        differing = _differing(identity, _read_manifest(other / _MANIFEST))
        logger.warning("what an interrupted run that differs in %s had done is removed: %s", differing, other)
        remove(other)
    for part in list(work.rglob(".*.part")):
        remove(part)
    if (work / _MANIFEST).is_file():
        logger.warning("going on with what an interrupted run left in %s", work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / _MANIFEST, identity)


def _clear_obstacles(work: Path) -> None:
    """Remove a folder, pipe or broken link in place of a file, and a file in place of a folder."""
    if work.is_file():
        remove(work)
    for root, folders, files in os.walk(work):
        for path in (Path(root, name) for name in (*folders, *files)):
            if not _is_of_its_kind(path, is_file=path.suffix in (".json", ".safetensors", ".part")):
                logger.warning("%s: in the way of fluxq's own work, and removed", path)
                remove(path)
        if Path(root) == work:
            folders[:] = [name for name in folders if name not in (NEW, OLD)]  # outputs, not work


def _is_of_its_kind(path: Path, *, is_file: bool) -> bool:
    """Tell whether a path is a file, or is a folder; OSError of a disk that does not answer, which says neither."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):  # a broken link
            raise
        return False
    return stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)


def require_no_other(job: Job) -> None:
    """Refuse the work of another job before `_begin` would, unless a process is at it just now."""
    begun = [work for work in _beside(job.output.resolve()) if (work / _MANIFEST).is_file()]
    if job.options.overwrite or not begun or is_being_written(job.output):
        return
    job = replace(job, identity=job.identity or identity_of(job))
    for other in begun:
        if other != work_folder(job):
            _refuse(job, other)


def _beside(output: Path) -> list[Path]:
    """List the work folders of an output, of all jobs."""
    return sorted(output.parent.glob(f".{glob.escape(output.name)}.{ANY_JOB}.work"))


def _refuse(job: Job, other: Path) -> NoReturn:
    differing = _differing(decisive(job), _read_manifest(other / _MANIFEST))
    raise ValueError(
        f"{job.output}: an interrupted run that differs in {differing} is kept in {other}; go on with it "
        "by its own command, give another --output, or --overwrite to remove what it has done"
    )


def _remove_if_unbegun(work: Path) -> None:
    """Remove a work folder that holds no more than half a manifest: its process was killed in between."""
    clear_parts(work, _MANIFEST)
    with suppress(OSError):  # it holds something
        work.rmdir()


def _read_manifest(file: Path) -> dict[str, Any]:
    """Read the job of a work folder; {}, which differs from any job in everything, for one that was damaged."""
    try:
        return read_json(file)
    except ValueError:
        return {}


def clear_leftovers(job: Job) -> None:
    """Remove files that a process, killed just before its end, left beside a finished checkpoint."""
    output = job.output.resolve()
    if not any(output.parent.glob(f".{glob.escape(output.name)}.*")):
        return
    stamps = {component: job.folder.stamp(component) for component in job.identity["model"]}
    with suppress(RuntimeError), sole_writer(output):  # another holder of the lock clears away itself
        Output(output).put_back()
        Output(output).clear()
        for model in (job.identity["model"], stamps):
            remove(work_folder(replace(job, identity={**job.identity, "model": model})))


def _keep_what_is_done(work: Path, error: BaseException) -> None:
    """Keep finished blocks after an error, and log it; a note of an interruption says so.

    Captured calls alone stay too, but not where the model or the recipe is at fault, which the next run would be.
    """
    has_blocks = any(work.glob("*/[0-9][0-9][0-9][0-9].safetensors"))
    has_work = any(work.rglob("*.safetensors")) or (work / RUNS).is_file()
    if not has_blocks and (isinstance(error, ValueError) or not has_work):
        remove(work)
        return
    kept = f"what is done is kept in {work}: the same command goes on with it"
    if isinstance(error, KeyboardInterrupt):
        error.add_note(kept)
    else:
        logger.warning(kept)


def _differing(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Name the keys of `mine` that have another value in `theirs`; of objects in both, which of their keys."""
    differences = []
    for key in sorted(key for key, value in mine.items() if theirs.get(key) != value):
        one, other, parts = mine[key], theirs.get(key), []
        if isinstance(one, dict) and isinstance(other, dict):
            parts = sorted(part for part in one.keys() | other.keys() if one.get(part) != other.get(part))
        differences.append(f"{key} ({', '.join(parts)})" if parts else key)
    return ", ".join(differences)


def require_space(job: Job, work: Path) -> None:
    """Raise OSError before the start where the disk would run out."""
    needed = _space_needed(job, work)
    require_free_space(existing_parent(job.output), needed, "finished blocks and the checkpoint")


def _space_needed(job: Job, work: Path) -> int:
    """Return the bytes that are still to be written, without the calls that layers are fitted to."""
    folder = job.folder
    planned = {plan.component: plan for plan in job.plans}
    dtype = getattr(torch, job.options.dtype)
    quantized = sum(_most_bytes(plan, job.weights(name), dtype) for name, plan in planned.items())
    copied = sum(_size(folder.path / component) for component in folder.components if component not in planned)
    written = sum(_size(work / component) for component in planned)
    return 2 * quantized + copied - written


def _most_bytes(plan: Plan, source: SourceWeights, dtype: torch.dtype) -> int:
    """Return the bytes that a quantized component takes, if its layers end with all that may be tried."""
    bits = {f"{layer.name}.weight": layer.most_stored_bits for layer in plan.quantized}
    plain = [name for name in source.names if name not in bits]
    stored = [(source.stored(name), source.stays_fp32(name)) for name in plain]
    return sum(bits.values()) // 8 + sum(s.nbytes if as_is else prod(s.shape) * dtype.itemsize for s, as_is in stored)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
