"""Cost of a plan on a GPU: memory, FLOPs, bytes and attainable time of one forward pass. Everything is modelled.

    time of a step = max(FLOPs / attained FLOP/s, bytes / attained bytes/s, instructions / begun a second)

Attained is a data sheet's peak times the efficiency of devices.py; FLOPs outside the matrix units add to the time of
instructions. Instructions are those of our kernels that make or
quantize an input, counted in machine code (INSTRUCTIONS); no stall is in them, and none are counted on AMD's chips nor
for `ideal`. A step is a Linear, an attention, or one of the passes over memory between them, and those can be run in
three ways, LEVELS:

    unfused  every step is a kernel of its own: norm and modulation, norm and rotation of q and k, activation,
             concatenation, gate and residual, quantization, both halves of a low-rank branch
    fused    as the kernels of this project can: norm or activation together with the quantization that follows,
             activation (16 bit), gate, residual and low rank in the matmul, concatenated halves written in place
    ideal    also what they cannot: activation and its quantization, norm and rotation of q and k in the matmul before

Transforms of x are part of the pass that quantizes it: mean and factors are two more vectors to read, a Hadamard block
of `size` is a product of 2·size FLOPs an element on the bf16 matrix units, one of the regular matrix log2(size) sums
and a product on the units for fp32, as butterflies are, 4-over-6 rounds twice on these. Deflation needs a whole row of
x before its first element can be quantized: a pass reads x for t = x·basisᵀ, a second one reads it again and quantizes
it. A norm has the row and makes t itself, but then writes x in 16 bit; only `ideal` keeps it on chip. Where the weight
is re-encoded at load, all of this but mean and factors is collapsed into the weight and costs nothing.

Convolutions of UNets and SANA stay in 16 bit and are priced as products, with the norm and the activation before each;
one of single channels is done outside the matrix units, and so is linear attention, in fp32. An expert is priced with
its share of the tokens, gathering them as a norm.

Left out: launches, which small images wait for, biases, embeddings, other convolutions, routers, the last norm, skip
connections of a UNet, and what decoding 4-bit weights in a matmul costs. Nothing here reads weights or imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from fluxq.recipes.computing import Attention, attention_at
from fluxq.recipes.devices import INSTRUCTIONS, Device, Efficiency, is_decoded
from fluxq.recipes.family import Maker, matches
from fluxq.recipes.formats import BF16, FORMATS, Format, Product, Scheme
from fluxq.recipes.plan import LayerPlan, Plan
from fluxq.recipes.workloads import STREAMS as STREAMS
from fluxq.recipes.workloads import WORKLOADS, Convolution, ForwardPass, passes_before, stream_of
from fluxq.recipes.workloads import forward_pass as forward_pass

Level = Literal["unfused", "fused", "ideal"]
Prefer = Literal["speed", "memory"]
LEVELS: tuple[Level, ...] = ("unfused", "fused", "ideal")


@dataclass(frozen=True)
class Route:
    """Way in which a GPU computes a scheme.

    arithmetic: of its matrix units.
    activations: format that inputs are quantized to, None for 16 bit.
    weights: format in memory, None for 16 bit.
    is_collapsed: whether re-encoding at load makes one weight of the quantized one, the low-rank branch and all that is
        done to x but mean and factors.
    about: for people.
    """

    arithmetic: str
    activations: Format | None
    weights: Format | None
    is_collapsed: bool
    about: str


@dataclass(frozen=True)
class Step:
    """A Linear, an attention or a pass over memory.

    part: the row of the table that counts it.
    kind: "matmul", "low rank", "attention", "norm", "quantize", …
    arithmetic: of its FLOPs; "" where it has none worth counting.
    bytes: by level; 0 where a level has no such step.
    scalar_flops: FLOPs outside the matrix units.
    instructions: that all threads of a kernel of ours execute, by level; a level without one has none counted.
    """

    part: str
    kind: str
    name: str
    arithmetic: str
    flops: float
    bytes: Mapping[Level, float]
    scalar_flops: float = 0
    instructions: Mapping[Level, float] = field(default_factory=dict)

    def seconds(self, device: Device, level: Level) -> float:
        """Return the attainable time."""
        return max(self.compute_seconds(device, level), self.bytes[level] / device.bytes_per_second)

    def compute_seconds(self, device: Device, level: Level = "fused") -> float:
        """Return the part of the time that more bandwidth would not shorten."""
        scalar = self.scalar_flops / device.scalar_flops
        scalar += self.instructions.get(level, 0) / device.instructions_per_second  # the same schedulers begin both
        if not self.flops:
            return scalar
        is_attention = self.kind == "attention"
        attained = (device.attention_flops if is_attention else device.flops)(self.arithmetic)
        return max(self.flops / attained, scalar)


@dataclass(frozen=True)
class Part:
    """A row of the table: layers, bytes in the checkpoint and at run time, FLOPs, seconds by level and in 16 bit."""

    name: str
    layers: int
    stored_bytes: float
    resident_bytes: float
    flops: float
    seconds: Mapping[Level, float]
    seconds_16bit: float

    @property
    def speedup(self) -> float:
        """16 bit with every step a kernel of its own, over fused."""
        return self.seconds_16bit / self.seconds["fused"] if self.seconds["fused"] else 1.0

    def describe(self) -> dict[str, object]:
        """Return the row as JSON."""
        return {
            "part": self.name,
            "layers": self.layers,
            "stored_gb": self.stored_bytes / 1e9,
            "resident_gb": self.resident_bytes / 1e9,
            "tflop": self.flops / 1e12,
            **{f"ms_{level}": 1e3 * self.seconds[level] for level in LEVELS},
            "ms_16bit_unfused": 1e3 * self.seconds_16bit,
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Cost:
    """Cost of a plan on a GPU.

    parts: rows of the table, without the total.
    routes: scheme -> its route.
    attention: routes of self-attention, of which modules may have several.
    """

    device: Device
    forward: ForwardPass
    parts: tuple[Part, ...]
    total: Part
    routes: Mapping[str, Route]
    attention: tuple[Route, ...]

    def efficiencies(self) -> dict[str, Efficiency]:
        """Return name -> efficiency of those in this cost."""
        arithmetics = {"bf16": None, **{route.arithmetic: None for route in self.routes.values()}}
        used = {name: self.device.efficiency(name) for name in arithmetics}
        on_scalars = any(Scheme.parse(scheme).four_over_six for scheme in self.routes)
        if on_scalars or any(map(_is_promoted, self.routes.values())):
            used.setdefault("fp32", self.device.scalar)
        plain, coded = self.device.attention, self.device.attention_fp8
        first, *others = dict.fromkeys(plain if each.arithmetic == "bf16" else coded for each in self.attention)
        of_attention = {"attention": plain, "attention in fp8": coded} if others else {"attention": first}
        return used | of_attention | {"memory bandwidth": self.device.streaming}

    @property
    def attention_in_words(self) -> str:
        """The ways in which self-attention is computed."""
        return "; ".join(dict.fromkeys(each.about for each in self.attention))

    def describe(self) -> dict[str, object]:
        """Return the cost as JSON."""
        return {
            "modelled": True,
            "gpu": self.device.name,
            "source": self.device.source,
            "efficiencies": {
                name: {"fraction": efficiency.fraction, "measured": efficiency.measured or None}
                for name, efficiency in self.efficiencies().items()
            },
            "tokens": {"image": self.forward.image, "text": self.forward.text, "batch": self.forward.batch},
            "routes": {scheme: route.about for scheme, route in self.routes.items()},
            "attention": self.attention_in_words,
            "parts": [part.describe() for part in (*self.parts, self.total)],
        }


def cost(plan: Plan, forward: ForwardPass, device: Device, prefer: Prefer = "speed") -> Cost:
    """Return the cost of one forward pass of a plan.

    prefer: "speed" makes 4-bit weights 8 bit where a chip cannot multiply them.
    """
    routes = {str(layer.scheme): route(layer.scheme, device.chip, prefer) for layer in plan.quantized}
    quantized = list(steps(plan, forward, device.chip, prefer))
    plain = list(steps(in_16_bit(plan), forward, device.chip, prefer))
    order = [*dict.fromkeys(PARTS.values()), "other", CONVOLUTIONS, "attention", "elementwise"]
    parts = []
    for name in sorted({step.part for step in quantized}, key=order.index):
        layers = [layer for layer in plan.layers if _part(layer) == name]
        parts.append(_sum(name, layers, quantized, plain, device, prefer))
    parts = [_with_weights(part, forward.convolutions) if part.name == CONVOLUTIONS else part for part in parts]
    total = Part(
        "total",
        sum(part.layers for part in parts),
        sum(part.stored_bytes for part in parts),
        sum(part.resident_bytes for part in parts),
        sum(part.flops for part in parts),
        {level: sum(part.seconds[level] for part in parts) for level in LEVELS},
        sum(part.seconds_16bit for part in parts),
    )
    words: Iterable[Attention] = (plan.attention,) if isinstance(plan.attention, str) else (*plan.attention, "16bit")
    attention = tuple(attention_route(word, device.chip) for word in words)
    return Cost(device, forward, tuple(parts), total, routes, attention)


def group_seconds(
    shapes: Sequence[tuple[int, int]],
    schemes: Sequence[Scheme | None],
    device: Device,
    tokens: int,
    level: Level = "fused",
    made_by: Maker = "outside",
) -> float:
    """Return the modelled time of the Linears that share one input: its making and rounding, products, branches.

    A layer that is narrower than 3072 is priced as if it were that wide, because small layers are stand-ins for real
    ones here and cost little but launches: N, K, rank and deflate are all multiplied by 3072 / K. Each scheme takes the
    device's own `route`. Passes take their bytes' time: with their instructions, stages would need other prices than
    those that were measured (benchmarks/prices.json).

    shapes: (N, K) of each Linear, with one K.
    schemes: of each Linear.
    made_by: maker of the input, whose pass is counted too; "outside" counts only the quantization, as a pass of its
        own.
    """
    widths = {k for _, k in shapes}
    if len(widths) != 1 or len(shapes) != len(schemes):
        raise ValueError(f"{len(shapes)} shapes and {len(schemes)} schemes of widths {sorted(widths)}: want one K")
    times = max(1.0, REAL_WIDTH / widths.pop())
    layers = [
        LayerPlan(
            str(index), round(times * n), round(times * k), "", "", False, _widened(scheme, times), "", made_by=made_by
        )
        for index, ((n, k), scheme) in enumerate(zip(shapes, schemes, strict=True))
    ]
    inputs = {_input(layer, device.chip, "speed") for layer in layers}
    group_steps = list(_input_steps(layers[0], tokens, inputs, device.chip))
    for layer in layers:
        group_steps += _linear_steps(layer, tokens, device.chip, "speed")
    return sum(replace(step, instructions={}).seconds(device, level) for step in group_steps)


def seconds_of_groups(
    plan: Plan,
    forward: ForwardPass,
    device: Device,
    prefer: Prefer = "speed",
    measured: Mapping[Product, float] | None = None,
) -> dict[str, float]:
    """Return input group, or layer without one, or attention -> modelled time of its steps in a forward pass, fused.

    The sum is that of `cost`; a group's time depends on its own layers alone.

    measured: seconds of products, each with the rounding of its input. Only groups whose products all are there are
    returned, with these in place of the model's; none with low-rank branches or deflation, which the key does not know.
    """
    groups = {layer.name: layer.group or layer.name for layer in plan.layers}
    seconds: dict[str, float] = {}
    for step in steps(plan, forward, device.chip, prefer):
        group, is_timed = groups.get(step.name, step.name), measured is not None and step.kind in TIMED
        seconds[group] = seconds.get(group, 0.0) + (0 if is_timed else step.seconds(device, "fused"))
    if measured is None:
        return seconds
    missing = set()
    for layer in plan.layers:
        product = product_of(layer, forward, device.chip, prefer)
        is_known = product in measured and not (layer.scheme and (layer.scheme.rank or layer.scheme.deflate))
        missing |= set() if is_known else {groups[layer.name]}
        seconds[groups[layer.name]] += measured.get(product, 0)
    return {group: seconds[group] for group in dict.fromkeys(groups.values()) if group not in missing}


def product_of(layer: LayerPlan, forward: ForwardPass, chip: str, prefer: Prefer = "speed") -> Product:
    """Return formats of weights and activations, M, N and K of a layer's product on a chip, as `fluxq doctor` has them.

    The formats are those that `fluxq.prepare` makes.
    """
    how, tokens = route(layer.scheme, chip, prefer), forward.tokens(stream_of(layer.name, layer.role, forward.family))
    names = [row.name if row else "16bit" for row in (how.weights, how.activations)]
    formats = BF16 if layer.scheme is None else "-".join(names)
    return formats, round(forward.batch * tokens), layer.n, layer.k


def in_16_bit(plan: Plan) -> Plan:
    """Return the plan with none of its layers quantized, and attention in 16 bit."""
    return replace(plan, layers=tuple(replace(layer, scheme=None) for layer in plan.layers), attention="16bit")


def weight_only(plan: Plan) -> Plan:
    """Return the plan with activations of all layers in 16 bit, as in steps at 16-bit activations; attention too."""
    layers = (replace(layer, scheme=layer.scheme and layer.scheme.weight_only) for layer in plan.layers)
    return replace(plan, layers=tuple(layers), attention="16bit")


def route(scheme: Scheme | None, chip: str, prefer: Prefer = "speed") -> Route:
    """Return the way in which a chip computes a scheme.

    It is the scheme itself, 8-bit weights made at load or in the kernel, or weight-only. Where no kernel was compiled
    for the chip, torch decodes weights at each call and multiplies in fp32.
    """
    if scheme is None:
        return Route("bf16", None, None, False, "16 bit")
    if chip in REFERENCE:
        return Route("fp32", None, scheme.weights, False, f"torch's reference, timed in fp32: {REFERENCE[chip]}")
    if scheme.activations is None:
        if not is_decoded(scheme.weights):
            about = f"torch's reference, timed in fp32: no kernel was written for {scheme.weights.name}"
            return Route("fp32", None, scheme.weights, False, about)
        return Route("bf16", None, scheme.weights, False, "weight-only: decoded to 16 bit in the kernel")
    weights, activations = _kind(scheme.weights), _kind(scheme.activations)
    beside, rates = PROMOTED.get(activations, ("", {}))
    if beside == scheme.weights.name:
        activations = weights
    arithmetic = NATIVE[chip].get(activations)
    if arithmetic is not None and weights == activations:
        how = "" if arithmetic == activations else f", by the chip's {arithmetic} instruction"
        return Route(rates.get(chip, arithmetic), scheme.activations, scheme.weights, False, f"native{how}")
    target = activations if activations in ("fp8", "int8") and arithmetic else EIGHT_BIT[chip]
    arithmetic = NATIVE[chip][target]
    both = "int8 or fp8, timed as " if {"int8", "fp8"} <= NATIVE[chip].keys() else ""  # loading looks at the errors
    if prefer == "memory" and scheme.weights.element.bits == 4:
        about = f"4 bits in memory, decoded in the kernel to {both}{target}"
        return Route(arithmetic, FORMATS[target], scheme.weights, False, about)
    return Route(arithmetic, FORMATS[target], FORMATS[target], True, f"re-encoded at load to {both}{target}")


def attention_route(attention: Attention, chip: str) -> Route:
    """Return the way in which a chip computes self-attention: in fp8 or int8 if it multiplies those, or in 16 bit.

    With int8 the product with v, half of the work, is in fp8, or in 16 bit where the chip has none: all of it is then
    priced as fp8 or as 16 bit.
    """
    arithmetic = NATIVE.get(chip, {}).get("fp8")
    if attention == "16bit":
        return Route("bf16", None, None, False, "16 bit")
    if arithmetic is None and attention == "int8" and "int8" in NATIVE.get(chip, {}):
        return Route("bf16", FORMATS["int8"], None, False, "int8, p and v in 16 bit, timed as 16 bit")
    if arithmetic is None:
        return Route("bf16", None, None, False, "16 bit: the chip does not multiply fp8")
    if attention == "int8":
        return Route(arithmetic, FORMATS["int8"], None, False, "int8, p and v in fp8, timed as fp8")
    how = "" if arithmetic == "fp8" else f", by the chip's {arithmetic} instruction"
    return Route(arithmetic, FORMATS["fp8"], None, False, f"fp8{how}")


def resident_bytes(layer: LayerPlan, chip: str, prefer: Prefer = "speed") -> float:
    """Return the bytes of all tensors that a layer's scheme keeps in the GPU's memory."""
    chip_route, scheme = route(layer.scheme, chip, prefer), layer.scheme
    if scheme is None or chip_route.weights is None:
        return 2 * layer.n * layer.k
    if chip_route.is_collapsed:
        kept = Scheme(chip_route.weights, chip_route.activations, center=scheme.center, smooth=scheme.smooth)
        return kept.stored_bits(layer.n, layer.k) / 8
    return layer.stored_bits / 8


def activation_bytes(plan: Plan, forward: ForwardPass) -> float:
    """Estimate the bytes of activations that live at once in an eager forward pass in 16 bit.

    The estimate is a few percent off; where q and k are rotated in fp32, up to a third more live. The widest step
    counts: a stream twice, with the outputs before and after the operations on them; or an activation's input and
    output, and a stream. A UNet also keeps tensors for its way up.
    """
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault(layer.group or layer.name, []).append(layer)
    widest = 0.0
    for layers in groups.values():
        m = forward.tokens(stream_of(layers[0].name, layers[0].role, forward.family))
        k, n = layers[0].k, sum(layer.n for layer in layers)
        is_activation = layers[0].made_by in ("activation", "concatenation")
        widest = max(widest, m * (2 * k + 3 * n if is_activation else 3 * k + 2 * n))
    kept = 0.0
    for each in forward.convolutions:
        m = forward.tokens(stream_of(each.name, "", forward.family))
        widest = max(widest, m * ((2 if each.depthwise else 3) * each.stride**2 * each.channels + each.n))
        kept += m * each.n * any(matches(pattern, each.name) for pattern in SKIPPED)
    return 2 * forward.batch * (widest + kept)


def decoding(config: Mapping[str, Any], pixels: int, itemsize: int, *, frames: int | None = None) -> int:
    """Return the bytes that a VAE of this configuration needs beside its weights for so many pixels of an image.

    frames: of a video, that it has at once; their pixels may come in patches.
    """
    if frames is not None:
        pixels = pixels * frames // (config.get("patch_size") or 1) ** 2
    halves = (config.get("block_out_channels"), config.get("decoder_block_out_channels"))  # either may be null
    outer = [channels for half in halves for channels in (half or ())[:2]]
    return 4 * itemsize * pixels * max(outer, default=_CHANNELS)


def frames_at_once(vae: str, frames: int) -> int:
    """Return the number of frames that a VAE of this class decodes together: a few, or all and two around them."""
    return min(frames + 2, _FEW_FRAMES.get(vae, frames + 2))


def running(config: Mapping[str, Any], weights: Iterable[Sequence[int]], tokens: int, itemsize: int) -> int:
    """Return the bytes that a model of this configuration needs beside its weights, of these shapes, for tokens."""
    vocabularies = {config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")}
    shapes = [shape for shape in weights if len(shape) > 1]
    widths = [s[0] if s[0] in vocabularies else 3 * (s[0] + prod(s[1:])) for s in shapes]  # logits are made once
    return itemsize * tokens * max(widths, default=0)


def steps(plan: Plan, forward: ForwardPass, chip: str, prefer: Prefer = "speed") -> Iterator[Step]:
    """Yield every step of one forward pass on a chip."""
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault(layer.group or layer.name, []).append(layer)
    for layers in groups.values():
        yield from _group_steps(layers, forward, chip, prefer)
    for layer in plan.layers:
        for pattern, queries, keys in WORKLOADS[forward.family].attention:
            if matches(pattern, layer.name):
                layer_stream = stream_of(layer.name, layer.role, forward.family)
                queries, keys = (layer_stream if stream == "own" else stream for stream in (queries, keys))
                if keys == "linear":
                    yield _linear_attention(layer, forward, queries)
                    continue
                path = layer.name.rpartition(".")[0]
                how = attention_route(attention_at(plan.attention, path) if queries == keys else "16bit", chip)
                yield from (replace(step, name=path) for step in _attention(layer, forward, queries, keys, how))
    for convolution in forward.convolutions:
        yield from _convolution_steps(convolution, forward)


def _group_steps(layers: list[LayerPlan], forward: ForwardPass, chip: str, prefer: Prefer) -> Iterator[Step]:
    """Yield the steps of the Linears that share an input, with those that make it, and those that follow."""
    first = layers[0]
    m = forward.batch * forward.tokens(stream_of(first.name, first.role, forward.family))
    yield from _input_steps(first, m, {_input(layer, chip, prefer) for layer in layers}, chip, forward.gated)
    for layer in layers:
        yield from _linear_steps(layer, m, chip, prefer)
        yield from _output_steps(layer, m, forward)


@dataclass(frozen=True)
class _Input:
    """Input that a matmul reads in place of x: its format, None for 16 bit, and the steps on x before rounding."""

    format: str | None = None
    vectors: int = 0
    deflate: int = 0
    hadamard: int = 0
    regular: bool = False
    four_over_six: bool = False

    def bytes(self, m: float, k: int) -> float:
        return code_bytes(self.format, m, k) if self.format else 2 * m * k


def _input(layer: LayerPlan, chip: str, prefer: Prefer) -> _Input:
    """Return the input that a layer's matmul reads on a chip."""
    chip_route, scheme = route(layer.scheme, chip, prefer), layer.scheme
    name = chip_route.activations.name if chip_route.activations else None
    if scheme is None:
        return _PLAIN
    if chip_route.is_collapsed:
        return _Input(name, scheme.center + scheme.smooth)
    two_scales = scheme.four_over_six and chip_route.activations == scheme.activations
    return _Input(name, scheme.center + scheme.smooth, scheme.deflate, scheme.hadamard, scheme.regular, two_scales)


