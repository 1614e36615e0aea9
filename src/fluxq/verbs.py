"""Python's forms of `fluxq quantize`, `fluxq calibrate` and `fluxq eval`.

Each verb checks what it is given as its command does, shows the same progress and returns a value. Errors are
ValueError and FileNotFoundError for requests that cannot work, RuntimeError and OSError for work that failed.

A pipeline in memory is written beside the output first, in its own dtype, and that copy is removed at the end:
weights are read from files block by block, so that an interrupted job can go on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from fluxq.calibrate.statistics import Statistics
    from fluxq.eval.metrics.schema import Report


@dataclass(frozen=True)
class Checkpoint:
    """A quantized pipeline's folder, and its record: the content of fluxq_plan.json."""

    path: Path
    record: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder; ValueError or FileNotFoundError if there is none."""
        from fluxq.jobs.given import require_checkpoint
        from fluxq.quantize.record import read_record

        require_checkpoint(fspath(folder), recorded=True)
        return cls(Path(folder), read_record(Path(folder)))

    @property
    def passed(self) -> bool | None:
        """The closing check's verdict: no NaN, and every gate of the recipe held; None if there was no check."""
        check = self.record.get("check")
        return check and check["passed"]

    def load(self, **arguments: Any) -> DiffusionPipeline:
        """Load the pipeline: `DiffusionPipeline.from_pretrained`, which takes the arguments; bfloat16 by default."""
        import torch
        from diffusers import DiffusionPipeline

        return DiffusionPipeline.from_pretrained(self.path, **{"dtype": torch.bfloat16, **arguments})


def quantize_pipeline(
    pipeline: str | PathLike[str] | DiffusionPipeline,
    recipe: str | PathLike[str] = "nvfp4",
    *,
    output: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    statistics: str | PathLike[str] | None = None,
    lora: Sequence[str] = (),
    components: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    check: bool = True,
    overwrite: bool = False,
    **options: Any,
) -> Checkpoint:
    """Quantize a pipeline into a folder that diffusers loads.

    pipeline: a folder, a hub id, "tiny", or a pipeline in memory, which has to be in 16 bit without adapters.
    recipe: a shipped recipe's name or a YAML file. output: by default MODEL-RECIPE in the current folder.
    prompts: a file of calibration prompts. statistics: a file that `calibrate_pipeline` wrote. lora: files to fuse,
    as FILE or FILE:WEIGHT. components: by default the recipe's. include, exclude: patterns of layers. call: arguments
    of the pipeline's call, such as height and num_inference_steps. check: compare a few images at the end.
    overwrite: replace a checkpoint that is there.
    options: profile, device, dtype, seed, parallel_blocks, max_memory and max_shard_bytes (bytes), revision,
    local_files_only, as the command's options of these names.

    The same call resumes an interrupted one, and returns a checkpoint that had finished. Where the closing check
    fails, the checkpoint is written all the same, and `passed` is False.
    """
    from fluxq.jobs import making
    from fluxq.jobs.given import require_files

    given = _given(
        options,
        recipe=fspath(recipe),
        prompts=prompts,
        statistics=statistics,
        lora=lora,
        components=components,
        include=include,
        exclude=exclude,
        call=call,
        overwrite=overwrite,
    )
    with _on_disk(pipeline, output, given["recipe"]) as (model, place, source):
        asked = making.Options(**given, model=model, output=place, check=check, source=source)
        require_files(vars(asked))
        prepared = making.prepare(asked)
        record = making.quantize(prepared)
    return Checkpoint(prepared.output, record)


