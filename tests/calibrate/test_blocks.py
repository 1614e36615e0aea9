"""Captured calls, and their replay block by block, against an ordinary forward of the whole model: to the bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from tiny_configs import TINY_CONFIGS
from torch import Tensor, nn

from fluxq import tiny
from fluxq.calibrate import calls as calls_module
from fluxq.calibrate.blocks import Replay, block_names
from fluxq.calibrate.calls import Calls, capture_calls
from fluxq.calibrate.capture import Sampling
from fluxq.calibrate.sensitivity import noise_level_weights
from fluxq.calibrate.stand_ins import replaced_forwards
from fluxq.kernels.linear import linears_of
from fluxq.recipes.all_families import FAMILIES

TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]
CALL = {**tiny.CALL_KWARGS, "num_inference_steps": 4}
FIT = [(prompt, 100 + i) for i, prompt in enumerate(tiny.PROMPTS[:5])]
HELD = [(prompt, 200 + i) for i, prompt in enumerate(tiny.PROMPTS[5:8])]


class Pipe:
    """As much of a pipeline as capture sees: `branches` calls of a transformer at each step, as guidance makes them.

    switch: from this step on, `transformer_2` is called instead.
    """

    def __init__(self, models: list[nn.Module], inputs: dict, branches: int = 1, switch: int | None = None) -> None:
        self.transformer, self.transformer_2 = models[0], models[-1]
        self.inputs, self.branches, self.switch = inputs, branches, switch
        self.scheduler = SimpleNamespace(config={}, sigmas=torch.linspace(1, 0, 5))
        self.runs = 0

    def __call__(self, *, prompt, generator, output_type, callback_on_step_end, num_inference_steps):
        self.runs += 1
        latents = torch.randn(len(prompt), generator=generator[0])
        for step in range(num_inference_steps):
            model = self.transformer if self.switch is None or step < self.switch else self.transformer_2
            for branch in range(self.branches):
                model(**{name: self.vary(x, latents[0] + step, branch) for name, x in self.inputs.items()})
            callback_on_step_end(self, step, None, {"latents": latents})

    @staticmethod
    def vary(value, by: Tensor, branch: int):
        if isinstance(value, list):
            return [Pipe.vary(item, by, branch) for item in value]
        if not isinstance(value, Tensor) or value.ndim < 2 or not value.is_floating_point():
            return value
        return (value + 0.1 * by + branch).to(torch.bfloat16)


class Watch:
    """Every input of a model's Linears inside blocks, in the order of calls, while it is on."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        self.seen: dict[str, list[Tensor]] = {}
        inside = {n: m for n, m in linears_of(model).items() if any(n.startswith(f"{block}.") for block in blocks)}
        self.handles = [layer.register_forward_pre_hook(self.hook(name)) for name, layer in inside.items()]

    def hook(self, name: str):
        return lambda _module, args: self.seen.setdefault(name, []).append(args[0].clone())

    def __enter__(self):
        return self.seen

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        len(a[name]) == len(b[name]) and all(map(torch.equal, a[name], b[name])) for name in a
    )


def captured(pipe, folder: Path, blocks: dict, **how) -> dict[str, Calls]:
    how = {"steps": 4, "digests": dict.fromkeys(blocks, "m"), "folder": folder, "batch_size": 5, **how}
    call = how.pop("call", {"num_inference_steps": 4})
    sampling = Sampling(call, how.pop("steps"), how.pop("digests"), how.pop("batch_size", None))
    return capture_calls(pipe, blocks, FIT, HELD, sampling, **how)


def beside(calls: Calls) -> Path:
    """A folder for the outputs of blocks."""
    return calls.calls[0].file.parent / "outputs"


def run_all(replay: Replay) -> None:
    """One pass through every block, the last one too, which has nothing to advance for."""
    for block in replay:
        path = next(iter(linears_of(block.module)))
        block.observe({block.name: f"{block.name}.{path}"}, advance=True)


@pytest.mark.often(1)
@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
def test_a_block_sees_in_replay_what_it_sees_in_the_whole_model(row, family_inputs, tmp_path):
    """With outputs of blocks in memory, and with outputs on disk."""
    torch.manual_seed(0)
    model = getattr(diffusers, row.model).from_config(TINY_CONFIGS[row.name]).to(torch.bfloat16)
    blocks = block_names(row, model)
    with Watch(model, blocks) as seen:
        pipe = Pipe([model], family_inputs(row), branches=2)
        calls = captured(pipe, tmp_path / "calls", {"transformer": blocks})["transformer"]
    assert calls.counts == (8, 8)
    assert set(calls.blocks) == set(blocks) and len(seen) > 10
    replay = Replay(model, calls, tmp_path / "outputs")
    with Watch(model, blocks) as again:
        run_all(replay)
    assert same(seen, again)


