"""A LoRA file as users name it: `[COMPONENT=]FILE[:WEIGHT]`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fluxq.base.console import path_near
from fluxq.base.files import require_no_pipe, sha256_file
from fluxq.base.tensors import TensorFile


@dataclass(frozen=True)
class LoraFile:
    """A safetensors file, the weight of its adapter, and the component that it changes, "" while that is not known."""

    path: Path
    weight: float
    component: str = ""

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """Parse `FILE`, `FILE:weight` or either after `COMPONENT=`; ValueError or FileNotFoundError for other text."""
        component, equals, rest = text.partition("=")
        is_file = Path(text).is_file() or Path(text.rpartition(":")[0]).is_file()
        if not equals or not component.isidentifier() or is_file:
            component, rest = "", text
        name, colon, weight = rest.rpartition(":")
        if not colon or Path(rest).is_file():
            name, weight = rest, "1"
        try:
            lora = cls(Path(name).expanduser(), float(weight), component)
        except ValueError:
            example = "write FILE:weight with a number as weight, as in style.safetensors:0.8"
            raise ValueError(f"LoRA {text!r}: {example}") from None
        require_no_pipe(lora.path, f"LoRA file {lora.path}")
        if lora.path.is_dir():
            raise ValueError(f"LoRA {lora.path} is a folder: name the .safetensors file in it")
        if not lora.path.is_file():
            raise FileNotFoundError(f"LoRA file {lora.path} does not exist{path_near(lora.path)}")
        if lora.path.suffix != ".safetensors":
            raise ValueError(f"{lora.path}: is no safetensors file by its name; convert it first, pickles are not read")
        if not abs(lora.weight) < float("inf"):
            raise ValueError(f"LoRA {text!r}: weight {weight} is no finite number")
        TensorFile(lora.path)  # ValueError for one that is damaged
        return lora

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's bytes."""
        return sha256_file(self.path)

    def describe(self) -> dict[str, Any]:
        """Return the file as it is recorded in the checkpoint."""
        return {
            "file": str(self.path.resolve()),
            "weight": self.weight,
            "sha256": self.digest,
            "component": self.component,
        }
