"""Operations that users run on a quantized model, with fluxq and with two peers side by side: peers.json.

    python -m pip install -e ".[peers]" && python benchmarks/peers.py

Every row is a process of its own, on the transformer of the embedded pipeline: save in shards and load again, offload
groups of layers (also to disk), copy, add a LoRA, fuse and unfuse it, dequantize. Errors are relative to the 16-bit
model under the same operation, on fixed inputs; "identical" means bit for bit. The numbers of formats are not compared
here: layers left in 16 bit differ.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

import click
import torch
from torch import Tensor, nn

from fluxq import tiny
from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json
from fluxq.jobs import making

HERE = Path(__file__).parent
WORK = tempfile.TemporaryDirectory()  # checkpoints, made once for each process
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "ff.net.2"]


@click.command()
@click.option("--output", type=click.Path(path_type=Path), default=HERE / "peers.json", show_default=True)
def main(output: Path) -> None:
    """Measure every row in its own process and write the result file."""
    rows = {}
    for name in ROWS:
        rows[name] = measure(name)
        click.echo(f"{name:18} {rows[name]}")
    write_json(output, {"commit": commit(), "versions": versions("torchao", "optimum-quanto", "peft"), "rows": rows})


def measure(row: str) -> dict[str, Any]:
    """Every operation on one row, in a process that starts again behind an operation that kills it."""
    found: dict[str, Any] = {}
    while len(found) < len(OPERATIONS):
        left = [name for name in OPERATIONS if name not in found]
        done = subprocess.run([sys.executable, __file__, row, *left], capture_output=True, text=True)
        for line in done.stdout.splitlines():
            found.update(json.loads(line))
        if done.returncode < 0:
            found[next(name for name in left if name not in found)] = f"killed by {Signals(-done.returncode).name}"
        elif done.returncode:
            raise click.ClickException(f"{row}: {done.stderr.strip().splitlines()[-1]}")
    return found


def run_here(row: str, operations: Sequence[str]) -> None:
    """Each operation on a freshly loaded model; prints {operation: result}, one line each."""
    torch.set_num_threads(1)
    for name in operations:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = OPERATIONS[name](ROWS[row](), Path(folder))
            except Exception as problem:  # whatever a peer raises is the result
                message = str(problem).strip().splitlines() or [""]
                result = f"{type(problem).__name__}: {message[0][:120]}"
        print(json.dumps({name: result}), flush=True)


def error_alone(model: Any, folder: Path) -> float:
    """Error to the 16-bit model."""
    return error(velocity(model), velocity(tiny.load().transformer))


def reload(model: Any, folder: Path) -> str:
    model.save_pretrained(folder, max_shard_size="300KB")
    again = type(model).from_pretrained(folder, torch_dtype=torch.bfloat16)
    return same(velocity(again), velocity(model))


def group_offload(model: Any, folder: Path) -> str:
    return _offloaded(model, offload_type="leaf_level")


def group_offload_to_disk(model: Any, folder: Path) -> str:
    return _offloaded(model, offload_type="block_level", num_blocks_per_group=1, offload_to_disk_path=str(folder))


def deepcopy(model: Any, folder: Path) -> str:
    return same(velocity(copy.deepcopy(model)), velocity(model))


def lora(model: Any, folder: Path) -> float:
    """Error to the 16-bit model with the same LoRA."""
    reference = tiny.load().transformer
    for adapted in (model, reference):
        _add_lora(adapted)
    return error(velocity(model), velocity(reference))


def unload(model: Any, folder: Path) -> str:
    want = velocity(model)
    _add_lora(model)
    model.unload_lora()
    return same(velocity(model), want)


def fuse(model: Any, folder: Path) -> str | float:
    """Compare the output with a fused LoRA with that of the unfused one."""
    _add_lora(model)
    unfused = velocity(model)
    model.fuse_lora()
    return same(velocity(model), unfused)


def unfuse(model: Any, folder: Path) -> str | float:
    """Compare the output after a fused LoRA was taken out and unloaded with that before."""
    want = velocity(model)
    _add_lora(model)
    model.fuse_lora()
    model.unfuse_lora()
    model.unload_lora()
    return same(velocity(model), want)


def dequantize(model: Any, folder: Path) -> str:
    """A 16-bit model that says of itself that it is one."""
    model.dequantize()
    model.save_pretrained(folder)
    stale = "quantization_config" in json.loads((folder / "config.json").read_text())
    return "stale quantization_config" if stale else "exact"


def _offloaded(model: Any, **how: Any) -> str:
    want = velocity(model)
    cpu = torch.device("cpu")
    model.enable_group_offload(onload_device=cpu, offload_device=cpu, **how)
    return same(velocity(model), want)


def _add_lora(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=LORA_TARGETS, init_lora_weights=False))
    noise = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=noise) * 0.03).to(parameter)


@torch.no_grad()
def velocity(model: nn.Module) -> Tensor:
    """The output for eight fixed inputs (8, 16, 16)."""
    noise = torch.Generator().manual_seed(0)
    return model(
        hidden_states=torch.randn(8, 16, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(8, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(8, 64, generator=noise).bfloat16(),
        timestep=torch.linspace(0.05, 0.95, 8).bfloat16(),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]


def error(approximation: Tensor, reference: Tensor) -> float:
    """Relative Euclidean distance."""
    return round(float((approximation.double() - reference.double()).norm() / reference.double().norm()), 5)


def same(a: Tensor, b: Tensor) -> Any:
    return "identical" if torch.equal(a, b) else error(a, b)


def sixteen_bit() -> nn.Module:
    return tiny.load().transformer


def torchao(name: str, **options: Any) -> Callable[[], nn.Module]:
    def load() -> nn.Module:
        import torchao.quantization
        from diffusers import TorchAoConfig

        return _on_the_fly(TorchAoConfig(getattr(torchao.quantization, name)(**options)))

    return load


def quanto(dtype: str) -> Callable[[], nn.Module]:
    def load() -> nn.Module:
        from diffusers import QuantoConfig

        return _on_the_fly(QuantoConfig(weights_dtype=dtype))

    return load


def _on_the_fly(config: Any) -> nn.Module:
    import diffusers

    folder = Path(tiny.path()) / "transformer"
    return diffusers.FluxTransformer2DModel.from_pretrained(
        folder, quantization_config=config, torch_dtype=torch.bfloat16
    )


def ours(recipe: str) -> Callable[[], nn.Module]:
    def load() -> nn.Module:
        import diffusers

        folder = Path(WORK.name) / recipe
        options = making.JobOptions(model="tiny", recipe=recipe, output=str(folder), check=False)
        making.quantize(making.job_of(options))
        return diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)

    return load


OPERATIONS: dict[str, Callable[[Any, Path], Any]] = {
    "error to 16 bit": error_alone,
    "sharded reload": reload,
    "group offload": group_offload,
    "group offload to disk": group_offload_to_disk,
    "deepcopy": deepcopy,
    "LoRA, error to 16 bit + LoRA": lora,
    "LoRA unloaded": unload,
    "LoRA fused": fuse,
    "LoRA unfused": unfuse,
    "dequantize and save": dequantize,
}
ROWS: dict[str, Callable[[], nn.Module]] = {
    "16 bit": sixteen_bit,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao fp8": torchao("Float8WeightOnlyConfig"),
    "quanto int8": quanto("int8"),
    "quanto fp8": quanto("float8"),
    **{f"fluxq {recipe}": ours(recipe) for recipe in ("int8", "fp8", "mxfp8", "nvfp4", "int4")},
}

if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ROWS:
        run_here(sys.argv[1], sys.argv[2:])
    else:
        main()
