"""What a plan costs on a GPU: memory, FLOPs, bytes and attainable time of one forward pass. Everything is modelled.

    time of a step = max(FLOPs / attained FLOP/s, bytes / attained bytes/s)

Attained is a data sheet's peak times the efficiency of devices.py. A step is a Linear, an attention, or one of the
passes over memory between them, and those can be run in three ways, LEVELS:

    unfused  every step is a kernel of its own: norm and modulation, norm and rotation of q and k, activation,
             concatenation, gate and residual, quantization, both halves of a low-rank branch
    fused    as the kernels of this project can: norm or activation together with the quantization that follows,
             activation (16 bit), gate, residual and low rank in the matmul, concatenated halves written in place
    ideal    also what they cannot: activation and its quantization, norm and rotation of q and k in the matmul before

What a scheme does to x before rounding is part of the pass that quantizes x: mean and factors are two more vectors to
read, a Hadamard block of `size` is a product of 2·size FLOPs an element on the bf16 matrix units, 4-over-6 rounds twice
on the units for fp32. Deflation needs a whole row of x before its first element can be quantized: a pass reads x for
t = x·basisᵀ, a second one reads it again and quantizes it. A norm has the row and makes t itself, but then writes x in
16 bit; only `ideal` keeps it on chip. Where the weight is re-encoded at load, all of this but mean and factors is
collapsed into the weight and costs nothing.

Left out: launches, which small images wait for, biases, embeddings, the last norm, and what decoding 4-bit weights in
a matmul costs. Nothing here reads weights or imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fluxq.recipes.devices import Device, Efficiency
from fluxq.recipes.family import Maker
from fluxq.recipes.formats import FORMATS, Format, Scheme
from fluxq.recipes.patterns import matches
from fluxq.recipes.plan import MODULATION_ROLE, LayerPlan, Plan
from fluxq.recipes.recipe import Attention

Level = Literal["unfused", "fused", "ideal"]
Prefer = Literal["speed", "memory"]
LEVELS: tuple[Level, ...] = ("unfused", "fused", "ideal")


@dataclass(frozen=True)
class ForwardPass:
    """The tokens of one forward pass. image, text, vision: of one sequence, by stream; batch: sequences.

    vision: tokens of an encoded first frame, which image-to-video models also attend to. modulations: rows that the
    network sees that makes the modulation of all blocks, of one sequence. normalised: whether queries
    and keys are normalised. gated: whether the activation multiplies two halves of what it reads.
    """

    family: str
    image: int
    text: int
    vision: int = 0
    batch: int = 1
    modulations: int = 1
    normalised: bool = True
    gated: bool = False

    def tokens(self, stream: str) -> int:
        """Tokens of one sequence in a stream: "image", "text", "both", "vision", "modulations", or "one" (a row)."""
        both = self.image + self.text
        streams = {"image": self.image, "text": self.text, "both": both, "vision": self.vision}
        return {**streams, "modulations": self.modulations, "one": 1}[stream]


@dataclass(frozen=True)
class Route:
    """How a GPU computes a scheme.

    arithmetic: what its matrix units multiply. activations: the format that inputs are quantized to, None for 16 bit.
    weights: the format that lies in memory, None for 16 bit. is_collapsed: re-encoding at load makes one weight of the
    quantized one, the low-rank branch and all that is done to x but mean and factors. about: for people.
    """

    arithmetic: str
    activations: Format | None
    weights: Format | None
    is_collapsed: bool
    about: str


@dataclass(frozen=True)
class Step:
    """A Linear, an attention or a pass over memory. bytes: by level; 0 where a level has no such step.

    part: the row of the table that counts it. kind: "matmul", "low rank", "attention", "norm", "quantize", …
    arithmetic: of its FLOPs; "" where it has none worth counting. scalar_flops: those outside the matrix units.
    """

    part: str
    kind: str
    name: str
    arithmetic: str
    flops: float
    bytes: Mapping[Level, float]
    scalar_flops: float = 0

    def seconds(self, device: Device, level: Level) -> float:
        """Attainable time."""
        return max(self.compute_seconds(device), self.bytes[level] / device.bytes_per_second)

    def compute_seconds(self, device: Device) -> float:
        """The part of it that more bandwidth would not shorten."""
        scalar = self.scalar_flops / device.scalar_flops
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
        """The row as JSON."""
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
    """What a plan costs on a GPU. parts: rows of the table, without the total.

    routes: scheme -> how it is computed. attention: how self-attention is.
    """

    device: Device
    forward: ForwardPass
    parts: tuple[Part, ...]
    total: Part
    routes: Mapping[str, Route]
    attention: Route

    def efficiencies(self) -> dict[str, Efficiency]:
        """The efficiencies in this cost, by what they are of."""
        arithmetics = {"bf16": None, **{route.arithmetic: None for route in self.routes.values()}}
        used = {name: self.device.matmul[name] for name in arithmetics}
        if any(Scheme.parse(scheme).four_over_six for scheme in self.routes):
            used["fp32"] = self.device.scalar
        of_attention = self.device.attention if self.attention.arithmetic == "bf16" else self.device.attention_fp8
        return used | {"attention": of_attention, "memory bandwidth": self.device.streaming}

    def describe(self) -> dict[str, object]:
        """The cost as JSON."""
        return {
            "modelled": True,
            "gpu": self.device.name,
            "source": self.device.source,
            "efficiencies": {
                name: {"fraction": found.fraction, "measured": found.measured or None}
                for name, found in self.efficiencies().items()
            },
            "tokens": {"image": self.forward.image, "text": self.forward.text, "batch": self.forward.batch},
            "routes": {scheme: route.about for scheme, route in self.routes.items()},
            "attention": self.attention.about,
            "parts": [part.describe() for part in (*self.parts, self.total)],
        }


def forward_pass(
    family: str,
    config: Mapping[str, Any],
    *,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    text: int | None = None,
    batch: int = 1,
    vae: Mapping[str, Any] | None = None,
) -> ForwardPass:
    """The tokens that an image (or video) of that size makes.

    config: of the transformer; vae: of the VAE, None for the usual factor 8. height, width: pixels. text: tokens of
    the prompt after padding. None takes what the family's pipeline takes by itself. batch: images; twice as many
    sequences where guidance runs the model twice. ValueError for a family that is not modelled.
    """
    if family not in WORKLOADS:
        raise ValueError(f"{family}: its cost is not modelled; known: {', '.join(WORKLOADS)}")
    row = WORKLOADS[family]
    default_height, default_width, default_frames = row.size
    if frames is not None and default_frames == 1:
        raise ValueError(f"{family} makes images, not video: leave out the frames")
    patch = row.patch or config.get("patch_size", 2)
    pixels = (_vae_factor(vae) if vae else row.vae_factor) * (patch if isinstance(patch, int) else patch[-1])
    rows, columns = (height or default_height) // pixels, (width or default_width) // pixels
    latent_frames = ((frames or default_frames) - 1) // row.frames_per_latent + 1
    if rows * columns < 1 or batch < 1 or (frames or 1) < 1:
        raise ValueError(
            f"{family}: {height}x{width}, {batch} images of {frames or 1} frames make no token; one is {pixels} pixels"
        )
    return ForwardPass(
        family,
        image=rows * columns * latent_frames,
        text=(text or row.text) + row.extra_text,
        vision=row.vision if config.get("added_kv_proj_dim") else 0,
        batch=batch,
        modulations=_modulations(config) if family == "chroma" else 1,
        normalised=bool(config.get("qk_norm", row.normalised)),
        gated=row.gated,
    )


def cost(plan: Plan, forward: ForwardPass, device: Device, prefer: Prefer = "speed") -> Cost:
    """What one forward pass of a plan costs. prefer: whether 4-bit weights that a chip cannot multiply become 8 bit."""
    routes = {str(layer.scheme): route(layer.scheme, device.chip, prefer) for layer in plan.quantized}
    found = list(steps(plan, forward, device.chip, prefer))
    plain = list(steps(in_16_bit(plan), forward, device.chip, prefer))
    order = [*dict.fromkeys(PARTS.values()), "other", "attention", "elementwise"]
    parts = []
    for name in sorted({step.part for step in found}, key=order.index):
        layers = [layer for layer in plan.layers if _part(layer) == name]
        parts.append(_sum(name, layers, found, plain, device, prefer))
    total = Part(
        "total",
        sum(part.layers for part in parts),
        sum(part.stored_bytes for part in parts),
        sum(part.resident_bytes for part in parts),
        sum(part.flops for part in parts),
        {level: sum(part.seconds[level] for part in parts) for level in LEVELS},
        sum(part.seconds_16bit for part in parts),
    )
    return Cost(device, forward, tuple(parts), total, routes, attention_route(plan.attention, device.chip))


def group_seconds(
    shapes: Sequence[tuple[int, int]],
    schemes: Sequence[Scheme | None],
    device: Device,
    tokens: int,
    level: Level = "fused",
    made_by: Maker = "outside",
) -> float:
    """Modelled time of the Linears that share one input: making and quantizing it, products, 16-bit branches.

    shapes: (N, K) of each, with one K; schemes: of each. made_by: what makes the input, whose pass is counted too;
    "outside" counts only the quantization, as a pass of its own. A layer that is narrower than 3072 is priced as if it
    were that wide, because small layers are stand-ins for real ones here and cost little but launches: N, K, rank and
    deflate are all multiplied by 3072 / K. How a scheme is computed is the device's own route, see `route`.
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
    found = list(_input_steps(layers[0], tokens, inputs))
    for layer in layers:
        found += _linear_steps(layer, tokens, device.chip, "speed")
    return sum(step.seconds(device, level) for step in found)


