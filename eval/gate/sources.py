"""Sources of images for a gate: each makes, or has, the image of any (prompt, seed) that it is asked for.

Images are kept on disk and made once, so that an interrupted gate goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fluxq.eval.gate.pictures import Pictures
from fluxq.eval.images.executor import Work, ensure_images
from fluxq.eval.images.sides import Side
from fluxq.eval.metrics.drift import floor_attention

Items = Sequence[tuple[str, int]]


class Source(Protocol):
    """Maker of images of one side of a gate."""

    @property
    def name(self) -> str:
        """Name in results."""
        ...

    @property
    def has_latents(self) -> bool:
        """True where final latents come with the images."""
        ...

    @property
    def items(self) -> tuple[tuple[str, int], ...] | None:
        """(prompt, seed) of all its images; None where it makes what is asked for."""
        ...

    @property
    def machine(self) -> str | None:
        """Name of the device that makes them; None where nobody says."""
        ...

    def make(self, items: Items) -> Any:
        """Return the images of these items, as metrics want them (see `generate.Generated`)."""
        ...

    def again(self) -> Source | None:
        """Return a second run of it, whose images differ by nothing that matters; None where that cannot be had."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what identifies it, for results."""
        ...


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline or checkpoint folder that is run here. work: everything but its items."""

    side: Side
    call: Mapping[str, Any]
    batch_size: int
    root: Path
    device: str
    machine: str | None
    has_latents: bool = True
    items: None = None

    @property
    def name(self) -> str:
        return self.side.name

    def make(self, items: Items) -> Any:
        return ensure_images(Work(self.side, tuple(items), self.call, self.batch_size, self.root, self.device))

    def again(self) -> PipelineSource:
        """Return it with another batch size and another attention backend of PyTorch."""
        side = replace(self.side, name=f"{self.side.name} again", attention=floor_attention(self.device))
        return replace(self, side=side, batch_size=max(1, self.batch_size // 2) if self.batch_size > 1 else 2)

    def describe(self) -> dict[str, Any]:
        return {"kind": "pipeline", "digest": self.side.digest, "batch_size": self.batch_size, "dtype": self.side.dtype}


@dataclass(frozen=True)
class PictureSource:
    """An image folder that somebody else wrote."""

    pictures: Pictures
    has_latents: bool = False

    @property
    def name(self) -> str:
        return self.pictures.folder.resolve().name

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        return self.pictures.items

    @property
    def machine(self) -> str | None:
        return self.pictures.machine

    def make(self, items: Items) -> Pictures:
        return self.pictures.of(items)

    def again(self) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "count": len(self.pictures.rows)}
