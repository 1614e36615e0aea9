"""Modulation of all steps in one product: the same images, each weight read once a call, never another step's row."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import accelerate
import diffusers
import pytest
import torch
from diffusers.models.normalization import AdaLayerNormZeroSingle
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

from fluxq import tiny
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.runtime import modulation
from fluxq.runtime.modulation import HoistedModulation, hoist_modulation
from fluxq.runtime.optimize import optimize, restore

STEPS = 4
CPU = torch.device("cpu")
LAYER = "single_transformer_blocks.1.norm.linear"


@pytest.fixture(scope="module")
def flux() -> diffusers.FluxPipeline:
    """The embedded pipeline; tests take out again what they put in."""
    return tiny.load()


@pytest.fixture
def quantized(plain_checkpoint) -> diffusers.FluxPipeline:
    pipe = diffusers.FluxPipeline.from_pretrained(plain_checkpoint("nvfp4"), dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe, prompt: str | list[str] = "a red circle", steps: int = STEPS, **how) -> Tensor:
    count = 1 if isinstance(prompt, str) else len(prompt)
    noise = [torch.Generator().manual_seed(seed) for seed in range(count)]
    size = {"height": 16, "width": 16, "max_sequence_length": 8}
    return pipe(prompt, num_inference_steps=steps, generator=noise, output_type="latent", **size | how).images


def assert_alike(got: Tensor, want: Tensor, tolerance: float = 0.01) -> None:
    """Up to rounding: another step's or prompt's row is off by far more, as the planted faults below show."""
    assert distance(got, want) < tolerance


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@contextmanager
def counted(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, list[int]]]:
    """Rows of every product that the Linears of these names compute."""
    rows: dict[str, list[int]] = {name: [] for name in names}

    def counting(name: str, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            rows[name].append(len(x))
            return plain(x)

        return forward

    layers = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        layer.forward = counting(name, layer.forward)
    try:
        yield rows
    finally:
        for layer in layers.values():
            del layer.forward


@contextmanager
def hoisted_and_counted(pipe, **how) -> Iterator[tuple[HoistedModulation, dict[str, list[int]]]]:
    names = hoist_modulation(pipe)
    names.remove()
    with counted(pipe.transformer, names.layers) as rows, hoist_modulation(pipe, **how) as hoisted:
        yield hoisted, rows


def only(rows: dict[str, list[int]]) -> list[int]:
    """Return the rows of each product, which must be the same in all layers."""
    first, *rest = rows.values()
    assert all(other == first for other in rest)
    return first


def table_bytes(hoisted) -> int:
    outputs = [made for table in hoisted._tables for made, _ in table.by_layer.values()]
    return sum(tensor.nbytes for tensor in outputs)


def test_each_weight_is_read_once_a_call_and_the_image_stays(flux, caplog):
    want = latents(flux)
    with hoisted_and_counted(flux) as (hoisted, rows):
        assert_alike(latents(flux), want)
        assert only(rows) == [STEPS]
        outputs = sum(flux.transformer.get_submodule(name).out_features for name in hoisted.layers)
        assert table_bytes(hoisted) == STEPS * outputs * 2
    assert len(hoisted.layers) == 2 + 4 + 1 and caplog.text == ""
    with counted(flux.transformer, hoisted.layers) as rows:
        assert torch.equal(latents(flux), want)  # taken out, it is the pipeline it was
        assert only(rows) == [1] * STEPS
    assert not any("forward" in vars(module) for module in flux.transformer.modules())


@pytest.mark.slow
def test_calls_in_a_row_with_other_prompts_steps_sigmas_and_batches(flux, caplog):
    calls = [
        {},
        {"prompt": "a blue square"},
        {"steps": 3},
        {"sigmas": [1.0, 0.7, 0.2]},
        {"prompt": ["a red circle", "a blue square", "a green star"]},
        {"height": 32, "width": 16},
        {},
    ]
    want = [latents(flux, **call) for call in calls]
    with hoisted_and_counted(flux) as (_, rows):
        for call, image in zip(calls, want, strict=True):
            assert_alike(latents(flux, **call), image)
        assert only(rows) == [4, 4, 3, 3, 3 * 4, 4, 4]
    assert caplog.text == ""


def test_guidance_with_two_prompts_a_step_keeps_a_table_for_each(flux):
    call = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    want = latents(flux, **call)
    with hoisted_and_counted(flux) as (_, rows):
        assert_alike(latents(flux, **call), want)
        assert only(rows) == [STEPS, STEPS]


def test_two_prompts_a_step_that_share_their_first_image_are_told_apart(flux):
    """Rows are compared as a batch: all of them must be the table's."""
    call = {"prompt": ["a red circle", "a blue square"], "negative_prompt": ["a red circle", "a green star"]}
    want = latents(flux, true_cfg_scale=3.0, **call)
    with hoisted_and_counted(flux) as (_, rows):
        assert_alike(latents(flux, true_cfg_scale=3.0, **call), want)
        assert only(rows) == [2 * STEPS, 2 * STEPS]


