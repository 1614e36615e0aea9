"""Is a difference from the base folding, which another layer takes back, or a scale that was lost?

Smoothing that was folded has factors on the columns of the layers that read x, and their inverses on the rows of what
makes x: a modulation, a norm, or the Linear before, in the same block. All layers that read x carry the factors. A mean
that was subtracted stands in the bias of what makes x and, times the weight, in the biases of those that read it. What
nothing takes back changes the images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxq.quantize.exchange.proof import Against

_NEAR = 0.1  # rms: factors, each of which was estimated from a row or column of rounded weights, are the same
_FEW, _FAR = 0.05, 0.3  # of the rows may be further off, but none by so much
_FOLDED = 0.05  # relative: a bias that was folded and rounded once or twice
_MEAN = 0.15  # relative: W times a mean that was taken from two biases of 16 bit


@dataclass(frozen=True)
class Linear:
    """A Linear of the file beside the base's.

    block: that it stands in, "" for none. x: what it reads, the same for all that read it. base: reads the base's
    weight (N, K). cast: the relative error of its bias by rounding to the bias's dtype, at most.
    """

    against: Against
    shape: tuple[int, int]
    block: str
    x: str
    base: Callable[[], Tensor]
    cast: float


@dataclass(frozen=True)
class Vector:
    """A tensor of one dimension (N,), such as a norm's weight, that differs from the base's. cast: as in `Linear`."""

    own: Tensor
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
    found = _factors_left(linears, columns, vectors)
    for name, what in _biases_left(linears, columns).items():
        found.setdefault(name, what)
    return found, {name: by for name, by in columns.items() if name not in found}


def _factors_left(
    linears: Mapping[str, Linear], columns: dict[str, Tensor], vectors: Mapping[str, Vector]
) -> dict[str, str]:
    """Return the differences by factors, as `not_taken_back`. columns: becomes the makers' factors where they are."""
    found = {name: "is not the base's" for name, each in vectors.items() if not each.own.all()}
    rows = {name: each.base / each.own for name, each in vectors.items() if name not in found}
    rows |= {name: by for name, each in linears.items() if (by := _factors(each, "rows")) is not None}
    blocks = {name: each.block for name, each in (*linears.items(), *vectors.items())}
    taken = {name: torch.zeros(len(by), dtype=torch.bool) for name, by in rows.items()}
    readers = defaultdict[str, list[str]](list)
    for name, each in linears.items():
        readers[each.x].append(name)
    for names in readers.values():
        k = linears[names[0]].shape[1]
        makers = (maker for maker in rows if blocks[maker] == blocks[names[0]] and maker not in names)
        parts = [(maker, part) for maker in makers for part in _parts(rows[maker], k)]
        taken_back = False
        for maker, part in parts:
            factors = 1 / rows[maker][part]
            undone = [name for name in names if _carries(linears[name].against, factors)]
            if undone:
                taken[maker][part] = taken_back = True
                columns |= dict.fromkeys(names, factors)
                lacking = f"its columns carry no factors, though those of {undone[0]} do, which reads the same x"
                found |= {name: lacking for name in names if name not in undone}
        if not taken_back:
            missing = "its columns carry factors, and nothing before it in its block carries their inverses"
            found |= {name: missing for name in names if name in columns and name not in found}
    for name, by in rows.items():
        if name in vectors:
            own, base = (part[~taken[name]] for part in (vectors[name].own, vectors[name].base))
            if differ(own, base, vectors[name].cast):
                found[name] = "is not the base's"
            continue
        factors = linears[name].against.factors
        strays = ((by - 1).abs() > _NEAR) & ~taken[name]
        sure = factors.sure & ~taken[name] if factors is not None and factors.sure is not None else strays & False
        if strays.float().mean() > _FEW or ((by - 1).abs() > _FAR)[strays].any() or sure.any():
            count = int((strays | sure).sum())
            found[name] = f"{count} of {len(by)} rows carry factors, and nothing behind takes them back"
    return found


def _biases_left(linears: Mapping[str, Linear], columns: Mapping[str, Tensor]) -> dict[str, str]:
    pairs = {name: each.against.bias for name, each in linears.items() if each.against.bias is not None}
    wrong = {name: pair for name, pair in pairs.items() if differ(*pair, linears[name].cast)}
    taken = {name: torch.zeros(len(own), dtype=torch.bool) for name, (own, _) in wrong.items()}
    for name, (own, base) in wrong.items():
        _take_means(name, linears, columns.get(name), wrong, taken)
        by = _factors(linears[name], "rows")
        if by is None:
            continue
        for size in {len(columns[reader]) for reader in columns if linears[reader].block == linears[name].block}:
            for part in _parts(own, size):
                of_scale = not differ(own[part] + 1, (base[part] + 1) / by[part], _FOLDED)  # a modulation adds 1 to it
                if of_scale or not differ(own[part], base[part] / by[part], _FOLDED):
                    taken[name][part] = True
    found = {}
    for name, (own, base) in wrong.items():
        left = ~taken[name]
        if left.any() and differ(own[left], base[left], linears[name].cast):
            found[name] = "its bias is not the base's, and nothing takes the difference back"
    return found


def _take_means(
    name: str,
    linears: Mapping[str, Linear],
    factors: Tensor | None,
    wrong: Mapping[str, tuple[Tensor, Tensor]],
    taken: Mapping[str, Tensor],
) -> None:
    """Take the bias of `name` that is the base's and W times the mean that the bias of what makes x lacks, and that."""
    reader, (own, base) = linears[name], wrong[name]
    weight = reader.base()
    factors = torch.ones(weight.shape[1]) if factors is None else factors
    for maker, (theirs, plain) in wrong.items():
        if maker == name or linears[maker].block != reader.block:
            continue
        for part in _parts(theirs, len(factors)):
            if differ(theirs[part], plain[part], _FOLDED):
                expected = weight @ (plain[part] - theirs[part] / factors)
                if float((own - base - expected).norm()) <= _MEAN * float(expected.norm()) + _FOLDED * float(
                    base.norm()
                ):
                    taken[maker][part] = taken[name][:] = True
                    return


def _factors(each: Linear, axis: str) -> Tensor | None:
    factors = each.against.factors
    return factors.by if factors is not None and factors.axis == axis else None


def _parts(vector: Tensor, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(vector) - size + 1, size)]


def _carries(against: Against, factors: Tensor) -> bool:
    """Return whether these factors (K,) of its columns bring a layer to the base: by half of all that any would do."""
    if against.products is None or not torch.isfinite(factors).all():
        return False
    own, both, base = against.products.double()
    least, without, with_them = (
        float((by.square() * own - 2 * by * both + base).sum())
        for by in (both / own.clamp(min=1e-30), torch.ones_like(own), factors.double())
    )
    return with_them - least < (without - least) / 2


def differ(own: Tensor, base: Tensor, most: float) -> bool:
    """Whether the relative difference is above `most`, or no number."""
    return not float((own - base).norm()) <= most * float(base.norm())
