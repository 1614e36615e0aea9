"""Say how a component computes beside its formats: attention, and steps that are kept in 16 bit.

Recipes say it, and checkpoints record it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fluxq.base.near import did_you_mean

Attention = Literal["16bit", "fp8"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)


class Strict(BaseModel):
    """A mapping whose unknown keys are errors with a suggestion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    hint = did_you_mean(str(key), cls.model_fields) or f"; keys here: {', '.join(cls.model_fields)}"
                    raise PydanticCustomError(
                        "unknown_key", "unknown key {key}{hint}", {"key": repr(key), "hint": hint}
                    )
        return value


class Steps(Strict):
    """Denoising steps in which transformers compute with their 16-bit weights: the first and the last of each call.

    components: what they compute in then. A checkpoint records this, `fluxq.keep_steps` does it in a pipeline.
    """

    first: int = Field(default=0, ge=0, le=1 << 20)
    last: int = Field(default=0, ge=0, le=1 << 20)
    components: Literal["16bit"] = "16bit"

    @model_validator(mode="after")
    def _some(self) -> Steps:
        if not self.first and not self.last:
            raise ValueError("neither `first` nor `last` names a step to keep; write {first: 1}, or leave out `steps`")
        return self

    def __str__(self) -> str:
        """For people: `the first step and the last 2`."""
        parts = [f"the {end} {count}" if count > 1 else f"the {end}" for end, count in self._ends]
        return " and ".join([f"{parts[0]} step{'s' if self._ends[0][1] > 1 else ''}", *parts[1:]])

    @property
    def _ends(self) -> list[tuple[str, int]]:
        return [(end, count) for end, count in (("first", self.first), ("last", self.last)) if count]
