"""`fluxq.optimize(pipe, graphs=True)`: what its parts do together, and `restore` takes out again."""

import copy
from types import SimpleNamespace

import pytest
import torch
from recorder import ADAPTED, Recorder, assert_plain, latents, offloaded
from torch import nn

import fluxq
from fluxq.kernels.linear import quant_layers
from fluxq.runtime import graphs
from fluxq.runtime.modulation import hoist_modulation

pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8", "16 bit"])
def test_optimize_with_graphs_does_all_of_it_and_restore_takes_it_out(quantized, recipe):
    pipe, plain = quantized(recipe), quantized(recipe)
    if recipe != "16 bit":
        fluxq.prepare(plain)
    want = latents(plain)
    fluxq.optimize(plain)
    with hoist_modulation(plain):
        hoisted = latents(plain)
    parts = fluxq.optimize(pipe, graphs=True)
    rows = {row.part: row for row in parts if row.part in ("modulation", "step")}
    assert rows["step"].fused == "CUDA graphs" and rows["step"].block == "transformer"
    assert len(rows["modulation"].layers) == 7 and not rows["modulation"].why_not
    assert torch.equal(latents(pipe), hoisted)
    step = graphs.step_of(pipe.transformer)
    assert step is not None and step.captures == 1
    fluxq.optimize(pipe, graphs=True)  # decides anew
    assert torch.equal(latents(pipe), hoisted) and graphs.step_of(pipe.transformer) is not step
    assert fluxq.restore(pipe) == 5
    assert torch.equal(latents(pipe), want)
    assert graphs.step_of(pipe.transformer) is None and graphs.hoisted_in(pipe.transformer.modules()) is None
    assert not any("forward" in vars(module) for module in pipe.transformer.modules())


def test_restore_leaves_what_users_captured_and_hoisted_themselves(flux):
    with hoist_modulation(flux) as hoisted:
        fluxq.optimize(flux, graphs=True)
        fluxq.restore(flux)
        assert hoisted.on and graphs.step_of(flux.transformer) is None
        with fluxq.capture(flux):
            with pytest.raises(ValueError, match="captured already"):
                fluxq.optimize(flux, graphs=True)
            fluxq.optimize(flux)
            fluxq.restore(flux)
            assert graphs.step_of(flux.transformer) is not None


def test_optimize_with_graphs_refuses_before_it_changes_anything(quantized, monkeypatch):
    pipe = quantized("int8")
    monkeypatch.setattr(Recorder, "kind", "cuda")
    with pytest.raises(ValueError, match=r"graphs need a CUDA device: pipe.to\('cuda'\) first"):
        fluxq.optimize(pipe, graphs=True)
    assert fluxq.restore(pipe) == 0 and not any(layer.prepared for _, layer in quant_layers(pipe.transformer))


def hooked(pipe) -> None:
    pipe.transformer.proj_out.register_forward_hook(lambda *_: None)


def hooked_elsewhere(pipe) -> SimpleNamespace:
    """A pipeline with a second denoiser, which has no fused form."""
    other = nn.Sequential(nn.Linear(4, 4))
    other[0].register_forward_hook(lambda *_: None)
    parts = pipe.components | {"transformer_2": other}
    return SimpleNamespace(**parts, components=parts)


def without_a_block_to_fuse(pipe) -> None:
    for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
        block.attn.fused_projections = True


@pytest.mark.often(3)
@pytest.mark.parametrize("done", [hooked, hooked_elsewhere, without_a_block_to_fuse], ids=lambda done: done.__name__)
@pytest.mark.parametrize("before", [False, True])
def test_a_refusal_takes_out_no_graphs_and_prepares_nothing(quantized, done, before):
    pipe = quantized("nvfp4")
    if before:
        fluxq.optimize(pipe, graphs=True)
    parts = lambda: (graphs.step_of(pipe.transformer), graphs.hoisted_in(pipe.transformer.modules()))  # noqa: E731
    was = parts()
    changed = done(pipe) or pipe
    with pytest.raises(ValueError, match=r"cannot be a CUDA graph|no block"):
        fluxq.optimize(changed, graphs=True)
    assert parts() == was and (was[0] is not None) == before
    assert any(layer.prepared for _, layer in quant_layers(pipe.transformer)) == before
    assert fluxq.restore(pipe) == (5 if before else 0)


