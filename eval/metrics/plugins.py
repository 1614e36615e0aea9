"""Metrics of other packages, which score an image for its prompt.

A distribution offers one with an entry point in the group `fluxq.metrics`, whose name is the metric's key:

    [project.entry-points."fluxq.metrics"]
    beauty = "beauty_metric:Beauty"

The entry point is a class (or a function) that takes `device=` and gives a `MetricPlugin`. ImageReward and HPSv2, whose
packages are not among fluxq's dependencies, are adapted below in the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import ValidationError

from fluxq.base.console import first_fault
from fluxq.eval.metrics.schema import Figure

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "fluxq.metrics"


class MetricPlugin(Protocol):
    """A metric of images and their prompts; the attributes are what a report's table says about it."""

    name: str
    unit: str
    digits: str
    better: Literal["higher", "lower"]
    how: str

    def score(self, images: Sequence[Tensor], prompts: Sequence[str]) -> Sequence[float]:
        """Return a finite number for each uint8 image (3, H, W), of which there are as many as prompts."""
        ...


@dataclass(frozen=True)
class PluginSource:
    """Source of a metric of another package.

    origin: package and version, to name if it breaks.
    load: function that imports the plug-in's class.
    package: module and distribution that it adapts and that may be absent.
    """

    key: str
    origin: str
    load: Callable[[], Any]
    package: tuple[str, str] | None = None

    @property
    def absent(self) -> str | None:
        """Reason why the package is absent, or None."""
        if self.package is None or find_spec(self.package[0]) is not None:
            return None
        return f"the package {self.package[1]} is not installed: pip install {self.package[1]}"


class Unmeasured(ValueError):
    """Raised where a metric cannot be taken; its text names the reason or the cure, and goes into the report."""


def find_plugins() -> dict[str, PluginSource]:
    """Return the adapters below and every installed entry point, by key; ValueError where two take one key."""
    sources = dict(ADAPTERS)
    for source in _entry_points():
        if source.key in sources:
            raise ValueError(
                f"metric {source.key!r} is offered by {sources[source.key].origin} and by {source.origin}: uninstall "
                "one"
            )
        sources[source.key] = source
    return sources


def load_class(source: PluginSource) -> Any:
    """Import the plug-in's class; Unmeasured if it lacks an attribute of `MetricPlugin`, or a report cannot take it."""
    with _foreign(source, "cannot be imported"):
        plugin_class = source.load()
    absent = [name for name in (*Figure.model_fields, "score") if not hasattr(plugin_class, name)]
    if absent:
        raise Unmeasured(f"{_named(source)} lacks {', '.join(absent)}: it is no metric of this fluxq")
    if plugin_class.better not in ("higher", "lower"):
        raise Unmeasured(f"{_named(source)}: `better` is {plugin_class.better!r}, expected 'higher' or 'lower'")
    try:
        Figure(**{name: getattr(plugin_class, name) for name in Figure.model_fields})
    except ValidationError as error:
        raise Unmeasured(f"{_named(source)}: no report takes what it says ({first_fault(error)})") from None
    return plugin_class


def open_plugin(source: PluginSource, device: str) -> MetricPlugin:
    """Make the plug-in, its weights loaded; Unmeasured if that fails."""
    if source.absent:
        raise Unmeasured(source.absent)
    plugin_class = load_class(source)
    with _foreign(source, "cannot be loaded"):
        return plugin_class(device=device)


def scores(
    source: PluginSource, plugin: MetricPlugin, images: Sequence[Tensor], prompts: Sequence[str]
) -> tuple[float, ...]:
    """Return the plug-in's score of each image; Unmeasured if it fails, or returns another count, NaN or infinity."""
    with _foreign(source, "failed"):
        values = tuple(float(value) for value in plugin.score(images, prompts))
    if len(values) != len(images):
        raise Unmeasured(f"{_named(source)} gave {len(values)} scores for {len(images)} images")
    if not all(math.isfinite(value) for value in values):
        raise Unmeasured(f"{_named(source)} gave a score that is NaN or infinite")
    return values


class ImageReward:
    """ImageReward 1.0 (Xu et al., 2023), package `image-reward`; it fetches its weights from THUDM/ImageReward.

    It reads 35 tokens of a prompt. The adapter was written from the package's source and has not been run against the
    real weights.
    """

    name, unit, digits = "ImageReward", "", ".3f"
    better: Literal["higher", "lower"] = "higher"
    how = "ImageReward-v1.0, image-reward"

    def __init__(self, device: str = "cpu") -> None:
        self.model: Any = import_module("ImageReward").load("ImageReward-v1.0", device=device)

    def score(self, images: Sequence[Tensor], prompts: Sequence[str]) -> list[float]:
        """Return its reward of each uint8 image (3, H, W) for its prompt; about 0 on average over real images."""
        import torch

        from fluxq.eval.images.generate import as_picture

        with torch.no_grad():
            return [self.model.score(prompt, as_picture(x)) for x, prompt in zip(images, prompts, strict=True)]


class HPSv2:
    """HPSv2.1 (Wu et al., 2023), package `hpsv2`; it fetches its weights from xswu/HPSv2.

    The package chooses its device itself and reads its weights again at every call, so images of one prompt go
    together. The adapter was written from the package's source and has not been run against the real weights.
    """

    name, unit, digits = "HPSv2.1", "", ".2f"
    better: Literal["higher", "lower"] = "higher"
    how = "100 × HPSv2.1, hpsv2"

    def __init__(self, device: str = "cpu") -> None:
        self.package: Any = import_module("hpsv2")

    def score(self, images: Sequence[Tensor], prompts: Sequence[str]) -> list[float]:
        """Return 100 × its score of each uint8 image (3, H, W) for its prompt."""
        from fluxq.eval.images.generate import as_picture

        values = [0.0] * len(prompts)
        for prompt in dict.fromkeys(prompts):
            places = [index for index, other in enumerate(prompts) if other == prompt]
            pictures = [as_picture(images[index]) for index in places]
            for index, value in zip(places, self.package.score(pictures, prompt, hps_version="v2.1"), strict=True):
                values[index] = 100 * float(value)
        return values


def _entry_points() -> Iterator[PluginSource]:
    for point in metadata.entry_points(group=GROUP):
        distribution = point.dist
        origin = f"{distribution.name} {distribution.version}" if distribution else point.value
        yield PluginSource(point.name, origin, point.load)


def _named(source: PluginSource) -> str:
    return f"the metric plug-in {source.key!r} of {source.origin}"


@contextmanager
def _foreign(source: PluginSource, what: str) -> Iterator[None]:
    """Raise whatever a foreign package raises as Unmeasured that names it, and says in words what happened."""
    try:
        yield
    except Exception as error:
        raise Unmeasured(f"{_named(source)} {what}: {type(error).__name__}: {error}") from error


ADAPTERS: dict[str, PluginSource] = {
    "image_reward": PluginSource("image_reward", "fluxq", lambda: ImageReward, ("ImageReward", "image-reward")),
    "hpsv2": PluginSource("hpsv2", "fluxq", lambda: HPSv2, ("hpsv2", "hpsv2")),
}
