"""Attention in fp8 as a choice: what it is set on, what stays in 16 bit and says so, and what a checkpoint keeps."""

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from shared import quantization_of
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

import fluxq
from fluxq import FluxqConfig, tiny
from fluxq.base import settings
from fluxq.jobs import making
from fluxq.kernels import tiles
from fluxq.kernels.attention.op import attention_fp8
from fluxq.quantize.structure import attention_of
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.computing import BACKENDS
from fluxq.recipes.family import Family, matches
from fluxq.runtime import attention_choice as choice

TRANSFORMERS = [family for family in FAMILIES.values() if family.kind == "transformer"]
REPLACEABLE = [family for family in TRANSFORMERS if family.self_attention]
FLUX = FAMILIES["flux"]
BACKEND = BACKENDS["fp8"]
RECIPE = "extends: fp8\ncomponents: {transformer: {attention: fp8}}\n"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """The default backend of the process, and what was said already."""
    default = attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]
    choice._say_once.cache_clear()
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(default)  # pyright: ignore[reportArgumentType]
    choice._say_once.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of q that the fp8 op was called with, in diffusers' models."""
    seen: list[tuple[int, ...]] = []

    def op(q: Tensor, k: Tensor, v: Tensor, scale: float | None, codes: str) -> Tensor:
        seen.append(tuple(q.shape))
        return attention_fp8(q, k, v, scale, codes)

    monkeypatch.setattr(choice, "attention_fp8", op)
    return seen


def model_of(family: Family) -> Any:
    torch.manual_seed(0)
    return getattr(diffusers, family.model)(**TINY_CONFIGS[family.name]).eval()


def flux_inputs() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=noise),
        "encoder_hidden_states": torch.randn(1, 5, 64, generator=noise),
        "pooled_projections": torch.randn(1, 64, generator=noise),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(**{name: x.to(dtype) for name, x in flux_inputs().items()})[0]


@pytest.mark.parametrize("family", REPLACEABLE, ids=lambda family: family.name)
def test_self_attention_of_every_family_that_has_it_is_replaced(family: Family, family_inputs, calls) -> None:
    model, arguments = model_of(family), family_inputs(family)
    arguments.pop("encoder_hidden_states_mask", None)  # prompts of one length have none
    names = [name for name, _ in model.named_modules() if any(matches(row, name) for row in family.self_attention)]
    with torch.no_grad():
        before = model(**arguments)[0]
        assert fluxq.set_attention(model, "fp8") == len(names) > 1 and attention_of(model) == "fp8"
        after = model(**arguments)[0]
        assert len(calls) == len(names)
        assert 0 < float((after - before).norm() / before.norm()) < 0.05
        assert fluxq.set_attention(model, "16bit") >= len(names) and attention_of(model) == "16bit"
        assert torch.equal(model(**arguments)[0], before)


def test_int8_is_a_choice_beside_fp8(calls) -> None:
    model = model_of(FLUX)
    before = output(model)
    made = []
    for attention in ("fp8", "int8"):
        assert fluxq.set_attention(model, attention) == 3 and attention_of(model) == attention  # pyright: ignore
        made.append(output(model))
    assert len(calls) == 6 and not torch.equal(*made)
    assert all(0 < float((found - before).norm() / before.norm()) < 0.05 for found in made)
    assert model.transformer_blocks[0].attn.processor._attention_backend is AttentionBackendName(BACKENDS["int8"])
    assert fluxq.set_attention(model, "16bit") >= 3 and torch.equal(output(model), before)


@pytest.mark.parametrize("family", REPLACEABLE, ids=lambda family: family.name)
def test_each_pattern_of_a_family_names_modules_that_ask_the_dispatcher(family: Family) -> None:
    modules = dict(model_of(family).named_modules())
    for pattern in family.self_attention:
        found = [modules[name] for name in modules if matches(pattern, name)]
        assert found and all(hasattr(module.processor, "_attention_backend") for module in found)


