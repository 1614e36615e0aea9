"""The loaded checkpoint against a simulation written here, from the published arithmetic alone.

Nothing of fluxq computes in the simulation: formats, scales and rounding are written out again, weights come from
the 16-bit files, and static scales from hooks of its own. Latents must agree bit for bit.

Weights are rounded to nearest here; test_transformed_layers.py simulates what is done to inputs.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn

import fluxq  # noqa: F401  registers the loader
from fluxq import tiny

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SHARED_INPUTS = (
    ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
)


def nearest_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code, by comparing distances to all eight magnitudes."""
    distance = (x.abs().unsqueeze(-1) - GRID).abs()
    best = distance.amin(-1, keepdim=True)
    tied = distance == best
    even = torch.tensor([True, False] * 4)
    index = torch.where((tied & even).any(-1), (tied & even).int().argmax(-1), tied.int().argmax(-1))
    return torch.copysign(GRID[index], x)


def fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def mxfp8(x: Tensor) -> Tensor:
    blocks = x.reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).double()
    exponent = torch.where(amax == 0, 0.0, torch.ceil(torch.log2(amax / 448)))
    scale = torch.exp2(exponent.clamp(-126, 127)).float()
    return ((blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


def nvfp4(x: Tensor, g: Tensor) -> Tensor:
    blocks = x.reshape(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, (amax / 6 / g).clamp(2.0**-9, 448)).to(torch.float8_e4m3fn).float()
    return (nearest_e2m1((blocks / (scale * g)).clamp(-6, 6)) * (scale * g)).reshape(x.shape)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.round(x / scale).clamp(-127, 127), scale


def int4(x: Tensor) -> Tensor:
    blocks = x.reshape(x.shape[0], -1, 64)
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16).float()
    scale = torch.where(scale == 0, 1.0, scale)
    return (torch.round(blocks / scale).clamp(-8, 7) * scale).reshape(x.shape)


class Simulated(nn.Module):
    """One Linear in fp32 with weights and inputs put through a format."""

    def __init__(self, linear: nn.Linear, name: str, recipe: str, g_w: Tensor, g_x: Tensor) -> None:
        super().__init__()
        self.bias = None if linear.bias is None else linear.bias.float()
        self.modulation = ".norm" in name
        self.recipe, self.g_x = recipe, g_x
        w = linear.weight.float()
        self.int8_weight = recipe == "int8" or (self.modulation and recipe != "fp8")
        if self.int8_weight:
            self.codes, self.scale = int8(w)
        elif self.modulation:
            self.w = fp8(w)
        else:
            self.w = {"fp8": fp8, "mxfp8": mxfp8, "int4": int4, "nvfp4": lambda t: nvfp4(t, g_w)}[recipe](w)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.recipe == "int8" and not self.modulation:
            codes, scale = int8(rows)
            # Integers up to 2^24 are exact in fp64 whatever the order of summation.
            y = (codes.double() @ self.codes.double().t()).float() * scale * self.scale.t()
            y = y if self.bias is None else y + self.bias
        elif self.int8_weight:
            y = F.linear(rows, self.codes * self.scale, self.bias)
        elif self.modulation or self.recipe == "int4":
            y = F.linear(rows, self.w, self.bias)
        else:
            act = {"fp8": fp8, "mxfp8": mxfp8, "nvfp4": lambda t: nvfp4(t, self.g_x)}[self.recipe]
            y = F.linear(act(rows), self.w, self.bias)
        return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def siblings(name: str) -> str:
    """A key that Linears reading one input share."""
    for members in SHARED_INPUTS:
        for member in members:
            if name.endswith("." + member):
                return name.removesuffix(member) + members[0]
    return name


def simulate(pipe: DiffusionPipeline, recipe: str, amax: dict[str, float]) -> None:
    """Replace every Linear of the pipeline's blocks by its simulation, in place."""
    model = pipe.transformer
    inside_blocks = {n: m for n, m in model.named_modules() if n.split(".")[0].endswith("blocks")}
    linears = {n: m for n, m in inside_blocks.items() if isinstance(m, nn.Linear)}
    top: dict[str, Tensor] = {}
    for name, linear in linears.items():
        here = linear.weight.abs().amax().float()
        top[siblings(name)] = torch.maximum(top.get(siblings(name), here), here)
    for name, linear in linears.items():
        g_x = torch.tensor(amax.get(siblings(name), 1.0)) / (6 * 448)
        model.set_submodule(name, Simulated(linear, name, recipe, top[siblings(name)] / (6 * 448), g_x))


def calibration_amax(items: list[tuple[str, int]], steps_seen: list[int]) -> dict[str, float]:
    """Largest input of every group over the calibration images at the steps seen, by plain hooks."""
    pipe, amax, step = tiny.load(), {}, [0]

    def after_step(_pipe, index: int, _timestep, tensors: dict) -> dict:
        step[0] = index + 1
        return tensors

    for name, module in pipe.transformer.named_modules():
        if isinstance(module, nn.Linear):

            def hook(_module, args, name=name) -> None:
                if step[0] in steps_seen:
                    amax[siblings(name)] = max(amax.get(siblings(name), 0.0), float(args[0].abs().max()))

            module.register_forward_pre_hook(hook)
    latents(pipe, items, callback_on_step_end=after_step)
    return amax


@torch.no_grad()
def latents(pipe: DiffusionPipeline, items: list[tuple[str, int]], **more) -> Tensor:
    return pipe(
        prompt=[prompt for prompt, _ in items],
        generator=[torch.Generator("cpu").manual_seed(seed) for _, seed in items],
        output_type="latent",
        **tiny.CALL_KWARGS,
        **more,
    ).images


@pytest.fixture(scope="module")
def checkpoint(plain_checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    return plain_checkpoint


@pytest.fixture(scope="module")
def amax(checkpoint: Callable[[str], Path]) -> dict[str, float]:
    """Group maxima over the images that the nvfp4 checkpoint says it was calibrated on."""
    made = json.loads((checkpoint("nvfp4") / "fluxq_plan.json").read_text(encoding="utf-8"))["trajectory"]
    return calibration_amax([(prompt, seed) for prompt, seed in made["items"]], made["steps_seen"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "int4", "int8", "mxfp8", "nvfp4"])
def test_latents_of_the_loaded_checkpoint_equal_the_simulation(
    recipe: str, checkpoint: Callable[[str], Path], amax: dict[str, float]
) -> None:
    items = [(tiny.PROMPTS[100 + i], 7 + i) for i in range(4)]
    loaded = DiffusionPipeline.from_pretrained(checkpoint(recipe), dtype=torch.bfloat16)
    loaded.set_progress_bar_config(disable=True)
    simulated = tiny.load()
    simulate(simulated, recipe, amax)
    got, want = latents(loaded, items), latents(simulated, items)
    assert torch.equal(got, want), f"{int((got != want).sum())} of {want.numel()} latents differ"
    assert not torch.equal(want, latents(tiny.load(), items)), "the simulation changed nothing"
