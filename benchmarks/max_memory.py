"""The bound of `--max-memory` beside offloading of accelerate and of diffusers, on a CPU: max_memory.json.

    python benchmarks/max_memory.py

A random FLUX transformer and T5 take turns to make two images. Every row is a process of its own, which has made images
with the embedded pipeline before anything is counted; what loading takes counts. Files come from the system's cache;
seconds are the processor's.

    resident     all that the process holds, as Linux counts it: what `--max-memory` bounds
    anonymous    the same without pages of mapped files, which the system can take away and read again

Weights are stored in bf16, in which they are loaded, so that they may stay in mapped files; and in fp32, which is cast.
"""

from __future__ import annotations

import gc
import json
import mmap
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import click
import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import apply_group_offloading
from transformers import T5EncoderModel

from fluxq import tiny
from fluxq.base.devices import commit, versions
from fluxq.base.files import write_json
from fluxq.base.model import ModelFolder, load_pipeline
from fluxq.base.tensors import fingerprint_of, save_weights
from fluxq.jobs import memory
from fluxq.quantize.checkpoint import build_on_meta
from fluxq.recipes.workloads import CallSize

CPU = torch.device("cpu")
EMBEDDED = ModelFolder("tiny", Path(tiny.path()))
CALL: dict[str, Any] = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": 3}
LARGE: dict[str, Any] = {"transformer": FluxTransformer2DModel, "text_encoder_2": T5EncoderModel}


def max_memory(folder: ModelFolder, demand: memory.Demand, limit: int, scratch: Path) -> Any:
    """accelerate, the denoiser first. What it cannot know is set aside: activations, a module that comes."""
    models, left = {}, limit - demand.least
    for name, made in LARGE.items():
        how = {"device_map": "auto", "max_memory": {"cpu": max(0, left)}, "offload_folder": str(scratch / name)}
        models[name] = made.from_pretrained(folder.path / name, dtype=torch.bfloat16, **how)
        left -= sum(tensor.nbytes for tensor in models[name].parameters() if not tensor.is_meta)
    return load_pipeline(folder, models=models)


def to_disk(offload: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """Both models one after the other; offload: a model and a folder."""

    def load(folder: ModelFolder, _demand: memory.Demand, _limit: None, scratch: Path) -> Any:
        models = {}
        for name, made in LARGE.items():
            models[name] = made.from_pretrained(folder.path / name, dtype=torch.bfloat16)
            offload(models[name], str(scratch / name))
        return load_pipeline(folder, models=models)

    return load


def in_groups(kind: str, *, whole: bool = False, **how: Any) -> Callable[..., Any]:
    """Of the T5 its encoder, unless `whole`: the model beside it holds only a second name of a weight."""

    def offload(model: Any, path: str) -> None:
        inner = model if whole else getattr(model, "encoder", model)
        apply_group_offloading(inner, CPU, CPU, kind, offload_to_disk_path=path, **how)

    return to_disk(offload)


# Name -> makes a pipeline of (folder, what it takes, bytes of the bound, a folder to write to).
WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda folder, *_: load_pipeline(folder),
    "fluxq": lambda folder, demand, limit, _: demand.bound(limit).load(folder, {}),
    "accelerate max_memory": max_memory,
    "accelerate disk_offload": to_disk(lambda model, path: accelerate.disk_offload(model, path, CPU)),
    "diffusers block_level": in_groups("block_level", num_blocks_per_group=1),
    "diffusers leaf_level": in_groups("leaf_level"),
    "diffusers leaf_level whole": in_groups("leaf_level", whole=True),
}


