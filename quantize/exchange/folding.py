"""Is a difference from the base folding, which another layer takes back, or a scale that was lost?

Smoothing that was folded has factors on the columns of the layers that read x, and their inverses on the rows of what
makes x: a modulation, a norm, or the Linear before. A mean that was subtracted stands in the bias of what makes x and,
times the weight, in the biases of those that read it. What nothing takes back changes the images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxq.quantize.exchange.proof import Against

_NEAR = 0.1  # rms: factors, each of which was estimated from a row or column of rounded weights, are the same
_FEW, _FAR = 0.05, 0.3  # of the rows may be further off, but none by so much
_BIAS = 0.05  # relative: a bias in another 16-bit dtype, folded and rounded once or twice
_MEAN = 0.15  # relative: W times a mean that was taken from two biases of 16 bit
_LEAST = 16  # rows of a chunk, for it to be no coincidence


@dataclass(frozen=True)
class Linear:
    """A Linear of the file beside the base's. bias: (its own (N,), the base's), None where the file has none like that.

    base: reads the base's weight (N, K).
    """

    against: Against
    shape: tuple[int, int]
    bias: tuple[Tensor, Tensor] | None
    base: Callable[[], Tensor]


def not_taken_back(linears: Mapping[str, Linear], vectors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, str]:
    """Linear or vector -> what of it differs from the base, and nothing in the file takes back.

    vectors: other tensors of one dimension that differ, as norms have them: (the file's, the base's).
    """
    columns = {name: by for name, each in linears.items() if (by := _factors(each, "columns")) is not None}
    found = _factors_left(linears, columns, vectors)
    for name, what in _biases_left(linears, columns).items():
        found.setdefault(name, what)
    return found


def _factors_left(
    linears: Mapping[str, Linear], columns: Mapping[str, Tensor], vectors: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, str]:
    found = {name: "is not the base's" for name, (own, _) in vectors.items() if not own.all()}
    rows = {name: (torch.arange(len(own)), base / own) for name, (own, base) in vectors.items() if name not in found}
    for name, each in linears.items():
        by = _factors(each, "rows")
        if by is not None and each.against.at is not None:
            rows[name] = each.against.at, by
    taken = {name: torch.zeros(len(by), dtype=torch.bool) for name, (_, by) in rows.items()}
    for name, factors in columns.items():
        made = False
        for maker, (at, by) in rows.items():
            for chunk in _chunks(at, len(factors)):
                if _undoes(by[chunk], factors[at[chunk] % len(factors)]):
                    taken[maker][chunk] = made = True
        if not made:
            found[name] = "its columns carry factors, and nothing before it carries their inverses"
    for name, (_, by) in rows.items():
        strays = ((by - 1).abs() > _NEAR) & ~taken[name]
        if strays.float().mean() > _FEW or ((by - 1).abs() > _FAR)[strays].any():
            found[name] = f"{int(strays.sum())} of {len(by)} rows carry factors, and nothing behind takes them back"
    return found


def _biases_left(linears: Mapping[str, Linear], columns: Mapping[str, Tensor]) -> dict[str, str]:
    wrong = {name: each for name, each in linears.items() if each.against.bias and _differ(*each.against.bias)}
    taken = {name: torch.zeros(each.shape[0], dtype=torch.bool) for name, each in wrong.items()}
    for name, each in wrong.items():
        taken[name] |= _reads_a_mean(name, each, columns.get(name, torch.ones(each.shape[1])), wrong, taken)
        own, base = each.against.bias or (torch.empty(0), torch.empty(0))
        by, at = _factors(each, "rows"), each.against.at
        for size in {len(factors) for factors in columns.values()} if by is not None and at is not None else ():
            for chunk in _chunks(at, size):
                of_scale = not _differ(own[chunk] + 1, (base[chunk] + 1) / by[chunk])  # a modulation adds 1 to it
                if of_scale or not _differ(own[chunk], base[chunk] / by[chunk]):
                    taken[name][at[chunk]] = True
    found = {}
    for name, each in wrong.items():
        own, base = each.against.bias or (torch.empty(0), torch.empty(0))
        left = ~taken[name][each.against.at]
        if left.any() and _differ(own[left], base[left]):
            found[name] = "its bias is not the base's, and nothing takes the difference back"
    return found


def _reads_a_mean(
    name: str, reader: Linear, factors: Tensor, wrong: Mapping[str, Linear], taken: Mapping[str, Tensor]
) -> bool:
    """Whether a bias is the base's and W times the mean that the bias of what makes x lacks, which is then taken."""
    own, base = reader.against.bias or (torch.empty(0), torch.empty(0))
    for maker, other in wrong.items():
        theirs, plain = other.bias or (torch.empty(0), torch.empty(0))
        for part in _parts(theirs, len(factors)) if maker != name else ():
            if _differ(theirs[part], plain[part]):
                expected = reader.base()[reader.against.at] @ (plain[part] - theirs[part] / factors)
                if float((own - base - expected).norm()) <= _MEAN * float(expected.norm()) + _BIAS * float(base.norm()):
                    taken[maker][part] = True
                    return True
    return False


def _factors(each: Linear, axis: str) -> Tensor | None:
    factors = each.against.factors
    return factors.by if factors is not None and factors.axis == axis else None


def _parts(vector: Tensor, size: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, len(vector) - size + 1, size)]


def _chunks(at: Tensor, size: int) -> list[Tensor]:
    """Masks of the rows `at` that lie in the same multiple of `size`."""
    masks = [at // size == index for index in (at // size).unique()]
    return [mask for mask in masks if int(mask.sum()) >= min(_LEAST, size)]


def _undoes(by: Tensor, factors: Tensor) -> bool:
    """Whether one is the other's inverse, by far more than both are near 1."""
    off, before = (float((found - 1).square().mean().sqrt()) for found in (by * factors, factors))
    return off <= min(_NEAR, before / 2)


def _differ(own: Tensor, base: Tensor) -> bool:
    return float((own - base).norm()) > _BIAS * float(base.norm())
