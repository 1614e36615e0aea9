"""fp8 with a scale for each block of 128 rows by 128 columns, as DeepSeek, Qwen and transformers write it.

    weight E4M3 [N, K], weight_scale_inv F32, BF16 or E8M0 [⌈N/128⌉, ⌈K/128⌉], which multiplies in spite of its name
    activation_scale F32 [], only where `activation_scheme` of config.json is "static"

x is rounded with a scale for each 128 columns, or by activation_scale. Our format of the former has whole groups: a
layer whose K is not in groups is read with x in 16 bit. Sources: DeepSeek-V3, transformers' finegrained_fp8, SGLang
0.5.23's Fp8Config and Fp8LinearMethod of multimodal_gen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.containers import Contents, pipeline_writer
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, Encoded, QuantTensors
from fluxq.quantize.exchange.layouts import BLOCK
from fluxq.quantize.exchange.marks import Headers, by_config, by_tensor
from fluxq.quantize.exchange.rows import FLOATS, Row, Tensors, native, row_for

SCALES = (*FLOATS, torch.float8_e8m0fnu)


def encode(layer: QuantTensors) -> Encoded:
    """Tensors of a layer; ValueError that says why it is none of this dialect."""
    row, notes = row_for(layer, ROWS, "fp8_blocks")
    tensors = dict(layer.tensors)
    tensors["weight_scale_inv"] = tensors.pop("weight_scale")
    return Encoded(tensors, {"format": row.name, "block": [BLOCK, BLOCK]}, notes)


def decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    """The layer whose weight is (N, K) = shape.

    entry: {"block": `weight_block_size`, "activations": `activation_scheme`, "fmt": `fmt`} of config.json, or None for
    each.
    """
    size, scheme, element = entry.get("block"), entry.get("activations"), entry.get("fmt")
    if element not in (None, "e4m3"):
        raise ValueError(f"fp8_blocks: fmt {element!r} is not read here, e4m3 is; get the file with codes of that")
    if size not in (None, [BLOCK, BLOCK]):
        raise ValueError(f"fp8_blocks: weight_block_size {size!r} is not read here, [{BLOCK}, {BLOCK}] is")
    parts, done = Tensors(tensors, "fp8_blocks"), {}
    if scheme not in (None, "dynamic", "static"):
        raise ValueError(f"fp8_blocks: activation_scheme {scheme!r} is not read here, dynamic and static are")
    if (scheme == "static") != ("activation_scale" in parts) and scheme is not None:
        has = "an" if "activation_scale" in parts else "no"
        raise ValueError(f"fp8_blocks: activation_scheme is {scheme}, and the layer has {has} activation_scale")
    if "activation_scale" in parts:
        done["input_scale"] = parts.scale("activation_scale", FLOATS, (), (1,)).float().reshape(())
    row = STATIC if done else ROWS[0] if shape[1] % BLOCK == 0 else WEIGHT_ONLY
    return read_blocks(parts, shape, "weight_scale_inv", SCALES, row, done)


def read_blocks(
    parts: Tensors,
    shape: tuple[int, int],
    name: str,
    dtypes: tuple[torch.dtype, ...],
    row: Row,
    beside: Mapping[str, Tensor] = {},
) -> QuantTensors:
    """The layer of `weight` and the block scales `name`, (⌈N/128⌉, ⌈K/128⌉) or ModelOpt's (⌈N/128⌉, 1, ⌈K/128⌉, 1).

    A layer of one block may have its scale as (). Scales become fp32, which holds all of them. Nothing else may be left
    in `parts`. beside: further tensors of the layer.
    """
    done = {"weight": parts.take("weight", torch.float8_e4m3fn, shape), **parts.bias(shape[0]), **beside}
    rows, columns = (-(-size // BLOCK) for size in shape)
    one = [()] if rows == columns == 1 else []
    scale = parts.scale(name, dtypes, (rows, columns), (rows, 1, columns, 1), *one)
    parts.finish()
    done["weight_scale"] = scale.float().reshape(rows, columns)
    return native(row, shape, done)


def config(one: Contents) -> dict[str, Any]:
    """`quantization_config` of config.json: all Linears are in blocks but those named.

    SGLang looks for these names anywhere in a path, so that FLUX.1's `proj_out` would take each single block's with it.
    A name like that is left out: SGLang's FLUX.1 has its last Linear in 16 bit, whatever a file says.
    """
    paths = [f".{name}." for name in one.entries]
    in_16_bit = [name for name in one.in_16_bit if not any(f".{name}." in path for path in paths)]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": in_16_bit,
    }


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return what config.json says of a layer; ValueError where it says that the layer has no codes.

    `modules_to_not_convert` has paths of modules, or beginnings of them; as transformers reads them ends too, which
    are for others where a module has just that path.
    """
    config = model.quantization
    ignored = config.get("modules_to_not_convert")
    if not isinstance(ignored, list | None) or not all(isinstance(each, str) for each in ignored or ()):
        raise ValueError(
            f"fp8_blocks: modules_to_not_convert is {str(ignored)[:80]}, expected a list of names; get it again"
        )
    for each in ignored or ():
        ends = name.endswith(f".{each}") and f"{each}.weight" not in model.stored
        if name == each or name.startswith(f"{each}.") or ends:
            raise ValueError(
                f"fp8_blocks: modules_to_not_convert names {each!r}, and the layer has codes; get the file again"
            )
    return {
        "format": "fp8",
        "block": config.get("weight_block_size"),
        "activations": config.get("activation_scheme"),
        "fmt": config.get("fmt"),
    }


ROWS = (Row("fp8", "fp8_128x128", "fp8_1x128", also=(None,), multiples=(1, BLOCK), read_by="SGLang-Diffusion"),)
STATIC = Row("fp8", "fp8_128x128", "fp8_tensor", input_scale="required")  # these two are read, and not written
WEIGHT_ONLY = Row("fp8", "fp8_128x128", None)
DIALECT = Dialect(
    "fp8_blocks",
    "fp8 in blocks of 128 by 128, of transformers",
    decode,
    marks=(by_config("fp8"), by_tensor("weight_scale_inv")),
    methods=("fp8",),
    suffixes=("weight_scale_inv", "activation_scale"),
    entry=_entry,
    rows=ROWS,
    encode=encode,
    writer=pipeline_writer(config),
    format_key="format",
)
