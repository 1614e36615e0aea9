"""Step caches of diffusers, lists of steps and fewer steps, as data: each leaves out part of what a denoiser computes.

    share computed = Σ multiplications of Linears in the blocks / Σ over steps of those of a whole step

A whole step is the one of most multiplications: every cache computes the first one whole. A cache has one parameter;
the others are as diffusers has them, except where a function here says otherwise.
"""

from __future__ import annotations

import ast
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxq.base.console import did_you_mean, first_line
from fluxq.base.extras import too_old_for
from fluxq.recipes.step_list import StepList

if TYPE_CHECKING:
    from torch import Tensor, nn

LIST, FEWER, PLAIN = "list", "steps", "first_block"
_NOISY = 950  # timestep above which caches of attention compute all of it


@dataclass(frozen=True)
class StepCache:
    """A step cache of a pipeline.

    kind: key of CACHES, or FEWER.
    label: name for readers.
    value: parameter, None for a list that is made.
    made: JSON of what was measured beforehand: the list, or ratios of MagCache; None where nothing is, or is not yet.
    """

    kind: str
    label: str
    value: float | None = None
    made: str | None = None

    @property
    def is_unmeasured(self) -> bool:
        """True for a cache whose kind measures something beforehand, which has not been."""
        measure = CACHES[self.kind].measure if self.kind in CACHES else None
        return self.made is None and (self.kind == LIST or measure is not None)

    def having(self, made: str) -> StepCache:
        """Return the cache with what was measured for it."""
        return replace(self, value=None if self.kind == LIST else self.value, made=made)

    @property
    def facts(self) -> list[Any]:
        """Facts that decide bits of images."""
        return [self.kind, self.value, self.made]

    @property
    def steps(self) -> StepList:
        """The list of steps of a cache that is one."""
        return StepList.from_dict(json.loads(self.made or "{}"))


@dataclass(frozen=True)
class CacheRow:
    """One kind of step cache.

    name: for readers.
    meaning: of its parameter. usual: a value of it.
    is_count: whether it is a whole number, from 2 up.
    config: of pipeline, parameter and what was measured, with other settings by name, to diffusers' configuration.
    measure: of pipeline, call and (prompt, seed) to what JSON can hold; None where nothing is measured.
    """

    name: str
    meaning: str
    usual: float
    is_count: bool = False
    config: Callable[..., Any] | None = None
    measure: Callable[..., Any] | None = None


def cache_of(text: str) -> StepCache:
    """Read KIND=X as a row of CACHES has it; a number alone is a threshold of FirstBlockCache.

    Raises ValueError naming kinds and cure, and FileNotFoundError for a list that is not there.
    """
    kind, _, given = (PLAIN, "=", text) if _number(text) is not None else text.partition("=")
    row = CACHES.get(kind)
    if row is None:
        kinds = ", ".join(f"{name}={each.usual:g}" for name, each in CACHES.items())
        raise ValueError(
            f"step cache {text!r} is unknown{did_you_mean(kind, CACHES)}; there are {kinds}, or list=FILE; a number "
            f"alone is {PLAIN}"
        )
    if too_old := too_old_for(row.name):
        raise ValueError(f"step cache {text!r}: {too_old}")
    value = _number(given)
    if kind == LIST and value is None and given:
        from fluxq.runtime.skip import read_list

        return StepCache(kind, f"{row.name} {Path(given).stem}", made=json.dumps(read_list(Path(given)).to_dict()))
    if value is None or not _fits(row, value, 1 if kind == LIST else math.inf):
        wanted = "a whole number from 2 up" if row.is_count else "a number above 0"
        wanted = "a share above 0 and at most 1, or a file of `fluxq steps`" if kind == LIST else wanted
        raise ValueError(f"step cache {text!r}: X is the {row.meaning}, {wanted}; write {kind}={row.usual:g}, say")
    return StepCache(kind, f"{row.name} {value:g}", value)


def caches_of(texts: Iterable[str]) -> tuple[StepCache, ...]:
    """Read several as `cache_of` does; ValueError for two that runs would be called alike after."""
    caches = tuple(map(cache_of, texts))
    labels = [cache.label for cache in caches]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ValueError(f"two step caches would be called {twice[0]}: leave one out, or rename its file")
    return caches


def fewer_steps(count: int) -> StepCache:
    """Return what stands for a call of so many steps, all computed."""
    return StepCache(FEWER, f"{count} steps", count)


def measured_for(cache: StepCache, pipe: Any, call: Mapping[str, Any], item: tuple[str, int]) -> str:
    """Return the JSON of what a cache's kind measures beforehand on a pipeline. item: (prompt, seed) of an image."""
    measure = CACHES[cache.kind].measure
    with naming(cache):
        return json.dumps(measure and measure(pipe, call, item))


def enable_cache(pipe: Any, cache: StepCache) -> None:
    """Put a cache into a pipeline's denoisers, or a list beside them; fewer steps are the call's affair.

    ValueError for a denoiser that takes none.
    """
    from fluxq.quantize.structure import denoisers_in
    from fluxq.runtime.skip import skip_steps
    from fluxq.runtime.skipped import require_free

    if cache.kind == FEWER:
        return
    if cache.kind == LIST:
        skip_steps(pipe, cache.steps)
        return
    config, made = CACHES[cache.kind].config, json.loads(cache.made or "null")
    if config is None:
        raise ValueError(f"{cache.label} is no cache of diffusers")
    for _, outer in denoisers_in(pipe):
        model: Any = outer
        require_free(model)
        if not hasattr(model, "enable_cache"):
            raise ValueError(f"{type(model).__name__} takes no step cache in this diffusers: leave out {cache.label}")
        model.enable_cache(config(pipe, cache.value, made))


