"""A pipeline with a quantized transformer and text encoders does what diffusers' pipelines do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from conformance import FEW, alike, layers, marked, same, state
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from family_pipelines import ltx, qwen_image, sd3, wan, z_image
from peft import LoraConfig, get_peft_model_state_dict
from shared import SIXTEEN_BIT
from torch import Tensor, nn

from fluxq import tiny
from fluxq.recipes.recipe import shipped_recipes

CPU = torch.device("cpu")


def flux() -> tuple[DiffusionPipeline, dict]:
    return tiny.load(), {**tiny.CALL_KWARGS, "num_inference_steps": 2}


MAKERS = {make.__name__: make for make in (flux, sd3, wan, qwen_image, ltx, z_image)}
SUBJECTS = [
    *(("flux", recipe) for recipe in (SIXTEEN_BIT, *shipped_recipes())),
    *((name, recipe) for name in MAKERS if name != "flux" for recipe in FEW),
]
SAMPLE = ("flux", "nvfp4")


class Subject:
    """A family's pipeline under a recipe."""

    def __init__(self, name: str, recipe: str, root: Path) -> None:
        torch.manual_seed(0)
        pipe, self.call = MAKERS[name]()
        self.name, self.recipe = name, recipe
        self.plain, self.folder = root / SIXTEEN_BIT, root / recipe
        pipe.to(torch.bfloat16).save_pretrained(self.plain)
        if recipe != SIXTEEN_BIT:
            self.fresh().save_pretrained(self.folder)

    @property
    def in_16_bit(self) -> bool:
        return self.recipe == SIXTEEN_BIT

    def fresh(self) -> Any:
        """Quantized while it loads."""
        how = {"recipe": self.recipe, "profile": "rtn"}
        parts = [name for name in ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")]
        parts = [name for name in parts if (self.plain / name).exists()]
        config = PipelineQuantizationConfig("fluxq", quant_kwargs=how, components_to_quantize=parts)
        return self.load(self.plain, quantization_config=config)

    def load(self, folder: Path | None = None, **how: Any) -> Any:
        pipe = DiffusionPipeline.from_pretrained(folder or self.folder, **{"dtype": torch.bfloat16, **how})
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def latents(self, pipe: Any, prompt: Any = "a red circle", seeds: tuple[int, ...] = (0,), **how: Any) -> Tensor:
        noise = [torch.Generator().manual_seed(seed) for seed in seeds]
        given = {**self.call, "output_type": "latent", "prompt": prompt, **how}
        made = pipe(generator=noise if len(noise) > 1 else noise[0], **given)[0]
        return made if isinstance(made, Tensor) else torch.stack(list(made))

    def wanted(self) -> Tensor:
        """The latents of a plain load, computed once."""
        if not hasattr(self, "_wanted"):
            self._wanted = self.latents(self.load())
        return self._wanted


def models(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    made: dict[tuple[str, str], Subject] = {}

    def of(name: str, recipe: str) -> Subject:
        if (name, recipe) not in made:
            made.clear()  # tests come subject by subject
            made[name, recipe] = Subject(name, recipe, tmp_path_factory.mktemp(name))
        return made[name, recipe]

    return of


def repeats(s: Subject, tmp) -> None:
    """Two calls and two loads make the same latents, as near to 16 bit as the format is."""
    pipe = s.load()
    assert torch.equal(s.latents(pipe), s.wanted()) and torch.equal(s.latents(pipe), s.wanted())
    assert torch.isfinite(s.wanted().float()).all()
    got, want = s.wanted().float(), s.latents(s.load(s.plain)).float()
    assert (got - want).norm() <= (0 if s.in_16_bit else 0.5) * want.norm()
    if not s.in_16_bit:
        assert layers(pipe.transformer) and layers(pipe.text_encoder)
        assert torch.equal(s.latents(s.fresh()), s.wanted())


def saved(s: Subject, tmp) -> None:
    """Saved as a variant in shards, with a component that is not there: the same latents."""
    pipe = s.load()
    absent = [name for name in pipe._optional_components if getattr(pipe, name, None) is None]
    pipe.save_pretrained(tmp, variant="q", max_shard_size="300KB")
    again = s.load(tmp, variant="q")
    assert torch.equal(s.latents(again), s.wanted())
    assert all(getattr(again, name) is None for name in absent)
    for name, part in models(pipe).items():
        assert same(state(part), state(models(again)[name])), name


def parts(s: Subject, tmp) -> None:
    """Built of loaded components, or loaded around one of them, it makes the same latents."""
    pipe = s.load()
    assert torch.equal(s.latents(quiet(type(pipe)(**pipe.components))), s.wanted())
    assert torch.equal(s.latents(s.load(transformer=pipe.transformer)), s.wanted())


def batches(s: Subject, tmp) -> None:
    """Of several prompts each makes what it makes alone, up to rounding, and several images come of one."""
    pipe, prompts = s.load(dtype=torch.float32), ["a red circle", "a blue square"]
    both = s.latents(pipe, prompts, (0, 1))
    alone = torch.cat([s.latents(pipe, prompt, (seed,)) for seed, prompt in enumerate(prompts)])
    assert both.shape == alone.shape
    # A sum in another order turns some roundings of activations to 8 or 4 bits the other way.
    assert (both - alone).norm() < (1e-3 if s.in_16_bit else 0.1) * alone.norm()
    name = "num_videos_per_prompt" if s.name in ("wan", "ltx") else "num_images_per_prompt"
    assert len(s.latents(pipe, **{name: 2})) == 2 * len(s.wanted())


def decodes(s: Subject, tmp) -> None:
    """Latents are decoded to tensors, arrays and pictures."""
    pipe = s.load()
    for kind in ("pt", "np", "pil"):
        made = pipe(prompt="a red circle", **{**s.call, "output_type": kind})[0]
        assert len(made) == 1
        if kind == "pt":
            assert torch.isfinite(torch.as_tensor(made[0]).float()).all()


def calls_back(s: Subject, tmp) -> None:
    """A callback sees every step and each tensor that the pipeline offers, changes latents, and interrupts."""
    pipe, seen = s.load(), []

    def watch(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
        seen.append((step, set(tensors)))
        return tensors

    offered = [name for name in pipe._callback_tensor_inputs if name != "image_latents"]
    if not alike(
        lambda: s.latents(pipe, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=offered),
        lambda: s.latents(
            s.load(s.plain), callback_on_step_end=lambda *a: a[3], callback_on_step_end_tensor_inputs=offered
        ),
    ):
        offered = ["latents"]  # a tensor is not there without guidance
    seen.clear()
    got = s.latents(pipe, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=offered)
    assert torch.equal(got, s.wanted()) and seen == [(step, set(offered)) for step in range(pipe.num_timesteps)]

    def clear(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
        last = step == pipe.num_timesteps - 1
        return {"latents": torch.zeros_like(tensors["latents"])} if last else tensors

    assert torch.equal(
        s.latents(pipe, callback_on_step_end=clear), s.latents(s.load(s.plain), callback_on_step_end=clear)
    )

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict) -> dict:
        pipe._interrupt = True
        return tensors

    early = s.latents(pipe, callback_on_step_end=stop)
    assert not torch.equal(early, s.wanted()) and torch.equal(s.latents(pipe), s.wanted())


def takes_embeddings(s: Subject, tmp) -> None:
    """Without text encoders, what they computed before makes the same latents (FLUX.1)."""
    pipe = s.load()
    length = s.call.get("max_sequence_length", 512)
    with torch.no_grad():
        text, pooled, _ = pipe.encode_prompt("a red circle", None, max_sequence_length=length)
    without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    bare = s.load(**without)
    assert torch.equal(s.latents(bare, None, prompt_embeds=text, pooled_prompt_embeds=pooled), s.wanted())
    bare.save_pretrained(tmp)
    again = s.load(tmp, **without)  # FLUX.1 calls none of them optional
    assert torch.equal(s.latents(again, None, prompt_embeds=text, pooled_prompt_embeds=pooled), s.wanted())


def caches(pipe: Any) -> dict[str, Any]:
    calls = {"current_timestep_callback": lambda: pipe.current_timestep}
    return {
        "first block": diffusers.FirstBlockCacheConfig(threshold=10.0),
        "magnitude": diffusers.MagCacheConfig(num_inference_steps=2, mag_ratios=[1.0, 1.0], retention_ratio=0.0),
        "pyramid": diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1000), **calls
        ),
        "faster": diffusers.FasterCacheConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 1001), **calls
        ),
        "Taylor": diffusers.TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, max_order=1),
    }


