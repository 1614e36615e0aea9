"""Files beside the weights, held against the base's too: settings, and vocabularies.

A loader builds the model of config.json: with another one, weights that are the base's make images of another model.
Values that one side leaves out are the class's defaults.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from fluxq.base.files import read_json, sha256_file
from fluxq.base.model import ModelFolder
from fluxq.quantize.record import settings_of

_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model")
_SCHEDULER, _SHOWN = "scheduler_config.json", 60


def other_settings(config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    """Settings of a config.json that are not the base's, both values named. Empty ones are not compared."""
    if not config or not base:
        return
    mine, bases = (side.get("_class_name") for side in (config, base))
    if mine and bases and mine != bases:
        yield f"_class_name is {shown(mine)}, the base's {shown(bases)}"
        return
    ours, theirs = _settings(config), _settings(base)
    defaults = _defaults(base) if ours.keys() != theirs.keys() else {}
    for key in sorted(ours.keys() | theirs.keys()):
        if not (key in ours and key in theirs) and key not in defaults:
            continue  # nothing that this version of the class takes
        mine, bases = (side.get(key, defaults.get(key)) for side in (ours, theirs))
        if mine != bases:
            yield f"{key} is {shown(mine)}, the base's {shown(bases)}"


def other_small_files(checkpoint: ModelFolder, base: ModelFolder, name: str) -> Iterator[str]:
    """Yield differences of a component from the base's: a scheduler's settings, a tokenizer's vocabulary."""
    ours, theirs = checkpoint.path / name, base.path / name
    if (ours / _SCHEDULER).is_file() and (theirs / _SCHEDULER).is_file():
        yield from other_settings(read_json(ours / _SCHEDULER), read_json(theirs / _SCHEDULER))
    for file in _VOCABULARIES:
        both = [folder / file for folder in (ours, theirs)]
        if all(each.is_file() for each in both) and len(set(map(sha256_file, both))) > 1:
            yield f"{file} is not the base's"


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings_of(config).items() if key != "quantization_config"}


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of a configuration's class, of diffusers or transformers; empty if these versions lack it."""
    try:
        name, kind = config.get("_class_name"), config.get("model_type")
        if isinstance(name, str):
            parameters = inspect.signature(getattr(importlib.import_module("diffusers"), name).__init__).parameters
            values = {key: each.default for key, each in parameters.items() if each.default is not each.empty}
            return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if isinstance(kind, str):
            return importlib.import_module("transformers").AutoConfig.for_model(kind).to_dict()
    except (AttributeError, ImportError, ValueError):
        pass  # no class of these versions: what only one side says cannot be held against anything
    return {}


def shown(value: Any) -> str:
    """A value for people, a long one cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
