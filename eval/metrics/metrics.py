"""The metrics: a row each, with what it needs and how it is taken. Limits are in verdict.py.

METRICS is at the end of the file; evaluation, report and gates iterate it. A metric returns a value per image wherever
one exists, so that recipes can be compared image by image and the worst ones looked at. A set in which an image is not
finite has no means: what can be said of its whole images is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fluxq.eval.images.generate import Images
from fluxq.eval.metrics import distribution, perceptual
from fluxq.eval.metrics.alignment import ClipScorer
from fluxq.eval.metrics.distribution import (
    Features,
    Moments,
    extract,
    fid,
    fid_bias,
    fid_infinity,
)
from fluxq.eval.metrics.fidelity import cosine, frame_psnr, over_frames, sqnr, whole_only
from fluxq.eval.metrics.networks import Networks
from fluxq.eval.metrics.plugins import (
    ADAPTERS,
    PluginSource,
    Unmeasured,
    find_plugins,
    load_class,
    open_plugin,
    scores,
)
from fluxq.eval.metrics.schema import Figure
from fluxq.eval.metrics.statistics import Interval, clustered_interval
from fluxq.eval.metrics.video import VIDEO_FRAMES, all_frames, by_video, frames_in_each, mean_change, temporal_psnr

_Result = TypeVar("_Result")
_KID_SCALE = 1000
_SHARED = "both sides share prompts and noise, so far below what two independent sets would give"


@dataclass(frozen=True)
class Measured:
    """Result of a metric for one quantized set.

    value, baseline: over its images, and over the 16-bit ones.
    change: value - baseline, paired where there are values per image.
    per_image, change_per_image: in the order of the items, NaN for an image that was not finite; None for no values.
    how: words in place of the row's.
    missing: reason why there is no value.
    """

    value: Interval | None
    baseline: Interval | None = None
    change: Interval | None = None
    per_image: tuple[float, ...] | None = None
    change_per_image: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()
    how: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class MetricRow:
    """One metric.

    digits: format specification.
    better: direction that is good.
    how: variant and implementation.
    take: function that measures it.
    needs: keys of `networks.NEEDS`.
    of_video: name where videos are compared, None for `name` with "videos" in the place of "images".
    only_video: whether images do not have it.
    by_frame: whether it is, of a video, the mean over frames.
    """

    name: str
    unit: str
    digits: str
    better: Literal["higher", "lower"]
    how: str
    take: Callable[[Sample], Measured]
    needs: tuple[str, ...] = ()
    of_video: str | None = None
    only_video: bool = False
    by_frame: bool = False

    def figure(self, is_video: bool, how: str | None = None) -> Figure:
        """Return what a report says of it. how: words that replace the row's."""
        name, how = self.name, how or self.how
        if is_video:
            name = self.of_video or name.replace("images", "videos")
            how = how.replace("per-image", "per-video") + "; mean over frames" * self.by_frame
        return Figure(name=name, unit=self.unit, digits=self.digits, better=self.better, how=how)

    def measure(self, sample: Sample) -> Measured:
        """Take the metric; raise Unmeasured with the reason and a cure if that is impossible."""
        reason = self.lacks(sample.networks, sample.frames is not None)
        if reason is not None:
            raise Unmeasured(reason)
        return self.take(sample)

    def lacks(self, networks: Networks, is_video: bool) -> str | None:
        """Return the reason why it cannot be taken of any images or videos, or None."""
        if self.only_video and not is_video:
            return "it is taken of videos, and this model makes images"
        return next((reason for need in self.needs if (reason := networks.lacks(need)) is not None), None)