def wrong_step(index: Callable) -> Callable:
    return lambda table, temb: None if (found := index(table, temb)) is None else (found + 1) % len(table.embeddings)


def any_table_of_this_step(index: Callable) -> Callable:
    """By the step alone, as if its prompt did not matter: stale or the other one of two."""
    steps = iter([*range(STEPS)] * 99)
    return lambda table, temb: next(steps) if index(table, temb) is None else index(table, temb)


def rows_swapped(index: Callable) -> Callable:
    def swap(table: modulation._Table, temb: Tensor) -> int | None:
        found = index(table, temb)
        table.inputs = table.inputs.unflatten(0, table.embeddings.shape[:2]).flip(1).flatten(0, 1)
        return found

    return swap


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        (wrong_step, {}),
        (any_table_of_this_step, {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}),
        (rows_swapped, {"prompt": ["a red circle", "a blue square"]}),
    ],
)
def test_a_wrong_row_would_be_seen(flux, monkeypatch, fault, call):
    want = latents(flux, **call)
    monkeypatch.setattr(modulation._Table, "index", fault(modulation._Table.index))
    with hoist_modulation(flux):
        assert distance(latents(flux, **call), want) > 0.03


def tiny_transformer(name: str, **config) -> nn.Module:
    torch.manual_seed(0)
    row = FAMILIES[name]
    return getattr(diffusers, row.model).from_config({**TINY_CONFIGS[row.name], **config}).eval()


def flux_dev() -> tuple[diffusers.DiffusionPipeline, dict]:
    """The embedded pipeline takes no guidance, as schnell; this one does.

    Its last timestep, 31.375 in bfloat16, is another number once it was divided by 1000 and multiplied again.
    """
    pipe = diffusers.FluxPipeline(
        transformer=tiny_transformer("flux", guidance_embeds=True),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
    )
    text = {"prompt_embeds": torch.randn(2, 5, 64), "pooled_prompt_embeds": torch.randn(2, 64)}
    return pipe, {**text, "sigmas": [1.0, 0.6, 0.3, 0.0314], "height": 64, "width": 64}


def sd3() -> tuple[diffusers.DiffusionPipeline, dict]:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=tiny_transformer("sd3"), scheduler=scheduler, tokenizer_3=None, **parts
    )
    text = {f"{name}prompt_embeds": torch.randn(2, 5, 64) for name in ("", "negative_")}
    pooled = {f"{name}pooled_prompt_embeds": torch.randn(2, 64) for name in ("", "negative_")}
    return pipe, {**text, **pooled, "height": 64, "width": 64}


