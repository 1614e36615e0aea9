"""Tables of large-models.md, cards.md and which-recipe.md in docs/: what cards hold and compute of published models.

Everything is computed from configurations (recipes/families), data sheets (recipes/devices.py) and what becomes of
weights on a chip (recipes/cost.py); nothing was run. Parts of a pipeline are those of recipes/cards.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from fluxq.base.console import digits
from fluxq.jobs.advising import OWN, Wants, Wish, advise, model_named, pieces
from fluxq.jobs.fits import IN_16_BIT, best
from fluxq.recipes.all_families import PUBLISHED, hub_ids
from fluxq.recipes.cards import CONTEXT, GIB, holding
from fluxq.recipes.cost import Prefer, Route, route
from fluxq.recipes.devices import DEVICES, Device
from fluxq.recipes.formats import Scheme
from fluxq.recipes.workloads import WORKLOADS
from fluxq.runtime.place import Placement

# Columns of the tables: a recipe, and how it is prepared where the chip does not multiply 4 bits.
COLUMNS: tuple[tuple[str, Prefer], ...] = (
    ("fp8", "speed"),
    ("nvfp4", "speed"),
    ("nvfp4", "memory"),
    ("int4-svd", "speed"),
    ("int4-svd", "memory"),
)


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


def gpus_table(name: str) -> list[str]:
    """Return the table of docs/which-recipe.md: the recipe that each card gets for a published model."""
    rows: dict[tuple[str, ...], list[Device]] = {}
    for key, device in sorted(DEVICES.items(), key=lambda item: item[1].memory):
        cells = tuple(_advised(Wish(key, wants, target=target, model=name)) for _, wants, target in _ASKED)
        rows.setdefault(cells, []).append(device)
    return _lines(
        ["memory", "card", *(title for title, _, _ in _ASKED)],
        ([_memory(cards), ", ".join(card.name for card in cards), *cells] for cells, cards in rows.items()),
    )


def card_sections(name: str = "FLUX.1-dev", gigabytes: Sequence[int] = (8, 12, 16, 24)) -> list[str]:
    """Return the sections of docs/cards.md: for so much memory the recipes, the placement, and the lines that do it."""
    lines, [repository] = [], hub_ids(name)
    for size in gigabytes:
        choice, way, peaks = best(model_named(name).choices, 1e9 * size) or _nothing(name, size)
        recipes = {_COMPONENTS.get(part, part): recipe for part, recipe in choice.recipes.items()}
        quantized = {part: recipe for part, recipe in recipes.items() if recipe != IN_16_BIT}
        recipe = next(iter(quantized.values()), "")
        source = f"{name}-{recipe}" if quantized else repository
        placement = Placement(way, 1e9 * size, peaks, "FluxPipeline", source)
        widest = max(peaks, key=lambda part: peaks[part])
        said = ", ".join(f"{part} in {words}" for part, words in recipes.items())
        lines += [
            f"## {size} GB",
            f"{said[0].upper()}{said[1:]}. {placement.sentence[0].upper()}{placement.sentence[1:]}",
        ]
        lines[-1] += f"; most while {_COMPONENTS.get(widest, widest)} runs."
        lines[-1] = textwrap.fill(lines[-1], 120, break_long_words=False, break_on_hyphens=False)
        command = [
            "fluxq",
            "quantize",
            repository,
            "--recipe",
            recipe,
            "--components",
            ",".join(quantized),
            "-o",
            source,
        ]
        lines += ["", "```", " ".join(command), "```", ""] if quantized else ["", "Nothing needs to be quantized.", ""]
        code = placement.code.replace("'", '"').replace("\npipe = ", "\n\npipe = ", 1)  # as ruff formats it
        lines += ["```python", code, "```", ""]
    return "\n".join(lines).splitlines()


def _nothing(name: str, size: int) -> NoReturn:
    raise ValueError(f"nothing of {name} fits into {size} GB: leave that size out of the page")


def _advised(wish: Wish) -> str:
    """Return a cell: the recipe, how it is prepared, the placement; a dash where nothing does."""
    try:
        advice = advise(wish)
    except ValueError:
        return "–"
    if wish.target != OWN:
        return f"`{advice.recipe}`"
    memory = ", memory" if advice.prefer == "memory" else ""
    encoders = ", encoders" if advice.encoders else ""
    return f"`{advice.recipe}`{memory}{encoders}, {advice.holding.word}"


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
    layers = model_named("FLUX.1-dev").plan(recipe).layers
    return next(layer.scheme for layer in layers if layer.role == "qkv")


def _serving(name: str, recipe: str) -> float:
    return CONTEXT + model_named(name).size(recipe).serving_bytes


def _large() -> list[str]:
    """Denoisers that are no question on the smallest of these cards in 16 bit are left out."""
    rows = [model_named(row.name) for row in PUBLISHED if row.family in WORKLOADS]
    return [model.row.name for model in rows if model.bytes_16bit > _MEMORIES[0] * GIB]


def _memory(cards: Sequence[Device]) -> str:
    least, *_, most = sorted(card.memory for card in (*cards, *cards))
    return f"{least:g} GB" if least == most else f"{least:g} to {most:g} GB"


def _title(recipe: str, prefer: Prefer) -> str:
    return f'`{recipe}`, `prefer="memory"`' if prefer == "memory" else f"`{recipe}`"


def _lines(header: Sequence[str], rows: Any) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


_MEMORIES = (8, 12, 16, 24, 32, 48)
_COMPONENTS = {"CLIP-L": "text_encoder", "T5-XXL": "text_encoder_2"}  # of FLUX.1
# Columns of the table of recipes by card: title, and what is asked.
_ASKED: tuple[tuple[str, Wants, str], ...] = (
    ("nearest to 16 bit", "quality", OWN),
    ("fastest", "speed", OWN),
    ("for ComfyUI", "quality", "comfy"),
    ("for nunchaku", "quality", "nunchaku"),
)
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
