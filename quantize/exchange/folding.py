"""Is a difference from the base folding, which another layer takes back, or a scale that was lost?

Smoothing that was folded has factors on the columns of the layers that read x, and their inverses on the rows of what
makes x: a modulation, a norm, or the Linear before, in the same block. All layers that read x carry the factors. Where
the family's row says which chunks of which modulation make x, only those take factors back, and both do:

    x = norm · (1 + scale) + shift        f x: shift' = f shift, scale' = f (1 + scale) - 1, weights and biases

A mean that was subtracted stands in the bias of what makes x and, times the weight, in the biases of those that read
it. A difference that nothing takes back changes the images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fluxq.quantize.exchange.proof import Against, Factors, largest_factor
from fluxq.recipes.family import Modulation, Producer

_NEAR = 0.1  # rms: factors, each of which was estimated from a row or column of rounded weights, are the same
_FEW, _FAR = 0.05, 0.3  # of the rows may be further off, but none by so much
_FOLDED = 0.05  # relative: a bias that was folded and rounded once or twice
_STRAY = 4.0  # of that, one number may be off by so much, of its own size and the rms of all
_SIGMAS, _RMS = 6.0, 2.0  # of what rounding explains: one number, and all
_KNOWN = 0.25  # relative squared error that a column's best factor leaves; above it the factor is not judged
_TWICE = 3.0  # more squared error than that of rounding: twice the error
_UNSURE = 2.0  # a column's log factor is uncertain by this many times the root of that error


@dataclass(frozen=True)
class Linear:
    """A Linear of the file beside the base's.

    block: that it stands in, "" for none. x: what it reads, the same for all that read it. base: reads the base's
    weight (N, K). cast: the relative error of its bias by rounding to the bias's dtype, at most. modules: of diffusers
    that it holds. modulated_by: module that makes shift and scale of x, and which chunks of it; None where no row says.
    windows: parts of x that different Linears make, one at least. producers: modules of diffusers whose outputs
    attention or a gated unit makes x of, and which of their rows.
    """

    against: Against
    shape: tuple[int, int]
    block: str
    x: str
    base: Callable[[], Tensor]
    cast: float
    modules: tuple[str, ...]
    modulated_by: tuple[str, Modulation] | None
    windows: tuple[slice, ...]
    producers: tuple[tuple[str, Producer], ...]


@dataclass(frozen=True)
class Vector:
    """A tensor of one dimension (N,), such as a norm's weight, that differs from the base's. cast: as in `Linear`."""

    tensor: Tensor
    base: Tensor
    block: str
    cast: float


def not_taken_back(
    linears: Mapping[str, Linear], vectors: Mapping[str, Vector]
) -> tuple[dict[str, str], Mapping[str, Tensor]]:
    """Tell folding from differences that change images.

    Returns (Linear or vector -> its difference from the base, in words, where nothing in the file takes it back;
    Linear -> the factors (K,) on its columns, as far as they were folded).
    """
    columns = {name: by for name, each in linears.items() if (by := _factors(each, "columns")) is not None}
    flaws = _factors_left(linears, columns, vectors)
    for name, what in _biases_left(linears, columns).items():
        flaws.setdefault(name, what)
    return flaws, {name: by for name, by in columns.items() if name not in flaws}


def _factors_left(
    linears: Mapping[str, Linear], columns: dict[str, Tensor], vectors: Mapping[str, Vector]
) -> dict[str, str]:
    """Return the differences by factors, as `not_taken_back`. columns: becomes the makers' factors where they are."""
    flaws = {name: "is not the base's" for name, each in vectors.items() if not each.tensor.all()}
    rows = {name: each.base / each.tensor for name, each in vectors.items() if name not in flaws}
    rows |= {name: by for name, each in linears.items() if (by := _factors(each, "rows")) is not None}
    blocks = {name: each.block for name, each in (*linears.items(), *vectors.items())}
    taken = {name: torch.zeros(len(by), dtype=torch.bool) for name, by in rows.items()}
    readers = defaultdict[str, list[str]](list)
    carrying: dict[tuple[tuple[str, Producer], ...], str] = {}  # producers -> the first Linear that takes factors back
    for name, each in linears.items():
        readers[each.x].append(name)
    for names in readers.values():
        first, k = linears[names[0]], linears[names[0]].shape[1]
        modulation = _modulation_of(first, linears)
        whole, not_taken, makers = torch.ones(k, dtype=torch.float32), [], set[str]()
        for window in first.windows:
            if first.modulated_by is not None:
                parts = [(modulation[0], *modulation[1])] if modulation is not None and modulation[0] in rows else []
            else:
                others = (maker for maker in rows if blocks[maker] == blocks[names[0]] and maker not in names)
                width = window.stop - window.start
                parts = [(maker, part, part) for maker in others for part in _parts(rows[maker], width)]
            taken_back = False
            for maker, shift, part in parts:
                factors = 1 / rows[maker][part]
                undone = [name for name in names if _carries(linears[name].against, factors, window)]
                if undone:
                    taken[maker][part] = taken[maker][shift] = taken_back = True
                    makers.add(maker)
                    if _are_others(rows[maker][shift], rows[maker][part]):
                        flaws[maker] = "its rows that shift carry other factors than those that scale"
                    whole[window] = factors
                    lacking = f"its columns carry no factors, though those of {undone[0]} do, which reads the same x"
                    flaws |= {name: lacking for name in names if name not in undone}
            not_taken += [] if taken_back else [window]
        missing = "its columns carry factors, and nothing before it in its block carries their inverses"
        for name in names:
            estimates = linears[name].against.factors
            if estimates is not None and name not in flaws and _any_factors(estimates, not_taken, k):
                flaws[name] = missing
        if makers:
            columns |= dict.fromkeys(names, whole)
            carrying.setdefault(first.producers, names[0])
            lacking = f"its rows carry no factors, though the columns of {names[0]} do, which reads what it makes"
            lack = {name for path, _ in first.producers if (name := _holder(path, linears))} - makers
            flaws |= {name: lacking for name in lack if name not in flaws}
    for name, each in linears.items():
        if each.producers and each.producers in carrying and name not in columns and name not in flaws:
            other = carrying[each.producers]
            flaws[name] = f"its columns carry no factors, though those of {other} do, which reads the same values"
    for name, by in rows.items():
        if name in vectors:
            tensor, base = (part[~taken[name]] for part in (vectors[name].tensor, vectors[name].base))
            if differ(tensor, base, vectors[name].cast):
                flaws[name] = "is not the base's"
            continue
        factors = linears[name].against.factors
        strays = ((by - 1).abs() > _NEAR) & ~taken[name]
        sure = factors.sure & ~taken[name] if factors is not None and factors.sure is not None else strays & False
        if strays.float().mean() > _FEW or ((by - 1).abs() > _FAR)[strays].any() or sure.any():
            count = int((strays | sure).sum())
            flaws[name] = f"{count} of {len(by)} rows carry factors, and nothing behind takes them back"
    return flaws


