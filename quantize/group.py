"""Fitting of one input group: the stages that are tried, and which of them are kept.

    smooth -> center -> deflate and low rank -> hadamard -> 4-over-6 -> codes and scales

Each stage is tried on top of those kept before it, with weights rounded to nearest, and judged by the error of the
group's outputs on held-out tokens that nothing was fitted to. It stays if the error falls by more dB than its run time
costs: `rate` dB for each percent of the group's modelled time. Layers that share x share everything that is done to it.

Errors are relative to each layer's own output and averaged over the group; dB are -10 log10 of that. In sums over all
tokens one massive token can hide what happens to the others. So tokens are also judged one by one, each by its own
power: nothing is kept that leaves the median token, or the one at the 10th percentile, more than `MOST_LOST` below
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from fluxq.calibrate.inputs import GroupInputs
from fluxq.kernels import encode
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.ops import quantize_activation
from fluxq.kernels.tensor import QuantizedTensor, largest, quantize_blocks
from fluxq.kernels.transforms import InputTransform, rotate
from fluxq.quantize import lowrank
from fluxq.quantize.rounding import DAMPING, Feedback, UselessGram, feedback, round_searched, round_with_feedback
from fluxq.recipes.cost import group_seconds
from fluxq.recipes.devices import Device
from fluxq.recipes.family import Maker
from fluxq.recipes.formats import Format, Scheme
from fluxq.recipes.plan import Method

_NOTHING = InputTransform()
SMALLEST_GAIN = 0.05  # dB: a thousand held-out tokens do not show less
MOST_LOST = 0.2  # dB: of single tokens, against rounding
_LOW = 0.1  # quantile of the tokens
_TAIL_TOKENS = 256  # with fewer held-out tokens that quantile is noise
_TRIAL_ROWS = 1024  # of all weights of a group, for trials of stages
_TRIAL_TOKENS = 512  # for the search of smoothing
_SCALE_TOKENS = 1024  # for the largest transformed value
_ALPHAS = tuple(i / 10 for i in range(1, 11))
_NEAR = (-0.2, -0.1, 0.0, 0.1, 0.2)  # around the exponents found without rotation
_SMOOTHEST = 2.0**10  # largest and, inverted, smallest factor
_SMOOTHEST_FOLDED = 2.0**4  # the same of factors that block scales of other weights take in
_FEW_TOKENS = 4  # for each channel: below, the Gram is damped more
_DAMPING_OF_FEW = 0.05
_JOINT_TOKENS = 16  # for each channel, that the joint descent needs
_JOINT_K = 6144
_JOINT_TURNS = 2
_SHARE_OF_GRAM = 8  # an eighth of a Gram: rows of a weight that are fp32 at a time
_WHOLE_BLOCKS = 128  # rows, where blocks span some
_LEAST_ROWS, _LEAST_ROWS_OF_GPU = 256, 1 << 14  # a GPU would wait for launches of small kernels


@dataclass(frozen=True)
class GroupLayer:
    """A Linear to quantize: weight (N, K) of any float dtype, bias (N,) or None, the planned scheme.

    joined: it shares the scale of a whole weight (`has_tensor_scale`) with the other joined layers of its group.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    scheme: Scheme
    joined: bool = False


@dataclass(frozen=True)
class Stage:
    """One decision. gain_db: of held-out output SQNR; percent: more modelled time of the group."""

    name: str
    kept: bool
    gain_db: float
    percent: float
    reason: str


@dataclass(frozen=True)
class OutputSqnr:
    """SQNR of a group's outputs on held-out tokens, in dB.

    total: of all tokens together.
    halves: of the first and of the second half, from different images where there are several; None without power.
    median, low: of single tokens, each by its own power: the median, and the 10th percentile.
    tokens: number of tokens.
    """

    total: float
    halves: tuple[float | None, float | None]
    median: float
    low: float
    tokens: int

    def is_above(self, other: OutputSqnr) -> bool:
        """Tell whether both halves of the tokens are better by something; in one half that may be chance.

        True where one half has no power, and so nothing to say.
        """
        both = zip(self.halves, other.halves, strict=True)
        pairs = [(half, before) for half, before in both if half is not None and before is not None]
        return len(pairs) < len(self.halves) or all(half > before for half, before in pairs)

    def lost_by_tokens(self, rounded: OutputSqnr) -> str:
        """Return what single tokens lose against rounding, in words; empty if that is no more than `MOST_LOST`."""
        pairs = {"the median token": (self.median, rounded.median)}
        if self.tokens >= _TAIL_TOKENS:
            pairs["the 10th percentile"] = (self.low, rounded.low)
        lost = {name: before - after for name, (after, before) in pairs.items()}
        return "; ".join(f"{name} is {db:.2f} dB below rounding" for name, db in lost.items() if not db <= MOST_LOST)


@dataclass(frozen=True)
class FittedGroup:
    """Outcome of fitting a group.

    layers: by name, with their new biases.
    stages: decisions.
    rounded, fitted: held-out SQNR of weights rounded to nearest, and as fitted; None without tokens.
    """

    layers: dict[str, QuantLinear]
    stages: tuple[Stage, ...] = ()
    rounded: OutputSqnr | None = None
    fitted: OutputSqnr | None = None


Price = Callable[[Sequence[Scheme], Sequence[Scheme]], float]  # percent more modelled time of the second


