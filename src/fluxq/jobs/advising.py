"""Recipe for a GPU, by memory and by measured quality or modelled time, and its file: `fluxq recipe new`.

    offered    shipped recipes whose codes the target's file holds, and which the chip computes as the target wants it
    fits       the whole pipeline of a published model, at once or each part in its turn (recipes/cards.py); for
               another program the denoiser and the VAE
    quality    the first of BY_QUALITY that fits
    speed      the same of those whose modelled step (recipes/cost.py) takes no 5 % more than the fastest, of what fits
               at once, else of what fits in turns

Nothing is downloaded or run; all but the order of quality is computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fluxq.base import console
from fluxq.base.files import clear_parts, read_json, write_text
from fluxq.base.output import Output, sole_writer
from fluxq.jobs.catalogue import CatalogueModel, beside
from fluxq.recipes.all_families import find_published, hub_ids
from fluxq.recipes.cards import CONTEXT, GIB, STAYS, Holding, PartSize, holding, weights_on
from fluxq.recipes.cost import REFERENCE, Prefer, cost, route
from fluxq.recipes.devices import DEVICES, Device, find_device
from fluxq.recipes.plan import LayerPlan
from fluxq.recipes.recipe import Recipe, load_recipe

Wants = Literal["quality", "speed"]
CPU = "cpu"
SCHEMA = "fluxq-recipe.schema.json"  # beside a recipe that `recipe new` wrote
OWN = "fluxq"  # target: fluxq itself, and engines with its plug-in


@dataclass(frozen=True)
class Wish:
    """Purpose of a recipe.

    gpu: a name that `find_device` knows, or "cpu".
    memory: bytes of the card, None for what its data sheet says.
    target: a key of TARGETS.
    model: a published denoiser.
    """

    gpu: str
    wants: Wants
    memory: float | None = None
    target: str = OWN
    model: str = "FLUX.1-dev"


@dataclass(frozen=True)
class Advice:
    """Recipe, and how its checkpoint runs.

    prefer: of `fluxq.prepare`.
    encoders: whether text encoders are quantized, too.
    holding: what the pipeline takes of the card.
    milliseconds: modelled, of a step of the denoiser; None where none is.
    """

    recipe: str
    prefer: Prefer
    encoders: bool
    holding: Holding
    milliseconds: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return the advice as JSON."""
        return {
            "recipe": self.recipe,
            "prefer": self.prefer,
            "text_encoders_too": self.encoders,
            "modelled_ms": self.milliseconds,
            **self.holding.describe(),
        }

    @property
    def peak(self) -> float:
        """Bytes of the card at most."""
        return self.holding.at_once if self.holding.word == "all" else self.holding.in_turns


def advise(wish: Wish) -> Advice:
    """Return the recipe that serves a wish best.

    Raises ValueError, with the cure, for an unknown card, target or model, a card whose arithmetic the target does not
    use, and where nothing fits.
    """
    device, named = _device(wish), [row.name for row in find_published(wish.model)]
    if len(named) > 1:
        raise ValueError(f"{wish.model} is what several models are called: name one of {', '.join(named)}")
    if not model_named(wish.model).row.beside:
        raise ValueError(
            f"{wish.model}: the other parts of its pipeline are not known here, so nothing tells what a card holds; "
            "name a denoiser whose text encoders and VAE are, such as FLUX.1-dev"
        )
    candidates = _list_candidates(wish, device)
    fitting = _fitting(candidates)
    if not fitting:
        least = console.size(min(each.holding.in_turns for each in candidates))
        raise ValueError(
            f"{wish.model} does not fit into {console.size(device.memory * GIB)} with any recipe for this; the least "
            f"is {least}. `fluxq plan MODEL --vram SIZE` places modulation or blocks elsewhere, too, which brings "
            f"FLUX.1-dev into 8 GB (docs/cards.md){_smaller(wish, device)}"
        )
    if wish.wants == "speed":
        at_once = [each for each in fitting if each.holding.word == "all"]
        timed = [_timed(each, wish, device) for each in at_once or fitting]
        least = min(each.milliseconds or 0 for each in timed)
        return min((each for each in timed if (each.milliseconds or 0) <= _AS_FAST * least), key=_quality)
    return _timed(min(fitting, key=_quality), wish, device)


def _list_candidates(wish: Wish, device: Device) -> list[Advice]:
    """Return all that the recipes for a target come to on a card, whether it fits or not."""
    forms: tuple[Prefer, ...] = ("speed", "memory") if wish.target == OWN else ("memory",)
    quantized = (False, True) if wish.target == OWN else (False,)
    names = _offered(wish, device)
    return [_advice(wish, device, *each) for each in product(names, forms, quantized)]


def _fitting(candidates: Iterable[Advice]) -> list[Advice]:
    return [each for each in candidates if each.holding.word != "no"]


def _smaller(wish: Wish, device: Device) -> str:
    """Return the end of a sentence that names smaller models, which fit as they were asked for; "" without any.

    Not for other programs, of which each reads its own models.
    """
    if wish.target != OWN:
        return ""
    others = (name for name in SMALLER if name != wish.model)
    names = [name for name in others if _fitting(_list_candidates(replace(wish, model=name), device))]
    return f"; smaller models fit: --model {' or '.join(map(repr, names))}" if names else ""


