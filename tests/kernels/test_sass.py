"""Reading machine code: which instructions count, and what a compiled kernel's rows say."""

import re

import pytest
import triton

from benchmarks.kernels import aot, sass
from fluxq.kernels.dispatch import minor

# A pass with the slow path of a division, a loop inside a loop, and padding.
TEXT = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;              /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;    /* 0x0000000402047981 */
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   LDG.E.U16 R9, desc[UR4][R2.64+0x20] ;
        /*0040*/              @!P0 BRA 0x70 ;
        /*0050*/                   MOV R0, 0x70 ;
        /*0060*/                   CALL.REL.NOINC 0x110 ;
        /*0070*/              @P1  BRA 0x90 ;
        /*0080*/                   FADD R4, R4, R5 ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*00a0*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00c0*/              @P2  BRA 0x90 ;
        /*00d0*/              @P3  BRA 0x80 ;
        /*00e0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*00f0*/                   EXIT ;
        /*0100*/                   BRA 0x100 ;
        /*0110*/                   FMUL R0, R0, R0 ;
        /*0120*/                   RET.REL.NODEC R0 0x0 ;
        /*0130*/                   NOP ;
"""


def test_the_slow_path_of_a_division_and_what_follows_the_exit_are_not_counted() -> None:
    instructions = sass.parse(TEXT)
    assert len(instructions) == 20
    assert sass.executed(instructions) == 14  # 16 to EXIT, without the two of the slow path


def test_a_branch_over_work_is_taken_for_no_slow_path() -> None:
    """A guarded block that loads, or a long one, is executed, whatever it calls."""
    for place, line in (("0050", "LDG.E R0, desc[UR4][R2.64]"), ("0050", "STG.E desc[UR4][R2.64], R0")):
        text = re.sub(rf"(/\*{place}\*/\s+)[^;]*;", rf"\1{line} ;", TEXT)
        assert sass.executed(sass.parse(text)) == 16


def test_the_main_loop_is_the_innermost_around_matrix_instructions() -> None:
    loop = sass.main_loop(sass.parse(TEXT))
    assert [i.operation.split(".")[0] for i in loop] == ["HGMMA", "QGMMA", "WARPGROUP", "BRA"]
    assert sass.matrix_instructions(loop) == 2 and sass.waits(loop) == 1
    assert sass.main_loop(sass.parse(TEXT.replace("GMMA", "FMA"))) == []


def test_the_most_frequent_load_counts() -> None:
    assert sass.bytes_per_load(sass.parse(TEXT)) == 16
    assert sass.bytes_per_load([]) == 0


def test_a_loop_is_a_branch_back() -> None:
    assert sass.has_loop(sass.parse(TEXT))
    assert not sass.has_loop([i for i in sass.parse(TEXT) if i.target is None or i.target >= i.address])


def test_a_target_is_that_of_a_branch_alone() -> None:
    assert [i.target for i in sass.parse(TEXT)[4:8]] == [0x70, None, None, 0x90]


def accepted(kernel: str, words: str, chip: str, version: str) -> list[aot.CompiledCell]:
    rows = aot.accepted_rows(version).values()
    found = [r for r in rows if r.kernel == kernel and r.target == chip and set(words.split()) <= set(r.format.split())]
    assert found, f"no accepted row of {kernel} {words} {chip} for Triton {version}"
    return found


GOALS = {
    "GELU and codes of int8": ("quantize_rows_kernel", "int8 gelu", 25),
    "GELU and codes of fp8": ("quantize_rows_kernel", "fp8 gelu", 25),
    "GELU and codes of fp8 beside attention": ("quantize_rows_kernel", "fp8-beside gelu", 26),
    "GELU and codes of mxfp8": ("quantize_blocks_kernel", "mxfp8 gelu", 25),
    "norm and codes": ("adaln_quantize_kernel", "fp8 first 3072", 30),
}


@pytest.mark.often(20)
@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("chip", ["sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("version", ["3.6", "3.8", "3.9"])
def test_passes_execute_few_instructions_an_element(version: str, chip: str, goal: str) -> None:
    if chip not in aot.REQUIRED.get(version, (chip,)):
        return
    kernel, words, most = GOALS[goal]
    for row in accepted(kernel, words, chip, version):
        assert row.executed is not None and row.executed <= most, row


@pytest.mark.parametrize("version", ["3.6", "3.8", "3.9"])
def test_int8_passes_do_so_on_older_chips_too(version: str) -> None:
    for chip in ("sm_80", "sm_86"):
        for row in accepted("quantize_rows_kernel", "int8 gelu", chip, version):
            assert row.executed is not None and row.executed <= 25 and row.load == 16, row


@pytest.mark.parametrize("words", ["nvfp4 gelu", "nvfp4-beside gelu"])
@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_nvfp4_takes_few_where_the_chip_rounds_to_its_codes(version: str, words: str) -> None:
    for chip in ("sm_100", "sm_120"):
        for row in accepted("quantize_blocks_kernel", words, chip, version):
            assert row.executed is not None and row.executed <= 36, row


@pytest.mark.slow
def test_a_recompiled_pass_has_the_accepted_counts() -> None:
    cell = next(c for c in aot.all_cells(["quantize_activation"]) if c.format == "fp8 gelu 12288")
    row = aot.compile_cell(cell, "sm_90")
    (before,) = accepted("quantize_rows_kernel", "fp8 gelu 12288", "sm_90", minor(triton.__version__))
    assert row == before and row.warps and row.warps >= 16
