"""What is read again of `fluxq_plan.json`, and of what kind it has to be; the file holds more, for people."""

from __future__ import annotations

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
