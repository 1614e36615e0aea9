"""A quantized model does what diffusers' models do: FLUX.1 under every recipe, five families under two and in 16 bit.

A check runs on the 16-bit model as well. What is refused on a quantized one passes there, and what fails on a quantized
one for want of something in diffusers fails there too.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator

import accelerate
import pytest
import torch
from conformance import CASTS, FEW, SAMPLE, SUBJECTS, alike, layers, marked, raw, refused, same, state, untouched
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model_state_dict
from shared import SIXTEEN_BIT
from torch import Tensor, nn

import fluxq
from fluxq.recipes.all_families import FAMILIES
from tests.recipes.test_every_family import Case

CPU = torch.device("cpu")


class Subject(Case):
    """A family's model under a recipe."""

    @property
    def in_16_bit(self) -> bool:
        return self.recipe == SIXTEEN_BIT

    def wanted(self) -> Tensor:
        """The output of a plain load, computed once."""
        if not hasattr(self, "_wanted"):
            self._wanted = self.output(self.load())
        return self._wanted

    def loss(self, model: nn.Module) -> Tensor:
        """Any number that depends on all of the output, with gradients."""
        return self.output.__wrapped__(self, model).float().square().mean()


@pytest.fixture(scope="module")
def subjects(family_inputs, tmp_path_factory):
    made: dict[tuple[str, str], Subject] = {}

    def of(family: str, recipe: str) -> Subject:
        if (family, recipe) not in made:
            made.clear()  # tests come subject by subject
            torch.manual_seed(0)
            row = FAMILIES[family]
            made[family, recipe] = Subject(row, family_inputs(row), tmp_path_factory.mktemp(family), recipe)
        return made[family, recipe]

    return of


# Models


def repeats(s: Subject, tmp) -> None:
    """Two calls and two loads compute the same bits, as a tuple or as an object."""
    model = s.load()
    got = s.output(model)
    assert torch.equal(s.output(model), got) and torch.equal(s.wanted(), got) and torch.isfinite(got.float()).all()
    assert got.dtype == torch.bfloat16
    with torch.no_grad():
        cast = {n: t.bfloat16() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in s.inputs.items()}
        if s.row.name != "z_image":  # takes lists
            assert torch.equal(model(**cast).sample, model(**cast, return_dict=False)[0])


def signature(s: Subject, tmp) -> None:
    """The class, its forward and its configuration are those of the 16-bit model."""
    model, plain = s.load(), s.load(s.plain)
    assert type(model) is type(plain)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    said = {n: v for n, v in model.config.items() if not n.startswith("_") and n != "quantization_config"}
    assert said == {n: v for n, v in plain.config.items() if not n.startswith("_")}


