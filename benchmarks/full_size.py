"""How long quantizing takes at full size: a whole transformer shaped like FLUX.1-dev, or single layers of it.

    python benchmarks/full_size.py --out full_size.json                          57 blocks on a GPU, random weights
    python benchmarks/full_size.py --device cpu --hidden 256 --blocks 1+1 --pixels 128 --text 32       that it runs
    python benchmarks/full_size.py --layers                                      layer_times.json: one CPU thread

Nothing is read or downloaded: weights are what the class starts with, prompts and noise are random numbers. All the
rest is what `fluxq quantize` does, by its own functions: calls are captured, noise levels weighed, blocks replayed,
groups fitted. Outputs of blocks stay in the memory of the device. The result file is written again after each part.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # fluxq need not be installed

import click  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fluxq.base.files import write_json  # noqa: E402
from fluxq.base.provenance import commit, cpu_name  # noqa: E402
from fluxq.calibrate.blocks import Replay, block_names  # noqa: E402
from fluxq.calibrate.calls import capture_calls  # noqa: E402
from fluxq.calibrate.inputs import InputsBuilder  # noqa: E402
from fluxq.calibrate.sensitivity import IMAGES, noise_level_weights  # noqa: E402
from fluxq.quantize.checkpoint import SourceWeights  # noqa: E402
from fluxq.quantize.group import GroupLayer, fit_group, price_on  # noqa: E402
from fluxq.quantize.run import Fitting, Outcome, quantize_component  # noqa: E402
from fluxq.quantize.synthetic import draw  # noqa: E402
from fluxq.quantize.tensor import QuantizedTensor  # noqa: E402
from fluxq.recipes.devices import find_device  # noqa: E402
from fluxq.recipes.families import FAMILIES  # noqa: E402
from fluxq.recipes.family import Maker  # noqa: E402
from fluxq.recipes.formats import FORMATS, Scheme  # noqa: E402
from fluxq.recipes.plan import LayerPlan, LinearShape, Plan, make_plan, with_method  # noqa: E402
from fluxq.recipes.recipe import Recipe, load_recipe  # noqa: E402

COMPONENT = "transformer"
STEPS = 8  # of each image; all are looked at
HEAD = 128  # channels of an attention head
LAYERS: tuple[tuple[int, int, str, Maker], ...] = (  # N, K, family of synthetic.py, what makes the input
    (3072, 3072, "adaln", "norm"),
    (12288, 3072, "adaln", "norm"),
    (3072, 12288, "ffn", "activation"),
)
ROUNDED = (4096, 4096)  # the weight that is rounded to nearest
REPEATS = 5


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
    out: Path | None,
) -> None:
    """Quantize random weights of real shapes and say how long it took."""
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
    double, _, single = blocks.partition("+")
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
                call,
                steps=STEPS,
                digests=digests,
                folder=folder / "calls",
                batch_size=1,
                most=count,
            )[COMPONENT]
        with self.timed("noise levels"):
            weights = noise_level_weights(pipe, [COMPONENT], items[:IMAGES], call, range(STEPS))
        replay = TimedReplay(model, calls, None, weights=weights)
        fitting = Fitting(replay, self.recipe.gate, folder / "fitted")
        fitting.folder.mkdir()
        outcome, size, last, written = Outcome(), 0, time.perf_counter(), 0.0
        for name, tensor in quantize_component(self._plan(model), source, None, torch.bfloat16, outcome, fitting):
            size += tensor.numel() * tensor.element_size()
            now = time.perf_counter()
            is_fitted = name.rpartition(".")[0] in outcome.schemes
            self.seconds["fitting" if is_fitted else "rounding the rest"] += now - last - replay.take_seconds()
            last = now
            self.seconds["running blocks"] = replay.seconds
            if now > written + 10:
                written = now
                self._write(block=f"{replay.turn + 1} of {len(replay.blocks)}")
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
    """A replay that knows how long it ran blocks, their statistics and Grams included."""

    seconds = taken = 0.0

    def take_seconds(self) -> float:
        """Those since the last time that this was called."""
        since, self.taken = self.seconds - self.taken, self.seconds
        return since

    def run(self, at: int, index: int) -> Any:
        start = time.perf_counter()
        output = super().run(at, index)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - start
        return output


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

    def stays_fp32(self, name: str) -> bool:
        return False


class RandomPipeline:
    """What calibration asks of a pipeline: it denoises random latents under random prompts, and decodes nothing."""

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
    pairs = [(group.plain_db, group.db) for group in outcome.groups.values() if group.plain_db and group.db]
    return [round(sum(values) / len(values), 2) for values in zip(*pairs, strict=True)]


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
    builder.add(layer.held, held=True)
    inputs, weight = builder.finish(), layer.weight
    del layer, builder
    price = price_on(find_device(recipe.gate.gpu), [(n, k)], recipe.gate.tokens, made_by)
    method = with_method(planned, part, recipe.profile, None).method
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
        "sqnr_db": [round(group.plain_db or 0, 2), round(group.db or 0, 2)],
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


def memory(what: str) -> int:
    """Bytes that this process holds (VmRSS), or the most that it held (VmHWM); Linux."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def peak_of_process() -> int:
    """The most bytes that this process held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