@pytest.mark.parametrize("prefer", ["speed", "decoded"])
def test_what_is_prepared_in_part_is_prepared_in_full(quantized, prefer):
    pipe, whole = quantized("nvfp4"), quantized("nvfp4")
    fluxq.prepare(pipe.transformer.transformer_blocks[0], prefer=prefer, device="cpu")
    fluxq.prepare(whole, prefer=prefer)
    fluxq.optimize(pipe, graphs=True)
    kinds = lambda pipe: [layer.prepared and layer.prepared.kind for _, layer in quant_layers(pipe.transformer)]  # noqa: E731
    assert kinds(pipe) == kinds(whole) and any(kinds(pipe))


def test_a_transformer_by_itself_has_graphs_and_says_that_its_steps_are_not_known(flux):
    parts = fluxq.optimize(flux.transformer, graphs=True)
    why = next(row.why_not for row in parts if row.part == "modulation")
    assert "whose scheduler knows the steps" in why
    assert_plain(flux.transformer)
    copied = copy.deepcopy(flux.transformer)
    assert fluxq.restore(copied) == 5 and graphs.step_of(flux.transformer) is not None


@pytest.mark.slow
def test_saved_with_graphs_and_copied_it_is_what_it_was(quantized, tmp_path):
    pipe = quantized("int8")
    pipe.transformer.save_pretrained(tmp_path / "before")
    fluxq.optimize(pipe, graphs=True)
    want = latents(pipe)
    pipe.transformer.save_pretrained(tmp_path / "after")
    names = sorted(file.name for file in (tmp_path / "before").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "after").iterdir())
    assert all((tmp_path / "after" / n).read_bytes() == (tmp_path / "before" / n).read_bytes() for n in names)
    fluxq.restore(copy.deepcopy(pipe.transformer))
    assert torch.equal(latents(pipe), want) and graphs.hoisted_in(pipe.transformer.modules()) is not None


@pytest.mark.slow
def test_adapters_and_offload_after_optimize_with_graphs(quantized, lora_file, caplog):
    pipe, plain = quantized("int8"), quantized("int8")
    fluxq.prepare(plain)
    style = lora_file("l.safetensors", ADAPTED)
    images = []
    for each in (plain, pipe):
        if each is pipe:
            fluxq.optimize(pipe, graphs=True)
        else:
            fluxq.optimize(plain)
            hoist_modulation(plain)
        made = [latents(each)]
        each.load_lora_weights(style)
        made.append(latents(each))
        offloaded(each)
        made.append(latents(each))
        images.append(made)
    assert all(map(torch.equal, *images)) and not torch.equal(images[0][0], images[0][1])
    assert caplog.text.count("accelerate moves its weights between calls") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["16 bit", "fp8", "nvfp4"])
def test_on_a_gpu_images_are_those_without_graphs(quantized, recipe):
    pipe, plain = quantized(recipe).to("cuda"), quantized(recipe).to("cuda")
    if recipe != "16 bit":
        fluxq.prepare(plain)
    calls = [{}, {"height": 32}, {"prompt": ["a red circle", "a star"]}, {}]
    alone = latents(plain)
    fluxq.optimize(plain)
    with hoist_modulation(plain):
        want = [latents(plain, **call) for call in calls]
    fluxq.optimize(pipe, graphs=True)
    for call, image in zip(calls, want, strict=True):
        assert torch.equal(latents(pipe, **call), image), call
    step = graphs.step_of(pipe.transformer)
    assert step is not None and step.captures == 3
    fluxq.restore(pipe)
    assert torch.equal(latents(pipe), alone)
