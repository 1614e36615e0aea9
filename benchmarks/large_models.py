"""Tables of docs/large-models.md: the cards that hold published models, and what computes the models there.

Everything is computed from configurations (recipes/families), data sheets (recipes/devices.py) and what becomes of
weights on a chip (recipes/cost.py); nothing was run. Parts of a pipeline are those of recipes/cards.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from fluxq.base.console import digits
from fluxq.jobs.catalogue import CatalogueModel, beside
from fluxq.recipes.all_families import PUBLISHED, find_published
from fluxq.recipes.cards import CONTEXT, GIB, PartSize, holding, weights_on
from fluxq.recipes.cost import Prefer, Route, route
from fluxq.recipes.devices import DEVICES, Device
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.workloads import WORKLOADS

# Columns of the tables: a recipe, and how it is prepared where the chip does not multiply 4 bits.
COLUMNS: tuple[tuple[str, Prefer], ...] = (
    ("fp8", "speed"),
    ("nvfp4", "speed"),
    ("nvfp4", "memory"),
    ("int4-svd", "speed"),
    ("int4-svd", "memory"),
)


def pieces(name: str, recipe: str, device: Device, prefer: Prefer, *, encoders: bool) -> Iterator[PartSize]:
    """The parts of a published pipeline on a device. encoders: whether its text encoders are quantized too."""
    model = _model(name)
    for number in range(model.row.count):
        weights = _weights(name, recipe, device.chip, prefer)
        yield PartSize(f"transformer{f'_{number + 1}' if number else ''}", weights, model.activation_bytes)
    took = {part.name: part.activations for part in model.choices[0].parts}
    for other in model.row.beside:
        module, family = beside(other)
        if family is None:
            nbytes = _OF_16_BIT * sum(parameter.numel() for parameter in module.parameters())
            yield PartSize("vae", nbytes, took["vae"])
        else:
            weights = _weights(other, recipe, device.chip, prefer) if encoders else _model(other).bytes_16bit
            yield PartSize(other, weights, took[other])


def cell(name: str, recipe: str, device: Device, prefer: Prefer) -> str:
    """GB of the denoiser at work, and whether the card holds the pipeline: with text encoders in 16 bit, and quantized.

    "all": everything at once; "turns": each part while it runs; "no".
    """
    found = [tuple(pieces(name, recipe, device, prefer, encoders=encoders)) for encoders in (False, True)]
    words = dict.fromkeys(holding(parts, device).word for parts in found)
    return f"{digits((found[0][0].weights + found[0][0].activations) / 1e9)} {', '.join(words)}"


def cards_table(name: str) -> list[str]:
    """A published model on every card, cards of which the same is true in one row, the smallest first."""
    rows: dict[tuple[str, ...], list[Device]] = {}
    for device in sorted(DEVICES.values(), key=lambda device: device.memory):
        cells = tuple(cell(name, recipe, device, prefer) for recipe, prefer in COLUMNS)
        rows.setdefault(cells, []).append(device)
    return _lines(
        ["memory", "card", *(_title(*column) for column in COLUMNS)],
        ([_memory(cards), ", ".join(card.name for card in cards), *cells] for cells, cards in rows.items()),
    )


def chips_table() -> list[str]:
    """Return the table of what computes the main layers of each recipe on each generation of cards."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for chip in dict.fromkeys(device.chip for device in DEVICES.values()):
        cells = tuple(_way(route(_main_scheme(recipe), chip, prefer)) for recipe, prefer in _WAYS)
        rows.setdefault(cells, []).extend(device.name for device in DEVICES.values() if device.chip == chip)
    header = ["cards", *(_title(*column) for column in _WAYS)]
    return _lines(header, ([", ".join(names), *cells] for cells, names in rows.items()))


def models_table() -> list[str]:
    """Memory of a card, and the denoisers that a recipe brings into it; everything else in turns or elsewhere."""
    rows, told = [], {recipe: set[str]() for recipe in _KEPT}
    for memory in _MEMORIES:
        cells = []
        for recipe, names in told.items():
            found = [name for name in _large() if name not in names and _serving(name, recipe) <= memory * GIB]
            names.update(found)
            cells.append(", ".join(found) or "–")
        rows.append([f"{memory} GB", *cells])
    return _lines(["memory", *(_title(recipe, "speed") for recipe in _KEPT)], rows)


def _way(found: Route) -> str:
    """A route in two or three words."""
    if found.arithmetic == "fp32":
        return "torch, fp32"
    if found.activations is None:
        return "16 bit"
    if found.is_collapsed:
        return f"{found.arithmetic}, re-encoded"
    if found.weights is not found.activations:
        return f"{found.arithmetic}, decoded"
    name = found.activations.name
    return name if name == found.arithmetic else f"{name} by {found.arithmetic}"


def _main_scheme(recipe: str) -> Scheme | None:
    layers = _model("FLUX.1-dev").plan(recipe).layers
    return next(layer.scheme for layer in layers if layer.role == "qkv")


@cache
def _weights(name: str, recipe: str, chip: str, prefer: Prefer) -> float:
    model = _model(name)
    others = model.weights.nbytes - sum(_OF_16_BIT * linear.n * linear.k for linear in model.linears)
    return weights_on(_layers(name, recipe), others, chip, prefer)


def _serving(name: str, recipe: str) -> float:
    return CONTEXT + _model(name).size(recipe).serving_bytes


def _large() -> list[str]:
    """Denoisers that are no question on the smallest of these cards in 16 bit are left out."""
    rows = [_model(row.name) for row in PUBLISHED if row.family in WORKLOADS]
    return [model.row.name for model in rows if model.bytes_16bit > _MEMORIES[0] * GIB]


@cache
def _layers(name: str, recipe: str) -> tuple[LayerPlan, ...]:
    return tuple(_model(name).plan(recipe).layers)


@cache
def _model(name: str) -> CatalogueModel:
    return CatalogueModel(find_published(name)[0])


def _memory(cards: Sequence[Device]) -> str:
    least, *_, most = sorted(card.memory for card in (*cards, *cards))
    return f"{least:g} GB" if least == most else f"{least:g} to {most:g} GB"


def _title(recipe: str, prefer: Prefer) -> str:
    return f'`{recipe}`, `prefer="memory"`' if prefer == "memory" else f"`{recipe}`"


def _lines(header: Sequence[str], rows: Any) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


_OF_16_BIT = 2  # bytes
_MEMORIES = (8, 12, 16, 24, 32, 48)
_KEPT = ("fp8", "nvfp4", "int4-svd")  # of the table of models, 4 bits in 4 bits
_WAYS: tuple[tuple[str, Prefer], ...] = (
    ("fp8", "speed"),
    ("int8", "speed"),
    ("mxfp8", "speed"),
    ("nvfp4", "speed"),
    ("nvfp4", "memory"),
    ("mxfp4", "speed"),
    ("int4-svd", "speed"),
    ("int4-svd", "memory"),
    ("int4", "speed"),
)
