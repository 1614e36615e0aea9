"""Live quality: a share of images is made again with the 16-bit model and the same noise, when nothing else runs.

    alert  where  mean + 4 s / √n < gate     over the last 64, from 5 on;  until  mean >= gate

The gate is what the checkpoint was shipped with, of PSNR or of the latents' SQNR. Four standard errors: a sound
checkpoint is not to be accused, though it is looked at again and again.
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from fluxq.base.console import logger

METRICS = ("psnr", "latent_sqnr")
_LAST, _LEAST, _ERRORS = 64, 5, 4.0
_MOST = 100.0  # dB, of images that are the same


def bounded(decibels: float) -> float:
    """Return decibels that can be added up: those of equal images are infinite, of broken ones no number."""
    return -_MOST if math.isnan(decibels) else max(-_MOST, min(decibels, _MOST))


class Shadows:
    """Findings of shadow images, by checkpoint.

    share: of images that are made again. Gates of other metrics, and windows, are not looked at.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share, self._drawn = share, random.Random()
        self.gates: dict[str, dict[str, float]] = {}
        self.alerts: dict[str, str] = {}
        self._values: dict[tuple[str, str], deque[float]] = {}

    def is_drawn(self) -> bool:
        """Tell whether the next image is made again."""
        return self._drawn.random() < self.share

    def of(self, model: str, gates: Sequence[str]) -> None:
        """Take the gates of a checkpoint."""
        matches = [re.fullmatch(r"\s*(\w+)\s*>=?\s*([\d.]+)\s*", gate) for gate in gates]
        self.gates[model] = {match[1]: float(match[2]) for match in matches if match and match[1] in METRICS}

    def add(self, model: str, measured: Mapping[str, float]) -> None:
        """Take what a shadow image showed, and raise or end an alert."""
        gaps = []
        for metric, value in measured.items():
            values = self._values.setdefault((model, metric), deque(maxlen=_LAST))
            values.append(bounded(value))
            gate = self.gates.get(model, {}).get(metric)
            if gate is not None and len(values) >= _LEAST:
                mean = fmean(values)
                doubt = 0.0 if model in self.alerts else _ERRORS * stdev(values) / math.sqrt(len(values))
                if mean + doubt < gate:
                    gaps.append(f"{metric} {mean:.1f} dB in the mean of {len(values)} images, shipped with >= {gate:g}")
        if gaps and model not in self.alerts:
            logger.warning("%s is not what it was shipped as: %s", model, "; ".join(gaps))
        if gaps:
            self.alerts[model] = "; ".join(gaps)
        else:
            self.alerts.pop(model, None)

    def forget(self, model: str) -> None:
        """Forget all of a checkpoint."""
        self.gates.pop(model, None)
        self.alerts.pop(model, None)
        self._values = {key: values for key, values in self._values.items() if key[0] != model}

    def told(self, model: str) -> dict[str, object]:
        """Return what is known, as /v1/models tells it."""
        values = {metric: self._values.get((model, metric), ()) for metric in METRICS}
        means = {f"{metric}_db": round(fmean(each), 2) for metric, each in values.items() if each}
        return {"images": max(map(len, values.values())), **means, "alert": self.alerts.get(model)}
