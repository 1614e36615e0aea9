"""Memory of a job's pipelines: `--max-memory`, the device that has room for a model, the error where memory runs out.

The least bound that would do follows from shapes, before anything is computed. Weights have the rest of it; on a GPU
the allocator keeps to the bound too. Parts of a pipeline that is judged take turns on a GPU that has no room for all of
them, as diffusers' offload does it. Beside weights that wait for their turn a job takes

    running   a model's activations: 3 · M · (N + K), with M tokens of a batch and the widest of its matrices (N, K)
    fitting   Grams of all input groups of a block, samples of their tokens, and the memory of fitting the largest group
    adjoint   of a block its weights, twice the inputs and outputs of its layers, and activations again for each probe

Outputs of a block's norms, products and activation lie side by side, and rotated queries and keys are fp32: in FLUX.1's
blocks that is 2 to 2.5 times the input and output of the widest Linear. All figures are bytes, too many rather than too
few.
"""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fluxq.base.console import first_line, logger
from fluxq.base.devices import AUTO, free_bytes
from fluxq.base.model import ModelFolder
from fluxq.base.residence import Residence, residence_of
from fluxq.calibrate.adjoint import PROBES, runs_blocks_again
from fluxq.calibrate.capture import FRAMES, Item, batches, frames_in
from fluxq.calibrate.prompts import PromptRow
from fluxq.integrations.bounded import load_bounded
from fluxq.quantize.checkpoint import SourceWeights, is_model, library_of, model_class_of, model_on_meta
from fluxq.quantize.lora import Updates
from fluxq.quantize.structure import denoisers_of
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.cost import decoding, frames_at_once, running
from fluxq.recipes.plan import LayerPlan, Plan, sharing_vectors
from fluxq.recipes.workloads import CallSize, ForwardPass, forward_pass

_OF_GPU = 0.95  # of the bound: the allocator hands out memory in pieces, and some of each is left over
_OF_HOST = 64 << 20  # bytes that libraries keep: code that oneDNN compiles for each shape, small pieces of memory
_M_MMAP_THRESHOLD = -3  # of malloc.h
_GIVEN_BACK, _KEPT = 1 << 17, 1 << 25  # bytes, within a bound and without
_NO_MEMORY = "can't allocate memory"  # torch's words about the host's memory
_SMALLER = "a smaller --height and --width"
FREE = 0.9  # of free memory, that a job may plan with: others on the machine want some, too
_FP32 = 4  # bytes
_TEXT, _SHORT_TEXT = 512, 77  # tokens of a prompt by default, and of one that is padded for CLIP
_SIDE = 1024  # of an image, by default
_SPANNED = 16  # pixels on a side that a token spans, of a model without a row
_SAMPLES = 2048 + 1024  # rows of each group's input that are kept
_CHUNK = 4096  # tokens that are added to a Gram at a time, at most
_ROWS, _ROWS_OF_GPU = 256, 1 << 14  # least rows of a weight that are in fp32 at a time
_COPIES = 6  # of such rows: decoded, transposed, their error, and those of rounding
_TRIED = 1024  # rows of a group's weights that stages are tried on, and tokens of its input
_ROUNDING = 12  # bytes for each weight of a layer that is rounded anew: in fp32 twice, codes and scales
_JOINT_GRAMS, _JOINT_K = 7, 6144  # Grams of joint fitting, three sums and room to solve; its largest K


@dataclass(frozen=True)
class Bound:
    """Bound on the memory of a job. limit: bytes that weights and computing may take together."""

    limit: int
    demand: Demand

    def load(self, folder: ModelFolder, updates: Mapping[str, Sequence[Updates]]) -> Any:
        """Load a pipeline within the bound. updates: component -> LoRA updates that are fused into it."""
        demand = self.demand
        on_gpu = torch.device(demand.device).type == "cuda"
        residence = Residence(demand.device, int(self.limit * _OF_GPU) if on_gpu else self.limit - _OF_HOST)
        every_step = dict.fromkeys(denoisers_of(folder), 1)
        return load_bounded(folder, demand.dtype, residence, ranks=every_step, working=demand.working, updates=updates)

    def begin_fitting(self, pipe: Any) -> None:
        """Set aside the memory of fitting, block by block, in place of that of running."""
        for component, working in self.demand.fitting.items():
            model = getattr(pipe, component)
            residence = residence_of(model)
            if residence is not None:
                residence.set_working(model, working)


