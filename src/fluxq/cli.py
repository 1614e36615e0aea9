"""The `fluxq` command: each subcommand parses, calls one function of jobs.py and prints.

Exit codes: 0 done, 1 something failed while working, 2 what was asked for cannot work. Results go to stdout,
everything else to stderr. Heavy imports happen inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from fluxq import __version__, show

_EXPECTED = (ValueError, RuntimeError, OSError)
_MAX_SEED = (1 << 63) - 1  # torch takes 64 bits, and images count up from here
_DTYPES = ("bfloat16", "float16", "float32")
_EXPORTS = ("bfl", "modelopt", "comfy", "torchao", "nunchaku_lite", "nunchaku", "compressed-tensors")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fluxq")
def cli() -> None:
    """Quantize diffusion transformers to FP8, MXFP8, NVFP4, INT8 or INT4 checkpoints that load in diffusers.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """


def _options(*decorators: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...]:
    """`a, b` as ("a", "b"); a name given twice counts once."""
    names = tuple(dict.fromkeys(name.strip() for name in (value or "").split(",")))
    if value is not None and "" in names:
        raise click.BadParameter("give names with one comma between them, as in transformer,text_encoder")
    return () if value is None else names


def _sizes(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """`512x768` as (512, 768)."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value) for value in values]
    if None in found:
        raise click.BadParameter("write height x width in pixels, as in 1024x768")
    return tuple((int(size[1]), int(size[2])) for size in found if size)