def dtypes(s: Subject, tmp) -> None:
    """Loaded in fp32, fp16 or bf16, what is not quantized has the dtypes of the 16-bit model, kept fp32 parts too."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model, plain = s.load(dtype=dtype), s.load(s.plain, dtype=dtype)
        found = {name: p.dtype for name, p in plain.named_parameters()}
        names = {f"{name}.{part}" for name, layer in layers(model).items() for part, _ in layer.named_parameters()}
        assert all(p.dtype == found[name] for name, p in model.named_parameters() if name not in names)
        assert s.output(model, dtype).dtype == s.output(plain, dtype).dtype
        assert model.dtype == plain.dtype


def torch_dtype(s: Subject, tmp) -> None:
    """`torch_dtype=` is `dtype=`, and loading says that nothing was missing or left over."""
    model, told = s.model_class.from_pretrained(s.folder, torch_dtype=torch.bfloat16, output_loading_info=True)
    assert same(state(model), state(s.load()))
    assert not any(told.values()), told


def saved(s: Subject, tmp) -> None:
    """Saved as a variant in shards, loaded in threads: the same bits."""
    model = s.load()
    model.save_pretrained(tmp, variant="q", max_shard_size="200KB")
    assert len(list(tmp.glob("*.q-*.safetensors"))) > 1
    assert same(state(s.load(tmp, variant="q")), state(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENABLE_PARALLEL_LOADING", "YES")
        assert same(state(s.load(tmp, variant="q")), state(model))


def device_maps(s: Subject, tmp) -> None:
    """Loaded by a device map: the same bits, or the same refusal where a class cannot be split."""
    for device_map in ("cpu", {"": "cpu"}, "auto", "balanced"):
        passes = alike(
            lambda d=device_map: s.load(device_map=d),
            lambda d=device_map: s.load(s.plain, device_map=d),
        )
        if passes:
            assert torch.equal(s.output(s.load(device_map=device_map)), s.wanted())


def from_config(s: Subject, tmp) -> None:
    """`from_config` makes a model in 16 bit; saved with a configuration that still claims codes, it is refused."""
    model = s.model_class.from_config(s.load().config)
    assert not layers(model) and state(model).keys() == state(s.load(s.plain)).keys()
    model.save_pretrained(tmp)
    if s.in_16_bit:
        assert same(state(s.load(tmp, dtype=torch.float32)), state(model))
    else:
        with pytest.raises(ValueError, match=r"lack .* which config\.json names"):
            s.load(tmp)


def copies(s: Subject, tmp) -> None:
    """A deep copy, and a model that takes the state of another, compute the same; neither shares a tensor."""
    model = s.load()
    twin = copy.deepcopy(model)
    assert same(state(twin), state(model)) and torch.equal(s.output(twin), s.wanted())
    mine = {p.data_ptr() for p in model.parameters()}
    assert not mine & {p.data_ptr() for p in twin.parameters()}
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(s.output(model), s.wanted())
    for assign in (False, True):
        twin.load_state_dict(copy.deepcopy(model.state_dict()), strict=True, assign=assign)
        assert torch.equal(s.output(twin), s.wanted())


def counts(s: Subject, tmp) -> None:
    """`num_parameters` counts what the 16-bit model has, whatever it takes to store it."""
    model, plain = s.load(), s.load(s.plain)
    assert model.num_parameters() == plain.num_parameters()
    without = {"exclude_embeddings": True}
    assert model.num_parameters(**without) == plain.num_parameters(**without)


def footprint(s: Subject, tmp) -> None:
    """The memory footprint is the bytes of its tensors, and less than that of 16 bit."""
    model, plain = s.load(), s.load(s.plain)
    assert model.get_memory_footprint() == sum(len(bits) for *_, bits in state(model).values())
    if not s.in_16_bit:
        stored = sum(raw(p).numel() for layer in layers(model).values() for n, p in layer.named_parameters())
        in_16_bit = sum(raw(p).numel() for name in layers(model) for p in plain.get_submodule(name).parameters())
        assert stored < 0.6 * in_16_bit
        assert plain.get_memory_footprint() - model.get_memory_footprint() == in_16_bit - stored


def moves(s: Subject, tmp) -> None:
    """Moving to the device it is on, and `eval`, `train` and `requires_grad_(False)`, change no bit."""
    model = s.load()
    with untouched(model, s.output):
        model.to("cpu").cpu().to(device=CPU).train().eval().requires_grad_(False)


def trains(s: Subject, tmp) -> None:
    """A step trains what is not quantized, the same with gradient checkpointing, and leaves codes alone."""
    model = s.load()
    before, gradients = state(model), {}
    codes = {f"{name}.{part}" for name, layer in layers(model).items() for part, _ in layer.named_parameters()}
    for checkpointing in (False, True):
        (model.enable_gradient_checkpointing if checkpointing else model.disable_gradient_checkpointing)()
        model.train()
        model.zero_grad()
        s.loss(model).backward()
        gradients[checkpointing] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients[False] and not gradients[False].keys() & codes
    assert gradients[True].keys() == gradients[False].keys()
    assert all(torch.equal(g, gradients[True][name]) for name, g in gradients[False].items())
    plain = s.load(s.plain).train()
    s.loss(plain).backward()
    in_16_bit = {name for name, p in plain.named_parameters() if p.grad is not None}
    weights = {f"{name}.{part}" for name in layers(model) for part in ("weight", "bias")}
    assert gradients[False].keys() == in_16_bit - weights
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name][2], after[name][2])}
    assert changed and changed <= gradients[False].keys()


def averages(s: Subject, tmp) -> None:
    """diffusers' moving average of the parameters follows what is trained and keeps codes."""
    model = s.load()
    before = state(model)
    average = EMAModel(model.parameters(), decay=0.5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(1)
    average.step(model.parameters())
    average.copy_to(model.parameters())
    after, codes = state(model), layers(model)
    assert all(torch.equal(before[n][2], after[n][2]) for n in before if n.rpartition(".")[0] in codes)
    assert any(not torch.equal(before[n][2], after[n][2]) for n in before)


def processors(s: Subject, tmp) -> None:
    """Attention processors are set anew; every attention backend of the CPU works, others are refused as in 16 bit."""
    model = s.load()
    if hasattr(model, "attn_processors"):
        assert model.attn_processors.keys() == s.load(s.plain).attn_processors.keys()
        model.set_attn_processor(dict(model.attn_processors))
        assert torch.equal(s.output(model), s.wanted())
    try:
        model.set_attention_backend("_native_math")
        got, want = s.output(model).float(), s.output(s.load(s.plain)).float()
        assert (got - want).norm() < 0.25 * want.norm()  # four bits
    finally:
        model.set_attention_backend("native")  # of the process
    assert torch.equal(s.output(model), s.wanted())
    model.reset_attention_backend()
    assert torch.equal(s.output(model), s.wanted())
    for backend in ("flash", "no such backend"):
        assert not alike(
            lambda b=backend: model.set_attention_backend(b),
            lambda b=backend: s.load(s.plain).set_attention_backend(b),
        )


def compiles(s: Subject, tmp) -> None:
    """`compile_repeated_blocks` computes the same, or is refused as in 16 bit."""
    model, plain = s.load(), s.load(s.plain)
    how = {"backend": "eager", "fullgraph": True}
    if alike(lambda: model.compile_repeated_blocks(**how), lambda: plain.compile_repeated_blocks(**how)):
        torch._dynamo.reset()
        assert torch.equal(s.output(model), s.wanted())


def casts(s: Subject, tmp) -> None:
    """A cast of the model to another dtype is refused, and nothing is cast; the dtype it has passes."""
    model = s.load()
    for cast in CASTS:
        with refused(model, r"(?i)cast", s.output):
            cast(model)
        if s.in_16_bit:
            model = s.load()


def layerwise(s: Subject, tmp) -> None:
    """Layerwise casting is refused, and nothing is cast."""
    model = s.load()
    with refused(model, "layerwise casting", s.output):
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)


