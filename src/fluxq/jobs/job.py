"""A job: options of the commands that make checkpoints, the plans made of them, and the place where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxq.base.files import sha256_json
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.base.ranks import ALONE, Ranks
from fluxq.calibrate.capture import watch_shared_inputs
from fluxq.calibrate.prompts import PromptSet
from fluxq.calibrate.statistics import Statistics
from fluxq.eval.images.protocols import PROTOCOLS
from fluxq.jobs.memory import Bound
from fluxq.jobs.requirements import call_of, makes_video, require_steps
from fluxq.quantize import checkpoint
from fluxq.quantize.checkpoint import SourceWeights
from fluxq.quantize.lora import FusedWeights, LoraFile, Updates, fuse_into
from fluxq.recipes.plan import GENERIC, Plan
from fluxq.recipes.recipe import Calibration, Recipe

CHECK_IMAGES, CHECK_VIDEOS = 4, 2
# Calibration and evaluation draw noise from seeds that never meet.
_CALIBRATION_SEEDS = 1 << 20


@dataclass(frozen=True)
class JobOptions:
    """Options of plan, calibrate and quantize; None leaves the recipe's, the folder's or the pipeline's own value."""

    model: str | None = None
    recipe: str = "nvfp4"
    profile: Any = None
    output: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    seed: int | None = None
    prompts: str | None = None
    call: dict[str, Any] = field(default_factory=dict)
    components: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    statistics: str | None = None
    lora: tuple[str, ...] = ()
    revision: str | None = None
    local_files_only: bool = False
    overwrite: bool = False
    check: bool = True
    parallel_blocks: bool = False
    push_to_hub: str | None = None
    private: bool = False
    max_shard_bytes: int = checkpoint.MAX_SHARD_BYTES
    max_memory: int | None = None
    in_memory: bool = False  # the pipeline was, and is at `model` for this job alone


@dataclass(frozen=True)
class Run:
    """Place of a job.

    device: device of this process.
    ranks: processes that do the job together.
    memory: bound on memory, None without one.
    """

    device: str
    ranks: Ranks = ALONE
    memory: Bound | None = None

    @property
    def limit(self) -> int | None:
        """Bytes that weights and activations may take on the device, None without a bound."""
        return self.memory.limit if self.memory else None


@dataclass(frozen=True)
class Job:
    """All inputs of a job, read and checked; it has one plan per component to quantize, by default the recipe's."""

    options: JobOptions
    run: Run
    folder: ModelFolder
    recipe_name: str
    recipe: Recipe
    calibration: Calibration
    plans: tuple[Plan, ...]
    prompts: PromptSet
    statistics: Statistics | None
    output: Path
    identity: dict[str, Any]
    loras: tuple[LoraFile, ...] = ()
    updates: dict[str, tuple[Updates, ...]] = field(default_factory=dict)
    finished: bool = False  # the output exists, just as this job would make it
    configs: Mapping[str, str] = field(default_factory=dict)  # component -> SHA-256 of its config.json, likewise
    stamps: Mapping[str, Any] = field(default_factory=dict)  # component -> `ModelFolder.stamps`, when this was begun

    @property
    def calibrated(self) -> dict[str, Plan]:
        """Component -> plan, of the transformers, whose activations calibration looks at."""
        return {plan.component: plan for plan in self.plans if plan.kind == "transformer"}

    @property
    def fitted(self) -> dict[str, Plan]:
        """Component -> plan, of those with layers that are fitted to their inputs."""
        plans = self.calibrated.items()
        return {name: plan for name, plan in plans if any(la.method.needs_data for la in plan.quantized)}

    @property
    def call(self) -> dict[str, Any]:
        """Pipeline arguments: the folder's defaults, overridden by the command line."""
        return call_of(self.folder, self.folder.generation_defaults, self.options.call)

    @property
    def check_call(self) -> dict[str, Any]:
        """Arguments of the closing check's calls; by default its videos are as short as a smoke evaluation's."""
        frames = PROTOCOLS["smoke"].frames
        return call_of(self.folder, self.folder.generation_defaults, self.options.call, frames)

    @property
    def calibration_items(self) -> Sequence[Any]:
        """(row, seed) of each image that calibration looks at."""
        return self.prompts.items(self.calibration.count, _CALIBRATION_SEEDS + self.calibration.seed)

    @property
    def check_items(self) -> Sequence[Any]:
        """(row, seed) of each image of the closing check; of rows with sizes or images only those like the first."""
        count = CHECK_VIDEOS if makes_video(self.folder) else CHECK_IMAGES
        return self.prompts.alike.items(count, self.calibration.seed)

    def weights(self, component: str) -> SourceWeights:
        """Return the component's 16-bit weights, LoRA files fused."""
        if component in self.updates:
            return FusedWeights(self.folder, component, self.updates[component])
        return SourceWeights(self.folder, component)

    def require_unchanged(self, component: str) -> None:
        """Raise RuntimeError if the component's files are not those that this job began with."""
        if component in self.stamps and self.folder.stamps(component) != self.stamps[component]:
            raise RuntimeError(
                f"{self.folder.path / component} has changed since this run began: what was measured is of other "
                "weights. Start again when nothing writes there any more"
            )

    def digest(self, component: str) -> str:
        """Return the SHA-256 of the component's weights, LoRA files included."""
        digest = self.identity.get("model", {}).get(component)
        digest = digest if isinstance(digest, str) else self.folder.digest(component)
        if component not in self.updates:
            return digest
        return sha256_json(
            [digest, *([lora.digest, lora.weight] for lora in self.loras if lora.component == component)]
        )

    def load_reference(self) -> Any:
        """Load the 16-bit pipeline that the checkpoint is made from and measured against."""
        require_steps(self.folder)
        if self.run.memory is not None:
            pipe = self.run.memory.load(self.folder, self.updates)
        else:
            pipe: Any = load_pipeline(self.folder, self.options.dtype, self.run.device)
            for component, updates in self.updates.items():
                fuse_into(getattr(pipe, component), updates)
        for component, plan in self.calibrated.items():
            if plan.family == GENERIC and (component in self.fitted or plan.static_groups()):
                groups = plan.statistics_groups().values()
                watch_shared_inputs(getattr(pipe, component), [[layer.name for layer in group] for group in groups])
        return pipe
