"""Schema of the parts of `fluxq_plan.json` that are read again; the file holds more, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fluxq.quantize.checkpoint import PLAN_FILE, read_plan_file


def read_record(folder: Path) -> dict[str, Any]:
    """The whole file of a checkpoint folder; ValueError naming it and the key where it is none that fluxq wrote."""
    record = read_plan_file(folder)
    if record is None:
        raise ValueError(f"{folder}: not a fluxq checkpoint (it has no {PLAN_FILE}); `fluxq quantize` writes one")
    try:
        Record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"{folder / PLAN_FILE}: damaged, it does not say how the checkpoint was made ({where}: {first['msg']}); "
            "quantize again"
        ) from None
    return record


def bits_per_weight(parts: Sequence[Mapping[str, Any]]) -> float:
    """Return the bits per weight of recorded components: all that is stored for all Linears over their weights."""
    weights = [sum(map(_weights, part["layers"])) for part in parts]
    stored = sum(part["bits_per_weight"] * count for part, count in zip(parts, weights, strict=True))
    return stored / sum(weights)


def bits_per_quantized_weight(parts: Sequence[Mapping[str, Any]]) -> float:
    """Return the same of the quantized Linears alone: what their formats and transforms take. 16 if there are none."""
    done = [layer for part in parts for layer in part["layers"] if layer["scheme"] != "16bit"]
    stored = sum(layer["bits_per_weight"] * _weights(layer) for layer in done)
    return stored / sum(map(_weights, done)) if done else 16.0


def fitted_db(groups: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the mean SQNR in dB of what layers give out, rounded to nearest and as fitted; None if none was fitted.

    groups: recorded input groups. The tokens are held out: nothing was fitted to them.
    """
    pairs = [(group["sqnr_before_db"], group["sqnr_db"]) for group in groups]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not known:
        return None
    before, after = (sum(values) / len(known) for values in zip(*known, strict=True))
    return before, after


def _weights(layer: Mapping[str, Any]) -> int:
    n, k = layer["shape"]
    return n * k


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Layer(_Part):
    name: str
    scheme: str
    shape: list[int] = Field(min_length=2, max_length=2)
    bits_per_weight: float


class Component(_Part):
    component: str
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    layers: list[Layer]


class Model(_Part):
    source: str | None  # None where another program's file was imported without its base
    revision: str | None
    digests: dict[str, str]


class Recipe(_Part):
    name: str
    gates: list[str] = []


class Identity(_Part):
    recipe: str


class Prompts(_Part):
    source: str
    digest: str


class Lora(_Part):
    file: str
    weight: float
    sha256: str
    component: str = "transformer"


class Record(_Part):
    model: Model
    recipe: Recipe
    identity: Identity
    prompts: Prompts | None
    loras: list[Lora] = []
    components: list[Component] = Field(min_length=1)
    statistics_digest: str | None
    trajectory: dict[str, Any] | None
