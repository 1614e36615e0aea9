"""The dialects: which program reads which layout, what of ours each holds, and where a file says so.

READERS are the programs: how a file gets into each, and with which of them tests load what is written.
"""

from __future__ import annotations

from dataclasses import replace

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

# Of two marks in one file that of the dialect further down is the surer one.
DIALECTS = {
    module.DIALECT.name: module.DIALECT
    for module in (
        bfl,
        modelopt,
        legacy,
        comfy,
        bnb,
        fp8_blocks,
        compressed_tensors,
        torchao,
        nunchaku,
        nunchaku_file,
        gguf,
    )
}
WRITERS = {name: dialect.writer for name, dialect in DIALECTS.items() if dialect.writer is not None}
READERS = tuple(replace(reader, dialect=name) for name, dialect in DIALECTS.items() for reader in dialect.readers)