def _input_steps(layer: LayerPlan, m: float, inputs: set[_Input], chip: str, gated: bool = False) -> Iterator[Step]:
    """Yield the steps that make and quantize a Linear's input (m, K): once for each form that its group reads."""
    plain = 2 * m * layer.k  # bytes of the 16-bit input
    quantized = sorted((form for form in inputs if form != _PLAIN), key=str)
    is_deflated = any(form.deflate for form in quantized)
    activated = (3 if gated else 2) * plain  # read by the activation, with a gate twice as wide, and written
    attended = layer.n / layer.k  # of a concatenation: the share that attention makes, N wide
    if layer.made_by == "norm":
        kept = 2 * plain if _PLAIN in inputs or not quantized else 0  # else the norm writes the quantized input alone
        fused = 2 * plain if is_deflated else kept
        step = _pass("norm", layer, 2 * plain, fused, kept)
        yield replace(step, instructions={"fused": _instructions("norm", _PLAIN, m * layer.k, chip) if fused else 0})
    elif layer.made_by == "activation":
        yield _pass("activation", layer, activated, 0, 0)
    elif layer.made_by == "concatenation":
        yield _pass("activation", layer, activated * (1 - attended), 0, 0)
        yield _pass("concatenation", layer, 2 * plain, 0, 0)
    for index, form in enumerate(quantized):
        t = 2 * m * form.deflate
        if form.deflate:
            alone = plain + t
            ridden = t if layer.made_by == "norm" else alone  # the norm's kernel has the row
            step = _pass("deflate", layer, alone, ridden, ridden)
            yield replace(step, arithmetic="bf16", flops=2 * m * layer.k * form.deflate)
        alone = (plain if index == 0 else 0) + form.bytes(m, layer.k) + 2 * layer.k * form.vectors + t
        fused = ideal = alone
        if layer.made_by == "norm":
            ideal -= plain if index == 0 and _PLAIN in inputs else 0  # the norm has read it
            fused = alone if is_deflated else ideal
        elif not is_deflated:
            ideal *= {"activation": 0, "concatenation": attended}.get(layer.made_by, 1)
        writes_16_bit = layer.made_by == "norm" and (is_deflated or _PLAIN in inputs)  # and is counted with that
        made_by = "quantize" if index or writes_16_bit else layer.made_by
        counts: dict[Level, float] = {
            "unfused": _instructions("quantize", form, m * layer.k, chip),
            "fused": _instructions(made_by, form, m * layer.k, chip),
        }
        step = _pass("quantize" if form.format else "transform", layer, alone, fused, ideal)
        step = replace(step, instructions=counts)
        products = 2 * m * layer.k * (form.deflate + (0 if form.regular else form.hadamard))
        scalar = TWO_SCALES_FLOPS * m * layer.k if form.four_over_six else 0
        scalar += m * layer.k * form.hadamard.bit_length() if form.regular else 0  # log2 of the size, and the root
        yield replace(step, arithmetic="bf16" if products else "", flops=products, scalar_flops=scalar)


