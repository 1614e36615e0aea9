"""Python's forms of `fluxq quantize`, `fluxq auto`, `fluxq calibrate` and `fluxq eval`.

Each verb checks its arguments as its command does, shows the same progress and returns a value. Errors are
ValueError and FileNotFoundError for requests that cannot work, RuntimeError and OSError for work that failed.

A pipeline in memory is written beside the output first, in its own dtype, and that copy is removed at the end:
weights are read from files block by block, so that an interrupted job can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from fluxq.base.extras import require_for

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from fluxq.calibrate.statistics import Statistics
    from fluxq.eval.metrics.schema import Report
    from fluxq.quantize.record import Record
    from fluxq.recipes.recipe import Recipe
    from fluxq.recipes.step_list import StepList


@dataclass(frozen=True)
class Checkpoint:
    """A quantized pipeline's folder, and its record: the content of fluxq_plan.json."""

    path: Path
    record: Record

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a folder; ValueError or FileNotFoundError if there is none."""
        from fluxq.jobs.requirements import require_checkpoint
        from fluxq.quantize.record import read_record

        require_checkpoint(fspath(folder), recorded=True)
        return cls(Path(folder).absolute(), read_record(Path(folder)))

    @property
    def passed(self) -> bool | None:
        """Verdict of the closing check: no NaN, and every gate of the recipe held; None if there was no check."""
        return self.record.check and self.record.check.passed

    def load(self, **arguments: Any) -> DiffusionPipeline:
        """Load the pipeline by `DiffusionPipeline.from_pretrained`, which takes the arguments; bfloat16 by default."""
        import torch
        from diffusers import DiffusionPipeline

        if "torch_dtype" not in arguments:  # diffusers' earlier word
            arguments.setdefault("dtype", torch.bfloat16)
        return DiffusionPipeline.from_pretrained(self.path, **arguments)


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

    pipeline: a folder, a hub id, "tiny", or a pipeline in memory, which has to be in 16 or 32 bit, without adapters and
        without fused projections.
    recipe: a shipped recipe's name or a YAML file; one with `auto` is searched for formats first, as `auto` does.
    output: by default MODEL-RECIPE in the current folder.
    prompts: a file of calibration prompts.
    statistics: a file that `calibrate_pipeline` wrote.
    lora: files to fuse, as FILE or FILE:WEIGHT.
    components: by default the recipe's.
    include, exclude: patterns of layers.
    call: arguments of the pipeline's call, such as height and num_inference_steps.
    check: compare a few images at the end.
    overwrite: replace an existing checkpoint.
    options: profile, device, dtype, seed, parallel_blocks, max_memory and max_shard_bytes (bytes), revision,
        local_files_only, as the command's options of these names.

    The same call resumes an interrupted one, and returns a checkpoint that had finished. Where the closing check
    fails, the checkpoint is written all the same, and `passed` is False.
    """
    from fluxq.jobs import making
    from fluxq.jobs.choosing import choose
    from fluxq.jobs.search import search_before

    require_for("quantize")
    arguments = _checked(
        options,
        recipe=recipe,
        prompts=prompts,
        statistics=statistics,
        lora=lora,
        components=components,
        include=include,
        exclude=exclude,
        call=call,
        check=check,
        overwrite=overwrite,
    )
    with _on_disk(pipeline, output, arguments) as where:
        job_options = making.JobOptions(**arguments, **where)
        before = search_before(job_options)
        if before is not None:
            search, job_options = before
            choose(search)
        job = making.job_of(job_options)
        record = making.quantize(job)
    return Checkpoint(job.output.absolute(), record)


