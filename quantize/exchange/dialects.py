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