@dataclass(frozen=True)
class Sample:
    """Input of metrics: two sets of images or videos of the same items (as `generate.Generated`), and networks.

    Results of networks for a set are kept by `networks.kept` and shared by all metrics and samples of that set.
    """

    reference: Any
    quantized: Any
    networks: Networks

    @property
    def prompts(self) -> list[str]:
        """The prompt of each image."""
        return [prompt for prompt, _ in self.quantized.items]

    @cached_property
    def frames(self) -> int | None:
        """Frames of each video; None for images."""
        return frames_in_each(self.quantized.images)

    @property
    def noun(self) -> str:
        """Word for the things that are compared."""
        return "images" if self.frames is None else "videos"

    @cached_property
    def frame_psnr(self) -> list[Tensor]:
        """dB of each frame of each item, float64 (F,); of images F is 1."""
        return frame_psnr(self.reference.images, self.quantized.images)

    @property
    def broken(self) -> str | None:
        """Reason why no mean over these images means anything, or None."""
        bad = int((~self.quantized.finite).sum())
        return f"{bad} of {len(self.quantized.items)} quantized {self.noun} hold NaN or infinity" if bad else None

    def both(self, what: str, compute: Callable[[Any], _Result]) -> tuple[_Result, _Result]:
        """Return `compute` of the 16-bit and of the quantized set; keep it as `what` for the next sample of a set."""
        sides = (self.reference, self.quantized)
        before, after = (self.networks.kept(side, what, lambda side=side: compute(side)) for side in sides)
        return before, after

    def features(self, images: Images) -> Features:
        """Return the feature network's features of images, or of the frames of videos."""
        network: Any = self.networks.features
        return self.networks.kept(
            images,
            f"features by {network.name}, {network.variant}",
            lambda: extract(all_frames(images), network, device=self.networks.device),
        )

    def embeddings(self, images: Images, scorer: ClipScorer) -> Tensor:
        """Return CLIP's embeddings (N, D) of images, or (N · F, D) of the frames of videos."""
        what = f"embeddings by {scorer.network}"
        return self.networks.kept(images, what, lambda: scorer.embed(all_frames(images)))


def missing(key: str, networks: Networks, *, is_video: bool = False) -> str | None:
    """Return the reason why the metric cannot be taken of any images or videos, or None."""
    return metric_rows()[key].lacks(networks, is_video) or _missing_plugin(key)


def metric_rows() -> dict[str, MetricRow]:
    """Return METRICS and the metrics of installed plug-ins; ValueError where a plug-in takes the key of another."""
    rows = dict(METRICS)
    for key, source in find_plugins().items():
        if key in ADAPTERS:
            continue
        if key in rows:
            raise ValueError(f"{source.origin} offers a metric {key!r}, which is one of fluxq's own: uninstall it")
        rows[key] = _foreign_row(source)
    return rows


def _foreign_row(source: PluginSource) -> MetricRow:
    take = _plugin(source)
    try:
        plugin = load_class(source)
    except Unmeasured as error:
        return MetricRow(source.key, "", ".4g", "higher", str(error), take, by_frame=True)
    how = plugin.how if source.key in ADAPTERS else f"{plugin.how}; {source.origin}"
    return MetricRow(plugin.name, plugin.unit, plugin.digits, plugin.better, how, take, by_frame=True)


def _missing_plugin(key: str) -> str | None:
    """Return the reason why a plug-in cannot be imported, or None; its weights are not looked at."""
    source = find_plugins().get(key)
    if source is None or source.absent:
        return source and source.absent
    try:
        load_class(source)
    except Unmeasured as error:
        return str(error)
    return None


def _same_frames(sample: Sample) -> tuple[str, ...]:
    """Return a note that identical frames, the best there are, were left out."""
    differing = [values for values in sample.frame_psnr if not values.isinf().all()]
    same, whole = sum(int(values.isinf().sum()) for values in differing), sum(map(len, differing))
    return (f"{same} of {whole} frames are identical and left out of their videos' means",) if same else ()


def _flicker(sample: Sample) -> Measured:
    _require_whole(sample)
    before, after = sample.both("changes", lambda side: mean_change(side.images))
    still = int((before == 0).sum())
    if still:
        raise Unmeasured(f"{still} of the {len(before)} 16-bit videos stand still: there is nothing to divide by")
    return _paired(sample, after / before, notes=(f"mean change of the 16-bit videos: {before.mean():.3g} of 255",))


def _video_distance(sample: Sample) -> Measured:
    _require_whole(sample)
    network: Any = sample.networks.video_features
    if (sample.frames or 1) < VIDEO_FRAMES:
        raise Unmeasured(f"S3D reads at least {VIDEO_FRAMES} frames, the videos have {sample.frames}")
    device = sample.networks.device
    before, after = sample.both(
        "video features", lambda side: extract(side.images, network, device=device, batch_size=1)
    )
    how = f"{_fid_how(after, before, 'videos', '16-bit videos')}; FVD is defined with I3D and does not compare"
    notes = (_SHARED, fid_bias(after, before).replace("images", "videos"))
    return Measured(_alone(fid(after, before, "16-bit videos"), after.n), notes=notes, how=how)


def _ssim(sample: Sample) -> Measured:
    height, width = sample.reference.images[0].shape[-2:]
    window = perceptual.SSIM_WINDOW
    places = (height - window + 1) * (width - window + 1)
    images = sample.reference.images, sample.quantized.images
    notes = (f"an image of {width} x {height} has {places} places for the window",) if places < 1000 else ()
    return _paired(sample, perceptual.ssim(*images, sample.networks.device), notes=notes)