def qwen(**config) -> tuple[diffusers.DiffusionPipeline, dict]:
    pipe = diffusers.QwenImagePipeline(
        transformer=tiny_transformer("qwen_image", **config),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=None,
        text_encoder=None,
        tokenizer=None,
    )
    text = {f"{name}prompt_embeds": torch.randn(2, 5, 64) for name in ("", "negative_")}
    masks = {f"{name}_mask": torch.ones(2, 5, dtype=torch.bool) for name in text}
    return pipe, {**text, **masks, "height": 64, "width": 64}


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("make", "products"),
    [
        (flux_dev, [STEPS * 2]),
        (sd3, [STEPS * 4]),  # both halves of the guidance in one batch
        (qwen, [STEPS * 2]),  # two calls a step, but no text enters: one table
        (lambda: qwen(zero_cond_t=True), [STEPS * 4]),  # an edit model embeds a 0 beside each timestep
    ],
    ids=["flux dev", "sd3", "qwen", "qwen edit"],
)
def test_other_families_in_their_own_pipelines(make, products, caplog):
    pipe, call = make()
    pipe.set_progress_bar_config(disable=True)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.01)):
        pipe.transformer.to(dtype)
        call = {name: v.to(dtype) if "embeds" in name and "mask" not in name else v for name, v in call.items()}
        run = {**call, "num_inference_steps": STEPS, "output_type": "latent"}
        want = pipe(**run, generator=torch.Generator().manual_seed(0)).images
        with hoisted_and_counted(pipe) as (_, rows):
            assert_alike(pipe(**run, generator=torch.Generator().manual_seed(0)).images, want, tolerance)
            assert only(rows) == products
    assert not [record for record in caplog.records if record.name == "fluxq"]


class FluxTransformer2DModel(nn.Module):
    """As wide as FLUX.1, but nothing else than an embedder and one modulation of 256 channels."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.time_text_embed = Embedder()
        block = nn.Module()
        block.norm = AdaLayerNormZeroSingle(8)
        block.norm.linear = linear
        self.single_transformer_blocks = nn.ModuleList([block])

    def forward(self, timestep: Tensor, pooled: Tensor) -> Tensor:
        norm = self.single_transformer_blocks[0].norm
        return norm.linear(norm.silu(self.time_text_embed(timestep, pooled)))


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.randn(3072) / 100)

    def forward(self, timestep: Tensor, pooled: Tensor) -> Tensor:
        return (2 * torch.cos(timestep[:, None].float() * self.frequency) + pooled).to(pooled.dtype)


def wide(scheme: str, dtype: torch.dtype) -> tuple[SimpleNamespace, nn.Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(3072, 256).to(dtype)
    layer = linear if scheme == "16 bit" else quantized_layer(linear, Scheme.parse(scheme))
    timesteps = torch.linspace(1000, 30, 28)
    return SimpleNamespace(
        transformer=FluxTransformer2DModel(layer), scheduler=SimpleNamespace(timesteps=timesteps)
    ), layer


def quantized_layer(linear: nn.Linear, scheme: Scheme) -> QuantLinear:
    weight = QuantizedTensor.quantize(linear.weight.detach().float(), scheme.weights)
    return QuantLinear.from_quantized(weight, linear.bias.detach(), scheme)


@pytest.mark.often(2)
@pytest.mark.parametrize("scheme", ["16 bit", "fp8-16bit", "int4-16bit", "int8-int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_28_rows_at_once_agree_with_one_at_a_time_at_full_width(scheme, dtype):
    """Sums agree to 2^-20 sum |a| |b|; in bfloat16 a sum beside a tie then goes to the next number, 2^-7 |y| at most.

    That is rare: all but one in a thousand are within half of it.
    """
    pipe, layer = wide(scheme, dtype)
    pooled = torch.randn(1, 3072).to(dtype)
    weight = (layer.collapsed()[0] if isinstance(layer, QuantLinear) else layer.weight).float()
    step = 2**-7 if dtype == torch.bfloat16 else 0.0
    beyond = []
    for t in pipe.scheduler.timesteps.to(dtype) / 1000 * 1000:
        plain = pipe.transformer(t[None], pooled)
        with hoist_modulation(pipe) as hoisted:
            batched = pipe.transformer(t[None], pooled)
            assert table_bytes(hoisted) == 28 * 256 * dtype.itemsize
        x = nn.functional.silu(pipe.transformer.time_text_embed(t[None], pooled)).float()
        difference, sums = (batched.float() - plain.float()).abs(), x.abs() @ weight.abs().T
        assert bool((difference <= step * plain.float().abs() + 2**-20 * sums).all())
        beyond.append(difference > step / 2 * plain.float().abs() + 2**-20 * sums)
    assert torch.stack(beyond).float().mean() < 0.001


@torch.no_grad()
def test_steps_that_round_to_one_timestep_share_a_row():
    pipe, _ = wide("16 bit", torch.bfloat16)
    pipe.scheduler.timesteps = torch.linspace(1000, 989, 28)  # bfloat16 has every fourth number there
    with hoist_modulation(pipe) as hoisted:
        pipe.transformer(torch.tensor([1000.0]).bfloat16(), torch.randn(1, 3072).bfloat16())
        assert table_bytes(hoisted) == 4 * 256 * 2


@torch.no_grad()
def test_weights_changed_between_calls_are_seen_by_the_next_one_and_merged_or_copied_ones_at_once():
    pipe, layer = wide("16 bit", torch.bfloat16)
    inputs = torch.tensor([1000.0]).bfloat16(), torch.randn(1, 3072).bfloat16()
    with hoist_modulation(pipe):
        before = pipe.transformer(*inputs)
        layer.weight.copy_(-layer.weight)
        after = pipe.transformer(*inputs)
        assert not torch.equal(after, before)
        layer.weight.data.neg_()  # which nothing counts
        assert torch.equal(pipe.transformer(*inputs), after)
        pipe.scheduler.timesteps = pipe.scheduler.timesteps.clone()  # as a scheduler's set_timesteps does
        assert torch.equal(pipe.transformer(*inputs), before)


@torch.no_grad()
def velocity(pipe, timestep: float = 1.0) -> Tensor:
    """The embedded transformer's output for fixed inputs, at a timestep as pipelines give it."""
    noise = torch.Generator().manual_seed(0)
    return pipe.transformer(
        hidden_states=torch.randn(1, 4, 16, generator=noise).bfloat16(),
        encoder_hidden_states=torch.randn(1, 8, 64, generator=noise).bfloat16(),
        pooled_projections=torch.randn(1, 64, generator=noise).bfloat16(),
        timestep=torch.tensor([timestep], dtype=torch.bfloat16),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]


