"""The dialects: which program reads which layout, what of ours each holds, and where a file says so."""

from __future__ import annotations

from fluxq.quantize.exchange import (
    bfl,
    bnb,
    comfy,
    compressed_tensors,
    fp8_blocks,
    gguf,
    legacy,
    modelopt,
    nunchaku,
    nunchaku_file,
    torchao,
)

# Of two marks in one file that of the dialect further on is the surer one.
_MODULES = (bfl, modelopt, legacy, comfy, bnb, fp8_blocks, compressed_tensors, torchao, nunchaku, nunchaku_file, gguf)
DIALECTS = {module.DIALECT.name: module.DIALECT for module in _MODULES}
WRITERS = {name: dialect.writer for name, dialect in DIALECTS.items() if dialect.writer is not None}


def unmarked(scales: str, by_rows: bool, original: bool) -> str:
    """The dialect of a file without a mark.

    scales: "none"; "tiles" or "matrix", by the shapes of block scales; "column" (N, 1); "one level"; "undecided".
    by_rows: some layer has one scale for each row. original: modules go by the names that models are published under.
    """
    if scales in ("none", "tiles", "column"):
        return {"none": "legacy", "tiles": "comfy", "column": "compressed_tensors"}[scales]
    if not original:
        return "modelopt"
    return "bfl" if scales == "matrix" or (scales == "one level" and by_rows) else "comfy"