def _feature_distance(sample: Sample) -> Measured:
    before, after = _features(sample)
    values = by_video(perceptual.feature_distance(before.values, after.values), sample.frames)
    return _paired(sample, values, how=f"|f(b) - f(a)| / |f(a)|, {_through(before)}")


def _lpips(sample: Sample) -> Measured:
    network: Any = sample.networks.lpips_network
    return _paired(sample, network.distance(sample.reference.images, sample.quantized.images))


def _paired(sample: Sample, values: Tensor, notes: tuple[str, ...] = (), how: str | None = None) -> Measured:
    whole = whole_only(values, sample.reference, sample.quantized)
    value = None if sample.broken else clustered_interval(whole, sample.prompts)
    return Measured(value, per_image=whole, notes=notes, how=how, missing=sample.broken)


def _fid(sample: Sample) -> Measured:
    label = sample.networks.reference_name
    before, after = _against_reference(sample, "FID", lambda side, reference: fid(side, reference, label))
    reference, features = _reference(sample), _sides(sample)[1]
    return Measured(
        *_of_sets(before, after, features.n),
        notes=(fid_bias(features, reference), *_frames_alike(sample), *_unchecked(sample)),
        how=_fid_how(features, reference, _picture_noun(sample), label),
    )


def _fid_to_16bit(sample: Sample) -> Measured:
    (before, after), noun = _sides(sample), _picture_noun(sample)
    label = f"16-bit {noun}"
    notes = (_SHARED, fid_bias(after, before), *_frames_alike(sample))
    return Measured(_alone(fid(after, before, label), after.n), notes=notes, how=_fid_how(after, before, noun, label))


def _fid_infinity(sample: Sample) -> Measured:
    (before, error_before, _), (after, error, sizes) = _against_reference(sample, "FID∞", fid_infinity)
    features = _sides(sample)[1]
    count, width = features.values.shape
    notes = [
        *_frames_alike(sample),
        f"standard error of the fit {error:.2g} (16 bit: {error_before:.2g}); subsets share images, so the true error "
        "is larger",
        *_unchecked(sample),
    ]
    if sizes[0] <= width:
        notes.append(f"its smallest subsets, of {sizes[0]}, are too few for {width} features: a rough value")
    if isinstance(_reference(sample), Moments):
        notes.append("the bias of the reference's own number of images stays in it")
    return Measured(
        *_of_sets(before, after, count),
        notes=tuple(notes),
        how=f"line over 1/N through {len(sizes)} subsets of {sizes[0]} to {count}, {_through(features)}; "
        f"to {sample.networks.reference_name}",
    )


def _kid(sample: Sample) -> Measured:
    (before, _, _), (after, sd, size) = _against_reference(sample, "KID", distribution.kid)
    reference, features = _reference(sample), _sides(sample)[1]
    spread = f"standard deviation {_KID_SCALE * sd:.3g} over {distribution.KID_SUBSETS} subsets of {size} images"
    return Measured(
        *_of_sets(before, after, features.n, _KID_SCALE),
        notes=(*(() if math.isnan(sd) else (spread,)), *_frames_alike(sample)),
        how=f"1000 × unbiased MMD², cubic kernel, all images, {_through(features)}; to {reference.n} "
        f"{sample.networks.reference_name}",
    )


def _cmmd(sample: Sample) -> Measured:
    _require_whole(sample)
    networks = sample.networks
    scorer: Any = networks.cmmd_scorer
    real: Any = networks.reference_images
    reference = sample.embeddings(real, scorer)
    before, after = (
        distribution.cmmd(sample.embeddings(side.images, scorer), reference)
        for side in (sample.reference, sample.quantized)
    )
    count = len(sample.quantized.items) * (sample.frames or 1)
    few = f"the estimator is biased upwards by a finite number of images: compare only at N = {count}"
    return Measured(
        *_of_sets(before, after, count),
        notes=(few, *_frames_alike(sample), *scorer.warnings),
        how=f"1000 × biased MMD², Gaussian kernel of sigma 10, CLIP {scorer.network} (published values: ViT-L-14-336); "
        f"to {len(real)} {networks.reference_name}",
    )


