"""Functions behind `fluxq inspect`, `fluxq import` and `fluxq export`: paths and names in, reports out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.output import Output, name_of
from fluxq.eval.report.card import model_card
from fluxq.quantize.exchange import export
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.export import PlannedExport, SideLayers
from fluxq.quantize.exchange.importing import Imported, import_model
from fluxq.quantize.exchange.inspect import Inspection, inspect_path

FORMATS = tuple(DIALECTS[name].option or name for name in WRITERS)


def inspect(path: str, base: str | None = None) -> dict[str, Inspection]:
    """Inspect a quantized file or folder, and return a report by component, "" where there is just one.

    base: the 16-bit model: a file, a folder, a hub id or `tiny`.

    Raises FileNotFoundError for a missing file, and ValueError for a damaged or unsafe one or a base that is quantized.
    """
    return inspect_path(Path(path).expanduser(), _base_folder(base).path if base else None)


def import_(
    path: str,
    base: str | None = None,
    output: str | None = None,
    *,
    overwrite: bool = False,
    **how: Any,
) -> list[Imported]:
    """Make a checkpoint of fluxq of a file or folder that another program quantized; by default at ./<name>-fluxq.

    Arguments and errors are those of `inspect`, and of `import_model` in quantize/exchange/importing.py.
    """
    source = Path(path).expanduser()
    name = re.sub(r"\.(safetensors(\.index\.json)?|gguf)$", "", name_of(source))
    target = Path(output).expanduser() if output else Path(f"{name}-fluxq")
    where = _base_folder(base) if base else None
    reads = {"what is imported": source, "the 16-bit model": where.path if where else None}
    Output(target).require(reads, overwrite=overwrite, exists_ok=True)
    return import_model(source, target, where, overwrite=overwrite, card=model_card, **how)


def plan_export(
    output: str,
    format: str,
    target: str | Path | None = None,
    *,
    component: str | None = None,
    requantize: bool = False,
    side_layers: SideLayers = "8bit",
    overwrite: bool = False,
    max_shard_bytes: int | None = None,
) -> PlannedExport:
    """Plan to write the checkpoint folder `output`, a pipeline's or one model's, in one of FORMATS.

    target: by default ./<output>-<format>, with .safetensors where the format is one file.
    component: component of the pipeline; by default its denoisers, for compressed-tensors its text encoder.
    requantize: round layers again that the format cannot hold as they are.
    side_layers: "8bit" rounds modulation and other layers beside the main ones again where the format cannot hold
        theirs, if that adds an error of at most MOST_ADDED; "16bit" writes all of them in 16 bit.
    max_shard_bytes: of the files of a format that is a folder, by default 10 GB.

    Raises ValueError for layers that the format cannot hold, naming them and why.
    """
    dialect = format.replace("-", "_")
    if dialect not in WRITERS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    folder = Path(output)
    if not folder.is_dir():
        raise ValueError(f"{output} is no folder; give a checkpoint that `fluxq quantize` wrote")
    suffix = ".safetensors" if WRITERS[dialect].is_file else ""
    if target is None:
        name = folder.resolve().name
        target = name + suffix if suffix and name.endswith(f"-{format}") else f"{name}-{format}{suffix}"
    elif suffix and Path(target).suffix != suffix:
        raise ValueError(f"{target}: {format} is one file; let its name end in {suffix}")
    writer = WRITERS[dialect]
    Output(Path(target), writer.is_file, writer.beside).require(
        {"the checkpoint": folder}, overwrite=overwrite, exists_ok=True
    )
    return export.plan_export(
        resolve_model(str(folder), one_model=True),
        dialect,
        Path(target),
        component=component,
        requantize=requantize,
        side_layers=side_layers,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )


def _base_folder(model: str) -> ModelFolder:
    """Return a file or a component's folder as given, else the pipeline that `resolve_model` finds."""
    path = Path(model).expanduser()
    if path.is_file() or (path.is_dir() and not (path / "model_index.json").is_file()):
        return ModelFolder(name_of(path), path)
    return resolve_model(model)