def in_16_bit(plan: Plan) -> Plan:
    """The same layers, none of them quantized, and attention in 16 bit."""
    return replace(plan, layers=tuple(replace(layer, scheme=None) for layer in plan.layers), attention="16bit")


def route(scheme: Scheme | None, chip: str, prefer: Prefer = "speed") -> Route:
    """How a chip computes a scheme: as it is, with weights made 8 bit at load or in the kernel, or weight-only."""
    if scheme is None:
        return Route("bf16", None, None, False, "16 bit")
    if scheme.activations is None:
        return Route("bf16", None, scheme.weights, False, "weight-only: decoded to 16 bit in the kernel")
    weights, activations = _kind(scheme.weights), _kind(scheme.activations)
    arithmetic = NATIVE[chip].get(activations)
    if arithmetic is not None and weights == activations:
        how = "" if arithmetic == activations else f", by the chip's {arithmetic} instruction"
        return Route(arithmetic, scheme.activations, scheme.weights, False, f"native{how}")
    target = activations if activations in ("fp8", "int8") and arithmetic else EIGHT_BIT[chip]
    arithmetic = NATIVE[chip][target]
    both = "int8 or fp8, timed as " if {"int8", "fp8"} <= NATIVE[chip].keys() else ""  # loading looks at the errors
    if prefer == "memory" and scheme.weights.element.bits == 4:
        about = f"4 bits in memory, decoded in the kernel to {both}{target}"
        return Route(arithmetic, FORMATS[target], scheme.weights, False, about)
    return Route(arithmetic, FORMATS[target], FORMATS[target], True, f"re-encoded at load to {both}{target}")