def fuses_projections(s: Subject, tmp) -> None:
    """`fuse_qkv_projections` is refused, where the class has it, and nothing is fused."""
    model = s.load()
    if not hasattr(model, "fuse_qkv_projections"):
        return
    with refused(model, "fuse_qkv_projections", s.output):
        model.fuse_qkv_projections()


def needs_memory_for_placeholders(s: Subject, tmp) -> None:
    """`low_cpu_mem_usage=False` is refused: diffusers takes it of none that is quantized or keeps parts in fp32."""
    if s.in_16_bit and not s.model_class._keep_in_fp32_modules:
        s.load(low_cpu_mem_usage=False)
        return
    with pytest.raises(ValueError, match="low_cpu_mem_usage"):
        s.load(low_cpu_mem_usage=False)


MODELS = [
    repeats, signature, dtypes, torch_dtype, saved, device_maps, from_config, copies, counts, footprint, moves, trains,
    averages, processors, compiles,
]  # fmt: skip

# Quantization


def flags(s: Subject, tmp) -> None:
    """Quantized while loading and loaded from a checkpoint, a model says so alike, in the same layers and bits."""
    fresh = s.load(s.plain, quantization_config=fluxq.FluxqConfig(recipe=s.recipe, profile="rtn"))
    loaded = s.load()
    for model in (fresh, loaded):
        assert model.is_quantized and model.quantization_method == "fluxq"
        assert model.hf_quantizer.is_serializable and model.hf_quantizer.is_trainable
        assert model.config.quantization_config.quant_method == "fluxq"
    assert layers(fresh).keys() == layers(loaded).keys() and same(state(fresh), state(loaded))
    assert not getattr(s.load(s.plain), "is_quantized", False)


