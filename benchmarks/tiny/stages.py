"""The four trainings behind the embedded pipeline: classifier, autoencoder, open_clip model, transformer.

Each takes a `Budget` and a folder to write its weights into, and returns a log. Learning rates follow the
share of the budget that is used up, so a slow machine ends its schedule in time too.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.tiny import build, data, drawing
from benchmarks.tiny.accuracy import classify
from fluxq.tiny import networks

CLIP_SCALE = 12.0  # the logits of the open_clip model are this times the cosine
EMPTY_SHARE = 0.1  # of the captions seen by the transformer are empty
COMPILE_FROM = 300  # seconds of training from which the minute or two of torch.compile pay
logger = logging.getLogger(__name__)


@dataclass
class Budget:
    """Limits of a stage: seconds of wall time and, for short runs, a number of steps."""

    seconds: float
    steps: int | None = None
    step: int = 0
    start: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def used(self) -> float:
        """The used share, 0 to 1, of whichever runs out first."""
        by_steps = self.step / self.steps if self.steps else 0.0
        return min(1.0, max(by_steps, self.elapsed / self.seconds))


def rate(budget: Budget, flat: float, warmup: int, floor: float = 0.02) -> float:
    """The share of the peak learning rate: linear warm-up, flat, then linear decay to `floor`."""
    decay = 1 - (1 - floor) * max(0.0, budget.used - flat) / (1 - flat)
    return min(1.0, (budget.step + 1) / warmup) * decay


def optimize(
    parameters: list[nn.Parameter],
    loss_of_step: Callable[[], Tensor],
    budget: Budget,
    peak: float,
    flat: float = 0.2,
    warmup: int = 100,
    decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.97),
    after_step: Callable[[], None] | None = None,
) -> list[list[float]]:
    """AdamW until the budget ends, or until Ctrl-C: then what is learned so far is kept.

    Returns the curve: [step, seconds, mean loss since the last point].
    """
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=betas, weight_decay=decay, fused=True)
    curve: list[list[float]] = []
    losses: list[Tensor] = []

    def add_point() -> None:
        curve.append([budget.step, round(budget.elapsed, 1), round(float(torch.stack(losses).mean()), 5)])
        losses.clear()

    try:
        while budget.used < 1:
            for group in optimizer.param_groups:
                group["lr"] = peak * rate(budget, flat, warmup)
            loss = loss_of_step()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            budget.step += 1
            losses.append(loss.detach())
            if after_step is not None:
                after_step()
            if budget.step >= 20 * 1.15 ** len(curve):  # points are even on a logarithmic axis
                add_point()
    except KeyboardInterrupt:
        logger.warning("stopped by hand at step %d", budget.step)
    if losses:
        add_point()
    return curve


def save(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model's state dict as safetensors."""
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in model.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def pixels_to_float(pixels: Tensor) -> Tensor:
    """uint8 to float in [-1, 1], any shape."""
    return pixels.float() / 127.5 - 1


