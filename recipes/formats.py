"""Number formats: one row of data each. The only file that knows what a format *is*; imports no torch.

A format splits a matrix (rows, K) into blocks of `block = (n, k)` elements (0 = the whole axis) that share
one scale. A code c of the element type, a block scale s and, in two-level formats, a global scale g decode to

    value = c · s            or            value = c · (s · g)

Rows of a weight are output features, rows of an activation are tokens; everything is packed along K, the even
element in the low nibble, scales row-major.

Sources: OCP Microscaling Formats (MX) v1.0 for mxfp8, mxfp4 and E8M0; NVIDIA's NVFP4 recipe (two-level
scaling, E4M3 block scales of 16) as NVIDIA ModelOpt writes it; DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) for
fp8_1x128, its tiles of activations, and fp8_128x128, its blocks of weights.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from fluxq.base.console import did_you_mean


@dataclass(frozen=True)
class Element:
    """Describe one code: a sign, `exponent` bits, `mantissa` bits, and the torch dtype that stores it.

    bits: of a code; 4-bit elements are stored two to a byte (uint8).
    max: the largest magnitude that encoding produces; float codes beyond it are infinities and NaN.
    exponent: 0 for an integer, whose mantissa is then all bits but the sign.
    bias: a code with exponent bits e and mantissa fraction f means (1 + f) · 2^(e - bias); with e = 0 it means
        f · 2^(1 - bias).
    low: the smallest code value where it is not -max.
    """

    name: str
    bits: int
    max: float
    storage: str
    exponent: int
    mantissa: int
    bias: int = 0
    low: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the fields contradict one another."""
        if self.bits != 1 + self.exponent + self.mantissa:
            raise ValueError(
                f"element {self.name}: {self.bits} bits are not a sign, {self.exponent} exponent bits and "
                f"{self.mantissa} mantissa bits; correct its row"
            )
        if not self.is_integer and self.max not in self._magnitudes:
            raise ValueError(f"element {self.name}: no code means its max of {self.max:g}; correct its row")

    @property
    def is_integer(self) -> bool:
        return self.exponent == 0

    @property
    def smallest_normal(self) -> float:
        """The power of two below which neighbours keep their distance."""
        return 2.0 ** (1 - self.bias)

    @property
    def largest_power(self) -> float:
        """The largest power of two not above `max`."""
        return 2.0 ** (math.frexp(self.max)[1] - 1)

    @property
    def largest_step(self) -> float:
        """The distance of `max` from the code below."""
        return 1.0 if self.is_integer else self.largest_power * 2.0**-self.mantissa

    @property
    def clips_at(self) -> float:
        """The magnitude at which a code above `max` would be the nearest: from there on values are clipped."""
        return self.max + self.largest_step / 2

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """The numbers of a float element's positive codes, in rising order: the code is the place."""
        return self._magnitudes[: self._magnitudes.index(self.max) + 1]

    @property
    def has_nan(self) -> bool:
        """True if some codes are not numbers."""
        return not self.is_integer and self._magnitudes[-1] != self.max

    @property
    def _magnitudes(self) -> tuple[float, ...]:
        """Of each positive code the number that its bits would mean if none were set apart."""
        ones = 1 << self.mantissa
        small = [f / ones * self.smallest_normal for f in range(ones)]
        normal = [(1 + f / ones) * 2.0 ** (e - self.bias) for e in range(1, 1 << self.exponent) for f in range(ones)]
        return (*small, *normal)