def _instructions(made_by: str, form: _Input, elements: float, chip: str) -> float:
    """Return the instructions of the pass that makes so many elements of a form; 0 where none were counted.

    made_by: an input that no kernel of ours makes is only quantized.
    """
    name = form.format or "16bit"
    counts = INSTRUCTIONS.get((made_by, name)) or INSTRUCTIONS.get(("quantize", name), {})
    return elements * counts.get(chip, 0)


def _linear_steps(layer: LayerPlan, m: float, chip: str, prefer: Prefer) -> Iterator[Step]:
    """Yield the product (m, N) = (m, K) · (N, K)ᵀ, and its additions: low-rank branch, deflated directions."""
    n, k = layer.n, layer.k
    chip_route = route(layer.scheme, chip, prefer)
    x = code_bytes(chip_route.activations.name, m, k) if chip_route.activations else 2 * m * k
    decoded = 8 * n * k if chip_route.arithmetic == "fp32" else 0  # written and read again
    sizes: dict[Level, float] = dict.fromkeys(LEVELS, x + resident_bytes(layer, chip, prefer) + decoded + 2 * m * n)
    flops = 2 * m * n * k
    scalar = flops / chip_route.activations.group_size if _is_promoted(chip_route) and chip_route.activations else 0
    yield Step(_part(layer), "matmul", layer.name, chip_route.arithmetic, flops, sizes, scalar)
    if layer.scheme is None or chip_route.is_collapsed:
        return
    rank, deflate = layer.scheme.rank, layer.scheme.deflate
    if rank or deflate:
        fused = 4 * m * rank + 2 * m * deflate  # h is written and read, t is read; matrices are counted with the weight
        unfused = fused + (2 * m * k if rank else 0) + 4 * m * n  # x is read again, y read and written
        sizes = {"unfused": unfused, "fused": fused, "ideal": fused}
        yield Step(_part(layer), "low rank", layer.name, "bf16", 2 * m * (rank * (n + k) + deflate * n), sizes)