def _clip_score(sample: Sample) -> Measured:
    _require_whole(sample)
    scorer: Any = sample.networks.clip_scorer
    before, after = (  # the mean of frames' cosines is the cosine of their mean
        scorer.align(by_video(sample.embeddings(side.images, scorer), sample.frames), sample.prompts)
        for side in (sample.reference, sample.quantized)
    )
    cut, count = scorer.truncated(sample.prompts), len(sample.prompts)
    note = f"{cut} of {count} prompts are longer than the text encoder reads: their ends do not count"
    how = f"100 × cosine of image and prompt, CLIP {scorer.network}"
    return _scored(sample, before, after, (*((note,) if cut else ()), *scorer.warnings), how)


def _plugin(source: PluginSource) -> Callable[[Sample], Measured]:
    def take(sample: Sample) -> Measured:
        _require_whole(sample)
        networks = sample.networks
        plugin = networks.kept(networks, f"plug-in {source.key}", lambda: open_plugin(source, networks.device))
        frames = sample.frames
        prompts = [prompt for prompt in sample.prompts for _ in range(frames or 1)]

        def score(side: Any) -> tuple[float, ...]:
            images: Any = all_frames(side.images)
            values = scores(source, plugin, images, prompts)
            return tuple(by_video(torch.tensor(values, dtype=torch.float64), frames).tolist())

        return _scored(sample, *sample.both(f"scores by {source.key}", score))

    return take


def _scored(
    sample: Sample,
    before: tuple[float, ...],
    after: tuple[float, ...],
    notes: tuple[str, ...] = (),
    how: str | None = None,
) -> Measured:
    change = tuple(b - a for a, b in zip(before, after, strict=True))
    value, baseline, difference = (clustered_interval(each, sample.prompts) for each in (after, before, change))
    return Measured(value, baseline, difference, after, change, notes, how)


def _against_reference(
    sample: Sample, what: str, measure: Callable[[Features, Any], _Result]
) -> tuple[_Result, _Result]:
    """Return a distance of either side to the reference; of the 16-bit images it is the same in every run."""
    reference = _reference(sample)
    before, after = (  # features are kept too, so that no others take their ids
        sample.networks.kept(
            reference, f"{what} of {id(features)}", lambda features=features: measure(features, reference)
        )
        for features in _sides(sample)
    )
    return before, after


def _sides(sample: Sample) -> tuple[Features, Features]:
    """Return features of the 16-bit and of the quantized images, enough of them and all of whole images."""
    _require_whole(sample)
    count = len(sample.quantized.items) * (sample.frames or 1)
    if count < 2:
        raise Unmeasured(f"needs at least two images on either side, got {count}")
    return _features(sample)


def _features(sample: Sample) -> tuple[Features, Features]:
    before, after = (sample.features(side.images) for side in (sample.reference, sample.quantized))
    return before, after


def _reference(sample: Sample) -> Features | Moments:
    """Return features, or their moments, of the images that generated ones are compared with."""
    networks = sample.networks
    if networks.reference_statistics is not None:
        return networks.reference_statistics
    real: Any = networks.reference_images
    if len(real) < 2:
        raise Unmeasured(f"needs at least two images on either side, got {len(real)} {networks.reference_name}")
    return sample.features(real)


def _unchecked(sample: Sample) -> tuple[str, ...]:
    """Return notes about what a statistics file does not say, which could therefore not be checked."""
    statistics = sample.networks.reference_statistics
    if statistics is None:
        return ()
    unstated = [
        word for word, value in (("network", statistics.extractor), ("resize", statistics.variant)) if value is None
    ]
    name = sample.networks.reference_name
    return (f"{name} does not say which {' and '.join(unstated)} it was made with",) if unstated else ()


def _require_whole(sample: Sample) -> None:
    if sample.broken:
        raise Unmeasured(sample.broken)


def _alone(value: float, count: int) -> Interval:
    """Return one number about all images: it has no per-image values to take an interval of."""
    return Interval(value, math.nan, math.nan, count)


def _of_sets(before: float, after: float, count: int, scale: float = 1) -> tuple[Interval, Interval, Interval]:
    """Return (value, baseline, change) of a figure of either side's images."""
    return (_alone(scale * after, count), _alone(scale * before, count), _alone(scale * (after - before), count))


def _through(features: Features) -> str:
    return f"{features.network} ({features.values.shape[1]} features; {features.variant})"


def _picture_noun(sample: Sample) -> str:
    """Return the word for the pictures of a set that a network looked at."""
    return "images" if sample.frames is None else "frames"


def _frames_alike(sample: Sample) -> tuple[str, ...]:
    """Return a note that a number of frames says less than as many images would."""
    if sample.frames is None:
        return ()
    return (f"of frames one by one, {sample.frames} of each of {len(sample.quantized.items)} videos, which are alike",)


