"""Host time of an optimized FLUX.1 block in fp8: what Python takes before a GPU has its launches.

    python -m benchmarks.kernels.host [--json FILE]

Kernels, products and attention are replaced by stand-ins that return at once, so what is left is the way
to them: the comparison of the block with its plan, new tensors, views, arguments. Triton's own launcher, some 10 us a
launch, is not in it, nor are torch's own for products and attention. "unplanned" is a block without a plan of its own:
forward, ops and their plans.
Each time is the process's own, the least of several rounds, beside that of a torch Linear of 16 x 16 on this machine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json
from fluxq.kernels import launch, library
from fluxq.kernels.all_ops import OPS
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.runtime import block_plans, fused

CHIP = "sm_90"
TEXT, IMAGE, HIDDEN = 16, 32, 256
WARM_UPS = 3  # until a block has a plan


@contextmanager
def stand_ins() -> Iterator[Counter[str]]:
    """Inside the block, ops of tensors on the CPU take the way to a GPU's kernels, which compute nothing.

    Yields how often each was launched.
    """
    launched: Counter[str] = Counter()

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched[kernel.fn.__name__] += 1

    def product(x: Tensor, w: Tensor, *scales: Any, **options: Any) -> Tensor:
        launched["F.scaled_mm"] += 1
        return x.new_empty(x.shape[0], w.shape[1], dtype=options["output_dtype"])

    def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        launched["F.linear"] += 1
        return x.new_empty(*x.shape[:-1], w.shape[0])

    def attention(query: Tensor, **options: Any) -> Tensor:
        launched["attention"] += 1
        return query

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(JITFunction, "run", run))
        patches.enter_context(mock.patch.object(launch, "chip_of", lambda device: CHIP))
        patches.enter_context(mock.patch.object(block_plans, "DEVICES", ("cpu",)))
        patches.enter_context(mock.patch.object(library.F, "scaled_mm", product))
        patches.enter_context(mock.patch.object(F, "linear", linear))
        backends = _AttentionBackendRegistry._backends
        patches.enter_context(mock.patch.dict(backends, {AttentionBackendName.NATIVE: attention}))
        patches.enter_context(mock.patch.object(block_plans, "_repeats", lambda *_: True))  # nothing writes results
        ops = torch.library.Library("fluxq", "IMPL")
        for name in ("quantized_linear", *OPS):
            ops.impl(name, lambda *given, _name=name: launch.run(_name, *given), "CPU", allow_override=True)
        try:
            yield launched
        finally:
            ops._destroy()


def model_of(scheme: str) -> nn.Module:
    """A small FLUX transformer whose blocks are quantized and optimized."""
    torch.manual_seed(0)
    heads = HIDDEN // 128
    config = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 128,
        "num_attention_heads": heads,
    }
    config |= {"in_channels": 64, "joint_attention_dim": 64, "pooled_projection_dim": 64, "guidance_embeds": True}
    model: Any = FluxTransformer2DModel(**config).bfloat16().eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "transformer_blocks" in name and "norm" not in name:
            w = QuantizedTensor.quantize(module.weight, Scheme.parse(scheme).weights)
            model.set_submodule(name, QuantLinear.from_quantized(w, module.bias, Scheme.parse(scheme), None))
    fused.optimize(model, FAMILIES["flux"], "cpu", side_by_side=True)
    return model


def inputs(model: Any) -> tuple[Tensor, ...]:
    """Arguments of a block: image, text, embedded timestep and rotary embedding."""
    rope = model.pos_embed(torch.zeros(TEXT + IMAGE, 3))
    image, text = (torch.randn(1, tokens, HIDDEN).bfloat16() for tokens in (IMAGE, TEXT))
    return image, text, torch.randn(1, HIDDEN).bfloat16(), rope


@torch.no_grad()
def seconds_of(call: Callable[[], Any], calls: int, rounds: int = 25) -> float:
    """Process time of one call, the least of so many rounds."""
    for _ in range(WARM_UPS):
        call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - start) / calls)
    return min(times)


def measure(scheme: str = "fp8-fp8") -> dict[str, Any]:
    """Milliseconds of one double and one single block, their launches, and a torch Linear's."""
    linear, x = nn.Linear(16, 16), torch.randn(16, 16)
    result: dict[str, Any] = {"scheme": scheme, "linear_us": round(1e6 * seconds_of(lambda: linear(x), 2000), 2)}
    with stand_ins() as launched, torch.no_grad():
        model: Any = model_of(scheme)
        given = inputs(model)
        for name, block in (("double", model.transformer_blocks[0]), ("single", model.single_transformer_blocks[0])):
            with mock.patch.object(launch, "MOST_PLANS", 0):  # a plan does not pass by the stand-ins
                block(*given)
                launched.clear()
                block(*given)
            launches = launched.total()
            us = 1e6 * seconds_of(lambda block=block: block(*given), 10)
            row = {"ms": round(us / 1e3, 3), "launches": launches, "linears": round(us / result["linear_us"])}
            with mock.patch.object(block_plans, "DEVICES", ()):
                unplanned = 1e6 * seconds_of(lambda block=block: block(*given), 10)
            result[name] = row | {"unplanned_ms": round(unplanned / 1e3, 3)}
    return result


@click.command()
@click.option("--scheme", default="fp8-fp8", show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path), help="Write the result here.")
def main(scheme: str, output: Path | None) -> None:
    """Measure the host's share of an optimized block."""
    torch.set_num_threads(1)
    result = measure(scheme) | {"commit": commit(), "versions": versions()}
    for name in ("double", "single"):
        row = result[name]
        click.echo(
            f"{name}: {row['ms']} ms for {row['launches']} launches, {row['linears']} torch Linears; "
            f"{row['unplanned_ms']} ms without a plan of the block"
        )
    click.echo(f"a torch Linear takes {result['linear_us']} us here")
    if output:
        write_json(output, result)


if __name__ == "__main__":
    main()
