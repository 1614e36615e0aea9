"""Install the nodes: `python -m fluxq.integrations.comfyui --install COMFYUI`, by the interpreter that runs ComfyUI."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fluxq.base.files import require_regular, write_text

_MARK = "# Written by `python -m fluxq.integrations.comfyui --install`"  # by which our file is known
SHIM = f"""\
{_MARK}: the nodes are in the installed package fluxq.
from fluxq.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
"""


def install(comfyui: Path) -> Path:
    """Write ComfyUI's folder of the nodes and return its file; only a file of ours is replaced.

    ValueError for a folder that is no ComfyUI's, for what is in the way, and where nothing can be written.
    """
    nodes = comfyui / "custom_nodes"
    target = nodes / "fluxq" / "__init__.py"
    try:
        if not (nodes.is_dir() and (comfyui / "nodes.py").is_file()):
            raise ValueError(
                f"{comfyui} is no folder of ComfyUI: it has no nodes.py beside custom_nodes; name that one"
            )
        _require_free(target)
        target.parent.mkdir(exist_ok=True)
        write_text(target, SHIM)
    except OSError as error:
        raise ValueError(f"{target} cannot be written: {error.strerror}; mend that, or name another folder") from None
    return target


def _require_free(target: Path) -> None:
    """Raise ValueError for links, a folder that is none, and an __init__.py that is not of `install`.

    custom_nodes itself may be a link, to another disk for instance.
    """
    folder = target.parent
    for path in (folder, target):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and what it leads to is not replaced; remove the link")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is no folder; move it away")
    if target.exists():
        require_regular(target)
        with target.open("rb") as stream:
            if stream.read(len(_MARK)) != _MARK.encode():
                raise ValueError(f"{target} was not written by fluxq, and is not replaced; move {folder} away")


@click.command(help=__doc__)
@click.option("--install", "comfyui", type=click.Path(path_type=Path), required=True, help="The folder with main.py.")
def main(comfyui: Path) -> None:
    """Run the command; exit 2 where `install` refuses."""
    place = Path(os.path.expanduser(comfyui))  # a shell leaves `--install=~/…` alone
    try:
        click.echo(f"wrote {install(place)}; restart ComfyUI")
    except ValueError as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