@click.command()
@click.option("--width", default=1024, show_default=True, help="Channels; a multiple of 128.")
@click.option("--blocks", default=9, show_default=True, help="Of T5; single ones, a third as many double ones.")
@click.option("--bounds", default="25,50,75", show_default=True, help="Percent of the weights.")
@click.option("--stored", "dtypes", default="bfloat16,float32", show_default=True, help="Dtypes of the files.")
@click.option("--ways", default=",".join(WAYS), help="Of WAYS.")
@click.option("--output", type=click.Path(path_type=Path), default=Path(__file__).with_suffix(".json"))
def main(width: int, blocks: int, bounds: str, dtypes: str, ways: str, output: Path) -> None:
    """Measure ways to load the pipeline and write the result file."""
    torch.set_num_threads(1)  # so that this process can be forked
    load_pipeline(EMBEDDED)  # imports what loading does
    result: dict[str, Any] = {"commit": commit(), "versions": versions("accelerate"), "call": CALL}
    rows, percents = result.setdefault("rows", []), [int(percent) for percent in bounds.split(",")]
    for stored in dtypes.split(","):
        with tempfile.TemporaryDirectory() as root:
            folder = ModelFolder("drawn", Path(root) / "model")
            draw(folder.path, width, blocks, stored)
            result["weights"] = memory.weight_bytes(folder, "bfloat16")
            _, want = forked(measure, "plain", folder, None)
            for way in ways.split(","):
                for bound in percents if way in ("fluxq", "accelerate max_memory") else [None]:
                    found, image = forked(measure, way, folder, bound and result["weights"] * bound // 100)
                    rows.append({"way": way, "stored": stored, "bound": bound, **found, "equal": image == want})
                    for kind in ("resident", "anonymous") if image else ():
                        peak = 100 * max(found[when][kind] for when in ("loading", "running")) / result["weights"]
                        rows[-1][f"{kind} of bound"] = {p: round(peak / p, 2) for p in ([bound] if bound else percents)}
                    click.echo(json.dumps(rows[-1]))
    write_json(output, result)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def measure(way: str, folder: ModelFolder, limit: int | None) -> tuple[dict[str, Any], str | None]:
    """(what loading and running took, fingerprint of the images), or (the error, None). limit: bytes."""
    paint(load_pipeline(EMBEDDED))
    sizes = [CallSize(1, CALL["height"], CALL["width"], None, CALL["max_sequence_length"])]
    demand = memory.demand_of("cpu", "bfloat16", folder, sizes=sizes, shown=(), fitted=(), fused=())
    gc.collect()
    before, found = held(), {"loading": {}, "running": {}}
    try:
        with tempfile.TemporaryDirectory(dir=folder.path.parent) as scratch, memory.within(limit or 1 << 40, "cpu"):
            with watched(before, found["loading"]):
                pipe = WAYS[way](folder, demand, limit, Path(scratch))
            with watched(before, found["running"]):
                image = paint(pipe)
        return found, image
    except Exception as error:  # what a library says is the result
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}, None


def paint(pipe: Any) -> str:
    """Fingerprint of the latents of an image for each prompt."""
    made = []
    for prompt in ("a red cube", "a dog"):
        random = torch.Generator().manual_seed(0)
        made.append(pipe(prompt, **CALL, guidance_scale=1.0, output_type="latent", generator=random).images)
    return fingerprint_of(torch.stack(made))


@contextmanager
def watched(before: tuple[int, int], found: dict[str, Any]) -> Iterator[None]:
    """Put peaks in bytes above `before`, the processor's seconds, and bytes read and written by calls into `found`."""
    peaks, looked, ended = [0, 0], [0.0], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            peaks[:] = map(max, peaks, held())
        looked[0] = time.thread_time()

    thread = threading.Thread(target=look)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at what is held now
    counted, began = counts("io"), time.process_time()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    found["seconds"], after = round(time.process_time() - began - looked[0], 2), counts("io")
    found["resident"] = 1024 * counts("status")["VmHWM"] - sum(before)
    found |= {"anonymous": peaks[0] - before[0], "mapped": peaks[1] - before[1]}
    found |= {"read": after["rchar"] - counted["rchar"], "written": after["wchar"] - counted["wchar"]}


def held() -> tuple[int, int]:
    """(anonymous, mapped) bytes that this process holds."""
    _, resident, mapped, *_ = (int(n) * mmap.PAGESIZE for n in Path("/proc/self/statm").read_text().split())
    return resident - mapped, mapped


def counts(name: str) -> dict[str, int]:
    lines = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def draw(folder: Path, width: int, blocks: int, stored: str) -> None:
    """The embedded pipeline with a random transformer and T5 of so many channels."""
    shutil.copytree(tiny.path(), folder)
    sizes = {
        "transformer": {"num_attention_heads": width // 128, "attention_head_dim": 128, "joint_attention_dim": width}
        | {"num_layers": blocks // 3, "num_single_layers": blocks, "axes_dims_rope": [16, 56, 56]},
        "text_encoder_2": {"num_heads": width // 128, "d_kv": 128, "d_model": width, "d_ff": 4 * width}
        | {"num_layers": blocks, "dtype": stored},
    }
    random = torch.Generator().manual_seed(0)
    for name, made in LARGE.items():
        path = folder / name / "config.json"
        config = json.loads(path.read_text()) | sizes[name]
        path.write_text(json.dumps(config))
        tensors = build_on_meta(made.__module__.partition(".")[0], made.__name__, config).state_dict()
        described = {key: t.to(getattr(torch, stored)) for key, t in tensors.items() if "embed_tokens" not in key}
        save_weights(
            described,
            next(path.parent.glob("*.safetensors")),
            {"format": "pt"},
            lambda key, of=described: (torch.randn(of[key].shape, generator=random) * 0.02).to(of[key].dtype),
        )


if __name__ == "__main__":
    main()
