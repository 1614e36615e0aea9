"""Reproducible runs of a pipeline; statistics of its Linears' inputs meanwhile, and a look at who shares one.

The noise of every image is drawn on the CPU from its own seed, so batch size, device and rank change no image's
starting point.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fluxq.base.console import first_line, logger, progress, without_cure
from fluxq.base.files import place_in_work, read_json, sha256_json
from fluxq.base.model import GENERATION_FILE
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.prompts import ImageFile, PromptRow
from fluxq.calibrate.statistics import GroupSums, Statistics
from fluxq.kernels.linear import channels_last
from fluxq.recipes.family import in_every_block

_PIXELS_PER_BATCH = 1 << 20
_MAX_BATCH = 64
_BINS = 8
_SHARES = 16  # of a set of images, which processes take and which are kept on disk: more would take more disk
FRAMES = ("num_frames", "frames", "video_length")  # names of a video's length in pipelines
TELLS = "callback_on_step_end"  # the argument of a pipeline that tells of its steps
_FEW_STEPS = 8  # of schnell, Turbo and Lightning models: no two of their steps are alike

# Source of one image: a prompt, or one with arguments of its own, and the seed of its noise.
Item = tuple[str | PromptRow, int]
AnyItem = TypeVar("AnyItem", bound=tuple[str | PromptRow, int])


@dataclass(frozen=True)
class Trajectory:
    """Description of the calibration data; its hash goes into statistics, checkpoint and report.

    model: digest of the weights; component -> digest where several were observed.
    items: (prompt, seed) of each image, and its own pipeline arguments where it has any, image files by their SHA-256.
    call: pipeline arguments of all.
    scheduler: class and configuration.
    steps_seen: indices of the observed denoising steps.
    sigmas: their noise levels, in the first call where sizes shift them.
    """

    model: str | dict[str, str]
    items: tuple[tuple[Any, ...], ...]
    call: dict[str, Any]
    scheduler: dict[str, Any]
    steps_seen: tuple[int, ...]
    sigmas: tuple[float, ...]
    dtype: str

    @property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        return sha256_json(asdict(self))


def final_latents(
    pipe: Any,
    items: Sequence[Item],
    call: Mapping[str, Any],
    *,
    batch_size: int | None = None,
    on_step: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """Return the final latents of each image, fp64 on the CPU: images may differ in size. Arguments: `run_pipeline`."""
    runs = run_pipeline(pipe, items, call, batch_size=batch_size, on_step=on_step)
    return [image for _, latents in runs for image in latents.double().cpu()]


def run_pipeline(
    pipe: Any,
    items: Sequence[Item],
    call: Mapping[str, Any],
    *,
    output_type: str = "latent",
    batch_size: int | None = None,
    on_step: Callable[[int], None] | None = None,
    on_latents: Callable[[int, Tensor], None] | None = None,
    is_differentiable: bool = False,
) -> Iterator[tuple[Any, Tensor]]:
    """Generate one image, or one video, per (prompt, seed); yields (pipeline output, final latents) batch by batch.

    A row's own arguments come before those of `call`; `batches` decides which rows share a batch, and the order of
    images.

    output_type: as diffusers ("latent", "pt", "pil").
    batch_size: by default as many as make one megapixel.
    on_step: called as on_step(i) before denoising step i; every batch starts at 0 again. Of a pipeline that does not
        tell of its steps (PixArt, HunyuanVideo 1.5), its scheduler does.
    on_latents: called as on_latents(i, latents) after the step.
    is_differentiable: whether tensors have the gradients that the caller enables; pipelines switch them off.
    """
    generate = functools.partial(inspect.unwrap(type(pipe).__call__), pipe) if is_differentiable else pipe
    for batch in batches(items, batch_size, call):
        final: dict[str, Tensor] = {}

        def after_step(step: int, latents: Tensor, final=final) -> None:
            final["latents"] = latents
            if on_latents is not None:
                on_latents(step, latents)
            if on_step is not None:
                on_step(step + 1)

        if on_step is not None:
            on_step(0)
        rows = [_row(prompt) for prompt, _ in batch]
        arguments = _of_its_size(pipe, _arguments(rows, call))
        with _steps_told(pipe, after_step) as telling, _calling(pipe, {**call, **dict(rows[0].arguments)}):
            output = generate(
                prompt=[row.prompt for row in rows],
                generator=[torch.Generator("cpu").manual_seed(seed) for _, seed in batch],
                output_type=output_type,
                **telling,
                **arguments,
            )
        yield output, final["latents"]


def _of_its_size(pipe: Any, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call that keeps its size: FLUX.1-Kontext's pipelines make `max_area` of it, a megapixel."""
    if "max_area" in inspect.signature(pipe.__call__).parameters and call.get("width") and call.get("height"):
        return {"max_area": call["width"] * call["height"], **call}
    return call