@contextmanager
def nothing(_pipe) -> Iterator[None]:
    yield


@contextmanager
def embedding(pipe, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Change what modulations read, behind the embedder's back."""
    handle = pipe.transformer.time_text_embed.register_forward_hook(lambda _m, _args, temb: change(temb))
    yield
    handle.remove()


@contextmanager
def drifting(pipe) -> Iterator[None]:
    """The embedder gives something else whenever it is asked."""
    embedder, asked = pipe.transformer.time_text_embed, iter(range(99))
    stock = embedder.forward
    embedder.forward = lambda *inputs: stock(*inputs) * (1 + next(asked) / 10)
    yield
    del embedder.forward


UNKNOWN_TIMESTEP = 0.123
CHANGED = "reads something else than the activated embedding"


@pytest.mark.parametrize(
    ("around", "options", "timestep", "why"),
    [
        (nothing, {}, UNKNOWN_TIMESTEP, "is none that the scheduler makes"),
        (nothing, {"max_rows": 3}, 1.0, "4 rows are more than max_rows=3"),
        (lambda _: torch.inference_mode(), {}, 1.0, "does not count changes"),
        (lambda pipe: embedding(pipe, lambda temb: temb.mul_(0.5)), {}, 1.0, CHANGED),
        (lambda pipe: embedding(pipe, lambda temb: temb * 0.5), {}, 1.0, CHANGED),
    ],
    ids=["another timestep", "no room", "inference mode", "changed in place", "changed"],
)
def test_what_cannot_be_looked_up_is_computed_plainly_and_said_once(flux, caplog, around, options, timestep, why):
    latents(flux)  # the scheduler has its timesteps
    with around(flux):
        want = velocity(flux, timestep)
    with hoist_modulation(flux, **options), around(flux):
        assert torch.equal(velocity(flux, timestep), want)
        velocity(flux, timestep * 0.99)
    said = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    assert len(said) == 1


def test_with_gradients_or_an_embedder_that_drifts_nothing_is_looked_up(flux, caplog):
    latents(flux)
    pooled, timestep = torch.zeros(1, 64).bfloat16(), torch.tensor([1000.0])
    with hoist_modulation(flux) as hoisted:
        assert flux.transformer.time_text_embed(timestep, pooled).requires_grad
        assert hoisted.step is None and "gradients are on" in caplog.text
        with drifting(flux), torch.no_grad():
            flux.transformer.time_text_embed(timestep, pooled)
        assert hoisted.step is None and "the same bits twice" in caplog.text


MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["16 bit", "quantized"])
def test_adapters_on_modulation_loaded_before_or_in_the_middle_and_fused_there(request, lora_file, kind):
    pipe = tiny.load() if kind == "16 bit" else request.getfixturevalue("quantized")
    style = lora_file("style.safetensors", MODULATION, alpha=16)

    def change(pipe, step: int, _t: Tensor, tensors: dict) -> dict:
        if step == 0:
            pipe.load_lora_weights(style)
        elif step == 2:
            pipe.fuse_lora()
        return tensors

    def changed() -> Tensor:
        image = latents(pipe, callback_on_step_end=change)
        pipe.unfuse_lora()
        pipe.unload_lora_weights()
        return image

    plain, want = latents(pipe), changed()
    assert distance(want, plain) > 0.03
    with hoisted_and_counted(pipe) as (_, rows):
        assert_alike(changed(), want)
        # Once more after fusing, but for the last norm, which is not adapted.
        assert all(made == [STEPS] * (1 + name.endswith(MODULATION)) for name, made in rows.items())
        assert_alike(latents(pipe), plain)
    pipe.load_lora_weights(style)
    want = latents(pipe)
    with hoist_modulation(pipe) as hoisted:
        assert f"{LAYER}.base_layer" in hoisted.layers
        assert_alike(latents(pipe), want)
    assert torch.equal(latents(pipe), want)


