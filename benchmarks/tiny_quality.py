"""Effect of every shipped recipe on the embedded pipeline: tiny_quality.json, two tables and ../docs/tiny_grid.png.

    python -m benchmarks.tiny_quality [--prompts 256] [--seeds 4]     measure, then write tables and picture
    python -m benchmarks.tiny_quality --tables                        the tables again, from the result file

The same prompts and noise go through the 16-bit pipeline and each quantized one, so that differences are paired. Rows:

    NAME           a shipped recipe
    NAME rtn       its formats rounded to nearest, where that is something else
    NAME in 128s   the checkpoint with a scale for each 128 activations in place of one for a token
    NAME SVDQuant + GPTQ   its formats under SVDQuant and GPTQ as published, built from fluxq's stages
    NAME as int8   the checkpoint after `fluxq.prepare` on the CPU: 8-bit weights, and x still centered and smoothed
    NAME + fp8 attention   the checkpoint with `fluxq.set_attention(pipe, "fp8")`, as `attention: fp8` in a recipe does
    NAME + first 1, last 2 in 16 bit   with `fluxq.keep_steps(pipe, first=1, last=2)`, as `steps` in a recipe does

Velocity error: |v^ - v| / |v| of the transformer's output, on inputs that the 16-bit pipeline gave it. Modelled: what
recipes/cost.py makes of FLUX.1-dev's layers, had every one kept what its counterpart here has kept; where steps are
kept in 16 bit, the mean over as many steps as an image takes here.

Recipes and rounding to nearest are also measured on the same pipeline with outliers (rescaled.py), beside its own
16-bit images: a recipe that loses much there needs a model without outliers.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from torch import Tensor, nn

import fluxq
from benchmarks.pages import between
from benchmarks.rescaled import write_rescaled
from fluxq import tiny
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.calibrate.capture import run_pipeline
from fluxq.eval.images.generate import Generated, generate
from fluxq.eval.images.protocols import items_of
from fluxq.eval.metrics.fidelity import fidelity
from fluxq.eval.metrics.statistics import Interval, paired_interval
from fluxq.jobs import making
from fluxq.kernels.linear import quant_layers
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.quantize.record import Record, RecordedComponent, fitted_db
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.cost import STREAMS, forward_pass, group_seconds, in_16_bit
from fluxq.recipes.devices import find_device
from fluxq.recipes.formats import Scheme
from fluxq.recipes.plan import MODULATION_ROLE, LayerPlan, LinearShape, Plan, make_plan
from fluxq.recipes.recipe import Profile, load_recipe, shipped_recipes

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "tiny_quality.json"
COMPONENT = "transformer"
SEED = 1000
VELOCITY_SEED, VELOCITY_IMAGES = 9000, 32
GRID_ROWS = ("fp8", "nvfp4", "nvfp4-max", "int4")  # below the 16-bit images
GPUS = ("h200", "b200")
FLUX_DEV = {"guidance_embeds": True}  # the published configuration; the rest of it is the class's own default
REENCODED = "nvfp4-max"  # the recipe whose checkpoint is also measured in 8 bits
ATTENDING = ("fp8", "nvfp4")  # recipes whose checkpoints are also measured with attention in fp8
KEEPING = {"nvfp4": ((1, 0), (0, 1), (2, 0), (0, 2), (1, 2))}  # and with these first and last steps kept in 16 bit
SVDQUANT_ON = "nvfp4"  # the recipe whose formats are also measured under SVDQuant + GPTQ
BEST_KNOWN = " SVDQuant + GPTQ"
SVDQUANT = """
extends: nvfp4
components:
  transformer:
    weights: {four_over_six: false}
    transforms: [smooth]
    low_rank: {rank: 1/96}
    rounding: {method: gptq, scales: amax}
compat: full
gate: {db_per_percent: 0}
"""
IN_128S_ON = "fp8"  # the recipe whose activations are also measured with a scale for each 128 of them
IN_128S = " in 128s"
IN_BLOCKS = """
extends: fp8
components:
  transformer:
    activations: {format: fp8_1x128}
