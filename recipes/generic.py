"""The family of a class without a row, from a model's structure and names, and its certainty.

Blocks are the members of module lists that attend. Those of one list have the same Linears, but for a few that the
first or the last may lack. In a block the name of a Linear tells its role (`to_q`, `w1`, `adaLN`), and its shape the
direction of a feed-forward. The certainty is

    certainty = weights of Linears in repeated blocks whose names tell their role / weights of all Linears

Where structure leaves a doubt, less is quantized: Linears outside of blocks stay in 16 bit; Linears share an input
group only where their names say so and their shapes agree, and are checked when calibration runs the model (see
calibrate/capture.py); nothing folds into a modulation, whose order of shift and scale no name tells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fluxq.recipes.family import Family, InputGroup, in_every_block
from fluxq.recipes.plan import GENERIC, MODULATION_ROLE, LinearShape

LEAST_CERTAINTY = 0.5  # below it a model is refused
SMALLEST = 64  # smaller N and K win nothing: gates of heads, say
UNNAMED_ROLE = "unnamed"  # of Linears whose names tell nothing
K_UNIT = 16  # the smallest group of a format, and the width of a read of 8-bit units


@dataclass(frozen=True)
class ModuleTree:
    """A model without its weights.

    modules: path -> class name, of all modules.
    linears: in the model's order.
    """

    modules: Mapping[str, str]
    linears: tuple[LinearShape, ...]


@dataclass(frozen=True)
class Structure:
    """Family that a model's structure suggests.

    certainty: 0 to 1.
    reasons: for the certainty, for people.
    """

    family: Family
    certainty: float
    reasons: tuple[str, ...]


def generic_family(model_class: str, tree: ModuleTree) -> Family:
    """Return the family of a model by its structure; its notes give the certainty.

    ValueError with the class, and the cure, where the certainty is below LEAST_CERTAINTY.
    """
    structure = read_structure(model_class, tree)
    if structure.certainty < LEAST_CERTAINTY:
        raise ValueError(
            f"unknown model family: {model_class} has no row in recipes/all_families.py, and its structure says too "
            f"little (certainty {structure.certainty:.0%}, needed {LEAST_CERTAINTY:.0%}): "
            f"{'; '.join(structure.reasons)}. CONTRIBUTING.md, 'Adding a model family', shows how to add a row"
        )
    return structure.family


def read_structure(model_class: str, tree: ModuleTree) -> Structure:
    """Return the blocks, input groups, roles and unquantized Linears of a model of any certainty."""
    blocks = _blocks(tree)
    stacks: dict[str, dict[str, dict[str, LinearShape]]] = {}  # pattern -> block -> path below it -> Linear
    for path, members in blocks.items():
        stacks.setdefault(in_every_block(path), {})[path] = members
    groups: list[InputGroup] = []
    keep: dict[str, list[str]] = {}
    for pattern, stack in stacks.items():
        unfit = _unfit(stack)
        for block, members in stack.items():
            for name in members:
                if name in unfit:
                    keep.setdefault(unfit[name], []).append(f"{block}.{name}")
        roles = [_roles(tree.modules, block, members) for block, members in stack.items()]
        groups += _groups(pattern, list(stack.values()), roles, unfit.keys())
    inside = {linear.name for members in blocks.values() for linear in members.values()}
    for linear in tree.linears:
        if linear.name not in inside:
            keep.setdefault(_why_outside(linear.name), []).append(linear.name)
    certainty, reasons = _judge(tree, stacks, groups)
    note = (
        f"{model_class} has no row in recipes/all_families.py; its structure was read instead, with a certainty of "
        f"{certainty:.0%}: {'; '.join(reasons)}. Look at `fluxq plan`, or add a row as CONTRIBUTING.md shows"
    )
    kept = {reason: tuple(names) for reason, names in keep.items()}
    family = Family(GENERIC, model_class, tuple(groups), kept, notes=(note,))
    return Structure(family, certainty, reasons)


# Blocks


def _blocks(tree: ModuleTree) -> dict[str, dict[str, LinearShape]]:
    """Return path of a block -> path below it -> Linear, in the model's order.

    A member of a module list is a block if it attends and holds no smaller block: a UNet's stages do hold some, and
    their other layers are in no block.
    """
    below: dict[str, dict[str, LinearShape]] = {}
    for linear in tree.linears:
        for path in _above(linear.name):
            if tree.modules.get(path.rpartition(".")[0]) == "ModuleList":
                below.setdefault(path, {})[linear.name[len(path) + 1 :]] = linear
    paths: set[str] = set()
    for path in sorted(below, key=lambda path: -path.count(".")):
        attends = len(below[path]) > 1 and any(map(_attends, below[path]))
        if attends and not any(other.startswith(f"{path}.") for other in paths):
            paths.add(path)
    return {
        path: below[path] for path in tree.modules if path in paths and not _AUXILIARY.search(path.rpartition(".")[0])
    }


def _above(path: str) -> Iterable[str]:
    """Return the paths of the modules that a module lies in, the innermost first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _attends(name: str) -> bool:
    return bool(_ATTENTION.search(name) or _words(name) & (_Q | _K_OR_V | _FUSED))