def attention_route(attention: Attention, chip: str) -> Route:
    """How a chip computes self-attention: in fp8 where it multiplies that, else in 16 bit, as loading decides too."""
    arithmetic = NATIVE[chip].get("fp8")
    if attention == "16bit":
        return Route("bf16", None, None, False, "16 bit")
    if arithmetic is None:
        return Route("bf16", None, None, False, "16 bit: the chip does not multiply fp8")
    how = "" if arithmetic == "fp8" else f", by the chip's {arithmetic} instruction"
    return Route(arithmetic, FORMATS["fp8"], None, False, f"fp8{how}")


def resident_bytes(layer: LayerPlan, chip: str, prefer: Prefer = "speed") -> float:
    """Bytes of all that a layer's scheme keeps in the GPU's memory."""
    found, scheme = route(layer.scheme, chip, prefer), layer.scheme
    if scheme is None or found.weights is None:
        return 2 * layer.n * layer.k
    if found.is_collapsed:
        kept = Scheme(found.weights, found.activations, center=scheme.center, smooth=scheme.smooth)
        return kept.stored_bits(layer.n, layer.k) / 8
    return layer.stored_bits / 8


def steps(plan: Plan, forward: ForwardPass, chip: str, prefer: Prefer = "speed") -> Iterator[Step]:
    """Every step of one forward pass on a chip."""
    groups: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        groups.setdefault(layer.group or layer.name, []).append(layer)
    for layers in groups.values():
        yield from _group_steps(layers, forward, chip, prefer)
    for layer in plan.layers:
        for pattern, queries, keys in WORKLOADS[forward.family].attention:
            if matches(pattern, layer.name):
                in_fp8 = queries == keys and attention_route(plan.attention, chip).activations
                yield from (_fp8_attention if in_fp8 else _attention)(layer, forward, queries, keys, chip)