def _biases_left(linears: Mapping[str, Linear], columns: Mapping[str, Tensor]) -> dict[str, str]:
    pairs = {name: each.against.bias for name, each in linears.items() if each.against.bias is not None}
    wrong = {name: pair for name, pair in pairs.items() if has_strays(*pair, linears[name].cast)}
    taken = {name: torch.zeros(len(bias), dtype=torch.bool) for name, (bias, _) in wrong.items()}
    chunks = defaultdict[str, list[tuple[slice, slice]]](list)  # modulation -> its shifts and scales
    for each in linears.values():
        if (modulation := _modulation_of(each, linears)) is not None:
            chunks[modulation[0]].append(modulation[1])
    means: dict[str, tuple[Tensor, Tensor]] = {}  # x -> the mean that its modulation lacks, and its mean square error
    for name in wrong:
        if linears[name].modulated_by is not None:
            means |= _take_mean(name, linears, None, wrong, taken, {})
    # A Linear that reads such an x may itself make another one, so that its own bias is another once more.
    errors = {name: torch.zeros_like(bias) for name, (bias, _) in wrong.items()}
    for name, (bias, base) in wrong.items():
        if linears[name].x in means:
            weight, (mean, error) = linears[name].base(), means[linears[name].x]
            wrong[name], errors[name] = (bias, base + weight @ mean), weight.square() @ error
    for name, (bias, base) in wrong.items():
        if linears[name].modulated_by is None:
            means |= _take_mean(name, linears, columns.get(name), wrong, taken, errors)
        by = _factors(linears[name], "rows")
        if by is None:
            continue
        if name in chunks:
            parts = [(part, one) for pair in chunks[name] for part, one in zip(pair, (0, 1), strict=True)]
        else:
            readers = (linears[reader] for reader in columns if linears[reader].block == linears[name].block)
            sizes = {window.stop - window.start for each in readers for window in each.windows}
            parts = [(part, one) for size in sizes for part in _parts(bias, size) for one in (0, 1)]
        for part, one in parts:
            if _is_scaled(bias[part], base[part], by[part], one):
                taken[name][part] = True
    flaws = _of_modulations(linears, columns, pairs, taken)
    flaws |= _of_values(linears, pairs, wrong, means)
    for name, (bias, base) in wrong.items():
        left = ~taken[name]
        if left.any() and has_strays(bias[left], base[left], linears[name].cast):
            flaws[name] = "its bias is not the base's, and nothing takes the difference back"
    return flaws


