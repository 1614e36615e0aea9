"""An invented report for the tests of pages, Markdown and cards: `example(runs=3)`. Its images are real tensors."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import torch

from fluxq.eval.metrics.pictures import wall
from fluxq.eval.metrics.schema import (
    Card,
    CheckpointSize,
    Curve,
    Debug,
    Drift,
    Estimate,
    GateOutcome,
    Image,
    Item,
    LayerDamage,
    Metric,
    Patch,
    Protocol,
    Report,
    Run,
    Served,
    Speed,
    SpeedRow,
    Speedup,
    Times,
    Verdict,
)
from fluxq.eval.metrics.statistics import clustered_interval
from fluxq.eval.report.report import compare_runs

NAMES = ("schnell-nvfp4", "schnell-int8", "schnell-int4-svd", "schnell-fp8")
OUTCOMES = ("inconclusive", "comparable", "worse", "comparable")
OPENINGS = {
    "inconclusive": "Undecided",
    "comparable": "As good as published 8-bit models",
    "worse": "Worse than published 4-bit models",
}
STEPS = 4
BLOCKS = "transformer.single_transformer_blocks"
PROMPTS = (
    "a small red cube beside a tall blue cylinder on a wooden table, morning light",
    "an old lighthouse in a storm, oil on canvas",
    "a shop window that says OPEN, rainy street at night, reflections",
    "two cats asleep on a pile of newspapers",
)


def example(runs: int = 1, count: int = 16, size: int = 16, prompts=PROMPTS, **changes) -> Report:
    """changes: fields of the report, or of every run, to replace."""
    items = [(prompts[i % len(prompts)], i) for i in range(count)]
    of_run = {key: value for key, value in changes.items() if key in Run.model_fields}
    of_report = {key: value for key, value in changes.items() if key not in Run.model_fields}
    made = [_run(index, items, size).model_copy(update=of_run) for index in range(runs)]
    report = Report(
        created="2025-01-02T03:04:05+00:00",
        model="example-org/example-schnell",
        license="apache-2.0",
        call={"height": size, "width": size, "num_inference_steps": STEPS},
        reference={"16-bit images (SHA-256)": "ab" * 32, "dtype": "bfloat16"},
        noise_floor=f"two runs of the 16-bit model on the same {count} prompts and noise, one with other batches",
        protocol=Protocol(name="smoke", prompts="bundled", prompts_digest="cd" * 32, count=count, seeds=1),
        items=tuple(Item(prompt=prompt, seed=seed) for prompt, seed in items),
        runs=tuple(made),
        comparisons=compare_runs(made, items),
        warnings=("16 prompts are a quick look: intervals are wide",),
        provenance={"16-bit model": "example-org/example-schnell"},
        versions={"python": "3.11.9", "fluxq": "0.1.0", "torch": "2.15.0"},
        command="fluxq eval schnell-nvfp4 --protocol smoke",
        time={"engine": "local", "devices": ["cpu"], "generating_seconds": 12.5},
    )
    return report.model_copy(update=of_report)


def images(index: int, count: int, size: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A 16-bit and a quantized set of pictures: smooth blobs, and the same with noise that grows with the index."""
    draw = torch.Generator().manual_seed(7)
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    before, after = [], []
    for _ in range(count):
        channels = []
        for _ in range(3):
            a, b, c, d = torch.rand(4, generator=draw).tolist()
            channels.append(
                90 + 80 * torch.sin(6 * a * x + 9 * b * y + 6 * c) + 60 * d * (((x - a) ** 2 + (y - b) ** 2) < 0.06)
            )
        picture = torch.stack(channels)
        scale = (0.6, 0.25, 2.2, 0.3)[index % 4] * (2 + 8 * torch.rand(1, generator=draw).item())
        noise = scale * torch.randn(picture.shape, generator=draw)
        before.append(picture.round().clamp(0, 255).to(torch.uint8))
        after.append((picture + noise).round().clamp(0, 255).to(torch.uint8))
    return SimpleNamespace(images=before), SimpleNamespace(images=after)


