"""`fluxq.place(pipe, vram="12GB")`: the fastest placement of a pipeline whose whole call fits into that memory.

Weights are those that the pipeline has, activations are counted by peaks.py in a call of the size that is asked for,
and recipes/cards.py has the ways, and what each of them keeps on the card.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fluxq.base import console
from fluxq.base.devices import there_is_a_gpu
from fluxq.recipes.cards import CONTEXT, STAYS, PartSize, Way, fit, in_words, least
from fluxq.runtime.modulation import MAX_ROWS, HoistedModulation, hoist_modulation, hoisted_in, modulation_of
from fluxq.runtime.peaks import on_meta, peaks
from fluxq.runtime.placed import called_of, is_offloaded, models_of

_STEPS = 50  # of a pipeline whose call does not say
_BLOCKS = (nn.ModuleList, nn.Sequential)  # diffusers' group offload takes their members for blocks


@dataclass(frozen=True)
class Placement:
    """Placement of a pipeline on a card of `room` bytes.

    peaks: component -> bytes on the card while it runs, without what the driver keeps.
    pipeline, source: names of the pipeline's class and of its folder.
    hoisted: handle of its modulation where that is kept on the CPU; `remove()` brings it back.
    """

    way: Way
    room: float
    peaks: Mapping[str, float]
    pipeline: str
    source: str
    hoisted: HoistedModulation | None = None

    @cached_property
    def code(self) -> str:
        """Python that loads and places the pipeline."""
        lines = [
            "import fluxq, torch",
            f"from diffusers import {self.pipeline}",
            f"pipe = {self.pipeline}.from_pretrained({self.source!r}, dtype=torch.bfloat16)",
        ]
        return "\n".join([*lines, *self.way.lines])

    @property
    def peak(self) -> float:
        """Bytes of the card at most, with what the driver keeps."""
        return CONTEXT + max(self.peaks.values())

    def describe(self) -> dict[str, Any]:
        """Return the placement as JSON."""
        stages = {name: nbytes / 1e9 for name, nbytes in self.peaks.items()}
        return {
            "placement": str(self.way),
            "sentence": self.sentence,
            "room_gb": self.room / 1e9,
            "peak_gb": self.peak / 1e9,
            "stages_gb": stages,
            "code": self.code.splitlines(),
        }

    @property
    def sentence(self) -> str:
        """The placement and its peak."""
        peak, room, context = map(console.size, (self.peak, self.room, CONTEXT))
        return f"{self.way}: at most {peak} of {room}, {context} of them the driver's"

    def __str__(self) -> str:
        return f"{self.sentence} ({', '.join(f'{name} {console.size(size)}' for name, size in self.peaks.items())})"


def place(pipe: Any, *, vram: str | float, device: str | torch.device = "cuda", **call: Any) -> Placement:
    """Place a loaded pipeline, quantized or not, on a card, in the fastest way whose whole call fits; return the way.

    Move nothing before, and call `fluxq.prepare` and `fluxq.optimize` first.

    vram: bytes of the card, or a text as "12GB" or "11.5GiB". device: the card; on "cpu" a placement can be tried.
    call: arguments of the pipeline that change what it takes: height, width, num_frames, num_images_per_prompt,
    guidance_scale, max_sequence_length, num_inference_steps, image, …

    Raises ValueError, with the cure, for what is no size, a card that is not there or has less, a pipeline that is
    offloaded, hoisted or captured already, a call that fails, and where nothing fits.
    """
    room, card = room_of(vram), torch.device(device)
    _require_plain(pipe)
    _require_card(card, room)
    _require_steps(call)
    parts = parts_of(pipe, call)
    fitting = fit(parts, room)
    if fitting is None:
        raise ValueError(
            f"{type(pipe).__name__} takes at least {in_words(least(parts))}, more than vram={vram!r}: quantize it "
            "(`fluxq plan MODEL --vram SIZE` says by which recipe), or make smaller images"
        )
    way, most = fitting
    hoisted = _apply(pipe, way, card)
    return Placement(way, room, most, type(pipe).__name__, str(pipe.config.get("_name_or_path", "")), hoisted)


def room_of(vram: str | float) -> float:
    """Return the bytes of a card; ValueError for what is no size, or less than what a GPU's driver keeps."""
    room = console.bytes_of(vram) if isinstance(vram, str) else vram
    if isinstance(room, bool) or not isinstance(room, (int, float)) or not 0 < room < math.inf:
        raise ValueError(f"vram is {vram!r}, expected bytes, or a size with its unit, as in '12GB' or '11.5GiB'")
    if room <= CONTEXT:
        raise ValueError(
            f"vram is {console.size(room)}, and a GPU's driver and libraries alone keep {console.size(CONTEXT)}: give "
            "the memory of the card, as in '8GB'"
        )
    return room


def parts_of(pipe: Any, call: Mapping[str, Any]) -> list[PartSize]:
    """Return the bytes of a pipeline's models, and of the activations of a call; weights may be on the meta device."""
    plain, tiled = activations_of(pipe, call)
    rows, models = rows_of(pipe, call), models_of(pipe)
    return [part_of(name, models[name], activations=plain[name], in_tiles=tiled.get(name), rows=rows) for name in plain]


