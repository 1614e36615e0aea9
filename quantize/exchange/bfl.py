"""Black Forest Labs' layers, as stock diffusers reads them with `BFLQuantizationConfig()`.

    fp8r     weight E4M3 [N, K], weight_scale F32 [N]
    nvfp4    weight U8 [N, K/2], weight_scale E4M3 [N, K/16], weight_scale_2 and input_scale F32 [], as ModelOpt's

A layer is nvfp4 where it has `weight_scale_2`, nothing else marks it, and both may stand in one file. Without
`input_scale` diffusers refuses nvfp4. BFL's FLUX.2 files are another dialect, ComfyUI's.

The header of BFL's FLUX.3 files says `quantization`: "fp8r" or "nvfp4". diffusers does not look at it; SGLang-Diffusion
asks for it. A file of ours with layers of both names both, "nvfp4+fp8r". Sources: diffusers 0.42.1, quantizers/bfl;
SGLang 0.5.23, multimodal_gen/runtime/pipelines/flux3_image_weights.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fluxq.base.files import sha256_file, write_json
from fluxq.base.model import ModelFolder
from fluxq.base.output import BESIDE
from fluxq.quantize.exchange import modelopt
from fluxq.quantize.exchange.containers import Contents, Writer, write_file
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, QuantTensors
from fluxq.quantize.exchange.marks import Headers
from fluxq.quantize.exchange.rows import Row, row_for

_MODELOPT = {"fp8r": "FP8_PER_CHANNEL_PER_TOKEN", "nvfp4": "NVFP4"}


def encode(layer: QuantTensors) -> Encoded:
    """Tensors and entry of a layer; ValueError that says why there is no format for it."""
    row, notes = row_for(layer, ROWS, "bfl")
    return Encoded(dict(layer.tensors), {"format": row.name}, notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any] = {}) -> Decoded:
    """The layer whose weight is (N, K) = shape; the tensors say which format it is."""
    name = "nvfp4" if "weight_scale_2" in tensors else "fp8r"
    if name == "nvfp4" and "input_scale" not in tensors:
        raise ValueError("bfl: the layer has weight_scale_2 and no input_scale, which diffusers requires")
    return modelopt.decode(tensors, shape, {"quant_algo": _MODELOPT[name]})


def metadata(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The header of a file, as BFL writes it. entries: by layer."""
    formats = {entry["format"] for entry in entries.values()}
    quantization = "+".join(sorted(formats, reverse=True))
    return {"quantization": quantization, **({"scale": "per_row_fp32"} if formats == {"fp8r"} else {"format": "pt"})}


def said_formats(header: Mapping[str, str]) -> frozenset[str]:
    """The formats that a file's header names; empty where it is not BFL's."""
    formats = frozenset(header.get("quantization", "").split("+"))
    return formats if formats <= {row.name for row in ROWS} else frozenset()


_READER = "diffusers"
ROWS = (
    Row("fp8r", "fp8", "fp8", also=(None,), read_by=f"{_READER}, SGLang-Diffusion"),
    Row("nvfp4", "nvfp4", "nvfp4", input_scale="required", read_by=_READER),
)


def _mark(model: Headers) -> str:
    """BFL's words; nvfp4 beside fused projections is what converters to ComfyUI's layout write too."""
    formats = said_formats(model.metadata)
    if not formats or ("nvfp4" in formats and any(map(_FUSED.search, model.groups))):
        return ""
    return f"the header says {model.metadata['quantization']}"


def _write(made: Path, name: str, checkpoint: ModelFolder, contents: Sequence[Contents]) -> None:
    """Write NAME.safetensors and NAME.config.json, which is what `from_single_file(config=…)` takes."""
    (one,) = contents
    beside = made / f"{name.removesuffix('.safetensors')}.config.json"
    write_json(beside, one.source.config)
    write_file(made, name, one, {**metadata(one.entries), BESIDE: json.dumps({".config.json": sha256_file(beside)})})


_FUSED = re.compile(r"\.(?:qkv|linear1)$")
DIALECT = Dialect(
    "bfl",
    "Black Forest Labs' fp8r and nvfp4, for stock diffusers",
    decode,
    marks=(_mark,),
    format_of=lambda layer: "nvfp4" if "weight_scale_2" in layer.parts else "fp8r",
    rows=ROWS,
    needs_input_scale=True,
    encode=encode,
    writer=Writer(_write, is_file=True, beside=(".config.json",)),
    format_key="format",
)