def _group_steps(layers: list[LayerPlan], forward: ForwardPass, chip: str, prefer: Prefer) -> Iterator[Step]:
    """The Linears that share an input, what makes that input, and what follows them."""
    first = layers[0]
    m = forward.batch * forward.tokens(_stream(first, forward.family))
    yield from _input_steps(first, m, {_input(layer, chip, prefer) for layer in layers}, forward.gated)
    for layer in layers:
        yield from _linear_steps(layer, m, chip, prefer)
        yield from _output_steps(layer, m, forward)


@dataclass(frozen=True)
class _Input:
    """What a matmul reads in place of x: its format, None for 16 bit, and what is done to x before rounding."""

    format: str | None = None
    vectors: int = 0
    deflate: int = 0
    hadamard: int = 0
    four_over_six: bool = False

    def bytes(self, m: int, k: int) -> float:
        return code_bytes(self.format, m, k) if self.format else 2 * m * k


def _input(layer: LayerPlan, chip: str, prefer: Prefer) -> _Input:
    """What a layer's matmul reads on a chip."""
    found, scheme = route(layer.scheme, chip, prefer), layer.scheme
    name = found.activations.name if found.activations else None
    if scheme is None:
        return _PLAIN
    if found.is_collapsed:
        return _Input(name, scheme.center + scheme.smooth)
    two_scales = scheme.four_over_six and found.activations == scheme.activations
    return _Input(name, scheme.center + scheme.smooth, scheme.deflate, scheme.hadamard, two_scales)


def _input_steps(layer: LayerPlan, m: int, inputs: set[_Input], gated: bool = False) -> Iterator[Step]:
    """What makes a Linear's input (m, K), and its quantization: once for each form that the group's Linears read."""
    plain = 2 * m * layer.k  # bytes of the 16-bit input
    made = sorted((found for found in inputs if found != _PLAIN), key=str)
    is_deflated = any(found.deflate for found in made)
    activated = (3 if gated else 2) * plain  # read by the activation, with a gate twice as wide, and written
    attended = layer.n / layer.k  # of a concatenation: the share that attention makes, N wide
    if layer.made_by == "norm":
        kept = 2 * plain if _PLAIN in inputs or not made else 0  # else its kernel writes the quantized input alone
        yield _pass("norm", layer, 2 * plain, 2 * plain if is_deflated else kept, kept)
    elif layer.made_by == "activation":
        yield _pass("activation", layer, activated, 0, 0)
    elif layer.made_by == "concatenation":
        yield _pass("activation", layer, activated * (1 - attended), 0, 0)
        yield _pass("concatenation", layer, 2 * plain, 0, 0)
    for index, found in enumerate(made):
        t = 2 * m * found.deflate
        if found.deflate:
            alone = plain + t
            ridden = t if layer.made_by == "norm" else alone  # the norm's kernel has the row
            step = _pass("deflate", layer, alone, ridden, ridden)
            yield replace(step, arithmetic="bf16", flops=2 * m * layer.k * found.deflate)
        alone = (plain if index == 0 else 0) + found.bytes(m, layer.k) + 2 * layer.k * found.vectors + t
        fused = ideal = alone
        if layer.made_by == "norm":
            ideal -= plain if index == 0 and _PLAIN in inputs else 0  # the norm has read it
            fused = alone if is_deflated else ideal
        elif not is_deflated:
            ideal *= {"activation": 0, "concatenation": attended}.get(layer.made_by, 1)
        step = _pass("quantize" if found.format else "transform", layer, alone, fused, ideal)
        products = 2 * m * layer.k * (found.deflate + found.hadamard)
        tries = TWO_SCALES_FLOPS * m * layer.k if found.four_over_six else 0
        yield replace(step, arithmetic="bf16" if products else "", flops=products, scalar_flops=tries)