"""
RTN, AS_INT8, IN_FP8, IN_16_BIT = " rtn", " as int8", " + fp8 attention", " in 16 bit"


@click.command()
@click.option("--prompts", default=256, show_default=True, help="Prompts per recipe.")
@click.option("--seeds", default=4, show_default=True, help="Images per prompt.")
@click.option("--only", multiple=True, help="Only this recipe (repeatable); writes no tables and no picture.")
@click.option("--output", type=click.Path(path_type=Path), default=RESULT, show_default=True)
@click.option("--tables", is_flag=True, help="Only write the tables, from the result file.")
def main(prompts: int, seeds: int, only: tuple[str, ...], output: Path, tables: bool) -> None:
    """Measure every shipped recipe and write the result file, the tables and the picture."""
    if not tables:
        torch.set_num_threads(1)
        recipes = only or tuple(shipped_recipes())
        reference, measured = measure_all(recipes, prompts, seeds)
        with tempfile.TemporaryDirectory() as folder:
            model = write_rescaled(Path(tiny.path()), Path(folder) / "tiny-with-outliers")
            _, ridden = measure_all(recipes, prompts, seeds, str(model), also=False)
        for label, found in ridden.items():
            kept = ("held_out_sqnr_db", "psnr_db", "velocity_error")
            measured[label].row["with_outliers"] = {name: found.row[name] for name in kept}
        write_json(output, result_of(measured, prompts, seeds))
        if not only:
            draw_grid([reference.images, *(measured[name].images for name in GRID_ROWS)], ROOT / "docs/tiny_grid.png")
    if not only:
        found = read_json(output)
        for page in TABLES:
            write_text(page, with_tables(page, found))


@dataclass(frozen=True)
class Measured:
    """One row of the result, PSNR per prompt (mean over seeds) and images, uint8 (N, 3, H, W)."""

    row: dict[str, Any]
    psnr_db: list[float]
    images: Tensor


def measure_all(
    recipes: Sequence[str], prompts: int, seeds: int, model: str = "tiny", also: bool = True
) -> tuple[Generated, dict[str, Measured]]:
    """The 16-bit images, and every row by its label. also: the rows of `prepare`, fp8 attention and kept steps."""
    # All prompts with one seed, then the next.
    items = items_of(tiny.PROMPTS[:prompts], prompts * seeds, first_seed=SEED)
    pipe = load_pipeline(resolve_model(model))
    judge = Judge(generate(pipe, items, tiny.CALL_KWARGS), velocities(pipe), seeds)
    measured: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, options in settings(recipes, Path(folder), model):
            record = making.quantize(making.job_of(options))
            checkpoint = ModelFolder(label, Path(str(options.output)))
            again = [label + AS_INT8] * (label == REENCODED) + [label + IN_FP8] * (label in ATTENDING)
            again += [label + keeping(*steps) for steps in KEEPING.get(label, ())]
            for name in (label, *(again if also else ())):
                measured[name] = judge.measure(name, record, load_pipeline(checkpoint))
                click.echo(json.dumps(measured[name].row))
    return judge.reference, measured


def settings(recipes: Sequence[str], folder: Path, model: str) -> Iterator[tuple[str, making.JobOptions]]:
    """(label, options) of each recipe, and of its formats rounded to nearest where no row before is that."""
    known = set()
    for recipe in recipes:
        rows: list[tuple[str, str, Profile | None]] = [(recipe, recipe, None), (recipe + RTN, recipe, "rtn")]
        for built_on, end, text in ((SVDQUANT_ON, BEST_KNOWN, SVDQUANT), (IN_128S_ON, IN_128S, IN_BLOCKS)):
            if recipe == built_on:
                file = folder / f"{recipe}{end.replace(' ', '_')}.yaml"
                write_text(file, text)
                rows.append((recipe + end, str(file), None))
        for label, name, profile in rows:
            output = str(folder / label)
            options = making.JobOptions(model=model, recipe=name, profile=profile, output=output, check=False)
            layers = [layer for plan in making.job_of(options).plans for layer in plan.layers]
            what = tuple((layer.name, str(layer.scheme), str(layer.method)) for layer in layers)
            if what not in known:
                known.add(what)
                yield label, options


class Judge:
    """Compares quantized pipelines with the 16-bit one. calls: (args, kwargs, output) of its transformer."""

    def __init__(self, reference: Generated, calls: Sequence[tuple[Any, Any, Tensor]], seeds: int) -> None:
        self.reference, self.calls, self.seeds = reference, calls, seeds

    def measure(self, label: str, record: Record, pipe: Any) -> Measured:
        """A row. record: what `jobs.quantize` returned. pipe: the checkpoint, loaded."""
        if label.endswith(AS_INT8):
            fluxq.prepare(pipe, device="cpu")
        if label.endswith(IN_FP8):
            fluxq.set_attention(pipe, "fp8")
        first, last = kept_steps(label)
        kept = fluxq.keep_steps(pipe, first=first, last=last) if first or last else None
        images = generate(pipe, self.reference.items, tiny.CALL_KWARGS, description=label)
        psnr, sqnr = (per_prompt(values, self.seeds) for values in fidelity(self.reference, images))
        part = record.components[0]
        schemes = {name: layer.scheme for name, layer in quant_layers(getattr(pipe, COMPONENT))}
        is_stored, is_first = not label.endswith(AS_INT8), not label.endswith((AS_INT8, IN_FP8, IN_16_BIT))
        row = {
            "recipe": label,
            **sizes(part, schemes, is_stored),
            "held_out_sqnr_db": held_out(part) if is_first else None,
            "psnr_db": limits(paired_interval(psnr)),
            "latent_sqnr_db": limits(paired_interval(sqnr)),
            "velocity_error": None if kept else round(self.velocity_error(getattr(pipe, COMPONENT)), 5),
            "seconds": record.seconds if is_first else None,
            "modelled_ms": modelled_ms(label, schemes),
        }
        if kept:
            row["share_of_steps_in_16_bit"] = round(kept.calls_in_16_bit / kept.calls, 4)
        return Measured(row, psnr, images.images)

    @torch.no_grad()
    def velocity_error(self, transformer: nn.Module) -> float:
        """|v^ - v| / |v| over all calls."""
        lost = size = 0.0
        for args, kwargs, v in self.calls:
            lost += float((transformer(*args, **kwargs)[0].float() - v).double().square().sum())
            size += float(v.double().square().sum())
        return (lost / size) ** 0.5


def velocities(pipe: Any) -> list[tuple[Any, Any, Tensor]]:
    """Calls of the 16-bit transformer, on images that nothing else uses."""
    calls = []

    def keep(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args, kwargs, output[0].float()))

    handle = getattr(pipe, COMPONENT).register_forward_hook(keep, with_kwargs=True)
    items = items_of(tiny.PROMPTS[::-1], VELOCITY_IMAGES, first_seed=VELOCITY_SEED)
    for _ in run_pipeline(pipe, items, tiny.CALL_KWARGS, output_type="latent"):
        pass
    handle.remove()
    return calls


def sizes(part: RecordedComponent, schemes: Mapping[str, Scheme], is_stored: bool) -> dict[str, Any]:
    """Bits and bytes; those of the files are left out where the model in memory is another.

    bits_per_weight: of all Linears. fitted_bits: of the layers in the recipe's main format alone, all but modulation
    and what stays in 16 bit.
    """
    fitted = [layer for layer in part.layers if layer.name in schemes and layer.role != MODULATION_ROLE]
    bits = sum(schemes[layer.name].stored_bits(*layer.shape) for layer in fitted)
    files = {"bits_per_weight", "bytes_before", "bytes_after"} if is_stored else set[str]()
    return {"fitted_bits": round(bits / sum(layer.weights for layer in fitted), 4), **part.model_dump(include=files)}


def held_out(part: RecordedComponent) -> list[float] | None:
    """Output SQNR on held-out tokens, rounded to nearest and as it was kept: means over groups; None without any."""
    found = fitted_db(part.groups)
    return [round(value, 2) for value in found] if found else None


def modelled_ms(label: str, schemes: Mapping[str, Scheme]) -> dict[str, float]:
    """GPU -> modelled ms of FLUX.1-dev's core Linears in one step at 1024x1024: making their inputs and products."""
    name = REENCODED if label.endswith(BEST_KNOWN) else label.split()[0]  # which has a rank in its plan
    full = at_full_size(flux_dev_plan(name), schemes)
    share = min(sum(kept_steps(label)) / tiny.CALL_KWARGS["num_inference_steps"], 1.0)
    plain = in_16_bit(full)
    return {gpu: round((1 - share) * core_ms(full, gpu) + share * core_ms(plain, gpu), 2) for gpu in GPUS}