def to_memory(model: nn.Module) -> None:
    accelerate.cpu_offload(model, CPU)


def as_a_whole(model: nn.Module) -> None:
    accelerate.cpu_offload_with_hook(model, CPU)


def by_layer(model: nn.Module) -> None:
    model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def by_block(model: nn.Module) -> None:
    model.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type="block_level", num_blocks_per_group=1
    )


@pytest.mark.often(1)
@pytest.mark.parametrize("move", [to_memory, as_a_whole, by_layer, by_block])
@pytest.mark.parametrize("first", ["offloaded", "hoisted"])
def test_every_way_to_offload_works_with_it(move, first, monkeypatch):
    pipe = tiny.load()
    want = latents(pipe)
    products = []
    product = modulation._Modulation._product
    monkeypatch.setattr(
        modulation._Modulation, "_product", lambda layer, x: products.append(layer.path) or product(layer, x)
    )
    if first == "offloaded":
        move(pipe.transformer)
    with hoist_modulation(pipe) as hoisted:
        if first == "hoisted":
            move(pipe.transformer)
        assert_alike(latents(pipe), want)
        assert sorted(products) == sorted(hoisted.layers)
    assert torch.equal(latents(pipe), want)


def test_weights_that_it_keeps_on_the_cpu_come_for_one_product_and_go_again():
    """The meta device stands for a GPU: what is there, and when, shows; what it computes does not."""
    pipe, layer = wide("fp8-16bit", torch.bfloat16)
    held = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    seen, plain = [], layer.forward
    layer.forward = lambda x: seen.append({parameter.device.type for parameter in layer.parameters()}) or plain(x)
    hoisted = hoist_modulation(pipe, offload=True)
    with torch.no_grad():
        assert layer(torch.empty(2, 3072, dtype=torch.bfloat16, device="meta")).shape == (2, 256)
        assert seen == [{"meta"}]
        assert not any(parameter.is_meta for parameter in layer.parameters())
        now = layer.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in held.items())
    pipe.transformer.time_text_embed.to("meta")  # where the model is, is where it brings them back to
    hoisted.remove()
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_offloaded_it_makes_the_same_image(flux):
    want = latents(flux)
    with hoist_modulation(flux, offload=True):
        assert_alike(latents(flux), want)
    assert torch.equal(latents(flux), want)