def _linear_steps(layer: LayerPlan, m: int, chip: str, prefer: Prefer) -> Iterator[Step]:
    """The product (m, N) = (m, K) · (N, K)ᵀ, and what is added to it: low-rank branch, deflated directions."""
    n, k = layer.n, layer.k
    found = route(layer.scheme, chip, prefer)
    x = code_bytes(found.activations.name, m, k) if found.activations else 2 * m * k
    size = x + resident_bytes(layer, chip, prefer) + 2 * m * n
    yield Step(_part(layer), "matmul", layer.name, found.arithmetic, 2 * m * n * k, dict.fromkeys(LEVELS, size))
    if layer.scheme is None or found.is_collapsed:
        return
    rank, deflate = layer.scheme.rank, layer.scheme.deflate
    if rank or deflate:
        fused = 4 * m * rank + 2 * m * deflate  # h is written and read, t is read; matrices are counted with the weight
        unfused = fused + (2 * m * k if rank else 0) + 4 * m * n  # x is read again, y read and written
        sizes: dict[Level, float] = {"unfused": unfused, "fused": fused, "ideal": fused}
        yield Step(_part(layer), "low rank", layer.name, "bf16", 2 * m * (rank * (n + k) + deflate * n), sizes)


def _output_steps(layer: LayerPlan, m: int, forward: ForwardPass) -> Iterator[Step]:
    """What is done to a Linear's output (m, N) before anything multiplies it."""
    out = 2 * m * layer.n
    if layer.role in RESIDUAL_ROLES:
        yield _pass("gate and residual", layer, 3 * out, out, out)
    if forward.normalised and layer.role in ROTATED_ROLES and layer.name.endswith((*QUERY_AND_KEY, *FUSED_QKV)):
        rotated = 2 * (2 * m * layer.k) if layer.name.endswith(FUSED_QKV) else out  # q and k, as wide as the input
        yield _pass("norm and rotation", layer, 2 * rotated, 2 * rotated, 0)


def _attention(layer: LayerPlan, forward: ForwardPass, queries: str, keys: str, chip: str) -> Iterator[Step]:
    """softmax(QKᵀ)V of N channels, in 16 bit; `layer` is named by the family's workload."""
    m, s = forward.tokens(queries), forward.tokens(keys)
    flops = 4 * forward.batch * m * s * layer.n
    size = 2 * forward.batch * layer.n * (2 * m + 2 * s)
    yield Step("attention", "attention", layer.name, "bf16", flops, dict.fromkeys(LEVELS, size))


def _fp8_attention(layer: LayerPlan, forward: ForwardPass, queries: str, keys: str, chip: str) -> Iterator[Step]:
    """The same from fp8 codes, and the passes that make those: scales of all tokens of k and v come before codes."""
    m, s = forward.tokens(queries), forward.tokens(keys)
    channels = forward.batch * layer.n
    codes = channels * (m + 2 * s)
    read = 2 * channels * (m + 2 * (2 * s))
    yield _pass("quantize q, k and v", layer, read + codes, read + codes, codes)
    arithmetic = attention_route("fp8", chip).arithmetic
    sizes = dict.fromkeys(LEVELS, codes + 2 * channels * m)
    yield Step("attention", "attention", layer.name, arithmetic, 4 * channels * m * s, sizes)


def _pass(kind: str, layer: LayerPlan, unfused: float, fused: float, ideal: float) -> Step:
    return Step("elementwise", kind, layer.name, "", 0, {"unfused": unfused, "fused": fused, "ideal": ideal})


def _sum(
    name: str, layers: list[LayerPlan], found: Sequence[Step], plain: Sequence[Step], device: Device, prefer: Prefer
) -> Part:
    own = [step for step in found if step.part == name]
    return Part(
        name,
        len(layers),
        sum(layer.stored_bits for layer in layers) / 8,
        sum(resident_bytes(layer, device.chip, prefer) for layer in layers),
        sum(step.flops for step in own),
        {level: sum(step.seconds(device, level) for step in own) for level in LEVELS},
        sum(step.seconds(device, "unfused") for step in plain if step.part == name),
    )


def code_bytes(name: str, rows: int, k: int) -> float:
    """Bytes of codes and scales of a (rows, k) matrix in the format called `name`."""
    return FORMATS[name].stored_bits(rows, k) / 8


def _widened(scheme: Scheme | None, times: float) -> Scheme | None:
    return scheme and replace(scheme, rank=round(times * scheme.rank), deflate=round(times * scheme.deflate))