def float_to_pixels(images: Tensor) -> Tensor:
    """[-1, 1] to uint8, the rounding of diffusers' image processor, any shape."""
    return ((images.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


class Batches:
    """Random batches of a fixed set of drawn images, without replacement within a pass."""

    def __init__(self, images: drawing.Images, size: int, device: str) -> None:
        self.pixels = torch.from_numpy(images.pixels).to(device)
        self.labels = torch.from_numpy(images.labels).to(device)
        self.size = size
        self.order = iter(())

    def rows(self) -> Tensor:
        """The row numbers of the next batch."""
        rows = next(self.order, None)
        if rows is None or len(rows) < self.size:
            self.order = iter(torch.randperm(len(self.pixels), device=self.pixels.device).split(self.size))
            rows = next(self.order)
        return rows


def train_classifier(images: drawing.Images, budget: Budget, folder: Path, device: str) -> dict:
    """The feature network, on images with a little noise so that generated ones are not foreign to it."""
    network = networks.FeatureNetwork().to(device)
    batches = Batches(images, 128, device)

    def loss_of_step() -> Tensor:
        rows = batches.rows()
        noise = torch.randn(len(rows), *batches.pixels.shape[1:], device=device)
        strength = 12 * torch.rand(len(rows), 1, 1, 1, device=device)
        noisy = (batches.pixels[rows] + strength * noise).clamp(0, 255).to(torch.uint8)
        logits, labels = classify(network, noisy), batches.labels[rows]
        losses = [
            F.cross_entropy(logits[name], labels[:, at], label_smoothing=0.05) for at, name in enumerate(networks.HEADS)
        ]
        return torch.stack(losses).sum()

    curve = optimize(list(network.parameters()), loss_of_step, budget, peak=2e-3, decay=0.05)
    save(network, folder / "features.safetensors")
    return {"steps": budget.step, "seconds": round(budget.elapsed, 1), "loss_curve": curve}


def train_autoencoder(images: drawing.Images, budget: Budget, folder: Path, device: str) -> dict:
    """L1 + 2 MSE + a trace of KL; scale and shift then give the latents mean 0, deviation 1."""
    vae: Any = build.autoencoder()
    vae.to(device)
    batches = Batches(images, 48, device)

    def loss_of_step() -> Tensor:
        wanted = pixels_to_float(batches.pixels[batches.rows()])
        posterior = vae.encode(wanted).latent_dist
        output = vae.decode(posterior.sample()).sample
        kl = posterior.kl().sum() / wanted.numel()
        return F.l1_loss(output, wanted) + 2 * F.mse_loss(output, wanted) + 1.5e-4 * kl

    curve = optimize(list(vae.parameters()), loss_of_step, budget, peak=2e-3, flat=0.0, decay=0.0)
    latents = encode(vae, batches.pixels[:2048])
    vae.register_to_config(
        scaling_factor=round(1 / float(latents.std()), 4), shift_factor=round(float(latents.mean()), 4)
    )
    save(vae, folder / "autoencoder.safetensors")
    scale = {name: vae.config[name] for name in ("scaling_factor", "shift_factor")}
    return {"steps": budget.step, "seconds": round(budget.elapsed, 1), **scale, "loss_curve": curve}


def load_autoencoder(folder: Path) -> Any:
    """The autoencoder of `train_autoencoder`, on the CPU."""
    vae: Any = build.autoencoder()
    vae.load_state_dict(load_file(folder / "autoencoder.safetensors"))
    log = json.loads((folder / "autoencoder.json").read_text(encoding="utf-8"))
    vae.register_to_config(scaling_factor=log["scaling_factor"], shift_factor=log["shift_factor"])
    return vae.eval()


@torch.no_grad()
def encode(vae: Any, pixels: Tensor) -> Tensor:
    """uint8 images (N, 3, 16, 16) to the means of their raw latents (N, 4, 8, 8)."""
    return torch.cat([vae.encode(pixels_to_float(part).to(vae.dtype)).latent_dist.mean for part in pixels.split(256)])


@torch.no_grad()
def reconstruct(vae: Any, pixels: Tensor) -> Tensor:
    """uint8 images (N, 3, 16, 16) through the autoencoder and back to uint8."""
    return torch.cat([float_to_pixels(vae.decode(encode(vae, part)).sample) for part in pixels.split(256)])


def train_clip(images: drawing.Images, budget: Budget, folder: Path, device: str) -> dict:
    """The open_clip model: each image against every caption of the grammar.

    A batch of random pairs rarely holds two captions that differ in the object alone, and a model trained
    on such batches hardly looks at the object. Here all 336 captions are scored in each step; a second term
    weighs the 16 captions that differ from the image's own in nothing but the object. The temperature is
    fixed and high, so that wrong captions must be far in cosine, not just farther.
    """
    model = build.clip_model(folder / "clip").to(device)
    captions = list(data.captions())
    tokens = tokenize(captions)[1].to(device)
    table = np.empty((len(data.OBJECTS), len(data.COLOURS), len(data.BACKGROUNDS)), np.int64)
    for at, text in enumerate(captions):
        table[data.parse(text)] = at
    caption_of = torch.from_numpy(table).to(device)  # (objects, colours, backgrounds)
    batches = Batches(images, 128, device)
    parameters = [p for name, p in model.named_parameters() if name != "logit_scale"]

    def loss_of_step() -> Tensor:
        rows = batches.rows()
        labels = batches.labels[rows]
        image = model.encode_image(pixels_to_float(batches.pixels[rows]), normalize=True)
        text = model.encode_text(tokens, normalize=True)
        logits = CLIP_SCALE * image @ text.T  # (B, 336)
        wanted = caption_of[labels[:, 0], labels[:, 1], labels[:, 2]]
        siblings = caption_of[:, labels[:, 1], labels[:, 2]].T  # (B, 16): the same but for the object
        by_object = F.cross_entropy(logits.gather(1, siblings), labels[:, 0])
        return F.cross_entropy(logits, wanted) + by_object

    curve = optimize(parameters, loss_of_step, budget, peak=1.5e-3, decay=0.05)
    with torch.no_grad():
        model.logit_scale.fill_(float(np.log(CLIP_SCALE)))
    save(model, folder / "clip" / "open_clip_model.safetensors")
    return {"steps": budget.step, "seconds": round(budget.elapsed, 1), "loss_curve": curve}


def train_transformer(
    images: drawing.Images,
    vae: Any,
    budget: Budget,
    folder: Path,
    device: str,
) -> dict:
    """The transformer and its two text encoders, together: flow matching on latents.

    With noise e and latent x the sample at time t is (1 - t) x + t e, the target is e - x, and t is the
    sigmoid of a normal variable. What is kept is an exponential moving average of the weights; it is
    written every three minutes.
    """
    student = Student(vae, device)
    latents = student.normalise(encode(vae, torch.from_numpy(images.pixels).to(device)))  # (N, 16, 16)
    captions = ["", *data.captions()]
    number = {text: at for at, text in enumerate(captions)}
    caption_of = torch.tensor([number[text] for text in images.captions()], device=device)
    t5_tokens, clip_tokens = (tokens.to(device) for tokens in tokenize(captions))
    average = {name: value.detach().clone() for name, value in student.named_parameters()}
    batches = Batches(images, 64, device)
    written = 0.0  # seconds into the budget
    loss_of = torch.compile(student) if budget.seconds > COMPILE_FROM else student

    def loss_of_step() -> Tensor:
        rows = batches.rows()
        chosen = torch.where(torch.rand(len(rows), device=device) < EMPTY_SHARE, 0, caption_of[rows])
        time_of = torch.sigmoid(torch.randn(len(rows), device=device))
        noise = torch.randn(len(rows), 16, 16, device=device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return loss_of(latents[rows], noise, time_of, t5_tokens[chosen], clip_tokens[chosen])

    @torch.no_grad()
    def after_step() -> None:
        nonlocal written
        keep = min(0.9985, (1 + budget.step) / (10 + budget.step))
        for mean, value in zip(average.values(), student.parameters(), strict=True):
            mean.lerp_(value, 1 - keep)
        if budget.elapsed - written > 180:
            written = budget.elapsed
            student.save(folder, average)
            logger.info("transformer: step %d after %.0f seconds", budget.step, written)

    curve = optimize(
        list(student.parameters()),
        loss_of_step,
        budget,
        peak=1.5e-3,
        flat=0.5,
        warmup=150,
        after_step=after_step,
    )
    student.save(folder, average)
    return {"steps": budget.step, "seconds": round(budget.elapsed, 1), "loss_curve": curve}


def tokenize(captions: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens of T5 and of CLIP, (N, 8) each, as FluxPipeline makes them."""
    options = {"padding": "max_length", "max_length": build.TEXT_TOKENS, "return_tensors": "pt"}
    return tuple(make()(captions, **options).input_ids for make in (build.t5_tokenizer, build.clip_tokenizer))


class Student(nn.Module):
    """The transformer with its text encoders; `forward` is the flow-matching loss."""

    def __init__(self, vae: Any, device: str) -> None:
        super().__init__()
        self.transformer = build.transformer()
        self.t5 = build.t5_encoder()
        self.clip = build.clip_text_encoder()
        self.scale, self.shift = vae.config.scaling_factor, vae.config.shift_factor
        row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        grid = torch.stack([torch.zeros_like(row), row, column], -1).reshape(16, 3)
        self.register_buffer("image_ids", grid.float(), persistent=False)
        self.register_buffer("text_ids", torch.zeros(build.TEXT_TOKENS, 3), persistent=False)
        self.to(device)

    def normalise(self, raw: Tensor) -> Tensor:
        """Raw latents (N, 4, 8, 8) to the tokens that FluxPipeline packs: (N, 16, 16)."""
        latents = (raw - self.shift) * self.scale
        return latents.reshape(-1, 4, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, 16, 16)

    def forward(self, latents: Tensor, noise: Tensor, t: Tensor, t5_ids: Tensor, clip_ids: Tensor) -> Tensor:
        mixed = torch.lerp(latents, noise, t[:, None, None])  # (B, 16, 16)
        velocity = self.transformer(
            hidden_states=mixed,
            timestep=t,
            pooled_projections=self.clip(clip_ids).pooler_output,
            encoder_hidden_states=self.t5(t5_ids)[0],
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            return_dict=False,
        )[0]
        return F.mse_loss(velocity.float(), noise - latents)

    def save(self, folder: Path, average: dict[str, Tensor]) -> None:
        """Write the averaged weights, one file, replacing the last one in a single step."""
        part = folder / "student.part"
        save_file({name: value.cpu().contiguous() for name, value in average.items()}, part)
        part.replace(folder / "student.safetensors")

    @classmethod
    def load(cls, vae: Any, folder: Path) -> Student:
        """The student with the weights of `save`, on the CPU."""
        student = cls(vae, "cpu")
        missing, unexpected = student.load_state_dict(load_file(folder / "student.safetensors"), strict=False)
        if unexpected or any("shared" not in name and "embed_tokens" not in name for name in missing):
            raise RuntimeError(f"student.safetensors lacks {missing} and has the unknown {unexpected}")
        return student
