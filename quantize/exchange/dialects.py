"""The dialects: which program reads which layout, what of ours each holds, and which of them a file is.

A file's is told by the marks of dialects, and by names, dtypes and shapes where there are none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.kernels.tensor import stored_shapes
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
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.layer import Decoded, QuantTensors
from fluxq.quantize.exchange.layouts import padded_tiles
from fluxq.quantize.exchange.marks import NATIVE, PLAIN, Headers, by_config, has_codes
from fluxq.quantize.exchange.rows import Row, row_for
from fluxq.recipes.computing import QUANT_METHOD
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymaps import original_names

# Of two marks in one file that of the dialect further on is the surer one.
_MODULES = (bfl, modelopt, legacy, comfy, bnb, fp8_blocks, compressed_tensors, torchao, nunchaku, nunchaku_file, gguf)
DIALECTS = {module.DIALECT.name: module.DIALECT for module in _MODULES}
WRITERS = {name: dialect.writer for name, dialect in DIALECTS.items() if dialect.writer is not None}


def dialect_of(model: Headers) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(dialect, what tells it, what speaks for another, dialects among which nothing in the file decides)."""
    matches = [(each.name, words) for each in _BY_MARK for mark in each.marks if (words := mark(model))]
    if not matches:
        return _unmarked(model)
    rules = RULES[matches[0][0]]
    mine = tuple(words for other, words in matches if other == rules.name)
    against = tuple(f"{words}, as {other} has it" for other, words in matches if other != rules.name)
    doubts = tuple(rules.doubts(model, {other for other, _ in matches}))
    return rules.name, mine, against + doubts, (rules.name,) if set(rules.unsettled) & set(doubts) else ()


def _unmarked(model: Headers) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    quantized = [
        stored
        for parts in model.groups.values()
        if has_codes(stored := {suffix: model.stored[name] for suffix, name in parts.items()})
    ]
    if not quantized:
        return PLAIN, ("no tensor has codes",), (), ()
    is_original = any(map(_PACKED.search, model.groups))
    scales = _scales_of(quantized, is_original)
    evidence, *dialects = _UNMARKED[scales]
    words = f"no mark; {evidence}"
    if scales == "none":
        others = sorted({suffix for parts in model.groups.values() for suffix in parts} - {"weight", "bias"})
        listing = f": {others}" if others else ""
        words = f"8-bit floats, and nothing that is known as their scale{listing}: a plain cast"
    among = ("tiles", "matrix") if scales == "undecided" else ()
    against = (UNDECIDED,) if among else ()
    return dialects[is_original], (words,), against, tuple(_UNMARKED[each][1 + is_original] for each in among)


def _scales_of(quantized: list[dict[str, Stored]], is_original: bool) -> str:
    """The scales of layers, a key of `_UNMARKED`."""
    scaled = [(stored["weight_scale"].shape, stored) for stored in quantized if "weight_scale" in stored]
    if not scaled:
        return "none"
    tiles = matrix = False
    for scale, stored in scaled:
        weight = stored.get("weight")
        if "weight_scale_2" in stored and weight and len(scale) == len(weight.shape) == 2:
            blocks = weight.shape[0], weight.shape[1] // 8
            tiles |= scale != blocks
            matrix |= scale != padded_tiles(*blocks)
    if tiles != matrix:
        return "tiles" if tiles else "matrix"
    columns = any(s["weight"].shape and shape == (s["weight"].shape[0], 1) for shape, s in scaled if "weight" in s)
    if columns and not is_original:
        return "column"
    if any("weight_scale_2" in stored for stored in quantized):
        return "undecided"
    return "rows" if any(len(shape) == 1 and shape[0] > 1 for shape, _ in scaled) else "one level"


def other_program(model: Headers) -> str:
    """The program whose layers no dialect has, by `quant_method` of config.json or by its tensors; "" if none is."""
    method = model.quantization.get("quant_method")
    if method is not None and not any(method in dialect.methods for dialect in RULES.values()):
        return str(method)[:80]
    for program, (first, *others) in _OTHERS:
        layers = [name.removesuffix(first) for name in model.stored if name.endswith(first)]
        if any(all(layer + other in model.stored for other in others) for layer in layers):
            return program
    return ""


def grouped(stored: Mapping[str, Stored]) -> dict[str, dict[str, str]]:
    """Module -> suffix -> name of the tensor, of all tensors that a quantized layer may have."""
    groups: dict[str, dict[str, str]] = {}
    for name in stored:
        hit = _NAME.fullmatch(name)
        if hit:
            groups.setdefault(hit["module"], {})[hit["suffix"]] = name
    return groups


# --- limits on the formats of a plan, before there is a checkpoint