def _bytes(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """`5GB` as 5000000000; with an i, as in 5GiB, powers of 1024."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(I?)B", value.strip().upper())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** ("KMGT".index(found[2]) + 1)) if found else 0
    if not size:
        raise click.BadParameter("write a size with its unit, as in 5GB or 800MB")
    return size


_PATH = click.Path(path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)
_model = _options(
    click.argument("model", required=False),
    click.option("--revision", help="Revision of a hub model."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
_recipe = _options(
    click.option("--recipe", default="nvfp4", show_default=True, help="A recipe file, or a shipped recipe's name."),
    click.option(
        "--profile",
        type=click.Choice(["rtn", "fast", "balanced", "best"]),
        help="Overrides the recipe's effort.",
    ),
    click.option(
        "--components",
        callback=_names,
        metavar="NAME,NAME",
        help="Components to quantize; by default what the recipe names, its transformer being all denoisers.",
    ),
    click.option("--include", multiple=True, metavar="PATTERN", help="Quantize only these layers (repeatable)."),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Keep these layers in 16 bit (repeatable)."),
)
_size = _options(
    click.option("--height", type=click.IntRange(min=1), help="Image height in pixels."),
    click.option("--width", type=click.IntRange(min=1), help="Image width in pixels."),
)
_run = _options(
    click.option("--dtype", type=click.Choice(_DTYPES), default="bfloat16", show_default=True, help="16-bit dtype."),
    click.option("--device", default="cpu", show_default=True, help="Torch device that runs the pipeline."),
    click.option("--seed", type=click.IntRange(0, _MAX_SEED), help="First seed; by default recipe's or protocol's."),
    click.option(
        "--prompts", help="A file (.txt, .jsonl, .csv, .parquet, …), MJHQ-30K and its like, or a datasets id."
    ),
    click.option("--num-inference-steps", type=click.IntRange(min=1), help="Denoising steps of each image."),
    click.option("--guidance-scale", type=float, help="Guidance of each image."),
    _size,
)
_output = click.option("--output", "-o", help="Where to write; by default ./<model>-<recipe>.")
_overwrite = click.option("--overwrite", is_flag=True, help="Replace what stands at the output.")
_lora = click.option(
    "--lora",
    multiple=True,
    metavar="[COMPONENT=]FILE[:WEIGHT]",
    help="Fuse this LoRA before quantizing (repeatable); into what its keys name, of two transformers the first.",
)
_max_memory = click.option(
    "--max-memory",
    callback=_bytes,
    metavar="SIZE",
    help="What weights and activations may take on --device, as in 8GiB; weights that do not fit are read in turn.",
)
_statistics = click.option(
    "--statistics", metavar="FILE", help="Input scales cover what this file of `fluxq calibrate` saw."
)
_checkpoint = _options(
    click.argument("output"),
    click.option("--model", help="The 16-bit model; by default the one that OUTPUT was made from."),
    click.option("--revision", help="Revision of a hub model; by default the one that was quantized."),
    click.option("--local-files-only", is_flag=True, help="Use only what is on this machine."),
)
_batch_size = click.option(
    "--batch-size", type=click.IntRange(min=1), help="Images made together; by default a megapixel of them."
)
_protocol = _options(
    click.option(
        "--protocol", default="smoke", show_default=True, help="Prompts, counts and metrics that belong together."
    ),
    click.option("--count", type=click.IntRange(min=1), help="Prompts; by default the protocol's."),
    click.option("--seeds", type=click.IntRange(min=1), help="Images of each prompt; by default the protocol's."),
    _batch_size,
)
_common = _options(
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    click.option("-v", "--verbose", count=True, help="Say what is decided and why; show tracebacks."),
    click.option("-q", "--quiet", is_flag=True, help="Errors only."),
)


@cli.command()
@_model
@_recipe
@_statistics
@click.option("--gpu", metavar="NAME", help="Print what a step costs on this GPU instead, modelled: h200, rtx5090, …")
@click.option("--prefer", type=click.Choice(["speed", "memory"]), help="With --gpu: 4-bit weights it cannot multiply.")
@_size
@click.option("--frames", type=click.IntRange(min=1), help="With --gpu: frames of a video.")
@click.option("--batch", type=click.IntRange(min=1), help="With --gpu: sequences, two an image under guidance.")
@_common
def plan(gpu: str | None, prefer: str | None, frames: int | None, batch: int | None, **arguments: Any) -> None:
    """Print what becomes of every Linear of MODEL, and why, or what a step costs on a GPU; computes nothing.

    \b
    Example:
      fluxq plan tiny --recipe fp8
      fluxq plan tiny --recipe nvfp4 --gpu h200
    """
    with _session(arguments) as session:
        session.require_gpu(gpu, prefer=prefer, frames=frames, batch=batch)
        session.announce()
        prepared = session.prepare(writes=False)
        costs = session.jobs.model_costs(prepared, gpu, prefer or "speed", frames, batch or 1) if gpu else {}
        session.print(show.plan_json(prepared, costs), lambda: show.plan(prepared, costs))


@cli.command()
@_model
@_recipe
@_run
@_max_memory
@_lora
@_output
@_overwrite
@_common
def calibrate(**arguments: Any) -> None:
    """Run MODEL on prompts and write statistics of what flows into each group of Linears.

    \b
    Example:
      fluxq calibrate tiny --recipe nvfp4 --output statistics.safetensors
    """
    with _session(arguments) as session, session.together() as ranks:
        session.announce()
        output = "{model}-{recipe}-statistics.safetensors"
        prepared = session.prepare(default_output=output, writes=False, ranks=ranks)
        session.jobs.require_free_file(prepared)
        session.start_work()
        path = session.jobs.calibrate(prepared)
        session.print({"statistics": str(path)}, lambda: show.calibrated(prepared, path))


@cli.command()
@_model
@_recipe
@_run
@_max_memory
@_lora
@_output
@_overwrite
@_statistics
@click.option("--no-check", "check", is_flag=True, flag_value=False, default=True, help="Skip the closing check.")
@click.option("--parallel-blocks", is_flag=True, help="Fit each block to what 16-bit blocks before it return.")
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    default="10GB",
    show_default=True,
    callback=_bytes,
    metavar="SIZE",
    help="Cut the weights into files of at most this size.",
)
@click.option("--push-to-hub", metavar="REPO", help="Upload the checkpoint there once it has passed the closing check.")
@click.option("--private", is_flag=True, help="With --push-to-hub: a new REPO is private.")
@_common
def quantize(**arguments: Any) -> None:
    """Quantize MODEL (a pipeline folder, a hub id or `tiny`) and check it against the 16-bit pipeline.

    \b
    Example:
      fluxq quantize --recipe nvfp4.yaml
    """
    repo, private = arguments["push_to_hub"], arguments["private"]
    with _session(arguments) as session, session.together() as ranks:
        if private and not repo:
            raise ValueError("--private says what a new --push-to-hub REPO is; give that too")
        session.announce()
        prepared = session.prepare(ranks=ranks)
        session.start_work()
        record = session.jobs.quantize(prepared)
        if not ranks.leads:
            return
        session.print({**record, "output": str(prepared.output)}, lambda: show.quantized(prepared, record))
        if record["check"] and not record["check"]["passed"]:
            raise RuntimeError(show.why_failed(prepared, record["check"]))
        if repo:
            from fluxq.hub import push

            click.echo(f"uploaded: {push(prepared.output, record, repo, private)}", err=True)


@cli.command("eval")
@_checkpoint
@_protocol
@click.option("--metrics", callback=_names, metavar="NAME,NAME", help="Take these, and fail if one cannot be taken.")
@click.option("--weights", metavar="DIR|hub", help="Folder with metric networks' files; hub: fetch what is missing.")
@click.option("--clip", metavar="MODEL", help="open_clip model of the CLIP score: hub id, folder or architecture/tag.")
@click.option("--fid-resize", metavar="NAME", help="Variant of FID: tf1, antialias, clean or pytorch-fid.")
@click.option("--fid-reference", type=_PATH, metavar="PATH", help="Images, or .npz statistics, that FID is taken to.")
@click.option(
    "--backends", callback=_names, metavar="NAME,NAME", help="native, int8, 8bit; by default all that differ."
)
@click.option(
    "--cache", type=click.FloatRange(min=0, min_open=True), help="Also with a first-block cache of this threshold."
)
@click.option(
    "--gate", "gates", multiple=True, metavar="GATE", help="Exit code 1 unless it holds: psnr>=30 (repeatable)."
)
@click.option(
    "--images", type=_FOLDER, metavar="DIR", help="Where images are kept; by default fluxq-images beside OUTPUT."
)
@click.option(
    "--engine",
    type=click.Choice(["local", "torchrun", "ray"]),
    default="local",
    show_default=True,
    help="What runs the pipelines.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="With --engine ray: actors; by default one per GPU or core."
)
@click.option("--address", help="With --engine ray: of a running cluster; by default one is started here.")
@_run
@_common
def evaluate(output: str, **arguments: Any) -> None:
    """Compare the checkpoint OUTPUT with its 16-bit model; writes OUTPUT/eval/report.html, .json and .md.

    \b
    Example:
      fluxq eval tiny-nvfp4
      fluxq eval tiny-nvfp4 --count 256 --gate 'psnr>=35'
    """
    with _session(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        report = session.judge.evaluate(asked)
        if report is None:
            return  # another process of this run has all results
        session.print(
            report.model_dump(mode="json"), lambda: show.evaluated(Path(output) / "eval" / "report.html", report)
        )
        missed = [gate.gate for run in report.runs for gate in run.gates if not gate.passed]
        if missed:
            raise RuntimeError(
                f"{output}: gate missed: {', '.join(dict.fromkeys(missed))}; the report says by how much"
            )


@cli.command("bench")
@_checkpoint
@_run
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(["eager", "compiled", "cuda graph", "captured"]),
    help="Repeatable; by default eager. cuda graph: compiled too; captured: by fluxq.capture alone.",
)
@click.option("--batch", "batches", multiple=True, type=click.IntRange(min=1), help="Images in a call (repeatable).")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="HEIGHTxWIDTH",
    callback=_sizes,
    help="Repeatable; by default the pipeline's.",
)
@click.option("--optimize", "optimized", is_flag=True, help="Also with fused blocks (`fluxq.optimize`).")
@click.option("--rounds", type=click.IntRange(min=3), default=10, show_default=True, help="Times that each is run.")
@click.option("--warmup", type=click.IntRange(min=1), default=2, show_default=True, help="Rounds before those.")
@_common
def bench(
    output: str,
    modes: tuple[str, ...],
    batches: tuple[int, ...],
    sizes: Any,
    optimized: bool,
    rounds: int,
    warmup: int,
    **arguments: Any,
) -> None:
    """Time the checkpoint OUTPUT beside its 16-bit model, in turn; writes OUTPUT/eval/speed.json.

    \b
    Example:
      fluxq bench tiny-nvfp4 --batch 1 --batch 4
    """
    with _session(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        how = {
            "modes": modes or ("eager",),
            "batches": batches or (1,),
            "sizes": sizes,
            "optimized": optimized,
            "rounds": rounds,
            "warmup": warmup,
        }
        speed = session.judge.bench(asked, **how)
        session.print(speed.model_dump(mode="json"), lambda: show.timed(speed))


@cli.command("debug")
@_checkpoint
@click.option("--count", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts to run.")
@_batch_size
@click.option("--patch", type=_PATH, metavar="FILE", help="Write a recipe that keeps the worst layers in more bits.")
@click.option(
    "--growth",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    show_default=True,
    help="Bits that the patch may add, as a share of all.",
)
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Runs of the prompts for the damages: blocks first, then the layers of the worst.",
)
@_run
@_common
def debug(output: str, patch: Path | None, growth: float, budget: int, **arguments: Any) -> None:
    """Find out where the checkpoint OUTPUT loses, layer by layer; writes OUTPUT/eval/debug.json.

    \b
    Example:
      fluxq debug tiny-nvfp4 --patch better.yaml
    """
    with _session(arguments) as session:
        asked = session.subject(output)
        session.start_work()
        found = session.judge.debug(asked, patch, growth, budget)
        session.print(found.model_dump(mode="json"), lambda: show.debugged(found, patch))
        if patch is not None and found.patch is None:
            raise RuntimeError(f"{patch} was not written: the findings say why there is no patch")


@cli.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=_PATH)
@click.option("--output", "-o", type=_PATH, default=Path("report.html"), show_default=True, help="The page to write.")
@_common
def report(runs: tuple[Path, ...], output: Path, **arguments: Any) -> None:
    """One page of several evaluations, each a checkpoint folder or a report.json; beside it JSON and Markdown.

    \b
    Example:
      fluxq report tiny-nvfp4 tiny-fp8 -o report.html
    """
    with _session(arguments) as session:
        merged = session.judge.report(runs, output)
        session.print(merged.model_dump(mode="json"), lambda: show.evaluated(output, merged))


@cli.command("verify")
@click.argument("output")
@_common
def verify_checkpoint(output: str, **arguments: Any) -> None:
    """Prove that the checkpoint OUTPUT is whole and holds what it says; runs no model, exit code 1 if it does not.

    \b
    Example:
      fluxq verify tiny-nvfp4
    """
    with _session(arguments) as session:
        from fluxq.quantize.verify import verify

        results = verify(Path(output))
        session.start_work()
        session.print([result.describe() for result in results], lambda: show.verified(results))
        failed = [result.check for result in results if result.status == "failed"]
        if failed:
            raise RuntimeError(f"{output}: {len(failed)} of {len(results)} checks failed ({', '.join(failed)})")


@cli.command("inspect")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="The 16-bit model, against which layouts and layers are proved.")
@click.option("--layers", "every_layer", is_flag=True, help="Print every layer; with --base also its error.")
@_common
def inspect_file(path: str, base: str | None, every_layer: bool, **arguments: Any) -> None:
    """Say what the file or folder PATH is, whoever quantized it, and what is wrong with it; exit code 1 if anything is.

    \b
    Example:
      fluxq inspect tiny-nvfp4 --base tiny
    """
    with _session(arguments) as session:
        from fluxq import inspecting, show_inspection

        found = inspecting.inspect(path, base)
        session.start_work()
        session.print(
            {name: report.describe() for name, report in found.items()},
            lambda: show_inspection.inspections(found, every_layer=every_layer),
        )
        wrong = sorted({fault.kind for report in found.values() for fault in report.faults if fault.is_error})
        if wrong:
            raise RuntimeError(f"{path}: {', '.join(wrong)}")


@cli.command("export")
@click.argument("output")
@click.option("--format", "format", type=click.Choice(_EXPORTS), required=True, help="The layout to write.")
@click.option("--output", "-o", "target", type=_PATH, help="Where to write; by default ./<OUTPUT>-<format>.")
@click.option("--component", help="By default the denoisers; for compressed-tensors the text encoder.")
@click.option("--requantize", is_flag=True, help="Round layers again that the format cannot hold as they are.")
@_overwrite
@_common
def export_checkpoint(output: str, format: str, target: Path | None, **arguments: Any) -> None:
    """Write the checkpoint OUTPUT for another program, codes moved bit by bit; refuses what its format cannot hold.

    Layers of no main format, modulation for one, are written in 16 bit where the format lacks theirs, and listed.

    \b
    Example:
      fluxq export tiny-nvfp4 --format comfy
    """
    with _session(arguments) as session:
        from fluxq import exchange

        done = exchange.export_checkpoint(output, format, target, on_start=session.start_work, **session.arguments)
        session.print(done.describe(), lambda: show.exported(done))


@cli.command("import")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="The 16-bit model: proves and mends PATH, gives what it lacks.")
@_output
@click.option("--dequantize", is_flag=True, help="Layers whose codes no format of fluxq holds become 16 bit.")
@_overwrite
@_common
def import_file(
    path: str, base: str | None, output: str | None, dequantize: bool, overwrite: bool, **arguments: Any
) -> None:
    """Make a checkpoint of PATH, a file or folder that another program quantized; codes stay as they are.

    \b
    Example:
      fluxq import flux1-dev-nvfp4.safetensors --base black-forest-labs/FLUX.1-dev
    """
    with _session(arguments) as session:
        from fluxq import inspecting, show_inspection

        reports = inspecting.import_(path, base, output, dequantize=dequantize, overwrite=overwrite)
        session.start_work()
        session.print([report.describe() for report in reports], lambda: show_inspection.imported(reports))


@cli.command()
@click.argument("output")
@click.option("--device", default="cuda", show_default=True, help="Torch device that will serve.")
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, help="Tokens that layers see (repeatable).")
@click.option(
    "--prefer", type=click.Choice(["speed", "memory"]), default="speed", show_default=True, help="As prepare."
)
@click.option("--dtype", type=click.Choice(_DTYPES), default="bfloat16", show_default=True, help="16-bit dtype.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), help="Folder for compiled kernels, to ship.")
@_common
def warmup(
    output: str,
    device: str,
    tokens: tuple[int, ...],
    prefer: str,
    dtype: str,
    cache: Path | None,
    **arguments: Any,
) -> None:
    """Compile the kernels that the checkpoint OUTPUT launches on this GPU; reads no weights.

    Without --tokens those of a 1024 x 1024 image of FLUX.1: 1, 512, 4096 and 4608. Set TRITON_CACHE_DIR to the folder
    given as --cache where images are made.

    \b
    Example:
      fluxq warmup tiny-nvfp4 --cache kernels
    """
    with _session(arguments) as session:
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
        rows = session.jobs.warm_up(output, device, tokens or (1, 512, 4096, 4608), prefer, dtype)
        session.print(rows, lambda: show.warmed(rows))


@cli.command()
@click.argument("name", required=False)
@click.option(
    "--recipe", "recipes", multiple=True, help="Show this one (repeatable); by default two, or with NAME all."
)
@_common
def families(name: str | None, recipes: tuple[str, ...], **arguments: Any) -> None:
    """Print published models and what recipes make of them: bits, checkpoint, memory; downloads and computes nothing.

    NAME is a model, a family or a model's class. With it, or with --json, every shipped recipe is shown.

    \b
    Example:
      fluxq families FLUX.1-dev --recipe nvfp4
      fluxq families
    """
    with _session(arguments) as session:
        from fluxq import catalogue  # not through jobs.py, which imports diffusers' pipelines

        chosen = catalogue.recipes_for(recipes, all_of_them=name is not None or session.as_json)
        found = list(catalogue.models(name))
        session.print(
            [model.describe(chosen) for model in found] if session.as_json else None,
            lambda: show.families(found, chosen, in_detail=name is not None),
        )


@cli.command()
@_common
def env(**arguments: Any) -> None:
    """Print versions, devices and what computes each scheme on them; paste it into a bug report.

    \b
    Example:
      fluxq env --json
    """
    with _session(arguments) as session:
        from fluxq.environment import environment  # not through jobs.py, which imports diffusers

        report = environment()
        session.print(report, lambda: show.environment(report))


def main() -> None:
    """Entry point: turns exceptions into one message and an exit code."""
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; nothing half-written was left behind", err=True)
        sys.exit(1)


class _Failure(click.ClickException):
    """A message for people, with the exit code of the moment."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance


class _Session:
    """One command's options, its exit code for errors so far, and how it prints."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.verbose, self.quiet = arguments.pop("verbose"), arguments.pop("quiet")
        self.as_json = arguments.pop("as_json")
        self.arguments = arguments
        self.exit_code = 2
        self.who = ""

    @cached_property
    def jobs(self) -> Any:
        from fluxq import jobs

        return jobs

    @cached_property
    def judge(self) -> Any:
        from fluxq import judge

        return judge

    @cached_property
    def options(self) -> Any:
        return self.jobs.Options(**self._with_call())

    def subject(self, output: str) -> Any:
        """The checkpoint to judge, what it was made from and what to ask of both."""
        return self.judge.subject(Path(output), self.judge.Options(**self._with_call()))

    def _with_call(self) -> dict[str, Any]:
        """The arguments, those of the pipeline together under `call`."""
        call_keys = ("num_inference_steps", "guidance_scale", "height", "width")
        call = {key: self.arguments.get(key) for key in call_keys}
        rest = {key: value for key, value in self.arguments.items() if key not in call_keys}
        return {**rest, "call": {key: value for key, value in call.items() if value is not None}}

    def announce(self) -> None:
        """The first line: what is about to be worked on, said before anything slow happens."""
        if self.who:
            return  # the first process says it
        from fluxq.base.model import DEFAULT_MODEL
        from fluxq.recipes.recipe import load_recipe

        recipe_name, recipe = load_recipe(self.arguments["recipe"])
        model = self.arguments["model"] or recipe.model
        chosen = model or f"{DEFAULT_MODEL} (no MODEL given: the small FLUX pipeline that comes with fluxq)"
        if not self.quiet and not self.as_json:
            click.echo(f"model {chosen}, recipe {recipe_name}")

    def require_gpu(self, gpu: str | None, **needing: Any) -> None:
        """ValueError for an unknown GPU, and without one for options that only it gives a meaning."""
        from fluxq.recipes.devices import find_device

        if gpu is not None:
            find_device(gpu)
            return
        needing |= {name: self.arguments[name] for name in ("height", "width")}
        given = [f"--{name}" for name, value in needing.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: only the cost on a GPU depends on it; give --gpu too")

    def prepare(self, **how: Any) -> Any:
        return self.jobs.prepare(self.options, **how)

    @contextmanager
    def together(self) -> Iterator[Any]:
        """The processes that torchrun started for this command; the first one speaks, the others only of errors."""
        from fluxq.base.console import set_verbosity
        from fluxq.base.ranks import ranks_of_launch

        with ranks_of_launch() as ranks:
            if not ranks.leads:
                self.quiet, self.as_json, self.who = True, False, f"process {ranks.rank}: "
                set_verbosity(-1)
            yield ranks

    def start_work(self) -> None:
        """From here on an error is a failure of the work, no longer of what was asked for."""
        self.exit_code = 1

    def print(self, value: object, for_people: Callable[[], None]) -> None:
        if self.as_json:
            click.echo(json.dumps(value, indent=2))
        elif not self.quiet:
            for_people()


@contextmanager
def _session(arguments: dict[str, Any]) -> Iterator[_Session]:
    from fluxq.base.console import set_verbosity

    session = _Session(arguments)
    set_verbosity(-1 if session.quiet else session.verbose)
    try:
        yield session
    except BrokenPipeError:
        raise
    except _EXPECTED as error:
        if session.verbose:
            traceback.print_exc()
        raise _Failure(session.who + str(error), session.exit_code) from None
