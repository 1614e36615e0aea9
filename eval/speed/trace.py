"""A trace of one call of a pipeline that Perfetto and chrome://tracing open, with ranges by stage and by layer role.

    call · text encoders · denoiser step N · VAE · role of a layer ("attn_out", …)

Ranges are NVTX ones too, where there is CUDA, for Nsight.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluxq.base.files import atomic_path
from fluxq.calibrate.capture import run_pipeline
from fluxq.eval.images.denoiser import denoisers, hooked
from fluxq.eval.speed.speed import STEP, plan_in_memory, watched

CALL = "call"
_BEGINNING = b'{"kind": "fluxq trace", '  # by which fluxq knows its own
_COMPRESSED = ".gz"
SUFFIXES = (".json", ".json.gz")


def require_trace(target: Path) -> None:
    """Raise ValueError for a name that no viewer opens, or a file there that is no trace of fluxq."""
    if not target.name.endswith(SUFFIXES):
        raise ValueError(f"--trace {target}: a trace is a {' or '.join(SUFFIXES)} file")
    if target.exists() and not is_trace(target):
        raise ValueError(f"--trace {target} exists and is no trace of fluxq; give another")


def is_trace(file: Path) -> bool:
    """Tell whether fluxq wrote this trace."""
    try:
        with _opened(file, "rb") as stream:
            return stream.read(len(_BEGINNING)) == _BEGINNING
    except (OSError, EOFError, zlib.error):  # what gzip raises
        return False


def write_trace(pipe: Any, items: Sequence[tuple[str, int]], call: Mapping[str, Any], target: Path) -> Path:
    """Run one call of all items, and write its trace, gzipped where the name ends in .gz; returns the file.

    The call before, which is not traced, warms up.
    """
    has_cuda = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if has_cuda else []
    _run(pipe, items, call)
    with torch.profiler.profile(activities=activities) as profile, _ranges(pipe), range_of(CALL):
        _run(pipe, items, call)
        if has_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(plain))
        with atomic_path(target) as part, plain.open("rb") as source, _opened(part, "wb", target) as stream:
            while source.read(1) != b"{":
                pass
            stream.write(_BEGINNING)
            shutil.copyfileobj(source, stream)
    return target


def _opened(file: Path, mode: str, name: Path | None = None) -> Any:
    """Open a file, through gzip where its name, or another, says so."""
    is_compressed = (name or file).name.endswith(_COMPRESSED)
    return gzip.open(file, mode) if is_compressed else file.open(mode)


def _run(pipe: Any, items: Sequence[tuple[str, int]], call: Mapping[str, Any]) -> None:
    for _ in run_pipeline(pipe, items, call, output_type="pt", batch_size=len(items)):
        pass


@contextmanager
def range_of(name: str) -> Iterator[None]:
    """Name what runs in the block, in traces and for Nsight."""
    with torch.profiler.record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


@contextmanager
def _ranges(pipe: Any) -> Iterator[None]:
    """Open a range for each stage, layer with a role and denoiser's step, and close the innermost when it is over."""
    opened: list[Any] = []
    numbers = count()

    def begin(name: str) -> None:
        opened.append(range_of(f"{STEP} {next(numbers)}" if name == STEP else name))
        opened[-1].__enter__()

    def end(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        stack.enter_context(watched(pipe, begin, end))
        for layer, role in _roles(pipe):
            stack.enter_context(hooked([layer], before=lambda *_, role=role: begin(role), after=end))
        yield


def _roles(pipe: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers of the denoisers that a recipe could quantize, with their roles; none of an unknown family."""
    for component, model in denoisers(pipe).items():
        try:
            layers = plan_in_memory(component, model).layers
        except ValueError:
            continue
        modules = dict(model.named_modules())
        yield from ((modules[layer.name], layer.role) for layer in layers if layer.name in modules)
