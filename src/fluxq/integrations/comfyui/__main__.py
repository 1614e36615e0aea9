"""Install the nodes: `python -m fluxq.integrations.comfyui --install COMFYUI`, by the interpreter that runs ComfyUI."""

from __future__ import annotations

from pathlib import Path

import click

from fluxq.base.files import write_text

SHIM = """\
# Written by `python -m fluxq.integrations.comfyui --install`: the nodes are in the installed package fluxq.
from fluxq.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
"""


def install(comfyui: Path) -> Path:
    """Write ComfyUI's folder of the nodes and return its file; ValueError for a folder that is no ComfyUI's."""
    nodes = comfyui / "custom_nodes"
    if not (nodes.is_dir() and (comfyui / "nodes.py").is_file()):
        raise ValueError(f"{comfyui} is no folder of ComfyUI: it has no nodes.py beside custom_nodes; name that one")
    (nodes / "fluxq").mkdir(exist_ok=True)
    write_text(nodes / "fluxq" / "__init__.py", SHIM)
    return nodes / "fluxq" / "__init__.py"


@click.command(help=__doc__)
@click.option("--install", "comfyui", type=click.Path(path_type=Path), required=True, help="The folder with main.py.")
def main(comfyui: Path) -> None:
    """Run the command; exit 2 for a folder that is no ComfyUI's."""
    try:
        click.echo(f"wrote {install(comfyui)}; restart ComfyUI")
    except ValueError as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