def _output_steps(layer: LayerPlan, m: float, forward: ForwardPass) -> Iterator[Step]:
    """Yield the steps on a Linear's output (m, N) before anything multiplies it."""
    out = 2 * m * layer.n
    if layer.role in RESIDUAL_ROLES:
        yield _pass("gate and residual", layer, 3 * out, out, out)
    if forward.normalised and layer.role in ROTATED_ROLES and layer.name.endswith((*QUERY_AND_KEY, *FUSED_QKV)):
        rotated = 2 * (2 * m * layer.k) if layer.name.endswith(FUSED_QKV) else out  # q and k, as wide as the input
        yield _pass("norm and rotation", layer, 2 * rotated, 2 * rotated, 0)


def _attention(layer: LayerPlan, forward: ForwardPass, queries: str, keys: str, how: Route) -> Iterator[Step]:
    """Yield the steps of softmax(QKᵀ)V of N channels; `layer` is named by the family's workload.

    From fp8 codes, the passes that make those come first, and before codes the scales of all tokens of k and v.
    """
    m, s = forward.tokens(queries), forward.tokens(keys)
    channels = forward.batch * layer.n
    read = 2 * channels * (m + 2 * s)
    if how.activations:
        codes = channels * (m + 2 * s)
        traffic = 2 * channels * (m + 2 * (2 * s)) + codes
        yield _pass("quantize q, k and v", layer, traffic, traffic, codes)
        read = codes
    sizes = dict.fromkeys(LEVELS, read + 2 * channels * m)
    yield Step("attention", "attention", layer.name, how.arithmetic, 4 * channels * m * s, sizes)