def _kind(format: Format) -> str:
    """Formats that one instruction serves have one name: scales per row or per tensor, groups of 64 or 128."""
    return {"fp8_tensor": "fp8"}.get(format.name, "int4" if format.name.startswith("int4") else format.name)


def _part(layer: LayerPlan) -> str:
    return PARTS.get(layer.role, "other")


def _stream(layer: LayerPlan, family: str) -> str:
    """Which tokens a Linear sees: what its family says of its path, else what its role or its path says."""
    if layer.role != MODULATION_ROLE:
        for pattern, stream in WORKLOADS[family].streams.items():
            if matches(pattern, layer.name):
                return stream
    if layer.role in STREAMS:
        return STREAMS[layer.role]
    return next((stream for pattern, stream in KEPT_STREAMS.items() if matches(pattern, layer.name)), "image")


def _modulations(config: Mapping[str, Any]) -> int:
    """Vectors that Chroma's network makes: shift, scale and gate of each norm, and two of the last."""
    return 12 * config["num_layers"] + 3 * config["num_single_layers"] + 2


def _vae_factor(vae: Mapping[str, Any]) -> int:
    """Pixels that a latent spans on a side: as Wan's VAE says, or a halving for each step down of the others."""
    if "scale_factor_spatial" in vae:
        return vae["scale_factor_spatial"]
    if "spatio_temporal_scaling" in vae:  # LTX patches before it halves
        return vae["patch_size"] * 2 ** sum(vae["spatio_temporal_scaling"])
    if "temperal_downsample" in vae:  # Qwen-Image's VAE spells it so
        return 2 ** len(vae["temperal_downsample"])
    return 2 ** (len(vae["block_out_channels"]) - 1) if "block_out_channels" in vae else 8


@dataclass(frozen=True)
class Workload:
    """What a family's pipeline feeds its transformer; a row of WORKLOADS.

    size: height, width and frames if nobody says otherwise. text: tokens that a prompt is padded to; extra_text: more
    of a second encoder. patch: latents that a token spans on a side, None where the configuration says so.
    attention: pattern of a Linear with as many outputs as the attention has channels (it makes the queries, or keys of
    its own; where those are fused with others, it reads the attention), streams of queries and of keys. streams:
    pattern -> stream, where the role alone does not say it. vae_factor: of the family's VAE.
    """

    size: tuple[int, int, int]
    text: int
    attention: tuple[tuple[str, str, str], ...]
    extra_text: int = 0
    patch: int | None = None
    frames_per_latent: int = 4
    vision: int = 0
    normalised: bool = True
    gated: bool = False
    streams: Mapping[str, str] = field(default_factory=dict)
    vae_factor: int = 8


_PLAIN = _Input()
REAL_WIDTH = 3072  # channels of FLUX.1 and Qwen-Image
# 4-over-6, for an element: twice scaled, clamped, rounded, decoded, subtracted, squared and summed. Rounding once takes
# less than half of it, which hides behind memory on every GPU here.
TWO_SCALES_FLOPS = 20

# Chip -> format of weights and activations -> what its matrix units multiply. Missing: no such instruction.
NATIVE = {
    "sm_80": {"int8": "int8"},
    "sm_89": {"int8": "int8", "fp8": "fp8"},
    "sm_90": {"int8": "int8", "fp8": "fp8"},
    "sm_100": {name: name for name in ("int8", "fp8", "mxfp8", "mxfp4", "nvfp4")},
    # fp8 with unit block scales: the same bits at twice the rate.
    "sm_120": {"int8": "int8", "fp8": "mxfp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"},
    "gfx942": {"int8": "int8"},
    "gfx950": {name: name for name in ("int8", "fp8", "mxfp8", "mxfp4")},
}

# What everything else becomes, or is timed as: the faster 8-bit format, which on GeForce cards is int8.
EIGHT_BIT = {
    "sm_80": "int8",
    "sm_89": "int8",
    "sm_90": "fp8",
    "sm_100": "fp8",
    "sm_120": "int8",
    "gfx942": "int8",
    "gfx950": "fp8",
}

