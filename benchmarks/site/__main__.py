"""Build the site: documents as they stand in the checkout, and pages made of recipes, docstrings and the command line.

    python -m benchmarks.site FOLDER

Needs the extra `docs` and no connection. Every warning is an error; a link to a file or heading that is not there is
one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.site.staging import ROOT, stage


def build(target: str, root: Path = ROOT) -> int:
    """Build the site of a checkout in a folder, and return Sphinx's exit code: 0, or 1 if it warned of anything."""
    from sphinx.cmd.build import main as sphinx

    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder), root)
        return sphinx(["-W", "--keep-going", "-q", "-b", "html", "-c", str(ROOT / "docs"), folder, target])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m benchmarks.site FOLDER")
    sys.exit(build(sys.argv[1]))