def _linear_attention(layer: LayerPlan, forward: ForwardPass, queries: str) -> Step:
    """Return q(Σ kᵀv) of N channels in fp32, and a column of ones for the sum of weights: SANA's, after a ReLU.

    Bytes: ReLU of q and k, casts of q, k and v, the column, two products, a division and a cast, each a kernel.
    """
    m = forward.batch * forward.tokens(queries)
    elements = m * layer.n
    unfused = elements * (2 * 4 + 3 * 6 + 8 + 8 + 8 + 8 + 6)
    sizes: dict[Level, float] = {"unfused": unfused, "fused": unfused, "ideal": 4 * 2 * elements}
    return Step("attention", "attention", layer.name, "", 0, sizes, scalar_flops=4 * elements * (forward.head + 1))


def _convolution_steps(convolution: Convolution, forward: ForwardPass) -> Iterator[Step]:
    """Yield a convolution in 16 bit as a product (m, N) = (m, k) · (N, k)ᵀ, and norm and activation before it."""
    m = forward.batch * forward.tokens(stream_of(convolution.name, "", forward.family))
    x = 2 * m * convolution.stride**2 * convolution.channels
    size = x + 2 * (m * convolution.n + convolution.n * convolution.k)
    flops = 2 * m * convolution.n * convolution.k
    alone = convolution.depthwise
    yield Step(
        CONVOLUTIONS,
        "convolution",
        convolution.name,
        "" if alone else "bf16",
        0 if alone else flops,
        dict.fromkeys(LEVELS, size),
        flops if alone else 0,
    )
    before = passes_before(convolution, forward.family) * x
    if before:
        ideal = 0 if alone else 2 * x  # the product before can end with an activation, not with a norm
        sizes: dict[Level, float] = {"unfused": before, "fused": before, "ideal": ideal}
        yield Step("elementwise", "norm and activation", convolution.name, "", 0, sizes)


