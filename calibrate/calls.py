"""Calls of a pipeline's transformers, kept on disk: their arguments, and the outputs of blocks in their order.

    calls.json                                hash of the request
    batch-0003.json                           the calls of one batch of images, written when it is complete
    batch-0003-transformer-000.safetensors    the tensors among the arguments of one call

A capture that was interrupted goes on at the first batch that is missing or damaged; a finished one runs nothing. Of
several processes each makes whole batches, and all of them read the same calls in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from fluxq.base.console import first_line, logger, progress, without_cure
from fluxq.base.files import read_sealed_json, sha256_json, write_sealed_json
from fluxq.base.ranks import ALONE, Ranks
from fluxq.base.residence import device_of
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.calibrate import nested
from fluxq.calibrate.capture import (
    Item,
    Sampling,
    batches,
    images_per_batch,
    noise_levels,
    number_of_steps,
    run_pipeline,
    spread,
    trajectory_of,
)

_HEADER = "fluxq_call"
_AGAIN = "remove the folder, and calibrate again"


@dataclass(frozen=True)
class Call:
    """One call of a transformer.

    file: of its tensors.
    step: its denoising step.
    held_out: whether its images are held out.
    arguments: layout (see nested.py) of its (args, kwargs).
    outputs: block -> layout of its output, in the order in which blocks ran.
    """

    file: Path
    step: int
    held_out: bool
    arguments: Any
    outputs: dict[str, Any]

    def load(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keyword arguments as the transformer got them; ValueError naming another call's file."""
        with TensorFile(self.file) as stream:
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}
        try:
            return nested.unpack(self.arguments, nested.stored(tensors, device))
        except ValueError as error:
            raise ValueError(f"{self.file}: not the arguments of its call ({error}); {_AGAIN}") from None


