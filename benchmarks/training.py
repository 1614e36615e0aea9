"""Memory and modelled time of training a LoRA on a quantized model, beside bf16: the tables of docs/diffusers.md.

    python -m benchmarks.training               measure, then write training.json and the tables
    python -m benchmarks.training --tables      the tables again, from the result file

Three parts. The embedded transformer with an adapter beside every Linear of its blocks makes one backward pass on the
CPU: bytes of its frozen Linears, bytes that the graph holds beside parameters, and how far the adapter's gradient is
from that with gradients in 16 bit. The backward pass of one Linear of FLUX.1-dev allocates tensors: they are counted as
on a GPU, with kernels that compute nothing. The time of FLUX.1-dev's Linears is modelled by recipes/cost.py's rates: a
product of the forward pass and one of the backward pass for each Linear of a block, its modulation left out.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

import fluxq
from benchmarks.pages import between
from fluxq.base import devices
from fluxq.base.devices import commit, versions
from fluxq.base.files import read_json, write_json, write_text
from fluxq.base.model import ModelFolder, load_pipeline, resolve_model
from fluxq.jobs import making
from fluxq.jobs.catalogue import CatalogueModel
from fluxq.kernels import launch, library
from fluxq.kernels.input_gradient.op import CODES, OP, formats_of
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.op import REFERENCES
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.all_families import find_published
from fluxq.recipes.cost import code_bytes, forward_pass, resident_bytes, route, stream_of
from fluxq.recipes.devices import Device, find_device
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.plan import MODULATION_ROLE, LayerPlan
from fluxq.recipes.workloads import CallSize

ROOT = Path(__file__).parent.parent
RESULT, PAGE = ROOT / "benchmarks" / "training.json", ROOT / "docs" / "diffusers.md"
RECIPES, GPUS, CHIP = ("fp8", "int8", "nvfp4", "int4"), ("h200", "rtx4090", "rtx5090"), "sm_90"
LAYER = (4608, 12288, 3072)  # M, N and K of the feed-forward half of FLUX.1-dev's single blocks
RANK, TOKENS, TEXT = 4, 64, 16
BEGIN, END = "<!-- training: begin -->\n", "<!-- training: end -->"


# --- the embedded transformer


def embedded() -> list[dict[str, Any]]:
    """Bytes and gradients of one backward pass of the embedded transformer, in bf16 and under each recipe."""
    rows = [_trained("16 bit", load_pipeline(resolve_model("tiny")).transformer)]
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            output = str(Path(folder) / recipe)
            options = making.JobOptions(model="tiny", recipe=recipe, profile="rtn", output=output, check=False)
            making.quantize(making.job_of(options))
            rows.append(_trained(recipe, load_pipeline(ModelFolder(recipe, Path(output))).transformer))
    return rows


def _trained(recipe: str, model: Any) -> dict[str, Any]:
    linears = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, QuantLinear))}
    inner = [name for name in linears if "transformer_blocks" in name and "norm" not in name]
    frozen = sum(_bytes(*linears[name].parameters()) for name in inner)
    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=RANK, target_modules=inner, init_lora_weights=False))
    model.train()
    held, gradients = [], []
    for how in ("16bit", "8bit"):
        fluxq.configure(gradients=how)
        bytes_held, gradient = _backward(model)
        held.append(bytes_held)
        gradients.append(gradient)
    fluxq.configure(gradients="16bit")
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    return {
        "recipe": recipe,
        "frozen_mb": round(frozen / 1e6, 3),
        "held_mb": round(held[0] / 1e6, 3),
        "held_mb_in_8_bit": round(held[1] / 1e6, 3),
        "error_in_8_bit": round(float(error), 4),
    }


def _backward(model: Any) -> tuple[int, Tensor]:
    """Return the bytes that the graph holds beside parameters, and the gradient of the adapter."""
    model.zero_grad()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    noise = torch.Generator().manual_seed(0)
    sizes = model.config

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise).bfloat16()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        velocity = model(
            hidden_states=draw(1, TOKENS, sizes.in_channels),
            encoder_hidden_states=draw(1, TEXT, sizes.joint_attention_dim),
            pooled_projections=draw(1, sizes.pooled_projection_dim),
            timestep=torch.tensor([0.5]).bfloat16(),
            img_ids=torch.zeros(TOKENS, 3),
            txt_ids=torch.zeros(TEXT, 3),
            return_dict=False,
        )[0]
    velocity.float().square().mean().backward()
    return sum(held.values()), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.requires_grad])


def _bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# --- tensors that the backward pass of a layer allocates


class Allocations(TorchDispatchMode):
    """Counts bytes of tensors that ops make in the block. peak: the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given | self.seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def allocated(call: Callable[[], Any]) -> int:
    """Return the most bytes that lived at once of those that a call allocates."""
    ours = mock.patch.object(devices, "_LARGE", math.inf)  # else numpy makes large ones, which no op shows
    with ours, torch.no_grad(), Allocations() as counted:
        call()
    return counted.peak