# Roles of a block's Linears


@dataclass(frozen=True)
class _Role:
    """Role of a Linear in a block.

    role: its name in rows of families.
    key: of Linears that read the same input; with the same role.
    """

    role: str
    key: tuple[object, ...]


def _roles(modules: Mapping[str, str], block: str, members: Mapping[str, LinearShape]) -> dict[str, _Role]:
    """Return path below the block -> role.

    An attention counts as self-attention if its name says so, or if the block has no other that could be.
    """
    attentions = {_parent(name) for name in members if _words(name) & _Q and not _MODULATION.search(name)}
    others = {
        path for path in attentions if _CROSS.search(path) or "cross" in modules.get(f"{block}.{path}", "").lower()
    }
    plain = attentions - others
    is_self = {path for path in plain if _SELF.search(path) or len(plain) == 1}
    return {name: _role(name, linear, members, is_self) for name, linear in members.items()}


def _role(name: str, linear: LinearShape, members: Mapping[str, LinearShape], is_self: set[str]) -> _Role:
    parent, words = _parent(name), _words(name)
    if _MODULATION.search(name):
        return _Role(MODULATION_ROLE, (name,))
    if words & _FUSED:
        return _Role("qkv", (name,))
    if words & (_Q | _K_OR_V):
        # `to_q`, `to_k` and `to_v` are of one stream, `add_q_proj`, … of another that joins it.
        stream = (parent, _stream(name), linear.k)
        has_query = any(_words(other) & _Q and (_parent(other), _stream(other)) == stream[:2] for other in members)
        if parent in is_self and has_query:
            return _Role("qkv", stream)
        return _Role("cross_q", (name,)) if words & _Q else _Role("cross_kv", stream)
    in_attention = bool(_ATTENTION.search(parent))
    if words == {"to", "out"} or (in_attention and (words & _OUT or words <= {"proj", "attn", "img", "txt"})):
        return _Role("attn_out", (name,))
    if _FEED_FORWARD.search(name) or words & _FEED_FORWARD_WORDS:
        return _Role(_way(linear, words), _gate_key(name, linear, members) or (name,))
    if linear.k > linear.n and words & _OUT:
        return _Role("mixed_out", (name,))  # of attention and feed-forward side by side, as a rule
    return _Role(UNNAMED_ROLE, (name,))


def _stream(name: str) -> str:
    """Return the leaf without the part that tells q, k and v from one another: `add_*_proj`."""
    return "_".join("*" if {part} & (_Q | _K_OR_V) else part for part in _leaf(name).lower().split("_"))


def _way(linear: LinearShape, words: set[str]) -> str:
    """Tell whether a feed-forward's Linear widens, "ff_up", or narrows, "ff_down"; a square one by its name."""
    if linear.n == linear.k:
        return "ff_down" if words & (_OUT | {"down"}) else "ff_up"
    return "ff_up" if linear.n > linear.k else "ff_down"


def _gate_key(name: str, linear: LinearShape, members: Mapping[str, LinearShape]) -> tuple[object, ...] | None:
    """Return a key that gate and up of a gated feed-forward share: of three Linears, two are (N, K), one is (K, N).

    None for any other Linear.
    """
    parent = _parent(name)
    three = [other for path, other in members.items() if _parent(path) == parent]
    shapes = Counter((other.n, other.k) for other in three)
    shape = (linear.n, linear.k)
    gated = linear.n != linear.k and shapes == {shape: 2, shape[::-1]: 1}
    return (parent, *shape) if gated else None


def _leaf(name: str) -> str:
    """Return the last segment that is no number: `to_out` of `attn.to_out.0`."""
    return next((segment for segment in reversed(name.split(".")) if not segment.isdigit()), "")


def _parent(name: str) -> str:
    """Return the path of the module that holds the leaf."""
    segments = name.split(".")
    while segments and segments[-1].isdigit():
        segments.pop()
    return ".".join(segments[:-1])


def _words(name: str) -> set[str]:
    """Return the words of the leaf: `add`, `q` and `proj` of `attn.add_q_proj`."""
    return set(_leaf(name).lower().split("_"))


# Input groups


