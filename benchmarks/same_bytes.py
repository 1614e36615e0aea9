"""Compare what every shipped recipe makes of the embedded model, and every export of it, with recorded digests.

    python benchmarks/same_bytes.py                     # compare; exit code 1 and the differences if any
    python benchmarks/same_bytes.py --record            # write benchmarks/same_bytes.json anew
    python benchmarks/same_bytes.py --keep FOLDER       # leave the checkpoints there

A change that moves code and no arithmetic leaves every byte of the weights and of config.json as it was. Digests are of
whole files on one kind of CPU: another kind may round sums otherwise, so record on the machine that compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_suffix(".json")
PROFILES = ("rtn", "")  # "" for the recipe's own
FORMATS = ("bfl", "modelopt", "comfy", "torchao", "nunchaku_lite", "nunchaku")
OPTIONS = {"rtn": ["--profile", "rtn"], "": []}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="Write the digests instead of comparing them.")
    parser.add_argument("--keep", type=Path, help="Folder for the checkpoints; by default they are removed.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = digests(given.keep or Path(scratch))
    if given.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    differ = sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name))
    print("\n".join(differ) or f"all {len(found)} are the same")
    sys.exit(bool(differ))


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of every checkpoint and export, by recipe, profile and format; "refused" where it ends so."""
    done = {}
    for recipe in sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")):
        for profile in PROFILES:
            name = f"{recipe} {profile}".strip()
            checkpoint = folder / name.replace(" ", "-")
            fluxq("quantize", "tiny", "--recipe", recipe, *OPTIONS[profile], "--no-check", "-o", checkpoint)
            done[name] = digest(checkpoint)
            print(name, done[name][:16], flush=True)
            for form in FORMATS:
                target = folder / f"{checkpoint.name}.{form}" / "model.safetensors"
                is_done = fluxq("export", checkpoint, "--format", form, "-o", target, may_refuse=True)
                done[f"{name} as {form}"] = digest(target.parent) if is_done else "refused"
    return done


def fluxq(*arguments: str | Path, may_refuse: bool = False) -> bool:
    """Run a command of fluxq; return whether it ended with 0. Exit if it may not end otherwise."""
    command = [sys.executable, "-m", "fluxq", *map(str, arguments), "--quiet"]
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode and not may_refuse:
        sys.exit(ended.stderr)
    return not ended.returncode


def digest(folder: Path) -> str:
    """Return the SHA-256 over the weights and every config.json in a folder, by name and content."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name.endswith((".safetensors", "config.json")):
            total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
