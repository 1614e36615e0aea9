"""Statistics: the inputs of each group of Linears, per noise-level bin, as sums that merge.

amax and counts merge exactly; sums are float64, so merging in another order agrees within 1e-12 and the same split
gives the same bytes. One safetensors file holds everything, the trajectory in its header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxq.base.files import atomic_path, require_no_pipe, sha256_json
from fluxq.base.tensors import TensorFile, save_weights

_HEADER = "fluxq_statistics"
_FORMAT_VERSION = 1
_FIELDS = ("amax", "sum", "sum_of_squares", "count")


@dataclass(frozen=True)
class GroupSums:
    """One input group: amax (T, K) fp32, sum and sum_of_squares (T, K) fp64, count (T,) int64 of tokens."""

    amax: Tensor
    sum: Tensor
    sum_of_squares: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, bins: int, k: int) -> GroupSums:
        """Return the sums of no tokens."""
        wide = torch.zeros(bins, k, dtype=torch.float64)
        return cls(torch.zeros(bins, k, dtype=torch.float32), wide, wide.clone(), torch.zeros(bins, dtype=torch.int64))

    def add(self, index: int, x: Tensor) -> None:
        """Add tokens x (M, K) to bin `index`, in place."""
        values = x.to("cpu") if x.device.type == "mps" else x  # which has no float64
        wide = values.double()
        self.amax[index] = torch.maximum(self.amax[index], values.abs().amax(0).float().cpu())
        self.sum[index] += wide.sum(0).cpu()
        self.sum_of_squares[index] += wide.square().sum(0).cpu()
        self.count[index] += x.shape[0]

    def merge(self, other: GroupSums) -> GroupSums:
        """Return the sums of both."""
        return GroupSums(
            torch.maximum(self.amax, other.amax),
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
            self.count + other.count,
        )

    @property
    def mean(self) -> Tensor:
        """Per-channel mean over all bins, (K,) fp64."""
        return self.sum.sum(0) / self.count.sum()


@dataclass(frozen=True)
class Statistics:
    """Input group -> sums, with the trajectory that made them (a JSON object) and its hash."""

    groups: Mapping[str, GroupSums]
    trajectory: dict[str, Any]
    digest: str

    def amax(self, group: str) -> Tensor:
        """Return the largest magnitude of the group's input, fp32 scalar; ValueError if the group was not observed."""
        return self._group(group).amax.amax()

    def channel_amax(self, group: str) -> Tensor:
        """Return the largest magnitude of each channel, (K,) fp32."""
        return self._group(group).amax.amax(0)

    def of_component(self, component: str) -> Statistics:
        """Return the part of one component, its groups under their own names; all, where only one was observed."""
        prefix = f"{component}/"
        groups = {name.removeprefix(prefix): sums for name, sums in self.groups.items() if name.startswith(prefix)}
        return replace(self, groups=groups) if groups else self

    @property
    def content_digest(self) -> str:
        """SHA-256 of the trajectory and of every number: equal trajectories on other hardware may differ here."""
        content = hashlib.sha256(self.digest.encode())
        for name in sorted(self.groups):
            for field in _FIELDS:
                tensor = getattr(self.groups[name], field)
                content.update(f"{name}/{field}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return content.hexdigest()

    def _group(self, group: str) -> GroupSums:
        if group not in self.groups:
            raise ValueError(f"statistics hold nothing about the input of {group}: calibrate again with this recipe")
        return self.groups[group]

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both sets of images; ValueError if anything but the images differs.

        Sigmas are those of the first image. Of images with arguments of their own, a size among them, they may differ.
        """
        mine, theirs = dict(self.trajectory), dict(other.trajectory)
        items = [*mine.pop("items"), *theirs.pop("items")]
        if _json(self.trajectory["items"][0][2:]) != _json(other.trajectory["items"][0][2:]):
            mine.pop("sigmas", None)
            theirs.pop("sigmas", None)
        differing = sorted(key for key in mine.keys() | theirs.keys() if _json(mine.get(key)) != _json(theirs.get(key)))
        if differing or self.groups.keys() != other.groups.keys():
            raise ValueError(f"statistics cannot be merged: they differ in {', '.join(differing) or 'the groups seen'}")
        trajectory = {**self.trajectory, "items": items}
        groups = {name: sums.merge(other.groups[name]) for name, sums in self.groups.items()}
        return Statistics(groups, trajectory, sha256_json(trajectory))

    def save(self, path: Path, job: str = "") -> None:
        """Write one safetensors file, atomically. job: digest of its request, or place of an interrupted run's."""
        tensors = {f"{name}/{field}": getattr(sums, field) for name, sums in self.groups.items() for field in _FIELDS}
        header = {"version": _FORMAT_VERSION, "trajectory": self.trajectory, "digest": self.digest, "job": job}
        header["content"] = self.content_digest
        with atomic_path(path) as part:
            save_weights(tensors, part, {_HEADER: json.dumps(header, sort_keys=True)})

    @staticmethod
    def stored_job(path: Path) -> str:
        """Return the job that `save` was given; "" without one."""
        with TensorFile(path) as stream:
            return str(parsed_header(stream.metadata().get(_HEADER, "{}")).get("job", ""))

    @classmethod
    def load(cls, path: Path, job: str | None = None) -> Statistics:
        """Read a file that `save` wrote, for this `job`; ValueError for any other file."""
        require_no_pipe(path, f"statistics file {path}")
        if not path.is_file():
            raise FileNotFoundError(f"statistics file {path} does not exist; `fluxq calibrate` writes one")
        with TensorFile(path) as stream:
            header = parsed_header(stream.metadata().get(_HEADER, "{}"))
            if header.get("version") != _FORMAT_VERSION:
                raise ValueError(f"{path}: not a statistics file of this version of fluxq; run `fluxq calibrate` again")
            if job is not None and header.get("job") != job:
                raise ValueError(f"{path}: of another run; run `fluxq calibrate` again")
            trajectory, digest = header.get("trajectory"), header.get("digest", "")
            if not isinstance(trajectory, dict) or sha256_json(trajectory) != digest or "items" not in trajectory:
                raise ValueError(f"{path}: its trajectory does not match its hash; run `fluxq calibrate` again")
            keys = sorted(stream.keys())
            names = dict.fromkeys(key.rpartition("/")[0] for key in keys)
            if keys != sorted(f"{name}/{field}" for name in names for field in _FIELDS):
                raise ValueError(f"{path}: tensors are missing; run `fluxq calibrate` again")
            groups = {name: GroupSums(*(stream.get_tensor(f"{name}/{field}") for field in _FIELDS)) for name in names}
        for name, sums in groups.items():
            _require_sound(sums, f"{path}: {name}")
        whole = cls(groups, trajectory, digest)
        if header.get("content", whole.content_digest) != whole.content_digest:  # older files say nothing of it
            raise ValueError(f"{path}: damaged since it was written; run `fluxq calibrate` again")
        return whole


def _require_sound(sums: GroupSums, where: str) -> None:
    """Raise ValueError for tensors that `GroupSums.add` cannot have made."""
    shape, dtypes = sums.amax.shape, [getattr(sums, field).dtype for field in _FIELDS]
    fits = sums.sum.shape == sums.sum_of_squares.shape == shape and sums.count.shape == shape[:1] and len(shape) == 2
    if not fits or not sums.amax.numel() or dtypes != [torch.float32, torch.float64, torch.float64, torch.int64]:
        raise ValueError(f"{where}: shapes or dtypes do not belong together; run `fluxq calibrate` again")
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (sums.amax, sums.sum, sums.sum_of_squares))
    if not finite or (sums.amax < 0).any() or (sums.count < 0).any() or not sums.count.sum() > 0:
        raise ValueError(f"{where}: holds numbers that no activation gives; run `fluxq calibrate` again")


def parsed_header(text: str) -> dict[str, Any]:
    """Return the JSON object of a file's header; an empty one where the text is no such object."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, nesting
        return {}
    return header if isinstance(header, dict) else {}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
