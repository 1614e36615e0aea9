"""Translate between diffusers' names of a denoiser's tensors and those of its authors' code or ComfyUI.

diffusers splits what the original code joins: q, k and v, one Linear `qkv` there, are three. A row says which of
diffusers' modules follow each other along N in one original module; each family lists its rows:

    double_blocks.*.img_attn.qkv = [transformer_blocks.*.attn.to_q | …to_k | …to_v]

`*` is one path segment, `**` any number, and stars of both sides stand for the same in order. Names below a module's
path (`weight`, `bias`, `weight_scale`) are the same on both sides; a row may also name one tensor in full.

Imports no torch: these are names, and whoever holds the tensors joins, cuts and permutes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.keymap_rows import Order, Rule, compiled

Stars = tuple[str, ...]  # texts of a pattern's stars in a name, and its end: "" or ".weight"

CHECKPOINT_PREFIX = "model.diffusion_model."  # of a denoiser in a file that holds VAE and text encoders too


class Joined(NamedTuple):
    """Pair one original tensor with the tensors of diffusers that follow each other along N in it.

    original: without CHECKPOINT_PREFIX.
    parts: none for a tensor that diffusers does not have.
    order: of the joined rows; halves are swapped where diffusers puts the scale before the shift and the original does
        not. Swapping them once more undoes it.
    """

    original: str
    parts: tuple[str, ...]
    order: Order = "as they are"


def original_names(family: str, names: Collection[str]) -> list[Joined]:
    """Find the original tensors of diffusers' `names`, in the order of their first parts.

    ValueError for a family without a row, a name without one, and a part that is missing.

    family: a key of ORIGINALS.
    names: of all tensors, or all modules, of a model: the original of a name can depend on the others.
    """
    rules, present = _rules(family, names), _with_modules(names)
    joins: dict[str, Joined] = {}
    for name, rows in _matching(names, rules, lambda rule: rule.parts).items():
        joined = _only([_joined(*row) for row in rows if _holds(*row, present)], family, name, "original name")
        joins.setdefault(joined.original, joined)
    for joined in joins.values():
        if missing := [part for part in joined.parts if part not in present]:
            raise ValueError(
                f"{family}: {joined.original!r} joins {', '.join(joined.parts)}, and of these {missing[0]!r} is "
                "missing; give the names of the whole model"
            )
    return list(joins.values())


def diffusers_names(family: str, originals: Collection[str]) -> list[Joined]:
    """Find the parts of each tensor of a file with original names, in the order given.

    With CHECKPOINT_PREFIX on any of them, those without it are another component's and are passed over. Errors are
    those of `original_names`.
    """
    if any(name.startswith(CHECKPOINT_PREFIX) for name in originals):
        heads = [name for name in originals if name.startswith(CHECKPOINT_PREFIX)]
        originals = [name.removeprefix(CHECKPOINT_PREFIX) for name in heads]
    rules = _rules(family, originals)
    matching = _matching(originals, rules, lambda rule: (rule.original,))
    present = _with_modules(part for rows in matching.values() for row in rows for part in _joined(*row).parts)
    return [
        _only([_joined(*row) for row in rows if _holds(*row, present)], family, name, "name in diffusers")
        for name, rows in matching.items()
    ]


def _rules(family: str, names: Collection[str]) -> tuple[Rule, ...]:
    if family not in ORIGINALS:
        raise ValueError(f"no original names are known for {family!r} (known: {', '.join(ORIGINALS)})")
    rules = ORIGINALS[family]
    return rules(names) if callable(rules) else rules


def _only(candidates: list[Joined], family: str, name: str, what: str) -> Joined:
    if len(candidates) != 1:
        count = f"{len(candidates)} rows name" if candidates else "no row names"
        raise ValueError(
            f"{family}: no {what} is known for {name!r}: {count} it in recipes/families; is this another model?"
        )
    return candidates[0]


def _matching(
    names: Iterable[str], rules: Iterable[Rule], side: Callable[[Rule], tuple[str, ...]]
) -> dict[str, list[tuple[Rule, Stars]]]:
    """Map each name to the rows with a pattern on that side that it matches, whatever their other conditions."""
    patterns = [(rule, pattern.partition("*")[0], compiled(pattern)) for rule in rules for pattern in side(rule)]
    matching: dict[str, list[tuple[Rule, Stars]]] = {}
    for name in names:
        hits = [(rule, regex.fullmatch(name)) for rule, head, regex in patterns if name.startswith(head)]
        matching[name] = [(rule, tuple(group or "" for group in hit.groups())) for rule, hit in hits if hit]
    return matching


def _filled(pattern: str, stars: Stars) -> str:
    values = iter(stars)
    return ".".join(next(values) if segment in ("*", "**") else segment for segment in pattern.split("."))


def _joined(rule: Rule, stars: Stars) -> Joined:
    original, *parts = (_filled(pattern, stars) + stars[-1] for pattern in (rule.original, *rule.parts))
    return Joined(original, tuple(parts), rule.order)


def _holds(rule: Rule, stars: Stars, present: set[str]) -> bool:
    if rule.beside and _filled(rule.beside, stars) not in present:
        return False
    return not (rule.unless and _filled(rule.unless, stars) in present)


def _with_modules(names: Iterable[str]) -> set[str]:
    """Return names of tensors and of the modules that hold them."""
    names = set(names)
    return names | {name.rpartition(".")[0] for name in names}


ORIGINALS = {row.name: row.originals for row in FAMILIES.values() if row.originals}