@dataclass(frozen=True)
class Demand:
    """Demand of a job on a device.

    working, fitting: component -> bytes beside its weights while it runs, and while it is fitted.
    needs: work in words -> bytes that it takes at once.
    """

    device: str
    dtype: str
    working: Mapping[str, int]
    fitting: Mapping[str, int]
    needs: Mapping[str, int]

    @property
    def most(self) -> str:
        """Work that needs most."""
        return max(self.needs, key=lambda each: self.needs[each])

    @property
    def least(self) -> int:
        """Bytes of the smallest bound that would do."""
        return self._with_overhead(self.needs[self.most])

    def unbounded(self, weights: int) -> int:
        """Return the bytes that the job takes without a bound: all `weights`, and the largest work on them."""
        return self._with_overhead(weights + max([0, *self.working.values(), *self.fitting.values()]))

    def _with_overhead(self, nbytes: int) -> int:
        return math.ceil(nbytes / _OF_GPU) if torch.device(self.device).type == "cuda" else nbytes + _OF_HOST

    def __str__(self) -> str:
        return f"{in_words(self.least)}, for {self.most}"

    def bound(self, limit: int) -> Bound:
        """Return the bound for the job; ValueError naming the least memory that would do if that is above `limit`."""
        if self.least > limit:
            smaller = "" if self.most.startswith("fitting") else f", or {_SMALLER}"
            fewer = ", or fewer --frames" if smaller and "video" in self.most else ""
            fewer += ", or --measure velocity" if self.most.startswith("adjoint") else ""
            raise ValueError(
                f"--max-memory {in_words(limit)}: {self.most} needs {in_words(self.least)}; give at least that"
                f"{smaller}{fewer}"
            )
        return Bound(limit, self)


def demand_of(
    device: str,
    dtype: str,
    folder: ModelFolder,
    *,
    sizes: Iterable[CallSize],
    shown: Iterable[CallSize] = (),
    fitted: Iterable[Plan] = (),
    fused: Collection[str] = (),
) -> Demand:
    """Return the demand of a job on `device`, from shapes.

    sizes: calls that end with latents.
    shown: calls whose latents are decoded too.
    fitted: plans with layers that are fitted.
    fused: components with LoRA updates.
    """
    itemsize, on_gpu = getattr(torch, dtype).itemsize, torch.device(device).type == "cuda"
    working, fitting, needs = {}, {}, {}
    decoded, every = {*shown}, {*sizes, *shown}
    for component in filter(lambda name: is_model(folder, name), folder.components):
        coming = 2 * _largest(folder, component, itemsize)
        calls = decoded or every if component == "vae" else every
        took = {size: activations(folder, component, size, itemsize) for size in calls}
        size = max(calls, key=lambda size: took[size])
        working[component] = took[size]
        if decoded or component != "vae":
            needs[f"running {component} on {size}"] = took[size] + coming
    for plan in fitted:
        blocks = _fitting(plan, working[plan.component], itemsize, widened=plan.component in fused, on_gpu=on_gpu)
        fitting[plan.component] = max(blocks.values())
        coming = 2 * _largest(folder, plan.component, itemsize)
        for block, needed in blocks.items():
            widest = max(layer.k for layer in plan.quantized if layer.block == block)
            needs[f"fitting {block} ({widest} channels)"] = needed + coming
    return Demand(device, dtype, working, fitting, needs)