def of_a_layer(shape: tuple[int, int, int] = LAYER) -> list[dict[str, Any]]:
    """MB that the backward pass of a Linear allocates, its result among them: in bf16, by the reference, by kernels."""
    m, n, k = shape
    grad, plain = torch.randn(m, n).bfloat16(), torch.randn(n, k) * k**-0.5
    in_16_bit = plain.bfloat16()
    peaks = {"bf16 Linear": allocated(lambda: grad @ in_16_bit)}
    for name in ("fp8", "nvfp4"):
        w = QuantizedTensor.quantize(plain, name)
        given = grad, w.codes, w.scale, w.global_scale
        peaks[f"{name}, decoded to fp32 first"] = allocated(
            lambda given=given, name=name: REFERENCES[OP.name](*given, name, grad.dtype)
        )
        for formats in dict.fromkeys((name, formats_of(name, in_8_bit=True))):
            with _nothing_computed():
                peaks[f"{name}, {'gradients as codes' if '-' in formats else 'decoded in the kernel'}"] = allocated(
                    lambda given=given, formats=formats: launch.launcher(OP.name)(
                        *given, formats, grad.dtype, chip=CHIP
                    )
                )
    return [{"way": way, "mb": round(peak / 1e6, 1)} for way, peak in peaks.items()]


@contextmanager
def _nothing_computed() -> Iterator[None]:
    """Inside the block kernels and the library's products compute nothing."""

    def product(x: Tensor, w: Tensor, *scales: Any, **options: Any) -> Tensor:
        return x.new_empty(x.shape[0], w.shape[1], dtype=options["output_dtype"])

    with mock.patch.object(JITFunction, "run", _launched), mock.patch.object(library.F, "scaled_mm", product):
        yield


def _launched(kernel: Any, *arguments: Any, **options: Any) -> None:
    pass


_launched.__module__ = "a launcher of its own"  # by which wrappers know that it takes tensors from anywhere


# --- the time, modelled


def modelled() -> list[dict[str, Any]]:
    """Milliseconds of FLUX.1-dev's Linears at 1024 x 1024, forward and backward, on each GPU under each recipe."""
    (row,) = find_published("FLUX.1-dev")
    published = CatalogueModel(row)
    forward = forward_pass("flux", dict(row.config), CallSize(), vae=row.vae)
    found = []
    for gpu in GPUS:
        for recipe in RECIPES:
            times = dict.fromkeys((*TIMES, *(f"16 bit {name}" for name in TIMES[:2])), 0.0)
            for layer in published.plan(recipe).layers:
                if layer.scheme is not None and layer.role != MODULATION_ROLE:
                    m = forward.batch * forward.tokens(stream_of(layer.name, layer.role, forward.family))
                    for name, seconds in _seconds(layer, m, find_device(gpu)).items():
                        times[name] += 1e3 * seconds
            found.append({"gpu": gpu, "recipe": recipe} | {name: round(ms, 2) for name, ms in times.items()})
    return found


