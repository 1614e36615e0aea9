"""Proof of what a layer's bytes mean, against the 16-bit weight that they were rounded from.

No field of any file says in which order nibbles and block scales stand, or whether a scale multiplies or divides. So
each way to read them is tried on rows from all over the layer:

    error = ||W_read - W_base|| / ||W_base||

The right reading has the error of its format, about 0.1 in 4 bits and 0.03 in 8: that of the base itself, rounded to
the format, is the measure. Another order of nibbles has about 1.5, scales of other blocks 0.3 and more, and a scale
upside down whatever its square is. The best reading is then held against the whole base, and so is each row and column
of it. REPAIRS has a row for each way in which files are known to be wrong: it makes of such tensors those that the
dialect means, so that the dialect's own `decode` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.quantize.exchange.dialect import Dialect
from fluxq.quantize.exchange.files import ModelFile
from fluxq.quantize.exchange.layer import Decoded, QuantTensors, stacked
from fluxq.quantize.exchange.layouts import block_scales, in_order, padded, padded_tiles, swap_nibbles, unblock_scales
from fluxq.quantize.exchange.marks import CODES, GLOBAL_SCALES, FileLayer
from fluxq.quantize.exchange.rows import FLOATS
from fluxq.recipes.keymaps import Joined

WINDOW, WINDOWS = 128, 6  # rows that are read together, a tile of swizzled scales; and from how many places
DECLARED = "as declared"
FAR = 1.2  # a reading is told from another by so much more error
# Of the error of rounding to nearest. Fitted codes are near in the output; of all layers of the embedded pipeline, as
# the shipped recipes fit it, they had at most: nvfp4 1.49, nvfp4-max 1.39, int4 1.54, int4-svd 1.36, mxfp4 1.75,
# mxfp4-max 1.77 (medians 1.11 to 1.48).
_MARGIN = 2.0
_OF_A_LINE = 4.0  # the same for one row or column: fitted ones had up to 3.4
_LINES = {"rows": _OF_A_LINE, "columns": _OF_A_LINE, "blocks of 16": 7.0}
_PLAIN = 1.06  # of the error of rounding to nearest has what was rounded so and damaged: fitted codes mostly 1.15
_SURELY_PLAIN = 1.01  # ours, and other rules of rounding; codes that fitting hardly moved had 1.026
_MOVED = 0.25  # of the rows and of the columns have other codes where they were fitted, damage reaches fewer of one
_LINES_OF_PLAIN = {"rows": 2.0, "columns": 2.0, "blocks of 16": 2.5}  # of which parts had up to 1.2, 1.2 and 1.5
_FACTOR_OF_PLAIN = 0.006  # beside its own and 1, of 4 bits, which had 0.0025; 8 bits have that of one scale in bf16
_IN = {"rows": "row", "columns": "column", "blocks of 16": "row"}
_FOUR_BITS = 0.1  # the least bound of a format of 4 bits
_FACTOR = 0.02  # the most that rounding makes all weights larger or smaller, in 4 bits and more
_FACTOR_OF_8_BITS = 0.005  # the same in 8 and 16 bits; and of a row, where int8 of 128 numbers had up to 0.0038
_SAME = 0.004  # the most error of 16 bit, cast from one kind to the other: twice that of bf16
_CODED = 0.05  # of any codes: those of int8 may have been in fp8 before, as that was written meanwhile
_WIDENED = 0.2  # of 16 bit that were codes, of 4 bits too
_GAINED = 0.97  # of the error, at most, is left by factors that are no coincidence
_OF_BF16 = 2**-8
_FOLDED = 0.3  # the most error that factors of rows or columns leave
_SAME_FACTOR = 0.02
_ENOUGH = 32  # numbers, of which a factor is no coincidence
_TURNS = 4  # of rows and columns, in which their factors are found


class Repair(NamedTuple):
    """A way in which files are wrong.

    mend: (tensors of rows, dialect, (N, K) of these) -> the tensors as the dialect means them, None where the layer has
    nothing of the kind. cures_shape: it changes shapes or dtypes, so that without it `decode` refuses the layer.
    """

    about: str
    mend: Callable[[dict[str, Tensor], Dialect, tuple[int, int]], dict[str, Tensor] | None]
    cures_shape: bool = False


@dataclass(frozen=True)
class Factors:
    """Factors that would make the rows or columns of a layer right, or both. left: the error that then remains.

    rows (N,), columns (K,): None where these need none. sure: rows (N,) that rounding does not explain without a
    factor, be it that of 16 bit or of codes which a layer in 16 bit was before. few: only columns that rounding does
    not explain have factors; those of the others are 1.
    """

    left: float
    rows: Tensor | None = None
    columns: Tensor | None = None
    sure: Tensor | None = None
    few: bool = False

    @property
    def axes(self) -> str:
        """Words for what has factors."""
        return " and ".join(name for name in ("rows", "columns") if getattr(self, name) is not None)

    @property
    def by(self) -> Tensor:
        """All factors, (N, 1), (K,) or (N, K); 1 for rows or columns that were read as zeros."""
        rows, columns = (None if by is None else torch.where(by == 0, 1.0, by) for by in (self.rows, self.columns))
        if rows is None or columns is None:
            return rows[:, None] if rows is not None else columns if columns is not None else torch.ones(())
        return rows[:, None] * columns


@dataclass(frozen=True)
class Strays:
    """Rows, columns or blocks that rounding does not explain, though it explains the layer.

    words: how many and the first. lost: a factor for each would do. rows, columns: a mask (N,) or (K,), where they are
    whole ones.
    """

    words: str
    lost: bool = False
    rows: Tensor | None = None
    columns: Tensor | None = None


@dataclass(frozen=True)
class Against:
    """A layer beside the base's.

    errors: reading -> relative error, the best's of the whole layer, the others' of samples. best: the reading with the
    least, as names of REPAIRS and of an order of rows; empty where the layer is as declared. cosine: between that and
    the base. factor: by which the best reading, times it, comes nearest to the base. bound: the most error that
    rounding to the format explains; plausible: whether it does. factors: of columns or rows, that would explain the
    rest. strays: parts that rounding does not explain, though it explains the layer. products: sums over each column,
    (3, K), of the layer's squares, its products with the base, and the base's squares. widened: in 16 bit, and off as
    evenly as codes are. scaled: all of it, by more than rounding does. bias: (the layer's (N,), the base's), None where
    none was given to compare with.
    """

    errors: dict[str, float]
    best: tuple[str, ...]
    cosine: float
    factor: float
    bound: float
    plausible: bool
    factors: Factors | None = None
    strays: Strays | None = None
    products: Tensor | None = None
    widened: bool = False
    scaled: bool = False
    bias: tuple[Tensor, Tensor] | None = None

    def describe(self) -> dict[str, Any]:
        """The numbers, as JSON has them."""
        left = {} if self.factors is None else {"factors": self.factors.axes, "left": self.factors.left}
        names = ("errors", "best", "cosine", "factor", "bound", "plausible")
        strays = self.strays.words if self.strays else ""
        return {**{name: getattr(self, name) for name in names}, "error": self.error, "strays": strays, **left}

    @property
    def error(self) -> float:
        """Of the best reading."""
        return self.errors[" and ".join(self.best) or DECLARED]


@dataclass
class _Rows:
    """Rows of a layer, by window, and readings of them that were made already. at: which rows these are."""

    model: ModelFile
    layer: FileLayer
    windows: list[tuple[dict[str, Tensor], tuple[int, int]]]
    at: Tensor
    read: dict[tuple[str, ...], tuple[Tensor, Tensor | None] | None] = field(default_factory=dict)
    sample: Decoded | None = None  # of a window, by the first reading that could be made

    def reading(self, repairs: tuple[str, ...]) -> tuple[Tensor, Tensor | None] | None:
        """(W (rows, K), bias) under these repairs; None where one does not apply, or `decode` refuses the outcome."""
        if repairs not in self.read:
            self.read[repairs] = None
            try:
                parts = [self._window(tensors, shape, repairs) for tensors, shape in self.windows]
                whole = [part for part in parts if part is not None]
                if len(whole) == len(parts):
                    self.read[repairs] = stacked(whole)
            except ValueError:
                pass
        return self.read[repairs]

    def _window(
        self, tensors: dict[str, Tensor], shape: tuple[int, int], repairs: tuple[str, ...]
    ) -> tuple[Tensor, Tensor | None] | None:
        done = mended(tensors, repairs, self.model.rules, shape)
        if done is None:
            return None
        sample = self.model.decode(self.layer, done, shape)
        self.sample = self.sample or sample
        return sample.collapsed()

    def bound(self, truth: Tensor, by: Tensor | None = None) -> float:
        """The most error that rounding to the layer's format explains: that of the base's own rows, with a margin.

        by: as `rounded` has it.
        """
        return max(_MARGIN * _relative(self.rounded(truth, by), truth), _CODED)

    def plain(self, read: Tensor, truth: Tensor, by: float) -> tuple[float | None, bool]:
        """Round the base's rows to nearest, and return the error if a reading of them is just that; None if it is not.

        Also whether `by`, by which the reading comes nearest to the base, is off by more than ways of rounding differ.
        read, truth: of the whole layer.
        """
        if not isinstance(self.sample, QuantTensors) or self.has_branch:
            return None, False
        if self.sample.coarser is not None:  # whose programs rotate and scale in 16 bit, so that codes differ all over
            return None, False
        read, truth = read[self.at], truth[self.at]
        nearest = self.rounded(truth)
        (factor, _, left), (near, _, error) = _scale_of(nearest, truth), _scale_of(read, truth)
        if error > _PLAIN * left:
            return None, False
        if error > _SURELY_PLAIN * left:  # in damaged parts, or fitted nearly everywhere
            other = (read * near - nearest * factor).abs() > _OF_BF16 * nearest.abs()
            if min(float(other.any(axis).float().mean()) for axis in (0, 1)) > _MOVED:
                return None, False
        most = _FACTOR_OF_PLAIN if left > _FOUR_BITS / _MARGIN else _OF_BF16
        return left, not min(factor, 1) - most <= by <= max(factor, 1) + most

    @property
    def has_branch(self) -> bool:
        """True if a low-rank branch stands beside the codes."""
        return isinstance(self.sample, QuantTensors) and self.sample.scheme.rank > 0

    def explains_codes(self, read: Tensor, truth: Tensor) -> bool:
        """Tell whether rounding explains the difference to the base after division by the smoothing factors.

        It does not explain damaged factors. True where nothing was smoothed.
        """
        by = self.smoothing()
        if not by.ndim:
            return True
        some = truth[self.at]
        return _relative(read / by, truth / by) <= max(_MARGIN * _relative(self.rounded(some) / by, some / by), _CODED)

    def smoothing(self, by: Tensor | None = None) -> Tensor:
        """Return the factors that make the base's weights of codes, beside their scales: (), (K,) or (N, 1)."""
        factors = self.sample.tensors.get("pre_quant_scale") if isinstance(self.sample, QuantTensors) else None
        by = torch.ones((), dtype=torch.float32) if by is None else by
        return by if factors is None else by * factors.float()

    def rounded(self, truth: Tensor, by: Tensor | None = None) -> Tensor:
        """The base's rows in the layer's format. by: factors beside the layer's own that codes lack."""
        by = self.smoothing(by)
        if not isinstance(self.sample, QuantTensors):
            return _cast(truth / by, self.layer) * by
        scheme = self.sample.scheme
        weights, rotation = self.sample.coarser or scheme.weights, (scheme.hadamard, scheme.regular)
        one = None if weights.block[0] else self.sample.tensors["weight_scale"]  # which need not be this weight's own
        turned = rotate(truth / by, *rotation)
        return rotate(QuantizedTensor.quantize(turned, weights, tensor_scale=one).dequantize(), *rotation) * by