@pytest.fixture(scope="module")
def embedded(pipe, tmp_path_factory):
    """Calls of the embedded pipeline, five images at once, and what its Linears saw."""
    blocks = block_names(FAMILIES["flux"], pipe.transformer)
    with Watch(pipe.transformer, blocks) as seen:
        made = captured(pipe, tmp_path_factory.mktemp("calls"), {"transformer": blocks}, call=CALL)
    return pipe.transformer, made["transformer"], seen


def test_blocks_are_in_the_order_in_which_they_run(embedded):
    model, calls, _ = embedded
    assert calls.blocks == ("transformer_blocks.0", *(f"single_transformer_blocks.{i}" for i in range(4)))
    assert calls.blocks == block_names(FAMILIES["flux"], model)


def test_several_images_in_a_call_are_replayed_to_the_bit(embedded):
    model, calls, seen = embedded
    with Watch(model, calls.blocks) as again:
        run_all(Replay(model, calls, beside(calls)))
    assert same(seen, again)


def groups_of(model: nn.Module, block: str) -> dict[str, str]:
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(f"{block}.")]
    return {f"input of {name}": name for name in linears if "norm" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
def test_observed_are_the_tokens_of_the_calls(embedded, parallel):
    model, calls, seen = embedded
    weights = {step: 1.0 + step for step in range(4)}
    again = None
    for block in Replay(model, calls, beside(calls), weights=weights):
        if again is not None:
            with pytest.raises(ValueError, match="its tokens cannot be had again, the replay has gone on"):
                next(again())
        groups = groups_of(model, block.name)
        made = block.observe(groups, advance=parallel, without_gram=list(groups)[:1])
        for group, path in groups.items():
            per_call = list(zip(calls.calls, seen[path], strict=True))
            fit = [(x.flatten(0, -2), weights[call.step]) for call, x in per_call if not call.held_out]
            tokens = torch.cat([x for x, _ in fit]).double()
            w = torch.cat([torch.full((len(x),), weight) for x, weight in fit]).double()
            assert made[group].count == len(tokens)
            everything = torch.cat([x.flatten(0, -2) for x in seen[path]])
            assert torch.equal(made[group].amax, everything.abs().amax(0).float())
            torch.testing.assert_close(
                made[group].mean.double(), (tokens * w[:, None]).sum(0) / w.sum(), rtol=1e-5, atol=1e-6
            )
            if group == next(iter(groups)):
                assert made[group].grams == ()
            else:
                want = (tokens * w[:, None]).T @ tokens / w.sum()
                assert (made[group].grams[0] - want).norm() < 1e-6 * want.norm()
            again = made[group].tokens
            assert again is not None
            for (x, weight), (wanted, wanted_weight) in zip(again(), fit, strict=True):
                assert torch.equal(x, wanted) and weight == wanted_weight
        if not parallel:
            block.advance()


@pytest.mark.parametrize("parallel", [False, True])
def test_later_blocks_see_what_a_changed_block_returns(embedded, parallel):
    """Sequential replay equals a forward of the changed model; after `advance=True` a change comes too late."""
    model, calls, seen = embedded
    between = calls.blocks[2:-1]  # behind the change; the last block has nothing to advance for
    layer = model.single_transformer_blocks[0].proj_out
    kept = layer.weight.data.clone()
    try:
        with Watch(model, between) as again:
            for block in Replay(model, calls, beside(calls)):
                block.observe({}, advance=parallel)
                if block.index == 1:
                    layer.weight.data.mul_(1.1)
                if not parallel:
                    block.advance()
        with Watch(model, between) as changed, torch.no_grad():
            for call in calls.calls:
                args, kwargs = call.load(torch.device("cpu"))
                model(*args, **kwargs)
    finally:
        layer.weight.data.copy_(kept)
    unchanged = {name: seen[name] for name in changed}
    assert same(again, unchanged if parallel else changed) and not same(changed, unchanged)


def test_a_block_left_without_advance_is_named(embedded):
    model, calls, _ = embedded
    with pytest.raises(ValueError, match=r"^transformer_blocks\.0: was not advanced"):
        for _ in Replay(model, calls, beside(calls)):
            pass


def test_nothing_is_left_in_the_model(embedded):
    model, calls, _ = embedded
    for block in Replay(model, calls, beside(calls)):
        block.observe(groups_of(model, block.name), advance=True)
    for module in model.modules():
        assert "forward" not in module.__dict__ and not module._forward_pre_hooks and not module._forward_hooks


def test_a_forward_of_the_instance_comes_back():
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    layer.forward = own = lambda x: x
    with pytest.raises(KeyError), replaced_forwards({layer: lambda x: x + 1, other: lambda x: x}):
        assert layer(torch.zeros(1)) == 1
        raise KeyError
    assert layer.__dict__["forward"] is own and "forward" not in other.__dict__


def test_nan_in_a_block_is_named_with_group_and_step(embedded):
    model, calls, _ = embedded
    layer = model.transformer_blocks[0].norm1.linear
    kept = layer.bias.data.clone()
    layer.bias.data[0] = torch.nan
    try:
        block = next(iter(Replay(model, calls, beside(calls))))
        with pytest.raises(ValueError, match=r"^q: its input holds NaN or infinity at step 0$"):
            block.observe({"q": "transformer_blocks.0.attn.to_q"})
    finally:
        layer.bias.data.copy_(kept)


# Resuming


def resumable(replay):
    return max(index for index in range(len(replay.blocks)) if replay.can_start(index))


def test_replay_goes_on_where_it_was_stopped(embedded, tmp_path):
    model, calls, seen = embedded
    for block in Replay(model, calls, tmp_path, digest="recipe"):
        if block.index == 3:
            break
        block.advance()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block-002"]  # only what is still needed
    replay = Replay(model, calls, tmp_path, digest="recipe")
    assert resumable(replay) == 3
    replay.skip_to(3)
    with Watch(model, calls.blocks) as again:
        run_all(replay)
    assert same(again, {name: xs for name, xs in seen.items() if name.startswith(calls.blocks[3:])})
    assert len(again) > 5


def test_outputs_of_another_job_or_an_unfinished_block_are_not_used(embedded, tmp_path):
    model, calls, _ = embedded
    for block in Replay(model, calls, tmp_path, digest="recipe"):
        block.advance()
        if block.index == 1:
            break
    for other, index in (("other", 2), ("recipe", 4)):
        replay = Replay(model, calls, tmp_path, digest=other)
        with pytest.raises(ValueError, match="its outputs are not there, or another job's"):
            replay.skip_to(index)
    assert resumable(Replay(model, calls, tmp_path, digest="other")) == 0
    assert resumable(Replay(model, calls, tmp_path, digest="recipe")) == 2
    (tmp_path / "block-001" / "done.json").unlink()  # as a crash in the middle of its pass leaves it
    assert resumable(Replay(model, calls, tmp_path, digest="recipe")) == 1


def test_damaged_outputs_are_not_used(embedded, tmp_path, caplog):
    model, calls, _ = embedded
    for block in Replay(model, calls, tmp_path):
        block.advance()
        if block.index == 1:
            break
    assert resumable(Replay(model, calls, tmp_path)) == 2
    flip(sorted((tmp_path / "block-001").glob("*.safetensors"))[-1])
    assert resumable(Replay(model, calls, tmp_path)) == 1
    assert "damaged since it was written, or of another place: the outputs of this block are made again" in caplog.text


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_the_first_of_several_processes_looks_for_damage(tmp_path, monkeypatch):
    """Another one would look at files that the first makes again meanwhile."""
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8)})
    whole = captured(pipe, tmp_path, {"transformer": ("blocks.0",)})
    another: Any = SimpleNamespace(leads=False, agree=lambda _: [], share=list, meet=lambda: None)
    monkeypatch.setattr(calls_module, "_is_captured", lambda _: pytest.fail("looked at"))
    assert captured(pipe, tmp_path, {"transformer": ("blocks.0",)}, ranks=another) == whole


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_batch_with_a_damaged_call_is_run_again(damage, tmp_path):
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8)})
    captured(pipe, tmp_path, {"transformer": ("blocks.0",)}, batch_size=2)
    content, runs = {path.name: path.read_bytes() for path in tmp_path.iterdir()}, pipe.runs
    damage(tmp_path / "batch-0001-transformer-000.safetensors")
    captured(pipe, tmp_path, {"transformer": ("blocks.0",)}, batch_size=2)
    assert pipe.runs == runs + 1 and {path.name: path.read_bytes() for path in tmp_path.iterdir()} == content


