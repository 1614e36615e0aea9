"""The type of a dialect: all that one program's files have of their own.

Each dialect is a value of it at the end of its own file; `dialects.py` lists them, and no other file knows one by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fluxq.base.tensors import Stored
from fluxq.quantize.exchange.containers import Writer
from fluxq.quantize.exchange.layer import Decoded, Encoded, Names, QuantTensors
from fluxq.quantize.exchange.marks import FileLayer, Headers, Mark, format_in_entry, has_codes, matrix_shape
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.exchange.rows import Row
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme
from fluxq.recipes.keymap_rows import Order
from fluxq.recipes.keymaps import Joined

Decode = Callable[[Mapping[str, Tensor], tuple[int, int], Mapping[str, Any]], Decoded]
Entry = Callable[[Headers, str, Mapping[str, Stored]], dict[str, Any]]
Shape = Callable[[Mapping[str, Stored], Mapping[str, Any]], tuple[int, int]]


@dataclass(frozen=True)
class OwnLinear:
    """A Linear of a program's own block. parts: of diffusers' block; none where the block is diffusers'.

    columns: "first", those of the attention, or "rest" of the only part; chunks: of a modulation. after_gelu: its input
    follows GELU.
    """

    parts: Names
    columns: Literal["", "first", "rest"] = ""
    chunks: int = 0
    after_gelu: bool = False


@dataclass(frozen=True)
class Unit:
    """One quantized Linear of a file. parts: modules of diffusers whose rows follow each other in it.

    block_linear: what the program's own blocks make of them.
    """

    name: str
    parts: Names
    order: Order = "as they are"
    block_linear: OwnLinear = OwnLinear(())


Units = tuple[list[Unit], list[Joined]]  # and the other tensors


@dataclass(frozen=True)
class Dialect:
    """The layout of one program's files, of which `encode` and `decode` are about one layer.

    In words
        about: whose files. names: of the layers in a file, "diffusers", "original" or its own. option: as commands
        spell the dialect, where not by its name.
    Telling its files from others
        marks: as `Mark` says. methods: values of quant_method. doubts: what speaks against it, given the dialects of
        other marks; unsettled: those of them that only a base can settle. signs: tensors that are no part of the model.
        suffixes: of tensors that only its layers have.
    Taking a file apart
        has_codes, entry, shape, format_of, row_of: of a layer. regroup: makes one layer of several of the file.
        removed, put_back: tensors that calibration took out of weights in 16 bit, and what makes the weight whole.
        identify: (family, names), None to go by config.json and names. parts_of: tensor -> those of diffusers.
        config_key: of the model's configuration in the header. refuse: why a file of other names cannot be imported.
    Its layers
        rows: its formats. tiles: shape in which block scales (N, G) are stored, swizzled; None: in the order of the
        matrix. has_nibbles: 4-bit codes are two to a byte. needs_input_scale: `decode` refuses nvfp4 without.
        bias_shift: what its kernels add behind GELU and take from the bias.
    Writing
        encode: None where files are only read; ValueError that says why there is no format for a layer. writer: of its
        container. takes_dtype: `encode` asks for the model's.
        ranks: all low-rank pairs of a file have one rank, a multiple of this; 0: each its own. units: Linears of a file
        that has blocks of its own, arranged as `arrange` says. unreadable: why no program reads a side layer's format
        beside those of main layers, (format, main formats, whether it is a modulation). note: on a layer of a class of
        models. format_key: of the format in an entry. why_larger: than the checkpoint. steps: note where some are kept
        at 16-bit activations.
    Faults for its readers
        faults: (kind, layer, what). left_out: end of a Linear's name -> why it often is in 16 bit.
    """

    name: str
    about: str
    decode: Decode
    names: str = "diffusers"
    option: str = ""

    marks: tuple[Mark, ...] = ()
    methods: Names = ()
    doubts: Callable[[Headers, Iterable[str]], Iterator[str]] = lambda model, others: iter(())
    unsettled: Names = ()
    signs: Names = ()
    suffixes: Names = ()

    has_codes: Callable[[Mapping[str, Stored]], bool] = has_codes
    entry: Entry = lambda model, name, stored: {}
    shape: Shape = matrix_shape
    format_of: Callable[[FileLayer], str] = format_in_entry
    row_of: Callable[[FileLayer], Row | None] | None = None
    regroup: Callable[[Headers], None] = lambda model: None
    removed: Names = ()
    put_back: Callable[[str, Tensor, Mapping[str, Tensor]], Tensor] = lambda module, weight, removed: weight
    identify: Callable[[Headers], tuple[Family, str] | None] = lambda model: None
    parts_of: Callable[[str], Names] | None = None
    config_key: str = ""
    refuse: Callable[[Headers], str] = lambda model: ""

    rows: tuple[Row, ...] = ()
    tiles: Callable[[int, int], tuple[int, int]] | None = None
    has_nibbles: bool = True
    needs_input_scale: bool = False
    bias_shift: float = 0.0

    encode: Callable[..., Encoded] | None = None
    writer: Writer | None = None
    takes_dtype: bool = False
    ranks: int = 0
    units: Callable[[NativeComponent], Units] | None = None
    arrange: Callable[[QuantTensors, OwnLinear], QuantTensors] = lambda layer, block_linear: layer
    unreadable: Callable[[str, set[str], bool], str] | None = None
    note: Callable[[Scheme, str], str] = lambda scheme, class_name: ""
    format_key: str = ""
    why_larger: str = ""
    steps: str = "every step rounds its activations there, here the first or last do not"

    faults: Callable[[Headers], Iterator[tuple[str, str, str]]] = lambda model: iter(())
    left_out: Mapping[str, str] = field(default_factory=dict)

    def row(self, layer: FileLayer) -> Row | None:
        """The format of a file's layer."""
        if self.row_of is not None:
            return self.row_of(layer)
        name = self.format_of(layer)
        return next((row for row in self.rows if row.name == name), None)
