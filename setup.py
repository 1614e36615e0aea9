"""Refuse a checkout without symbolic links; everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

FOLDERS = ("calibrate", "eval", "kernels", "quantize", "recipes")

package = Path(__file__).parent / "src" / "fluxq"
broken = [folder for folder in FOLDERS if not (package / folder).is_dir()]
if broken:
    raise SystemExit(
        f"src/fluxq/{broken[0]} is no link to {broken[0]}/: this checkout has no symbolic links, and a package built "
        "from it would lack its modules. Clone again with `git clone -c core.symlinks=true` (on Windows with developer "
        "mode switched on), or install a wheel"
    )
setup()
