"""Finished blocks of a component, a file each: an interrupted run goes on from them, and they become the checkpoint.

    0000.safetensors    a block's tensors under their names in the checkpoint; decisions on it in the header

A file appears complete or not at all. The caller has to know whose blocks are in a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter
from torch import Tensor

from fluxq.base.console import first_line, logger, without_cure
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.group import FittedGroup, Stage
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import Plan

_HEADER = "fluxq_block"


@dataclass(frozen=True)
class GroupOutcome:
    """Outcome of a fitted input group. plain_db, db: held-out SQNR, rounded to nearest and as kept."""

    layers: tuple[str, ...]
    stages: tuple[Stage, ...]
    plain_db: float | None
    db: float | None

    @classmethod
    def of(cls, group: FittedGroup) -> Self:
        """Return the outcome of a group, which is the group without its tensors."""
        return cls(tuple(group.layers), group.stages, group.plain_db, group.db)


@dataclass
class Outcome:
    """Outcome of a block, or of a component.

    schemes: layer -> final scheme, of fitted layers.
    weight_sqnr: layer -> dB.
    groups: name -> outcome, of fitted groups.
    fingerprints: of the source tensors that only rounding read, for `ModelFolder.digest`.
    """

    schemes: dict[str, Scheme] = field(default_factory=dict)
    weight_sqnr: dict[str, float] = field(default_factory=dict)
    groups: dict[str, GroupOutcome] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, files: Iterable[Path]) -> Self:
        """Read the headers of finished blocks together; ValueError naming a file whose header is damaged."""
        whole = cls()
        for file in files:
            header = _header_of(TensorFile(file))
            whole.schemes |= {name: Scheme.parse(text) for name, text in header.schemes.items()}
            whole.weight_sqnr |= header.weight_sqnr
            whole.groups |= header.groups
            whole.fingerprints |= header.fingerprints
        return whole

    def to_json(self) -> str:
        """Return the text that `read` reads."""
        header: dict[str, Any] = {
            "schemes": {name: str(scheme) for name, scheme in self.schemes.items()},
            "weight_sqnr": self.weight_sqnr,
            "groups": {name: asdict(group) for name, group in self.groups.items()},
            "fingerprints": self.fingerprints,
        }
        return json.dumps(header)

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with final schemes, and the stages that were kept among its reasons."""
        groups = {name: group for group in self.groups.values() for name in group.layers}
        layers = []
        for layer in plan.layers:
            kept = [stage.name for stage in groups[layer.name].stages if stage.kept] if layer.name in groups else []
            reason = f"{layer.reason}; kept: {', '.join(kept)}" if kept else layer.reason
            layers.append(replace(layer, scheme=self.schemes.get(layer.name, layer.scheme), reason=reason))
        return replace(plan, layers=tuple(layers))


@dataclass(frozen=True)
class _BlockHeader:
    """Header of a block, as `Outcome.to_json` writes it."""

    schemes: dict[str, str]
    weight_sqnr: dict[str, float]
    groups: dict[str, GroupOutcome]
    fingerprints: dict[str, str]


_HEADER_ADAPTER = TypeAdapter(_BlockHeader)


def _header_of(file: TensorFile) -> _BlockHeader:
    try:
        header = _HEADER_ADAPTER.validate_json(file.metadata().get(_HEADER, ""), strict=True)
        for text in header.schemes.values():
            Scheme.parse(text)
    except ValueError as error:  # pydantic's is one
        why = f"{first_line(error)}; remove the file, and the same command makes it again"
        raise ValueError(f"{file.path}: the header of this finished block is damaged: {why}") from None
    return header


def block_files(folder: Path, count: int) -> list[Path]:
    """Return the paths of a component's blocks, in their order."""
    return [folder / f"{index:04}.safetensors" for index in range(count)]


def finish(file: Path, tensors: Mapping[str, Tensor], outcome: Outcome) -> None:
    """Write a finished block, with a hash of all of it."""
    save_sealed(tensors, file, {_HEADER: outcome.to_json()})


def is_finished(file: Path, source: SourceWeights) -> bool:
    """Tell whether a block's file is as it was written, and `source` has the tensors that it was rounded from.

    If it is not, the block has to be made again, and the log says why.
    """
    if not file.is_file():
        return False
    try:
        stored = TensorFile(file)
        fingerprints = _header_of(stored).fingerprints
        stored.require_as_written()
        if source.differing(fingerprints):
            raise ValueError(f"{file}: made of other weights than the model has now")
    except ValueError as error:
        logger.warning("%s: this block is made again", without_cure(error))
        return False
    return True


def read_parts(files: Sequence[Path], groups: Sequence[str]) -> tuple[dict[str, Tensor], Outcome]:
    """Read a block whose groups were fitted in several files: tensors and outcome, in the order of `groups`."""
    stored, whole = [TensorFile(file) for file in files], Outcome.read(files)
    tensors = {key: part.get_tensor(key) for part in stored for key in part.keys()}
    layers = [name for group in groups for name in whole.groups[group].layers]
    schemes = {name: whole.schemes[name] for name in layers}
    lost = {name: whole.weight_sqnr[name] for name in layers}
    return tensors, Outcome(schemes, lost, {name: whole.groups[name] for name in groups})


def layer_tensors(file: Path, layers: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Read a finished block's tensors: layer -> name of the parameter -> tensor."""
    stored, tensors = TensorFile(file), {name: {} for name in layers}
    for key in stored.keys():
        name, _, parameter = key.rpartition(".")
        if name in tensors:
            tensors[name][parameter] = stored.get_tensor(key)
    return tensors
