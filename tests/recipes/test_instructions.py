"""INSTRUCTIONS: the counts in machine code that the model of costs reads."""

from collections import defaultdict
from functools import cache

import pytest

from fluxq.kernels.dispatch import PROVEN, accepted_files
from fluxq.recipes.cost import NATIVE, PROMOTED
from fluxq.recipes.devices import INSTRUCTIONS

ROWS, BLOCKS = ("int8", "fp8", "fp8_tensor"), ("fp8_1x128", "mxfp8", "mxfp4", "nvfp4")
# Pass -> its cell of kernels/compiled, or the nearest one where none is of just that.
CELLS = {
    **{("norm", name): f"adaln_quantize_kernel {name} 3072" for name in ("16bit", *ROWS, *BLOCKS[:2], "nvfp4")},
    ("norm", "mxfp4"): "adaln_quantize_kernel nvfp4 3072",
    **{("quantize", name): f"quantize_rows_kernel {name} plain 3072" for name in ROWS},
    **{("quantize", name): f"quantize_blocks_kernel {name}" for name in BLOCKS},
    ("activation", "16bit"): "activate_kernel 16bit",
    **{("activation", name): f"quantize_rows_kernel {name} gelu 12288" for name in ROWS},
    **{("activation", name): f"quantize_blocks_kernel {name} gelu" for name in BLOCKS},
    **{("concatenation", name): f"quantize_rows_kernel {name}-beside gelu 15360" for name in ROWS},
    **{("concatenation", name): f"quantize_blocks_kernel {name} gelu" for name in BLOCKS[:3]},
    ("concatenation", "nvfp4"): "quantize_blocks_kernel nvfp4-beside gelu 15360 own global",
}


@cache
def executed() -> dict[tuple[str, str], float]:
    """(Cell, chip) -> the instructions an element, the most of any Triton version."""
    counts = defaultdict(list)
    for version in PROVEN:
        for _, row in accepted_files(version):
            if row["executed"] is not None:
                counts[f"{row['kernel']} {row['format']}", row["target"]].append(row["executed"])
    return {cell: max(each) for cell, each in counts.items()}


@pytest.mark.parametrize(("made_by", "name"), CELLS)
def test_counts_are_those_of_the_compiled_cells(made_by: str, name: str):
    """Of a norm without the gated residual that its cell adds before it: a cell of fp8 tells what that takes."""
    counts, norm = executed(), "adaln_quantize_kernel fp8"
    found = {
        chip: counts[CELLS[made_by, name], chip]
        - (counts[f"{norm} 3072", chip] - counts[f"{norm} first 3072", chip] if made_by == "norm" else 0)
        for chip in INSTRUCTIONS[made_by, name]
    }
    assert INSTRUCTIONS[made_by, name] == pytest.approx(found, abs=0.05)


def test_every_pass_to_codes_that_a_chip_of_nvidia_s_multiplies_is_counted():
    assert INSTRUCTIONS.keys() == CELLS.keys()
    chips = {chip for chip in NATIVE if chip.startswith("sm_")}
    assert all(counts.keys() == chips for counts in INSTRUCTIONS.values())
    for name in {*PROMOTED, *(name for chip in chips for name in NATIVE[chip])}:
        assert all((made_by, name) in CELLS for made_by in ("norm", "quantize", "activation", "concatenation"))
