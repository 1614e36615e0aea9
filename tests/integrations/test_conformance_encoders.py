"""A quantized text encoder does what transformers' models do: T5 under every recipe, eight others under two."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import accelerate
import peft
import pytest
import torch
import transformers
from conformance import CASTS, FEW, alike, layers, marked, raw, refused, same, state, untouched
from shared import SIXTEEN_BIT
from torch import Tensor, nn
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

import fluxq
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.family import Family
from fluxq.recipes.recipe import shipped_recipes
from tests.integrations.test_transformers import sixteen_bit

OTHERS = ("umt5", "clip", "clip_projection", "qwen2_5_vl", "qwen3", "llama_lm", "gemma2", "mistral3")
SUBJECTS = [
    *(("t5", recipe) for recipe in (SIXTEEN_BIT, *shipped_recipes())),
    *((name, recipe) for name in OTHERS for recipe in FEW),
]
SAMPLE = ("clip", "nvfp4")
IDS = torch.arange(1, 13).reshape(2, 6)


class Subject:
    """A text encoder with random weights, under a recipe."""

    def __init__(self, row: Family, recipe: str, root: Path) -> None:
        self.row, self.recipe = row, recipe
        self.model_class = getattr(transformers, row.model)
        self.plain = sixteen_bit(row, root / "plain").path / "encoder"
        self.folder = self.plain if recipe == SIXTEEN_BIT else root / "quantized"
        if recipe != SIXTEEN_BIT:
            self.fresh().save_pretrained(self.folder)

    @property
    def in_16_bit(self) -> bool:
        return self.recipe == SIXTEEN_BIT

    def load(self, folder: Path | None = None, **how) -> nn.Module:
        return self.model_class.from_pretrained(folder or self.folder, **{"dtype": torch.bfloat16, **how})

    def fresh(self, **how) -> nn.Module:
        """Quantized while it loads."""
        config = fluxq.FluxqConfig(recipe=self.recipe, **how)
        return self.load(self.plain, quantization_config=config)

    @torch.no_grad()
    def output(self, model: nn.Module) -> Tensor:
        return hidden(model)

    def wanted(self) -> Tensor:
        """The output of a plain load, computed once."""
        if not hasattr(self, "_wanted"):
            self._wanted = self.output(self.load())
        return self._wanted


def hidden(model: nn.Module) -> Tensor:
    return model(input_ids=IDS, output_hidden_states=True).hidden_states[-1]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    made: dict[tuple[str, str], Subject] = {}

    def of(name: str, recipe: str) -> Subject:
        if (name, recipe) not in made:
            made.clear()  # tests come subject by subject
            made[name, recipe] = Subject(FAMILIES[name], recipe, tmp_path_factory.mktemp(name))
        return made[name, recipe]

    return of


def repeats(s: Subject, tmp) -> None:
    """Two calls and two loads compute the same bits; class, forward and hidden states are those of 16 bit."""
    model, plain = s.load(), s.load(s.plain)
    assert torch.equal(s.output(model), s.wanted()) and torch.equal(s.output(model), s.wanted())
    assert torch.isfinite(s.wanted().float()).all() and s.wanted().dtype == torch.bfloat16
    assert type(model) is type(plain) and inspect.signature(model.forward) == inspect.signature(plain.forward)
    got, want = s.wanted().float(), s.output(plain).float()
    assert (got - want).norm() <= (0 if s.in_16_bit else 0.3) * want.norm()  # four bits


def dtypes(s: Subject, tmp) -> None:
    """Loaded in fp32, fp16 or bf16, what is not quantized has the dtypes of the 16-bit model."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model, plain = s.load(dtype=dtype), s.load(s.plain, dtype=dtype)
        found = {name: p.dtype for name, p in plain.named_parameters()}
        own = {f"{name}.{part}" for name, layer in layers(model).items() for part, _ in layer.named_parameters()}
        assert all(p.dtype == found[name] for name, p in model.named_parameters() if name not in own)
        assert model.dtype == plain.dtype and s.output(model).dtype == s.output(plain).dtype


def saved(s: Subject, tmp) -> None:
    """Saved as a variant in shards: the same bits, with nothing missing or left over."""
    model = s.load()
    model.save_pretrained(tmp, variant="q", max_shard_size="100KB")
    assert len(list(tmp.glob("*.q-*.safetensors")) + list(tmp.glob("*-of-*.safetensors"))) > 1
    again, told = s.load(tmp, variant="q", output_loading_info=True)
    assert same(state(again), state(model)) and not any(told.values()), told