def misfit(scheme: Scheme, shape: tuple[int, int], dialect: str, rows: Sequence[Row] = (), main: str = "") -> str:
    """Return the reason why no format of the dialect, or none of `rows`, holds a layer; empty if one does.

    main: the dialect's format of the main layers beside which it would be written.
    """
    try:
        row, _ = row_for(QuantTensors({}, shape, scheme), rows or DIALECTS[dialect].rows, dialect)
    except ValueError as error:
        return str(error)
    return "" if main and row.beside == main else row.unread


def misfit_beside(scheme: Scheme, main: Scheme, shape: tuple[int, int], dialect: str) -> str:
    """Return the reason why no reader of the dialect takes a layer beside main layers; empty if one does.

    Both schemes are ones that the dialect holds.
    """
    rules = DIALECTS[dialect]
    if rules.unreadable is None:
        return ""
    name, main_name = (row_for(QuantTensors({}, shape, each), rules.rows, dialect)[0].name for each in (scheme, main))
    return rules.unreadable(name, {main_name}, False)


def joined_modules(dialect: str, family: str, modules: Collection[str]) -> list[tuple[str, ...]]:
    """Return the Linears that share a tensor, and so a format, in the dialect's files; not those that stand alone.

    modules: all of the model.
    """
    if DIALECTS[dialect].names != "original":
        return []
    return [joined.parts for joined in original_names(family, modules) if len(joined.parts) > 1]


# --- our own checkpoints, and models in 16 bit


def _decode(tensors: Mapping[str, Tensor], shape: tuple[int, int], entry: Mapping[str, Any]) -> Decoded:
    parts = dict(tensors)
    if "weight" in parts and parts["weight"].ndim == 3:  # text encoders' codes, `filed_shape`
        parts["weight"] = parts["weight"].squeeze(-1)
    scheme = Scheme.parse(entry["scheme"])
    for suffix, (size, dtype) in stored_shapes(scheme.weights, *shape).items():
        if suffix not in parts or (tuple(parts[suffix].shape), parts[suffix].dtype) != (size, dtype):
            raise ValueError(f"{entry['name']}: {scheme} asks for {suffix} {dtype} {size}; copy the file again")
    return QuantTensors(parts, shape, scheme)


def _entry(model: Headers, name: str, stored: Mapping[str, Stored]) -> dict[str, Any]:
    scheme = model.schemes.get(name)
    if scheme is None:
        raise ValueError("has codes, and config.json names no scheme for it; copy both files again")
    return {"scheme": str(scheme), "name": name}


_OURS = Dialect(
    NATIVE,
    "a checkpoint of fluxq",
    _decode,
    marks=(by_config(QUANT_METHOD),),
    methods=(QUANT_METHOD,),
    has_codes=partial(has_codes, sizes=(2, 3)),  # text encoders' are (N, K, 1)
    entry=_entry,
)
_IN_16_BIT = Dialect(PLAIN, "nothing in it is quantized", _decode, has_codes=lambda stored: False)
RULES = {dialect.name: dialect for dialect in (*DIALECTS.values(), _OURS, _IN_16_BIT)}
_BY_MARK = tuple(reversed([*DIALECTS.values(), _OURS]))  # the last is the surest
_OTHERS = (  # programs whose layers are not read here, by what follows a layer's name
    ("GPTQ or AWQ", (".qweight", ".qzeros")),
    ("quanto", (".weight._data", ".weight._scale")),
)
UNDECIDED = "nothing in the file says the order of nibbles and block scales; `--base` proves them"
SIGNS = {name for dialect in DIALECTS.values() for name in dialect.signs}
_UNMARKED = {  # scales -> what tells them, the dialect under diffusers' names, that under the published ones
    "none": ("", "legacy", "legacy"),
    "tiles": ("block scales have the shapes of padded tiles", "comfy", "comfy"),
    "matrix": ("block scales have the shapes of the weights", "modelopt", "bfl"),
    "column": ("scales have the shape of a column", "compressed_tensors", ""),
    "rows": ("by names and shapes alone", "modelopt", "bfl"),  # some layer has one for each row
    "one level": ("by names and shapes alone", "modelopt", "comfy"),
    "undecided": ("by names alone", "modelopt", "comfy"),
}
_SUFFIXES = (
    *("weight", "bias", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "pre_quant_mean"),
    *("deflate_basis", "deflate_out", "svdquant_lora_a", "svdquant_lora_b"),
    *(suffix for dialect in DIALECTS.values() for suffix in dialect.suffixes),
)
_NAME = re.compile(r"(?P<module>.+)\.(?P<suffix>" + "|".join(_SUFFIXES) + ")")
_PACKED = re.compile(r"(?:^|\.)(?:double_blocks|single_blocks|joint_blocks)\.|\.qkv$")
