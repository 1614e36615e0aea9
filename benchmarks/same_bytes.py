"""Compare what every shipped recipe makes of the embedded model, and every export of it, with recorded digests.

    python benchmarks/same_bytes.py                     # compare; exit code 1 and the differences if any
    python benchmarks/same_bytes.py --record            # write benchmarks/same_bytes.json anew
    python benchmarks/same_bytes.py --keep FOLDER       # leave the checkpoints there

A change that moves code and no arithmetic leaves every tensor and every setting as it was. Another kind of CPU may
round sums otherwise: compare commits on one machine. `PYTHONPATH=OTHER/src python benchmarks/same_bytes.py --record`
makes the digests of another checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
            print(name, done[name], flush=True)
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
    """Return the SHA-256 of the tensors and the settings in a folder, by name and content; "tensors settings".

    Settings are config.json files and the headers of safetensors files, without the digests of content that they hold.
    """
    tensors, settings = hashlib.sha256(), hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            header, data = read(path)
            settings.update(_text(name, header.pop("__metadata__", {})))
            for tensor, place in sorted(header.items()):
                start, stop = place.pop("data_offsets")
                tensors.update(_text(name, tensor, place) + data[start:stop])
        elif path.name.endswith("config.json"):
            settings.update(_text(name, json.loads(path.read_text(encoding="utf-8"))))
    return f"{tensors.hexdigest()[:32]} {settings.hexdigest()[:32]}"


def read(path: Path) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the data of a safetensors file."""
    whole = path.read_bytes()
    (size,) = struct.unpack_from("<Q", whole)
    return json.loads(whole[8 : 8 + size]), memoryview(whole)[8 + size :]


def _text(*values: object) -> bytes:
    return json.dumps([_without_digests(value) for value in values], sort_keys=True).encode()


def _without_digests(value: Any) -> Any:
    """Return JSON without the keys of digests and of what made the file, in objects and in texts that hold one."""
    if isinstance(value, dict):
        return {key: _without_digests(entry) for key, entry in value.items() if not _OWN.search(key)}
    if isinstance(value, str) and value.startswith("{"):
        return _without_digests(json.loads(value))
    return value


_OWN = re.compile("digest|^fluxq_(version|job|seal|beside)$")


if __name__ == "__main__":
    main()