def _pass(kind: str, layer: LayerPlan, unfused: float, fused: float, ideal: float) -> Step:
    return Step("elementwise", kind, layer.name, "", 0, {"unfused": unfused, "fused": fused, "ideal": ideal})


def _sum(
    name: str, layers: list[LayerPlan], quantized: Sequence[Step], plain: Sequence[Step], device: Device, prefer: Prefer
) -> Part:
    part_steps = [step for step in quantized if step.part == name]
    return Part(
        name,
        len(layers),
        sum(layer.stored_bits for layer in layers) / 8,
        sum(resident_bytes(layer, device.chip, prefer) for layer in layers),
        sum(step.flops for step in part_steps),
        {level: sum(step.seconds(device, level) for step in part_steps) for level in LEVELS},
        sum(step.seconds(device, "unfused") for step in plain if step.part == name),
    )


def _with_weights(part: Part, convolutions: Sequence[Convolution]) -> Part:
    """Return the row of the convolutions with their weights, which no plan has."""
    size = sum(2 * each.n * each.k for each in convolutions)
    return replace(part, layers=len(convolutions), stored_bytes=size, resident_bytes=size)


def code_bytes(name: str, rows: float, k: int) -> float:
    """Return the bytes of codes and scales of a (rows, k) matrix in the format called `name`."""
    return FORMATS[name].stored_bits(round(rows), k) / 8