def _fid_how(images: Features, reference: Features | Moments, noun: str, label: str) -> str:
    """Return all that a FID depends on."""
    count = "an unknown number of" if reference.n is None else str(reference.n)
    network = f"{images.network} ({images.values.shape[1]} features; {images.variant}, float64 statistics)"
    return f"{network}; {images.n} {noun} to {count} {label}"


METRICS: dict[str, MetricRow] = {
    "psnr": MetricRow(
        *("PSNR to the 16-bit images", "dB", ".2f", "higher", "uint8, peak 255, mean of per-image values"),
        lambda sample: _paired(sample, over_frames(sample.frame_psnr), notes=_same_frames(sample)),
        by_frame=True,
    ),
    "ssim": MetricRow(
        *("SSIM to the 16-bit images", "", ".4f", "higher"),
        *("torchmetrics, Gaussian window of 11 pixels, sigma 1.5", _ssim),
        by_frame=True,
    ),
    "worst_frame_psnr": MetricRow(
        *("PSNR of the worst frame", "dB", ".2f", "higher", "uint8, peak 255, least of each video's frames"),
        lambda sample: _paired(sample, torch.stack([values.min() for values in sample.frame_psnr])),
        only_video=True,
    ),
    "temporal_psnr": MetricRow(
        *("Temporal PSNR", "dB", ".2f", "higher"),
        "of x[t + 1] - x[t], peak 255, all changes of a video together",
        lambda sample: _paired(sample, temporal_psnr(sample.reference.images, sample.quantized.images)),
        only_video=True,
    ),
    "flicker": MetricRow(
        *("Flicker against 16 bit", "", ".4f", "lower"),
        *("mean |x[t + 1] - x[t]| over the 16-bit video's: 1 is as much, less is too still", _flicker),
        only_video=True,
    ),
    "latent_sqnr": MetricRow(
        *("SQNR of the final latents", "dB", ".2f", "higher"),
        "against the 16-bit latents, mean of per-image values",
        lambda sample: _paired(sample, sqnr(sample.reference.latents, sample.quantized.latents)),
    ),
    "latent_cosine": MetricRow(
        *("Cosine of the final latents", "", ".5f", "higher"),
        "to the 16-bit latents, mean of per-image values",
        lambda sample: _paired(sample, cosine(sample.reference.latents, sample.quantized.latents)),
    ),
    "feature_distance": MetricRow(
        *("Feature distance to the 16-bit images", "", ".4f", "lower", "|f(b) - f(a)| / |f(a)|", _feature_distance),
        needs=("features",),
        by_frame=True,
    ),
    "lpips": MetricRow(
        *("LPIPS to the 16-bit images", "", ".4f", "lower", "AlexNet, full resolution, torchmetrics", _lpips),
        needs=("lpips",),
        by_frame=True,
    ),
    "fid": MetricRow(
        *("FID", "", ".4g", "lower", "see its variant", _fid),
        needs=("features", "reference"),
        of_video="FID of frames",
    ),
    "fid_to_16bit": MetricRow(
        *("FID to the 16-bit images", "", ".4g", "lower", "see its variant", _fid_to_16bit),
        needs=("features",),
        of_video="FID of frames to the 16-bit frames",
    ),
    "fid_infinity": MetricRow(
        *("FID at infinitely many images", "", ".4g", "lower", "line over 1/N through FIDs of subsets", _fid_infinity),
        needs=("features", "reference"),
        of_video="FID at infinitely many frames",
    ),
    "kid": MetricRow(
        *("KID × 1000", "", ".4g", "lower", "1000 × unbiased MMD², cubic kernel, all images", _kid),
        needs=("features", "reference_features"),
        of_video="KID of frames × 1000",
    ),
    "cmmd": MetricRow(
        *("CMMD", "", ".4g", "lower", "1000 × biased MMD², Gaussian kernel of sigma 10, CLIP embeddings", _cmmd),
        needs=("cmmd_clip", "reference_images"),
        of_video="CMMD of frames",
    ),
    "video_distance": MetricRow(
        *("Video distance to the 16-bit videos", "", ".4g", "lower"),
        *("Fréchet distance of whole videos in S3D's features", _video_distance),
        needs=("video_features",),
        only_video=True,
    ),
    "clip_score": MetricRow(
        *("CLIP score", "", ".2f", "higher", "100 × cosine of image and prompt, open_clip", _clip_score),
        needs=("clip",),
        by_frame=True,
    ),
    **{key: _foreign_row(source) for key, source in ADAPTERS.items()},
}
