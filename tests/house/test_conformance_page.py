"""docs/conformance.md lists every check of the suites, and what does not apply to quantized models with the reason."""

import inspect
from pathlib import Path

from conformance import Check

from tests.integrations import test_conformance_encoders as encoders
from tests.integrations import test_conformance_models as models
from tests.integrations import test_conformance_pipelines as pipelines

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
SUITES = {
    **models.SUITES,
    "Pipelines": pipelines.PIPELINES,
    "Text encoders": encoders.TRANSFORMERS + encoders.QUANTIZED,
}
# What the libraries' own suites ask for, why it is not so here, and the check that proves what happens instead.
INAPPLICABLE: list[tuple[str, str, Check]] = [
    ("every weight in the dtype that was asked for", "codes and scales keep theirs", models.dtypes),
    ("casts of a loaded model", "codes and scales would become other numbers: refused", models.casts),
    ("the same of text encoders", "the same", encoders.casts),
    ("casts of a pipeline; `from_pipe` of a class without `dtype`", "the same: refused", pipelines.casts),
    ("layerwise casting", "casts weights to fp8 and back: refused", models.layerwise),
    ("`fuse_qkv_projections`", "codes are not joined: refused", models.fuses_projections),
    ("`low_cpu_mem_usage=False`", "refused by diffusers", models.needs_memory_for_placeholders),
    ("saving what `from_config` made", "its configuration claims codes: refused on loading", models.from_config),
    ("fp32 where no dtype is said", "bf16, as other backends take", models.without_a_dtype),
    ("training of all weights", "codes have no gradient; the rest trains", models.trains),
    (
        "a footprint smaller by a set factor",
        "tiny models are mostly layers that stay; bytes are counted",
        models.footprint,
    ),
    ("every Linear is quantized", "recipes keep some; the excluded ones are asked for", models.excludes),
    ("fusing a LoRA adds to the weight", "it becomes a low-rank branch", models.adapters_fuse),
    ("streams", "need an accelerator: refused without one, in 16 bit too", models.streams),
    ("attention backends of accelerators", "refused without one, in 16 bit too", models.processors),
    ("device maps of classes that do not split", "refused by diffusers, in 16 bit too", models.device_maps),
    ("caches that fail in 16 bit, such as FasterCache", "the same error comes of both", pipelines.keeps_between_steps),
    ("batches equal to single images bit for bit", "nor in 16 bit: sums go another way", pipelines.batches),
    ("automatic classes that name layers otherwise", "refused by name; the saved class loads", encoders.auto_classes),
]


def test_the_page_lists_what_is_checked_and_what_does_not_apply(request):
    before, table, after = PAGE.read_text(encoding="utf-8").split("<!-- checks -->\n")
    written = "".join(
        f"\n## {suite}\n" + "".join(f"- {said(check)}\n" for check in checks) for suite, checks in SUITES.items()
    )
    written += "\n## What does not apply\n| | why | proved by |\n| --- | --- | --- |\n"
    written += "".join(f"| {what} | {why} | {said(check)} |\n" for what, why, check in INAPPLICABLE)
    assert all(any(check in checks for checks in SUITES.values()) for *_, check in INAPPLICABLE)
    if request.config.getoption("--write-features") and written != table:
        PAGE.write_text("<!-- checks -->\n".join([before, written, after]), encoding="utf-8")
        table = written
    assert written == table, "`pytest --write-features tests/house/test_conformance_page.py` updates it"


def said(check: Check) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(check) or "").splitlines()[0].rstrip(".")