@dataclass(frozen=True)
class Format:
    """A row of FORMATS.

    name: its spelling in recipes and files.
    element: the code type.
    block: (n, k) elements per scale, 0 = whole axis. Blocks of several rows may be cut off at the last row and column.
    scale: type of the stored block scale ("fp32", "bf16", "e4m3", "e8m0").
    rule: of the scale from the block: "amax" (amax / element max), "ceil" (the smallest power of two that does not
        saturate), "least_squares" (the power of two, of three, with the least squared error).
    two_level: block scales are relative to one fp32 global scale per tensor.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: str
    rule: str
    two_level: bool
    about: str

    @property
    def group_size(self) -> int:
        """Elements of K that share a scale; 0 means the whole row."""
        return self.block[1]

    @property
    def spans_rows(self) -> bool:
        """True if blocks hold several rows, but not all: weights alone have such scales, (⌈N/n⌉, ⌈K/k⌉)."""
        return self.block[0] > 1

    @property
    def unit(self) -> int:
        """Number that K must be a multiple of: whole groups and whole bytes."""
        return 1 if self.spans_rows else self.group_size or 8 // self.element.bits

    @property
    def has_tensor_scale(self) -> bool:
        """True if one scale belongs to the whole matrix: nvfp4's global scale, the only one of fp8_tensor.

        Activations can have it from calibration, and weights that files join must share it.
        """
        return self.two_level or self.block == (0, 0)

    @property
    def has_byte_scales(self) -> bool:
        """True if blocks have scales of a byte, which Blackwell's matrix units read in an order of their own."""
        return self.group_size > 0 and SCALE_BITS[self.scale] == 8

    @property
    def has_row_scale(self) -> bool:
        """True if each row has one fp32 scale, which takes any factor in."""
        return self.block == (1, 0)

    def with_group_size(self, group_size: int | None) -> Format:
        """Return the format with another group size, which only int4 allows; `None` keeps the row's own."""
        if group_size is None or group_size == self.group_size:
            return self
        if self.name != "int4" or group_size not in INT4_GROUP_SIZES:
            cure = "leave it out, or write `group_size: null` where `extends` has one"
            fixed = f"fixed at {self.group_size or 'the row'}; {cure}"
            allowed = "64 or 128" if self.name == "int4" else fixed
            raise ValueError(f"group_size {group_size} is not offered for {self.name}: it is {allowed}")
        return dataclasses.replace(self, name=f"{self.name}_g{group_size}", block=(1, group_size))

    def check_shape(self, rows: int, k: int, name: str) -> None:
        """Raise ValueError if a (rows, k) matrix called `name` cannot be held in this format."""
        if rows == 0 or k == 0 or k % self.unit:
            raise ValueError(
                f"{name}: shape ({rows}, {k}) does not fit {self.name}, which needs K in multiples of "
                f"{self.unit}; exclude this layer in the recipe or give it a per-row format (fp8, int8)"
            )

    def scale_shape(self, rows: int, k: int) -> tuple[int, ...]:
        """Return the shape of the block scales of a (rows, k) matrix: (N, G), (N,) of a row each, () of all."""
        n, group = self.block
        if n == 0:
            return ()
        return (-(-rows // n), -(-k // group)) if group else (rows,)

    def stored_bits(self, rows: int, k: int) -> int:
        """Return the bits stored for a (rows, k) matrix: codes, block scales and the global scale."""
        scales = math.prod(self.scale_shape(rows, k)) * SCALE_BITS[self.scale]
        return rows * k * self.element.bits + scales + (32 if self.two_level else 0)


@dataclass(frozen=True)
class Scheme:
    """Scheme of one Linear: its storage and arithmetic. Its text form is a key of `quantization_config.layers`.

    activations: None computes with 16-bit activations.
    static_input: the one scale of all activations was calibrated (`has_tensor_scale`) and is stored as `input_scale`;
        otherwise each token gets its own in nvfp4, and all that are multiplied together one in fp8_tensor.
    rank: of the 16-bit low-rank branch beside the quantized weight, which reads x itself.
    four_over_six: nvfp4 activations choose between two scales for each block.

    The steps on x before it is rounded, in this order; False or 0 is none:

    center: subtracts a mean.
    smooth: multiplies each channel.
    deflate: takes so many principal directions out and computes them in 16 bit.
    hadamard: rotates blocks of that size, by Sylvester's matrix or, if `regular`, by the one whose rows have one sum.
    """

    weights: Format
    activations: Format | None
    static_input: bool = False
    rank: int = 0
    center: bool = False
    smooth: bool = False
    deflate: int = 0
    hadamard: int = 0
    regular: bool = False
    four_over_six: bool = False

    def __str__(self) -> str:
        activations = self.activations.name if self.activations else "16bit"
        parts = [self.weights.name, activations]
        parts += ["static"] * self.static_input + ["center"] * self.center + ["smooth"] * self.smooth
        rotation = "hr" if self.regular else "h"
        parts += [f"{letter}{size}" for letter, size in (("d", self.deflate), (rotation, self.hadamard)) if size]
        parts += ["46"] * self.four_over_six + [f"r{self.rank}"] * bool(self.rank)
        return "-".join(parts)

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read the text form; ValueError for a text that this version does not know."""
        match = _SCHEME.fullmatch(text)
        if not match:
            raise ValueError(f"unknown quantization scheme {text!r}: a newer fluxq may be needed to read it")
        scheme = cls(
            find_format(match["weights"]),
            None if match["activations"] == "16bit" else find_format(match["activations"]),
            static_input=bool(match["static"]),
            rank=int(match["rank"] or 0),
            center=bool(match["center"]),
            smooth=bool(match["smooth"]),
            deflate=int(match["deflate"] or 0),
            hadamard=int(match["hadamard"] or 0),
            regular=bool(match["regular"]),
            four_over_six=bool(match["four_over_six"]),
        )
        row = scheme.activations
        if row and row.spans_rows:
            raise ValueError(f"scheme {text!r}: {row.name} has scales for blocks of rows, which tokens do not share")
        if scheme.static_input and not (row and row.has_tensor_scale):
            raise ValueError(f"scheme {text!r}: only nvfp4 and fp8_tensor activations have a static input scale")
        if scheme.four_over_six and not (row and row.two_level):
            raise ValueError(f"scheme {text!r}: only two-level activations have 4-over-6")
        if scheme.hadamard not in (0, *hadamards(scheme.regular)):
            sizes = ", ".join(map(str, hadamards(scheme.regular)))
            raise ValueError(f"scheme {text!r}: {'regular ' * scheme.regular}Hadamard blocks have {sizes} columns")
        if str(scheme) != text:  # int4_g64, digits of another script
            raise ValueError(
                f"unknown quantization scheme {text!r}: it is written {str(scheme)!r}; correct config.json"
            )
        return scheme

    @property
    def formats(self) -> tuple[str, str | None]:
        """Names of the formats of weights and activations, without what fitting adds; None for 16 bit."""
        return self.weights.name, self.activations.name if self.activations else None

    @property
    def features(self) -> tuple[str, ...]:
        """Features that a reader of the checkpoint must know besides formats; `required_features` lists them."""
        return tuple(name for name, field in FEATURES.items() if getattr(self, field))

    @property
    def weight_only(self) -> Scheme:
        """The scheme of the same stored weight whose activations keep their 16 bit."""
        return dataclasses.replace(self, activations=None, static_input=False, four_over_six=False)

    @property
    def is_transformed(self) -> bool:
        """True if x is transformed before it is rounded."""
        return bool(self.center or self.smooth or self.deflate or self.hadamard)

    def stored_bits(self, n: int, k: int) -> int:
        """Return the bits stored for an (n, k) weight.

        They count codes, scales, `input_scale`, low-rank branches, the vectors of x, and the bias where centring adds
        to it.
        """
        bits = self.weights.stored_bits(n, k) + 32 * self.static_input + 16 * (self.rank + self.deflate) * (n + k)
        return bits + 16 * k * (self.center + self.smooth) + 16 * n * self.center


def hadamards(regular: bool) -> tuple[int, ...]:
    """Return the sizes that blocks of a Hadamard matrix have."""
    return REGULAR_HADAMARDS if regular else HADAMARDS


def find_format(name: str) -> Format:
    """Return the row called `name`, also int4 with another group size (`int4_g128`); ValueError with a hint."""
    if name in FORMATS:
        return FORMATS[name]
    base, _, group = name.rpartition("_g")
    if base in FORMATS and group.isascii() and group.isdigit():
        return FORMATS[base].with_group_size(int(group))
    raise ValueError(f"unknown format {name!r}{did_you_mean(name, FORMATS)}; formats: {', '.join(FORMATS)}")


def for_tokens(row: Format) -> Format:
    """Return the format of activations beside weights of a format: itself, or that of its groups in one row."""
    matches = (each for each in FORMATS.values() if each.block == (1, row.group_size) and each.element == row.element)
    return next(matches) if row.spans_rows else row


INT4_GROUP_SIZES = (64, 128)
Product = tuple[str, int, int, int]  # weights-activations, or BF16; M, N and K
BF16 = "bf16"  # a product in 16 bit
HADAMARDS = (16, 32, 64, 128)  # sizes of Sylvester's matrix
REGULAR_HADAMARDS = (16, 64, 256)
# Feature that a checkpoint requires of its readers -> the field of a Scheme for it.
FEATURES = {
    **{"static_input_scale": "static_input", "low_rank": "rank", "center": "center", "smooth": "smooth"},
    **{"deflation": "deflate", "hadamard": "hadamard", "four_over_six": "four_over_six"},
    "regular_hadamard": "regular",
}
_SCHEME = re.compile(
    r"(?P<weights>[^-]+)-(?P<activations>[^-]+)(?P<static>-static)?(?P<center>-center)?(?P<smooth>-smooth)?"
    r"(?:-d(?P<deflate>[1-9]\d{0,5}))?(?:-h(?P<regular>r)?(?P<hadamard>[1-9]\d{1,2}))?(?P<four_over_six>-46)?(?:-r(?P<rank>[1-9]\d{0,5}))?"
)
SCALE_BITS = {"fp32": 32, "bf16": 16, "e4m3": 8, "e8m0": 8}

ELEMENTS = {
    row.name: row
    for row in (
        Element("e2m1", bits=4, max=6.0, storage="uint8", exponent=2, mantissa=1, bias=1),
        Element("e4m3", bits=8, max=448.0, storage="float8_e4m3fn", exponent=4, mantissa=3, bias=7),
        Element("e5m2", bits=8, max=57344.0, storage="float8_e5m2", exponent=5, mantissa=2, bias=15),
        Element("int8", bits=8, max=127.0, storage="int8", exponent=0, mantissa=7),
        Element("int4", bits=4, max=7.0, storage="uint8", exponent=0, mantissa=3, low=-8.0),
    )
}

FORMATS = {
    row.name: row
    for row in (
        Format("fp8", ELEMENTS["e4m3"], (1, 0), "fp32", "amax", False, "E4M3, one scale per row"),
        Format("fp8_tensor", ELEMENTS["e4m3"], (0, 0), "fp32", "amax", False, "E4M3, one scale per tensor"),
        Format("fp8_1x128", ELEMENTS["e4m3"], (1, 128), "fp32", "amax", False, "E4M3, one fp32 scale per 128"),
        Format("fp8_128x128", ELEMENTS["e4m3"], (128, 128), "fp32", "amax", False, "E4M3, one fp32 scale per 128x128"),
        Format("mxfp8", ELEMENTS["e4m3"], (1, 32), "e8m0", "ceil", False, "E4M3, power of two per 32"),
        Format("mxfp4", ELEMENTS["e2m1"], (1, 32), "e8m0", "least_squares", False, "E2M1, power of two per 32"),
        Format("nvfp4", ELEMENTS["e2m1"], (1, 16), "e4m3", "amax", True, "E2M1, E4M3 per 16, fp32 global"),
        Format("fp8_e5m2", ELEMENTS["e5m2"], (1, 0), "fp32", "amax", False, "E5M2, one scale per row"),
        Format("int8", ELEMENTS["int8"], (1, 0), "fp32", "amax", False, "symmetric 8-bit integer per row"),
        Format("int4", ELEMENTS["int4"], (1, 64), "bf16", "amax", False, "symmetric 4-bit integer per 64"),
    )
}