def _seconds(layer: LayerPlan, m: float, device: Device) -> dict[str, float]:
    """Return the attainable seconds of a layer's products with m tokens."""
    n, k, flops = layer.n, layer.k, 2 * m * layer.n * layer.k
    way = route(layer.scheme, device.chip)
    weight, gradient, result = resident_bytes(layer, device.chip), 2 * m * n, 2 * m * k
    x = code_bytes(way.activations.name, m, k) if way.activations else 0

    def product(arithmetic: str, size: float) -> float:
        return max(flops / device.flops(arithmetic), size / device.bytes_per_second)

    plain = product("bf16", gradient + 2 * n * k + result)
    in_16_bit = product("bf16", gradient + weight + result)
    decoded = weight + 8 * n * k + 2 * (gradient + 2 * gradient) + result + 4 * m * k  # and casts of the gradient
    return {
        "forward": (result + x if x else 0) / device.bytes_per_second
        + product(way.arithmetic, (x or result) + weight + gradient),
        "backward": in_16_bit,
        "in 8 bit": _in_8_bit(layer, m, device) or in_16_bit,
        "before": max(flops / device.scalar_flops, decoded / device.bytes_per_second),
        "16 bit forward": plain,
        "16 bit backward": plain,
    }


def _in_8_bit(layer: LayerPlan, m: float, device: Device) -> float:
    """Return the seconds of the backward pass with gradients as codes; 0 where they keep 16 bit."""
    weights = route(layer.scheme, device.chip).weights
    codes = CODES.get(weights.name) if weights else None
    native = codes and route(Scheme(FORMATS[codes], FORMATS[codes]), device.chip)
    if not native or not native.activations or native.activations.name != codes:
        return 0.0
    n, k = layer.n, layer.k
    passes = 2 * m * n + m * n + 2 * n * k  # rounding, and the codes of the weight in the other order
    size = m * n + n * k + 2 * m * k
    compute = 2 * m * n * k / device.flops(native.arithmetic)
    return passes / device.bytes_per_second + max(compute, size / device.bytes_per_second)


TIMES = ("forward", "backward", "in 8 bit", "before")


# --- tables


def tables(found: dict[str, Any]) -> str:
    """Return the tables of the page."""
    lines = _table(
        ("", "frozen Linears, MB", "held for the backward pass, MB", "adapter's gradient, 8 bit against 16"),
        (
            (
                row["recipe"],
                f"{row['frozen_mb']:.2f}",
                f"{row['held_mb']:.2f}",
                f"{100 * row['error_in_8_bit']:.1f} %" if row["error_in_8_bit"] else "the same",
            )
            for row in found["embedded"]
        ),
    )
    head = f"one Linear of FLUX.1-dev, M x N x K = {' x '.join(map(str, found['shape']))}"
    lines += ["", *_table((head, "allocated, MB"), ((row["way"], f"{row['mb']:.0f}") for row in found["layer"]))]
    columns = ("forward, ms", "backward", "of codes", "decoded to fp32 first", "both over bf16", "both, of codes")
    lines += ["", *_table(("modelled", *columns), map(_times, found["modelled"]))]
    return "\n".join(lines)


def _times(row: dict[str, Any]) -> tuple[str, ...]:
    whole = row["16 bit forward"] + row["16 bit backward"]
    ratios = (whole / (row["forward"] + row[name]) for name in ("backward", "in 8 bit"))
    return (
        f"{row['gpu']}, {row['recipe']}",
        *(f"{row[name]:.1f}" for name in TIMES),
        *(f"{ratio:.2f}x" for ratio in ratios),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


@click.command()
@click.option("--tables", "only_tables", is_flag=True, help="Only write the tables, from the result file.")
def main(only_tables: bool) -> None:
    """Measure and model training, and write the result file and the tables."""
    if not only_tables:
        torch.set_num_threads(1)
        result = {"embedded": embedded(), "layer": of_a_layer(), "shape": LAYER, "modelled": modelled()}
        write_json(RESULT, result | {"commit": commit(), "versions": versions("diffusers", "peft")})
    write_text(PAGE, between(PAGE.read_text(encoding="utf-8"), BEGIN, END, tables(read_json(RESULT))))


if __name__ == "__main__":
    main()