@contextmanager
def naming(cache: StepCache | None) -> Iterator[None]:
    """Let whatever a cache makes of a model it does not support be an error that names the cache."""
    import torch

    try:
        yield
    except (OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if cache is None or cache.kind == FEWER:
            raise
        reason = first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        raise RuntimeError(f"{cache.label} does not work with this model ({reason}): leave out that --cache") from error


@contextmanager
def counted(models: Iterable[nn.Module]) -> Iterator[Callable[[], float]]:
    """Yield a function: share of the multiplications of whole steps that denoisers have made since."""
    models = list(models)
    counts = [_Count() for _ in models]
    with ExitStack() as stack:
        for model, count in zip(models, counts, strict=True):
            stack.callback(model.register_forward_pre_hook(count.begin, with_kwargs=True).remove)
            for layer in _linears(model):
                stack.callback(layer.register_forward_hook(count.add).remove)
        yield lambda: _share(counts)


def _share(counts: Iterable[_Count]) -> float:
    called = [each.steps for each in counts if each.steps]
    whole = sum(len(steps) * max(steps) for steps in called)
    return sum(map(sum, called)) / whole if whole else 1.0


class _Count:
    """Multiplications of a denoiser in each of its steps, of which guidance may make two calls."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._timestep = math.nan

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        from fluxq.runtime.steps import first_timestep, timestep_of

        timestep = first_timestep(timestep_of(model, args, kwargs))
        if timestep != self._timestep:
            self.steps.append(0)
        self._timestep = timestep

    def add(self, layer: Any, _args: Any, output: Tensor) -> None:
        self.steps[-1] += output.numel() * int(layer.in_features)


def _linears(model: nn.Module) -> list[nn.Module]:
    """Return the Linears of a denoiser's blocks, quantized or not."""
    from torch.nn import ModuleList

    blocks = [child for child in model.children() if isinstance(child, ModuleList)] or [model]
    return [layer for block in blocks for layer in block.modules() if hasattr(layer, "in_features")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _fits(row: CacheRow, value: float, most: float) -> bool:
    if row.is_count:
        return value >= 2 and value.is_integer()
    return math.isfinite(value) and 0 < value <= most


def _by_threshold(config: str, _pipe: Any, threshold: float, _made: Any = None, **settings: Any) -> Any:
    """Return a configuration of diffusers, by the name of its class, that a threshold decides."""
    import diffusers

    return getattr(diffusers, config)(threshold=threshold, **settings)


def _taylor(_pipe: Any, interval: float, _made: Any = None, **settings: Any) -> Any:
    """Return a configuration that extrapolates in fp32, as lists do."""
    import torch
    from diffusers import TaylorSeerCacheConfig

    return TaylorSeerCacheConfig(cache_interval=int(interval), taylor_factors_dtype=torch.float32, **settings)


def _mag(pipe: Any, threshold: float, ratios: list[float], **settings: Any) -> Any:
    steps = len(ratios)
    return _by_threshold("MagCacheConfig", pipe, threshold, mag_ratios=ratios, num_inference_steps=steps, **settings)


def _of_attention(config: str, least: int, pipe: Any, every: float, _made: Any = None, **settings: Any) -> Any:
    """Return a configuration of diffusers, by the name of its class, that leaves out attention alone.

    least: of the timesteps in which it does.
    """
    import diffusers

    return getattr(diffusers, config)(
        spatial_attention_block_skip_range=int(every),
        spatial_attention_timestep_skip_range=(least, _NOISY),
        current_timestep_callback=lambda: int(pipe._current_timestep),
        **settings,
    )


def _mag_ratios(pipe: Any, call: Mapping[str, Any], item: tuple[str, int]) -> list[float]:
    """Return the ratios that MagCache finds when it makes an image in all steps; it prints them."""
    from diffusers import MagCacheConfig

    from fluxq.calibrate.capture import number_of_steps, run_pipeline
    from fluxq.quantize.structure import denoisers_in

    models: list[Any] = [model for _, model in denoisers_in(pipe)]
    if len(models) > 1:
        raise ValueError(f"MagCache counts the steps of one denoiser, and {type(pipe).__name__} has {len(models)}")
    total = number_of_steps(pipe, call)
    with redirect_stdout(io.StringIO()) as printed:
        models[0].enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=total))
        try:
            list(run_pipeline(pipe, [item], call))
        finally:
            models[0].disable_cache()
    return ast.literal_eval(printed.getvalue().strip().splitlines()[-1])


_INTERVAL = "interval of computed steps"

_faster = partial(_of_attention, "FasterCacheConfig", -1, is_guidance_distilled=True)  # and no half of a guided call
_pab = partial(_of_attention, "PyramidAttentionBroadcastConfig", 0)

# kind -> name, meaning of X, a usual X, …
CACHES = {
    PLAIN: CacheRow("FirstBlockCache", "threshold", 0.1, config=partial(_by_threshold, "FirstBlockCacheConfig")),
    "taylor": CacheRow("TaylorSeer", _INTERVAL, 3, True, _taylor),
    "taylor_lite": CacheRow("TaylorSeer lite", _INTERVAL, 3, True, partial(_taylor, use_lite_mode=True)),
    "mag": CacheRow("MagCache", "threshold", 0.12, config=_mag, measure=_mag_ratios),
    "faster": CacheRow("FasterCache", "interval of computed attention", 2, True, _faster),
    "pab": CacheRow("PAB", "interval of computed attention", 2, True, _pab),
    "sea": CacheRow("SeaCache", "threshold", 0.25, config=partial(_by_threshold, "SeaCacheConfig")),
    LIST: CacheRow("list", "share of computed steps", 0.5),  # which jobs/step_caches.py makes
}
