"""Containers that a model is written as, by program: one safetensors file, or a folder of diffusers or transformers.

bfl, comfy             NAME.safetensors; beside bfl's, NAME.config.json: what `from_single_file(config=…)` takes
modelopt, torchao,
nunchaku_lite          a pipeline folder, components that were not quantized copied; of one model, its folder
compressed_tensors     a folder of transformers: the text encoder, and the tokenizer of the pipeline that goes with it
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxq.base import FLUXQ_VERSION
from fluxq.base.files import sha256_file, write_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import BESIDE, EXPORT_FILE, JOB, VERSION
from fluxq.base.tensors import Stored, join_weights
from fluxq.quantize.checkpoint import PLAN_FILE, copy_rest, join_shards
from fluxq.quantize.digests import hash_files
from fluxq.quantize.exchange import bfl, comfy, compressed_tensors, modelopt, nunchaku, nunchaku_file, torchao
from fluxq.quantize.exchange.native import NativeComponent

MODELOPT_SCHEMA = "0.47.0"  # the version of ModelOpt whose configuration is written


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


def record(made: Path, dialect: str, job: str, known: Mapping[Path, str]) -> None:
    """Write what an exported folder was written by, and the SHA-256 of its files: `--overwrite` replaces nothing else.

    known: of files that were hashed before.
    """
    said = {VERSION: FLUXQ_VERSION, "format": dialect, "job": job, "files": hash_files(made, known)}
    write_json(made / EXPORT_FILE, said)


def _bfl(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    (one,) = contents
    beside = made / f"{name.removesuffix('.safetensors')}.config.json"
    write_json(beside, one.source.config)
    _file(made, name, one, {**bfl.metadata(one.entries), BESIDE: json.dumps({".config.json": sha256_file(beside)})})


def _comfy(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    (one,) = contents
    _file(made, name, one, comfy.metadata(one.entries))


def _nunchaku(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    (one,) = contents
    _file(made, name, one, nunchaku.metadata(one.entries, nunchaku_file.MODEL_CLASS, one.source.config))


def _file(made: Path, name: str, one: Contents, metadata: Mapping[str, str]) -> None:
    join_weights(one.parts, made / name, {**metadata, VERSION: FLUXQ_VERSION, JOB: one.job})


def _modelopt(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    def config(one: Contents) -> dict[str, Any]:
        return modelopt.config(one.entries, one.in_16_bit, MODELOPT_SCHEMA)

    _pipeline(made, checkpoint, contents, config)


def _torchao(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    _pipeline(
        made,
        checkpoint,
        contents,
        lambda one: torchao.config(one.entries, one.in_16_bit),
        lambda one: torchao.metadata(one.entries, one.plain),
    )


def _nunchaku_lite(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    _pipeline(made, checkpoint, contents, lambda one: nunchaku.config(one.entries, one.source.dtype))


def _compressed_tensors(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    (one,) = contents
    _component(made, one, compressed_tensors.config(one.entries, one.in_16_bit))
    beside = one.source.component.replace("text_encoder", "tokenizer")
    tokenizer = checkpoint.path / beside
    if tokenizer.is_dir() and beside != one.source.component:
        for path in sorted(tokenizer.iterdir()):
            if path.is_file() and not (made / path.name).exists() and path.suffix in _OF_TOKENIZERS:
                shutil.copyfile(path, made / path.name)


def _pipeline(
    made: Path,
    checkpoint: ModelFolder,
    contents: Sequence[Contents],
    config: Callable[[Contents], dict[str, Any]],
    metadata: Callable[[Contents], Mapping[str, str]] = lambda one: {},
) -> None:
    copy_rest(made, checkpoint, [one.source.component for one in contents])
    for one in contents:
        described = config(one) if one.entries else None
        _component(made / one.source.component, one, described, metadata(one) if one.entries else {})


def _component(
    folder: Path, one: Contents, quantization: dict[str, Any] | None, metadata: Mapping[str, str] = {}
) -> None:
    folder.mkdir(exist_ok=True)
    join_shards(folder, one.source.library, one.parts, {"format": "pt", **metadata}, one.max_shard_bytes, one.written)
    described = {} if quantization is None else {"quantization_config": quantization}
    write_json(folder / "config.json", {**one.source.config, **described})
    origin = one.source.folder.path / one.source.component
    for path in sorted(origin.glob("*.json")):
        if path.name not in ("config.json", PLAN_FILE) and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


_OF_TOKENIZERS = (".json", ".txt", ".model")
WRITERS = {
    "bfl": Writer(_bfl, is_file=True, beside=(".config.json",)),
    "modelopt": Writer(_modelopt, is_pipeline=True),
    "comfy": Writer(_comfy, is_file=True),
    "torchao": Writer(_torchao, is_pipeline=True),
    "nunchaku_lite": Writer(_nunchaku_lite, is_pipeline=True),
    "nunchaku": Writer(_nunchaku, is_file=True),
    "compressed_tensors": Writer(_compressed_tensors, library="transformers"),
}
