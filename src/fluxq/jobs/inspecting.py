"""Functions behind `fluxq inspect` and `fluxq import`: paths and names in, reports out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fluxq.base.model import ModelFolder, resolve_model
from fluxq.base.output import Output

if TYPE_CHECKING:
    from fluxq.quantize.exchange.importing import Imported
    from fluxq.quantize.exchange.inspect import Inspection


def inspect(path: str, base: str | None = None) -> dict[str, Inspection]:
    """Inspect a quantized file or folder, and return a report by component, "" where there is just one.

    base: the 16-bit model: a file, a folder, a hub id or `tiny`.

    Raises FileNotFoundError for a missing file, and ValueError for a damaged or unsafe one or a base that is quantized.
    """
    from fluxq.quantize.exchange.inspect import inspect_path

    return inspect_path(Path(path).expanduser(), _base_folder(base).path if base else None)


def import_(
    path: str,
    base: str | None = None,
    output: str | None = None,
    *,
    dequantize: bool = False,
    overwrite: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> list[Imported]:
    """Make a checkpoint of fluxq of a file or folder that another program quantized; by default at ./<name>-fluxq.

    Arguments and errors are those of `inspect`, and of `import_model` in quantize/exchange/importing.py.
    """
    from fluxq.eval.report.card import model_card
    from fluxq.quantize.exchange.importing import import_model

    source = Path(path).expanduser()
    name = re.sub(r"\.(safetensors(\.index\.json)?|gguf)$", "", source.resolve().name)
    target = Path(output).expanduser() if output else Path(f"{name}-fluxq")
    where = _base_folder(base) if base else None
    reads = {"what is imported": source, "the 16-bit model": where.path if where else None}
    Output(target).require(reads, overwrite=overwrite, exists_ok=True)
    return import_model(
        source, target, where, dequantize=dequantize, overwrite=overwrite, card=model_card, on_start=on_start
    )


def _base_folder(model: str) -> ModelFolder:
    """Return a file or a component's folder as given, else the pipeline that `resolve_model` finds."""
    path = Path(model).expanduser()
    if path.is_file() or (path.is_dir() and not (path / "model_index.json").is_file()):
        return ModelFolder(path.resolve().name, path)
    return resolve_model(model)