def _widened(scheme: Scheme | None, times: float) -> Scheme | None:
    return scheme and replace(scheme, rank=round(times * scheme.rank), deflate=round(times * scheme.deflate))


def _is_promoted(route: Route) -> bool:
    """Tell whether a product scales partial sums as it moves them out of the matrix units."""
    return route.activations is not None and route.activations.name in PROMOTED


def _kind(format: Format) -> str:
    """Return one name for formats with the same instruction: scales per row or per tensor, groups of 64 or 128."""
    return {"fp8_tensor": "fp8"}.get(format.name, "int4" if format.name.startswith("int4") else format.name)


def _part(layer: LayerPlan) -> str:
    return PARTS.get(layer.role, "other")


TIMED = ("matmul", "quantize", "transform")  # kinds of steps that a call of a layer makes
_PLAIN = _Input()
_FEW_FRAMES = {"AutoencoderKLWan": 5}  # that a VAE has at a time: of one latent frame, and kept of the last
_CHANNELS = 256  # at full size, of a VAE whose configuration has none
REAL_WIDTH = 3072  # channels of FLUX.1 and Qwen-Image
# 4-over-6, for an element: twice scaled, clamped, rounded, decoded, subtracted, squared and summed; on top of the
# INSTRUCTIONS of rounding once.
TWO_SCALES_FLOPS = 20