@pytest.mark.gpu
def test_on_a_gpu_the_modulation_stays_on_the_cpu_and_the_image_what_it_was():
    pipe = tiny.load().to("cuda")
    want = latents(pipe)
    layer = pipe.transformer.get_submodule(LAYER)
    with hoist_modulation(pipe):
        assert_alike(latents(pipe), want)
    with hoist_modulation(pipe, offload=True):
        assert_alike(latents(pipe), want)
        assert layer.weight.device.type == "cpu"
    assert layer.weight.device.type == "cuda" and torch.equal(latents(pipe), want)


def test_fused_blocks_look_up_too(flux):
    want = latents(flux)
    with hoisted_and_counted(flux) as (_, rows):
        optimize(flux)
        assert_alike(latents(flux), want)
        assert only(rows) == [STEPS]
    restore(flux)
    assert torch.equal(latents(flux), want)


def test_saved_while_hoisted_the_bytes_are_the_same(quantized, tmp_path):
    quantized.transformer.save_pretrained(tmp_path / "before")
    with hoist_modulation(quantized, offload=True):
        latents(quantized)
        quantized.transformer.save_pretrained(tmp_path / "hoisted")
    names = sorted(file.name for file in (tmp_path / "before").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "hoisted").iterdir())
    for name in names:
        assert (tmp_path / "hoisted" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()


def test_a_copy_computes_with_its_own_weights(flux):
    want = latents(flux)
    with hoist_modulation(flux):
        copied = copy.deepcopy(flux.transformer)
        assert_alike(latents(flux), want)
        nn.init.zeros_(copied.get_submodule(LAYER).weight)
        other = SimpleNamespace(transformer=copied)
        assert not torch.equal(velocity(other), velocity(flux))
    assert torch.equal(latents(flux), want)


@torch.no_grad()
def test_compiled_afterwards_it_computes_plainly():
    pipe, _ = wide("16 bit", torch.bfloat16)
    inputs = torch.tensor([1000.0]).bfloat16(), torch.randn(1, 3072).bfloat16()
    want = pipe.transformer(*inputs)
    with hoist_modulation(pipe) as hoisted:
        pipe.transformer(*inputs)
        assert hoisted.step is not None  # which the graph must not take for its own
        torch._dynamo.reset()
        other = inputs[0] / 2
        compiled = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(*inputs), want)
        plain = compiled(other, inputs[1])
    assert torch.equal(plain, pipe.transformer(other, inputs[1])) and not torch.equal(plain, want)


def compiled(pipe: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(transformer=torch.compile(pipe.transformer), scheduler=pipe.scheduler)


def compiled_in_place(pipe: SimpleNamespace) -> SimpleNamespace:
    pipe.transformer.single_transformer_blocks[0].compile()
    return pipe


def offloaded(pipe: SimpleNamespace) -> SimpleNamespace:
    accelerate.cpu_offload(pipe.transformer, CPU)
    return pipe


def hoisted(pipe: SimpleNamespace) -> SimpleNamespace:
    hoist_modulation(pipe)
    return pipe


def of(name: str) -> Callable[[SimpleNamespace], SimpleNamespace]:
    return lambda pipe: SimpleNamespace(transformer=tiny_transformer(name), scheduler=pipe.scheduler)


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("damage", "options", "why"),
    [
        (compiled, {}, "is compiled"),
        (compiled_in_place, {}, "is compiled"),
        (hoisted, {}, r"hoisted already: remove\(\) it first"),
        (offloaded, {"offload": True}, "offload=False"),
        (of("wan"), {}, "of a WanTransformer3DModel cannot be hoisted, only that of flux, sd3, qwen_image"),
        (lambda pipe: SimpleNamespace(transformer=nn.Linear(1, 1), scheduler=1), {}, "unknown model family: Linear"),
        (lambda pipe: pipe.transformer, {}, "needs a pipeline with transformer and scheduler"),
        (lambda pipe: pipe, {"max_rows": 0}, "max_rows is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_hoisted_is_refused_by_name(damage, options, why):
    pipe, _ = wide("16 bit", torch.bfloat16)
    with pytest.raises(ValueError, match=why):
        hoist_modulation(damage(pipe), **options)


def test_it_can_be_taken_out_twice_and_put_in_again(flux):
    first = hoist_modulation(flux)
    first.remove()
    first.remove()
    hoist_modulation(flux).remove()
    assert not any("forward" in vars(module) for module in flux.transformer.modules())