def configures(s: Subject, tmp) -> None:
    """The configuration goes through a dictionary and JSON, and a saved model has it again."""
    config = s.load().config.quantization_config
    again = type(config).from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    s.load().save_pretrained(tmp)
    stored = json.loads((tmp / "config.json").read_text())["quantization_config"]
    assert stored == json.loads((s.folder / "config.json").read_text())["quantization_config"]


def excludes(s: Subject, tmp) -> None:
    """A layer that is excluded stays the Linear it is in 16 bit; all others are quantized."""
    (name, *others), plain = layers(s.load()), s.load(s.plain)
    config = fluxq.FluxqConfig(recipe=s.recipe, profile="rtn", exclude=[name])
    model = s.load(s.plain, quantization_config=config)
    assert set(layers(model)) == set(others)
    assert torch.equal(model.get_submodule(name).weight, plain.get_submodule(name).weight)
    model.save_pretrained(tmp)
    assert same(state(s.load(tmp)), state(model))


def dequantizes(s: Subject, tmp) -> None:
    """`dequantize` leaves a plain model that says nothing of quantization, from either kind of load."""
    how = {"quantization_config": fluxq.FluxqConfig(recipe=s.recipe, profile="rtn")}
    for model in (s.load(), s.load(s.plain, **how)):
        model.dequantize()
        assert not layers(model) and not model.is_quantized and "quantization_config" not in model.config
        assert state(model).keys() == state(s.load(s.plain)).keys()
        got, want = s.output(model).float(), s.wanted().float()
        assert (got - want).norm() < 0.1 * want.norm()
        model.to(torch.float32)
    assert s.output(model, torch.float32).dtype == torch.float32


def without_a_dtype(s: Subject, tmp) -> None:
    """Loaded without a dtype, a checkpoint computes in bf16."""
    model = s.model_class.from_pretrained(s.folder)
    assert model.dtype == torch.bfloat16 and same(state(model), state(s.load()))


QUANTIZATION = [flags, configures, excludes, dequantizes, without_a_dtype]

# LoRA


def adapters(s: Subject, tmp) -> None:
    """Two adapters: active alone and with weights, disabled, enabled, deleted, unloaded without a trace."""
    model = s.load()
    before, plain = state(model), s.wanted()
    for name in ("a", "b"):
        add(model, name)
    outputs = {}
    for names in ("a", "b", ["a", "b"]):
        model.set_adapters(names)
        assert model.active_adapters() == ([names] if isinstance(names, str) else names)
        outputs[str(names)] = s.output(model)
    assert len({bytes(raw(t).numpy()) for t in (plain, *outputs.values())}) == 4
    model.set_adapters(["a", "b"], [1.0, 0.0])
    assert torch.equal(s.output(model), outputs["a"])
    model.disable_adapters()
    assert torch.equal(s.output(model), plain)
    model.enable_adapters()
    model.delete_adapters("a")
    model.set_adapters("b")
    assert torch.equal(s.output(model), outputs["b"])
    model.unload_lora()
    assert same(state(model), before) and torch.equal(s.output(model), plain)


def adapters_are_filed(s: Subject, tmp) -> None:
    """An adapter's tensors and metadata load into another model, also in place of a loaded one (hot swap)."""
    model, other = s.load(), s.load()
    for name in ("a", "b"):
        add(model, name, lora_alpha=8)
        model.set_adapters(name)
        want, tensors = s.output(model), get_peft_model_state_dict(model, adapter_name=name)
        told = model.peft_config[name].to_dict()
        how = {"adapter_name": "style", "prefix": None, "metadata": told, "hotswap": name == "b"}
        other.load_lora_adapter(tensors, **how)
        assert torch.equal(s.output(other), want)


def saves_an_adapter(s: Subject, tmp) -> None:
    """A model's `save_lora_adapter` writes an adapter that computes the same in another model."""
    model, other = s.load(), s.load()
    add(model, "a")
    model.save_lora_adapter(tmp, adapter_name="a", weight_name="a.safetensors")
    other.load_lora_adapter(tmp, adapter_name="a", prefix=None, weight_name="a.safetensors")
    assert torch.equal(s.output(other), s.output(model))