def auto_classes(s: Subject, tmp) -> None:
    """The automatic classes make of it what they make of 16 bit; a class that names its layers otherwise is refused."""
    names = layers(s.load()).keys()
    for auto in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        load = functools.partial(auto.from_pretrained, dtype=torch.bfloat16)
        try:
            plain = load(s.plain)
        except ValueError as error:
            assert "Unrecognized configuration class" in str(error)
            continue
        if names <= {name for name, _ in plain.named_modules()}:
            assert type(load(s.folder)) is type(plain)
        else:
            with pytest.raises(ValueError, match="no Linear of this"):
                load(s.folder)
    assert type(transformers.AutoConfig.from_pretrained(s.folder)) is s.model_class.config_class


def device_maps(s: Subject, tmp) -> None:
    """Loaded by a device map, also one with a part on disk: the same bits."""
    for device_map in ("cpu", {"": "cpu"}, "auto"):
        assert torch.equal(s.output(s.load(device_map=device_map)), s.wanted())
    if len(s.model_class._no_split_modules or ()):
        how = {"device_map": "auto", "max_memory": {"cpu": "300KB"}, "offload_folder": tmp}
        model, plain = [], []
        if alike(lambda: model.append(s.load(**how)), lambda: plain.append(s.load(s.plain, **how))):
            assert torch.equal(s.output(model[0]), s.wanted())


def hooks(s: Subject, tmp) -> None:
    """accelerate's hooks bring weights from memory or disk for each call, and take them away again."""
    for offload, more in ((accelerate.cpu_offload, {}), (accelerate.disk_offload, {"offload_dir": str(tmp)})):
        model = s.load()
        offload(model, execution_device=torch.device("cpu"), **more)
        assert all(p.is_meta for p in model.parameters())
        assert torch.equal(s.output(model), s.wanted())


def flags(s: Subject, tmp) -> None:
    """Quantized while loading and loaded from a checkpoint, a model says so alike, in the same layers and bits."""
    fresh, loaded = s.fresh(), s.load()
    for model in (fresh, loaded):
        assert model.is_quantized and model.quantization_method == "fluxq"
        assert model.hf_quantizer.is_serializable() and model.config.quantization_config.quant_method == "fluxq"
    assert layers(fresh).keys() == layers(loaded).keys() and same(state(fresh), state(loaded))
    config = loaded.config.quantization_config
    assert type(config).from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()
    fresh.save_pretrained(tmp)
    said = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (tmp, s.folder)]
    assert said[0] == said[1]


def excludes(s: Subject, tmp) -> None:
    """A layer that is excluded stays the Linear it is in 16 bit, also saved and loaded."""
    (name, *others), plain = layers(s.load()), s.load(s.plain)
    model = s.fresh(exclude=[name])
    assert set(layers(model)) == set(others)
    assert torch.equal(model.get_submodule(name).weight, plain.get_submodule(name).weight)
    model.save_pretrained(tmp)
    assert same(state(s.load(tmp)), state(model))


def dequantizes(s: Subject, tmp) -> None:
    """`dequantize` leaves a plain model, saved as one."""
    model = s.load()
    model.dequantize()
    assert not layers(model) and state(model).keys() == state(s.load(s.plain)).keys()
    got, want = s.output(model).float(), s.wanted().float()
    assert (got - want).norm() < 0.02 * want.norm()
    model.save_pretrained(tmp)
    assert not layers(s.load(tmp)) and torch.equal(s.output(s.load(tmp)), s.output(model))


def copies(s: Subject, tmp) -> None:
    """A deep copy, and a model that takes the state of another, compute the same."""
    model = s.load()
    twin = copy.deepcopy(model)
    assert same(state(twin), state(model)) and torch.equal(s.output(twin), s.wanted())
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(s.output(model), s.wanted())
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(s.output(twin), s.wanted())


def counts(s: Subject, tmp) -> None:
    """`num_parameters` counts what the 16-bit model has; the footprint is the bytes of its tensors."""
    model, plain = s.load(), s.load(s.plain)
    for how in ({}, {"exclude_embeddings": True}):
        assert model.num_parameters(**how) == plain.num_parameters(**how)
    codes = sum(raw(p).numel() for layer in layers(model).values() for p in layer.parameters())
    in_16_bit = sum(raw(p).numel() for name in layers(model) for p in plain.get_submodule(name).parameters())
    assert plain.get_memory_footprint() - model.get_memory_footprint() == in_16_bit - codes