@contextmanager
def _calling(pipe: Any, call: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error of a call that a model's own file, or a missing image, is to blame for into a RuntimeError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        folder = getattr(pipe, "name_or_path", None)
        file = Path(folder or "") / GENERATION_FILE
        settings = read_json(file) if folder and file.is_file() else {}
        blamed = ", ".join(name for name, value in settings.items() if name in call and call[name] == value)
        parameters = inspect.signature(pipe.__call__).parameters
        lacking = next((name for name in ("image", "control_image") if name in parameters and name not in call), "")
        is_of_none = isinstance(error, (TypeError, AttributeError)) and re.search(rf"NoneType|'{lacking}'", str(error))
        if lacking and is_of_none:
            blamed, cure = f"no {lacking}", f"rows of `fluxq quantize --prompts FILE` name one in a column `{lacking}`"
        elif not blamed or _is_ours(error):
            raise
        else:
            blamed, cure = f"{blamed} of {file}", "correct what does not suit this pipeline, or remove it"
        raise RuntimeError(
            f"the pipeline's call failed ({type(error).__name__}: {first_line(error)}), with {blamed}; {cure}"
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Tell whether an error is a ValueError or RuntimeError of fluxq's own code, which explains itself."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raised = last is not None and str(last.tb_frame.f_globals.get("__name__")).startswith("fluxq.")
    return raised and isinstance(error, (ValueError, RuntimeError))


@contextmanager
def _steps_told(pipe: Any, after_step: Callable[[int, Tensor], None]) -> Iterator[dict[str, Any]]:
    """Return arguments of a call that call after_step(i, latents) after each step; else its scheduler does."""
    if TELLS in inspect.signature(pipe.__call__).parameters:

        def tell(_pipe: Any, step: int, _t: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            after_step(step, tensors["latents"])
            return tensors

        yield {TELLS: tell}
        return
    scheduler, numbers = pipe.scheduler, itertools.count()
    plain, is_own = scheduler.step, "step" in vars(scheduler)

    @functools.wraps(plain)  # pipelines look at its signature
    def step(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        after_step(next(numbers), result[0])
        return result

    scheduler.step = step
    try:
        yield {}
    finally:
        if is_own:
            scheduler.step = plain
        else:
            del scheduler.step


def _row(prompt: str | PromptRow) -> PromptRow:
    return prompt if isinstance(prompt, PromptRow) else PromptRow(prompt)


def _arguments(rows: Sequence[PromptRow], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the call that makes `rows`, which share it: texts as a list, an image as its pixels.

    A negative prompt of `call` is repeated: beside a list of prompts some pipelines take no other (Stable Diffusion).
    """
    negative = {name: [v] * len(rows) for name, v in call.items() if name == "negative_prompt" and isinstance(v, str)}
    texts = {name: [dict(row.arguments)[name] for row in rows] for name, v in rows[0].arguments if isinstance(v, str)}
    others = {name: v.load() if isinstance(v, ImageFile) else v for name, v in rows[0].arguments}
    return {**call, **negative, **others, **texts}


def number_of_steps(pipe: Any, call: Mapping[str, Any]) -> int:
    """Return the denoising steps of a call: as it lists or says, else the pipeline's; less where `strength` skips some.

    Pipelines that begin at an image leave out (1 - strength) of the steps, rounded down; those of Stable Diffusion XL
    round the rest down, and make one less then.
    """
    parameters = inspect.signature(pipe.__call__).parameters if callable(pipe) else {}

    def argument(name: str) -> Any:
        return call[name] if name in call else parameters[name].default

    listed = call.get("timesteps") or call.get("sigmas")
    steps = len(listed) if listed else int(argument("num_inference_steps"))
    strength = argument("strength") if "strength" in parameters else 1
    return steps if strength is None else min(steps, steps - int(steps - steps * strength))


def spread(steps: int, total: int) -> tuple[int, ...]:
    """Return `steps` indices spread evenly over range(total), both ends included; all of them if there are fewer."""
    if steps >= total:
        return tuple(range(total))
    return tuple(sorted({round(i * (total - 1) / max(steps - 1, 1)) for i in range(steps)}))


def steps_to_see(steps: int, total: int) -> int:
    """Return the observed steps of a call of `total`, as many as `calibration.steps`; all of a few, which is logged."""
    if steps >= total or total > _FEW_STEPS:
        return steps
    logger.info("calibration looks at all %d steps of the call, not at %d: few steps are not alike", total, steps)
    return total


@dataclass(frozen=True)
class Sampling:
    """Runs of a pipeline in calibration.

    call: its arguments.
    steps: number of observed denoising steps.
    digests: component -> digest of its weights.
    batch_size: by default as many images as make one megapixel.
    """

    call: Mapping[str, Any]
    steps: int
    digests: Mapping[str, str]
    batch_size: int | None = None


@torch.no_grad()
def capture_statistics(
    pipe: Any,
    groups: Mapping[str, Mapping[str, str]],
    items: Sequence[Item],
    sampling: Sampling,
    *,
    folder: Path,
    ranks: Ranks = ALONE,
) -> Statistics:
    """Run the pipeline on `items` and gather per-channel statistics of each input group.

    Of several components the group names start with the component's, see `Statistics.of_component`. Images are gathered
    in shares, whose sums are then added in their order, so one process and several give the same bytes. Raises
    ValueError naming the layer if its input is not finite.

    groups: component -> group -> path of one Linear of the group in `pipe.<component>`.
    folder: place of finished shares, for an interrupted run of the same job to go on with and for other processes,
        which take a part of the shares each.
    """
    call, batch_size = sampling.call, sampling.batch_size
    several = len(groups) > 1
    layers = {
        f"{component}/{group}" if several else group: getattr(pipe, component).get_submodule(path)
        for component, paths in groups.items()
        for group, path in paths.items()
    }
    seen = spread(sampling.steps, number_of_steps(pipe, call))
    trajectory = trajectory_of(pipe, sampling.digests, items, call, seen)
    every = list(batches(items, batch_size, call))
    count = min(_SHARES, len(every))
    shares = [every[len(every) * i // count : len(every) * (i + 1) // count] for i in range(count)]
    what = [asdict(trajectory), list(layers), batch_size]
    files = [folder / f"{sha256_json([what, index])[:16]}.safetensors" for index in range(count)]
    missing = ranks.agree([i for i, file in enumerate(files) if not _is_gathered(file)] if ranks.leads else [])
    for index in progress(ranks.share(missing), "Calibrating"):
        share = _gathered(shares[index], pipe, layers, trajectory, call)
        share.save(files[index], place_in_work(files[index]))
    ranks.meet()
    sums: dict[str, GroupSums] = {}
    sigmas: tuple[float, ...] = ()
    for part in map(Statistics.load, files):
        sums |= {name: sums[name].merge(new) if name in sums else new for name, new in part.groups.items()}
        sigmas = sigmas or tuple(part.trajectory["sigmas"])
    ranks.meet()  # all have read the files, which may be removed now
    silent = [name for name in layers if name not in sums]
    if silent:
        raise ValueError(f"{silent[0]}: no activation reached this layer during calibration; look at more steps")
    trajectory = replace(trajectory, sigmas=sigmas)
    return Statistics({name: sums[name] for name in layers}, asdict(trajectory), trajectory.digest)


def _is_gathered(file: Path) -> bool:
    """Tell whether a share need not be gathered again; of a damaged one, the log says so."""
    try:
        return file.is_file() and bool(Statistics.load(file, place_in_work(file)))
    except ValueError as error:
        logger.warning("%s: these images are run again", without_cure(error))
        return False


def scheduler_settings(scheduler: Any) -> dict[str, Any]:
    """Return class and configuration of a scheduler, without diffusers' own notes, whose order differs by process."""
    configured = {key: value for key, value in sorted(scheduler.config.items()) if not key.startswith("_")}
    return {"class": type(scheduler).__name__, **configured}


def trajectory_of(
    pipe: Any,
    digests: Mapping[str, str],
    items: Sequence[Item],
    call: Mapping[str, Any],
    seen: Sequence[int],
) -> Trajectory:
    """Return the description of the pipeline's data, but for the sigmas, which are known when it has run.

    digests: observed component -> digest of its weights.
    """
    return Trajectory(
        model=dict(digests) if len(digests) > 1 else next(iter(digests.values())),
        items=tuple(_row(prompt).described(seed) for prompt, seed in items),
        call=dict(call),
        scheduler=scheduler_settings(pipe.scheduler),
        steps_seen=tuple(seen),
        sigmas=(),
        dtype=str(getattr(pipe, next(iter(digests))).dtype).removeprefix("torch."),
    )


def noise_levels(pipe: Any) -> tuple[float, ...]:
    """Return the sigma of each step of the pipeline's last call, and the final one.

    Of a scheduler that keeps none (DDIM, PNDM, LCM, TCD), noise by signal, √(1 − ᾱ) / √ᾱ, at its timesteps; where it
    has no ᾱ either (SCM), its timesteps.
    """
    scheduler = pipe.scheduler
    began = getattr(scheduler, "begin_index", None) or 0  # at an image, not at noise
    if hasattr(scheduler, "sigmas"):
        return tuple(float(sigma) for sigma in scheduler.sigmas[began:])
    times = torch.as_tensor(scheduler.timesteps)[began:].cpu()
    if hasattr(scheduler, "alphas_cumprod"):
        alphas = scheduler.alphas_cumprod.cpu()[times.long()]
        times = ((1 - alphas) / alphas).sqrt()
    return (*map(float, times), 0.0)


def _gathered(
    share: Sequence[Sequence[Item]],
    pipe: Any,
    layers: Mapping[str, nn.Module],
    trajectory: Trajectory,
    call: Mapping[str, Any],
) -> Statistics:
    """Return statistics of the layers' inputs while the pipeline makes these batches of images."""
    seen = trajectory.steps_seen
    recorder = _Recorder({step: index * min(_BINS, len(seen)) // len(seen) for index, step in enumerate(seen)})
    sigmas: tuple[float, ...] = ()
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(layer.register_forward_pre_hook(recorder.hook(name)))
        for batch in share:
            for _ in run_pipeline(pipe, batch, call, batch_size=len(batch), on_step=recorder.at_step):
                sigmas = sigmas or tuple(noise_levels(pipe)[step] for step in seen)
    items = tuple(_row(prompt).described(seed) for batch in share for prompt, seed in batch)
    trajectory = replace(trajectory, items=items, sigmas=sigmas)
    return Statistics(recorder.sums, asdict(trajectory), trajectory.digest)


class _Recorder:
    """Adds every activation of a chosen step to its group's sums."""

    def __init__(self, bin_of_step: dict[int, int]) -> None:
        self.bin_of_step, self.bins = bin_of_step, max(bin_of_step.values()) + 1
        self.step = 0
        self.sums: dict[str, GroupSums] = {}

    def at_step(self, step: int) -> None:
        self.step = step

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.step not in self.bin_of_step:
                return
            x = channels_last(module, args[0])
            x = x.reshape(-1, x.shape[-1])  # (tokens, K)
            if not torch.isfinite(x).all():
                raise ValueError(f"{name}: its input holds NaN or infinity at step {self.step} of the 16-bit model")
            sums = self.sums.setdefault(name, GroupSums.zeros(self.bins, x.shape[-1]))
            sums.add(self.bin_of_step[self.step], x)

        return record


def batches(
    items: Sequence[AnyItem], size: int | None, call: Mapping[str, Any] | None = None
) -> Iterator[Sequence[AnyItem]]:
    """Yield items that can share a call of the pipeline, `size` at a time; None: as many as make one megapixel.

    Items stay in order among those that can share a call, and these come in the order of their first.
    """
    alike: list[list[AnyItem]] = []
    for item in items:
        row = _row(item[0])
        home = next((group for group in alike if row.shares_call_with(_row(group[0][0]))), None)
        if home is None:
            alike.append([item])
        else:
            home.append(item)
    for group in alike:
        run = size or images_per_batch({**(call or {}), **dict(_row(group[0][0]).arguments)})
        yield from (group[start : start + run] for start in range(0, len(group), run))


def images_per_batch(call: Mapping[str, Any]) -> int:
    """Return as many images of the call's size as make one megapixel, at least one."""
    return max(1, min(_MAX_BATCH, _PIXELS_PER_BATCH // pixels_in(call)))


def pixels_in(call: Mapping[str, Any]) -> int:
    """Return the pixels of an image or of all frames of a video; a side that the call does not say counts as 1024."""
    return int(call.get("height") or 1024) * int(call.get("width") or 1024) * frames_in(call)


def frames_in(call: Mapping[str, Any]) -> int:
    """Return the frames of the video that a call makes; 1 for an image, and for a call without a number."""
    return next((int(call[name]) for name in FRAMES if call.get(name)), 1)


def frames_argument(pipeline: type) -> str | None:
    """Return the name of a pipeline class's argument for the number of frames, one of FRAMES; None if it has none."""
    parameters = inspect.signature(pipeline.__call__).parameters
    return next((name for name in FRAMES if name in parameters), None)


def watch_shared_inputs(model: nn.Module, groups: Iterable[Iterable[str]]) -> None:
    """Let the next call of `model` raise ValueError if a group reads two tensors; later calls are not watched.

    Rows of FAMILIES are tested on a model of their class. Groups of `generic` rest on names, so the first call of such
    a model is watched before anything is fitted to one Linear's input on behalf of all.

    groups: paths of the Linears of each. Two inputs count as one if they are the same memory, unchanged, or equal in
    every element.
    """
    handles: list[Any] = []

    def remove(*_: object) -> None:
        while handles:
            handles.pop().remove()

    for paths in map(tuple, groups):
        watch = _Watch(len(paths), remove)
        if len(paths) > 1:
            handles += [model.get_submodule(path).register_forward_pre_hook(watch.hook(path)) for path in paths]
    handles.append(model.register_forward_hook(remove))


class _Watch:
    """The inputs of one group in one call, kept from its first reader to its last."""

    def __init__(self, readers: int, stop: Callable[[], None]) -> None:
        self.readers, self.stop = readers, stop
        self.seen: dict[str, tuple[Tensor, int]] = {}

    def hook(self, path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x, version = args[0], _version(args[0])
            for other, (tensor, then) in self.seen.items():
                if not _same(x, tensor, _version(tensor) == then):
                    self.stop()
                    raise ValueError(
                        f"{path} and {other} read different values, though their names say that they share an input. "
                        f"--exclude '{in_every_block(path)}' keeps such Linears in 16 bit; --profile rtn quantizes "
                        "all without looking at inputs; a row in recipes/all_families.py says what shares one "
                        "(CONTRIBUTING.md, 'Adding a model family')"
                    )
            self.seen = {} if len(self.seen) == self.readers - 1 else {**self.seen, path: (x, version)}

        return look


def _version(x: Tensor) -> int:
    """Return the number of writes into a tensor; tensors of inference mode count none."""
    return 0 if x.is_inference() else x._version


def _same(x: Tensor, y: Tensor, y_unchanged: bool) -> bool:
    if not y_unchanged or x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        return False
    return (x.data_ptr() == y.data_ptr() and x.stride() == y.stride()) or torch.equal(x, y)
