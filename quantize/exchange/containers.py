"""Containers that a model is written as: one safetensors file, or a folder of diffusers or transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxq.base import FLUXQ_VERSION
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import JOB, VERSION
from fluxq.base.tensors import Stored, join_weights
from fluxq.quantize.checkpoint import PLAN_FILE, copy_rest, join_shards
from fluxq.quantize.exchange.native import NativeComponent


@dataclass(frozen=True)
class Contents:
    """An encoded component. parts: tensor -> where it lies. entries: by quantized module. plain: tensors in 16 bit.

    in_16_bit: Linears, by their name in diffusers or transformers. max_shard_bytes: of the files of a folder. job: that
    a file is written by. written: takes the SHA-256 of files as they are written.
    """

    source: NativeComponent
    parts: Mapping[str, tuple[Path, Stored]]
    entries: Mapping[str, Mapping[str, Any]]
    plain: Sequence[str]
    in_16_bit: list[str]
    max_shard_bytes: int
    job: str = ""
    written: Callable[[Path, str], None] = lambda _, __: None


@dataclass(frozen=True)
class Writer:
    """Writer of a dialect's files.

    write(made, name, checkpoint, contents): `made` is the folder or, for a file, the folder that it and what goes
    beside it are put into; it is there and empty. library: of the components that it is for. is_pipeline: the whole
    pipeline is written. is_file: weights are one file, whatever their size; in a folder they are cut into shards.
    beside: suffixes of files that go with it.
    """

    write: Callable[[Path, str, ModelFolder, Sequence[Contents]], None]
    library: str = "diffusers"
    is_pipeline: bool = False
    is_file: bool = False
    beside: tuple[str, ...] = ()


def file_writer(metadata: Callable[[Contents], Mapping[str, str]]) -> Writer:
    """Writer of one safetensors file. metadata: of its header."""

    def write(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
        (one,) = contents
        write_file(made, name, one, metadata(one))

    return Writer(write, is_file=True)


def pipeline_writer(
    config: Callable[[Contents], dict[str, Any]], metadata: Callable[[Contents], Mapping[str, str]] = lambda one: {}
) -> Writer:
    """Writer of a pipeline's folder. config: the `quantization_config` of a component; metadata: of its headers."""

    def write(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
        copy_rest(made, checkpoint, [one.source.component for one in contents])
        for one in contents:
            described = config(one) if one.entries else None
            write_component(made / one.source.component, one, described, metadata(one) if one.entries else {})

    return Writer(write, is_pipeline=True)


def write_file(made: Path, name: str, one: Contents, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file. metadata: of its header."""
    join_weights(one.parts, made / name, {**metadata, VERSION: FLUXQ_VERSION, JOB: one.job})


def write_component(
    folder: Path, one: Contents, quantization: dict[str, Any] | None, metadata: Mapping[str, str] = {}
) -> None:
    """Write a component's folder: its files, config.json and what else lies beside them."""
    folder.mkdir(exist_ok=True)
    join_shards(folder, one.source.library, one.parts, {"format": "pt", **metadata}, one.max_shard_bytes, one.written)
    described = {} if quantization is None else {"quantization_config": quantization}
    write_json(folder / "config.json", {**one.source.config, **described})
    origin = one.source.folder.path / one.source.component
    for path in sorted(origin.glob("*.json")):
        if path.name not in ("config.json", PLAN_FILE) and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
