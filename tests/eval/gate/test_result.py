"""Tests of the files in which a gate says its result."""

from fluxq.eval.gate.result import GateResult, markdown


def test_a_prompt_is_no_markup_in_a_comment():
    reason = "psnr: the image of 'a <b>red</b> #1 | _cube_', seed 3, is far beyond all of the floor's: look at it"
    result = GateResult(
        fluxq="0.1.0",
        created="2025-01-02T03:04:05+00:00",
        verdict="cannot tell",
        reasons=(reason,),
        a={"name": "before"},
        b={"name": "after"},
        floor=None,
        identical=False,
        images=8,
        looks=(8,),
        prompts_digest="ab",
        call={},
        metrics={},
        values={},
        floor_values={},
        machine=None,
        versions={},
        seconds=1.0,
    )
    (line,) = [line for line in markdown(result).splitlines() if line.startswith("- ")]
    assert r"'a \<b\>red\</b\> \#1 \| \_cube\_', seed 3" in line
