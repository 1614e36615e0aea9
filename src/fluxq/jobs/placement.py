"""Placement of a model that does not fit where it is to run.

With `--device auto` its weights are read when it is their turn, as `--max-memory` does; where a GPU has no room even
for that, the CPU is used. Pipelines that are judged have their parts take turns instead, as diffusers' offload does it.
With any other device, a model whose weights alone are more than is free is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fluxq.base.console import logger
from fluxq.base.devices import AUTO
from fluxq.base.memory import free_bytes
from fluxq.base.model import ModelFolder
from fluxq.jobs import footprint
from fluxq.jobs.memory import Demand, in_words
from fluxq.quantize.checkpoint import is_model

if TYPE_CHECKING:
    from fluxq.jobs.prepared import Prepared

_FREE = 0.9  # of what is free, that a job may plan with: others on the machine want some, too


def weight_bytes(folder: ModelFolder, dtype: str) -> int:
    """Return the bytes of all weights of a pipeline as it is loaded."""
    itemsize = getattr(torch, dtype).itemsize
    return sum(
        footprint.weight_bytes(folder, component, itemsize)
        for component in folder.components
        if is_model(folder, component)
    )


def settle_pipeline(folder: ModelFolder, device: str, nbytes: int, asked: str) -> tuple[str, bool]:
    """Return (device, whether its parts take turns on it) for a pipeline that makes images to be judged.

    nbytes: of its weights as they are loaded. asked: what `--device` said. Raises ValueError for one that does not fit.
    """
    place = torch.device(device)
    free = free_bytes(place) if place.type in ("cpu", "cuda") else None
    if free is None or nbytes <= (_FREE * free if place.type == "cuda" else free):
        return device, False
    needs = f"weights of {folder.name} take {in_words(nbytes)}, {in_words(free)} are free on {device}"
    if place.type == "cpu":
        raise ValueError(f"{needs}: it does not fit on this machine; evaluate it on one with more memory")
    if asked != AUTO:
        raise ValueError(f"{needs}; leave out --device: its parts then take turns on the GPU")
    if max(_part_bytes(folder).values(), default=0) <= _FREE * free:
        logger.warning("%s: its parts take turns there (offload), which takes longer", needs)
        return device, True
    logger.warning("%s, too little even for its largest part: the CPU is used", needs)
    return settle_pipeline(folder, "cpu", nbytes, AUTO)


def stored_bytes(folder: ModelFolder) -> int:
    """Return the bytes of all weights of a pipeline as they are stored."""
    return sum(_part_bytes(folder).values())


def _part_bytes(folder: ModelFolder) -> dict[str, int]:
    """Bytes of each component's weights as they are stored."""
    return {
        name: sum(path.stat().st_size for path in folder.weight_files(name))
        for name in folder.components
        if is_model(folder, name)
    }


def settle(prepared: Prepared, demand_on: Callable[[str], Demand | None], asked: str) -> Prepared:
    """Return the job as it can run: as it is, within a bound, or on the CPU.

    demand_on: device -> what the job asks of it, None if it runs no pipeline. asked: what `--device` said. Raises
    ValueError for a model that does not fit.
    """
    device = torch.device(prepared.device)
    free = free_bytes(device) if device.type in ("cpu", "cuda") else None
    demand = demand_on(prepared.device)
    if free is None or demand is None:
        return prepared
    weights = weight_bytes(prepared.folder, prepared.options.dtype)
    needed = demand.unbounded(weights)
    limit, name = int(_FREE * free), prepared.folder.name
    if needed <= limit or (asked != AUTO and weights <= free):  # what is needed beside the weights is an estimate
        return prepared
    if asked != AUTO:
        bounded = f", or give --max-memory {in_words(limit)}: either reads weights in turn" * (demand.least <= limit)
        raise ValueError(
            f"{name} does not fit on {device}: its weights take {in_words(weights)}, {in_words(free)} are free; leave "
            f"out --device{bounded}"
        )
    if demand.least <= limit:
        logger.warning(
            "%s needs %s, %s are free on %s: weights are read when it is their turn, and at most %s are used",
            *(name, in_words(needed), in_words(free), device, in_words(limit)),
        )
        return replace(prepared, bound=demand.bound(limit))
    if device.type == "cuda":
        logger.warning("%s needs %s on %s, %s are free: the CPU is used", name, demand, device, in_words(free))
        return settle(replace(prepared, options=replace(prepared.options, device="cpu")), demand_on, AUTO)
    raise ValueError(
        f"{name} does not fit on this machine: {demand}, and {in_words(free)} are free; `--profile rtn --no-check` "
        "only rounds, which takes a few GB"
    )