def demand_of_search(
    device: str,
    dtype: str,
    folder: ModelFolder,
    *,
    sizes: Iterable[CallSize],
    plans: Iterable[Plan],
    by_adjoint: bool,
) -> Demand:
    """Return the demand of running a pipeline with layers that are rounded anew, and of measuring their errors.

    sizes: calls; the adjoint makes one image at a time.
    plans: of the transformers with these layers.
    """
    sizes, itemsize = {*sizes}, getattr(torch, dtype).itemsize
    plain = demand_of(device, dtype, folder, sizes=sizes)
    working, needs = dict(plain.working), dict(plain.needs)
    for component, plan in ((plan.component, plan) for plan in plans):
        coming = 2 * _largest(folder, component, itemsize)
        rounding = _ROUNDING * max(layer.n * layer.k for layer in plan.quantized)
        took = {f"running {component} rounded": working[component] + rounding}
        for size in {replace(size, images=1) for size in sizes} if by_adjoint else ():
            backward = _backward(folder, plan, size, itemsize)
            took[f"adjoint of {component} on {size}"] = backward + rounding
        working[component] = max(took.values())
        needs |= {work: nbytes + coming for work, nbytes in took.items()}
    return replace(plain, working=working, needs=needs)


def _backward(folder: ModelFolder, plan: Plan, size: CallSize, itemsize: int) -> int:
    """Return the bytes of gradients of all probes through a block, of its graph, and of what other blocks are given."""
    model_class = model_class_of(library_of(folder, plan.component), folder.components[plan.component])
    blocks: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        blocks.setdefault(layer.block if runs_blocks_again(model_class) else "", []).append(layer)
    graphs = [
        itemsize * sum(2 * tokens(folder, plan.component, size) * (la.n + la.k) + la.n * la.k for la in layers)
        for layers in blocks.values()
    ]
    given = itemsize * tokens(folder, plan.component, size) * sum(layers[0].k for layers in blocks.values())
    return max(graphs) + given + (1 + PROBES) * activations(folder, plan.component, size, itemsize)


def weight_bytes(folder: ModelFolder, dtype: str) -> int:
    """Return the bytes of all weights of a pipeline as it is loaded."""
    itemsize = getattr(torch, dtype).itemsize
    sources = [SourceWeights(folder, component) for component in folder.components if is_model(folder, component)]
    return sum(_loaded(source, name, itemsize) for source in sources for name in source.names)


def settle_pipeline(folder: ModelFolder, device: str, nbytes: int, device_option: str) -> tuple[str, bool]:
    """Return (device, whether its parts take turns on it) for a pipeline that makes images to be judged.

    nbytes: bytes of its weights as they are loaded.
    device_option: the value of `--device`.

    Raises ValueError for a pipeline that does not fit.
    """
    place = torch.device(device)
    free = free_bytes(place)
    if free is None or nbytes <= (FREE * free if place.type == "cuda" else free):
        return device, False
    needs = f"weights of {folder.name} take {in_words(nbytes)}, {in_words(free)} are free on {device}"
    if place.type == "cpu":
        raise ValueError(f"{needs}: it does not fit on this machine; evaluate it on one with more memory")
    if device_option != AUTO:
        raise ValueError(f"{needs}; leave out --device: its parts then take turns on the GPU")
    if max(part_bytes(folder).values(), default=0) <= FREE * free:
        logger.warning("%s: its parts take turns there (offload), which takes longer", needs)
        return device, True
    logger.warning("%s, too little even for its largest part: the CPU is used", needs)
    return settle_pipeline(folder, "cpu", nbytes, AUTO)


def stored_bytes(folder: ModelFolder) -> int:
    """Return the bytes of all weights of a pipeline as they are stored."""
    return sum(part_bytes(folder).values())


def part_bytes(folder: ModelFolder) -> dict[str, int]:
    """Return the bytes of each component's weights as they are stored."""
    return {
        name: sum(path.stat().st_size for path in folder.weight_files(name))
        for name in folder.components
        if is_model(folder, name)
    }


