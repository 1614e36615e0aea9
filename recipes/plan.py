"""The plan: a format for every Linear of a model, and the reason. One LayerPlan each.

    family row gives a layer's role  ->  recipe has a setting for that role  ->  LayerPlan

A plan fixes formats. Of transforms, low rank and rounding it lists the candidates (`Method`); when a layer is
quantized, the error of held-out tokens decides between them.

Nothing here reads weights or imports torch: a model is a list of `LinearShape`s (see quantize/structure.py).
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from fluxq.recipes.computing import Attention, Attentions, Steps, attention_in_words, gathered
from fluxq.recipes.family import Family, InputGroup, Kind, Maker, Producer, matches
from fluxq.recipes.formats import HADAMARDS, Scheme
from fluxq.recipes.recipe import FOLDING, Compat, Component, Operand, Override, Profile, Recipe, Rounding, Transform

GENERIC = "generic"  # the name of a family that is read from a model's structure
UNKNOWN_ROLE = "other"
_MUCH = 0.05  # of the weights: worth a note where a recipe leaves them out
KEPT_ROLE = "kept"
MODULATION_ROLE = "modulation"
DEFLATED_K = 6144  # wider rows do not fit on chip, and deflation needs a whole one before the first element is rounded


@dataclass(frozen=True)
class LinearShape:
    """A Linear of the model, or a 1x1 convolution: module path, out features N, in features K, and if it has a bias."""

    name: str
    n: int
    k: int
    bias: bool = True


Folding = Literal["nothing", "factors", "factors and mean"]
W = TypeVar("W", bound=str)


@dataclass(frozen=True)
class Method:
    """Method that may be tried when a layer is quantized; an empty one is rounding to nearest with scales from amax.

    transforms: of x, the same for all that share it.
    folding: for each segment of x, what rows of the Linears that make it can take in; empty where a modulation takes
        all, or nothing has to be taken in.
    powers_of_two: these rows have no fp32 scale each, so that other factors would not go in exactly.
    hadamard: the largest block that K divides into, 0 without "hadamard".
    rank: that may be spent, 0 for none.
    deflate: part of the rank that may go to directions of x.
    gptq, search: choice of codes and of scales.
    weights_46, activations_46: nvfp4 blocks choose between two scales.
    joint: low rank and codes are improved in turns against the quantized x.
    wide: searches look at more candidates.
    """

    transforms: tuple[Transform, ...] = ()
    folding: tuple[Folding, ...] = ()
    powers_of_two: bool = False
    hadamard: int = 0
    rank: int = 0
    deflate: bool = False
    gptq: bool = False
    search: bool = False
    weights_46: bool = False
    activations_46: bool = False
    joint: bool = False
    wide: bool = False

    @property
    def is_plain(self) -> bool:
        """True if there is nothing to try."""
        return self == Method()

    @property
    def needs_data(self) -> bool:
        """True if a method is fitted to, or judged by, inputs; two scales of weights are chosen without."""
        return bool(self.transforms or self.rank or self.gptq or self.search or self.activations_46)

    @property
    def stored(self) -> tuple[str, ...]:
        """Parts that take room in a checkpoint beside the codes, if they are kept."""
        vectors = tuple(name for name in self.transforms if name != "hadamard")
        return (*vectors, *("low rank",) * bool(self.rank))

    def __str__(self) -> str:
        words = [f"hadamard {self.hadamard}" if name == "hadamard" else name for name in self.transforms]
        words += ["factors that are powers of two"] * self.powers_of_two
        words += [f"rank {self.rank}"] * bool(self.rank) + ["deflate"] * self.deflate
        words += ["gptq"] * self.gptq + ["search"] * self.search
        words += ["4/6 of weights"] * self.weights_46 + ["4/6 of activations"] * self.activations_46
        words += ["joint"] * self.joint + ["wide"] * self.wide
        return ", ".join(words) or "plain"


@dataclass(frozen=True)
class LayerPlan:
    """Plan for one Linear.

    role: of the family row.
    group: input that it shares with other Linears, "" if it is not known.
    joined: whether the group also shares the scale of a whole matrix, where the format has one.
    scheme: None keeps 16 bit.
    reason: for people.
    method: the candidates.
    made_by: maker of its input.
    split: start along K of the second of two tensors side by side, 0 for a single one.
    block: path of its block, "" for none.
    together: group whose mean and factors its own shares, because the same Linears take them in; its own name for none.
    """

    name: str
    n: int
    k: int
    role: str
    group: str
    joined: bool
    scheme: Scheme | None
    reason: str
    method: Method = Method()
    made_by: Maker = "outside"
    split: int = 0
    block: str = ""
    together: str = ""

    @property
    def segments(self) -> tuple[int, ...]:
        """Widths of the tensors that stand side by side along K."""
        return (self.split, self.k - self.split) if self.split else (self.k,)

    @property
    def is_observed(self) -> bool:
        """True if calibration observes its input: modulation reads one row per image and is left out."""
        return self.group != "" and self.role != MODULATION_ROLE

    @property
    def scale_group(self) -> str:
        """The name that joined layers have in common whose weights share the scale of a whole matrix; "" for others."""
        weights = self.scheme.weights if self.scheme else None
        return f"{self.group} {weights.name}" if self.joined and weights and weights.has_tensor_scale else ""

    def describe(self) -> dict[str, object]:
        """Return the layer as JSON."""
        return {
            "name": self.name,
            "shape": [self.n, self.k],
            "role": self.role,
            "scheme": str(self.scheme) if self.scheme else "16bit",
            "may_try": str(self.method),
            "bits_per_weight": self.bits_per_weight,
            "reason": self.reason,
        }

    @property
    def stored_bits(self) -> int:
        """Bits this layer's weight takes in the checkpoint."""
        if self.scheme is None:
            return 16 * self.n * self.k
        return self.scheme.stored_bits(self.n, self.k)

    @property
    def most_stored_bits(self) -> int:
        """Bits this layer's weight takes in the checkpoint, if it ends with every method."""
        if self.scheme is None:
            return self.stored_bits
        tried = self.method.transforms
        scheme = replace(self.scheme, rank=self.method.rank, center="center" in tried, smooth="smooth" in tried)
        return scheme.stored_bits(self.n, self.k)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights."""
        return self.stored_bits / (self.n * self.k)


@dataclass(frozen=True)
class Plan:
    """The plan of one component.

    notes: settings of the recipe that the family or its shapes do not have.
    attention: arithmetic of its self-attention, of single modules by their paths.
    steps: those kept in 16 bit, of a transformer.
    compute: share of the steps of a call that it computes.
    kind: of the family.
    """

    family: str
    component: str
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = ()
    attention: Attentions = "16bit"
    steps: Steps | None = None
    kind: Kind = "transformer"
    compute: float | None = None

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that leave 16 bit."""
        return tuple(layer for layer in self.layers if layer.scheme is not None)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the blocks whose inputs calibration observes, in the model's order."""
        return tuple(dict.fromkeys(layer.block for layer in self.layers if layer.block and layer.is_observed))

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of all Linears, 16-bit ones included, over their weights, as everywhere."""
        return sum(layer.stored_bits for layer in self.layers) / sum(layer.n * layer.k for layer in self.layers)

    @property
    def most_bits_per_weight(self) -> float:
        """Bits per weight if every layer ends with every method; fitting decides."""
        return sum(layer.most_stored_bits for layer in self.layers) / sum(layer.n * layer.k for layer in self.layers)

    def schemes(self) -> list[tuple[str, Scheme]]:
        """Return (layer name, scheme) of the quantized layers, in the model's order."""
        return [(layer.name, layer.scheme) for layer in self.layers if layer.scheme is not None]

    def statistics_groups(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Return input group -> its quantized layers, for the inputs that calibration observes."""
        groups: dict[str, list[LayerPlan]] = {}
        for layer in self.quantized:
            if layer.is_observed:
                groups.setdefault(layer.group, []).append(layer)
        return {name: tuple(members) for name, members in groups.items()}

    def static_groups(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Return the input groups that need a calibrated `input_scale`, with the layers that share it."""
        groups = self.statistics_groups().items()
        static = {g: tuple(m for m in members if m.scheme and m.scheme.static_input) for g, members in groups}
        return {group: members for group, members in static.items() if members}


def sharing_vectors(groups: Mapping[str, Sequence[LayerPlan]]) -> list[list[str]]:
    """Return the names of input groups, those in one list that have one mean and one set of factors."""
    shared: dict[str, list[str]] = {}
    for name, members in groups.items():
        shared.setdefault(members[0].together or name, []).append(name)
    return list(shared.values())


def component_recipe(recipe: Recipe, component: str | None, family: Family) -> Component:
    """Return a recipe's entry for a component of the class that `family` describes.

    Its own entry, where the recipe names the component; else a transformer takes the entry `transformer`, and a text
    encoder or VAE that entry's weight format, weight-only and rounded to nearest. component: None where the name is not
    known, as in a class loaded by itself. Raises ValueError for a component without an entry, and for settings that are
    not worth it, or not possible, in a component that runs once: activations, and everything that is fitted to inputs.
    """
    entry = recipe.components.get(component or ("vae" if family.kind == "vae" else ""))
    if entry is not None:
        if family.kind != "transformer" and entry.inputs:
            raise ValueError(
                f"{component or 'vae'}: it runs once per image, so quantizing its activations saves no time worth the "
                "error; write `activations: null`"
            )
        if family.kind != "transformer" and not _is_plain(entry):
            raise ValueError(
                f"{component or 'vae'}: calibration looks at transformers only, so this one is rounded to nearest; "
                "write `transforms: []`, `low_rank: null` and `rounding: {method: rtn, scales: amax}`"
            )
        if family.kind != "transformer" and entry.attention != "16bit":
            raise ValueError(
                f"{component or 'vae'}: it runs once per image, so attention in {attention_in_words(entry.attention)} "
                "saves no time worth the error; leave out `attention`"
            )
        return entry
    main = recipe.components.get("transformer")
    if main is None or (component is None and family.kind == "vae"):
        raise ValueError(f"the recipe says nothing about {component or family.model}: give it an entry in `components`")
    if family.kind == "transformer":
        return main
    return Component(weights=main.weights.model_copy(update={"four_over_six": False}))


def plan_of(
    family: Family,
    component: str,
    linears: Sequence[LinearShape],
    recipe: Recipe,
    entry: Component,
    include: Sequence[str] = (),
    is_calibrated: bool = False,
) -> Plan:
    """Return the plan of a component under an entry of the recipe. is_calibrated: there are statistics already."""
    plan = make_plan(
        family,
        component,
        entry,
        linears,
        static_inputs=recipe.profile != "rtn" and (recipe.needs_data(entry) or is_calibrated),
        profile=recipe.profile,
        compat=recipe.compat,
        include=include,
    )
    if family.kind != "transformer" or recipe.steps is None:
        return plan
    return replace(plan, steps=recipe.steps.kept, compute=recipe.steps.compute)


def make_plan(
    family: Family,
    component_name: str,
    recipe: Component,
    linears: Sequence[LinearShape],
    *,
    static_inputs: bool,
    profile: Profile = "balanced",
    compat: Compat = "portable",
    include: Iterable[str] = (),
) -> Plan:
    """Plan every Linear in the model's own order.

    A layer whose K is not in whole groups of the recipe's format takes the next one of `NEXT_FORMAT` that holds it.
    Raises ValueError for a pattern or role that matches nothing, for an override whose format cannot hold a shape, for
    a rank that a layer does not have and for attention in fp8 where a family's cannot be replaced.

    static_inputs: activations with one scale for all tokens get it from calibration.
    profile, compat: of the recipe; they limit the methods.
    include: patterns of the only layers that are quantized.
    """
    names = [linear.name for linear in linears]
    attention = _attention(family, recipe.attention, names)
    included = list(include)
    require_matches([*recipe.exclude, *included, *(p for o in recipe.overrides for p in o.patterns)], names)
    notes = [*family.notes, *_absent_roles(family, recipe)]
    layers = []
    for linear in linears:
        layer = located(family, linear)
        layer = _decide(layer, family, recipe, static_inputs)
        if layer.scheme is not None:
            pattern = next((p for p in recipe.exclude if matches(p, layer.name)), None)
            if pattern is not None:
                layer = replace(layer, scheme=None, reason=f"excluded by {pattern!r}")
            elif included and not any(matches(p, layer.name) for p in included):
                layer = replace(layer, scheme=None, reason="not among the included layers")
        if layer.scheme is not None:
            layer.scheme.weights.check_shape(layer.n, layer.k, layer.name)
            if layer.scheme.activations is not None:
                layer.scheme.activations.check_shape(1, layer.k, f"input of {layer.name}")
        layers.append(layer)
    if not any(layer.scheme for layer in layers):
        stay = f"the recipe or the {family.name} row leaves every Linear in 16 bit"
        which = stay if layers else "the model has no Linears"
        raise ValueError(f"{component_name}: {which}; there is nothing to quantize")
    instead = Counter(words for layer in layers if layer.scheme for words in _instead(layer, recipe))
    notes += _modulation_unsaid(recipe, layers)
    notes += [f"{words} ({count} of {len(layers)} Linears)" for words, count in instead.items()]
    layers = _with_methods(layers, {linear.name: linear for linear in linears}, family, recipe, profile, compat)
    return Plan(family.name, component_name, tuple(layers), tuple(notes), attention, kind=family.kind)


def _modulation_unsaid(recipe: Component, layers: Sequence[LayerPlan]) -> list[str]:
    """Return a note if leaving out the key `modulation` leaves many weights in 16 bit; else an empty list."""
    left = sum(la.n * la.k for la in layers if la.role == MODULATION_ROLE and la.scheme is None)
    share = left / max(1, sum(la.n * la.k for la in layers))
    if "modulation" in recipe.model_fields_set or share < _MUCH:
        return []
    return [
        f"the recipe says nothing of modulation, so that stays in 16 bit, {share:.0%} of the weights: add `modulation: "
        "{format: fp8}`, or `modulation: null` if it is meant to"
    ]


def attention_paths(family: Family, linears: Iterable[str]) -> list[str]:
    """Return the paths of a model's self-attention that can be replaced, by the names of its Linears."""
    paths: dict[str, None] = {}
    for name in linears:
        for pattern in family.self_attention:
            path = ".".join(name.split(".")[: pattern.count(".") + 1])
            paths |= {path: None} if matches(pattern, path) else {}
    return list(paths)


def attention_words(attention: Mapping[W, Sequence[str]], paths: Sequence[str]) -> dict[str, W]:
    """Return path -> word of the attention modules that patterns name; ValueError for one that names none, or again."""
    words: dict[str, W] = {}
    for word, patterns in attention.items():
        require_matches(patterns, paths, "self-attention")
        for path in (path for path in paths if any(matches(pattern, path) for pattern in patterns)):
            if words.setdefault(path, word) != word:
                raise ValueError(f"attention: {path} is named under {words[path]} and under {word}; name it once")
    return words


def _attention(family: Family, attention: Attentions, linears: Sequence[str]) -> Attentions:
    """Return the attention of a plan, with paths in place of patterns; ValueError where it cannot be so."""
    require_replaceable_attention(family, attention_in_words(attention))
    if isinstance(attention, str):
        return attention
    paths = attention_paths(family, linears)
    plain: dict[str, Attention] = dict.fromkeys(paths, "16bit")
    return gathered(plain | attention_words(attention, paths))


def require_replaceable_attention(family: Family, attention: str) -> None:
    """Raise ValueError for attention in fp8 in a family whose attention cannot be replaced."""
    if attention != "16bit" and not family.self_attention:
        why = "which goes past diffusers' attention dispatcher or gives every call a mask"
        if family.name == GENERIC:
            why = "of which no row says where its self-attention is"
        raise ValueError(f"attention in {attention}: not in {family.model}, {why}; write `attention: 16bit`")


def require_matches(patterns: Iterable[str], names: Sequence[str], what: str = "Linear") -> None:
    """Raise ValueError for the first pattern that matches none of the modules called `names`, with a near one."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            tail = pattern.rpartition(".")[2]
            same_tail = [name for name in names if tail in name.split(".")]
            near = (same_tail or difflib.get_close_matches(pattern, names, n=1, cutoff=0) or ["none"])[0]
            raise ValueError(
                f"pattern {pattern!r} matches no {what} of this model; patterns are whole paths with * for one segment "
                f"and ** for any number, for example {near!r}"
                + (" (`fluxq plan --layers` lists all)" if what == "Linear" else "")
            )


def located(family: Family | None, linear: LinearShape) -> LayerPlan:
    """Return a Linear in 16 bit, with its role and input group. family: None for a class without a row."""
    place = family.locate(linear.name) if family else None
    if place is None:
        role = KEPT_ROLE if family and family.kept(linear.name) else UNKNOWN_ROLE
        return LayerPlan(linear.name, linear.n, linear.k, role, "", False, None, "")
    group, block = place
    name = f"{block}.{group.members[0]}"  # the first member names the group
    layer = LayerPlan(linear.name, linear.n, linear.k, group.role, name, group.joined, None, "", made_by=group.made_by)
    first, *rest = group.segments(linear.n, linear.k)
    return replace(layer, split=first if rest else 0, block=block)


def _decide(layer: LayerPlan, family: Family, recipe: Component, static_inputs: bool) -> LayerPlan:
    """Return the scheme and the reason, before include and exclude."""
    override = override_for(layer, recipe.overrides)
    if override is not None:
        scheme = scheme_of(override.weights, override.activations, static_inputs and layer.is_observed)
        return rotated_by(replace(layer, scheme=scheme, reason=override.reason), recipe)
    if layer.role == KEPT_ROLE:
        return replace(layer, reason=f"16 bit: {family.kept(layer.name)}")
    if layer.role == UNKNOWN_ROLE:
        return replace(layer, reason=f"16 bit: the {family.name} row does not name it")
    if layer.role == MODULATION_ROLE:
        reason = "weight-only: its input is one row per image, so quantizing that saves nothing"
        if recipe.modulation is None:
            return replace(layer, reason="16 bit: modulation scales every token, and the recipe leaves it alone")
    else:
        reason = f"{layer.role}: the recipe's main format"
    weights, activations = _operands(layer, recipe)
    scheme = scheme_of(weights, activations, static_inputs)
    return rotated_by(replace(layer, scheme=scheme, reason="; ".join([reason, *_instead(layer, recipe)])), recipe)


def rotated_by(layer: LayerPlan, recipe: Component) -> LayerPlan:
    """Return a layer with the rotation that a recipe makes of quantized inputs, in the largest blocks that fit K."""
    rotation, scheme = recipe.hadamard, layer.scheme
    if rotation is None or scheme is None or scheme.activations is None:
        return layer
    size = _hadamard(layer, rotation.sizes)
    reason = (
        layer.reason if size == rotation.size else f"{layer.reason}; {_smaller_blocks(layer, size, rotation.sizes)}"
    )
    return replace(
        layer, scheme=replace(scheme, hadamard=size, regular=rotation.is_regular and size > 0), reason=reason
    )


def _smaller_blocks(layer: LayerPlan, size: int, sizes: Sequence[int]) -> str:
    """Return in words that blocks have this size, 0 for none, in place of the next larger one."""
    width = " + ".join(map(str, layer.segments))
    wanted = min(each for each in sizes if each > size)
    return f"{f'Hadamard blocks of {size}' if size else 'no Hadamard'}: K = {width} is not in multiples of {wanted}"


def _with_methods(
    layers: Sequence[LayerPlan],
    shapes: Mapping[str, LinearShape],
    family: Family,
    recipe: Component,
    profile: Profile,
    compat: Compat,
) -> list[LayerPlan]:
    """Return the layers with the methods that may be tried, and with the reasons where the recipe's are more.

    Modulation, and layers whose input is not observed, are rounded to nearest.
    """
    if profile == "rtn":
        return list(layers)
    schemes = {layer.name: layer.scheme for layer in layers}
    readers: dict[str, set[tuple[object, bool]]] = {}  # group -> forms of x that its quantized Linears read
    for layer in layers:
        if layer.scheme is not None and layer.is_observed:
            readers.setdefault(layer.group, set()).add(_made_of_x(layer, recipe))
    planned = []
    together: dict[tuple[str, tuple[Producer, ...]], str] = {}  # block, producers -> the first group that reads them
    for layer in layers:
        place = family.locate(layer.name)
        if layer.scheme is None or not layer.is_observed or place is None:
            planned.append(layer)
        elif len(readers[layer.group]) > 1:
            why = "plainly rounded: the Linears that share its input quantize it in different ways"
            planned.append(layer if _is_plain(recipe) else replace(layer, reason=f"{layer.reason}; {why}"))
        else:
            group, block = place
            folding = _folding(layer, group, block, family, shapes, schemes) if compat in FOLDING else ()
            if isinstance(folding, tuple) and folding:
                layer = replace(layer, together=together.setdefault((block, group.producers), layer.group))
            makers = {schemes[name] for p in group.producers if (name := f"{block}.{p.linear}") in schemes}
            takes_any = all(scheme is not None and scheme.weights.has_row_scale for scheme in makers)
            planned.append(with_method(layer, recipe, profile, folding, powers_of_two=not takes_any))
    return planned


def with_method(
    layer: LayerPlan,
    recipe: Component,
    profile: Profile,
    folding: tuple[Folding, ...] | str = (),
    *,
    powers_of_two: bool = True,
) -> LayerPlan:
    """Return a layer with the methods of the recipe.

    folding: as in `Method`; or the reason against mean and factors of its input.
    powers_of_two: as in `Method`, where anything folds into rows.
    """
    if profile == "rtn":
        return layer
    weights, activations = _operands(layer, recipe)
    transforms: list[Transform] = list(recipe.transforms)
    reasons: list[str] = []
    if isinstance(folding, str):
        allowed, why_not, folding = set[str](), folding, ()
    else:
        allowed = {"smooth", "center"} if not folding or "factors and mean" in folding else {"smooth"}
        why_not = "what makes its input, or what reads it, has no bias for a mean"
    refused = {name: word for name, word in VECTORS.items() if name in transforms and name not in allowed}
    if refused:
        transforms = [name for name in transforms if name not in refused]
        reasons.append(f"not {' or '.join(refused.values())}: {why_not}")
    if not any(name in transforms for name in VECTORS):
        folding = ()
    powers_of_two = powers_of_two and bool(folding) and "smooth" in transforms
    if powers_of_two:
        reasons.append("factors are powers of two, which rows of the Linears that make its input can take in")
    hadamard = _hadamard(layer, HADAMARDS) if "hadamard" in transforms else 0
    if "hadamard" in transforms and hadamard < max(HADAMARDS):
        reasons.append(_smaller_blocks(layer, hadamard, HADAMARDS))
        transforms = [name for name in transforms if name != "hadamard" or hadamard]
    rank = _rank(layer, recipe)
    deflate = bool(rank and recipe.low_rank and recipe.low_rank.deflate)
    if deflate and (layer.made_by != "norm" or layer.k > DEFLATED_K):
        why = "its input is not normalised" if layer.made_by != "norm" else f"K is above {DEFLATED_K}"
        reasons.append(f"no deflation: {why}")
        deflate = False
    gptq = recipe.rounding.method == "gptq" and profile != "fast"
    method = Method(
        transforms=tuple(transforms),
        folding=folding,
        powers_of_two=powers_of_two,
        hadamard=hadamard,
        rank=rank,
        deflate=deflate,
        gptq=gptq,
        search=recipe.rounding.scales == "search",
        weights_46=weights.four_over_six,
        activations_46=activations is not None and activations.four_over_six,
        joint=gptq and profile == "best",
        wide=profile == "best" and not _is_plain(recipe),
    )
    return replace(layer, method=method, reason="; ".join([layer.reason, *reasons]))


def _folding(
    layer: LayerPlan,
    group: InputGroup,
    block: str,
    family: Family,
    shapes: Mapping[str, LinearShape],
    schemes: Mapping[str, Scheme | None],
) -> tuple[Folding, ...] | str:
    """Return what folds exactly into what makes a group's input, as in `Method`; the reason if nothing does.

    A factor for each channel folds into rows of the modulation's weight, which then needs a scale for each row or none;
    the 1 of 1 + scale, the mean and the shift fold into its bias. Into rows of a Linear that makes the input any factor
    folds where they have one fp32 scale each; a power of two folds whatever the format of the scales in a row.
    """
    if group.producers:
        readers = family.sharing_vectors(group, block)
        with_mean = all(shapes[name].bias for name in readers if name in shapes)
        folding: list[Folding] = []
        for index, width in enumerate(layer.segments):
            made_by = [(p, f"{block}.{p.linear}") for p in group.producers if p.segment == index]
            present = [(producer, shapes[name]) for producer, name in made_by if name in shapes]
            shifting = [shape for producer, shape in present if producer.shifts]
            if not present or any(not _takes_factors(p, shape, width, schemes) for p, shape in present):
                folding.append("nothing")
            else:
                has_bias = with_mean and bool(shifting) and all(shape.bias for shape in shifting)
                folding.append("factors and mean" if has_bias else "factors")
        if any(word != "nothing" for word in folding):
            return tuple(folding)
        return f"its input is made by {MAKERS[group.made_by]}, whose Linears have no row for each channel, or no scale"
    if group.modulation is None:
        return f"its input is made by {MAKERS[group.made_by]}, which nothing can be folded into"
    name = f"{block}.{group.modulation.linear}"
    if name not in schemes:
        return f"its input is modulated by {name}, which is not among the layers"
    scheme = schemes[name]
    if scheme is not None and not scheme.weights.has_row_scale:
        return f"its input is modulated by {name} in {scheme.weights.name}, which has no scale for each row"
    return ()


def _takes_factors(producer: Producer, shape: LinearShape, width: int, schemes: Mapping[str, Scheme | None]) -> bool:
    """Tell whether a Linear has rows for each channel of a segment, and scales of their own for these rows."""
    rows, scheme = producer.rows(shape.n, width), schemes[shape.name]
    return 0 <= rows.start and rows.stop <= shape.n and (scheme is None or scheme.weights.block[0] == 1)


def _hadamard(layer: LayerPlan, sizes: Sequence[int]) -> int:
    """Return the largest block that every segment of K is a multiple of; 0 for none."""
    fitting = [size for size in sizes if all(width % size == 0 for width in layer.segments)]
    return max(fitting, default=0)


def _rank(layer: LayerPlan, recipe: Component) -> int:
    if recipe.low_rank is None:
        return 0
    rank = recipe.low_rank.rank_of(layer.n, layer.k)
    if rank > min(layer.n, layer.k):
        raise ValueError(
            f"{layer.name}: low_rank asks for rank {rank}, and its weight ({layer.n}, {layer.k}) has at most "
            f"{min(layer.n, layer.k)}; write a share such as 1/96, or exclude the layer"
        )
    return rank


def _made_of_x(layer: LayerPlan, recipe: Component) -> tuple[object, bool]:
    """Return the form in which a layer reads its input; only layers with the same form can share a transform of x."""
    activations = _operands(layer, recipe)[1]
    return (layer.scheme and layer.scheme.activations), activations is not None and activations.four_over_six


def _operands(layer: LayerPlan, recipe: Component) -> tuple[Operand, Operand | None]:
    """Return the weights and activations of a quantized layer, in the recipe's formats or the next that hold K.

    An override whose format does not hold it was refused by `make_plan`.
    """
    weights, activations = _recipe_operands(layer, recipe)
    return _holding(weights, layer.k), None if activations is None else _holding(activations, layer.k)


def _recipe_operands(layer: LayerPlan, recipe: Component) -> tuple[Operand, Operand | None]:
    override = override_for(layer, recipe.overrides)
    if override is not None and override.weights is not None:
        return override.weights, override.activations
    if layer.role == MODULATION_ROLE and recipe.modulation is not None:
        return recipe.modulation, None
    return recipe.weights, recipe.activations


def _holding(operand: Operand, k: int) -> Operand:
    """Return the operand, or the first of those after it in `NEXT_FORMAT` that holds rows of k numbers."""
    while k % operand.row.unit:
        operand = Operand(format=NEXT_FORMAT[operand.row.name])
    return operand


def _instead(layer: LayerPlan, recipe: Component) -> list[str]:
    """Return a text for each format that a layer takes instead of the recipe's, with the reason."""
    pairs = zip(_recipe_operands(layer, recipe), _operands(layer, recipe), strict=True)
    changed = dict.fromkeys((a.row, t.row) for a, t in pairs if a is not None and t is not None and a != t)
    why = f"K = {layer.k} is not in multiples of"
    return [f"{substitute.name}, not {row.name}: {why} {row.group_size}" for row, substitute in changed]


def _is_plain(recipe: Component) -> bool:
    """Tell whether an entry has nothing but rounding to nearest."""
    operands = [recipe.weights, *(o.weights for o in recipe.overrides if o.weights), *recipe.inputs]
    two_scales = any(operand.four_over_six for operand in operands)
    fitted = recipe.transforms or recipe.low_rank or recipe.rounding != Rounding()
    return not fitted and not two_scales


def scheme_of(weights: Operand | None, activations: Operand | None, static_inputs: bool) -> Scheme | None:
    """Return the scheme of a recipe's operands, without what is tried; None for weights in 16 bit."""
    if weights is None:
        return None
    row = activations.row if activations else None
    return Scheme(weights.row, row, static_input=bool(row and row.has_tensor_scale and static_inputs))


def override_for(layer: LayerPlan, overrides: Sequence[Override]) -> Override | None:
    """Return the override that decides about a layer, None without one; only patterns reach layers of no group."""
    role = layer.role if layer.group else ""
    for override in reversed(overrides):
        if override.role == role or any(matches(pattern, layer.name) for pattern in override.patterns):
            return override
    return None


def _absent_roles(family: Family, recipe: Component) -> list[str]:
    roles = [override.role for override in recipe.overrides if override.role]
    return [f"role {role!r}: the {family.name} family has none, skipped" for role in roles if role not in family.roles]


# Format -> format of layers whose K is not in whole groups of it: the same kind of element, at last with a scale for
# each row, which holds any K. Kernels have no int4 in groups of 32, and padded rows would be another file.
NEXT_FORMAT = {"int4_g128": "int4", "int4": "int8", **dict.fromkeys(("nvfp4", "mxfp4", "mxfp8", "fp8_1x128"), "fp8")}
VECTORS: dict[Transform, str] = {"center": "centred", "smooth": "smoothed"}  # one number for each channel
MAKERS: dict[Maker, str] = {
    "norm": "a norm without a modulation of its own",
    "attention": "attention",
    "activation": "an activation function",
    "concatenation": "attention and an activation function side by side",
    "outside": "another block or model",
    "unknown": "something that no row tells of",
}