def test_modules_that_patterns_name_are_set_and_all_others_are_in_16_bit(calls) -> None:
    model, (first, *others) = model_of(FLUX), ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
    model.set_attn_processor(model.transformer_blocks[0].attn.processor)  # of which all have the same
    before = output(model)
    fluxq.set_attention(model, "int8")
    assert fluxq.set_attention(model, {"fp8": [first]}) == 3 and attention_of(model) == {"fp8": [first]}
    after = output(model)
    assert len(calls) == 1 + 0 and not torch.equal(after, before)
    assert fluxq.set_attention(model, {"fp8": ["**"]}) == 3 and attention_of(model) == "fp8"
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn' matches no self-attention of .*_blocks\.0\.attn'"):
        fluxq.set_attention(model, {"fp8": ["blocks.0.attn"], "int8": others})
    assert attention_of(model) == "fp8"
    assert fluxq.set_attention(model, "16bit") >= 3 and torch.equal(output(model), before)


def test_a_mapping_without_modules_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention: {} names no module; write '16bit'"):
        fluxq.set_attention(model_of(FLUX), {})


@pytest.mark.parametrize("patterns", ["transformer_blocks.0.attn", 3, [3]])
def test_patterns_are_a_list_of_texts(patterns) -> None:
    with pytest.raises(ValueError, match="expected a list of patterns, as in"):
        fluxq.set_attention(model_of(FLUX), {"fp8": patterns})


def test_a_family_whose_attention_nothing_can_replace_is_refused_by_name() -> None:
    model = model_of(FAMILIES["sd3"])
    assert not any(hasattr(getattr(m, "processor", None), "_attention_backend") for m in model.modules())
    with pytest.raises(ValueError, match="not in SD3Transformer2DModel, which goes past diffusers' attention disp"):
        fluxq.set_attention(model, "fp8")
    assert fluxq.set_attention(model, "16bit") == 0


