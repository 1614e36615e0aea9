"""Errors of options: what each number format of each group of layers does to the final latents, alone.

    d[u, o] = Σ ‖latents(unit u in option o) − latents‖² / Σ ‖latents‖²        sums over images

A run of the pipeline for every unit and option would be days of a large model, so d is estimated, in one of two ways:

    velocity   Σ_t W_t ‖v_t(u, o) − v_t‖² / Σ ‖latents‖²: a call of the transformer for each option (velocity.py)
    adjoint    E_p R_p[u, o]² / Σ ‖latents‖², R_p = ⟨r_p, J δ[u, o]⟩ with Gaussian r_p: backward passes through the
               whole trajectory, each for all units and options at once (adjoint.py)

The adjoint's residuals R are kept: with them Σ_u R[u, o(u)] predicts the error of a whole plan, interactions included.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from fluxq.base.console import logger, progress, without_cure
from fluxq.base.files import atomic_path, require_no_pipe, sha256_json
from fluxq.base.ranks import ALONE, Ranks
from fluxq.base.tensors import TensorFile, save_sealed, save_weights
from fluxq.calibrate.adjoint import AdjointErrors
from fluxq.calibrate.capture import Item, Sampling, trajectory_of
from fluxq.calibrate.stand_ins import Menu
from fluxq.calibrate.statistics import parsed_header
from fluxq.calibrate.velocity import VelocityErrors

SIXTEEN_BIT = "16bit"  # in choices: the layers as they are, without an error
Measure = Literal["velocity", "adjoint"]
_Measurement = VelocityErrors | AdjointErrors
_HEADER = "fluxq_errors"
_PART = "fluxq_errors_part"
_FORMAT_VERSION = 1
_LONGEST_MESSAGE = 1000  # bytes
_AGAIN = "remove it, and measure again"


@dataclass(frozen=True)
class ErrorTable:
    """Normalised squared error (NMSE) that each option of each unit makes at the final latents, alone.

    units: names of input groups, "component.group".
    options: names of formats; 16 bit is none of them.
    error: (units, options) fp64, infinite where an option was not measured for a unit or its output is not finite.
    residuals: (units, options, images · probes) fp64 with signs; the mean of their squares is the error. None where
        velocities were measured.
    trajectory: as of statistics.
    """

    units: tuple[str, ...]
    options: tuple[str, ...]
    error: Tensor
    residuals: Tensor | None
    measure: Measure
    trajectory: Mapping[str, Any]

    def predicted(self, choice: Mapping[str, str]) -> float:
        """Return the sum of the errors of a choice, unit -> option or "16bit", as if they did not interact."""
        return math.fsum(float(self.error[place]) for place in self._places(choice))

    def predicted_together(self, choice: Mapping[str, str]) -> float:
        """Return the error of a choice with interactions, the mean of (Σ residual)²; without residuals `predicted`."""
        if self.residuals is None:
            return self.predicted(choice)
        total = torch.zeros(self.residuals.shape[-1], dtype=torch.float64)
        for place in self._places(choice):
            total += self.residuals[place]
        return float(total.square().mean())

    def gram(self, options: Mapping[str, Iterable[str]]) -> Tensor:
        """Return the mean products of residuals of all options, (R, R) fp64; without residuals the errors alone.

        options: unit -> its R options in all, "16bit" too; rows have their order.
        """
        pairs = [{unit: option} for unit, of_unit in options.items() for option in of_unit]
        if self.residuals is None:
            return torch.tensor([self.predicted(pair) for pair in pairs], dtype=torch.float64).diag()
        rows = torch.zeros(len(pairs), self.residuals.shape[-1], dtype=torch.float64)
        for row, pair in zip(rows, pairs, strict=True):
            for place in self._places(pair):
                row += self.residuals[place]
        return rows @ rows.T / rows.shape[1]

    def _places(self, choice: Mapping[str, str]) -> list[tuple[int, int]]:
        """Return the places in the table of what a choice quantizes; ValueError for an unknown unit or option."""
        for unit, option in choice.items():
            if unit not in self.units or option not in (*self.options, SIXTEEN_BIT):
                raise ValueError(
                    f"{unit} in {option}: the table has the options {', '.join(self.options)} of {len(self.units)} "
                    "units, which this is none of; measure again"
                )
        return [(self.units.index(u), self.options.index(o)) for u, o in choice.items() if o != SIXTEEN_BIT]

    @property
    def content_digest(self) -> str:
        """SHA-256 of names, trajectory and every number."""
        described = [self.units, self.options, self.measure, sha256_json(self.trajectory)]
        content = hashlib.sha256(json.dumps(described).encode())
        for name, tensor in self._tensors().items():
            content.update(f"{name}{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        return content.hexdigest()

    def _tensors(self) -> dict[str, Tensor]:
        return {"error": self.error} | ({} if self.residuals is None else {"residuals": self.residuals})

    def save(self, path: Path, job: str = "") -> None:
        """Write one safetensors file, atomically. job: digest of the request."""
        header = {"version": _FORMAT_VERSION, "job": job, "content": self.content_digest, "measure": self.measure}
        header |= {"units": self.units, "options": self.options, "trajectory": self.trajectory}
        with atomic_path(path) as part:
            save_weights(self._tensors(), part, {_HEADER: json.dumps(header, sort_keys=True)})

    @staticmethod
    def stored_job(path: Path) -> str | None:
        """Return the job that `save` was given; None for a file of another kind."""
        header = parsed_header(TensorFile(path).metadata().get(_HEADER, "{}"))
        return str(header["job"]) if "job" in header else None

    @classmethod
    def load(cls, path: Path) -> ErrorTable:
        """Read a file that `save` wrote; ValueError naming the file and the cure for any other, or a damaged one."""
        require_no_pipe(path, f"error table {path}")
        if not path.is_file():
            raise FileNotFoundError(f"error table {path} does not exist; `fluxq auto` writes one")
        file = TensorFile(path)
        header = parsed_header(file.metadata().get(_HEADER, "{}"))
        if header.get("version") != _FORMAT_VERSION:
            raise ValueError(f"{path}: not an error table of this version of fluxq; {_AGAIN}")
        try:
            table = cls(
                units=tuple(header["units"]),
                options=tuple(header["options"]),
                error=file.get_tensor("error"),
                residuals=file.get_tensor("residuals") if "residuals" in file.keys() else None,
                measure=header["measure"],
                trajectory=dict(header["trajectory"]),
            )
            is_whole = table.content_digest == header["content"] and table._is_sound()
        except (KeyError, TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"{path}: damaged since it was written; {_AGAIN}")
        return table

    def _is_sound(self) -> bool:
        shape = (len(self.units), len(self.options))
        shapes = [tuple(tensor.shape[:2]) for tensor in self._tensors().values()]
        return all(each == shape for each in shapes) and self.error.dtype == torch.float64 and self.error.dim() == 2


def measure_errors(
    pipe: Any,
    menu: Menu,
    items: Sequence[Item],
    sampling: Sampling,
    *,
    measure: Measure,
    folder: Path | None = None,
    ranks: Ranks = ALONE,
) -> ErrorTable:
    """Measure the error of every option of every unit on the images of `items`; the pipeline is left as it was.

    ValueError for a menu that does not fit the pipeline, and where the model cannot be measured in this way.

    pipe: in 16 bit (or fp32), on any device.
    sampling: its steps are those whose velocities are compared; the adjoint goes through all.
    folder: of this job alone, where finished parts are kept: an interrupted measurement goes on with them, and
        processes share them.
    ranks: processes that take some of the units (velocity) or of the images (adjoint) each.
    """
    _require_sound(pipe, menu, items, measure)
    if folder is None and ranks.world > 1:
        raise ValueError("several processes measure errors together through a folder; give one")
    options = tuple(dict.fromkeys(option for unit in menu.units for option in menu.options.get(unit, ())))
    measurement = MEASURES[measure](pipe, menu, options, items, sampling)
    digests = {name: sampling.digests[name] for name in menu.components}
    trajectory = trajectory_of(pipe, digests, items, sampling.call, measurement.steps)
    units = {unit: [names, menu.options.get(unit, ())] for unit, names in menu.units.items()}
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(TemporaryDirectory()))
        parts = _parts(measurement, place, sha256_json([measure, asdict(trajectory), units]), ranks)
    error, residuals = measurement.joined(parts)
    trajectory = replace(trajectory, sigmas=tuple(parts[0]["sigmas"].tolist()))
    kept = json.loads(json.dumps(asdict(trajectory)))
    return ErrorTable(tuple(menu.units), options, error, residuals, measure, kept)


def _parts(measurement: _Measurement, folder: Path, digest: str, ranks: Ranks) -> list[dict[str, Tensor]]:
    """Return all parts in their order, those that are missing in the folder made by the processes together."""
    files = [folder / f"errors-{digest[:16]}-{index:04}.safetensors" for index in range(measurement.parts)]
    missing = ranks.agree([i for i, file in enumerate(files) if not _is_measured(file)] if ranks.leads else [])
    with _alike(ranks):
        for index in progress(ranks.share(missing), "Measuring errors"):
            save_sealed(measurement.part(index), files[index], {_PART: digest})
    parts = []
    for file in map(TensorFile, files):
        file.require_as_written()
        parts.append({name: file.get_tensor(name) for name in file.keys()})
    ranks.meet()  # all have read the files, which may be removed now
    return parts


@contextmanager
def _alike(ranks: Ranks) -> Iterator[None]:
    """Raise in all processes the first ValueError that is raised in one, so that they go on alike; wait for all."""
    messages, refused = torch.zeros(ranks.world, _LONGEST_MESSAGE, dtype=torch.uint8), None
    try:
        yield
    except ValueError as error:
        refused, text = error, str(error).encode()[:_LONGEST_MESSAGE]
        messages[ranks.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    for message in ranks.sum(messages).tolist():
        if any(message):
            raise refused or ValueError(bytes(message).rstrip(b"\0").decode(errors="ignore"))


def _is_measured(file: Path) -> bool:
    """Tell whether a part need not be measured again; of a damaged one, the log says so."""
    try:
        if file.is_file():
            TensorFile(file).require_as_written()
        return file.is_file()
    except ValueError as error:
        logger.warning("%s: measured again", without_cure(error))
        return False


def _require_sound(pipe: Any, menu: Menu, items: Sequence[Item], measure: str) -> None:
    """Raise ValueError for a request that cannot be measured."""
    if measure not in MEASURES:
        raise ValueError(f"measure {measure!r}: expected one of {', '.join(MEASURES)}")
    if not items:
        raise ValueError("no images to measure errors on: give at least one prompt")
    if not any(menu.options.get(unit) for unit in menu.units):
        raise ValueError("no unit has an option to measure: give a menu with a format that the model can take")
    missing = [name for name in menu.components if getattr(pipe, name, None) is None]
    if missing:
        raise ValueError(f"{missing[0]}: the pipeline has no such component; name layers 'component.path'")
    unit_of: dict[str, str] = {}
    for unit, name in ((unit, name) for unit, names in menu.units.items() for name in names):
        if unit_of.setdefault(name, unit) != unit:
            raise ValueError(f"{name} is in the units {unit_of[name]} and {unit}; a layer can be in one alone")


# measure -> its class, made as (pipe, menu, options of the table, items, sampling)
MEASURES: dict[str, type[_Measurement]] = {"velocity": VelocityErrors, "adjoint": AdjointErrors}
