"""`fluxq export`: a checkpoint for another program, the function behind the command."""

from __future__ import annotations

from pathlib import Path

from fluxq.base.model import resolve_model
from fluxq.base.output import Output
from fluxq.quantize.exchange import export
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.export import PlannedExport, SideLayers

FORMATS = tuple(DIALECTS[name].option or name for name in WRITERS)


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