def prove(
    model: ModelFile,
    layer: FileLayer,
    tensors: Mapping[str, Tensor],
    base: Tensor,
    orders: Mapping[str, Tensor],
    bias: Tensor | None = None,
) -> Against | None:
    """Compare a layer with the weight that it should hold. None where no reading of it can be made.

    tensors: all of the layer. base: (N, K) in 16 bit or fp32; bias: its (N,). orders: name -> (N,) rows of the base in
    another order that files are known to have them in, such as k before q.
    """
    n, k = layer.shape
    whole, starts = _Rows(model, layer, [(dict(tensors), (n, k))], torch.arange(n)), _starts(n)
    rows = whole
    if not is_whole(tensors) and n > WINDOW * len(starts):
        ends = [(start, min(start + WINDOW, n)) for start in starts]
        windows = [(window(tensors, n, *span), (span[1] - span[0], k)) for span in ends]
        rows = _Rows(model, layer, windows, torch.cat([torch.arange(*span) for span in ends]))
    truth, tried = base[rows.at].float(), dict[tuple[str, ...], float]()

    def attempt(repairs: tuple[str, ...], order: str = "") -> None:
        read = rows.reading(repairs)
        if read is not None:
            against = base[orders[order][rows.at]].float() if order else truth
            tried[(*repairs, *([order] if order else []))] = _relative(read[0], against)

    attempt(())
    for name in REPAIRS:
        attempt((name,))
    for order in orders:
        attempt((), order)
    bound = rows.bound(truth) if rows.sample is not None else 0.0
    if min(tried.values(), default=torch.inf) > bound:
        able = [name for name in REPAIRS if () not in tried or (name,) in tried or REPAIRS[name].cures_shape]
        for pair in [*combinations(able, 2), *combinations(able, 3)]:
            attempt(pair)
        for name in able:
            for order in orders:
                attempt((name,), order)
    if not tried:
        return None
    bound = bound or rows.bound(truth)  # where only two repairs together make it readable
    best = min(tried, key=tried.__getitem__)
    if best and () in tried:
        gain = tried[best] / tried[()]
        if not gain * FAR < 1 or (tried[best] > bound and gain > 0.6):  # chance, or nothing that is known
            best = ()
    reading = whole.reading(tuple(name for name in best if name in REPAIRS))
    if reading is None:  # the samples can be read, not all
        return None
    (read, read_bias), order = reading, next((orders[name] for name in best if name in orders), None)
    rows.read, against = {}, (base if order is None else base[order]).float()  # one layer is memory enough
    tried[best] = _relative(read, against)
    errors = {" and ".join(label) or DECLARED: error for label, error in tried.items()}
    done = _against(errors, best, read, against, bound, rows)
    if bias is None:
        return done
    read_bias = torch.zeros(n, dtype=torch.float32) if read_bias is None else read_bias
    truth = (bias if order is None else bias[order]).float()
    if isinstance(rows.sample, QuantTensors) and "pre_quant_mean" in rows.sample.tensors:
        mean = rows.sample.tensors["pre_quant_mean"].float()
        read_bias = read_bias + (read - against) @ mean  # what is stored makes up for rounding W, and is itself rounded
        read_bias = truth if (read_bias - truth).norm() <= _SAME * (against @ mean).norm() else read_bias
    if model.rules.bias_shift:  # its program adds 1 to those of scales or takes a shift of x out, and rounds
        shift, off = (model.rules.bias_shift * weight.sum(1).abs() for weight in (against, read - against))
        read_bias = truth if ((read_bias - truth).abs() <= (1 + truth.abs() + shift) / 256 + off).all() else read_bias
    return replace(done, bias=(read_bias, truth))


