"""Finished blocks of a component: a file each, which an interrupted run goes on from and the checkpoint is made of.

    0000.safetensors    a block's tensors under their names in the checkpoint; in the header, what was decided of it

A file appears complete or not at all. Whose blocks a folder holds is the caller's to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from fluxq.base.console import logger
from fluxq.base.files import atomic_path
from fluxq.base.tensors import TensorFile, save_weights
from fluxq.quantize.group import FittedGroup, Stage
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import Plan

_HEADER = "fluxq_block"


@dataclass(frozen=True)
class GroupOutcome:
    """What became of a fitted input group. plain_db, db: held-out SQNR, rounded to nearest and as kept."""

    layers: tuple[str, ...]
    stages: tuple[Stage, ...]
    plain_db: float | None
    db: float | None

    @classmethod
    def of(cls, group: FittedGroup) -> Self:
        """That of a group, without its tensors."""
        return cls(tuple(group.layers), group.stages, group.plain_db, group.db)


@dataclass
class Outcome:
    """What became of a block, or of a component.

    schemes: final ones of fitted layers. weight_sqnr: dB, by layer. groups: of those that were fitted, by name.
    """

    schemes: dict[str, Scheme] = field(default_factory=dict)
    weight_sqnr: dict[str, float] = field(default_factory=dict)
    groups: dict[str, GroupOutcome] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterable[Path]) -> Self:
        """What the headers of finished blocks say together."""
        whole = cls()
        for file in files:
            said = json.loads(TensorFile(file).metadata()[_HEADER])
            whole.schemes |= {name: Scheme.parse(text) for name, text in said["schemes"].items()}
            whole.weight_sqnr |= said["weight_sqnr"]
            for name, group in said["groups"].items():
                stages = tuple(Stage(**stage) for stage in group["stages"])
                whole.groups[name] = GroupOutcome(tuple(group["layers"]), stages, group["plain_db"], group["db"])
        return whole

    def to_json(self) -> str:
        """The text that `read` reads."""
        said: dict[str, Any] = {
            "schemes": {name: str(scheme) for name, scheme in self.schemes.items()},
            "weight_sqnr": self.weight_sqnr,
            "groups": {name: asdict(group) for name, group in self.groups.items()},
        }
        return json.dumps(said)

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with final schemes, and what was decided among the reasons."""
        groups = {name: group for group in self.groups.values() for name in group.layers}
        layers = []
        for layer in plan.layers:
            kept = [stage.name for stage in groups[layer.name].stages if stage.kept] if layer.name in groups else []
            reason = f"{layer.reason}; kept: {', '.join(kept)}" if kept else layer.reason
            layers.append(replace(layer, scheme=self.schemes.get(layer.name, layer.scheme), reason=reason))
        return replace(plan, layers=tuple(layers))


def block_files(folder: Path, count: int) -> list[Path]:
    """Where the blocks of a component go, in their order."""
    return [folder / f"{index:04}.safetensors" for index in range(count)]


def finish(file: Path, tensors: Mapping[str, Tensor], outcome: Outcome) -> None:
    """Write a block that is done."""
    with atomic_path(file) as part:
        save_weights(tensors, part, {_HEADER: outcome.to_json()})


def is_finished(file: Path) -> bool:
    """Whether a block need not be made again; one that was damaged since is, and the log says so."""
    if not file.is_file():
        return False
    try:
        TensorFile(file)
    except ValueError as error:
        logger.warning("%s: this block is made again", error)
        return False
    return True


def layer_tensors(file: Path, layers: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Layer -> its tensors in a finished block, by the name of the parameter."""
    stored, found = TensorFile(file), {name: {} for name in layers}
    for key in stored.keys():
        name, _, parameter = key.rpartition(".")
        if name in found:
            found[name][parameter] = stored.get_tensor(key)
    return found