def auto(
    pipeline: str | PathLike[str] | DiffusionPipeline,
    recipe: str | PathLike[str] | None = None,
    *,
    bits: float | None = None,
    size: int | None = None,
    vram: str | float | None = None,
    ms: float | None = None,
    gate: str | None = None,
    gpu: str | None = None,
    times: str | PathLike[str] | None = None,
    menu: Sequence[str] = (),
    dialect: str | None = None,
    measure: Literal["velocity", "adjoint"] | None = None,
    count: int | None = None,
    modulation: bool = False,
    attention: bool = False,
    steps: bool = False,
    fitted: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    assemble: str | PathLike[str] | None = None,
    output: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    call: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Recipe:
    """Choose a format for every input group of a pipeline under a budget, write a recipe for it and return that.

    Exactly one budget is given. A JSON file beside the recipe says what ran and what was measured; errors of formats,
    which another budget uses again, are in .safetensors files.

    pipeline: as `quantize_pipeline` has it.
    recipe: the base, by default nvfp4, with `fitted` that of the first; layers that it sets apart stay as it has them.
        Its section `auto` has defaults of the budget and of menu, count and the like.
    bits: most bits per weight of what is chosen.
    size: most bytes of the checkpoint's weights.
    vram: the card that a whole call has to fit, as "12GB" or in bytes; the .json has the placement, and lines for it.
    ms: most modelled milliseconds of a step on `gpu`.
    gate: of the final latents, as "latent_sqnr>=30", for the cheapest plan that holds it.
    times: a file of `fluxq doctor` on `gpu`; where it has a product its time replaces the model's.
    menu: formats to choose from, and "16bit".
    dialect: format of `fluxq export` that has to hold the plan.
    measure: the only way to measure errors; by default all that the model allows.
    count: images that errors are measured on, by default 8; two to four times as many decide.
    modulation, attention: whether formats of modulation, and the arithmetic of each block's self-attention, are chosen.
    steps: whether it is chosen how many steps of a call are computed, under `ms`, which is then that of a step in the
        mean of all, or under `gate` with `gpu`; `fluxq.skip_steps` does it in a checkpoint of the recipe.
    fitted: checkpoints of this pipeline, one for each format to choose from; plans are made of their fitted layers.
    assemble: folder for the checkpoint that is put together of these; `Checkpoint.open` opens it.
    output: a .yaml file, by default MODEL-BUDGET.yaml in the current folder.
    prompts, call, overwrite: as `quantize_pipeline` has them.
    options: components, of which text encoders are chosen under `size`, include, exclude, device, dtype, seed,
        max_memory (bytes), revision and local_files_only.
    """
    from fluxq.jobs.assembling import assemble as put_together
    from fluxq.jobs.choosing import choose
    from fluxq.jobs.job import JobOptions
    from fluxq.jobs.requirements import base_recipe
    from fluxq.jobs.search import auto_options, recipe_file, search_of
    from fluxq.recipes.recipe import load_recipe
    from fluxq.runtime.place import room_of

    checkpoints = tuple(fspath(each) for each in ([fitted] if isinstance(fitted, (str, PathLike)) else fitted))
    recipe = base_recipe(None if recipe is None else fspath(recipe), checkpoints)
    require_for("auto")
    arguments = _checked(options, _OF_AUTO, recipe=recipe, prompts=prompts, call=call, overwrite=overwrite)
    if isinstance(menu, str):  # of which each letter would be a format
        menu = menu.split(",")
    place = None if assemble is None else fspath(assemble)
    room, path = None if vram is None else room_of(vram), None if times is None else Path(times)
    given: dict[str, Any] = {"bits": bits, "size": size, "vram": room, "ms": ms, "gate": gate, "gpu": gpu}
    given |= {"times": path, "menu": tuple(menu), "dialect": dialect, "measure": measure, "count": count}
    given |= {"modulation": modulation, "attention": attention, "steps": steps}
    given |= {"fitted": checkpoints, "assemble": place}
    search_options = auto_options(load_recipe(arguments["recipe"])[1], given)
    if output is None and not isinstance(pipeline, (str, PathLike)):
        output = recipe_file(_require_plain(pipeline), search_options)
    with _on_disk(pipeline, output, arguments, is_file=True) as where:
        request = search_of(JobOptions(**arguments, **where), search_options)
        result = choose(request)
        if result is not None and place is not None:
            put_together(request, result)
    return load_recipe(str(request.job.output))[1]


def choose_steps(
    pipeline: str | PathLike[str] | DiffusionPipeline,
    *,
    compute: float | None = None,
    gate: str | None = None,
    mask: str | PathLike[str] | Sequence[int] | None = None,
    count: int = 12,
    output: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    call: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> StepList:
    """Choose the steps of a call to compute, write them to a file and return them, for `fluxq.skip_steps`.

    pipeline: as `quantize_pipeline` has it.
    compute: share of the steps to compute.
    gate: of the final latents, as "latent_sqnr>=30", for the fewest steps that hold it.
    mask: a list to judge, 1 for each step that it computes and 0 for the others; or a file of cache-dit.
    count: images that are measured; as many others decide.
    output: a .json file, by default MODEL-steps.json in the current folder.
    prompts, call, overwrite: as `quantize_pipeline` has them.
    options: device, dtype, seed, max_memory (bytes), revision and local_files_only.
    """
    from fluxq.jobs import stepping
    from fluxq.jobs.job import JobOptions
    from fluxq.runtime.skip import read_list

    require_for("steps")
    arguments = _checked(options, _OF_STEPS, prompts=prompts, call=call, overwrite=overwrite)
    if output is None and not isinstance(pipeline, (str, PathLike)):
        output = f"{_require_plain(pipeline)}-steps.json"
    with _on_disk(pipeline, output, arguments, is_file=True) as where:
        request = stepping.request_of(JobOptions(**arguments, **where), compute, gate, count, mask)
        stepping.make_list(request)
    return read_list(request.job.output)


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

    arguments = _checked(options, recipe=recipe, prompts=prompts, components=components, call=call, overwrite=overwrite)
    with _on_disk(pipeline, output, arguments, is_file=True) as where:
        job_options = making.JobOptions(**arguments, **where)
        return Statistics.load(making.calibrate(making.job_of(job_options, writes=False)))


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
    """Compare a checkpoint's images with those of its 16-bit model; write CHECKPOINT/eval/report.html, .json, .md.

    pipeline: the 16-bit model; by default the one in the checkpoint's record, which has none for a pipeline in memory.
    protocol: smoke, …: prompts, seeds and number of images.
    count: number of prompts.
    metrics: names; an error if one cannot be measured.
    gates: as "psnr>=30"; the report's runs say which held.
    call: arguments of the pipeline's call.
    options: device, dtype, seed, seeds, batch_size, weights, clip, fid_resize, fid_reference, backends, cache, images,
        revision, local_files_only, as the command's options of these names; cache is one or several.
    """
    from fluxq.jobs import judge

    folder = checkpoint.path if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint).path
    require_for("eval")
    arguments = _checked(
        options, protocol=protocol, prompts=prompts, count=count, metrics=metrics, gates=gates, call=call
    )
    with nullcontext({}) if pipeline is None else _on_disk(pipeline, folder, arguments) as where:
        where.pop("output", None)
        judge_options = judge.JudgeOptions(**arguments, **where)
        report = judge.evaluate(judge.subject_of(folder, judge_options))
    if report is None:
        raise RuntimeError(f"{folder}: another process of this run has the report")
    return report


_OF_STEPS = {"device", "dtype", "seed", "max_memory", "revision", "local_files_only"}
_OF_AUTO = {*_OF_STEPS, "components", "include", "exclude"}
_LIST = tuple[str, ...]
_FOR_COMMANDS = {"model", "output", "check", "in_memory", "push_to_hub", "private", "engine", "workers", "address"}


def _checked(options: Mapping[str, Any], known: set[str] | None = None, **named: Any) -> dict[str, Any]:
    """Return options as jobs take them: text for paths, tuples for sequences.

    known: names of options, by default all of the job.

    Raises TypeError for an unknown option or one of another type, ValueError for an impossible value.
    """
    from fluxq.commands.options import DTYPES, MAX_SEED
    from fluxq.jobs import judge, making
    from fluxq.jobs.requirements import require_files
    from fluxq.recipes.recipe import PROFILES

    row = judge.JudgeOptions if "gates" in named else making.JobOptions
    hints = get_type_hints(row)
    names = known or hints.keys() - _FOR_COMMANDS - named.keys()
    if unknown := options.keys() - names:
        raise TypeError(f"{', '.join(sorted(unknown))}: no such option; there are {', '.join(sorted(names))}")
    checked = {name: _plain(name, value, hints[name]) for name, value in {**options, **named}.items()}
    for name, choices in (("dtype", DTYPES), ("profile", PROFILES)):
        if checked.get(name) is not None and checked[name] not in choices:
            raise ValueError(f"{name}={checked[name]!r}: expected one of {', '.join(choices)}")
    for name, value in checked.items():
        if name == "seed" and value is not None and not 0 <= value <= MAX_SEED:
            raise ValueError(f"seed={value}: expected a whole number from 0 to {MAX_SEED}")
        if isinstance(value, int) and name != "seed" and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{name}={value}: expected a whole number from 1 up")
    require_files(checked)
    return checked


def _plain(name: str, value: Any, hint: Any) -> Any:
    """Return one option as a job takes it; TypeError for a value of another type."""
    from pydantic import TypeAdapter, ValidationError

    from fluxq.base.output import plain_path

    plain: Any = fspath(value) if isinstance(value, PathLike) else value
    if hint == Path | None and value is not None:
        plain = plain_path(fspath(value))
    elif name == "cache":  # a number, a text, or several
        plain = tuple(map(str, (plain,) if isinstance(plain, (str, int, float)) else plain or ()))
    elif hint == _LIST and not isinstance(value, str):
        plain = tuple(plain or ())
    elif name == "call" and (value is None or isinstance(value, Mapping)):
        plain = dict(value or {})
    elif name == "dtype":
        plain = str(value).removeprefix("torch.")
    try:
        return TypeAdapter(hint).validate_python(plain, strict=True)
    except ValidationError:
        wanted = "a list of texts" if hint == _LIST else getattr(hint, "__name__", str(hint))
        raise TypeError(f"{name}={value!r}: expected {wanted}") from None


@contextmanager
def _on_disk(
    pipeline: str | PathLike[str] | DiffusionPipeline,
    output: str | PathLike[str] | None,
    arguments: Mapping[str, Any],
    *,
    is_file: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the options `model`, `output` and `in_memory`; write a pipeline in memory, after all other checks."""
    from fluxq.base.console import without_loading_bars
    from fluxq.base.output import Output, job_digest, remove, sole_writer
    from fluxq.jobs.requirements import existing_parent, output_for, require_free_space
    from fluxq.recipes.recipe import load_recipe

    place = None if output is None else fspath(output)
    if isinstance(pipeline, (str, PathLike)):
        yield {"model": fspath(pipeline), "output": place}
        return
    name = _require_plain(pipeline)
    if "recipe" in arguments:
        recipe_name, _ = load_recipe(arguments["recipe"], profile=arguments.get("profile"))
        place = str(output_for(place, name, recipe_name, is_file=is_file))
        Output(Path(place), is_file).require({}, overwrite=arguments["overwrite"], exists_ok=True)
    beside = Path(place or "")
    scratch = existing_parent(beside) / f".{job_digest(beside.name)[:16]}.pipeline"
    with sole_writer(scratch):
        remove(scratch)  # of a killed process
        require_free_space(scratch.parent, _bytes_of(pipeline), "a copy of the pipeline in memory")
        try:
            with without_loading_bars():
                pipeline.save_pretrained(scratch / name)
            yield {"model": str(scratch / name), "output": place, "in_memory": True}
        finally:
            remove(scratch)


def _bytes_of(pipeline: DiffusionPipeline) -> int:
    """Return the bytes that the weights of a pipeline take on disk."""
    from torch import nn

    models = (model for model in pipeline.components.values() if isinstance(model, nn.Module))
    return sum(tensor.nbytes for model in models for tensor in model.state_dict().values())


def _require_plain(pipeline: Any) -> str:
    """Return a pipeline's name; TypeError for another object, ValueError for one that is not whole and plain."""
    from diffusers import DiffusionPipeline
    from torch import nn

    if not isinstance(pipeline, DiffusionPipeline):
        raise TypeError(f"pipeline is a {type(pipeline).__name__}: give a folder, a hub id or a DiffusionPipeline")
    for name, model in pipeline.components.items():
        if not isinstance(model, nn.Module):
            continue
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError(f"{name}: quantized already; give the 16-bit pipeline")
        names = [path for path, parameter in model.named_parameters() if parameter.is_meta]
        if names:
            raise ValueError(
                f"{name}: offloaded ({names[0]} is not in memory); give its folder, or load it without that"
            )
        narrow = [path for path, tensor in model.named_parameters() if tensor.itemsize < 2]
        if narrow:
            raise ValueError(f"{name}: {narrow[0]} is stored in 8 bits; load the pipeline without layerwise casting")
        if any(getattr(module, "fused_projections", False) for module in model.modules()):
            raise ValueError(f"{name}: its projections are fused; call unfuse_qkv_projections() first")
        if any(".lora_" in path or ".base_layer." in path for path, _ in model.named_parameters()):
            raise ValueError(f"{name}: an adapter is loaded; unload it, or give its file as lora=[FILE]")
    source = Path(str(pipeline.config.get("_name_or_path") or "")).expanduser()
    named = source.resolve().name if source.is_dir() else source.name
    return named or type(pipeline).__name__