def price_on(device: Device, shapes: Sequence[tuple[int, int]], tokens: int, made_by: Maker) -> Price:
    """Return the price of layers (N, K) that share one input, on a GPU; made_by: maker of that input."""

    def percent(before: Sequence[Scheme], after: Sequence[Scheme]) -> float:
        was, becomes = (group_seconds(shapes, s, device, tokens, made_by=made_by) for s in (before, after))
        return 100 * (becomes / was - 1)

    return percent


@dataclass(frozen=True)
class GroupToFit:
    """Layers that share an input, to quantize.

    method: transforms and roundings that may be tried.
    price: of run time, see `recipes/cost.py`; None is free.
    """

    layers: Sequence[GroupLayer]
    inputs: GroupInputs
    method: Method
    price: Price | None = None


def fit_group(
    layers: Sequence[GroupLayer],
    inputs: GroupInputs,
    method: Method,
    *,
    price: Price | None = None,
    rate: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> FittedGroup:
    """Quantize the layers of one input group; see `GroupToFit` and `fit_groups`."""
    return fit_groups([GroupToFit(layers, inputs, method, price)], rate=rate, dtype=dtype)[0]


def fit_groups(
    groups: Sequence[GroupToFit], *, rate: float = 0.0, dtype: torch.dtype = torch.bfloat16
) -> list[FittedGroup]:
    """Quantize input groups that have one mean and one set of factors, because the same Linears make their inputs.

    Mean and factors are judged by the errors of all groups together, all else by those of each. A group that cannot be
    fitted is rounded to nearest, and a stage says why. Raises ValueError naming the layer for weights that are not
    finite and for a bias that is not finite in `dtype`.

    rate: dB that one percent of run time must bring.
    dtype: of vectors and 16-bit branches.
    """
    for layer in chain.from_iterable(group.layers for group in groups):
        if not torch.isfinite(largest(layer.weight)):
            raise ValueError(f"{layer.name}.weight: holds NaN or infinity; get the source again, or exclude this layer")
        if layer.bias is not None and not torch.isfinite(layer.bias.to(dtype)).all():
            raise ValueError(f"{layer.name}.bias: holds NaN or infinity as {dtype}; choose another --dtype")
    fits = [_Fit(group, rate, dtype) for group in groups]
    if len(fits) == 1:
        return [fits[0].finished_from(fits[0].plain, shared=False)]
    hindered = next((fit for fit in fits if fit.why_not), None)
    starts = _shared_vectors(fits) if hindered is None else _not_shared(fits, hindered, hindered.why_not)
    return [fit.finished_from(start, shared=True) for fit, start in zip(fits, starts, strict=True)]


@dataclass(frozen=True)
class _State:
    """Transforms and ranks that are kept so far. ranks: of each layer's branch; exponents: smoothing's, by segment."""

    transform: InputTransform = _NOTHING
    exponents: tuple[tuple[float, float] | None, ...] = ()
    ranks: tuple[int, ...] = ()
    four_over_six: bool = False


class _Fit:
    """Fitting of a group. plain: state without any stage; rounded: its SQNR. why_not: reason against any stage."""

    def __init__(self, group: GroupToFit, rate: float, dtype: torch.dtype) -> None:
        self.layers, self.inputs, self.method = group.layers, group.inputs, group.method
        self.price, self.rate, self.dtype = group.price or (lambda before, after: 0.0), rate, dtype
        self.scheme = self.layers[0].scheme  # if others round x differently, the method is plain and SQNRs use this
        self.weights = [layer.weight for layer in self.layers]
        share, fit = max(64, _TRIAL_ROWS // len(self.layers)), self.inputs.fit
        self.trial_weights = [w[_spread(w.shape[0], share, w.device)] for w in self.weights]
        self.search_tokens = fit[_spread(fit.shape[0], _TRIAL_TOKENS, fit.device)]
        self.stages: list[Stage] = []
        start = InputTransform(hadamard=self.scheme.hadamard, regular=self.scheme.regular)  # of the plan, not tried
        self.plain = _State(start, (None,) * len(self.inputs.segments), (0,) * len(self.layers))
        self.why_not, self.rounded = self._why_not_judged(), None
        if not self.why_not:
            parts = self.parts(self.plain)
            self.rounded = self._judge(self.plain, (parts, self._nearest(self.plain, parts)))
            if self.rounded.total == -math.inf or not self.rounded.tokens:
                size = "large" if self.rounded.total == -math.inf else "small"
                self.why_not, self.rounded = f"its outputs are too {size} to be compared in fp32", None

    @cached_property
    def trial_rounded(self) -> OutputSqnr:
        """SQNR of the rows for trials, without any stage."""
        return self.trial_sqnr(self.plain)

    def finished_from(self, state: _State, shared: bool) -> FittedGroup:
        """Try the stages on top of a state, and return the layers. shared: mean and factors are not to be changed."""
        codes, fitted = None, self.rounded
        if self.rounded is None or self.method.is_plain:
            parts = self.parts(state)
            if not self.method.is_plain:
                self.note("all", self.why_not)
        else:
            state, parts, fitted = self._best_state(state, shared)
            self.trial_weights.clear()  # they would take memory when it is scarce
            parts, codes, fitted = self._best_rounding(state, (parts, None, fitted or self.rounded))
        if codes is None:
            codes = self._nearest(state, parts)  # again: meanwhile they would have taken memory
        return FittedGroup(self._finished(state, parts, codes), tuple(self.stages), self.rounded, fitted)

    def parts(self, state: _State) -> list[_Part]:
        """Return all rows of the weights under a state."""
        return self._parts(state, self.weights)

    def _best_state(self, start: _State, shared: bool) -> tuple[_State, list[_Part], OutputSqnr | None]:
        """Return the state after all stages, its parts and SQNR, if all rows of the weights bear it out.

        A later stage may give single tokens back what an earlier one took. Where none does, the stages are tried again,
        none of which may then take it. The last resort is the start.
        """
        before = list(self.stages)
        for strict in (False, True):
            state = self._transformed(start, shared, strict)
            parts = self.parts(state)
            why_not, sqnr = ("", self.rounded) if state is self.plain else self.why_not_kept(state, parts)
            if not why_not:
                return state, parts, sqnr
            then = "left out" if strict else "tried again"
            self.stages = [*before, Stage("all", False, 0.0, 0.0, f"{then}: {why_not}")]
            before = list(self.stages)
        parts = self.parts(start)
        return start, parts, self.rounded if start is self.plain else self.why_not_kept(start, parts)[1]

    def why_not_kept(self, state: _State, parts: list[_Part]) -> tuple[str, OutputSqnr | None]:
        """Return the reason against a state that all rows of the weights give, "" for none, and its SQNR."""
        if not self._can_be_stored(parts, [layer.bias for layer in self.layers]):
            return f"the transformed layers hold numbers beyond {self.dtype}", None
        sqnr = self._judge(state, (parts, self._nearest(state, parts)))
        if self.rounded is not None and not sqnr.total >= self.rounded.total:
            return f"all rows together are {self.rounded.total - sqnr.total:.2f} dB below rounding", sqnr
        return sqnr.lost_by_tokens(self.rounded) if self.rounded else "", sqnr

    def _why_not_judged(self) -> str:
        """Return the reason why no stage can be judged by the statistics of the input; empty if it can."""
        amax = self.inputs.amax.amax()
        if not amax > 0:
            return "its input is always zero"
        if len(self.inputs.held_out) == 0:
            return "no held-out token to judge by"
        if not all(torch.isfinite(gram.diagonal()).all() for gram in self.inputs.grams):
            return f"its input reaches {amax.item():.3g}, too much for a Gram matrix in fp32"
        return ""

    def _can_be_stored(self, parts: list[_Part], biases: Iterable[Tensor | None]) -> bool:
        """Tell whether all pieces, and biases with their additions, are finite in their stored dtypes."""
        for part, bias in zip(parts, biases, strict=True):
            added = part.bias if bias is None or part.bias is None else bias.float() + part.bias
            stored = [part.amax, part.out, part.a, part.b, None if added is None else self._in_16_bit(added)]
            if not all(torch.isfinite(tensor).all() for tensor in stored if tensor is not None):
                return False
        return True

    # --- stages

    def _transformed(self, state: _State, shared: bool, strict: bool) -> _State:
        """Try all stages but rounding. strict: as `_gate` has it."""

        def gate(name: str, candidates: dict[str, list[_State]]) -> _State:
            return _gate([self], name, [state], candidates, strict)[0]

        if not shared:
            (state,) = _with_vectors([self], strict)
        if self.method.rank:
            state = gate("low rank", self._splits(state, shared))
        if self.method.hadamard:
            state = gate("hadamard", {"": [self._rotated(state, shared)]})
        if self.method.activations_46:
            state = gate("4-over-6", {"": [replace(state, four_over_six=True)]})
        return state

    def note(self, name: str, reason: str) -> None:
        self.stages.append(Stage(name, False, 0.0, 0.0, f"skipped: {reason}"))

    def exponents(self, near: tuple[float, float] | None) -> list[tuple[float, float]]:
        """Return the exponents of x and of the weights that a search tries; near: only around these."""
        if near is not None:
            alphas = [min(max(near[0] + step, 0.0), 1.0) for step in _NEAR]
            return [(alpha, 0.0 if near[1] == 0 else 1 - alpha) for alpha in dict.fromkeys(alphas)]
        alphas = [i / 20 for i in range(21)] if self.method.wide else _ALPHAS
        return list(dict.fromkeys((alpha, beta) for alpha in alphas for beta in (1 - alpha, 0.0)))

    def squares(self, mean: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the mean square (K,) of each channel of x, less a mean, and of all weights' columns."""
        square = torch.cat([gram.diagonal() for gram in self.inputs.grams])
        if mean is not None:
            square = square - 2 * mean * self.inputs.mean + mean.square()
        w = torch.zeros_like(square)
        for weight in self.weights:
            for rows in _row_slices(weight):
                w += weight[rows].float().square().sum(0) / (weight.shape[0] * len(self.weights))
        return square.clamp(min=0), w

    def smoothed(
        self, state: _State, index: int, part: slice, exponents: tuple[float, float], factor: Tensor
    ) -> _State:
        """Return a state with other factors (its width,) of one segment of x, and their exponents."""
        most = _SMOOTHEST_FOLDED if self.method.powers_of_two else _SMOOTHEST
        factor = (factor / factor.log().mean().exp()).clamp(1 / most, most)
        if self.method.powers_of_two:
            factor = factor.log2().round().exp2()
            # Block scales get smaller, and stay in range; beside another segment the level has to stay.
            factor = factor / factor.amax() if len(self.inputs.segments) == 1 else factor.clamp(max=1)
        smooth = state.transform.smooth
        smooth = torch.ones_like(self.inputs.mean) if smooth is None else smooth.clone()
        smooth[part] = self._in_16_bit(factor)
        chosen = (*state.exponents[:index], exponents, *state.exponents[index + 1 :])
        return replace(_with(state, smooth=smooth), exponents=chosen)

    def _splits(self, state: _State, shared: bool) -> dict[str, list[_State]]:
        """Split the rank that may be spent between deflation and the weights' own branch, in several ways."""
        rank = self.method.rank
        shares = {0}
        if self.method.deflate and len(self.inputs.segments) == 1:
            shares |= {rank, (rank + 1) // 2} | ({rank // 4, 3 * rank // 4} if self.method.wide else set())
        candidates = {}
        for d in sorted(shares):
            basis = self._basis(state.transform, d) if d else None
            trial = replace(_with(state, basis=basis), ranks=tuple(min(rank, *w.shape) - d for w in self.weights))
            if not d and state.transform.smooth is not None and not shared:
                trial = _search_smoothing([self], [trial], around=True)[0]  # the branch takes what smoothing made large
            candidates[f"{d} of {rank} ranks deflate" if self.method.deflate else f"rank {rank}"] = [trial]
        return candidates

    def _basis(self, transform: InputTransform, count: int) -> Tensor:
        plain = replace(transform, basis=None, hadamard=0)
        return self._in_16_bit(
            lowrank.principal_directions(plain.of_gram(self.inputs.grams[0], self.inputs.mean), count)
        )

    def _rotated(self, state: _State, shared: bool) -> _State:
        """Add Hadamard and search its smoothing anew, since a rotation spreads large values."""
        rotated = _with(state, hadamard=self.method.hadamard)
        if state.transform.smooth is None or state.transform.basis is not None or shared:
            return rotated
        return _search_smoothing([self], [rotated], around=True)[0]

    # --- codes and scales

    def _best_rounding(self, state: _State, best: _Rounded) -> _Rounded:
        """Choose codes and scales in the best way; none costs run time. best: weights to nearest, under this state."""
        method, k, parts = self.method, self.inputs.mean.shape[0], best[0]
        useless = ""
        if method.gptq and self.inputs.count < k:
            self.note("gptq", f"{self.inputs.count} tokens for {k} channels, 1 for each is asked")
        elif method.gptq:
            damping = DAMPING if self.inputs.count >= _FEW_TOKENS * k else _DAMPING_OF_FEW
            try:
                codes = self._with_feedback(parts, self._grams(state), damping)
                best = self._keep_better("gptq", state, best, (parts, codes))
            except UselessGram as error:
                useless = str(error)
                self.note("gptq", useless)
        if method.search and not any(stage.kept for stage in self.stages if stage.name == "gptq"):
            codes = self._nearest(state, parts, search=True)
            best = self._keep_better("scale search", state, best, (parts, codes))
        if method.joint and self.scheme.activations is not None:
            why_not = useless or self._why_not_joint()
            if why_not:
                self.note("joint", why_not)
            else:
                best = self._keep_better("joint", state, best, self._joint(state, parts))
        return best

    def _keep_better(self, name: str, state: _State, best: _Rounded, weights: _Weights) -> _Rounded:
        sqnr = self._judge(state, weights)
        gain, lost = sqnr.total - best[2].total, sqnr.lost_by_tokens(self.rounded) if self.rounded else ""
        lost = lost or (_HALF if gain > 0 and not sqnr.is_above(best[2]) else "")
        kept = gain > 0 and not lost
        reason = "; ".join([f"{gain:+.2f} dB, free at run time", *([lost] if lost else [])])
        self.stages.append(Stage(name, kept, gain, 0.0, reason))
        return (*weights, sqnr) if kept else best

    def _why_not_joint(self) -> str:
        k = self.inputs.mean.shape[0]
        if self.inputs.tokens is None or len(self.inputs.segments) > 1 or k > _JOINT_K:
            return f"it needs all tokens again and four Grams of {k} channels; up to {_JOINT_K} in one segment"
        if self.inputs.count < _JOINT_TOKENS * k:
            return f"{self.inputs.count} tokens for {k} channels, {_JOINT_TOKENS} for each are asked"
        return ""

    def _joint(self, state: _State, parts: list[_Part]) -> _Weights:
        """Fit codes and branch in turns, against the rounded input: see lowrank.py."""
        z_gram, rounded_gram, cross = self._rounded_grams(state)
        damping = DAMPING * torch.eye(len(cross), device=cross.device, dtype=torch.float32)
        to_codes = torch.linalg.solve(rounded_gram + damping * rounded_gram.diagonal().mean(), cross).T
        to_branch = torch.linalg.solve(z_gram + damping * z_gram.diagonal().mean(), cross.T).T
        for turn in range(_JOINT_TURNS):
            targets = [part.towards(to_codes) for part in parts]
            codes = self._with_feedback(targets, [rounded_gram.clone], DAMPING)
            if turn + 1 < _JOINT_TURNS:
                parts = [
                    self._refitted(state, part, q, z_gram, to_branch) for part, q in zip(parts, codes, strict=True)
                ]
        return parts, codes

    def _rounded_grams(self, state: _State) -> tuple[Tensor, Tensor, Tensor]:
        """Return E[z z^T], E[z^ z^^T] and E[z^ z^T] of rounded z^."""
        k = self.inputs.mean.shape[0]
        sums = [torch.zeros(k, k, device=self.inputs.mean.device, dtype=torch.float32) for _ in range(3)]
        total = 0.0
        for chunk, weight in self.inputs.tokens() if self.inputs.tokens else ():
            z = state.transform.of_tokens(chunk)
            rounded = self._rounded_input(z, state)
            for gram, (left, right) in zip(sums, ((z, z), (rounded, rounded), (rounded, z)), strict=True):
                gram.addmm_(left.T, right, alpha=weight)
            total += weight * len(z)
        z_gram, rounded_gram, cross = (gram.div_(total) for gram in sums)
        return z_gram, rounded_gram, cross

    def _refitted(self, state: _State, part: _Part, q: QuantizedTensor, gram: Tensor, to_branch: Tensor) -> _Part:
        """Fit another branch of the same rank to what the codes leave of the weight."""
        if part.a is None:
            return part
        plain = state.transform.of_weight(part.weight.float())[0]
        a, b = lowrank.branch(plain - q.dequantize() @ to_branch, part.a.shape[0], gram)
        return self._beside(state, part.weight, rotate(a, state.transform.hadamard, state.transform.regular), b)

    def _nearest(self, state: _State, parts: list[_Part], search: bool = False) -> list[QuantizedTensor]:
        scales, amax = self._global_scales(parts, search), self._amax(parts)
        importance = torch.cat([gram().diagonal().clone() for gram in self._grams(state)]) if search else None
        done = self._empty(parts, scales)
        for layer, part, scale, most, q in zip(self.layers, parts, scales, amax, done, strict=True):
            row = layer.scheme.weights
            two_scales = self.method.weights_46 and not self.method.search and row.two_level
            for rows, v in part.chunks():
                if importance is not None and row.group_size:
                    rounded = round_searched(v, row, scale, importance)
                else:
                    whole = None if row.group_size else _row_scale(v, row, most)
                    rounded = quantize_blocks(v, row, scale, layer.name, whole, two_scales)
                q.put(rounded, rows.start)
        return done

    def _with_feedback(
        self, parts: list[_Part], grams: Iterable[Callable[[], Tensor]], damping: float
    ) -> list[QuantizedTensor]:
        """Round with error feedback. grams: functions that return one Gram each, of a segment of x."""
        scales, amax = self._global_scales(parts, self.method.search), self._amax(parts)
        done = self._empty(parts, scales)
        start = 0
        for gram in grams:
            feeds: dict[int, Feedback] = {}
            for layer, part, scale, most, q in zip(self.layers, parts, scales, amax, done, strict=True):
                row = layer.scheme.weights
                group = 0 if row.spans_rows else row.group_size
                if group not in feeds:
                    feeds[group] = feedback(gram, group, damping)
                feed = feeds[group]
                columns = slice(start, start + len(feed.order))
                for rows, v in part.chunks():
                    whole = None if row.group_size else _row_scale(v, row, most)
                    if row.spans_rows:
                        q.put_scales(spanning := encode.spanning_scale(v, row), rows.start)
                        whole = encode.spread(spanning, row, *v.shape)[:, columns]
                    v = v[:, columns]
                    rounded = round_with_feedback(v, row, scale, feed, search=self.method.search, row_scale=whole)
                    q.put(rounded, rows.start, start)
            start = columns.stop
        return done

    def _empty(self, parts: list[_Part], scales: list[Tensor | None]) -> list[QuantizedTensor]:
        return [
            QuantizedTensor.empty(layer.scheme.weights, n, k, scale, part.weight.device)
            for layer, part, scale in zip(self.layers, parts, scales, strict=True)
            for n, k in (part.weight.shape,)
        ]

    def _grams(self, state: _State) -> Iterator[Callable[[], Tensor]]:
        """Yield functions that make E[z z^T] of each segment: there may be memory for one at a time only."""
        start = 0
        for gram in self.inputs.grams:
            part = slice(start, start + gram.shape[0])
            start += gram.shape[0]
            yield partial(state.transform.of_columns(part).of_gram, gram, self.inputs.mean[part])

    def _global_scales(self, parts: list[_Part], room: bool) -> list[Tensor | None]:
        """Return NVFP4's global scale of each weight, one for joined weights. room: for scales above the plain one."""
        room = room or self.method.weights_46
        return [
            encode.global_scale_for(amax, layer.scheme.weights, room) if layer.scheme.weights.two_level else None
            for layer, amax in zip(self.layers, self._amax(parts), strict=True)
        ]

    def _amax(self, parts: list[_Part]) -> list[Tensor]:
        """Return the max |V| for the scales of each weight: its own, or that of all joined weights in its format."""
        together: dict[str, list[Tensor]] = {}
        for layer, part in zip(self.layers, parts, strict=True):
            together.setdefault(layer.scheme.weights.name if layer.joined else layer.name, []).append(part.amax)
        most = {name: torch.stack(amax).amax() for name, amax in together.items()}
        return [most[layer.scheme.weights.name if layer.joined else layer.name] for layer in self.layers]

    # --- parts and errors of a state

    def _parts(self, state: _State, weights: Sequence[Tensor]) -> list[_Part]:
        return [self._part(state, w, rank) for w, rank in zip(weights, state.ranks, strict=True)]

    def _part(self, state: _State, w: Tensor, rank: int) -> _Part:
        """Transform a weight (N, K) as a state says."""
        if not rank:
            return self._beside(state, w, None, None)
        plain = replace(state.transform, hadamard=0)
        chunks = lowrank.RowChunks(w.shape[0], lambda: (plain.of_weight(w[rows].float())[0] for rows in _row_slices(w)))
        return self._beside(state, w, *lowrank.branch(chunks, min(rank, *w.shape)))

    def _beside(self, state: _State, w: Tensor, a: Tensor | None, b: Tensor | None) -> _Part:
        """Compute the pieces beside the codes, with a branch whose A reads z before Hadamard, if any."""
        if a is not None and b is not None:
            a = a if state.transform.smooth is None else a * state.transform.smooth  # so that it reads x itself
            a, b = (self._in_16_bit(t) for t in lowrank.balanced(a, b))
        part = _Part(w, state.transform, a, b)
        outs, biases, amax = [], [], []
        for rows in _row_slices(w):
            rest = part.rest(rows)
            v, out = state.transform.of_weight(rest)
            outs.append(out)
            biases.append(state.transform.extra_bias(rest))
            amax.append(v.abs().amax())
        out = None if state.transform.basis is None else self._in_16_bit(torch.cat(outs))
        bias = None if state.transform.mean is None else torch.cat(biases)
        return replace(part, out=out, bias=bias, amax=torch.stack(amax).amax())

    def trial_sqnr(self, state: _State) -> OutputSqnr:
        """Return the SQNR of some rows of the weights, rounded to nearest; -inf if a number is beyond the dtype."""
        parts = self._trial_parts(state)
        return _NOT_STORED if parts is None else self._judge(state, (parts, self._nearest(state, parts)))

    def trial_error(self, state: _State, x: Tensor) -> float:
        """Return the error of some rows of the weights; infinite if a stored number is beyond the dtype."""
        parts = self._trial_parts(state)
        if parts is None:
            return math.inf
        return _total(self._errors(state, (parts, self._nearest(state, parts)), x), torch.ones(len(x), device=x.device))

    def _trial_parts(self, state: _State) -> list[_Part] | None:
        parts = self._parts(state, self.trial_weights)
        return parts if self._can_be_stored(parts, [None] * len(parts)) else None

    def _judge(self, state: _State, weights: _Weights) -> OutputSqnr:
        """Return the SQNR of held-out tokens."""
        errors, weight = self._errors(state, weights, self.inputs.held_out), self.inputs.held_weight
        has_power = torch.stack([size for _, size in errors]).amax(0) > _TINY  # padding has none
        of_tokens = torch.stack([torch.where(size > _TINY, lost / size, 0.0) for lost, size in errors]).mean(0)
        median, low = (_decibels(_quantile(of_tokens, weight * has_power, share)) for share in (0.5, 1 - _LOW))
        is_first = torch.arange(len(weight), device=weight.device) < len(weight) / 2
        first, second = (
            _decibels(_total(errors, weight * half)) if (half & has_power).any() else None
            for half in (is_first, ~is_first)
        )
        return OutputSqnr(_decibels(_total(errors, weight)), (first, second), median, low, int(has_power.sum()))

    def _errors(self, state: _State, weights: _Weights, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return |y^ - y|^2 and |y|^2 (M,) of each token, for each layer."""
        x = x.float()
        z = self._rounded_input(state.transform.of_tokens(x), state)
        t = state.transform.deflated(x)
        errors = []
        for part, q in zip(*weights, strict=True):
            lost, size = torch.zeros(2, len(x), device=x.device, dtype=torch.float32)
            h = None if part.a is None else self._in_16_bit(x @ part.a.T)
            for rows in _row_slices(part.weight):
                y = x @ part.weight[rows].float().T
                approximate = z @ q.rows(rows.start, rows.stop).dequantize().T
                if t is not None and part.out is not None:
                    approximate += self._in_16_bit(t) @ part.out[rows].T
                if h is not None and part.b is not None:
                    approximate += h @ part.b[rows].T
                if part.bias is not None:
                    approximate += part.bias[rows]
                lost += approximate.sub_(y).square_().sum(1)
                size += y.square_().sum(1)
            errors.append((lost, size))
        return errors

    def _rounded_input(self, z: Tensor, state: _State) -> Tensor:
        """Round z (M, K) as the product sees it."""
        if self.scheme.activations is None:
            return z
        scale = self._input_scale(state, self.scheme)
        return quantize_activation(z, self.scheme.activations, scale, state.four_over_six).dequantize()

    def _input_scale(self, state: _State, scheme: Scheme) -> Tensor | None:
        """Return the calibrated scale of all tokens, if a scheme has one.

        The largest of transformed tokens is known of a sample only: nvfp4's scale leaves room for 1.75 times that.
        """
        if not scheme.static_input or scheme.activations is None:
            return None
        if state.transform == _NOTHING:
            return encode.input_scale_for(self.inputs.amax.amax(), scheme.activations, state.four_over_six)
        fit, held_out = self.inputs.fit, self.inputs.held_out
        index = _spread(len(fit) + len(held_out), _SCALE_TOKENS, fit.device)
        sample = torch.cat([fit[index[index < len(fit)]], held_out[index[index >= len(fit)] - len(fit)]])
        return encode.input_scale_for(state.transform.of_tokens(sample).abs().amax(), scheme.activations, True)

    def _in_16_bit(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).float()

    # --- results

    def schemes(self, state: _State) -> list[Scheme]:
        return [self._scheme(layer, state, rank) for layer, rank in zip(self.layers, state.ranks, strict=True)]

    def _scheme(self, layer: GroupLayer, state: _State, rank: int) -> Scheme:
        transform = state.transform
        return replace(
            layer.scheme,
            center=transform.mean is not None,
            smooth=transform.smooth is not None,
            deflate=0 if transform.basis is None else transform.basis.shape[0],
            hadamard=transform.hadamard,
            regular=transform.regular,
            four_over_six=state.four_over_six,
            rank=rank,
        )

    def _finished(self, state: _State, parts: list[_Part], codes: list[QuantizedTensor]) -> dict[str, QuantLinear]:
        done = {}
        transform = state.transform
        for layer, part, q, rank in zip(self.layers, parts, codes, state.ranks, strict=True):
            tensors = {
                "pre_quant_mean": transform.mean,
                "pre_quant_scale": transform.smooth,
                "deflate_basis": transform.basis,
                "deflate_out": part.out,
                "svdquant_lora_a": part.a,
                "svdquant_lora_b": part.b,
            }
            # Copies: layers share a transform, and safetensors refuses to store two names of one tensor.
            branches = {name: t.to(self.dtype).clone().contiguous() for name, t in tensors.items() if t is not None}
            bias = layer.bias
            if part.bias is not None:
                bias = part.bias if bias is None else bias.float() + part.bias
            bias = None if bias is None else bias.to(self.dtype, copy=True)
            scale = self._input_scale(state, layer.scheme)
            if q.global_scale is not None:
                q = replace(q, global_scale=q.global_scale.clone())
            done[layer.name] = QuantLinear.from_quantized(q, bias, self._scheme(layer, state, rank), scale, branches)
        return done


@dataclass(frozen=True)
class _Part:
    """A weight (N, K) under a state: the 16-bit branch B A, `out` and an addition to the bias, all beside the codes.

    Codes stand for V, of which a few rows at a time are computed when they are wanted. amax (): max |V|. target (K, K):
    codes stand for V times that instead.
    """

    weight: Tensor
    transform: InputTransform
    a: Tensor | None
    b: Tensor | None
    out: Tensor | None = None
    bias: Tensor | None = None
    amax: Tensor = field(default_factory=lambda: torch.tensor(math.nan, dtype=torch.float32))
    target: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows, and the fp32 values that their codes stand for."""
        for rows in _row_slices(self.weight):
            v = self.transform.of_weight(self.rest(rows))[0]
            yield rows, v if self.target is None else v @ self.target

    def rest(self, rows: slice) -> Tensor:
        """Return rows of the weight less the low-rank branch, fp32."""
        w = self.weight[rows].float()
        return w if self.a is None or self.b is None else w - self.b[rows] @ self.a

    def towards(self, target: Tensor) -> _Part:
        """Return the same part with codes that stand for V target."""
        part = replace(self, target=target)
        return replace(part, amax=torch.stack([v.abs().amax() for _, v in part.chunks()]).amax())


def _row_scale(v: Tensor, format: Format, amax: Tensor) -> Tensor:
    """Return the scales of rows v (rows, 1), or of a whole weight with that amax (1, 1), in a format without groups."""
    values = v.unsqueeze(1) if format.block[0] else amax.reshape(1, 1, 1)
    return encode.block_scale(values, format, None)


# --- stages of several groups, or of one


def _shared_vectors(fits: Sequence[_Fit]) -> list[_State]:
    """Return states with the mean and factors of several groups; plain ones if all rows of one do not bear them out."""
    states = _with_vectors(fits, strict=True)
    for fit, state in zip(fits, states, strict=True):
        why_not = "" if state is fit.plain else fit.why_not_kept(state, fit.parts(state))[0]
        if why_not:
            for each in fits:
                each.stages.clear()
            return _not_shared(fits, fit, why_not)
    return states


def _not_shared(fits: Sequence[_Fit], because: _Fit, why_not: str) -> list[_State]:
    for fit in fits:
        if fit is not because or not fit.why_not:  # which says so itself
            fit.note("smooth and center", f"{why_not} ({because.layers[0].name})")
    return [fit.plain for fit in fits]


def _with_vectors(fits: Sequence[_Fit], strict: bool) -> list[_State]:
    """Try smoothing and centring. strict: as `_gate` has it."""
    states, wanted = [fit.plain for fit in fits], fits[0].method.transforms
    mean = _mean(fits)
    centered = [_with(state, mean=mean) for state in states] if "center" in wanted else states
    if "smooth" in wanted:
        smoothed = [_with(state, mean=None) for state in _search_smoothing(fits, centered)]
        states = _gate(fits, "smooth", states, {"": smoothed}, strict)
    if "center" in wanted:
        states = _gate(fits, "center", states, {"": [_with(state, mean=mean) for state in states]}, strict)
    return states


def _mean(fits: Sequence[_Fit]) -> Tensor:
    """Return the mean (K,) of the groups' inputs, 0 where what makes x cannot take it in."""
    mean = torch.stack([fit.inputs.mean for fit in fits]).mean(0).to(fits[0].dtype).float()
    widths, folding = fits[0].inputs.segments, fits[0].method.folding
    for word, part in zip(folding, mean.split(widths), strict=False):
        part *= word == "factors and mean"
    return mean


def _gate(
    fits: Sequence[_Fit], name: str, before: list[_State], candidates: dict[str, list[_State]], strict: bool
) -> list[_State]:
    """Choose the candidate whose gain exceeds its price by most, if any does. strict: and no token loses much by it."""
    bases, rate = [fit.trial_sqnr(state) for fit, state in zip(fits, before, strict=True)], fits[0].rate
    base, trials = _together(bases), []
    for label, states in candidates.items():
        pairs = list(zip(fits, before, states, strict=True))
        percent = sum(fit.price(fit.schemes(old), fit.schemes(new)) for fit, old, new in pairs) / len(fits)
        sqnrs = [fit.trial_sqnr(state) for fit, _, state in pairs]
        gain = _together(sqnrs) - base
        lost = [sqnr.lost_by_tokens(fit.trial_rounded) for fit, sqnr in zip(fits, sqnrs, strict=True) if strict]
        if gain > 0 and not all(sqnr.is_above(old) for sqnr, old in zip(sqnrs, bases, strict=True)):
            lost.append(_HALF)
        surplus = gain - max(SMALLEST_GAIN, rate * percent)
        trials.append((not any(lost), surplus, gain, percent, label, "; ".join(filter(None, lost)), states))
    harmless, surplus, gain, percent, label, lost, states = max(trials, key=lambda entry: entry[:2])
    kept = harmless and surplus > 0
    required = max(SMALLEST_GAIN, rate * percent)
    reason = f"{label + ': ' if label else ''}{gain:+.2f} dB for {percent:+.2f} % of time, {required:.2f} dB asked"
    for fit in fits:
        if gain == -math.inf:
            fit.note(name, f"what it stores is beyond {fit.dtype}")
        else:
            fit.stages.append(Stage(name, kept, gain, percent, "; ".join([reason, *([lost] if lost else [])])))
    return states if kept else before


def _together(sqnrs: Sequence[OutputSqnr]) -> float:
    """Return the dB of the mean error of groups."""
    if len(sqnrs) == 1:
        return sqnrs[0].total
    return -10 * math.log10(sum(10 ** (-sqnr.total / 10) for sqnr in sqnrs) / len(sqnrs))


def _search_smoothing(fits: Sequence[_Fit], states: list[_State], around: bool = False) -> list[_State]:
    """Search the exponents of least error on fitting tokens, one segment of x after the other.

    around: only near those that the states have.
    """
    first, start = fits[0], 0
    squares = [fit.squares(state.transform.mean) for fit, state in zip(fits, states, strict=True)]
    x_size, w_size = (torch.stack(each).mean(0).sqrt() for each in zip(*squares, strict=True))
    x_size, w_size = (size.clamp(min=1e-4 * size.max() + _TINY) for size in (x_size, w_size))

    def error(states: list[_State]) -> float:
        return sum(fit.trial_error(state, fit.search_tokens) for fit, state in zip(fits, states, strict=True))

    for index, width in enumerate(first.inputs.segments):
        part = slice(start, start + width)
        start += width
        if first.method.folding and first.method.folding[index] == "nothing":
            continue
        best, least = states, error(states)
        for exponents in first.exponents(states[0].exponents[index] if around else None):
            factor = w_size[part] ** exponents[1] / x_size[part] ** exponents[0]
            trial = [
                fit.smoothed(state, index, part, exponents, factor) for fit, state in zip(fits, states, strict=True)
            ]
            if (trial_error := error(trial)) < least:
                best, least = trial, trial_error
        states = best
    return states


_Weights = tuple[list[_Part], list[QuantizedTensor]]
_Rounded = tuple[list[_Part], list[QuantizedTensor] | None, OutputSqnr]  # None: codes to nearest
_NOT_STORED = OutputSqnr(-math.inf, (-math.inf, -math.inf), -math.inf, -math.inf, 0)
_TINY = 1e-30  # a token whose |y|^2 is below is not judged: its error would underflow fp32
_HALF = "not in both halves of the held-out tokens"


def _decibels(error: float) -> float:
    return -10 * math.log10(max(error, _TINY))


def _total(errors: Sequence[tuple[Tensor, Tensor]], weight: Tensor) -> float:
    """Return the error of all tokens together, relative to each layer's output, the mean over layers.

    errors: |y^ - y|^2 and |y|^2 (M,) by layer. weight: (M,) of the tokens. Infinite where fp32 overflows.
    """
    sums = [[float((part * weight).double().sum()) for part in pair] for pair in errors]
    total = sum(lost / max(size, _TINY) for lost, size in sums)
    return total / len(sums) if math.isfinite(total) else math.inf


def _quantile(values: Tensor, weight: Tensor, share: float) -> float:
    """Return the smallest of the values (M,) that `share` of the weight (M,) does not exceed; NaN counts as largest."""
    ordered, order = values.sort()
    reached = weight[order].double().cumsum(0)
    return float(ordered[int((reached < share * reached[-1]).sum().clamp(max=len(values) - 1))])


def _with(state: _State, **changes: object) -> _State:
    return replace(state, transform=replace(state.transform, **changes))


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Return the indices of at most `most` of `count` rows, evenly spread."""
    kept = min(count, most)
    return torch.arange(kept, device=device) * count // max(kept, 1)


def _row_slices(w: Tensor) -> list[slice]:
    """Cut a weight (N, K) into the rows that are worked on at a time."""
    n, k = w.shape
    rows = max(k // _SHARE_OF_GRAM, _LEAST_ROWS if w.device.type == "cpu" else _LEAST_ROWS_OF_GPU)
    rows = rows // _WHOLE_BLOCKS * _WHOLE_BLOCKS or rows
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]
