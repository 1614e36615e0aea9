"""Digests that a checkpoint stores of its own bytes, for `verify`.

    fluxq_plan.json             `files`: the SHA-256 of every file
    <component>/config.json     in its quantization_config
        digest                      of the component's tensors, however they are cut into files
        config_digest               of the config.json, without digests
        digests, config_digests     the same of the other components, and of a scheduler's or tokenizer's files; only
                                    where fluxq wrote the whole checkpoint

Unlike the plan file, these outlive `save_pretrained` and a download of just the files that a loader needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fluxq.base.files import read_json, sha256_file, sha256_json, write_json
from fluxq.base.model import HASHED_AT_ONCE, ModelFolder, resolve_model
from fluxq.quantize.checkpoint import is_model
from fluxq.recipes.computing import quantization_of

_DIGEST_KEYS = DIGEST, DIGESTS, CONFIG_DIGEST, CONFIG_DIGESTS = "digest", "digests", "config_digest", "config_digests"
_NO_SETTINGS = ("transformers_version", "torch_dtype", "dtype")  # saving changes them, no number depends on them
_SETTINGS_SUFFIXES = (".json", ".txt", ".model")  # of files that schedulers and tokenizers are loaded from


def hash_files(path: Path, known_hashes: Mapping[Path, str]) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder by its relative name, for the plan file.

    known_hashes: of files that were hashed as they were written.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        hashes = pool.map(lambda file: known_hashes.get(file) or sha256_file(file), files)
        return {file.relative_to(path).as_posix(): sha256 for file, sha256 in zip(files, hashes, strict=True)}


def write_digests(folder: Path) -> None:
    """Write the digests of all components of a checkpoint folder into the config.json of those that are quantized."""
    checkpoint = resolve_model(str(folder), one_model=True)
    named = [name for name in checkpoint.components if (folder / name / "config.json").is_file()]
    tensor_digests = {name: checkpoint.tensors_digest(name) for name in named if is_model(checkpoint, name)}
    settings_digests = {name: digest for name in checkpoint.components if (digest := config_digest(checkpoint, name))}
    for name in tensor_digests:
        others = {
            key: rest
            for key, by_component in ((DIGESTS, tensor_digests), (CONFIG_DIGESTS, settings_digests))
            if (rest := {other: digest for other, digest in by_component.items() if other != name})
        }
        _add(folder / name / "config.json", {DIGEST: tensor_digests[name], **others})


def write_own_digest(folder: Path) -> None:
    """Write a quantized model's digest into its config.json, in the folder that a library saved it in.

    A folder without weights (adapters alone) or of another model stays as it is.
    """
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").is_file():
        return
    if quantization_of(read_json(folder / "config.json")):
        _add(folder / "config.json", {DIGEST: ModelFolder(folder.name, folder).tensors_digest("")})


def _add(file: Path, digests: Mapping[str, Any]) -> None:
    config = read_json(file)
    if (quantization := quantization_of(config)) is not None:
        digests = {**digests, CONFIG_DIGEST: sha256_json(settings_of(config))}
        write_json(file, {**config, "quantization_config": {**quantization, **digests}})


def config_digest(folder: ModelFolder, component: str) -> str:
    """Return the SHA-256 of a component's settings; "" for one without settings.

    A model's settings are its config.json, a scheduler's or tokenizer's all files that it may be loaded from.
    """
    place = folder.path / component
    if (place / "config.json").is_file():
        return sha256_json(settings_of(read_json(place / "config.json")))
    files = sorted(file for file in place.glob("*") if file.suffix in _SETTINGS_SUFFIXES and file.is_file())
    contents = [[file.name, _values_of(file)] for file in files]
    return sha256_json(contents) if contents else ""


def _values_of(file: Path) -> Any:
    """Return the values of a small JSON object, however it is spaced, and the SHA-256 of any other file.

    A vocabulary may be larger than JSON files are read, and its keys are tokens: none of them is left out.
    """
    if file.suffix != ".json":
        return sha256_file(file)
    try:
        values = read_json(file)
    except ValueError:  # too large, or no object
        return sha256_file(file)
    return settings_of(values) if file.stem.endswith("config") else values


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a JSON file that a loader builds from: no digests, names, versions and dtypes."""
    settings = {key: value for key, value in config.items() if not key.startswith("_") and key not in _NO_SETTINGS}
    if isinstance(quantization := settings.get("quantization_config"), dict):
        settings["quantization_config"] = {key: each for key, each in quantization.items() if key not in _DIGEST_KEYS}
    return settings
