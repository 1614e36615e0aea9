"""Commands for files of other programs: inspect, export, import."""

from __future__ import annotations

from pathlib import Path

import click

from fluxq.commands import show
from fluxq.commands.options import PATH, bytes_option, output_option, overwrite_option
from fluxq.commands.session import Session, command

OF_LISTS = ("cache-dit", "taylorseer")  # formats of a list of steps; a test compares
EXPORTS = ("bfl", "modelopt", "comfy", "fp8_blocks", "compressed-tensors", "torchao", "nunchaku_lite", "nunchaku")


@command("inspect", short_help="Say what a quantized file is, and what is wrong with it.")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="The 16-bit model: proves layouts and layers against it.")
@click.option("--layers", "every_layer", is_flag=True, help="Print every layer, with --base its error too.")
def inspect_file(session: Session, path: str, base: str | None, every_layer: bool) -> None:
    """Say what the quantized file or folder PATH is, and what is wrong with it.

    Any program may have written it. Exits with 1 if anything is wrong.

    \b
    Example:
      fluxq inspect tiny-nvfp4 --base tiny
    """
    session.requirements.require_path(path)
    session.requirements.require_base(base)
    from fluxq.commands import show_inspection
    from fluxq.jobs import exchange

    reports = exchange.inspect(path, base)
    session.start_work()
    session.print(
        {name: report.describe() for name, report in reports.items()},
        lambda: show_inspection.inspections(reports, every_layer=every_layer),
    )
    wrong = sorted({fault.kind for report in reports.values() for fault in report.faults if fault.is_error})
    if wrong:
        raise RuntimeError(f"{path}: {', '.join(wrong)}")


@command("export", short_help="Write a checkpoint for ComfyUI, stock diffusers, vLLM-Omni, SGLang, torchao, nunchaku.")
@click.argument("output", metavar="CHECKPOINT|LIST")
@click.option(
    "--format",
    "format",
    type=click.Choice((*EXPORTS, *OF_LISTS)),
    required=True,
    help=f"The layout to write; {' and '.join(OF_LISTS)} take a list of `fluxq steps`.",
)
@click.option("--output", "-o", "target", type=PATH, help="Where to write; by default ./<CHECKPOINT>-<format>.")
@click.option(
    "--component",
    metavar="NAME",
    help="Component to write; by default the denoisers, for compressed-tensors the text encoder.",
)
@click.option("--requantize", is_flag=True, help="Round layers again that the format cannot hold.")
@click.option(
    "--side-layers",
    type=click.Choice(["8bit", "16bit"]),
    default="8bit",
    help="Modulation and other side layers: round again where the format lacks theirs, or keep all in 16 bit.",
)
@bytes_option("--max-shard-size", "max_shard_bytes", help="Largest size of a weight file in a folder; by default 10GB.")
@overwrite_option
def export_checkpoint(session: Session, output: str, format: str, target: Path | None) -> None:
    """Write CHECKPOINT, or a LIST of steps, for another program, its codes unchanged.

    Layers beside the main ones, modulation for one, are rounded again where the format lacks theirs, and listed.

    \b
    Example:
      fluxq export tiny-nvfp4 --format comfy
      fluxq export tiny-steps.json --format cache-dit
    """
    if format in OF_LISTS:
        _export_list(session, Path(output), format, target)
        return
    session.requirements.require_checkpoint(output)
    from fluxq.jobs import exchange

    planned = exchange.plan_export(output, format, target, **session.arguments)
    session.start_work()
    done = planned.write()
    session.print(done.describe(), lambda: show.exported(done))


def _export_list(session: Session, file: Path, format: str, target: Path | None) -> None:
    """Write a list of steps for another program."""
    names = {"--component": "component", "--requantize": "requantize", "--max-shard-size": "max_shard_bytes"}
    flags = [flag for flag, name in names.items() if session.arguments[name]]
    flags += ["--side-layers"] if session.arguments["side_layers"] != "8bit" else []
    if flags:
        raise ValueError(f"--format {format} is of a list of steps, which has no layers: leave out {', '.join(flags)}")
    from fluxq.jobs import stepping

    how = {"overwrite": session.arguments["overwrite"], "on_start": session.start_work}
    place = stepping.export_list(file, format, target, **how)
    session.print({"list": str(place)}, lambda: show.exported_list(place))


@command("import", short_help="Make a checkpoint of a file that another program quantized.")
@click.argument("path")
@click.option("--base", metavar="MODEL", help="The 16-bit model: proves and mends PATH, and gives what it lacks.")
@output_option("<PATH>-fluxq")
@click.option("--dequantize", is_flag=True, help="Turn layers whose codes fluxq has no format for into 16 bit.")
@overwrite_option
def import_file(session: Session, path: str, base: str | None) -> None:
    """Make a checkpoint of the file or folder PATH that another program quantized.

    Codes stay as they are.

    \b
    Example:
      fluxq import flux1-dev-nvfp4.safetensors --base black-forest-labs/FLUX.1-dev
    """
    session.requirements.require_path(path)
    session.requirements.require_base(base)
    from fluxq.commands import show_inspection
    from fluxq.jobs import exchange

    reports = exchange.import_(path, base, **session.arguments, on_start=session.start_work)
    session.print([report.describe() for report in reports], lambda: show_inspection.imported(reports))


COMMANDS = (inspect_file, export_checkpoint, import_file)