def _groups(
    pattern: str, blocks: list[dict[str, LinearShape]], roles: list[dict[str, _Role]], unfit: Iterable[str]
) -> list[InputGroup]:
    """Return the input groups of a stack. Linears share one if they do in every block that has both."""
    skipped = set(unfit)
    names = [name for name in dict.fromkeys(name for members in blocks for name in members) if name not in skipped]
    first = {name: next(block_roles[name] for block_roles in roles if name in block_roles) for name in names}

    def share(a: str, b: str) -> bool:
        both = [block_roles for block_roles in roles if a in block_roles and b in block_roles]
        same_role = first[a].role == first[b].role
        return same_role and bool(both) and all(block_roles[a].key == block_roles[b].key for block_roles in both)

    groups: list[list[str]] = []
    for name in names:
        home = next((group for group in groups if all(share(name, other) for other in group)), None)
        if home is None:
            groups.append([name])
        else:
            home.append(name)
    return [
        InputGroup(first[group[0]].role, pattern, tuple(group), joined=len(group) > 1, made_by="unknown")
        for group in groups
    ]


# Linears that stay in 16 bit


def _unfit(stack: Mapping[str, Mapping[str, LinearShape]]) -> dict[str, str]:
    """Return path below the block -> reason, for the Linears of a block that are not quantized."""
    unfit: dict[str, str] = {}
    for members in stack.values():
        for name, linear in members.items():
            if _words(name) & {"router"} or (_words(name) == {"gate"} and 8 * linear.n <= linear.k):
                unfit[name] = "routes tokens, by its name: an error in it sends them elsewhere"
            elif min(linear.n, linear.k) < SMALLEST:
                unfit[name] = f"too small to win anything: ({linear.n}, {linear.k})"
            elif linear.k % K_UNIT:
                unfit[name] = f"K = {linear.k} is not in multiples of {K_UNIT}, which formats and kernels are made for"
    return unfit


def _why_outside(name: str) -> str:
    if _AUXILIARY.search(name) or _BEFORE.search(name):
        return "outside of the repeated blocks and embeds something, by its name: every token depends on it"
    if _BEHIND.search(name):
        return "outside of the repeated blocks and behind them, by its name: its error goes to the image undamped"
    return "outside of the repeated blocks: few weights, and all that they make passes through them"


# How sure that is


def _judge(
    tree: ModuleTree, stacks: Mapping[str, Mapping[str, Mapping[str, LinearShape]]], groups: Sequence[InputGroup]
) -> tuple[float, tuple[str, ...]]:
    """Return (certainty, reasons)."""
    total = sum(linear.n * linear.k for linear in tree.linears)
    kinds = Counter(tree.modules[block] for stack in stacks.values() for block in stack)
    guessed = {(group.block, name) for group in groups for name in group.members if group.role == UNNAMED_ROLE}
    reasons, sure = [], 0
    for pattern, stack in stacks.items():
        linears = [linear for members in stack.values() for linear in members.values()]
        share = sum(linear.n * linear.k for linear in linears) / total
        classes = dict.fromkeys(tree.modules[block] for block in stack)
        reasons.append(f"{len(stack)} x {' or '.join(classes)} in {pattern} ({share:.0%} of the Linears' weights)")
        for block, members in stack.items():
            if kinds[tree.modules[block]] > 1:
                sure += sum(o.n * o.k for name, o in members.items() if (pattern, name) not in guessed)
    single = [kind for kind, count in kinds.items() if count == 1]
    reasons += [f"only one {', one '.join(single)}, so nothing is repeated there"] if single else []
    reasons += [f"names that tell nothing: {', '.join(sorted({name for _, name in guessed}))}"] if guessed else []
    if not stacks:
        reasons.append("no module list has members with an attention, by their names")
    return (sure / total if total else 0.0), tuple(reasons)


_Q = {"q", "query", "wq"}
_K_OR_V = {"k", "v", "key", "value", "wk", "wv"}
_FUSED = {"qkv", "wqkv", "kv", "wkv", "qk"}
_OUT = {"out", "o", "wo", "output"}
_FEED_FORWARD_WORDS = {"fc", "fc1", "fc2", "fc3", "w1", "w2", "w3", "up", "down", "gate"}

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_SELF = re.compile(r"self|attn1$", re.IGNORECASE)
_CROSS = re.compile(r"cross|attn[2-9]|_to_|2[a-z]|encoder|perceiver|resampl|pool|(^|_)ip(_|$)", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"(^|[._])(ff|ffn|mlp|feed_?forward|experts?)([._\d]|$)|feedforward", re.IGNORECASE)
_MODULATION = re.compile(
    r"norm|modul|(^|[._])mod([._\d]|$)|ada_?ln|adaptive|scale_shift|(^|[._])t?emb|time_", re.IGNORECASE
)
# A stack of that name belongs to the model's inputs, or to something beside it.
_AUXILIARY = re.compile(r"emb|extract|resampl|pool|project|perceiver|vision|siglip|adapter|control", re.IGNORECASE)
_BEFORE = re.compile(r"time|text|caption|context|patch|cond|guidance|proj_in|(^|_)in(put)?(_|$)", re.IGNORECASE)
_BEHIND = re.compile(r"out|final|head|last", re.IGNORECASE)
