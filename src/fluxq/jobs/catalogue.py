"""Catalogue of published models under recipes, from their configurations alone: `fluxq families`.

    published configuration -> model on the meta device -> plan of each recipe -> bits, bytes, memory

Sizes are those of the quantized component, not of the pipeline. A recipe that tries things stores at least its formats
and at most all that it may try; a single number is the latter. Memory is:

    to serve     the weights as they are stored, and the activations of one forward pass at the family's usual size,
                 which are estimated. Where 4 bits are re-encoded to 8, weights take as much as an 8-bit recipe's
    in 8 GB, …   the whole pipeline: the best recipe of denoiser and text encoders, and the placement, by fits.py
    to quantize  the weights that rounding to nearest has in memory at once, in up to four workers; the program itself
                 takes another 0.7 GB
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fluxq.base.console import digits
from fluxq.base.tensors import Stored
from fluxq.jobs.fits import IN_16_BIT, Choice, Component, best, choices, plan_under, recipe_of
from fluxq.quantize.checkpoint import SourceWeights, build_on_meta
from fluxq.quantize.nearest import most_at_once, units_of
from fluxq.quantize.run import blocks_of
from fluxq.quantize.structure import convolutions_of, shapes_of
from fluxq.recipes.all_families import FAMILIES, PUBLISHED, Published, find_published
from fluxq.recipes.cards import STAYS
from fluxq.recipes.cost import activation_bytes, decoding, forward_pass, frames_at_once, running
from fluxq.recipes.family import Family
from fluxq.recipes.plan import LayerPlan, LinearShape, Plan
from fluxq.recipes.recipe import shipped_recipes
from fluxq.recipes.workloads import WORKLOADS, CallSize, ForwardPass

CELL = (
    "bits per weight / GB of the checkpoint / GB to serve, all at most: of this model alone, its codes as stored; what "
    "a card makes of them, and whole pipelines: docs/large-models.md"
)
CARDS = (8e9, 12e9, 16e9, 24e9)  # bytes
FIT = "recipe of the denoiser / of the text encoders / placement of a pipeline that fits: docs/large-models.md"
_OF_16_BIT = 2  # bytes
TABLE_RECIPES = ("fp8", "nvfp4")  # of a table of all models: others of as many bits differ by a few percent


@dataclass(frozen=True)
class ModelSize:
    """Size of a model under a recipe, of all its copies together; bytes are those with all that the recipe may try.

    bits: per weight, over all Linears, of the formats alone.
    most_bits: per weight, if every layer ends with all that may be tried.
    """

    recipe: str
    bits: float
    most_bits: float
    checkpoint_bytes: float
    serving_bytes: float
    quantizing_bytes: float

    def describe(self) -> dict[str, Any]:
        """Return the size as JSON."""
        return {
            "recipe": self.recipe,
            "bits_per_weight": round(self.bits, 3),
            "bits_per_weight_at_most": round(self.most_bits, 3),
            "checkpoint_gb": round(self.checkpoint_bytes / 1e9, 3),
            "peak_gb_to_serve": round(self.serving_bytes / 1e9, 3),
            "peak_gb_to_quantize": round(self.quantizing_bytes / 1e9, 3),
        }


class CatalogueModel:
    """A published model on the meta device, with its plan and its size under any recipe."""

    def __init__(self, row: Published) -> None:
        self.row = row
        self.family: Family = FAMILIES[row.family]
        self.module = in_16_bit(build_on_meta(self.family.library, self.family.model, dict(row.config)))
        self.linears: list[LinearShape] = shapes_of(self.module)
        self.weights = ImpliedWeights(self.module)
        self._plans: dict[str, Plan] = {}

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of all copies; a weight that two modules share counts once."""
        return self.row.count * sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def quantized_share(self) -> float:
        """Share of the parameters that a recipe quantizes if it leaves out no group of the family's row."""
        quantized = sum(linear.n * linear.k for linear in self.linears if self.family.locate(linear.name))
        return self.row.count * quantized / self.parameters

    @cached_property
    def bytes_16bit(self) -> int:
        """Bytes that the original takes in 16 bit."""
        return self.row.count * self.weights.nbytes

    @cached_property
    def activation_bytes(self) -> float:
        """Estimated activations of one forward pass at the usual size; 0 for a model that runs once per image."""
        return activation_bytes(self.plan("fp8"), self.forward) if self.forward else 0.0

    @cached_property
    def forward(self) -> ForwardPass | None:
        """One forward pass at the usual size; None of a model that runs once per image."""
        if self.family.kind != "transformer":
            return None
        config: Any = self.module.config
        size, convolutions = CallSize(**self.row.size), convolutions_of(self.module)
        return forward_pass(self.family.name, dict(config), size, vae=self.row.vae, convolutions=convolutions)

    @cached_property
    def choices(self) -> list[Choice]:
        """Choices of recipes for the whole pipeline, in the order of quality; none where its other parts are not known.

        Activations are estimates: of the denoiser as they are shown, of the others as memory.py has them.
        """
        if not self.row.beside:
            return []
        name = "unet" if self.family.model.startswith("UNet") else "transformer"
        names = [f"{name}_{number}" if number > 1 else name for number in range(1, self.row.count + 1)]
        parts = [Component(each, self.module, self.family, self.activation_bytes) for each in names]
        for other in self.row.beside:
            module, family = beside(other)
            took, in_tiles = self._decoding(module) if family is None else (self._encoding(module), None)
            parts.append(Component(STAYS if family is None else other, module, family, took, in_tiles))
        return choices(parts, shipped_recipes())

    def _encoding(self, encoder: Any) -> int:
        """Return the bytes that a text encoder needs beside its weights for the usual prompt and one of guidance."""
        weights = [(linear.n, linear.k) for linear in shapes_of(encoder)]
        return running(encoder.config.to_dict(), weights, 2 * WORKLOADS[self.family.name].text, _OF_16_BIT)

    def _decoding(self, vae: Any) -> tuple[int, int | None]:
        """Return the bytes that a VAE needs beside its weights at the usual size, and in tiles; None for an image."""
        height, width, frames = WORKLOADS[self.family.name].size
        size = CallSize(**self.row.size)
        pixels, frames = (size.height or height) * (size.width or width), size.frames or frames
        if frames == 1:
            return decoding(vae.config, pixels, _OF_16_BIT), None
        framewise = getattr(vae, "use_framewise_decoding", False)
        at_once = frames_at_once(type(vae).__name__, vae.tile_sample_min_num_frames if framewise else frames)
        whole = decoding(vae.config, pixels, _OF_16_BIT, frames=at_once)
        tile = decoding(vae.config, vae.tile_sample_min_height * vae.tile_sample_min_width, _OF_16_BIT, frames=at_once)
        video = 2 * 3 * _OF_16_BIT * pixels * frames  # its tiles, and the whole that is made of them
        return whole, min(whole, tile + video)

    def fits(self, card: float) -> str:
        """Return recipe of the denoiser / of the text encoders / placement in words, or "no", on a card of bytes."""
        answer = best(self.choices, card)
        if answer is None:
            return "no" if self.choices else "–"
        choice, way, _ = answer
        recipes = list(choice.recipes.items())
        denoiser = recipes[0][1]
        encoders = next((recipe for name, recipe in recipes[self.row.count :] if name != STAYS), IN_16_BIT)
        return f"{denoiser} / {encoders} / {way.word}"

    def plan(self, recipe_name: str) -> Plan:
        """Return the plan of one copy; ValueError for a recipe that this kind of model cannot have."""
        if recipe_name not in self._plans:
            self._plans[recipe_name] = plan_under(recipe_name, self.family, self.family.kind, self.linears)
        return self._plans[recipe_name]

    def size(self, recipe_name: str) -> ModelSize:
        """Return the size of the model under a recipe."""
        plan, count = self.plan(recipe_name), self.row.count
        saved = sum(16 * layer.n * layer.k - layer.most_stored_bits for layer in plan.quantized) / 8
        checkpoint = count * (self.weights.nbytes - saved)
        return ModelSize(
            recipe_of(recipe_name)[0],
            plan.bits_per_weight,
            plan.most_bits_per_weight,
            checkpoint,
            checkpoint + self.activation_bytes,
            self._quantizing_bytes(plan),
        )

    def _quantizing_bytes(self, plan: Plan) -> float:
        """Return the bytes that rounding to nearest has in memory: weights read ahead, and a block to be written."""
        blocks = blocks_of(plan, self.weights, Path())
        sizes = [
            sum(self.weights.stored(name).nbytes for name in unit.names)
            for block in blocks
            for unit in units_of(block.layers, block.names)
        ]
        rounded = max(
            block.nbytes - sum(2 * la.n * la.k - la.stored_bits / 8 for la in block.layers) for block in blocks
        )
        return most_at_once(sizes) + rounded

    def roles(self) -> Iterator[dict[str, Any]]:
        """Yield rows as JSON has them: the quantized Linears by role, then those in 16 bit by reason.

        shapes: (N, K) of each kind, the most frequent first. made_by: source of their input. together: names of the
        Linears that read one input.
        """
        plan = self.plan("fp8")
        groups: dict[tuple[str, str], list[LayerPlan]] = {}
        for layer in plan.layers:
            role = layer.role if layer.scheme else ""
            groups.setdefault((role, "" if role else layer.reason.removeprefix("16 bit: ")), []).append(layer)
        for (role, reason), layers in sorted(groups.items(), key=lambda item: item[0][0] == ""):
            shapes: dict[tuple[int, int], int] = {}
            for layer in layers:
                shapes[layer.n, layer.k] = shapes.get((layer.n, layer.k), 0) + 1
            yield {
                "role": role or "16 bit",
                "linears": len(layers),
                "weights": sum(layer.n * layer.k for layer in layers),
                "shapes": [list(shape) for shape in sorted(shapes, key=lambda shape: -shapes[shape])],
                "made_by": ", ".join(dict.fromkeys(layer.made_by for layer in layers)) if role else "",
                "together": [*dict.fromkeys(" ".join(self._together(layer)) for layer in layers)] if role else [],
                "reason": reason,
            }

    def _together(self, layer: LayerPlan) -> tuple[str, ...]:
        """Return the Linears of the block that read the same input, by their last names."""
        location = self.family.locate(layer.name)
        if location is None:
            return ()
        group, block = location
        names = {linear.name for linear in self.linears}
        return tuple(member for member in group.members if f"{block}.{member}" in names)

    def describe(self, recipes: Sequence[str]) -> dict[str, Any]:
        """Return the model as JSON, with its size under each recipe."""
        return {
            "name": self.row.name,
            "also": list(self.row.also),
            "family": self.family.name,
            "kind": self.family.kind,
            "class": self.family.model,
            "count": self.row.count,
            "parameters": self.parameters,
            "quantized_share": round(self.quantized_share, 4),
            "gb_16bit": round(self.bytes_16bit / 1e9, 3),
            "activations_gb": round(self.activation_bytes / 1e9, 3),
            "linears": list(self.roles()),
            "recipes": [self.size(recipe).describe() for recipe in recipes],
            "fits": {card(nbytes): self.fits(nbytes) for nbytes in CARDS},
        }


