"""Install the nodes: `python -m fluxq.integrations.comfyui --install COMFYUI`, by the interpreter that runs ComfyUI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fluxq.integrations.comfyui", description=__doc__)
    parser.add_argument("--install", type=Path, required=True, metavar="COMFYUI", help="the folder with main.py")
    try:
        print(f"wrote {install(parser.parse_args().install)}; restart ComfyUI")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