def compare(
    weight: Tensor,
    base: Tensor,
    orders: Mapping[str, Tensor],
    bias: tuple[Tensor, Tensor] | None = None,
) -> Against:
    """A weight (N, K) that is in 16 bit beside the base's, and beside its rows in other orders.

    bias: (its own, the base's), (N,) each.
    """
    read = weight.float()
    errors = {DECLARED: _relative(read, base.float())}
    if errors[DECLARED] > _SAME:
        errors |= {name: _relative(read, base[rows].float()) for name, rows in orders.items()}
    best = min(errors, key=errors.__getitem__)
    best = best if errors[best] <= _SAME else DECLARED
    against = base if best == DECLARED else base[orders[best]]
    done = _against(errors, () if best == DECLARED else (best,), read, against.float(), _SAME)
    if bias is not None and best != DECLARED:
        bias = bias[0], bias[1][orders[best]]
    error = done.error
    is_even = error <= _WIDENED and done.factors is None and abs(done.factor - 1) <= largest_factor(error)
    if not done.plausible and not done.strays and is_even:
        done = replace(done, widened=_strays(read, against.float(), _MARGIN * error, None, None) is None)
    return replace(done, bias=bias)


def largest_factor(error: float) -> float:
    """Return the most that rounding with a relative error makes all weights larger or smaller."""
    return max(_FACTOR if error > _FOUR_BITS else _FACTOR_OF_8_BITS, error**2)