def _of_modulations(
    linears: Mapping[str, Linear],
    columns: Mapping[str, Tensor],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    taken: Mapping[str, Tensor],
) -> dict[str, str]:
    """Return the modulations whose biases lack the factors of their rows. A mean may stand in that of the shift."""
    flaws = {}
    for reader in columns:
        modulation = _modulation_of(linears[reader], linears)
        by = _factors(linears[modulation[0]], "rows") if modulation is not None else None
        if modulation is None or by is None or modulation[0] not in pairs:
            continue
        maker, (shift, scale) = modulation
        bias, base = pairs[maker]
        if not _is_scaled(bias[scale], base[scale], by[scale], 1):
            flaws[maker] = "its bias, of the scale, does not carry the factors of its rows: f (1 + b) - 1"
        has_mean = maker in taken and bool(taken[maker][shift].all())
        if not has_mean and not _is_scaled(bias[shift], base[shift], by[shift], 0):
            flaws[maker] = "its bias, of the shift, does not carry the factors of its rows"
    return flaws


def _of_values(
    linears: Mapping[str, Linear],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    wrong: Mapping[str, tuple[Tensor, Tensor]],
    means: Mapping[str, tuple[Tensor, Tensor]],
) -> dict[str, str]:
    """Return values whose bias was not folded along with their rows, or with the other values of an attention.

    Also projections whose bias lacks W · mean. Biases are judged only where the missing part is larger than rounding.
    """
    flaws = {}
    of_values = {path for each in linears.values() for path, _ in each.producers}
    for name, (_, base) in pairs.items():
        by, each = _factors(linears[name], "rows"), linears[name]
        makes_values = not of_values.isdisjoint(each.modules)
        if by is not None and makes_values and name not in wrong and has_strays(base / by, base, _STRAY * _FOLDED):
            flaws[name] = "its bias does not carry the factors of its rows"
    for x, (mean, _) in means.items():
        producers = next(each.producers for each in linears.values() if each.x == x)
        for name, each in linears.items() if producers else ():
            if each.producers != producers or name not in pairs or name in wrong or each.shape[1] != len(mean):
                continue
            base = pairs[name][1]
            if has_strays(base + each.base() @ mean, base, _STRAY * each.cast):
                flaws[name] = "its bias lacks W · mean, which other Linears that read these values have"
        for path, producer in producers:
            name = _holder(path, linears)
            rows = _rows_for(linears[name], path, producer, len(mean)) if name in pairs and producer.shifts else None
            if rows is None:
                continue
            bias, base, by = (each[rows] for each in (*pairs[name], _rows_of(linears[name])))
            if not has_strays(bias * by, base, _FOLDED) and has_strays(base - mean, base, _STRAY * _FOLDED):
                flaws[name] = "the mean was not subtracted from its bias, as it was from other values of this attention"
    return flaws


