"""Tests of what a dialect can hold, before there is a checkpoint."""

from __future__ import annotations

import pytest

from fluxq import tiny
from fluxq.base.model import ModelFolder
from fluxq.quantize.exchange.dialects import joined_modules, misfit, misfit_beside
from fluxq.quantize.structure import list_linears
from fluxq.recipes.formats import Scheme


@pytest.mark.parametrize(
    ("dialect", "scheme", "words"),
    [
        ("comfy", "nvfp4-nvfp4-static", ""),
        ("comfy", "fp8-fp8", "comfy has no format for fp8 weights"),
        ("modelopt", "int8-int8", "W8A8_SQ_PER_CHANNEL needs input_scale"),
        ("torchao", "fp8-fp8", ""),
    ],
)
def test_formats_of_a_dialect(dialect, scheme, words) -> None:
    found = misfit(Scheme.parse(scheme), (128, 128), dialect)
    assert words in found and bool(words) == bool(found)


def test_formats_that_no_reader_takes_together() -> None:
    nvfp4, fp8, fp8_tensor = map(Scheme.parse, ("nvfp4-nvfp4-static", "fp8-fp8", "fp8_tensor-fp8_tensor-static"))
    assert "beside NVFP4" in misfit_beside(fp8, nvfp4, (128, 128), "modelopt")
    assert misfit_beside(fp8_tensor, nvfp4, (128, 128), "modelopt") == ""
    assert misfit_beside(fp8, nvfp4, (128, 128), "torchao") == ""


def test_layers_that_share_a_tensor() -> None:
    names = [linear.name for linear in list_linears(ModelFolder("tiny", tiny.path()), "transformer")]
    block = "single_transformer_blocks.0"
    parts = tuple(f"{block}.{name}" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
    assert parts in joined_modules("comfy", "flux", names)
    assert joined_modules("torchao", "flux", names) == []