def _against(
    errors: dict[str, float],
    best: tuple[str, ...],
    read: Tensor,
    truth: Tensor,
    bound: float,
    rows: _Rows | None = None,
) -> Against:
    """Compare a reading (N, K) with the base's rows. rows: the layer's, to round the base as it was; None in 16 bit."""
    error = errors[" and ".join(best) or DECLARED]
    factor, cosine, alone = _scale_of(read, truth)
    plain, scaled = rows.plain(read, truth, factor) if rows is not None else (None, False)
    scaled = scaled or abs(factor - 1) > largest_factor(bound)
    plausible = error <= bound and not scaled and (rows is None or rows.explains_codes(read, truth))
    columns = _factors_of(read, truth, 0)
    wrong = _strays(read, truth, bound, rows, None, plain)
    factors = None
    if not plausible or wrong:
        # A factor that rounding may have is no explanation of an error that is too large everywhere.
        may_be_one = (scaled or wrong) and alone <= bound and cosine > 0
        one_would_do = may_be_one and not _strays(read * factor, truth, bound, rows, None)
        gained = 0.0 if one_would_do else _GAINED * alone
        either = [each for each in (columns, _factors_of(read, truth, 1)) if each]
        ways = sorted(either, key=lambda each: each.left)
        factors = next((each for each in ways if _explains(each, gained, read, truth, bound, rows)), None)
        if factors is None and gained:
            sample = rows.sample if rows is not None else None
            takes_any = isinstance(sample, QuantTensors) and sample.scheme.weights.has_row_scale
            both = _factors_of_both(read, truth, powers_of_two=not takes_any)
            factors = both if both is not None and _explains(both, gained, read, truth, bound, rows) else None
        if factors is not None:
            sure = wrong.rows if wrong and factors.columns is None else None
            if sure is not None and rows is None and factors.rows is not None:
                sure = sure & _are_multiples(read, truth, factors.rows)  # of codes that show in what is left
            factors = replace(factors, sure=sure)
        column_factors = None if columns is None else columns.columns
        if factors is None and plausible and wrong and wrong.columns is not None and column_factors is not None:
            by = torch.where(wrong.columns, column_factors, 1.0)
            if (by > 0).all() and not _strays(read * by, truth, bound, rows, by, plain):
                factors = Factors(_relative(read * by, truth), columns=by, few=True)
    strays = wrong if plausible and factors is None else None
    is_right = plausible and factors is None and not wrong
    if factors is not None and factors.rows is not None and factors.columns is not None:
        read = read * factors.rows[:, None]
    products = torch.stack([(a * b).sum(0) for a, b in ((read, read), (read, truth), (truth, truth))])
    return Against(errors, best, cosine, factor, bound, is_right, factors, strays, products, scaled=scaled)