@dataclass(frozen=True)
class Calls:
    """The calls of one component, fitting ones first. digest: of the trajectory and the number of held-out images."""

    component: str
    calls: tuple[Call, ...]
    trajectory: dict[str, Any]
    digest: str

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the blocks in the order in which they ran."""
        return tuple(self.calls[0].outputs)

    @property
    def counts(self) -> tuple[int, int]:
        """(calls to fit on, calls held out)."""
        held_out = sum(call.held_out for call in self.calls)
        return len(self.calls) - held_out, held_out


@torch.no_grad()
def capture_calls(
    pipe: Any,
    blocks: Mapping[str, Sequence[str]],
    items_fit: Sequence[Item],
    items_held: Sequence[Item],
    sampling: Sampling,
    *,
    folder: Path,
    most: int | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Calls]:
    """Run the pipeline on both sets of items and keep every call of its transformers at some denoising steps.

    Raises ValueError if the folder holds another capture, if an argument cannot be stored, and if a block does not run
    exactly once in every call.

    blocks: component -> paths of its blocks, see `block_names`.
    most: batches times steps to keep at most, for fitting; each batch then keeps some of the steps, all steps as often.
    ranks: processes that share the folder and the work.
    """
    if not items_fit:
        raise ValueError("no images to fit on: give at least one prompt")
    call, batch_size = sampling.call, sampling.batch_size
    digests = {name: sampling.digests[name] for name in blocks}
    seen = spread(sampling.steps, number_of_steps(pipe, call))
    trajectory = trajectory_of(pipe, digests, [*items_fit, *items_held], call, seen)
    size = batch_size or images_per_batch(call)
    digest = sha256_json([asdict(trajectory), len(items_held), {k: list(v) for k, v in blocks.items()}, size, most])
    if ranks.leads:
        _begin(folder, digest)
    runs = list(_runs(items_fit, items_held, call, seen, batch_size, most))
    stems = [folder / f"batch-{index:04}" for index in range(len(runs))]
    missing = ranks.agree([i for i, stem in enumerate(stems) if not _is_captured(stem)] if ranks.leads else [])
    for index in progress(ranks.share(missing), "Capturing"):
        _capture_batch(pipe, blocks, call, runs[index], stems[index])
    ranks.meet()
    first = stems[0].with_suffix(".json")
    sigmas = _record(first).sigmas
    if seen[-1] >= len(sigmas):
        raise ValueError(f"{first}: says {len(sigmas)} noise levels of at least {seen[-1] + 1}; {_AGAIN}")
    trajectory = replace(trajectory, sigmas=tuple(sigmas[step] for step in seen))
    return _read(stems, tuple(blocks), json.loads(json.dumps(asdict(trajectory))), len(items_held))


@dataclass(frozen=True)
class _Run:
    """One run of the pipeline: a batch of images, whether they are held out, and the steps to keep."""

    items: Sequence[Item]
    held_out: bool
    steps: tuple[int, ...]


def _runs(
    items_fit: Sequence[Item],
    items_held: Sequence[Item],
    call: Mapping[str, Any],
    seen: Sequence[int],
    size: int | None,
    most: int | None,
) -> Iterator[_Run]:
    """Yield batches of one set each. With a limit, batch b keeps every stride-th step, from another one each time."""
    count = len(list(batches(items_fit, size, call))) * len(seen)
    stride = -(-count // most) if most else 1
    for held_out, items in ((False, items_fit), (True, items_held)):
        for index, batch in enumerate(batches(items, size, call)):
            steps = tuple(step for at, step in enumerate(seen) if (at + index) % stride == 0)
            if steps:
                yield _Run(batch, held_out, steps)


def _begin(folder: Path, digest: str) -> None:
    """Make the folder; ValueError if it holds another capture."""
    path = folder / "calls.json"
    try:
        stored = read_sealed_json(path).get("asked") if path.is_file() else None
    except ValueError as error:
        logger.warning("%s: written again", without_cure(error))
        stored = None
    if stored is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed_json(path, {"asked": digest})
    elif stored != digest:
        raise ValueError(
            f"{folder}: holds calls of another model, other prompts, steps or arguments; give another folder"
        )


def _is_captured(stem: Path) -> bool:
    """Tell whether a batch need not be run again: its files are as they were written. The log names a damaged one."""
    record = stem.with_suffix(".json")
    if not record.is_file():
        return False
    try:
        for entry in (entry for calls in _record(record).calls.values() for entry in calls):
            TensorFile(stem.with_name(entry.file)).require_as_written()
    except (ValueError, FileNotFoundError) as error:
        logger.warning("%s: this batch is run again", without_cure(error))
        record.unlink(missing_ok=True)
        return False
    return True


def _capture_batch(
    pipe: Any, blocks: Mapping[str, Sequence[str]], call: Mapping[str, Any], run: _Run, stem: Path
) -> None:
    recorders = {name: _CallRecorder(name, getattr(pipe, name), paths, run, stem) for name, paths in blocks.items()}

    def at_step(step: int) -> None:
        for recorder in recorders.values():
            recorder.step = step

    with _attached(list(recorders.values())):
        for _ in run_pipeline(pipe, run.items, call, batch_size=len(run.items), on_step=at_step):
            pass
    calls = {name: recorder.calls for name, recorder in recorders.items()}
    record = {"sigmas": noise_levels(pipe), "held": run.held_out, "calls": calls}
    write_sealed_json(stem.with_suffix(".json"), record)


class _CallRecorder:
    """Writes the calls of one component in one run of the pipeline."""

    def __init__(self, component: str, model: nn.Module, blocks: Sequence[str], run: _Run, stem: Path) -> None:
        self.component, self.model, self.blocks, self.run, self.stem = component, model, blocks, run, stem
        self.device = device_of(model)
        self.step = 0
        self.calls: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None

    def enter(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step not in self.run.steps:
            return
        layout, tensors = nested.pack((args, kwargs), f"{self.component}: (args, kwargs)", self.device, "cpu")
        file = self.stem.with_name(f"{self.stem.name}-{self.component}-{len(self.calls):03}.safetensors")
        save_sealed(tensors, file, {_HEADER: "1"})
        self.open = {"file": file.name, "step": self.step, "arguments": layout, "outputs": {}}

    def passed(self, name: str) -> Any:
        def hook(_block: nn.Module, _args: Any, output: Any) -> None:
            if self.open is None:
                return
            if name in self.open["outputs"]:
                raise ValueError(
                    f"{name}: runs twice in one call of {self.component}; only blocks that run once can be replayed"
                )
            self.open["outputs"][name] = nested.layout_of(output, f"output of {name}", self.device)

        return hook

    def leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        if self.open is not None:
            silent = [name for name in self.blocks if name not in self.open["outputs"]]
            if silent:
                raise ValueError(f"{silent[0]}: this block of {self.component} does not run in every call")
            self.calls.append(self.open)
            self.open = None


@contextmanager
def _attached(recorders: Sequence[_CallRecorder]) -> Iterator[None]:
    with ExitStack() as stack:
        for recorder in recorders:
            model = recorder.model
            stack.enter_context(model.register_forward_pre_hook(recorder.enter, with_kwargs=True))
            stack.enter_context(model.register_forward_hook(recorder.leave))
            for name in recorder.blocks:
                stack.enter_context(model.get_submodule(name).register_forward_hook(recorder.passed(name)))
        yield


@dataclass(frozen=True)
class _Made:
    """A `Call` as a batch's file has it; `file` by name."""

    file: str
    step: int
    arguments: Any
    outputs: dict[str, Any]