def test_a_capture_is_not_made_twice_and_goes_on_where_it_was_stopped(tmp_path):
    model, blocks = Chain(), ("blocks.0", "blocks.1", "blocks.2")
    pipe = Pipe([model], {"x": torch.randn(1, 8)})
    how = {"folder": tmp_path, "blocks": {"transformer": blocks}, "batch_size": 2, "steps": 2}
    whole = captured(pipe, **how)["transformer"]
    assert pipe.runs == 5 and [call.held_out for call in whole.calls] == [False] * 6 + [True] * 4
    assert captured(pipe, **how)["transformer"] == whole and pipe.runs == 5
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "batch-0002.json").unlink()
    assert captured(pipe, **how)["transformer"] == whole and pipe.runs == 6
    again = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert again == content


@pytest.mark.parametrize("other", [{"steps": 3}, {"digests": {"transformer": "n"}}, {"batch_size": 1}, {"most": 2}])
def test_another_capture_in_the_folder_is_refused(other, tmp_path):
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8)})
    captured(pipe, tmp_path, {"transformer": ("blocks.0",)})
    with pytest.raises(ValueError, match="holds calls of another model, other prompts, steps or arguments; give"):
        captured(pipe, tmp_path, {"transformer": ("blocks.0",)}, **other)


def test_of_many_calls_a_limit_keeps_every_step_as_often(tmp_path):
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8)})
    calls = captured(pipe, tmp_path, {"transformer": ("blocks.0",)}, batch_size=1, most=5)["transformer"]
    fit = [call.step for call in calls.calls if not call.held_out]
    assert len(fit) == 5 and set(fit) == {0, 1, 2, 3} and calls.counts == (5, 3)


