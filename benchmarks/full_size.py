"""Time of quantizing at full size: a whole transformer shaped like FLUX.1-dev, or single layers of it.

    python benchmarks/full_size.py --out full_size.json                          57 blocks on a GPU, random weights
    python benchmarks/full_size.py --device cpu --hidden 256 --blocks 1+1 --pixels 128 --text 32       that it runs
    python benchmarks/full_size.py --layers                                      layer_times.json: one CPU thread
    python benchmarks/full_size.py --family flux --profile rtn                   full_size_rtn.json: files, no GPU
    python benchmarks/full_size.py --family flux --blocks 1+1 --max-memory 3.5GiB  full_size_balanced.json: fitted

Nothing is downloaded: weights, prompts and noise are random numbers. All the rest is what `fluxq quantize` does, by its
own functions: calls are captured, noise levels weighed, blocks replayed, groups fitted. Outputs of blocks stay in the
memory of the device. The result file is written again after each part.

With --family the model is a folder on disk, made as it is written, and `fluxq quantize` and `fluxq verify` are commands
in processes of their own, whose memory is watched. What they took is held against two bounds that are measured beside
them: the time to copy what was read and written, and the time to round tensors that are in memory already. A profile
that fits layers needs a pipeline to run: text encoders, VAE and tokenizers are then the embedded pipeline's, and the
transformer reads what these make.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # fluxq need not be installed

import click  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.layers.synthetic import draw  # noqa: E402
from fluxq.base.devices import commit, cpu_name, versions  # noqa: E402
from fluxq.base.files import write_json  # noqa: E402
from fluxq.base.model import GENERATION_FILE, ModelFolder, resolve_model  # noqa: E402
from fluxq.base.tensors import Stored, save_weights, word_for  # noqa: E402
from fluxq.calibrate import nested  # noqa: E402
from fluxq.calibrate.blocks import Replay, block_names  # noqa: E402
from fluxq.calibrate.calls import capture_calls  # noqa: E402
from fluxq.calibrate.capture import Sampling  # noqa: E402
from fluxq.calibrate.inputs import InputsBuilder  # noqa: E402
from fluxq.calibrate.sensitivity import IMAGES, noise_level_weights  # noqa: E402
from fluxq.kernels.linear import QuantLinear  # noqa: E402
from fluxq.kernels.tensor import QuantizedTensor  # noqa: E402
from fluxq.quantize.checkpoint import SourceWeights, build_on_meta  # noqa: E402
from fluxq.quantize.group import GroupLayer, fit_group, price_on  # noqa: E402
from fluxq.quantize.nearest import Rounded, round_units, sqnr, units_of  # noqa: E402
from fluxq.quantize.run import (  # noqa: E402
    Fitting,
    Outcome,
    blocks_of,
    quantize_component,
)
from fluxq.quantize.structure import list_linears  # noqa: E402
from fluxq.recipes.all_families import FAMILIES  # noqa: E402
from fluxq.recipes.computing import QuantizationConfig  # noqa: E402
from fluxq.recipes.devices import find_device  # noqa: E402
from fluxq.recipes.family import Maker  # noqa: E402
from fluxq.recipes.formats import FORMATS, Scheme  # noqa: E402
from fluxq.recipes.plan import (  # noqa: E402
    LayerPlan,
    LinearShape,
    Plan,
    make_plan,
    with_method,
)
from fluxq.recipes.recipe import Recipe, load_recipe  # noqa: E402

COMPONENT = "transformer"
STEPS = 8  # of each image; all are looked at
HEAD = 128  # channels of an attention head
NVFP4_MAX = 6.0 * 448.0  # times the global scale: the largest number
LAYERS: tuple[tuple[int, int, str, Maker], ...] = (  # N, K, family of synthetic.py, what makes the input
    (3072, 3072, "adaln", "norm"),
    (12288, 3072, "adaln", "norm"),
    (3072, 12288, "ffn", "activation"),
)
ROUNDED = (4096, 4096)  # the weight that is rounded to nearest
REPEATS = 5
SHARD = 10 * 10**9  # bytes of a weight file of the random model
READ = ("in_channels", "joint_attention_dim", "pooled_projection_dim")  # what the transformer reads of other models
PIXELS = 32  # height and width of an image that the embedded pipeline's VAE makes: 64 tokens
DRAWN = (1 << 25) + 1  # random numbers that all its tensors are made of; odd, so that none repeats another's


@click.command()
@click.option("--recipe", default="nvfp4", show_default=True, help="Name or file of a recipe.")
@click.option("--profile", default="balanced", show_default=True, help="Of the recipe.")
@click.option("--device", default="cuda", show_default=True, help="Torch device that calibrates and quantizes.")
@click.option("--hidden", default=3072, show_default=True, help="Channels; a multiple of 128.")
@click.option("--blocks", default="19+38", show_default=True, help="Double and single blocks.")
@click.option("--pixels", default=1024, show_default=True, help="Height and width of an image.")
@click.option("--text", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--calls", default=64, show_default=True, help=f"To fit on; {STEPS} make an image.")
@click.option("--layers", is_flag=True, help="Single layers in one thread instead, and rounding to nearest.")
@click.option("--family", type=click.Choice(["flux"]), help="A model on disk, which the command rounds to nearest.")
@click.option("--max-memory", metavar="SIZE", help="With --family: what the command is given.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="With --family: keep the model here.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Result file.")
def main(
    recipe: str,
    profile: Any,
    device: str,
    hidden: int,
    blocks: str,
    pixels: int,
    text: int,
    calls: int,
    layers: bool,
    family: str | None,
    max_memory: str | None,
    work: Path | None,
    out: Path | None,
) -> None:
    """Quantize random weights of real shapes and say how long it took."""
    double, _, single = blocks.partition("+")
    if family:
        about = {"commit": commit(), "family": family, "profile": profile, "machine": cpu_name()}
        shape = {"hidden": hidden, "blocks": [int(double), int(single)], "max_memory": max_memory}
        target = out or ROOT / "benchmarks" / f"full_size_{profile}.json"
        with ExitStack() as stack:
            folder = work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            on_disk(recipe, profile, about | shape | {"versions": versions()}, folder, target)
        return
    name, loaded = load_recipe(recipe, profile=profile)
    asked = {"commit": commit(), "torch": torch.__version__, "recipe": name, "profile": loaded.profile}
    if layers:
        target = out or ROOT / "benchmarks" / "layer_times.json"
        write_json(target, asked | {"machine": cpu_name(), "threads": 1, **layer_times(loaded)})
        return
    try:
        import diffusers  # noqa: F401
    except ImportError:
        raise click.UsageError("skipped: there is no diffusers here; carry its wheel and install it") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA device; --device cpu with a small --hidden needs none")
    shape = {"hidden": hidden, "blocks": [int(double), int(single)], "pixels": pixels, "text": text, "calls": calls}
    where = torch.device(device)
    machine = torch.cuda.get_device_name(where) if where.type == "cuda" else cpu_name()
    job = Job(loaded, shape, where, out or Path("full_size.json"), asked | {"machine": machine, **shape})
    job.run()


class Job:
    """A transformer from random weights to quantized tensors, every part timed."""

    def __init__(self, recipe: Recipe, shape: dict[str, Any], device: torch.device, out: Path, about: dict) -> None:
        self.recipe, self.shape, self.device, self.out = recipe, shape, device, out
        self.seconds: dict[str, float] = defaultdict(float)
        self.found = {**about, "complete": False, "seconds": self.seconds}

    def run(self) -> None:
        """All of it."""
        began = time.perf_counter()
        with self.timed("random weights"):
            model = random_model(self.shape, self.device)
            # On the CPU, as files are: quantized layers take the place of the model's own.
            source = ModelWeights({name: tensor.cpu() for name, tensor in model.state_dict().items()})
        self.found["parameters"] = sum(p.numel() for p in model.parameters())
        pipe = RandomPipeline(model, self.shape)
        with tempfile.TemporaryDirectory() as folder:
            counted = time.perf_counter()
            self._quantize(pipe, source, Path(folder))
            done = time.perf_counter()
        self.found |= {"seconds_in_all": round(done - began, 1), "seconds_of_the_job": round(done - counted, 1)}
        self.found["complete"] = True
        self._write()
        for part, seconds in self.seconds.items():
            click.echo(f"{part:20} {seconds:7.1f} s")
        click.echo(f"{'all but weights':20} {done - counted:7.1f} s, results in {self.out}")

    def _quantize(self, pipe: RandomPipeline, source: ModelWeights, folder: Path) -> None:
        model, count = pipe.transformer, self.shape["calls"]
        images = max(1, count // STEPS)
        held = max(1, images // 10)
        items = [(f"prompt {index}", index) for index in range(images + held)]
        digests, blocks = {COMPONENT: "random"}, {COMPONENT: block_names(FAMILIES["flux"], model)}
        call = {"height": self.shape["pixels"], "width": self.shape["pixels"], "num_inference_steps": STEPS}
        with self.timed("capture"):
            calls = capture_calls(
                pipe,
                blocks,
                items[:images],
                items[images:],
                Sampling(call, STEPS, digests, batch_size=1),
                folder=folder / "calls",
                most=count,
            )[COMPONENT]
        with self.timed("noise levels"):
            weights = noise_level_weights(pipe, [COMPONENT], items[:IMAGES], call, range(STEPS))
        replay = TimedReplay(model, calls, folder / "outputs", weights=weights)
        replay.tell = lambda: self._write(block=f"{replay.turn + 1} of {len(replay.blocks)}")
        fitting = Fitting(replay, self.recipe.gate)
        with self.timed("fitting"):
            files = quantize_component(self._plan(model), source, None, torch.bfloat16, folder / "blocks", fitting)
        self.seconds["running blocks"] = replay.seconds
        self.seconds["fitting"] -= replay.seconds
        outcome, size = Outcome.read(files), sum(file.stat().st_size for file in files)
        self.found |= {"bytes": size, "kept": kept(outcome), "sqnr_db": mean_sqnr(outcome)}

    def _plan(self, model: nn.Module) -> Plan:
        part = self.recipe.components[COMPONENT]
        modules = model.named_modules()
        return make_plan(
            FAMILIES["flux"],
            COMPONENT,
            part,
            [LinearShape(name, m.out_features, m.in_features) for name, m in modules if isinstance(m, nn.Linear)],
            static_inputs=self.recipe.needs_data(part),
            profile=self.recipe.profile,
            compat=self.recipe.compat,
        )

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the seconds of a part, and writes what is known."""
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[part] += time.perf_counter() - start
        self._write()

    def _write(self, **more: Any) -> None:
        seconds = {part: round(value, 1) for part, value in self.seconds.items()}
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_of_process()
        write_json(self.out, self.found | {"seconds": seconds, "peak_memory_bytes": peak} | more)