def activations_of(pipe: Any, call: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return component -> bytes of activations of a call, and those of a VAE that decodes in tiles, if it can.

    In the order of the call; components that it leaves out take none, and come last.
    """
    twin = on_meta(pipe)
    plain = peaks(twin, call)
    plain |= {name: 0 for name in models_of(pipe) if name not in plain}
    if not plain.get(STAYS) or not hasattr(twin.vae, "enable_tiling"):
        return plain, {}
    twin.vae.enable_tiling()
    return plain, {STAYS: peaks(twin, call)[STAYS]}


def rows_of(pipe: Any, call: Mapping[str, Any]) -> int:
    """Return the rows of the tables of hoisted modulation in a call: of each step, image and half of guidance."""
    default = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    usual = default.default if default and default.default else _STEPS
    steps, prompts = call.get("num_inference_steps", usual), call.get("prompt_embeds")
    if prompts is None:
        prompts = call["prompt"] if isinstance(call.get("prompt"), list) else [""]
    images = (call.get("num_images_per_prompt") or 1) * len(prompts)
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    is_guided = any(call.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
    halves = 1 if config.get("guidance_embeds") and not is_guided else 2
    return min(MAX_ROWS, steps * halves * images)


def part_of(
    name: str,
    model: nn.Module,
    *,
    activations: float,
    in_tiles: float | None = None,
    rows: int = MAX_ROWS,
    stored: Mapping[str, float] | None = None,
) -> PartSize:
    """Return the bytes of a component.

    activations, in_tiles: of a call, and where a VAE decodes in tiles.
    rows: of the tables of hoisted modulation.
    stored: path of a Linear -> bytes of its weight in place of those that it has.
    """
    sizes = _sizes(model, stored or {})
    total, blocks = sum(sizes.values()), _blocks(model, sizes)
    is_denoiser = name.startswith(("transformer", "unet"))
    in_blocks = total - sum(blocks) + max(blocks) if is_denoiser and blocks else None
    hoisted = _hoisted(model, sizes, rows) if name == "transformer" else None
    return PartSize(name, total, activations, hoisted, in_blocks, in_tiles)


def _sizes(model: nn.Module, stored: Mapping[str, float]) -> dict[str, float]:
    """Return path of a module -> bytes of its own tensors; a tensor that several share counts once."""
    sizes: dict[str, float] = dict.fromkeys((path for path, _ in model.named_modules()), 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        path, _, part = name.rpartition(".")
        sizes[path] += stored[path] if part == "weight" and path in stored else tensor.nbytes
    return sizes


def _blocks(model: nn.Module, sizes: Mapping[str, float]) -> list[float]:
    """Return the bytes of the blocks that diffusers' group offload moves; none for a model that it refuses."""
    if not getattr(model, "_supports_group_offloading", False):
        return []
    lists = {name: child for name, child in model.named_children() if isinstance(child, _BLOCKS)}
    blocks = {f"{name}.{member}": 0.0 for name, child in lists.items() for member, _ in child.named_children()}
    for path, nbytes in sizes.items():
        block = ".".join(path.split(".")[:2])
        if block in blocks:
            blocks[block] += nbytes
    return [*blocks.values()]


def _hoisted(model: nn.Module, sizes: Mapping[str, float], rows: int) -> float | None:
    """Return the bytes of weights and tables with the modulation on the CPU; None where it cannot be hoisted."""
    try:
        layers = modulation_of(model)[0]
    except ValueError:
        return None
    moved = [sizes[path] for path in layers]
    tables = 2 * rows * sum(linear.out_features for linear, _ in layers.values())
    return sum(sizes.values()) - sum(moved) + max(moved) + tables


def _require_plain(pipe: Any) -> None:
    """Raise ValueError for what is no pipeline, and for one whose weights or steps something holds already."""
    from fluxq.runtime.graphs import step_of  # which imports diffusers

    if not hasattr(pipe, "components") or not hasattr(pipe, "enable_model_cpu_offload"):
        raise ValueError(f"place needs a pipeline of diffusers, got {type(pipe).__name__}")
    called = called_of(pipe)
    for name, model in models_of(pipe).items():
        if is_offloaded(model):
            raise ValueError(
                f"{name} is offloaded already, and two would move the same weights: load the pipeline again, or "
                "`pipe.remove_all_hooks()` after enable_model_cpu_offload, and place it then"
            )
        if step_of(model) or step_of(called[name]) or hoisted_in(model.modules()):
            raise ValueError(
                f"{name} is captured or hoisted already: call `fluxq.restore(pipe)`, or remove() what was returned, "
                "then place, then capture; a captured step needs everything on the GPU. Where `fluxq.place` hoisted "
                "it, that is `hoisted` of what it returned"
            )


def _require_steps(call: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of steps that is none; counting a call replaces it, so the pipeline would not."""
    steps = call.get("num_inference_steps", 1)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"num_inference_steps is {steps!r}, expected a whole number, 1 or more")


def _require_card(card: torch.device, room: float) -> None:
    """Raise ValueError for a card that is not there, or has less than `room` bytes."""
    if card.type == "cpu":
        return
    if card.type != "cuda" or not there_is_a_gpu(card.index or 0):
        raise ValueError(
            f"device {card}: torch finds no such GPU; place where the pipeline will run, and elsewhere ask "
            "`fluxq plan MODEL --vram SIZE`"
        )
    there = torch.cuda.get_device_properties(card).total_memory
    if there < room:
        raise ValueError(
            f"{card} has {console.size(there)}, less than the {console.size(room)} of vram: give what it has, less "
            "what other programs take"
        )


def _apply(pipe: Any, way: Way, card: torch.device) -> HoistedModulation | None:
    """Do what the lines of a way say, on a card; return the handle of hoisted modulation, if there is one."""
    if way.tiled:
        pipe.vae.enable_tiling()
    hoisted = hoist_modulation(pipe, offload=True) if way.hoisted else None
    if way.moves == "everything":
        pipe.to(card)
    elif way.moves == "turns":
        pipe.enable_model_cpu_offload(device=card)
    else:
        pipe.enable_group_offload(card, offload_type="block_level", num_blocks_per_group=1, exclude_modules=STAYS)
    return hoisted