def adapters_fuse(s: Subject, tmp) -> None:
    """An adapter is fused and unfused; a quantized model loses no bit by it."""
    model = s.load()
    targets = sorted(layers(model)) or ["to_q", "to_k"]
    add(model, "a", target_modules=targets)
    before, want = state(model), s.output(model)
    model.fuse_lora()
    if not s.in_16_bit:
        assert torch.equal(s.output(model), want)
    model.unfuse_lora()
    if not s.in_16_bit:
        assert same(state(model), before) and torch.equal(s.output(model), want)


def adapters_train(s: Subject, tmp) -> None:
    """A step of training changes the adapters alone."""
    model = s.load()
    model.requires_grad_(False)
    add(model, "a")
    before = state(model)
    model.train()
    loss = s.loss(model)
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name and p.grad is not None for name, p in trained.items())
    torch.optim.SGD(trained.values(), lr=0.1).step()
    after = state(model)
    assert {n for n in before if not torch.equal(before[n][2], after[n][2])} <= trained.keys()


def adapters_with_magnitudes(s: Subject, tmp) -> None:
    """DoRA, which reads the weight's norm, loads and computes as far from 16 bit as the model without it."""
    model, plain = s.load(), s.load(s.plain)
    for m in (model, plain):
        add(m, "dora", use_dora=True)
    got, want = s.output(model).float(), s.output(plain).float()
    assert (got - want).norm() < 0.3 * want.norm()
    assert not torch.equal(s.output(model), s.wanted())
    model.unload_lora()
    assert torch.equal(s.output(model), s.wanted())


def add(model: nn.Module, name: str, **how) -> None:
    """Add a random adapter, the same one for the same name."""
    torch.manual_seed(ord(name[0]))
    target = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q", "to_k"], "init_lora_weights": False, **how}
    model.add_adapter(LoraConfig(**target), name)


LORA = [adapters, adapters_are_filed, saves_an_adapter, adapters_fuse, adapters_train, adapters_with_magnitudes]

# Offload


def groups(s: Subject, tmp) -> None:
    """Group offload of leaves or blocks, in memory or on disk, computes the same, twice."""
    for level in ("leaf_level", "block_level"):
        for to_disk in (False, True):
            model = s.load()
            options = {"offload_to_disk_path": str(tmp / level)} if to_disk else {}
            if level == "block_level":
                options["num_blocks_per_group"] = 1
            model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type=level, **options)
            assert torch.equal(s.output(model), s.wanted()) and torch.equal(s.output(model), s.wanted())


def streams(s: Subject, tmp) -> None:
    """Streams need an accelerator: without one they are refused, in 16 bit too."""
    model = s.load()
    with pytest.raises(ValueError, match="stream"):
        model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level", use_stream=True)
    assert torch.equal(s.output(model), s.wanted())


def hooks(s: Subject, tmp) -> None:
    """accelerate's hooks bring weights from memory or disk for each call, and take them away again."""
    for offload in (accelerate.cpu_offload, accelerate.disk_offload):
        model = s.load()
        more = {"offload_dir": str(tmp)} if offload is accelerate.disk_offload else {}
        offload(model, execution_device=CPU, **more)
        assert all(p.is_meta for p in model.parameters())
        got = [s.output(model) for _ in range(2)]
        assert torch.equal(*got)
        assert torch.equal(got[0], s.wanted())


REFUSED = [casts, layerwise, fuses_projections, needs_memory_for_placeholders]
OFFLOAD = [groups, streams, hooks]
SUITES = {"Models": MODELS, "Refused": REFUSED, "Quantization": QUANTIZATION, "LoRA": LORA, "Offload": OFFLOAD}

LONG = (compiles, device_maps, groups, hooks)  # other tests of every run look at these


def cases() -> Iterator:
    for subject in SUBJECTS:
        for check in (check for checks in SUITES.values() for check in checks):
            if check in QUANTIZATION and subject[1] == SIXTEEN_BIT:
                continue
            if check is compiles and subject not in (("flux", recipe) for recipe in FEW):
                continue  # seconds each
            yield marked(subject, check, *([] if check in LONG else [SAMPLE]))


@pytest.mark.often(4)
@pytest.mark.parametrize(("subject", "check"), cases())
def test_it_does_what_the_library_s_models_do(subject, check, subjects, tmp_path):
    check(subjects(*subject), tmp_path)