@dataclass(frozen=True)
class _Record:
    """Contents of a batch's file."""

    sigmas: list[float]
    held: bool
    calls: dict[str, list[_Made]]


_RECORD = TypeAdapter(_Record)


def _record(path: Path) -> _Record:
    """Return the contents of a batch's file; ValueError naming it where it is damaged or names files elsewhere."""
    content = read_sealed_json(path)
    try:
        record = _RECORD.validate_json(json.dumps(content), strict=True)
        for entry in (entry for calls in record.calls.values() for entry in calls):
            if not entry.file.startswith(f"{path.stem}-") or Path(entry.file).name != entry.file:
                raise ValueError(f"it names a file {entry.file[:80]!r} that is not beside it")
            if entry.step not in range(len(record.sigmas)):
                raise ValueError(f"it has a call at step {entry.step} of {len(record.sigmas)}")
            _require_arguments(entry.arguments)
            nested.require_sound({"dict": entry.outputs})
    except (ValueError, RecursionError) as error:  # pydantic's is a ValueError
        raise ValueError(f"{path}: not the calls of a batch ({first_line(error)}); {_AGAIN}") from None
    return record


def _require_arguments(layout: Any) -> None:
    nested.require_sound(layout)
    both = layout.get("tuple", ()) if isinstance(layout, dict) else ()
    if [next(iter(part), "") if isinstance(part, dict) else "" for part in both] != ["tuple", "dict"]:
        raise ValueError("its arguments are not some by place and some by name")


def _read(
    stems: Sequence[Path], components: Sequence[str], trajectory: dict[str, Any], items_held: int
) -> dict[str, Calls]:
    records = [_record(stem.with_suffix(".json")) for stem in stems]
    digest = sha256_json([trajectory, items_held])
    by_component = {}
    for component in components:
        calls = tuple(
            Call(stem.with_name(entry.file), entry.step, record.held, entry.arguments, entry.outputs)
            for stem, record in zip(stems, records, strict=True)
            for entry in record.calls.get(component, ())
        )
        if all(call.held_out for call in calls):
            raise ValueError(
                f"{component}: was not called at the steps looked at; look at more steps (calls: {stems[0].parent})"
            )
        if len({tuple(call.outputs) for call in calls}) > 1:
            raise ValueError(
                f"{component}: its blocks run in another order in some calls; they cannot be replayed (calls: "
                f"{stems[0].parent})"
            )
        by_component[component] = Calls(component, calls, trajectory, sha256_json([digest, component]))
    return by_component
