"""Files beside the weights, held against the base too: settings, and a pipeline's other components.

A loader builds the model of config.json, and a pipeline calls all its components: with another one of them, weights
that are the base's make images of another model. Values that one side leaves out are the class's defaults.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxq.base.files import read_json, sha256_file
from fluxq.base.model import ModelFolder
from fluxq.quantize.digests import settings_of
from fluxq.quantize.exchange.files import ModelFile, open_component
from fluxq.quantize.exchange.marks import PLAIN

_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model")
_SCHEDULER, _SHOWN = "scheduler_config.json", 60


def other_settings(own: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    """Settings of a config.json that are not the base's, both values named. Empty ones are not compared."""
    if not own or not base:
        return
    mine, bases = (side.get("_class_name") for side in (own, base))
    if mine and bases and mine != bases:
        yield f"_class_name is {_shown(mine)}, the base's {_shown(bases)}"
        return
    ours, theirs = _settings(own), _settings(base)
    defaults = _defaults(base) if ours.keys() != theirs.keys() else {}
    for key in sorted(ours.keys() | theirs.keys()):
        if not (key in ours and key in theirs) and key not in defaults:
            continue  # nothing that this version of the class takes
        mine, bases = (side.get(key, defaults.get(key)) for side in (ours, theirs))
        if mine != bases:
            yield f"{key} is {_shown(mine)}, the base's {_shown(bases)}"


def beside(
    path: Path, base: Path, looked_at: Mapping[str, object], compare: Callable[[ModelFile, ModelFile], list[str]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """The other components of a pipeline's folder. looked_at: components that were compared layer by layer.

    compare: (model, the base's in 16 bit) -> what is wrong with it. Returns (component, what is not the base's) of
    each difference, and in words what was compared with nothing.
    """
    if not (path / "model_index.json").is_file():
        return [], []
    own = ModelFolder(path.name, path)
    others = {name: word for name, word in own.components.items() if name not in looked_at and (path / name).is_dir()}
    if not (base / "model_index.json").is_file():
        said = f"{', '.join(others)}: the base is no pipeline's folder, so they were not compared"
        return [], [said] if others else []
    whole, differences = ModelFolder(base.name, base), list[tuple[str, str]]()
    for key in ("_class_name", *own.components):
        mine, bases = (folder.index.get(key) for folder in (own, whole))
        if mine != bases and bases is not None:
            differences.append((key, f"model_index.json has {_shown(mine)}, the base's {_shown(bases)}"))
    lacking = [name for name in others if not (base / name).is_dir()]
    for name in others:
        if name not in lacking:
            differences += [(name, what) for what in _component(own, whole, name, compare)]
    return differences, [f"{', '.join(lacking)}: the base has none, so they were not compared"] if lacking else []


def other_small_files(own: ModelFolder, base: ModelFolder, name: str) -> Iterator[str]:
    """Yield differences of a component from the base's: a scheduler's settings, a tokenizer's vocabulary."""
    ours, theirs = own.path / name, base.path / name
    if (ours / _SCHEDULER).is_file() and (theirs / _SCHEDULER).is_file():
        yield from other_settings(read_json(ours / _SCHEDULER), read_json(theirs / _SCHEDULER))
    for file in _VOCABULARIES:
        both = [folder / file for folder in (ours, theirs)]
        if all(each.is_file() for each in both) and len(set(map(sha256_file, both))) > 1:
            yield f"{file} is not the base's"


def _component(
    own: ModelFolder, base: ModelFolder, name: str, compare: Callable[[ModelFile, ModelFile], list[str]]
) -> Iterator[str]:
    """Yield the differences of one component from the base's: settings and weights, or a vocabulary."""
    yield from other_small_files(own, base, name)
    ours, theirs = own.path / name, base.path / name
    if not all((folder / "config.json").is_file() and any(folder.glob("*.safetensors")) for folder in (ours, theirs)):
        return
    yield from other_settings(own.config(name), base.config(name))
    if own.tensors_digest(name) == base.tensors_digest(name):
        return
    mine, bases = (open_component(folder, "component of a pipeline folder") for folder in (ours, theirs))
    if bases.dialect != PLAIN:
        yield f"the base's is quantized itself ({bases.dialect}), so they could not be compared; give the 16-bit model"
        return
    yield from compare(mine, bases)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings_of(config).items() if key != "quantization_config"}


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a configuration's class, of diffusers or transformers; empty if these versions lack it."""
    try:
        name, kind = config.get("_class_name"), config.get("model_type")
        if isinstance(name, str):
            found = inspect.signature(getattr(importlib.import_module("diffusers"), name).__init__).parameters
            values = {key: each.default for key, each in found.items() if each.default is not each.empty}
            return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if isinstance(kind, str):
            return importlib.import_module("transformers").AutoConfig.for_model(kind).to_dict()
    except (AttributeError, ImportError, ValueError):
        pass  # no class of these versions: what only one side says cannot be held against anything
    return {}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