def _explains(factors: Factors, gained: float, read: Tensor, truth: Tensor, bound: float, rows: _Rows | None) -> bool:
    """Tell whether rounding explains what factors leave of a difference from the base. gained: the most of it."""
    if factors.left >= gained:
        return False
    by = factors.by
    if rows is None:
        most = max(bound, min(_MARGIN * factors.left, _WIDENED))
    else:
        most = max(bound, min(rows.bound(truth[rows.at], by if by.ndim < 2 else by[rows.at]), _FOLDED))
    return factors.left <= most and not _strays(read * by, truth, most, rows, by)


def _scale_of(read: Tensor, truth: Tensor) -> tuple[float, float, float]:
    """The factor by which a reading comes nearest to the base, their cosine, and the error that then is left."""
    dot, read_square, truth_square = (
        sum(float((a * b).sum(dtype=torch.float64)) for a, b in zip(one.split(WINDOW), two.split(WINDOW), strict=True))
        for one, two in ((read, truth), (read, read), (truth, truth))
    )
    cosine = dot / ((read_square * truth_square) ** 0.5 or 1.0)
    return dot / (read_square or 1.0), cosine, max(0.0, 1 - cosine**2) ** 0.5


def _strays(
    read: Tensor,
    truth: Tensor,
    bound: float,
    rows: _Rows | None,
    by: Tensor | None,
    plain: float | None = None,
) -> Strays | None:
    """Find rows, columns or blocks of a row that are further from the base than rounding takes them; None without any.

    bound: the most relative error of the whole. rows: the layer, None in 16 bit. by: as `rounded` has it. plain: the
    error of rounding to nearest where the layer is just that, which leaves every part as near as it can be.
    """
    unit = rows.smoothing(by).abs() if rows is not None else torch.ones((), dtype=torch.float32)
    unit = unit.mean(0) if unit.ndim == 2 else unit
    rounded = None
    for name, margin in (_LINES if plain is None else _LINES_OF_PLAIN).items():
        error, size = _sizes(read - truth, unit, name), _sizes(truth, unit, name)
        # Fitting moves errors of codes along a row, whatever the sizes; from row to row only by a low-rank branch.
        is_moved = plain is None and (name != "rows" or (rows is not None and rows.has_branch))
        common = bound / _MARGIN * size.square().mean(-1, keepdim=True).sqrt() * is_moved
        # What rounded exactly differs by the base's bits.
        plain_error = 0.0 if plain is None else max(plain, _OF_BF16 / 2)
        most = bound if plain is None else margin * plain_error
        if (error <= torch.maximum(most * size, margin * common)).all():
            continue
        least = _CODED / _OF_A_LINE if plain is None else plain_error
        expected = bound / _MARGIN * size
        if rows is not None:
            rounded = rows.rounded(truth, by) if rounded is None else rounded
            expected = torch.maximum(_sizes(rounded - truth, unit, name), least * size)
        wrong = error > margin * torch.maximum(expected, common)
        if wrong.any():
            at = wrong.nonzero()[:, -1 if name == "columns" else 0].unique()
            words = f"{int(wrong.sum())} of its {wrong.numel()} {name}, the first in {_IN[name]} {int(at[0])},"
            if name == "blocks of 16":
                return Strays(words)
            ours, base = (matrix.movedim(int(name == "columns"), 0)[at] for matrix in (read, truth))
            factor = (ours * base).sum(1, keepdim=True) / ours.square().sum(1, keepdim=True).clamp(min=1e-30)
            cured = ((ours * factor - base).norm(dim=1) < (ours - base).norm(dim=1) / 2) | (ours == 0).all(1)
            return Strays(words, float(cured.float().mean()) > 0.5, **{name: wrong})
    return None


def _sizes(matrix: Tensor, unit: Tensor, name: str) -> Tensor:
    """Return the norm of each of the "rows" (N,), "columns" (K,), or "blocks of 16" (N, ⌈K/16⌉) of a matrix (N, K).

    unit: what codes are multiplied by, (K,), or () for 1, without which columns and blocks are measured.
    """
    if name == "rows":
        return matrix.norm(dim=1)
    matrix = matrix / unit if unit.ndim else matrix
    if name == "columns":
        return matrix.norm(dim=0)
    if ragged := -matrix.shape[1] % 16:  # an even one is not copied
        matrix = nn.functional.pad(matrix, (0, ragged))
    return matrix.unflatten(1, (-1, 16)).norm(dim=2)