def psnr(before: torch.Tensor, after: torch.Tensor) -> float:
    error = (before.double() - after.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def estimate(mean: float, half: float, n: int) -> Estimate:
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def served(bits: float, arithmetic: str = "native") -> Served:
    """In memory as stored, beside text encoders of 10 GB."""
    resident = int(1.49e9 * bits)
    return Served(
        arithmetic=arithmetic,
        layers={f"layers of {bits} bits": 24},
        digest=f"{arithmetic} {bits}",
        bits_per_weight=bits,
        resident_bytes=resident,
        pipeline_bytes=resident + 10**10,
    )


def _run(index: int, items, size: int) -> Run:
    count = len(items)
    reference, quantized = images(index, count, size)
    values = [psnr(a, b) for a, b in zip(reference.images, quantized.images, strict=True)]
    interval = Estimate.of(clustered_interval(values, [prompt for prompt, _ in items]))
    draw = random.Random(index)
    name = NAMES[index % len(NAMES)] + ("" if index < len(NAMES) else f"-{index}")
    bits = (4.5, 8.02, 4.3, 8.1)[index % 4]
    return Run(
        name=name,
        checkpoint=name,
        recipe=name.removeprefix("schnell-"),
        recipe_digest="ef" * 32,
        backend="native",
        cache=None,
        status="measured",
        size=CheckpointSize(
            components=("transformer",),
            bytes_before=23_800_000_000,
            bytes_after=int(1.49e9 * bits),
            bits_per_weight=bits,
            bits_per_quantized_weight=bits - 0.2,
        ),
        verdict=Verdict(
            outcome=OUTCOMES[index % 4],
            text=f"{OPENINGS[OUTCOMES[index % 4]]}: PSNR {interval.mean:.2f} dB, at least 17.5 dB asked.",
        ),
        gates=(
            GateOutcome(gate="psnr>=20", value=interval.mean, passed=True),
            GateOutcome(gate="lpips<=0.1", value=None, passed=False),
        ),
        metrics=_metrics(index, interval, count),
        images=tuple(Image(finite=True, identical=False, values={"psnr": value, "ssim": 0.9}) for value in values),
        drift=_drift(index),
        wall=wall(reference, quantized, values),
        served=served(bits),
        speed=_speed(name, index, bits),
        debug=_debug(draw),
        provenance={"checkpoint (SHA-256)": f"{index:02x}" * 32, "calibration prompts": "bundled"},
    )


def _metrics(index: int, interval: Estimate, count: int) -> dict[str, Metric]:
    noise = (0.0, -0.05, 0.4, -0.02)[index % 4]
    return {
        "psnr": Metric(
            name="PSNR to the 16-bit images", unit="dB", digits=".2f", better="higher",
            how="uint8, peak 255, mean of per-image values", value=interval, floor=estimate(47.1, 1.1, count),
        ),
        "ssim": Metric(
            name="SSIM to the 16-bit images", unit="", digits=".4f", better="higher", how="torchmetrics, data range 1",
            value=estimate(0.94 - noise / 5, 0.01, count), floor=estimate(0.998, 0.0004, count),
        ),
        "lpips": Metric(
            name="LPIPS to the 16-bit images", unit="", digits=".4f", better="lower", how="alex, full resolution",
            missing="needs alexnet-owt-7be5be79.pth in --weights DIR",
        ),
        "fid": Metric(
            name="FID to held-out images", unit="", digits=".4g", better="lower", how="Inception v3, tf1 resize",
            value=Estimate(mean=24.3 + noise, n=count), baseline=Estimate(mean=24.1, n=count),
            change=Estimate(mean=0.2 + noise, n=count), notes=(f"FID_{count} is biased upwards by its small N",),
        ),
        "clip_score": Metric(
            name="CLIP score", unit="", digits=".2f", better="higher", how="100 × cosine, open_clip",
            value=estimate(31.2 - noise, 0.4, count),
            baseline=estimate(31.3, 0.4, count), change=estimate(-0.1 - noise, 0.12, count),
        ),
    }  # fmt: skip


def _drift(index: int) -> Drift:
    factor = (1.0, 0.3, 2.6, 0.4)[index % 4]
    error = [factor * value for value in (0.021, 0.026, 0.034, 0.048)]
    sqnr = [-20 * math.log10(factor) + value for value in (38.0, 31.0, 27.0, 24.0)]
    return Drift(
        steps=tuple(range(1, STEPS + 1)),
        sigmas=(1.0, 0.75, 0.5, 0.25),
        images=8,
        curves={
            "velocity_error": Curve(
                name="Teacher-forced velocity error", unit="", digits=".4f", better="lower", how="|v̂ − v| / |v|",
                values=tuple(estimate(value, value / 12, 8) for value in error),
                floor=tuple(estimate(0.004, 0.0003, 8) for _ in error),
            ),
            "latent_sqnr": Curve(
                name="SQNR of the latents", unit="dB", digits=".1f", better="higher", how="free-running latents",
                values=tuple(estimate(value, 1.2, 8) for value in sqnr),
                floor=tuple(estimate(value, 0.8, 8) for value in (56.0, 52.0, 50.0, 49.0)),
            ),
        },
    )  # fmt: skip


def _times(p50: float) -> Times:
    return Times(n=20, p50=p50, p95=p50 * 1.06, iqr=p50 * 0.02, values=(p50,))


def _speed(name: str, index: int, bits: float) -> Speed:
    gain = (2.6, 1.7, 2.2, 1.8)[index % 4]

    def row(reference: bool, mode: str) -> SpeedRow:
        step = (0.21 if mode == "eager" else 0.17) / (1 if reference else gain)
        peak = 33_700_000_000 if reference else int(33.7e9 / (0.6 * gain))
        stages = {"text encoders": _times(0.09), "denoiser step": _times(step), "VAE": _times(0.07)}
        stages["end to end"] = _times(0.16 + STEPS * step + 0.01)
        return SpeedRow(
            side="16-bit" if reference else name, is_reference=reference, mode=mode, batch=1, height=1024, width=1024,
            stages=stages, peak_bytes=peak, resident_bytes=peak - 10**9, roofline_share=0.61, energy_joules=310.0,
        )  # fmt: skip

    rows = [row(reference, mode) for mode in ("eager", "compiled") for reference in (True, False)]
    graph = SpeedRow(
        side=name, is_reference=False, mode="cuda graph", batch=1, height=1024, width=1024, missing="out of memory"
    )
    where = {"side": name, "mode": "compiled", "batch": 1, "height": 1024, "width": 1024}
    return Speed(
        device="Example GPU",
        measured_on="Example GPU, driver 1.2, clocks not locked.",
        load_seconds={"16-bit": 31.0, name: 12.0},
        first_image_seconds={"16-bit": 36.0, name: 15.0},
        rows=(*rows, graph),
        speedups=(
            Speedup(**where, stage="end to end", ratio=estimate(gain * 0.8, 0.03, 20)),
            Speedup(**where, stage="VAE", refused="the spread of 16 bit is 8 % of its median, above 5 %"),
        ),
        cards=tuple(
            Card(side=name, gigabytes=gigabytes, needed=17_000_000_000, fits=gigabytes > 17)
            for gigabytes in (8, 12, 16, 24)
        ),
        conditions={"temperature": "41 °C before, 58 °C after"},
        warnings=(),
        served=served(bits),
    )


def _debug(draw: random.Random) -> Debug:
    roles = ("attn_out", "mlp_out", "qkv", "mlp_in")
    layers = []
    for block in range(6):
        for role in roles:
            damage = draw.random() ** 4 * 0.2
            local = tuple(22 + 14 * draw.random() - 60 * damage for _ in range(STEPS))
            layers.append(
                LayerDamage(
                    name=f"{BLOCKS}.{block}.{role}", role=role, scheme="nvfp4-nvfp4", weights=9_437_184,
                    local_sqnr_db=local, damage=damage, gain=damage * 0.9, kernel_error=2e-7,
                    health={"saturated": (0.0012, 0.0004)},
                )
            )  # fmt: skip
    layers.sort(key=lambda layer: -(layer.damage or 0))
    blocks = [
        LayerDamage(
            name=f"{BLOCKS}.{b}",
            role="block",
            scheme="",
            weights=1,
            damage=0.3 * draw.random(),
            gain=0.2 * draw.random(),
        )
        for b in range(6)
    ]
    patch = Patch(
        layers=(layers[0].name, layers[1].name), format="fp8", growth=0.05, damage=0.2, left_out="", bits_before=4.5,
        bits_after=4.72, before_sqnr_db=24.0,
        predicted_sqnr_db=27.1, measured_sqnr_db=26.8,
        recipe=f"extends: nvfp4\ncomponents: {{transformer: {{overrides: [{{match: {layers[0].name[12:]}}}]}}}}\n",
    )  # fmt: skip
    return Debug(
        prompts=4,
        steps=tuple(range(1, STEPS + 1)),
        sigmas=(1.0, 0.75, 0.5, 0.25),
        blocks=tuple(blocks),
        layers=tuple(layers),
        first_divergence=f"{layers[0].name} at step 2",
        additivity=0.9,
        findings=(f"{layers[0].name} does most damage: {layers[0].damage:.0%} of the error alone",),
        patch=patch,
    )