# Role -> the row of the table that counts it.
PARTS = {
    **dict.fromkeys(("qkv", "text_qkv", "attn_out", "text_attn_out"), "attention projections"),
    **dict.fromkeys(("cross_q", "cross_kv", "image_kv", "cross_out"), "cross-attention projections"),
    **dict.fromkeys(("ff_up", "text_ff_up", "ff_down", "text_ff_down"), "feed-forward"),
    **dict.fromkeys(("single_in", "mixed_out"), "single blocks"),
    "modulation": "modulation",
    "kept": "kept in 16 bit",
}

RESIDUAL_ROLES = ("attn_out", "text_attn_out", "cross_out", "ff_down", "text_ff_down", "mixed_out")
ROTATED_ROLES = ("qkv", "text_qkv", "cross_q", "cross_kv", "single_in")
QUERY_AND_KEY = (".to_q", ".to_k", ".add_q_proj", ".add_k_proj")
FUSED_QKV = (".to_qkv_mlp_proj",)

# Role -> tokens that it sees; every other role sees the image.
STREAMS = {
    **dict.fromkeys(("text_qkv", "text_attn_out", "text_ff_up", "text_ff_down", "cross_kv"), "text"),
    **dict.fromkeys(("single_in", "mixed_out"), "both"),
    "image_kv": "vision",
    "modulation": "one",
}
# The same for Linears without a role; the first that matches.
KEPT_STREAMS = {
    "txt_in": "text",
    "condition_embedder.text_embedder.**": "text",
    "condition_embedder.image_embedder.**": "vision",
    "condition_embedder.**": "one",
    "time_text_embed.**": "one",
    "time_guidance_embed.**": "one",
    "*_modulation*.linear": "one",
    "distilled_guidance_layer.**": "modulations",
    "context_embedder.time_text_embed.**": "one",
    "context_embedder.token_refiner.refiner_blocks.*.norm_out.linear": "one",
    "context_embedder.**": "text",
    "cap_embedder.**": "text",
    "caption_projection.**": "text",
    "t_embedder.**": "one",
    "all_final_layer.*.adaLN_modulation.*": "one",
    "all_final_layer.*.linear": "both",
    "adaln_single.**": "one",
    "time_embed.**": "one",
    "norm_out.linear": "one",
}

WORKLOADS = {
    "flux": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # the pipeline packs 2 x 2 latents, the configuration says 1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
    ),
    "flux2": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # as for FLUX.1
        gated=True,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_out", "both", "both"),
        ),
    ),
    "sd3": Workload(
        size=(1024, 1024, 1),
        text=256,
        extra_text=77,
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("transformer_blocks.*.attn2.to_q", "image", "image"),
        ),
    ),
    "qwen_image": Workload(
        size=(1024, 1024, 1),
        text=512,
        attention=(("transformer_blocks.*.attn.to_q", "both", "both"),),
    ),
    "wan": Workload(
        size=(480, 832, 81),
        text=512,
        vision=257,
        attention=(
            ("blocks.*.attn1.to_q", "image", "image"),
            ("blocks.*.attn2.to_q", "image", "text"),
            ("blocks.*.attn2.add_k_proj", "image", "vision"),
        ),
    ),
    "chroma": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # as for FLUX.1
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
        ),
    ),
    "z_image": Workload(
        size=(1024, 1024, 1),
        text=512,
        patch=2,  # the configuration lists several
        gated=True,
        streams={"layers.**": "both", "context_refiner.**": "text"},
        attention=(
            ("layers.*.attention.to_q", "both", "both"),
            ("noise_refiner.*.attention.to_q", "image", "image"),
            ("context_refiner.*.attention.to_q", "text", "text"),
        ),
    ),
    "pixart": Workload(
        size=(1024, 1024, 1),
        text=300,  # of PixArt-Sigma; 120 of PixArt-alpha
        normalised=False,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    "ltx": Workload(
        size=(512, 704, 161),
        text=128,
        frames_per_latent=8,
        vae_factor=32,
        attention=(
            ("transformer_blocks.*.attn1.to_q", "image", "image"),
            ("transformer_blocks.*.attn2.to_q", "image", "text"),
        ),
    ),
    "hunyuan_video": Workload(
        size=(720, 1280, 129),
        text=256,
        attention=(
            ("transformer_blocks.*.attn.to_q", "both", "both"),
            ("single_transformer_blocks.*.attn.to_q", "both", "both"),
            ("context_embedder.token_refiner.refiner_blocks.*.attn.to_q", "text", "text"),
        ),
    ),
}
