"""What a pipeline and an output must be for a job to work; each refuses it with the cure. Imports no torch."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from fluxq.base.model import GENERATION_FILE, PLAN_FILE, ModelFolder


def require_call(folder: ModelFolder, call: dict[str, Any]) -> None:
    """Refuse generation defaults that the pipeline does not take, before it is loaded."""
    import diffusers

    pipeline = folder.pipeline_class
    if pipeline is None:
        name = folder.index["_class_name"]
        raise ValueError(f"{folder.path}: a {name}, which this diffusers ({diffusers.__version__}) does not have")
    unknown = sorted(call.keys() - inspect.signature(pipeline.__call__).parameters.keys())
    if unknown:
        raise ValueError(
            f"{folder.path / GENERATION_FILE}: {pipeline.__name__} takes no {', '.join(unknown)}; remove it"
        )


def require_steps(folder: ModelFolder) -> None:
    """ValueError for a pipeline that does not tell of its steps, which a run of it is followed by."""
    pipeline = folder.pipeline_class
    if pipeline is not None and "callback_on_step_end" not in inspect.signature(pipeline.__call__).parameters:
        raise ValueError(
            f"{folder.name}: a {pipeline.__name__} takes no callback_on_step_end in this diffusers, so it cannot be "
            "calibrated or checked; --profile rtn --no-check quantizes it without running it"
        )


def require_images(folder: ModelFolder, cure: str) -> None:
    """ValueError for a pipeline that makes video."""
    pipeline = folder.pipeline_class
    if pipeline is not None and makes_video(folder):
        raise ValueError(f"{folder.name}: a {pipeline.__name__} makes video, and only images can be compared; {cure}")


def makes_video(folder: ModelFolder) -> bool:
    """Whether the pipeline's calls say how many frames they make."""
    pipeline = folder.pipeline_class
    return pipeline is not None and "num_frames" in inspect.signature(pipeline.__call__).parameters


def scheduler_of(folder: ModelFolder) -> Any:
    """The pipeline's, from its files; ValueError for one that this diffusers does not have."""
    import diffusers

    name = folder.components.get("scheduler", "")
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ValueError(f"{folder.name}: this diffusers has no scheduler {name!r}; leave `steps` out of the recipe")
    return kind.from_pretrained(folder.path / "scheduler", local_files_only=True)


def output_for(output: str | None, pattern: str, model: str, recipe: str) -> Path:
    """Return where a command writes: what it was told, else `pattern` with the model's name and the recipe's."""
    return Path(output or pattern.format(model=Path(model).name, recipe=recipe))


def require_output_folder(output: Path, model: Path, *, overwrite: bool) -> None:
    """Refuse an output that is a file or other people's, or whose replacement would delete the model or this folder."""
    require_parent(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output {output} is a file; give another --output")
    for what, path in (("the model", model), ("the current folder", Path())):
        if path.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"output {output} holds {what}, which would be replaced; give another --output")
    if output.exists() and not overwrite and any(output.iterdir()) and not (output / PLAN_FILE).is_file():
        raise ValueError(f"output folder {output} is not empty; give another --output, or --overwrite to replace it")


def require_output_file(output: Path, *, overwrite: bool) -> None:
    """Refuse an output that is a folder, or a file that may not be replaced."""
    require_parent(output)
    if output.is_dir():
        raise ValueError(f"output {output} is a folder; give a file as --output")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; give another --output, or --overwrite to replace it")


def require_parent(output: Path) -> None:
    """ValueError where nothing can be made at `output`."""
    parent = existing_parent(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(
            f"output {output} cannot be made: {parent} is no folder one may write to; give another --output"
        )


def existing_parent(output: Path) -> Path:
    """The nearest folder around `output` that is there; its disk is what will be written to."""
    return next(parent for parent in output.resolve().parents if parent.exists())