def _quality(advice: Advice) -> tuple[int, bool, bool]:
    return BY_QUALITY.index(advice.recipe), advice.encoders, advice.prefer != "speed"


def _timed(advice: Advice, wish: Wish, device: Device) -> Advice:
    return replace(advice, milliseconds=_milliseconds(wish.model, advice.recipe, device, advice.prefer))


def write_recipe(wish: Wish, target: Path, on_start: Callable[[], None] = lambda: None) -> Advice:
    """Write the recipe of a wish as a commented file, the schema for editors beside it; return the advice.

    on_start: called when all is checked and writing begins. ValueError for a place where something else stands than
    that file, and as `advise` has it.
    """
    if target.suffix != ".yaml":
        raise ValueError(f"--output {target}: name a .yaml file")
    output = Output(target, is_file=True)
    if not os.path.lexists(target):
        output.require({}, overwrite=False)
    advice = advise(wish)
    text = recipe_text(wish, advice)
    _require_place(output, text)
    on_start()
    with sole_writer(output.place):
        if not _require_place(output, text):
            write_text(output.place, text)
        for name in (output.place.name, SCHEMA):
            clear_parts(output.place.parent, name)
        _lay_schema(output.place.parent)
    return advice


def _require_place(output: Output, text: str) -> bool:
    """Tell whether the place holds this text; ValueError where it holds another, or nothing can be written to it."""
    if output.place.is_file() and output.place.read_bytes() == text.encode():
        return True
    output.require({}, overwrite=False)
    return False


def recipe_text(wish: Wish, advice: Advice) -> str:
    """Return the file: what was asked, what was found, the recipe, and what else may be said, in comments."""
    words = [f"fluxq quantize {hub_id_of(wish.model)} --recipe FILE"]
    words += ["--components transformer,text_encoder,…: text encoders, too"] * advice.encoders
    words += ['then fluxq.prepare(pipe, prefer="memory")'] * (advice.prefer == "memory" and wish.target == OWN)
    words += [f"then fluxq export CHECKPOINT --format {wish.target}"] * (wish.target != OWN)
    time = "" if advice.milliseconds is None else f", a step in {advice.milliseconds:.0f} ms"
    where = "at once" if advice.holding.word == "all" else "each part in its turn"
    where += "" if wish.target == OWN else ", without text encoders"
    about = [
        f"For {_called(wish)}, {wish.wants} first, in {'fluxq' if wish.target == OWN else wish.target}.",
        f"{wish.model} takes {console.size(advice.peak)} there, {where}{time}: modelled, not run.",
        *(f"  {line}" for line in words),
    ]
    gates = load_recipe(advice.recipe)[1].gates
    keys = {
        f"extends: {advice.recipe}": "formats, transforms, rounding, calibration; a line below replaces its own",
        f"gates: {json.dumps(gates)}": "checked on a few images at the end; `fluxq eval` checks more",
        "# profile: fast": "rtn only rounds and needs no data, fast leaves out GPTQ, best takes longest",
        "# calibration: {count: 128}": "images that layers are fitted to; prompts: a file of your own",
        "# steps: {compute: 0.5}": "half of the steps are extrapolated; {last: 2} keeps two in 16 bit",
        "# auto: {bits: 5.5}": "searches a format for every layer first, which takes long",
    }
    width = max(map(len, keys))
    lines = [*about, f"yaml-language-server: $schema={SCHEMA}"]
    return "\n".join([*(f"# {line}" for line in lines), *(f"{key:<{width}}  # {why}" for key, why in keys.items()), ""])


def hub_id_of(name: str) -> str:
    """Return the hub's first repository of a published model; its name where the hub has none."""
    return next(iter(hub_ids(find_published(name)[0].name)), name)


def pieces(name: str, recipe: str, device: Device, prefer: Prefer, *, encoders: bool) -> Iterator[PartSize]:
    """Yield the parts of a published pipeline on a device. encoders: whether its text encoders are quantized too."""
    model = model_named(name)
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
            weights = _weights(other, recipe, device.chip, prefer) if encoders else model_named(other).bytes_16bit
            yield PartSize(other, weights, took[other])


@cache
def model_named(name: str) -> CatalogueModel:
    """Return the published model of a name, built once."""
    return CatalogueModel(find_published(name)[0])


@cache
def layers_of(name: str, recipe: str) -> tuple[LayerPlan, ...]:
    """Return the layers of a published model's plan under a recipe."""
    return tuple(model_named(name).plan(recipe).layers)


def _offered(wish: Wish, device: Device) -> list[str]:
    """Return the recipes for a target that the card computes as they are meant; ValueError without any."""
    if wish.target not in TARGETS:
        raise ValueError(f"no target {wish.target!r}{console.did_you_mean(wish.target, TARGETS)}: {', '.join(TARGETS)}")
    names = TARGETS[wish.target]
    if device.chip in REFERENCE:
        others = OF_OTHERS.get(device.chip, ())
        names = [name for name in names if name in (ON_CPU if wish.target == OWN else others)]
    elif wish.target != OWN:
        names = [name for name in names if _is_native(wish.model, name, device.chip)]
    if not names:
        raise ValueError(
            f"{wish.target} has no format that {_called(wish)} multiplies; leave out --for: fluxq runs it there"
        )
    return list(names)