def _rows_for(each: Linear, path: str, producer: Producer, width: int) -> slice | None:
    """Return the rows of a Linear that make an input; None in joined ones whose parts may have other widths."""
    if len(each.modules) == 1:
        return producer.rows(each.shape[0], width)
    start = each.modules.index(path) * width
    return slice(start, start + width) if producer.chunk == 0 and start + width <= each.shape[0] else None


def _rows_of(each: Linear) -> Tensor:
    """Return the factors (N,) of a Linear's rows, 1 where they have none."""
    by = _factors(each, "rows")
    return torch.ones(each.shape[0], dtype=torch.float32) if by is None else by


def _holder(path: str, linears: Mapping[str, Linear]) -> str:
    """Return the Linear of the file that holds a module of diffusers; "" for none."""
    return next((name for name, each in linears.items() if path in each.modules), "")


def _modulation_of(reader: Linear, linears: Mapping[str, Linear]) -> tuple[str, tuple[slice, slice]] | None:
    """Return what makes shift and scale of the input of a Linear, and its rows for each; None where no row says."""
    if reader.modulated_by is None:
        return None
    path, modulation = reader.modulated_by
    maker = _holder(path, linears)
    return None if not maker else (maker, modulation.rows(linears[maker].shape[0], reader.shape[1]))


def _is_scaled(bias: Tensor, base: Tensor, by: Tensor, one: int) -> bool:
    """Return whether a bias is the base's over the factors of its rows; a modulation adds `one` to its scale."""
    return not has_strays(bias + one, (base + one) / by, _FOLDED)


def _are_others(factors: Tensor, others: Tensor) -> bool:
    """Return whether two estimates of the same factors differ by more than rounding does."""
    off = (factors / others - 1).abs()
    return not bool((off > _NEAR).float().mean() <= _FEW and off.max() <= _FAR)