def in_words(nbytes: int) -> str:
    """Return a size as `--max-memory` takes it, rounded up."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{math.ceil(10 * nbytes / size) / 10:g}{unit}"
    return f"{math.ceil(nbytes / 1024)}KiB"


@contextmanager
def within(limit: int | None, device: str) -> Iterator[None]:
    """Hold the device's allocator to `limit`; where memory runs out, name the cure."""
    place = torch.device(device)
    if limit is not None:
        _bind(place, limit)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            if _NO_MEMORY not in str(error):
                raise
        cure = (
            "--max-memory SIZE, as in 8GiB, reads weights when it is their turn"
            if limit is None
            else f"more was needed than --max-memory {in_words(limit)}, or than the machine has: give another one, or "
            f"{_SMALLER}"
        )
        raise RuntimeError(f"out of memory on {device} ({first_line(error) or 'MemoryError'}): {cure}") from error
    finally:
        if limit is not None:
            _bind(place, None)


def _bind(device: torch.device, limit: int | None) -> None:
    """Set or lift the limit of a GPU's allocator; on a CPU have glibc's give freed memory back at once.

    Else glibc would keep, for each thread, several times what the bound leaves for weights.
    """
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        fraction = min(1.0, limit / whole) if limit else 1.0
        torch.cuda.set_per_process_memory_fraction(fraction, device.index)  # it takes no `cuda` without a number
    elif device.type == "cpu" and sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK if limit else _KEPT)


def let_go(pipe: Any) -> None:
    """Let go of all weights of a pipeline within a bound; they come again when it runs."""
    for model in pipe.components.values():
        residence = residence_of(model)
        if residence is not None:
            residence.rest()


def sizes_of(items: Sequence[Item], call: Mapping[str, Any]) -> frozenset[CallSize]:
    """Return the sizes of the calls that make these items."""
    made = ((batch[0][0], len(batch)) for batch in batches(items, None, call))
    return frozenset(
        call_size({**call, **(dict(row.arguments) if isinstance(row, PromptRow) else {})}, images)
        for row, images in made
    )


def call_size(call: Mapping[str, Any], images: int = 1) -> CallSize:
    """Return the size of a call that makes so many images together, by its arguments."""
    frames = frames_in(call) if any(call.get(name) is not None for name in FRAMES) else None
    height, width, text = (call.get(name) for name in ("height", "width", "max_sequence_length"))
    return CallSize(images, height, width, frames, text)


def activations(folder: ModelFolder, component: str, size: CallSize, itemsize: int) -> int:
    """Return the bytes that a component needs beside its weights in a call, its numbers of `itemsize` bytes each."""
    config = folder.config(component)
    if _is_vae(folder, component):
        pixels = size.images * (size.height or _SIDE) * (size.width or _SIDE)
        frames = None if size.frames is None else frames_at_once(folder.components[component], size.frames)
        return decoding(config, pixels, itemsize, frames=frames)
    source = SourceWeights(folder, component)
    weights = [source.stored(name).shape for name in source.names if name.endswith("weight")]  # no tables of positions
    return running(config, weights, tokens(folder, component, size), itemsize)


def _largest(folder: ModelFolder, component: str, itemsize: int) -> int:
    """Return the bytes of the largest module's weights, which come and go together."""
    source = SourceWeights(folder, component)
    module_bytes: dict[str, int] = {}
    for name in source.names:
        module = name.rpartition(".")[0]
        module_bytes[module] = module_bytes.get(module, 0) + _loaded(source, name, itemsize)
    return max(module_bytes.values())


def served_bytes(folder: ModelFolder, component: str) -> int:
    """Return the bytes of all weights in bfloat16: tied ones count once, and transformers keeps none in fp32."""
    source, of_diffusers = SourceWeights(folder, component), library_of(folder, component) == "diffusers"
    model = model_on_meta(folder, component)
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} & {*source.names}
    return sum(_loaded(source, name, 2) if of_diffusers else 2 * prod(source.stored(name).shape) for name in names)


def _loaded(source: SourceWeights, name: str, itemsize: int) -> int:
    return prod(source.stored(name).shape) * (max(itemsize, _FP32) if source.stays_fp32(name) else itemsize)