def calibrate_pipeline(
    pipeline: str | PathLike[str] | DiffusionPipeline,
    recipe: str | PathLike[str] = "nvfp4",
    *,
    output: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    components: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Statistics:
    """Gather statistics of the inputs of a pipeline's Linears, write them to a file and return them.

    The arguments are those of `quantize_pipeline`. output: a .safetensors file, by default
    MODEL-RECIPE-statistics.safetensors in the current folder.
    """
    from fluxq.calibrate.statistics import Statistics
    from fluxq.jobs import making
    from fluxq.jobs.given import require_files

    given = _given(
        options, recipe=fspath(recipe), prompts=prompts, components=components, call=call, overwrite=overwrite
    )
    with _on_disk(pipeline, output, given["recipe"], is_file=True) as (model, place, source):
        asked = making.Options(**given, model=model, output=place, source=source)
        require_files(vars(asked))
        return Statistics.load(making.calibrate(making.prepare(asked, writes=False)))


def evaluate_pipeline(
    checkpoint: str | PathLike[str] | Checkpoint,
    *,
    pipeline: str | PathLike[str] | DiffusionPipeline | None = None,
    protocol: str = "smoke",
    prompts: str | PathLike[str] | None = None,
    count: int | None = None,
    metrics: Sequence[str] = (),
    gates: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Compare a checkpoint's images with those of its 16-bit model; writes CHECKPOINT/eval/report.html, .json, .md.

    pipeline: the 16-bit model, by default the one that the checkpoint's record names. protocol: smoke, …: prompts,
    seeds and number of images. count: images. metrics: these, and an error if one cannot be measured. gates: as
    "psnr>=30"; the report's runs say which held. call: arguments of the pipeline's call.
    options: device, dtype, seed, seeds, batch_size, weights, clip, fid_resize, fid_reference, backends, cache, images,
    revision, local_files_only, as the command's options of these names.
    """
    from fluxq.jobs import judge
    from fluxq.jobs.given import require_files

    folder = checkpoint.path if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint).path
    given = _given(options, prompts=prompts, metrics=metrics, gates=gates, call=call)
    with _on_disk(pipeline, folder, "") as (model, _, _):
        asked = judge.Options(**given, model=model, protocol=protocol, count=count)
        require_files(vars(asked))
        report = judge.evaluate(judge.subject(folder, asked))
    if report is None:
        raise RuntimeError(f"{folder}: another process of this run has the report")
    return report


def _given(options: Mapping[str, Any], **named: Any) -> dict[str, Any]:
    """Return options as jobs take them: text for paths, tuples for sequences; TypeError for an option of no job."""
    from fluxq.jobs import judge, making

    row = judge.Options if "gates" in named else making.Options
    own = {"model", "output", "check", "source", "push_to_hub", "private", *named}
    if unknown := options.keys() - (row.__dataclass_fields__.keys() - own):
        known = ", ".join(sorted(row.__dataclass_fields__.keys() - own))
        raise TypeError(f"{', '.join(sorted(unknown))}: no such option; there are {known}")
    made = {**options, **named, "call": dict(named["call"] or {})}
    for name, value in made.items():
        if isinstance(value, PathLike):
            made[name] = Path(value) if name in ("images", "fid_reference") else fspath(value)
        elif isinstance(value, str) and name in ("lora", "components", "include", "exclude", "metrics", "gates"):
            raise TypeError(f"{name}={value!r}: give a list of such texts")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            made[name] = tuple(value)
    return made


@contextmanager
def _on_disk(
    pipeline: str | PathLike[str] | DiffusionPipeline | None,
    output: str | PathLike[str] | None,
    recipe: str,
    *,
    is_file: bool = False,
) -> Iterator[tuple[str | None, str | None, str | None]]:
    """Yield (model, output, its source for the record) as jobs take them, a pipeline in memory as a folder."""
    if pipeline is None or isinstance(pipeline, (str, PathLike)):
        yield None if pipeline is None else fspath(pipeline), None if output is None else fspath(output), None
        return
    from fluxq.base.model import without_loading_bars
    from fluxq.jobs.requirements import existing_parent, output_for

    source = str(pipeline.config.get("_name_or_path") or "")
    name = Path(source).name or type(pipeline).__name__
    place = output_for(fspath(output) if output else None, name, Path(recipe).stem, is_file=is_file)
    with tempfile.TemporaryDirectory(dir=existing_parent(place), prefix=f".{place.name}.pipeline-") as scratch:
        folder = Path(scratch, name)
        with without_loading_bars():
            pipeline.save_pretrained(folder)
        yield str(folder), str(place), source