def _take_mean(
    name: str,
    linears: Mapping[str, Linear],
    factors: Tensor | None,
    wrong: Mapping[str, tuple[Tensor, Tensor]],
    taken: Mapping[str, Tensor],
    errors: Mapping[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Take rows of the bias of `name` that are the base's and W times the mean that the bias of what makes x lacks.

    Also that bias. Where a modulation makes x, some rows may be others for another reason. errors: mean square ones of
    the base's biases in `wrong`. Returns x -> the mean and its mean square error.
    """
    reader, (bias, base) = linears[name], wrong[name]
    weight, modulation = reader.base(), _modulation_of(reader, linears)
    k, means = weight.shape[1], dict[str, tuple[Tensor, Tensor]]()
    for maker, (theirs, plain) in wrong.items():
        if maker == name or linears[maker].block != reader.block or (modulation is not None and modulation[0] != maker):
            continue
        cast = linears[maker].cast
        by, unsure = torch.ones(k, dtype=torch.float32), torch.zeros(k, dtype=torch.float32)
        if modulation is not None:  # the scale's bias has the factors too, but for its rounding
            one = 1 + theirs[modulation[1][1]]
            by, unsure = one / (1 + plain[modulation[1][1]]), cast * (one - 1).abs() / one.abs()
        elif factors is not None:
            by, unsure = factors, unsure + _NEAR
        for window in reader.windows:
            for part in _parts(theirs, window.stop - window.start) if modulation is None else [modulation[1][0]]:
                if not has_strays(theirs[part], plain[part], cast):
                    continue
                shift = theirs[part] / by[window]
                mean = plain[part] - shift
                uncertain = (shift * (cast + unsure[window])).square()
                if maker in errors:
                    uncertain += errors[maker][part]
                rounding = (weight[:, window].square() @ uncertain).sqrt() + reader.cast * bias.abs()
                off = (bias - base - weight[:, window] @ mean).abs()
                fits = off <= _SIGMAS * rounding
                enough = fits.float().mean() > 0.5 if modulation is not None else bool(fits.all())
                if enough and float(off[fits].norm()) <= _RMS * float(rounding[fits].norm()):
                    taken[maker][part] = True
                    taken[name][fits] = True
                    means = {reader.x: (mean, uncertain)}
    return means


def _any_factors(factors: Factors, windows: list[slice], k: int) -> bool:
    """Return whether columns (k,) in some windows have factors that estimates of 1 are not; in all of x, whatever."""
    by = factors.columns
    if by is None or windows == [slice(0, k)]:
        return by is not None
    if factors.few:
        return any((by[window] != 1).any() for window in windows)
    off = (torch.cat([by[window] for window in windows]) - 1).abs() if windows else torch.zeros(1)
    return bool((off > _NEAR).float().mean() > _FEW or (off > _FAR).any())


def _factors(each: Linear, axis: Literal["rows", "columns"]) -> Tensor | None:
    factors = each.against.factors
    return getattr(factors, axis) if factors is not None else None


def _parts(vector: Tensor, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(vector) - size + 1, size)]


def _carries(against: Against, factors: Tensor, window: slice) -> bool:
    """Return whether these factors of columns remove more than half of the error that the best ones would.

    Or those that are not near 1 do, and rounding explains what then is left: the error of each column, and the one
    factor that all the others are off by. No column's best factor may differ from them by more than its uncertainty.
    """
    if against.products is None or not torch.isfinite(factors).all():
        return False
    squares, both, base = against.products[:, window].double()
    best = both / squares.clamp(min=1e-30)
    least, without, with_them = (
        by.square() * squares - 2 * by * both + base for by in (best, torch.ones_like(squares), factors.double())
    )
    gained, lacking = without - least, with_them - least
    far, rounded = (factors - 1).abs() > _NEAR, lacking <= _TWICE * least
    if against.factors is not None and against.factors.columns is not None and against.factors.few:
        few = against.factors.columns[window] != 1
        far |= few
        if not rounded[few].all():
            return False
    if not lacking.sum() < gained.sum() / 2:
        common = (both * factors)[~far].sum() / (squares * factors.square())[~far].sum().clamp(min=1e-30)
        is_even = not against.scaled and not (common - 1).abs() > largest_factor(against.bound)
        if not (is_even and rounded.all() and lacking[far].sum() < gained[far].sum() / 2):
            return False
    left = least.clamp(min=0) / base.clamp(min=1e-30)
    ratio = (factors.double() / torch.where(best == 0, 1e-30, best)).clamp(min=1e-30)
    off = (ratio.log().abs() - _UNSURE * left.sqrt())[(base > 0) & (left < _KNOWN)]
    return not len(off) or bool((off > _NEAR).double().mean() <= _FEW and off.max() <= _FAR)


def differ(tensor: Tensor, base: Tensor, most: float) -> bool:
    """Tell whether the relative difference is above `most`, or no number."""
    return not float((tensor - base).norm()) <= most * float(base.norm())


def has_strays(tensor: Tensor, base: Tensor, most: float) -> bool:
    """Tell whether vectors `differ`, or one number does by _STRAY times as much of its size and of the rms."""
    size = base.abs() + base.square().mean().sqrt()
    return differ(tensor, base, most) or not bool(((tensor - base).abs() <= _STRAY * most * size).all())