def keeps_between_steps(s: Subject, tmp) -> None:
    """Every step cache of diffusers works, or fails with the same error as in 16 bit, and is taken away again."""
    if not hasattr(s.load().transformer, "enable_cache"):
        return
    for name in caches(None):

        def cached(folder: Path, name: str = name) -> Tensor:
            pipe = s.load(folder)
            pipe.transformer.enable_cache(caches(pipe)[name])
            s.latents(pipe, num_inference_steps=3)
            pipe.transformer.disable_cache()
            return s.latents(pipe)

        if alike(functools.partial(cached, s.folder), functools.partial(cached, s.plain)):
            assert torch.equal(cached(s.folder), s.wanted()), name


def offloads(s: Subject, tmp) -> None:
    """Models that wait for their turn, and leaves that do, make the same latents."""

    def by_model(pipe: Any) -> None:
        pipe.enable_model_cpu_offload(device="cpu")

    def by_leaf(pipe: Any) -> None:
        pipe.enable_group_offload(CPU, offload_type="leaf_level")

    def by_hook(pipe: Any) -> None:
        for model in models(pipe).values():
            accelerate.cpu_offload(model, CPU, offload_buffers=True)

    for offload in (by_model, by_leaf, by_hook):
        pipe = s.load()
        offload(pipe)
        for _ in range(2):
            assert torch.equal(s.latents(pipe), s.wanted()), offload.__name__