class TimedReplay(Replay):
    """A replay that knows how long it ran blocks, their statistics and Grams included; it tells every ten seconds."""

    seconds = told = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outputs: Any = InMemory()  # no disk is measured

    def tell(self) -> None:
        """Replaced by whoever wants to know."""

    def run(self, at: int, index: int) -> Any:
        start = time.perf_counter()
        output = super().run(at, index)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds += now - start
        if now > self.told + 10:
            self.told = now
            self.tell()
        return output


class InMemory:
    """Outputs of blocks, call by call, where the model is."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[int, tuple[Any, dict[str, Tensor]]]] = {}

    def begin(self, index: int) -> None:
        self.kept[index] = {}

    def save(self, index: int, at: int, output: Any, name: str, device: torch.device) -> None:
        self.kept[index][at] = nested.pack(output, name, device, device)

    def finish(self, index: int) -> None:
        """Nothing to write."""

    def load(self, index: int, at: int, device: torch.device) -> Any:
        layout, tensors = self.kept[index][at]
        return nested.unpack(layout, nested.stored(tensors, device))

    def has(self, index: int) -> bool:
        return index in self.kept

    def drop(self, index: int) -> None:
        self.kept.pop(index, None)


class ModelWeights(SourceWeights):
    """Tensors of a model in place of those of files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def names(self) -> list[str]:
        return sorted(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def let_go(self, names: Iterable[str]) -> None:
        pass

    def stored(self, name: str) -> Stored:
        tensor = self.tensors[name]
        return Stored(word_for(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {}

    def stays_fp32(self, name: str) -> bool:
        return False


class RandomPipeline:
    """Pipeline for calibration: it denoises random latents under random prompts, and decodes nothing."""

    def __init__(self, transformer: nn.Module, shape: dict[str, Any]) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.transformer, self.shape = transformer, shape
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.device = next(transformer.parameters()).device

    @torch.no_grad()
    def __call__(
        self,
        prompt: list[str],
        generator: list[torch.Generator],
        height: int,
        width: int,
        num_inference_steps: int,
        callback_on_step_end: Callable[..., Any],
        output_type: str,
    ) -> None:
        """Each image: its own random text, then so many Euler steps."""
        rows, columns = height // 16, width // 16
        config: Any = self.transformer.config

        def drawn(*size: int) -> Tensor:
            values = torch.stack([torch.randn(size, generator=source) for source in generator])
            return values.to(self.device, torch.bfloat16)

        latents, text = drawn(rows * columns, config.in_channels), drawn(self.shape["text"], config.joint_attention_dim)
        pooled = drawn(config.pooled_projection_dim)
        positions = torch.zeros(rows, columns, 3, device=self.device)
        positions[..., 1] += torch.arange(rows, device=self.device).unsqueeze(1)
        positions[..., 2] += torch.arange(columns, device=self.device)
        self.scheduler.set_timesteps(num_inference_steps)
        sigmas: Any = self.scheduler.sigmas
        for step, (sigma, after) in enumerate(pairwise(sigmas)):
            velocity = self.transformer(
                hidden_states=latents,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=sigma.expand(len(prompt)).to(latents),
                img_ids=positions.flatten(0, 1).to(latents),
                txt_ids=torch.zeros(text.shape[1], 3).to(latents),
                guidance=torch.full((len(prompt),), 3.5).to(latents),
                return_dict=False,
            )[0]
            latents = latents + (after - sigma).item() * velocity
            callback_on_step_end(self, step, sigma, {"latents": latents})


def random_model(shape: dict[str, Any], device: torch.device) -> nn.Module:
    """FLUX.1-dev's class and shapes, cut down as asked, with the weights that the class starts with, in bfloat16."""
    from diffusers import FluxTransformer2DModel

    double, single = shape["blocks"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = FluxTransformer2DModel(
                num_layers=double,
                num_single_layers=single,
                num_attention_heads=shape["hidden"] // HEAD,
                attention_head_dim=HEAD,
                guidance_embeds=True,
            )
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def kept(outcome: Outcome) -> dict[str, int]:
    """Stage -> in how many input groups it was kept."""
    counts: dict[str, int] = {}
    for group in outcome.groups.values():
        for stage in group.stages:
            counts[stage.name] = counts.get(stage.name, 0) + stage.kept
    return counts


def mean_sqnr(outcome: Outcome) -> list[float]:
    """Held-out SQNR of the groups, rounded to nearest and as kept."""
    pairs = [
        (each.rounded.total, each.fitted.total) for each in outcome.groups.values() if each.rounded and each.fitted
    ]
    return [round(sum(values) / len(values), 2) for values in zip(*pairs, strict=True)]


# --- on disk


def on_disk(recipes: str, profile: str, about: dict[str, Any], work: Path, out: Path) -> None:
    """Write the model, then quantize, verify and open it under each recipe; all but the model is removed."""
    double, single = about["blocks"]
    source = work / f"{about['family']}-{about['hidden']}-{double}-{single}"
    if profile != "rtn":
        source = source.with_name(f"{source.name}-pipeline")
    write_model(source, about["hidden"], double, single, runs=profile != "rtn")
    found = about | {"bytes": tree_bytes(source), "threads": torch.get_num_threads(), "recipes": {}}
    for recipe in recipes.split(","):
        options = ["--recipe", recipe, "--profile", profile]
        options += ["--max-memory", about["max_memory"]] if about["max_memory"] else []
        row = found["recipes"][recipe] = measure_on_disk(source, recipe, options, work / f"{source.name}-{recipe}")
        write_json(out, found)
        seconds = ", ".join(f"{part} {value:.1f} s" for part, value in row["seconds"].items())
        click.echo(f"{recipe}: {seconds}; {row['times_the_bound']:.2f} times the longer of the bounds")
        peaks = ", ".join(f"{part} {value / 1e9:.2f} GB" for part, value in row["peak_memory_bytes"].items())
        click.echo(f"{recipe}: peak of {peaks}; one block: {row['block']}")


def measure_on_disk(source: Path, recipe: str, options: list[str], output: Path) -> dict[str, Any]:
    """A row of the result. options: of the command."""
    command = ["quantize", str(source), *options, "--no-check", "-o", str(output)]
    watch, peaks = Watch(), {}
    forget(source)
    with watch("quantize"):
        peaks["quantize"] = run_command(*command, "--max-shard-size", "5GB")
    try:
        with watch("verify"):
            peaks["verify"] = run_command("verify", str(output))
        block, size = open_a_block(source, output), tree_bytes(output)
        forget(source, output)
        with watch("copying alone"):
            copy(source, output)
    finally:
        shutil.rmtree(output)
    with rounding(source, recipe) as units, watch("rounding alone"):
        for _ in units:
            pass
    bound = max(watch.seconds["copying alone"], watch.seconds["rounding alone"])
    return {
        "bytes": size,
        "peak_memory_bytes": peaks,
        "seconds": {part: round(value, 1) for part, value in watch.seconds.items()},
        "cpu_seconds": {part: round(value, 1) for part, value in watch.cpu_seconds.items()},
        "times_the_bound": round(watch.seconds["quantize"] / bound, 3),
        "gb_per_s": round(tree_bytes(source) / watch.seconds["quantize"] / 1e9, 3),
        "block": block,
    }


class Watch:
    """Seconds by part, and those that this process and the commands it ran computed: others may be on the machine."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, start_cpu = time.perf_counter(), self._cpu()
        yield
        self.seconds[part] = time.perf_counter() - start
        self.cpu_seconds[part] = self._cpu() - start_cpu

    def _cpu(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)


def write_model(folder: Path, hidden: int, double: int, single: int, *, runs: bool) -> None:
    """A pipeline folder with FLUX.1-dev's transformer, cut down as asked; left alone if it is there.

    Its tensors are random bf16 numbers, the same ones each time, made as they are written. runs: all else that a
    pipeline needs is the embedded one's, and the transformer's embedders read what that makes; else there is nothing
    else.
    """
    if (folder / "model_index.json").is_file():
        return
    index = {"_class_name": "FluxPipeline", COMPONENT: ["diffusers", "FluxTransformer2DModel"]}
    around: dict[str, Any] = {}
    if runs:
        tiny = resolve_model("tiny")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny.path, folder, ignore=shutil.ignore_patterns(COMPONENT, "model_index.json"))
        write_json(folder / GENERATION_FILE, {**tiny.generation_defaults, "height": PIXELS, "width": PIXELS})
        index = tiny.index
        around = {key: tiny.config(COMPONENT)[key] for key in READ}
    config = {
        **around,
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": hidden // HEAD,
        "attention_head_dim": HEAD,
        "guidance_embeds": True,
    }
    component = folder / COMPONENT
    component.mkdir(parents=True, exist_ok=True)
    model = build_on_meta("diffusers", "FluxTransformer2DModel", config)
    described = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    numbers = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    twice = numbers.repeat(2)

    def make(name: str) -> Tensor:
        """Numbers from a place on that its name decides."""
        shape = described[name].shape
        start, count = zlib.crc32(name.encode()) % DRAWN, prod(shape)
        whole = twice if count <= DRAWN else twice.repeat(-(-count // DRAWN))
        return whole[start : start + count].reshape(shape)

    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in described.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    stem = "diffusion_pytorch_model"
    names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        save_weights(shard, component / name, {"format": "pt"}, make)
    weight_map = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
    write_json(component / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(component / "config.json", {"_class_name": "FluxTransformer2DModel", **config})
    write_json(folder / "model_index.json", index)


def run_command(*arguments: str) -> int:
    """Run a fluxq command; returns the most bytes that it held. RuntimeError if it fails."""
    peak = 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen([sys.executable, "-m", "fluxq", *arguments], env=environment) as process:
        while process.poll() is None:
            peak = max(peak, memory("VmHWM", process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"fluxq {' '.join(arguments)} ended with {process.returncode}")
    return peak


def open_a_block(source: Path, output: Path) -> dict[str, Any]:
    """Read the layers of the last block from a checkpoint and compute with them, as loading and running it would.

    x is drawn; where a layer's input scale was calibrated, x is made no larger than what was seen: more is clipped.
    """
    written = SourceWeights(ModelFolder(output.name, output), COMPONENT)
    plain = SourceWeights(ModelFolder(source.name, source), COMPONENT)
    config = ModelFolder(output.name, output).config(COMPONENT)
    schemes = QuantizationConfig.from_dict(config["quantization_config"]).schemes
    block = f"single_transformer_blocks.{config['num_single_layers'] - 1}"
    found = {}
    for name in [name for name in schemes if name.startswith(f"{block}.")]:
        parts = [key.rpartition(".")[2] for key in written.names if key.rpartition(".")[0] == name]
        weight = plain[f"{name}.weight"]
        n, k = weight.shape
        layer = QuantLinear.from_tensors({p: written[f"{name}.{p}"] for p in parts}, (n, k), schemes[name])
        x = torch.randn(16, k, generator=torch.Generator().manual_seed(0))
        if schemes[name].static_input:
            x *= min(1.0, written[f"{name}.input_scale"].item() * NVFP4_MAX / x.abs().max().item())
        x = x.bfloat16()
        expected = torch.nn.functional.linear(x, weight, plain[f"{name}.bias"])
        found[name.removeprefix(f"{block}.")] = round(sqnr(expected.float(), layer(x).float()), 1)
    return {"path": block, "output_sqnr_db": found}


@contextmanager
def rounding(source: Path, recipe: str) -> Iterator[Iterator[Rounded]]:
    """The arithmetic alone: pieces of the model, of which the tensors need not be read."""
    folder, loaded = ModelFolder(source.name, source), load_recipe(recipe, profile="rtn")[1]
    entry = loaded.components[COMPONENT]
    linears = list_linears(folder, COMPONENT)
    plan = make_plan(FAMILIES["flux"], COMPONENT, entry, linears, profile="rtn", static_inputs=False)
    weights = OneOfEachShape(SourceWeights(folder, COMPONENT))
    blocks = blocks_of(plan, weights, source)
    units = [unit for block in blocks for unit in units_of(block.layers, block.names)]
    with closing(round_units(units, weights, torch.bfloat16, {})) as rounded:
        yield rounded


class OneOfEachShape(SourceWeights):
    """Weights in memory, in which tensors of one shape are the same tensor."""

    def __init__(self, source: SourceWeights) -> None:
        self.source = source
        shapes = {source.stored(name).shape: name for name in source.names}
        self.tensors = {shape: source[name] for shape, name in shapes.items()}

    @property
    def names(self) -> list[str]:
        return self.source.names

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.stored(name).shape]

    def let_go(self, names: Iterable[str]) -> None:
        pass

    def stored(self, name: str) -> Stored:
        return self.source.stored(name)

    def fingerprints(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {}

    def stays_fp32(self, name: str) -> bool:
        return self.source.stays_fp32(name)


def copy(*folders: Path) -> None:
    """Read every file and write it again, beside itself, one after the other."""
    for file in [file for folder in folders for file in folder.rglob("*") if file.is_file()]:
        again = file.with_suffix(".copy")
        try:
            shutil.copyfile(file, again)
        finally:
            again.unlink()


def forget(*folders: Path) -> None:
    """Write out what is not, and take the files out of the system's memory: all that follows begins at the disk."""
    os.sync()
    for file in [file for folder in folders for file in folder.rglob("*") if file.is_file()]:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tree_bytes(folder: Path) -> int:
    """Bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


# --- single layers


def layer_times(recipe: Recipe) -> dict[str, Any]:
    """Seconds and memory of fitting one layer, and GB/s of bf16 that rounding to nearest takes in, in one thread."""
    torch.set_num_threads(1)
    rounded = {}
    for name in FORMATS:
        rounded[name] = round(rounding_speed(name), 3)
        click.echo(f"{name}, rounded to nearest: {rounded[name]:.2f} GB/s")
    fitted = []
    for n, k, family, made_by in LAYERS:
        fitted.append(layer_time(recipe, n, k, family, made_by))
        row = fitted[-1]
        click.echo(f"{n} x {k}: {row['seconds']:.1f} s, {row['peak_over_inputs_in_grams']} Grams, kept {row['kept']}")
    return {"fitted": fitted, "rtn_gb_per_s": rounded}


def layer_time(recipe: Recipe, n: int, k: int, family: str, made_by: Maker) -> dict[str, Any]:
    """One synthetic layer; its group is taken as foldable."""
    part = recipe.components[COMPONENT]
    activations = part.activations.row if part.activations else None
    scheme = Scheme(part.weights.row, activations, static_input=bool(activations and activations.two_level))
    planned = LayerPlan("layer", n, k, family, "layer", False, scheme, "", made_by=made_by)
    layer = draw(family, k=k, n=n, fit=k, held=1024)
    builder = InputsBuilder("layer", k, calls=(1, 1))
    start = time.perf_counter()
    builder.add(layer.fit)
    gram_seconds = time.perf_counter() - start
    builder.add(layer.held, held_out=True)
    inputs, weight = builder.finish(), layer.weight
    del layer, builder
    price = price_on(find_device(recipe.gate.gpu), [(n, k)], recipe.gate.tokens, made_by)
    method = with_method(planned, part, recipe.profile).method
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
    start, start_cpu = time.perf_counter(), time.process_time()
    group = fit_group(
        [GroupLayer("layer", weight, None, scheme)], inputs, method, price=price, rate=recipe.gate.db_per_percent
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "n": n,
        "k": k,
        "family": family,
        "tokens": inputs.count,
        "gram_seconds": round(gram_seconds, 1),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_over_inputs_in_grams": round((memory("VmHWM") - before) / (4 * k * k), 2),
        "sqnr_db": [round(sqnr.total, 2) for sqnr in (group.rounded, group.fitted) if sqnr],
        "kept": [stage.name for stage in group.stages if stage.kept],
    }


def rounding_speed(name: str) -> float:
    """GB/s of bf16 source, the best of several."""
    w = torch.randn(ROUNDED, generator=torch.Generator().manual_seed(0)).bfloat16()
    best = min(_seconds(lambda: QuantizedTensor.quantize(w, FORMATS[name])) for _ in range(REPEATS))
    return w.numel() * w.element_size() / best / 1e9


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory(what: str, process: int | str = "self") -> int:
    """Bytes that a process holds (VmRSS), or the most that it held (VmHWM), 0 of one that has ended; Linux."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(what)), 0)


def peak_of_process() -> int:
    """The most bytes that this process held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