# Activations with fp32 scales of blocks -> weights beside them, and arithmetic by chip where it is not that of weights.
# Each block of a sum takes a multiply-add outside the matrix units, for which Hopper's wait.
PROMOTED: dict[str, tuple[str, dict[str, str]]] = {"fp8_1x128": ("fp8", {"sm_90": "fp8_1x128"})}
# Chip -> format of weights and activations -> arithmetic of its matrix units. Missing: no such instruction.
NATIVE = {
    "sm_80": {"int8": "int8"},
    "sm_86": {"int8": "int8"},
    "sm_89": {"int8": "int8", "fp8": "fp8"},
    "sm_90": {"int8": "int8", "fp8": "fp8"},
    "sm_100": {name: name for name in ("int8", "fp8", "mxfp8", "mxfp4", "nvfp4")},
    # fp8 with unit block scales: the same bits at twice the rate.
    "sm_120": {"int8": "int8", "fp8": "mxfp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"},
    "gfx942": {"int8": "int8"},
    "gfx950": {name: name for name in ("int8", "fp8", "mxfp8", "mxfp4")},
    "gfx1201": {"int8": "int8", "fp8": "fp8"},
}

# Chip -> 8-bit format of all other schemes: the faster one, on GeForce cards int8. Name a new chip here if it is fp8.
EIGHT_BIT = {chip: "fp8" if chip in ("sm_90", "sm_100", "gfx950") else "int8" for chip in NATIVE}

# Chips for which there is no kernel, and why.
REFERENCE = {
    "sm_75": "no kernel was compiled for Turing",
    "gfx1100": "no kernel was compiled for RDNA 3",
    "apple": "there are no kernels for Apple's machines",
}

# Role -> the row of the table that counts it.
PARTS = {
    **dict.fromkeys(("qkv", "text_qkv", "attn_out", "text_attn_out"), "attention projections"),
    **dict.fromkeys(("cross_q", "cross_kv", "image_kv", "cross_out"), "cross-attention projections"),
    **dict.fromkeys(("ff_up", "text_ff_up", "ff_down", "text_ff_down", "expert_up", "expert_down"), "feed-forward"),
    **dict.fromkeys(("single_in", "mixed_out"), "single blocks"),
    "modulation": "modulation",
    "kept": "kept in 16 bit",
}

CONVOLUTIONS = "convolutions"  # another row

# Convolutions of a UNet whose outputs wait for its way up.
SKIPPED = ("conv_in", "down_blocks.*.resnets.*.conv2", "down_blocks.*.downsamplers.*.conv")

RESIDUAL_ROLES = ("attn_out", "text_attn_out", "cross_out", "ff_down", "text_ff_down", "mixed_out", "expert_down")
ROTATED_ROLES = ("qkv", "text_qkv", "cross_q", "cross_kv", "single_in")
QUERY_AND_KEY = (".to_q", ".to_k", ".add_q_proj", ".add_k_proj", ".to_q_t", ".to_k_t")
FUSED_QKV = (".to_qkv_mlp_proj",)
