"""The dialects: which program reads which layout, what of ours each holds, and where a file says so.

`encode` and `decode` of a row are about one layer; names of layers, containers and configurations are others' work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fluxq.quantize.exchange import bfl, bnb, comfy, compressed_tensors, gguf, legacy, modelopt, nunchaku, torchao
from fluxq.quantize.exchange.layer import Encoded, Plain, QuantTensors, Row

Decode = Callable[[Mapping[str, Tensor], tuple[int, int], Mapping[str, Any]], QuantTensors | Plain]


@dataclass(frozen=True)
class Dialect:
    """encode: None where files are only read. rows: its formats. names: of the layers in a file, "diffusers" or
    "original". container: what a model is written as. marked_by: what tells the format of a layer.
    """

    about: str
    encode: Callable[..., Encoded] | None
    decode: Decode
    rows: tuple[Row, ...]
    names: str
    container: str
    marked_by: str


DIALECTS = {
    "bfl": Dialect(
        "Black Forest Labs' fp8r and nvfp4, for stock diffusers",
        bfl.encode,
        bfl.decode,
        bfl.ROWS,
        "diffusers",
        "file",
        "tensors: weight_scale_2 is nvfp4",
    ),
    "modelopt": Dialect(
        "NVIDIA ModelOpt's unified checkpoint",
        modelopt.encode,
        modelopt.decode,
        modelopt.ROWS,
        "diffusers",
        "folder",
        "config.json: quant_algo",
    ),
    "comfy": Dialect(
        "ComfyUI's single files",
        comfy.encode,
        comfy.decode,
        comfy.ROWS,
        "original",
        "file",
        "comfy_quant tensors, _quantization_metadata",
    ),
    "torchao": Dialect(
        "torchao's tensor subclasses, for diffusers' from_pretrained",
        torchao.encode,
        torchao.decode,
        torchao.ROWS,
        "diffusers",
        "folder",
        "JSON in the header, under each weight",
    ),
    "nunchaku_lite": Dialect(
        "nunchaku's kernels under diffusers' own blocks",
        nunchaku.encode,
        nunchaku.decode,
        nunchaku.ROWS,
        "diffusers",
        "folder",
        "config.json: targets",
    ),
    "nunchaku": Dialect(
        "nunchaku's single files",
        partial(nunchaku.encode, single_file=True),
        nunchaku.decode,
        nunchaku.ROWS,
        "nunchaku",
        "file",
        "quantization_config in the header",
    ),
    "compressed_tensors": Dialect(
        "llm-compressor's text encoders",
        compressed_tensors.encode,
        compressed_tensors.decode,
        compressed_tensors.ROWS,
        "diffusers",
        "folder",
        "config.json: config_groups",
    ),
    "gguf": Dialect("llama.cpp's blocks", None, gguf.decode, (), "original", "GGUF file", "type of each tensor"),
    "bnb": Dialect("bitsandbytes' NF4", None, bnb.decode, (), "diffusers", "folder", "quant_state tensors"),
    "legacy": Dialect(
        "ComfyUI's fp8 of before comfy_quant", None, legacy.decode, legacy.ROWS, "original", "file", "scaled_fp8 tensor"
    ),
}