def casts(s: Subject, tmp) -> None:
    """A cast of the model to another dtype is refused, and nothing is cast."""
    model = s.load()
    for cast in CASTS:
        with refused(model, r"(?i)cast", s.output):
            cast(model)
        if s.in_16_bit:
            model = s.load()
    with untouched(model, s.output):
        model.to("cpu").cpu().train().eval()


def adapters(s: Subject, tmp) -> None:
    """transformers' own adapters: added, chosen, disabled, enabled, saved, loaded and deleted."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError as refusal:
        pytest.skip(f"transformers {transformers.__version__} with peft {peft.__version__}: {refusal}")
    model = s.load()
    for name in ("a", "b"):
        add(model, name)
        model.set_adapter(name)
        if name == "a":
            with_a = s.output(model)
    assert model.active_adapters() == ["b"] and not torch.equal(s.output(model), with_a)
    model.set_adapter("a")
    assert torch.equal(s.output(model), with_a)
    model.save_pretrained(tmp)
    assert (tmp / "adapter_model.safetensors").exists()
    model.disable_adapters()
    assert torch.equal(s.output(model), s.wanted())
    model.enable_adapters()
    model.set_adapter("a")
    assert torch.equal(s.output(model), with_a)
    other = s.load()
    other.load_adapter(tmp)
    assert torch.equal(s.output(other), with_a)


def trains(s: Subject, tmp) -> None:
    """An adapter of PEFT has the same gradients with and without checkpointing, and a step changes it alone."""
    model = peft.get_peft_model(s.load(), config(s))
    before, gradients = state(model), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        model.train()
        model.zero_grad()
        torch.manual_seed(0)  # dropout
        hidden(model).float().square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0] and all(".lora_" in name for name in gradients[0])
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name][2], after[name][2])}
    assert changed and changed <= gradients[0].keys()
    assert same(state(model.unload()), state(s.load()))


def generates(s: Subject, tmp) -> None:
    """A language model generates, greedily the same tokens twice; what cannot in 16 bit cannot."""
    model, plain = s.load(), s.load(s.plain)
    assert model.can_generate() == plain.can_generate()
    if model.can_generate():
        how = {"input_ids": IDS, "max_new_tokens": 3, "do_sample": False}
        tokens = model.generate(**how)
        assert tokens.shape[0] == 2 and tokens.shape == plain.generate(**how).shape
        assert torch.equal(model.generate(**how), tokens)


def resizes(s: Subject, tmp) -> None:
    """The table of tokens grows as in 16 bit, and what was there computes as before."""
    model, plain = s.load(), s.load(s.plain)
    size = model.get_input_embeddings().weight.shape[0] + 8
    grow = {"new_num_tokens": size, "mean_resizing": False}
    if alike(lambda: model.resize_token_embeddings(**grow), lambda: plain.resize_token_embeddings(**grow)):
        assert model.get_input_embeddings().weight.shape[0] == size
        assert torch.equal(s.output(model), s.wanted())


def attention(s: Subject, tmp) -> None:
    """Attention in other implementations computes as near to 16 bit, or is refused as there."""
    for name in ("eager", "sdpa"):
        load = functools.partial(s.load, attn_implementation=name)
        if alike(load, functools.partial(load, s.plain)):
            got, want = s.output(load()).float(), s.output(load(s.plain)).float()
            assert (got - want).norm() <= (0 if s.in_16_bit else 0.3) * want.norm()


def config(s: Subject) -> peft.LoraConfig:
    targets = "q|q_proj"
    return peft.LoraConfig(r=4, lora_alpha=4, target_modules=rf".*\.({targets})", init_lora_weights=False)


def add(model: nn.Module, name: str) -> None:
    torch.manual_seed(ord(name))
    model.add_adapter(config(model), name)


TRANSFORMERS = [
    repeats, dtypes, saved, auto_classes, device_maps, hooks, copies, counts, casts, adapters, trains, generates,
    resizes, attention,
]  # fmt: skip
QUANTIZED = [flags, excludes, dequantizes]


def cases() -> Iterator:
    for subject in SUBJECTS:
        for check in TRANSFORMERS + (QUANTIZED if subject[1] != SIXTEEN_BIT else []):
            yield marked(subject, check, SAMPLE)


@pytest.mark.often(1)
@pytest.mark.parametrize(("subject", "check"), cases())
def test_it_does_what_the_library_s_models_do(subject, check, subjects, tmp_path):
    check(subjects(*subject), tmp_path)