def casts(s: Subject, tmp) -> None:
    """A cast of the whole pipeline, and `from_pipe`, which casts, are refused, and nothing is cast."""
    for cast in (
        lambda pipe: pipe.to(torch.float16),
        lambda pipe: pipe.to("cpu", torch.float32),
        lambda pipe: type(pipe).from_pipe(pipe),
    ):
        refuses(s, cast)
    pipe = s.load()
    assert torch.equal(s.latents(pipe.to("cpu")), s.wanted()) and pipe.dtype == torch.bfloat16


def refuses(s: Subject, cast: Callable[[Any], object]) -> None:
    pipe = s.load()
    if s.in_16_bit:
        cast(pipe)
        return
    before = {name: state(part) for name, part in models(pipe).items()}
    with pytest.raises(ValueError, match=r"(?i)cast"):
        cast(pipe)
    for name, part in models(pipe).items():
        assert same(state(part), before[name]), f"{name} changed"
    assert torch.equal(s.latents(pipe), s.wanted())


def adapters(s: Subject, tmp) -> None:
    """`save_lora_weights` and `load_lora_weights`: the adapter's latents, scaled, fused, and gone without a trace."""
    trained = s.load()
    torch.manual_seed(0)
    targets = {"r": 4, "lora_alpha": 4, "target_modules": ["to_q", "to_k"], "init_lora_weights": False}
    trained.transformer.add_adapter(LoraConfig(**targets))
    want = s.latents(trained)
    type(trained).save_lora_weights(tmp, transformer_lora_layers=get_peft_model_state_dict(trained.transformer))
    pipe = s.load()
    pipe.load_lora_weights(tmp, adapter_name="style", weight_name="pytorch_lora_weights.safetensors")
    assert torch.equal(s.latents(pipe), want) and not torch.equal(want, s.wanted())
    assert pipe.get_active_adapters() == ["style"] and "style" in pipe.get_list_adapters()["transformer"]
    pipe.set_adapters(["style"], [0.0])
    pipe.disable_lora()
    assert torch.equal(s.latents(pipe), s.wanted())
    pipe.enable_lora()
    pipe.set_adapters(["style"], [1.0])
    pipe.fuse_lora(components=["transformer"])
    assert pipe.num_fused_loras == 1
    if not s.in_16_bit:
        assert torch.equal(s.latents(pipe), want) or set(targets["target_modules"]) - leaves(pipe)
    pipe.unfuse_lora(components=["transformer"])
    pipe.unload_lora_weights()
    if not s.in_16_bit:
        assert torch.equal(s.latents(pipe), s.wanted())


def leaves(pipe: Any) -> set[str]:
    return {name.rpartition(".")[2] for name in layers(pipe.transformer)}


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


PIPELINES = [
    repeats, saved, parts, batches, decodes, calls_back, takes_embeddings, keeps_between_steps, offloads, casts,
    adapters,
]  # fmt: skip


QUICK = (repeats, casts, adapters)  # run by default
LONG = (decodes, offloads, keeps_between_steps)  # under a few recipes only


def cases() -> Iterator:
    for subject in SUBJECTS:
        for check in PIPELINES:
            if check is takes_embeddings and subject[0] != "flux":
                continue
            if check not in LONG or subject[1] in FEW:
                yield marked(subject, check, *([SAMPLE] if check in QUICK else []))


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "check"), cases())
def test_it_does_what_the_library_s_pipelines_do(subject, check, subjects, tmp_path):
    check(subjects(*subject), tmp_path)