def test_two_transformers_have_their_own_calls(tmp_path):
    """As in Wan 2.2: one for the high noise levels, one for the low ones."""
    models = [Chain(), Chain()]
    pipe = Pipe(models, {"x": torch.randn(1, 8)}, branches=2, switch=1)
    blocks = {"transformer": ("blocks.0", "blocks.1"), "transformer_2": ("blocks.0", "blocks.1")}
    calls = captured(pipe, tmp_path, blocks)
    assert [call.step for call in calls["transformer"].calls] == [0, 0] * 2
    assert [call.step for call in calls["transformer_2"].calls] == [1, 1, 2, 2, 3, 3] * 2
    assert calls["transformer"].digest != calls["transformer_2"].digest
    run_all(Replay(models[1], calls["transformer_2"], beside(calls["transformer_2"])))


def test_a_transformer_that_no_step_calls_is_named(tmp_path):
    pipe = Pipe([Chain(), Chain()], {"x": torch.randn(1, 8)}, switch=4)
    with pytest.raises(ValueError, match=r"^transformer_2: was not called at the steps looked at; look at more"):
        captured(pipe, tmp_path, {"transformer": ("blocks.0",), "transformer_2": ("blocks.0",)})


# What lies between blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        x = self.linear(x).tanh()
        return None, x if mask is None else x * mask