def window(tensors: Mapping[str, Tensor], n: int, start: int, stop: int) -> dict[str, Tensor]:
    """Cut rows [start, stop) out of the tensors of a layer of n rows, whatever the dialect.

    start, stop: multiples of 128, the rows of a tile of swizzled scales; stop may be n too.
    """
    pieces = {}
    for name, tensor in tensors.items():
        if name == "weight_shape":  # compressed-tensors' own record of (N, K)
            is_pair = tensor.shape == (2,) and tensor.dtype in (torch.int32, torch.int64)
            pieces[name] = torch.tensor([int(tensor[0]) - n + stop - start, int(tensor[1])]) if is_pair else tensor
            continue
        # Rows to a line: two where W4A16_AWQ packs, four in torchao's shape of swizzled scales.
        for unit in (1, 2, 4, *_ROWS_TO_A_LINE.get(name, ())):
            lines = tensor.shape[0] * unit if tensor.ndim else 0
            if n <= lines < n + WINDOW and name not in _NOT_BY_ROWS:
                end = None if stop == n else stop // unit
                pieces[name] = tensor[start // unit : end].contiguous()
                break
        else:
            pieces[name] = tensor
            if name == "wscales" and tensor.ndim == 2 and tensor.shape[1] == n and n % WINDOW == 0:  # (groups, rows)
                tiles = tensor.contiguous().view(torch.uint8).reshape(n // WINDOW, -1)[start // WINDOW : stop // WINDOW]
                pieces[name] = tiles.reshape(-1).view(tensor.dtype).reshape(tensor.shape[0], stop - start)
    return pieces


def is_whole(tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a layer must be read as a whole, because no rows can be taken out of it.

    Blocks run on over rows, scales stand by columns, or it is two layers.
    """
    return any(name in tensors for name in _WHOLE) or ("proj_down" in tensors and "weight_scale" in tensors)


def _starts(n: int) -> list[int]:
    """Return the first rows of the windows, from the first row to the last: thirds are all met, and halves."""
    tiles = -(-n // WINDOW)
    return sorted({WINDOW * (i * tiles // WINDOWS) for i in range(WINDOWS)} | {WINDOW * (tiles - 1)})


def _cast(truth: Tensor, layer: FileLayer) -> Tensor:
    """The base's rows in a format that is not ours: cast, or rounded to so many bits with a scale for 32 numbers."""
    n, k = layer.shape
    codes = max(layer.stored.values(), key=lambda stored: stored.nbytes)
    if codes.dtype in CASTS:
        dtype = CASTS[codes.dtype]
        if not any("scale" in suffix for suffix in layer.stored):
            return truth.to(dtype).float()
        scale = truth.abs().amax(1, keepdim=True).clamp(min=1e-30) / torch.finfo(dtype).max
        return (truth / scale).to(dtype).float() * scale
    bits = min(8, max(2, 8 * codes.nbytes // max(n * k, 1)))
    blocks = nn.functional.pad(truth, (0, -k % 32)).unflatten(1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    return ((blocks / scale).round() * scale).flatten(1)[:, :k]


_ROWS_TO_A_LINE = {"weight_zero_point": (8,), "weight_scale": (WINDOW,), "weight_scale_inv": (WINDOW,)}
CASTS = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def _relative(read: Tensor, truth: Tensor) -> float:
    off = torch.stack([(a - b).norm() for a, b in zip(read.split(WINDOW), truth.split(WINDOW), strict=True)]).norm()
    return float(off / truth.norm().clamp(min=1e-30)) if torch.isfinite(off) else torch.inf


def _are_multiples(read: Tensor, truth: Tensor, by: Tensor) -> Tensor:
    """Return which rows (N,) are further from the base by their factor than rounding takes them.

    by: (N,), that bring them nearest to the base. The difference that remains is the row's rounding.
    """
    left = (read * by[:, None] - truth).norm(dim=1) / truth.norm(dim=1).clamp(min=1e-30)
    return (by - 1).abs() > left.clamp(min=_FACTOR_OF_8_BITS)


def _factors_of(read: Tensor, truth: Tensor, axis: int) -> Factors | None:
    """Return the factors of columns (axis 0), or of rows, that bring a reading nearest to the base.

    None where they have too few numbers each for a factor to be no coincidence.
    """
    if read.shape[axis] < _ENOUGH:
        return None
    by = (read * truth).sum(axis, keepdim=True) / read.square().sum(axis, keepdim=True).clamp(min=1e-30)
    rows, columns = (by.flatten(), None) if axis else (None, by.flatten())
    return Factors(_relative(read * by, truth), rows, columns)


def _factors_of_both(read: Tensor, truth: Tensor, powers_of_two: bool) -> Factors | None:
    """Return factors for the rows and for the columns that together bring a reading nearest to the base.

    Most rows have the factor 1, or those of columns the geometric mean 1, as those that were folded do. None where all
    rows have the factor 1, or with too few rows or columns. powers_of_two: for the rows, as scales of blocks take them
    in.
    """
    if min(read.shape) < _ENOUGH:
        return None
    sizes = truth.norm(dim=1, keepdim=True) / read.norm(dim=1, keepdim=True).clamp(min=1e-30)

    def near(by: Tensor) -> Tensor:
        return by.clamp(min=1e-30).log2().round().exp2() if powers_of_two else by

    rows = near(sizes / sizes.median().clamp(min=1e-30))
    columns = torch.ones(1, read.shape[1], dtype=torch.float32)
    for _ in range(_TURNS):
        scaled = read * rows
        columns = (scaled * truth).sum(0, keepdim=True) / scaled.square().sum(0, keepdim=True).clamp(min=1e-30)
        scaled = read * columns
        rows = near((scaled * truth).sum(1, keepdim=True) / scaled.square().sum(1, keepdim=True).clamp(min=1e-30))
    columns = torch.where(columns > 0, columns, 1.0)  # of what was read as zeros
    plain = rows.median()  # of rows without a factor, where most have none, as in joined q, k and v
    is_plain = ((rows / plain - 1).abs() < _SAME_FACTOR).float().mean() > 0.5
    common = 1 / plain if is_plain and not powers_of_two else near(columns.log().mean().exp())
    rows, columns = rows * common, columns / common
    if (rows == 1).all():
        return None
    return Factors(_relative(read * rows * columns, truth), rows.flatten(), columns.flatten())


def orders_of(joined: Joined, n: int, k: int) -> dict[str, Tensor]:
    """Orders of the N rows, other than that of `joined`, in which files are known to be wrong.

    The base's rows are given as the file should have them. 2 K of them are a scale and a shift.
    """
    orders, sizes = {}, part_sizes(joined, n, k)
    rows = torch.arange(n)
    if n == 2 * k or (joined.order == "halves swapped" and n % 2 == 0):
        orders["halves swapped"] = in_order(rows, "halves swapped")
    alike = [i for i, size in enumerate(sizes) if size == sizes[0]][:3]
    parts = list(rows.split(sizes))
    names = [part.rpartition(".")[0].rpartition(".")[2] for part in joined.parts]
    for order in list(permutations(alike))[1:]:
        moved = [parts[i] for i in order] + [part for i, part in enumerate(parts) if i not in alike]
        orders["rows ordered " + ", ".join(names[i] for i in order)] = torch.cat(moved)
    return orders


def part_sizes(joined: Joined, n: int, k: int) -> list[int]:
    """N of each part of a joined tensor: alike, but for a feed-forward behind q, k and v of K rows each."""
    count = len(joined.parts)
    if count == 4:
        return [k, k, k, n - 3 * k]
    if n % max(count, 1):
        raise ValueError(f"{joined.original}: {n} rows are no {count} parts alike; is this another model?")
    return [n // count] * count


# --- repairs

_BLOCK_SCALES = ("weight_scale", "_weight_scale", "wscales")
_WHOLE = (
    *("weight_zeros", "wzeros", "weight.quant_map", "out_proj.qweight"),
    *("weight_proj_down", "weight_correction"),
)
_NOT_BY_ROWS = (
    "weight_g_idx",
    *("svdquant_lora_a", "pre_quant_scale", "pre_quant_mean", "deflate_basis", "comfy_quant", "_weight_act_pre_scale"),
    *("wscales", "proj_down", "lora_down", "smooth", "smooth_orig", "smooth_factor", "smooth_factor_orig"),
)


def mended(
    tensors: Mapping[str, Tensor], repairs: Sequence[str], dialect: Dialect, shape: tuple[int, int]
) -> dict[str, Tensor] | None:
    """Tensors of a layer (N, K) = shape after some of REPAIRS; None where it has nothing of the kind of one."""
    done: dict[str, Tensor] | None = dict(tensors)
    for name in repairs:
        done = None if done is None else REPAIRS[name].mend(done, dialect, shape)
    return done


def _tensors_named(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensors[name]) for name in names if name in tensors)


def _swap(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    for name, codes in _tensors_named(tensors, CODES):
        if codes.dtype == torch.uint8 and codes.ndim == 2 and dialect.has_nibbles:
            return {**tensors, name: swap_nibbles(codes)}
    return None


def _blocks(tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[str, Tensor, int] | None:
    """(name, scales, groups) of scales that are one byte for each block."""
    for name, scale in _tensors_named(tensors, _BLOCK_SCALES):
        if scale.ndim == 2 and scale.element_size() == 1 and name != "wscales":
            return name, scale, shape[1] // (16 if _is_two_level(tensors) else 32)
    return None


def _is_two_level(tensors: Mapping[str, Tensor]) -> bool:
    return any(name in tensors for name in GLOBAL_SCALES) or any(
        scale.dtype == torch.float8_e4m3fn for _, scale in _tensors_named(tensors, _BLOCK_SCALES)
    )


def _swizzle(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of scales in the order of the matrix, where the dialect means tiles."""
    if dialect.tiles is None or (blocks := _blocks(tensors, shape)) is None:
        return None
    name, scale, groups = blocks
    if scale.shape[0] < shape[0] or scale.shape[1] not in (groups, padded(groups, 4)):
        return None
    tiles = dialect.tiles(shape[0], groups)
    return {**tensors, name: block_scales(scale[: shape[0], :groups].contiguous(), tiles)}


def _unswizzle(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of scales in tiles, where the dialect means the order of the matrix."""
    if dialect.tiles is not None or (blocks := _blocks(tensors, shape)) is None:
        return None
    name, scale, groups = blocks
    try:
        return {**tensors, name: unblock_scales(scale.contiguous(), shape[0], groups).contiguous()}
    except ValueError:
        return None


def _unpad(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of tiles over 16 columns more than there are, as ModelOpt's row_col padding makes them."""
    if dialect.tiles is not padded_tiles or (blocks := _blocks(tensors, shape)) is None:
        return None
    name, scale, groups = blocks
    if scale.shape[1] == padded(groups, 4) or scale.shape[1] != padded(groups, 16):
        return None
    rows, columns = scale.shape
    try:
        linear = unblock_scales(scale.contiguous(), rows, columns)[: shape[0], :groups]
    except ValueError:
        return None
    codes = {
        name: weight[:, : padded(shape[1], 16) // 2].contiguous()
        for name, weight in _tensors_named(tensors, ("weight",))
        if weight.dtype == torch.uint8
    }
    return {**tensors, **codes, name: block_scales(linear.contiguous())}


def _invert(
    names: Sequence[str], tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]
) -> dict[str, Tensor] | None:
    for name, scale in _tensors_named(tensors, names):
        if scale.dtype in FLOATS:
            return {**tensors, name: (1 / scale.float()).to(scale.dtype)}
    return None


def _widen(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of scales in 16 bit that the dialect has in fp32."""
    names = [n for n in (*GLOBAL_SCALES, "weight_scale", "input_scale") if n in tensors]
    narrow = [n for n in names if tensors[n].dtype in (torch.bfloat16, torch.float16)]
    return {**tensors, **{n: tensors[n].float() for n in narrow}} if narrow else None


def _expand(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of one fp8 scale where the dialect has one for each row."""
    scale = tensors.get("weight_scale")
    formats = {row.weights for row in dialect.rows}
    has_rows_alone = "fp8" in formats and "fp8_tensor" not in formats
    if not has_rows_alone or scale is None or scale.numel() != 1 or shape[0] == 1:
        return None
    return {**tensors, "weight_scale": scale.reshape(1).expand(shape[0]).contiguous()}


def _without_need(tensors: dict[str, Tensor], dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor] | None:
    """Of nvfp4 without `input_scale`, so that the rest can be read: what it says of x is nothing about W."""
    if not dialect.needs_input_scale or "weight_scale_2" not in tensors or "input_scale" in tensors:
        return None
    return {**tensors, "input_scale": torch.ones((), dtype=torch.float32)}


REPAIRS = {
    "swapped nibbles": Repair("each byte holds its two codes the other way round than the dialect has them", _swap),
    "missing swizzle": Repair(
        "block scales stand in the order of the matrix, and readers take them for tiles", _swizzle, True
    ),
    "swizzled scales": Repair(
        "block scales stand in tiles, and readers take them for the order of the matrix", _unswizzle, True
    ),
    "reciprocal global scale": Repair(
        "readers multiply by the global scale where they should divide, or the reverse", partial(_invert, GLOBAL_SCALES)
    ),
    "reciprocal scale": Repair(
        "readers multiply by the scale where they should divide",
        partial(_invert, ("weight_scale", "scale_weight", "_weight_scale")),
    ),
    "scales padded to 16 columns": Repair(
        "ModelOpt's row_col padding, whose tiles are others than readers look for", _unpad, True
    ),
    "scale of another dtype": Repair("a scale is in 16 bit where readers look for fp32", _widen, True),
    "one scale per tensor": Repair(
        "readers look for a scale of each row (stock diffusers ends in an IndexError)", _expand, True
    ),
    "missing input_scale": Repair(
        "readers need the activations' scale (stock diffusers refuses the layer)", _without_need, True
    ),
}