def test_what_cannot_be_chosen_is_said(pipe) -> None:
    with pytest.raises(ValueError, match="attention is 'int4', expected one of 16bit, fp8, int8, sage, flash3"):
        fluxq.set_attention(pipe, "int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="this CLIPTextModel holds no transformer that fluxq knows: Flux"):
        fluxq.set_attention(pipe.text_encoder, "fp8")
    model = model_of(FLUX)

    class Own:
        pass

    model.transformer_blocks[0].attn.processor = Own()
    with pytest.raises(ValueError, match=r"transformer_blocks.0.attn: its Own does not ask diffusers' dispatcher"):
        fluxq.set_attention(model, "fp8")
    assert attention_of(model) == "16bit"  # none of them was set


@pytest.mark.parametrize(("name", "flag"), [("sage", "_CAN_USE_SAGE_ATTN"), ("flash3", "_CAN_USE_FLASH_ATTN_3")])
def test_peers_are_backends_of_diffusers_and_need_their_package(name: str, flag: str, monkeypatch) -> None:
    model = model_of(FLUX)
    monkeypatch.setattr(attention_dispatch, flag, False)
    with pytest.raises(ValueError, match=f"attention '{name}' is that of .*: install it, or choose 'fp8'"):
        fluxq.set_attention(model, name)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(attention_dispatch, flag, True)
    assert fluxq.set_attention(model, name) == 3  # pyright: ignore[reportArgumentType]
    backend = model.transformer_blocks[0].attn.processor._attention_backend
    assert backend is AttentionBackendName(choice.BACKENDS[name]) and attention_of(model) == "16bit"


def test_diffusers_own_methods_choose_it_and_take_it_away() -> None:
    model = model_of(FLUX)
    plain = output(model)
    fluxq.set_attention(model, "fp8")
    chosen = output(model)
    model.set_attention_backend("native")
    assert torch.equal(output(model), plain)
    model.set_attention_backend(BACKEND)
    assert torch.equal(output(model), chosen)
    model.reset_attention_backend()  # diffusers leaves what was set last as the default of the process
    assert torch.equal(output(model), chosen)
    fluxq.set_attention(model, "16bit")
    assert torch.equal(output(model), plain)
    with attention_dispatch.attention_backend(BACKEND):
        assert torch.equal(output(model_of(FLUX)), chosen)


@pytest.mark.slow
def test_the_choice_goes_with_copies_pickles_and_compiled_models() -> None:
    model = model_of(FLUX)
    fluxq.set_attention(model, "fp8")
    chosen = output(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.transformer_blocks[0].attn.processor._attention_backend is AttentionBackendName(BACKEND)
        assert torch.equal(output(twin), chosen)
    torch._dynamo.reset()
    model.single_transformer_blocks = nn.ModuleList()  # fewer blocks to compile
    chosen = output(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(output(compiled), chosen)
    assert fluxq.set_attention(compiled, "16bit") == 1
    plain = output(compiled)
    assert not torch.equal(plain, chosen) and torch.equal(output(model), plain)


def test_optimized_blocks_compute_the_same_bits(plain_checkpoint, calls) -> None:
    model = FluxTransformer2DModel.from_pretrained(plain_checkpoint("fp8"), subfolder="transformer")
    fluxq.set_attention(model, "fp8")
    expected = output(model)
    before = len(calls)
    fluxq.optimize(model)
    assert torch.equal(output(model), expected)
    assert len(calls) == 2 * before == 2 * 5
    fluxq.set_attention(model, "16bit")
    assert not torch.equal(output(model), expected)


def heads(tokens: int, h: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, h, 64, generator=torch.Generator().manual_seed(seed))


Q, K, V = heads(9), heads(9, seed=1), heads(9, seed=2)
IN_16_BIT = {
    "a mask": {"attn_mask": torch.ones(2, 9).bool().index_fill(1, torch.tensor([7, 8]), False)},
    "a causal mask": {"is_causal": True},
    "cross-attention": {"key": heads(5), "value": heads(5, seed=3)},
    "heads that share keys": {"key": heads(9, 1), "value": heads(9, 1, 3), "enable_gqa": True},
    "tensors of torch.float64": {name: x.double() for name, x in {"query": Q, "key": K, "value": V}.items()},
    "a scale of -0.1": {"scale": -0.1},
    "gradients": {"query": Q.clone().requires_grad_()},
}


@pytest.mark.parametrize("case", IN_16_BIT)
def test_what_fp8_is_not_for_is_computed_in_16_bit_and_said_once(case: str, calls, caplog) -> None:
    arguments = {"query": Q, "key": K, "value": V, **IN_16_BIT[case]}
    for _ in range(2):
        found = dispatch_attention_fn(**arguments, backend=AttentionBackendName(BACKEND))
        assert torch.equal(found, dispatch_attention_fn(**arguments, backend=AttentionBackendName.NATIVE))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("fluxq")]
    assert not calls and len(said) == 1
    assert said[0].startswith(f"attention in 16 bit, not fp8: {case.replace('a causal', 'a')}")


def test_dropout_is_computed_in_16_bit(calls) -> None:
    found = dispatch_attention_fn(Q, K, V, dropout_p=1.0, backend=AttentionBackendName(BACKEND))
    assert not calls and not found.any()


def test_the_scale_of_logits_is_passed_on() -> None:
    for scale in (None, 0.5):
        found = dispatch_attention_fn(Q, K, V, scale=scale, backend=AttentionBackendName(BACKEND))
        assert torch.equal(found, attention_fp8(Q, K, V, scale))
        q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
        exact = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        assert float((found - exact).norm() / exact.norm()) < 0.06


def test_a_masked_call_compiles_without_a_break(calls) -> None:
    torch._dynamo.reset()
    mask = torch.ones(2, 1, 1, 9).bool()

    def attend(q: Tensor, mask: Tensor | None) -> Tensor:
        return dispatch_attention_fn(q, K, V, attn_mask=mask, backend=AttentionBackendName.FLUXQ_FP8)  # pyright: ignore

    compiled: Callable[..., Tensor] = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(Q, mask), attend(Q, mask))


CHIPS = {"sm_90": "", "sm_80": "no kernel for heads of 64 elements on sm_80 .*fp8e4nv", "gfx942": "on gfx942 .*no fp8"}


@pytest.mark.parametrize("chip", CHIPS)
def test_a_gpu_without_the_kernel_computes_in_16_bit_unless_fluxq_is_strict(chip: str, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "chip_of", lambda device: chip)
    monkeypatch.setattr(settings, "_set", {})
    cuda = torch.device("cuda", 0)
    _, why = choice._codes("fp8", 64, cuda)
    if chip == "sm_90":
        assert not why and "heads of 96 elements" in choice._codes("fp8", 96, cuda)[1]
    else:
        assert re.search(CHIPS[chip], why)
        torch._dynamo.reset()
        asked: Callable = torch.compile(
            lambda x: x + len(choice._codes("fp8", 64, cuda)[1]), backend="eager", fullgraph=True
        )
        assert asked(torch.zeros(1)) == len(why)
        fluxq.configure(strict=True)
        with pytest.raises(ValueError, match=f"attention in fp8: .*{CHIPS[chip]}.*Strict mode"):
            choice._codes("fp8", 64, cuda)


@pytest.mark.parametrize(("chip", "codes"), [("sm_80", "int8-16bit"), ("sm_86", "int8-16bit"), ("sm_90", "int8")])
def test_int8_takes_values_in_16_bit_where_the_chip_does_not_multiply_fp8(chip: str, codes: str) -> None:
    assert [choice.codes_on("int8", size, chip) for size in (64, 128)] == [(codes, "")] * 2


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The embedded pipeline under RECIPE, as `fluxq quantize` writes it."""
    root = tmp_path_factory.mktemp("written")
    (root / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    options = making.JobOptions(model="tiny", recipe=str(root / "mine.yaml"), output=str(root / "tiny"), check=False)
    making.quantize(making.job_of(options))
    return root / "tiny"


def config_of(folder: Path) -> dict:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config["quantization_config"]


def load(folder: Path) -> FluxPipeline:
    return FluxPipeline.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.slow
def test_a_checkpoint_says_it_and_its_model_computes_it(written: Path, plain_checkpoint, calls) -> None:
    said, plain = config_of(written / "transformer"), config_of(plain_checkpoint("fp8") / "transformer")
    assert said.pop("attention") == "fp8" and said.pop("config_digest") != plain.pop("config_digest")
    assert said == plain
    in_fp8, in_16_bit = (load(folder).transformer for folder in (written, plain_checkpoint("fp8")))
    assert (attention_of(in_fp8), attention_of(in_16_bit)) == ("fp8", "16bit")
    assert not torch.equal(output(in_fp8), output(in_16_bit)) and len(calls) == 5
    fluxq.set_attention(in_16_bit, "fp8")
    assert torch.equal(output(in_fp8), output(in_16_bit))
    card = (written / "README.md").read_text(encoding="utf-8")
    assert "of the transformer are quantized, its self-attention is computed in fp8" in card
    (model,) = making.quantized_components(str(written)).values()
    assert attention_of(model) == "fp8"


@pytest.mark.slow
def test_saving_keeps_the_choice_as_it_is_then(written: Path, tmp_path: Path) -> None:
    pipe = load(written)
    expected = output(pipe.transformer)
    pipe.save_pretrained(tmp_path / "same")
    assert quantization_of(tmp_path / "same" / "transformer") == quantization_of(written / "transformer")
    assert torch.equal(output(load(tmp_path / "same").transformer), expected)
    fluxq.set_attention(pipe, "16bit")
    pipe.save_pretrained(tmp_path / "other")
    assert "attention" not in config_of(tmp_path / "other" / "transformer")
    assert attention_of(load(tmp_path / "other").transformer) == "16bit"


def test_a_checkpoint_says_which_blocks_and_a_copy_of_it_too(plain_checkpoint, tmp_path: Path) -> None:
    """The folder of a plain checkpoint, with the words that `fluxq quantize` writes."""
    path = "single_transformer_blocks.0.attn"
    (tmp_path / "some.yaml").write_text(RECIPE.replace(": fp8}", f": {{fp8: [{path}]}}}}"), encoding="utf-8")
    made = FluxTransformer2DModel.from_pretrained(
        tiny.path(),
        subfolder="transformer",
        quantization_config=FluxqConfig(recipe=str(tmp_path / "some.yaml")),
        dtype=torch.bfloat16,
    )
    made.save_pretrained(tmp_path / "model")
    assert config_of(tmp_path / "model")["attention"] == {"fp8": [path]}
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert attention_of(loaded) == {"fp8": [path]} and torch.equal(output(loaded), output(made))
    fluxq.set_attention(loaded, "16bit")
    assert not torch.equal(output(loaded), output(made))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["attention"] = {"fp4": [path]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"computes attention in \{'fp4'.*unknown to this version"):
        FluxTransformer2DModel.from_pretrained(tmp_path / "model")


def test_quantizing_on_the_fly_sets_it_and_dequantizing_takes_it_back(written: Path) -> None:
    made = FluxTransformer2DModel.from_pretrained(
        tiny.path(),
        subfolder="transformer",
        quantization_config=FluxqConfig(recipe=str(written.parent / "mine.yaml")),
        dtype=torch.bfloat16,
    )
    assert torch.equal(output(made), output(load(written).transformer))
    made.dequantize()
    assert attention_of(made) == "16bit"


def test_plan_and_cost_say_it(written: Path, capsys) -> None:
    from fluxq.commands import show

    options = making.JobOptions(model="tiny", recipe=str(written.parent / "mine.yaml"))
    prepared = making.job_of(options, writes=False)
    show.plan(prepared, making.model_costs(prepared, "h200", "speed", None, 1))
    shown = capsys.readouterr().out
    assert "bits per weight, attention in fp8" in shown and "\nattention: fp8\n" in shown
    assert "efficiency of attention: 0.28 (550 TFLOP/s, our kernel of warps apart, " in shown


SCRIPTS = {
    "diffusers first": "import diffusers.models.attention_dispatch as d, fluxq",
    "fluxq first": "import fluxq; fluxq.set_attention; import diffusers.models.attention_dispatch as d",
    "the module alone": "import fluxq.runtime.attention_choice; import diffusers.models.attention_dispatch as d",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", SCRIPTS)
def test_the_backend_is_there_in_whatever_order_things_are_imported(order: str) -> None:
    code = f"{SCRIPTS[order]}; print(d.AttentionBackendName('{BACKEND}') in d._AttentionBackendRegistry._backends)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.gpu
def test_on_a_gpu_attention_is_what_the_reference_computes_or_16_bit() -> None:
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (Q, K, V))
    found = dispatch_attention_fn(q, k, v, backend=AttentionBackendName(BACKEND))
    if choice._codes("fp8", 64, found.device)[1]:
        assert torch.equal(found, dispatch_attention_fn(q, k, v, backend=AttentionBackendName.NATIVE))
    else:
        expected = attention_fp8(q.cpu(), k.cpu(), v.cpu(), None)
        assert float((found.cpu() - expected).float().norm() / expected.float().norm()) < 1e-2


@pytest.mark.gpu
def test_on_a_gpu_a_checkpoint_makes_the_images_of_the_cpu(written: Path) -> None:
    model = load(written).transformer
    expected = output(model)
    model.to("cuda")
    inputs = {name: x.to("cuda", torch.bfloat16) for name, x in flux_inputs().items()}
    with torch.no_grad():
        found = model(**inputs)[0].cpu()
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.05