class Chain(nn.Module):
    """Refiners whose results meet again, a skip from the first block to the last, and glue that writes in place."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.noise_refiner = nn.ModuleList(Block() for _ in range(2))
        self.text_refiner = nn.ModuleList(Block() for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, text: Tensor | None = None, extra: object = None) -> tuple[Tensor]:
        x = self.embed(x.float())
        text = x.cos() if text is None else text
        for block in self.noise_refiner:
            x = block(x)[1]
        for block in self.text_refiner:
            text = block(text)[1]
        x = torch.cat([x, text])
        skips = []
        for block in self.blocks[:3]:
            _, x = block(x, mask=x.new_ones(8))
            x += 1
            skips.append(x)
        _, x = self.blocks[3](x + skips[0])
        return (self.out(x),)


ALL = (
    *(f"noise_refiner.{i}" for i in range(2)),
    *(f"text_refiner.{i}" for i in range(2)),
    *(f"blocks.{i}" for i in range(4)),
)


def test_every_output_that_a_later_block_needs_is_kept_as_long(tmp_path):
    model = Chain()
    with Watch(model, ALL) as seen:
        pipe = Pipe([model], {"x": torch.randn(3, 8)})
        calls = captured(pipe, tmp_path / "calls", {"transformer": ALL})["transformer"]
    replay = Replay(model, calls, tmp_path / "outputs")
    assert [sorted(needed) for needed in replay.needs] == [[], [0], [], [2], [1, 3], [4], [5], [4, 6]]
    with Watch(model, ALL) as again:
        run_all(replay)
    assert same(seen, again)


def test_a_dependency_that_is_missed_does_not_go_unnoticed(tmp_path):
    calls = captured(Pipe([Chain()], {"x": torch.randn(3, 8)}), tmp_path, {"transformer": ALL})["transformer"]
    replay = Replay(Chain(), calls, beside(calls))
    replay.needs = tuple(frozenset({i - 1} if i else ()) for i in range(len(ALL)))
    with pytest.raises(ValueError, match=r"^blocks.0.linear: its input holds NaN or infinity"):
        for block in replay:
            block.observe({f"{block.name}.linear": f"{block.name}.linear"}, advance=True)


def test_blocks_that_cannot_be_replayed_are_named(tmp_path):
    model = Chain()
    model.never = Block()
    pipe = Pipe([model], {"x": torch.randn(1, 8)})
    with pytest.raises(ValueError, match=r"^never: this block of transformer does not run in every call"):
        captured(pipe, tmp_path / "1", {"transformer": ("blocks.0", "never")})
    model.blocks[2] = model.blocks[1]
    with pytest.raises(ValueError, match=r"^blocks\.1: runs twice in one call of transformer"):
        captured(pipe, tmp_path / "2", {"transformer": ("blocks.1",)})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_argument_that_cannot_be_stored_is_named(tmp_path):
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8), "extra": {"how": [1.5, None, torch.device("cpu")]}})
    with pytest.raises(
        ValueError, match=r"^transformer: .*\['extra'\]\['how'\]\[2\] is a device, which cannot be kept"
    ):
        captured(pipe, tmp_path, {"transformer": ("blocks.0",)})


def test_arguments_come_back_as_they_were(tmp_path):
    """Values of every kind, and tensors with their strides."""
    extra = {"t": (1, "two", None), "l": [True, 2.5], "d": {"e": torch.arange(6).reshape(2, 3).T}, "n": torch.tensor(3)}
    views = torch.randn(4, 8)[::2], torch.randn(1, 8).expand(3, 8), torch.randn(4, 16)[:, 4:12]
    pipe = Pipe([Chain()], {"x": torch.randn(1, 8), "extra": {**extra, "v": views}})
    calls = captured(pipe, tmp_path, {"transformer": ("blocks.0",)})["transformer"]
    _, kwargs = calls.calls[0].load(torch.device("cpu"))
    got = kwargs["extra"]
    assert (got["t"], got["l"]) == (extra["t"], extra["l"]) and got["n"].shape == ()
    for a, b in zip((got["d"]["e"], *got["v"]), (extra["d"]["e"], *views), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype


# Noise levels


def test_noise_levels_are_weighted_alike_each_time(pipe):
    one = noise_level_weights(pipe, ["transformer"], FIT[:4], CALL, (0, 1, 3))
    assert one == noise_level_weights(pipe, ["transformer"], FIT[:4], CALL, (0, 1, 3))
    assert list(one) == [0, 1, 3] and min(one.values()) > 0 and sum(one.values()) == pytest.approx(3)
    assert not any("forward" in module.__dict__ for module in pipe.transformer.modules())


class Euler(Pipe):
    """Steps of given length, v = the transformer's output; nothing else moves the latent."""

    lengths = (0.5, 0.2, 0.25, 0.05)

    def __call__(self, *, prompt, generator, output_type, callback_on_step_end, num_inference_steps):
        latents = torch.stack([torch.randn(8, generator=g) for g in generator])
        for step in range(num_inference_steps):
            v = self.transformer(latents)[0]
            latents = latents + self.lengths[step] * v[: len(latents)]
            callback_on_step_end(self, step, None, {"latents": latents})


class Constant(nn.Module):
    """A velocity that no latent changes: the effect of a step's error is its length squared, exactly."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.calls += 1
        return (torch.ones_like(x),)


def test_without_feedback_a_weight_is_the_square_of_the_step():
    model = Constant()
    weights = noise_level_weights(
        Euler([model], {}), ["transformer"], FIT[:2], {"num_inference_steps": 4}, (0, 1, 2, 3)
    )
    squares = torch.tensor(Euler.lengths).square()
    torch.testing.assert_close(torch.tensor(list(weights.values())), squares / squares.mean(), rtol=1e-4, atol=0)
    assert model.calls == 2 * (4 + 3 + 2 + 1)  # a batch of one megapixel is one image; steps before are not run again


def test_a_step_without_a_transformer_and_latents_that_are_not_finite_are_named():
    pipe = Euler([Constant()], {})
    with pytest.raises(ValueError, match=r"^step 7: no call of transformer"):
        noise_level_weights(pipe, ["transformer"], FIT[:2], {"num_inference_steps": 4}, (0, 7))
    pipe.lengths = (float("nan"),) * 4
    with pytest.raises(ValueError, match="latents of the 16-bit model hold NaN or infinity"):
        noise_level_weights(pipe, ["transformer"], FIT[:2], {"num_inference_steps": 4}, (0,))
