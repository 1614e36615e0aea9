"""Figures for Prometheus: what was asked, how long it waited, and how well that was foretold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fluxq.serve.orders import Order, Quantum
from fluxq.serve.shadow import bounded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SIZES = 32  # that have a label of their own; clients choose sizes
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_DECIBELS = (5, 10, 13, 15, 18, 20, 23, 25, 28, 30, 35, 40, 45, 50, 60)
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._sizes: set[str] = set()

        def make(kind: Callable[..., Any], name: str, about: str, labels: tuple[str, ...] = (), **how: Any) -> Any:
            return kind(f"fluxq_{name}", about, labels, registry=registry, **how)

        self.requests = make(Counter, "requests", "Requests by status and reason", ("status", "reason"))
        self.images = make(Counter, "images", "Images that were made", ("model",))
        self.cancelled = make(Counter, "cancelled_images", "Images whose client left")
        self.queued = make(Histogram, "queue_seconds", "Seconds in which an image did not run", buckets=_SECONDS)
        step = "Seconds of a denoising step"
        self.steps = make(Histogram, "step_seconds", step, ("model", "size"), buckets=_SECONDS)
        self.pixel_steps = make(Counter, "pixel_steps", "Pixels of all denoising steps", ("model",))
        self.skipped = make(Counter, "steps_skipped", "Steps that were extrapolated", ("model",))
        self.joined = make(Counter, "steps_joined", "Steps whose denoiser calls were joined with others'", ("model",))
        foretold = "Predicted seconds of an image over those that it took"
        self.foretold = make(Histogram, "predicted_over_actual", foretold, buckets=_RATIOS)
        self.cached = make(Counter, "prompts_cached", "Images whose encoded prompt was kept")
        self.restarts = make(Counter, "worker_restarts", "Workers that ended by themselves")
        decibels = {"buckets": _DECIBELS}
        self.shadow_psnr = make(Histogram, "shadow_psnr_db", "PSNR against 16 bit", ("model",), **decibels)
        self.shadow_sqnr = make(Histogram, "shadow_latent_sqnr_db", "SQNR of latents, the same", ("model",), **decibels)
        self.alert = make(Gauge, "shadow_alert", "1 where a checkpoint is not what it was shipped as", ("model",))
        self.waiting = make(Gauge, "queue_images", "Images that wait or run")
        self.backlog = make(Gauge, "backlog_seconds", "Predicted seconds until all that waits or runs is finished")
        self.memory = make(Gauge, "memory_bytes", "Bytes of the weights in memory", ("model",))
        self.ready = make(Gauge, "ready", "1 where requests are taken")

    def answered(self, status: int, reason: str = "") -> None:
        """Count an answer."""
        self.requests.labels(str(status), reason).inc()

    def quantum(self, order: Order, quantum: Quantum) -> None:
        """Count what a quantum did."""
        if quantum.picture is None:
            size = "x".join(map(str, order.size))
            if size in self._sizes or len(self._sizes) < _SIZES:
                self._sizes.add(size)
            else:
                size = "other"
            # The first has the prompt's encoding in it, and those beside others have theirs.
            if quantum.steps > 1 and (quantum.is_alone or quantum.shared > 1):
                self.steps.labels(order.model, size).observe(quantum.seconds)
            self.pixel_steps.labels(order.model).inc(order.pixels)
            if quantum.shared > 1:
                self.joined.labels(order.model).inc()
            if quantum.steps == 1 and quantum.cached:
                self.cached.inc()

    def made(self, made: Any) -> None:
        """Count an image."""
        self.images.labels(made.order.model).inc()
        self.queued.observe(made.queued)
        self.foretold.observe(made.predicted / made.computed)
        if (left_out := made.order.steps - made.picture.computed) > 0:
            self.skipped.labels(made.order.model).inc(left_out)

    def shadow(self, model: str, measured: Mapping[str, float], is_alert: bool) -> None:
        """Count what a shadow image showed."""
        self.shadow_psnr.labels(model).observe(bounded(measured["psnr"]))
        self.shadow_sqnr.labels(model).observe(bounded(measured["latent_sqnr"]))
        self.alert.labels(model).set(is_alert)

    def forget(self, model: str) -> None:
        """End the alert of a checkpoint that is gone."""
        with suppress(KeyError):
            self.alert.remove(model)

    def page(self, dispatcher: Any, images: int, seconds: float) -> bytes:
        """Return the page that Prometheus reads. images, seconds: predicted, of what waits or runs."""
        self.waiting.set(images)
        self.backlog.set(seconds)
        self.ready.set(dispatcher.is_ready and not dispatcher.is_draining)
        self.memory.clear()
        for name, nbytes in dispatcher.memory.items():
            self.memory.labels(name).set(nbytes)
        return generate_latest(self.registry)