def _is_native(model: str, recipe: str, chip: str) -> bool:
    """Tell whether a chip multiplies the codes of a recipe's main layers by an instruction for them."""
    if recipe == "int4-svd":
        return chip in INT4_CHIPS
    scheme = next(layer.scheme for layer in layers_of(model, recipe) if layer.is_observed and layer.scheme)
    chip_route = route(scheme, chip)
    return chip_route.weights is scheme.weights and not chip_route.is_collapsed


def _advice(wish: Wish, device: Device, recipe: str, prefer: Prefer, encoders: bool) -> Advice:
    parts = tuple(pieces(wish.model, recipe, device, prefer, encoders=encoders))
    if wish.target != OWN:  # another program loads text encoders of its own
        parts = tuple(part for part in parts if part.name.startswith(("transformer", STAYS)))
    usage = holding(parts, device)
    return Advice(recipe, prefer, encoders, usage)


def _milliseconds(name: str, recipe: str, device: Device, prefer: Prefer) -> float | None:
    """Return the modelled time of a step; None on a chip without kernels, and where the family's cost is not known."""
    model = model_named(name)
    if device.chip in REFERENCE or model.forward is None:
        return None
    return 1e3 * cost(model.plan(recipe), model.forward, device, prefer).total.seconds["fused"]


@cache
def _weights(name: str, recipe: str, chip: str, prefer: Prefer) -> float:
    model = model_named(name)
    others = model.weights.nbytes - sum(_OF_16_BIT * linear.n * linear.k for linear in model.linears)
    return weights_on(layers_of(name, recipe), others, chip, prefer)


def _device(wish: Wish) -> Device:
    """Return the card with the memory that was said."""
    if wish.gpu.lower() == CPU:
        if wish.memory is None:
            raise ValueError("a CPU has as much memory as the machine: give --memory, as in 16GB")
        device = replace(DEVICES["m4"], name="a CPU")
    else:
        device = find_device(wish.gpu)
    if wish.memory is None:
        return device
    if wish.memory <= CONTEXT:
        raise ValueError(f"--memory {console.size(wish.memory)}: the driver alone takes {console.size(CONTEXT)}")
    return replace(device, memory=wish.memory / GIB)


def _called(wish: Wish) -> str:
    device = _device(wish)
    return f"{device.name} with {console.size(device.memory * GIB)}"


def _lay_schema(folder: Path) -> None:
    """Write the schema of recipes into a folder; what is not fluxq's schema stays."""
    place, source = folder / SCHEMA, Path(__file__).parents[1] / "recipes" / "schema.json"
    text = source.read_text(encoding="utf-8")
    if not place.exists() or (place.read_text(encoding="utf-8") != text and _is_schema(place)):
        write_text(place, text)


def _is_schema(file: Path) -> bool:
    """Tell whether a file is a schema of recipes, of this or another version."""
    with suppress(OSError, ValueError):
        return read_json(file).get("title") == Recipe.__name__
    return False


_OF_16_BIT = 2  # bytes
_AS_FAST = 1.05  # times: less is no difference in a model of time
# Shipped recipes by the PSNR that was measured (benchmarks/tiny_quality.json), the nearest to 16 bit first.
BY_QUALITY = (
    "int8-convrot",
    "int8",
    "fp8-comfy",
    "fp8",
    "mxfp8",
    "int4",
    "nvfp4-max",
    "nvfp4",
    "int4-svd",
    "mxfp4-max",
    "mxfp4",
)
# Target -> recipes whose main layers keep their codes in its file (docs/exchange.md), and which its program loads.
TARGETS: dict[str, tuple[str, ...]] = {
    OWN: ("int8", "fp8", "mxfp8", "int4", "nvfp4-max", "nvfp4", "mxfp4-max", "mxfp4"),
    "comfy": ("int8-convrot", "int8", "fp8-comfy", "mxfp8", "nvfp4"),
    "torchao": ("int8", "fp8-comfy", "fp8", "mxfp8", "nvfp4"),
    "modelopt": ("fp8-comfy", "fp8", "mxfp8", "nvfp4"),
    "bfl": ("fp8", "nvfp4"),
    "nunchaku": ("int4-svd",),
    "nunchaku_lite": ("int4-svd",),
}
ON_CPU = ("int8", "int4")
# Chips without kernels of ours -> recipes whose codes they have an instruction for, which other programs launch.
OF_OTHERS = {"sm_75": ("int8-convrot", "int8")}
SMALLER = (
    "Z-Image-Turbo",
    "FLUX.2-klein-4B",
    "Stable Diffusion 3.5 medium",
    "SANA1.5-4.8B",
)  # to name for a small card
INT4_CHIPS = ("sm_80", "sm_86", "sm_89")  # which multiply int4