def keeping(first: int, last: int) -> str:
    """Return the end of the label of a row with steps in 16 bit."""
    said = [f"{end} {count}" for end, count in (("first", first), ("last", last)) if count]
    return f" + {', '.join(said)}{IN_16_BIT}"


def kept_steps(label: str) -> tuple[int, int]:
    """(first, last) steps in 16 bit of a row."""
    first, last = (re.search(rf"{end} (\d+).*{IN_16_BIT}$", label) for end in ("first", "last"))
    return int(first[1]) if first else 0, int(last[1]) if last else 0


def at_full_size(plan: Plan, kept: Mapping[str, Scheme]) -> Plan:
    """A large model's plan in which layers keep what those of a small one did: block i of n what block i·m/n kept.

    A rank is the recipe's for the large layer, spent in the same shares; a Hadamard block the largest that divides K.
    """
    blocks: dict[str, set[int]] = {}
    large: dict[str, set[int]] = {}
    for names, found in ((kept, blocks), ([layer.name for layer in plan.layers], large)):
        for name in names:
            if match := _BLOCK.fullmatch(name):
                found.setdefault(match[1], set()).add(int(match[2]))

    def layer_of(layer: LayerPlan) -> LayerPlan:
        match = _BLOCK.fullmatch(layer.name)
        if match is None or layer.scheme is None:
            return layer
        index = int(match[2]) * len(blocks[match[1]]) // len(large[match[1]])
        scheme = kept[f"{match[1]}.{index}.{match[3]}"]
        spent = max(scheme.rank + scheme.deflate, 1)
        rank, deflate = (layer.method.rank * part // spent for part in (scheme.rank, scheme.deflate))
        hadamard = (layer.method.hadamard or layer.scheme.hadamard) if scheme.hadamard else 0
        return replace(layer, scheme=replace(scheme, rank=rank, deflate=deflate, hadamard=hadamard))

    return replace(plan, layers=tuple(map(layer_of, plan.layers)))


def core_ms(plan: Plan, gpu: str) -> float:
    """Modelled ms of a plan's observed groups in one step, kernels fused as this project can."""
    forward, device = forward_pass("flux", FLUX_DEV), find_device(gpu)
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.is_observed:
            groups.setdefault(layer.group, []).append(layer)
    seconds = 0.0
    for layers in groups.values():
        tokens = forward.tokens(STREAMS.get(layers[0].role, "image"))
        shapes, schemes = [(layer.n, layer.k) for layer in layers], [layer.scheme for layer in layers]
        seconds += group_seconds(shapes, schemes, device, tokens, made_by=layers[0].made_by)
    return 1e3 * seconds


def flux_dev_plan(name: str) -> Plan:
    """Return the plan of a shipped recipe for FLUX.1-dev."""
    recipe = load_recipe(name)[1]
    part = recipe.components[COMPONENT]
    return make_plan(
        FAMILIES["flux"],
        COMPONENT,
        part,
        flux_dev_linears(),
        static_inputs=recipe.needs_data(part),
        compat=recipe.compat,
    )


@cache
def flux_dev_linears() -> tuple[LinearShape, ...]:
    """Of FLUX.1-dev, from the class: no weights are needed."""
    modules = build_on_meta("diffusers", FAMILIES["flux"].model, FLUX_DEV).named_modules()
    return tuple(LinearShape(name, m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear))


def result_of(measured: Mapping[str, Measured], prompts: int, seeds: int) -> dict[str, Any]:
    """Return the contents of the result file."""
    ranked = sorted(measured, key=lambda name: -measured[name].row["psnr_db"][0])
    shipped = [name for name in ranked if " " not in name]
    pairs = [
        *pairwise(shipped),
        *((name.removesuffix(RTN), name) for name in ranked if name.endswith(RTN)),
        *CLAIMS,
        *COMPARED,
    ]
    pairs = [pair for pair in dict.fromkeys(pairs) if set(pair) <= measured.keys()]
    plain = in_16_bit(flux_dev_plan("fp8"))
    return {
        "commit": commit(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "prompts": prompts,
        "seeds_per_prompt": seeds,
        "first_seed": SEED,
        "modelled_ms_16bit": {gpu: round(core_ms(plain, gpu), 2) for gpu in GPUS},
        "recipes": [found.row for found in measured.values()],
        "differences": [difference(a, b, measured) for a, b in pairs],
    }


def difference(better: str, worse: str, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Two rows on the same prompts: the paired difference and both means without the prompts' own spread."""
    first, second = measured[better].psnr_db, measured[worse].psnr_db
    paired = paired_interval([a - b for a, b in zip(first, second, strict=True)])
    within = [limits(interval) for interval in within_item_intervals([first, second])]
    return {"recipes": [better, worse], "difference_db": limits(paired), "within_prompt_psnr_db": within}


def within_item_intervals(conditions: Sequence[Sequence[float]]) -> list[Interval]:
    """Means of several recipes on the same items, with intervals that leave out how items differ in general.

    Some prompts are fragile under every recipe; that spread widens each recipe's own interval and says nothing
    about their order. Each item's mean over the recipes is replaced by the grand mean and what remains widened
    by sqrt(C / (C - 1)) (Cousineau 2005, corrected by Morey 2008). conditions: C lists of equal length, finite.
    """
    table = torch.tensor(conditions, dtype=torch.float64)  # (C, items)
    if len(table) < 2 or not torch.isfinite(table).all():
        raise ValueError("within-item intervals compare at least two recipes whose values are all finite")
    means = table.mean(1, keepdim=True)
    centred = table - table.mean(0) + table.mean() - means  # deviations from each recipe's mean, items alike
    corrected = means + centred * math.sqrt(len(table) / (len(table) - 1))
    return [paired_interval(row) for row in corrected.tolist()]


def per_prompt(values: Sequence[float], seeds: int) -> list[float]:
    """Mean over seeds of each prompt: prompts are the sample, seeds are nested in them."""
    return torch.tensor(values).reshape(seeds, -1).mean(0).tolist()


def limits(interval: Interval) -> list[float]:
    """[mean, low, high] as the file holds them."""
    return [round(value, 3) for value in (interval.mean, interval.low, interval.high)]


def with_tables(page: Path, found: Mapping[str, Any]) -> str:
    """A page's text with its table made anew."""
    name, make = TABLES[page]
    text = page.read_text(encoding="utf-8")
    return between(text, f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->", make(found))


def quality_table(found: Mapping[str, Any]) -> str:
    """The README's: shipped recipes, also with attention in fp8, the closest to 16 bit first."""
    lines = ["| recipe | bits per weight | size | paired PSNR, dB | latent SQNR, dB |", "|" + "---|" * 5]
    shown = [row for row in found["recipes"] if " " not in row["recipe"].removesuffix(IN_FP8)]
    for row in sorted(shown, key=lambda row: -row["psnr_db"][0]):
        size = row["bytes_after"] / row["bytes_before"]
        cells = [_named(row["recipe"]), f"{row['bits_per_weight']:.2f}", f"{size:.0%}", _interval(row["psnr_db"])]
        cells.append(f"{row['latent_sqnr_db'][0]:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    where = "docs/gpu.md#attention-in-fp8-or-int8"
    also = f"*+ fp8 attention*: the same checkpoint, [self-attention]({where}) from fp8 codes too."
    return "\n".join([*lines, "", also, _images(found, shown), "", "On the same prompts, paired:", "", *_claims(found)])


def _claims(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each pair of rows in CLAIMS."""
    differences = {tuple(row["recipes"]): row["difference_db"] for row in found["differences"]}
    for pair in CLAIMS:
        better, worse = (_named(label) for label in pair)
        mean, low, high = differences[pair]
        yield f"- {better} over {worse}: {mean:+.2f} dB [{low:+.2f}, {high:+.2f}]"


def _named(label: str) -> str:
    own, _, rest = label.partition(" ")
    return f"`{own}` {rest}".strip()


def recipes_table(found: Mapping[str, Any]) -> str:
    """That of recipes/README.md: every row of the result."""
    gpus = [f"ms on {gpu.upper()}" for gpu in GPUS]
    header = [
        "row",
        "bits per weight",
        "bits in the main format",
        "held-out SQNR, dB",
        "paired PSNR, dB",
        "velocity error",
        "with outliers: SQNR, dB",
        "PSNR, dB",
        "velocity error",
        "seconds",
        *gpus,
    ]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    plain = [f"{found['modelled_ms_16bit'][gpu]:.0f}" for gpu in GPUS]
    lines.append(f"| 16 bit | {' | '.join(['16', '16', *[''] * 7, *plain])} |")
    for row in found["recipes"]:
        sqnr = row["held_out_sqnr_db"]
        cells = [
            _named(row["recipe"]),
            f"{row['bits_per_weight']:.2f}" if "bits_per_weight" in row else "",
            f"{row['fitted_bits']:.2f}",
            f"{sqnr[0]:.1f} → {sqnr[1]:.1f}" if sqnr else "",
            _interval(row["psnr_db"]),
            "" if row["velocity_error"] is None else f"{row['velocity_error']:.2%}",
            *_with_outliers(row.get("with_outliers")),
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            *(f"{row['modelled_ms'][gpu]:.1f}" for gpu in GPUS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _images(found, found["recipes"])])


def _with_outliers(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * 3
    sqnr = row["held_out_sqnr_db"]
    decibels = f"{sqnr[0]:.1f} → {sqnr[1]:.1f}" if sqnr else ""
    return [decibels, _interval(row["psnr_db"]), f"{row['velocity_error']:.2%}"]


def _interval(values: Sequence[float]) -> str:
    mean, low, high = values
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _images(found: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> str:
    images = f"{found['prompts']} prompts with {found['seeds_per_prompt']} seeds each"
    later = "".join(f", {_named(row['recipe'])} {row['commit']}" for row in shown if "commit" in row)
    return f"Over {images}, 95 % intervals over prompts, commit {found['commit']}{later}."


def draw_grid(rows: list[Tensor], target: Path, columns: int = 14, scale: int = 4, gap: int = 4) -> None:
    """One row of images per recipe, the first `columns` of each, every pixel drawn `scale` wide."""
    size = rows[0].shape[-1] * scale
    grid = Image.new("RGB", (columns * (size + gap) - gap, len(rows) * (size + gap) - gap), "white")
    for y, images in enumerate(rows):
        for x, image in enumerate(images[:columns]):
            picture = Image.fromarray(image.permute(1, 2, 0).numpy())
            grid.paste(picture.resize((size, size), Image.Resampling.NEAREST), (x * (size + gap), y * (size + gap)))
    target.parent.mkdir(exist_ok=True)
    grid.save(target, optimize=True)


_BLOCK = re.compile(r"(\w+)\.(\d+)\.(.+)")
# Pairs that the README compares, the better one first.
CLAIMS = (
    ("nvfp4", "nvfp4 rtn"),
    ("int4", "int4 rtn"),
    ("nvfp4-max", "nvfp4"),
    (REENCODED + AS_INT8, REENCODED),
    ("fp8", "mxfp8"),
    *((name, name + IN_FP8) for name in ATTENDING),
)
# And pairs that its text names, which the result file holds beside them.
COMPARED = (
    (SVDQUANT_ON, SVDQUANT_ON + BEST_KNOWN),
    (IN_128S_ON + IN_128S, IN_128S_ON),
    *((name + keeping(*steps), name) for name, found in KEEPING.items() for steps in found),
)
TABLES = {ROOT / "README.md": ("quality", quality_table), ROOT / "recipes" / "README.md": ("recipes", recipes_table)}

if __name__ == "__main__":
    main()
