"""Passports of the embedded pipeline under every shipped recipe, rounded to nearest: is each still what it was?

`python tests/golden/make_passports.py` quantizes it anew and holds the images to those in tests/golden/passports by the
rule of `fluxq gate`: exits with 1 where one is not within its floor, with 3 where its images cannot tell. With
`--write` it writes the passports anew.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from fluxq.base.output import PASSPORT_FILE
from fluxq.eval.gate.passport import EXIT_CODES, nearness, read_passport
from fluxq.jobs.passports import sentence_of
from fluxq.recipes.recipe import shipped_recipes
from fluxq.verbs import quantize_pipeline

PASSPORTS = Path(__file__).parent / "passports"


def compare(before: Path, after: Path) -> tuple[int, str]:
    """Return the exit code of one passport's images held to those of another, and the result in words."""
    passport = read_passport(before)
    near = nearness(passport, read_passport(after).images)
    return EXIT_CODES[near.verdict], f"{near.verdict}: {sentence_of(passport, near)}"


def main() -> int:
    """Quantize, and compare or write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the passports anew")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    PASSPORTS.mkdir(exist_ok=True)
    codes = [0]
    for recipe in shipped_recipes():
        started, golden = time.perf_counter(), PASSPORTS / f"{recipe}.json"
        with tempfile.TemporaryDirectory() as scratch:
            made = quantize_pipeline("tiny", recipe, profile="rtn", device="cpu", output=Path(scratch) / recipe).path
            if write:
                shutil.copyfile(made / PASSPORT_FILE, golden)
            code, said = compare(golden, made / PASSPORT_FILE)
        codes.append(code)
        print(f"{recipe}: {said} ({time.perf_counter() - started:.1f} s)", flush=True)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