def _fitting(plan: Plan, running: int, itemsize: int, *, widened: bool, on_gpu: bool) -> dict[str, int]:
    """Return block -> bytes that fitting its groups takes beside weights that can be read again.

    running: activations of the component.
    itemsize: bytes of one of its weights.
    widened: weights come in fp32, as fused ones do.
    """
    width = _FP32 if widened else itemsize
    blocks: dict[str, dict[str, tuple[LayerPlan, ...]]] = {}
    for name, members in plan.statistics_groups().items():
        blocks.setdefault(members[0].block, {})[name] = members
    return {
        block: sum(_observed(members, itemsize) for members in groups.values())
        + max(
            running + max(_chunk(members[0].k) for members in groups.values()),
            max(_fitted_together([groups[name] for name in names], width, on_gpu) for names in sharing_vectors(groups)),
        )
        for block, groups in blocks.items()
    }


def _observed(members: Sequence[LayerPlan], itemsize: int) -> int:
    """Return the bytes kept of a group's input: its Grams, and its samples, which are put together of parts."""
    is_plain = all(layer.method.is_plain for layer in members)
    grams = 0 if is_plain else _FP32 * sum(k * k for k in members[0].segments)
    return grams + 2 * itemsize * _SAMPLES * members[0].k


def _chunk(k: int) -> int:
    return _FP32 * max(256, min(_CHUNK, k // 4)) * k


def _fitted_together(groups: Sequence[Sequence[LayerPlan]], width: int, on_gpu: bool) -> int:
    """Return the bytes of fitting groups with one mean and one set of factors: of the largest, and all weights."""
    weights = [width * layer.n * layer.k for members in groups for layer in members]
    return max(_fitted(members, width, on_gpu) for members in groups) + sum(weights) * (len(groups) > 1)


def _fitted(members: Sequence[LayerPlan], width: int, on_gpu: bool) -> int:
    """Return the bytes of fitting a group beside the statistics of its input: the Gram again, and its weights."""
    k, method = members[0].k, members[0].method
    gram = _FP32 * max(members[0].segments) ** 2
    grams = gram * (method.gptq + bool(method.transforms or method.deflate))
    if method.joint and k <= _JOINT_K:
        grams = _JOINT_GRAMS * gram
    rows = max(layer.n for layer in members)
    at_once = min(rows, max(k // 8, _ROWS_OF_GPU if on_gpu else _ROWS))
    weights = (width + 1) * k * sum(layer.n for layer in members)  # and their codes
    tried = 0 if method.is_plain else _COPIES * _FP32 * _TRIED * k
    return grams + weights + max(_COPIES * _FP32 * at_once * k + tried, 3 * _FP32 * rows * k)  # or the outcome


def tokens(folder: ModelFolder, component: str, size: CallSize) -> int:
    """Return the tokens of a call: of two sequences for each image where guidance may run both halves at once."""
    config = folder.config(component)
    if library_of(folder, component) == "transformers":
        return 2 * size.images * max(size.text or _TEXT, _SHORT_TEXT)
    sequences = size.images * (1 if config.get("guidance_embeds") else 2)
    try:
        forward = forward_pass_of(folder, component, size)
    except ValueError:  # a class without a row, or one of convolutions
        image = (size.height or _SIDE) * (size.width or _SIDE) // _SPANNED**2 * (size.frames or 1)
        return sequences * (image + (size.text or _TEXT))
    return sequences * (forward.image + forward.text + forward.vision)


def forward_pass_of(folder: ModelFolder, component: str, size: CallSize) -> ForwardPass:
    """Return the forward pass of one sequence of a denoiser; ValueError for one whose family is not modelled."""
    return forward_pass(
        next((row.name for row in FAMILIES.values() if row.model == folder.components[component]), ""),
        folder.config(component),
        replace(size, images=1),
        vae=folder.config("vae") if "vae" in folder.components else None,
    )


def _is_vae(folder: ModelFolder, component: str) -> bool:
    return component == "vae" or folder.components[component].startswith(("Autoencoder", "AsymmetricAutoencoder"))