class ImpliedWeights(SourceWeights):
    """Tensors of a model's checkpoint in 16 bit, known by shape alone: none can be read, a shared one counts once."""

    def __init__(self, module: nn.Module) -> None:
        tensors = {id(tensor): (name, tensor) for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
        self._stored = {name: Stored("BF16", tuple(t.shape), 0, 2 * t.numel()) for name, t in tensors.values()}

    @property
    def names(self) -> list[str]:
        """Tensor names, sorted."""
        return sorted(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def stored(self, name: str) -> Stored:
        """Return the shape and size of a tensor."""
        return self._stored[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self._stored.values())


@cache
def beside(name: str) -> tuple[Any, Family | None]:
    """Return the model of a part beside the denoiser, on the meta device, and its family; None for a VAE's."""
    row = next((row for row in PUBLISHED if row.name == name), None)
    family = FAMILIES[row.family] if row else None
    library, model = (family.library, family.model) if family else ("diffusers", name)
    module = in_16_bit(build_on_meta(library, model, dict(row.config) if row else {}))
    return module, None if family is None or family.kind == "vae" else family


def in_16_bit(module: nn.Module) -> nn.Module:
    """Return a model on the meta device, its numbers of 16 bit; its library's own cast would warn."""
    return nn.Module.to(module, torch.bfloat16)


def models(name: str | None = None) -> Iterator[CatalogueModel]:
    """Yield the published models that `name` means (see find_published), all without one; each is built in its turn."""
    return map(CatalogueModel, find_published(name) if name else PUBLISHED)


def recipes_for(names: Sequence[str], all_of_them: bool) -> tuple[str, ...]:
    """Return the recipes to show: the names given, else all that are shipped, or two of them."""
    return tuple(names) or (tuple(shipped_recipes()) if all_of_them else TABLE_RECIPES)


def table(published: Sequence[CatalogueModel], recipes: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and a row for each model, with three numbers for each recipe."""
    header = (
        "model",
        "family",
        "parameters, B",
        "quantized",
        "16 bit, GB",
        *recipes,
        "to quantize, GB",
        *map(card, CARDS),
    )
    rows = []
    for model in published:
        under = [model.size(recipe) for recipe in recipes]
        quantizing_bytes = max(size.quantizing_bytes for size in under)
        rows.append(
            (
                model.row.name + (f", {model.row.count} of them" if model.row.count > 1 else ""),
                model.family.name,
                digits(model.parameters / 1e9),
                f"{model.quantized_share:.0%}",
                digits(model.bytes_16bit / 1e9),
                *map(cell, under),
                digits(quantizing_bytes / 1e9),
                *map(model.fits, CARDS),
            )
        )
    return header, rows


def card(nbytes: float) -> str:
    """Return the title of a card's column."""
    return f"in {nbytes / 1e9:g} GB"


def cell(size: ModelSize) -> str:
    """Return bits per weight, GB of the checkpoint and GB to serve."""
    return f"{size.most_bits:.2f} / {digits(size.checkpoint_bytes / 1e9)} / {digits(size.serving_bytes / 1e9)}"


def bits(size: ModelSize) -> str:
    """Return the bits per weight: of the formats alone, and the most that trying things may make of it."""
    low, high = f"{size.bits:.2f}", f"{size.most_bits:.2f}"
    return low if low == high else f"{low} to {high}"
