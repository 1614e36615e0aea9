"""Sources of images for a gate: each makes, or has, the image of any (prompt, seed) that it is asked for.

    name          in results
    has_latents   whether final latents come with the images
    items         (prompt, seed) of all its images; None where it makes what is asked for
    machine       name of the device that makes them; None where nobody says
    make          returns the images of items, as metrics want them (see `generate.Generated`)
    again         returns a second run of it, whose images differ by nothing that matters; None where there is none
    describe      returns what identifies it, for results

Images are kept on disk and made once, so that an interrupted gate goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxq.eval.gate.commits import CommitSource
from fluxq.eval.gate.endpoints import EndpointSource
from fluxq.eval.gate.pictures import Pictures
from fluxq.eval.images.executor import Work, ensure_images
from fluxq.eval.images.sides import Side, floor_attention


@dataclass(frozen=True)
class PipelineSource:
    """A pipeline or checkpoint folder that is run here. root: where images are kept."""

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

    def make(self, items: Sequence[tuple[str, int]]) -> Any:
        return ensure_images(Work(self.side, tuple(items), self.call, self.batch_size, self.root, self.device))

    def again(self) -> PipelineSource:
        """Return it with another batch size and another attention backend of PyTorch."""
        side = replace(self.side, name=f"{self.side.name} again", attention=floor_attention(self.device))
        return replace(self, side=side, batch_size=max(1, self.batch_size // 2) if self.batch_size > 1 else 2)

    def describe(self) -> dict[str, Any]:
        return {"kind": "pipeline", "digest": self.side.digest, "batch_size": self.batch_size, "dtype": self.side.dtype}


Source = PipelineSource | CommitSource | EndpointSource | Pictures
