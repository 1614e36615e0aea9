"""Split over two processes by tokens, by outputs or by inputs, quantized layers and models compute what one does.

This file is also the program of the two ranks: `python test_shard.py RANK FOLDER RECIPE=CHECKPOINT...` runs
everything in `rank_main` over gloo and writes its results, which the tests compare with this process's own.
"""

import datetime
import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

import diffusers
import forked
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluxq import tiny
from fluxq.kernels import ops
from fluxq.kernels.linear import QuantLinear
from fluxq.kernels.reencode import reencode
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.recipes.formats import FORMATS, Scheme
from fluxq.recipes.recipe import shipped_recipes
from fluxq.runtime.layout import add_row_scale, reencode_layer, swizzle
from fluxq.runtime.shard import ColumnParallel, RowParallel, shard

RANKS = 2
SCHEMES = (
    *(f"{name}-{name}" for name, row in FORMATS.items() if name != "fp8_tensor" and not row.spans_rows),
    "nvfp4-nvfp4-static",
    "fp8_tensor-fp8_tensor-static",
    "fp8_tensor-fp8",
    "int4-16bit",
    "int4_g128-16bit",
    "fp8-16bit",
    "nvfp4-fp8",
    "nvfp4-nvfp4-static-r8",
    "int8-int8-r8",
)
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)
EVERY_RECIPE = pytest.mark.parametrize("recipe", shipped_recipes())
ROTATED = ("nvfp4-max", "mxfp4-max")  # in blocks of 128, as wide as the embedded layers, so that K cannot be cut there
HOW = [
    (recipe, how)
    for recipe in shipped_recipes()
    for how in ("context parallel", "tensor parallel")
    if how == "context parallel" or recipe not in ROTATED
]
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
PREPARED = {"row scale": add_row_scale, "re-encoded": reencode_layer}
UP, DOWN = "transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.ff.net.2"  # (N, K): (512, 128), (128, 512)


# Shards, in one process.


@EVERY_SCHEME
@pytest.mark.parametrize("axis", ["N", "K"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_hold_the_same_numbers(scheme, axis, world_size):
    whole = layer(scheme, DOWN, torch.float32)
    shards = [shard(whole, axis, rank, world_size) for rank in range(world_size)]
    dim = 0 if axis == "N" else 1
    weights = [part.quantized_weight.dequantize() for part in shards]
    assert torch.equal(torch.cat(weights, dim), whole.quantized_weight.dequantize())
    assert all(part.scheme == whole.scheme and part.compute_dtype == torch.float32 for part in shards)
    if axis == "N":
        assert torch.equal(torch.cat([part.bias for part in shards]), whole.bias)
    else:
        assert torch.equal(shards[0].bias, whole.bias) and all(part.bias is None for part in shards[1:])
    if whole.scheme.rank:
        a, b = whole.low_rank
        pairs = [part.low_rank for part in shards]
        assert torch.equal(torch.cat([b @ a for a, b in pairs], dim), b @ a)


@pytest.mark.parametrize(("name", "axis", "dim"), [(UP, "N", 0), (DOWN, "K", 1)])
def test_blocks_of_rows_are_cut_at_their_edges(name, axis, dim):
    whole = layer("fp8_128x128-fp8_1x128", name, torch.float32)
    shards = [shard(whole, axis, rank, 2) for rank in range(2)]
    weights = [part.quantized_weight.dequantize() for part in shards]
    assert torch.equal(torch.cat(weights, dim), whole.quantized_weight.dequantize())
    with pytest.raises(ValueError, match=rf"axis {axis} of a fp8_128x128.* 512 does not split over 8 .* of 128"):
        shard(whole, axis, 0, 8)


@EVERY_SCHEME
def test_a_shard_takes_its_share_of_memory_and_none_of_the_layers(scheme):
    whole = layer(scheme, DOWN, torch.bfloat16)
    for axis in ("N", "K"):
        for tensor in shard(whole, axis, 1, 2).parameters():
            assert tensor.is_contiguous()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.data_ptr() not in {held.data_ptr() for held in whole.parameters()}


def test_concatenated_inputs_are_cut_one_by_one():
    """A FLUX single block's proj_out reads [attention, MLP]: a rank's share is its heads and its MLP channels."""
    whole = layer("nvfp4-nvfp4", DOWN, torch.bfloat16)
    part = shard(whole, "K", 1, 2, parts=[128, 384])
    attention, mlp = whole.quantized_weight.dequantize().split([128, 384], dim=1)
    want = torch.cat([attention[:, 64:], mlp[:, 192:]], dim=1)
    assert torch.equal(part.quantized_weight.dequantize(), want)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"axis": "K", "world_size": 16}, r"axis K .*: 512 does not split over 16 ranks in blocks of 64; .* 1024"),
        ({"axis": "N", "world_size": 3}, r"axis N .*: 128 does not split over 3 ranks"),
        ({"axis": "K", "world_size": 2, "parts": [480, 32]}, r"480 does not split over 2 ranks in blocks of 64"),
        ({"axis": "K", "world_size": 2, "parts": [256, 128]}, r"\[256, 128\] do not add up to the 512"),
        ({"axis": "N", "rank": 2, "world_size": 2}, r"rank 2 is not one of 2"),
    ],
    ids=str,
)
def test_a_border_through_a_block_is_refused(how, error):
    whole = layer("int4-int4", DOWN, torch.bfloat16)
    with pytest.raises(ValueError, match=error):
        shard(whole, **{"rank": 0, **how})


def test_blocks_of_the_activations_count_too():
    with pytest.raises(ValueError, match="in blocks of 32"):
        shard(layer("fp8-mxfp8", UP, torch.bfloat16), "K", 0, 8)


def test_a_scale_for_all_tokens_cannot_be_row_parallel():
    part = shard(layer("fp8_tensor-fp8_tensor", DOWN, torch.bfloat16), "K", 0, 2)
    with pytest.raises(ValueError, match="use fp8"):
        RowParallel(part)


@pytest.mark.parametrize("axis", ["N", "K"])
@pytest.mark.parametrize("how", ["swizzled", *PREPARED])
def test_a_prepared_layer_is_not_cut(how, axis):
    whole = layer("nvfp4-nvfp4", DOWN, torch.bfloat16)
    if how == "swizzled":
        swizzle(whole)
    else:
        PREPARED[how](whole, ("int8",))
    with pytest.raises(ValueError, match=r"prepared for one GPU .*: load the model again, shard first, then prepare"):
        shard(whole, axis, 0, 2)


@pytest.mark.parametrize("kind", [ColumnParallel, RowParallel])
def test_gradients_are_refused(kind):
    sharded = kind(shard(layer("fp8-fp8", DOWN, torch.float32), "N", 0, 2))
    with pytest.raises(ValueError, match="no_grad"):
        sharded(torch.zeros(1, 512, requires_grad=True))


@pytest.mark.slow
def test_diffusers_refuses_tensor_parallelism_by_name(checkpoint):
    """Its DTensors know nothing of packed codes; the shards above are the way."""
    model = load(checkpoint("fp8") / "transformer", torch.bfloat16)
    with pytest.raises(ValueError, match="is quantized, which cannot be combined with tensor parallelism"):
        model.enable_parallelism(config=diffusers.TensorParallelConfig(tp_degree=2))


# Two ranks against this process.


@pytest.mark.slow
@EVERY_SCHEME
@BOTH_DTYPES
def test_column_parallel_is_the_whole_layer_bit_for_bit(ranks, scheme, dtype):
    for rank in ranks:
        assert torch.equal(rank[f"column {scheme} {dtype}"], layer(scheme, UP, dtype)(tokens(UP, dtype)))


@pytest.mark.slow
@EVERY_SCHEME
def test_row_parallel_differs_by_the_order_of_one_fp32_sum(ranks, scheme):
    """Of a token's largest output: 2^-20, eight units of fp32's last place (measured: five)."""
    want = layer(scheme, DOWN, torch.float32)(tokens(DOWN, torch.float32))
    got = ranks[0][f"row {scheme} {torch.float32}"]
    assert torch.equal(got, ranks[1][f"row {scheme} {torch.float32}"])
    largest = want.abs().amax(-1, keepdim=True)
    assert ((got - want).abs() <= 2**-20 * largest).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", PREPARED)
def test_row_parallel_shards_may_be_prepared(ranks, how):
    """The same bound as above: they are the weight that every shard was re-encoded to."""
    x = ops.quantize_activation(tokens(DOWN, torch.float32), FORMATS["int8"]).dequantize()
    parts = [prepared_shard(how, rank) for rank in range(RANKS)]
    w = torch.cat([eight_bit_weight(part).dequantize() for part in parts], dim=1)
    want = x @ w.T + parts[0].bias
    largest = want.abs().amax(-1, keepdim=True)
    for rank in ranks:
        assert ((rank[f"prepared {how}"] - want).abs() <= 2**-20 * largest).all()


@pytest.mark.slow
@EVERY_SCHEME
def test_row_parallel_rounds_once(ranks, scheme):
    """16-bit outputs are within one unit of the last place; a low-rank branch, which one process rounds twice, two."""
    want = layer(scheme, DOWN, torch.bfloat16)(tokens(DOWN, torch.bfloat16)).float()
    got = ranks[0][f"row {scheme} {torch.bfloat16}"].float()
    largest = want.abs().amax(-1, keepdim=True)
    bound = 2**-6 * largest if "-r" in scheme else 2**-7 * want.abs() + 2**-20 * largest
    assert ((got - want).abs() <= bound).all()
    if "-r" not in scheme:
        assert (got != want).float().mean() < 0.01


@pytest.mark.slow
@EVERY_SCHEME
def test_a_token_with_nan_spoils_itself_only(ranks, scheme):
    """NaN stands in one rank's half of one token; every output of that token is NaN, no other changes."""
    got, clean = ranks[0][f"nan {scheme}"], ranks[0][f"row {scheme} {torch.float32}"]
    assert got[3].isnan().all()
    assert torch.equal(torch.cat([got[:3], got[4:]]), torch.cat([clean[:3], clean[4:]]))


@pytest.mark.slow
@EVERY_SCHEME
def test_a_sharded_mlp_is_the_mlp(ranks, scheme):
    """Outputs of the first layer stay where they are: one sum over ranks in all."""
    hidden = nn.functional.gelu(layer(scheme, UP, torch.float32)(tokens(UP, torch.float32)), approximate="tanh")
    want = layer(scheme, DOWN, torch.float32)(hidden)
    assert (ranks[0][f"mlp {scheme}"] - want).abs().max() <= 2**-20 * want.abs().max()


@pytest.mark.slow
@EVERY_SCHEME
@BOTH_DTYPES
def test_split_by_tokens_a_layer_is_the_whole_layer_bit_for_bit(ranks, scheme, dtype):
    """Check context parallelism in every layer: scales belong to tokens, so nothing needs to be agreed on."""
    assert torch.equal(ranks[0][f"tokens {scheme} {dtype}"], layer(scheme, UP, dtype)(tokens(UP, dtype)))


@pytest.mark.slow
@pytest.mark.feature("context and tensor parallel, two ranks (up to the order of fp32 sums)")
@pytest.mark.parametrize(("recipe", "how"), HOW)
def test_a_parallel_transformer_computes_alike(ranks, checkpoint, recipe, how, record_property):
    """In fp32 sums in another order move 1e-7, in the 16-bit model too; where that flips a code, up to 5e-3.

    In most of the 16 samples no code flips: they show that nothing else is different.
    """
    record_property("cell", "context" if recipe in ROTATED else "yes")
    want = output(load(checkpoint(recipe) / "transformer", torch.float32))
    for rank in ranks:
        errors = sorted(map(error, rank[f"{how} {recipe} {torch.float32}"], want))
        assert errors[3] < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "how"), HOW)
def test_in_16_bit_a_parallel_transformer_is_as_good(ranks, checkpoint, recipe, how):
    """There the other order moves even the 16-bit model by 6e-3 and codes flip: it is no further from that model."""
    reference = output(load(tiny.path() / "transformer", torch.bfloat16))
    quantized = output(load(checkpoint(recipe) / "transformer", torch.bfloat16))
    got = ranks[0][f"{how} {recipe} {torch.bfloat16}"]
    assert error(got, reference) < 1.25 * error(quantized, reference)


@pytest.mark.slow
@EVERY_RECIPE
def test_a_transformer_of_column_parallel_layers_is_the_transformer_bit_for_bit(ranks, checkpoint, recipe):
    want = output(load(checkpoint(recipe) / "transformer", torch.bfloat16))
    for rank in ranks:
        assert torch.equal(rank[f"gathered {recipe}"], want)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, checkpoint, tested_recipes) -> list[dict[str, Tensor]]:
    """Return the tensors that each rank computed."""
    folder = tmp_path_factory.mktemp("ranks")
    recipes = [f"{recipe}={checkpoint(recipe)}" for recipe in tested_recipes]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = [forked.start(__file__, rank, folder, *recipes, env=environment) for rank in range(RANKS)]
    try:
        said = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * RANKS, said
    return [load_file(folder / f"{rank}.safetensors") for rank in range(RANKS)]


# What a rank does.


@torch.no_grad()
def rank_main(rank: int, folder: Path, checkpoints: dict[str, Path]) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=600))
    results = {}
    for scheme in SCHEMES:
        for dtype in (torch.bfloat16, torch.float32):
            results |= {f"{name} {scheme} {dtype}": y for name, y in sharded_layers(scheme, dtype, rank).items()}
        results |= {f"{name} {scheme}": y for name, y in sharded_mlp(scheme, rank).items()}
    for how in PREPARED:
        mine = tokens(DOWN, torch.float32).chunk(RANKS, -1)[rank]
        results[f"prepared {how}"] = RowParallel(prepared_shard(how, rank))(mine)
    for recipe, checkpoint in checkpoints.items():
        for dtype in (torch.bfloat16, torch.float32):
            for name, parallel in (("context parallel", context_parallel), ("tensor parallel", tensor_parallel)):
                if (recipe, name) not in HOW:
                    continue
                model = load(checkpoint / "transformer", dtype)
                parallel(model, rank)
                results[f"{name} {recipe} {dtype}"] = output(model)
        model = load(checkpoint / "transformer", torch.bfloat16)
        gathered(model, rank)
        results[f"gathered {recipe}"] = output(model)
    dist.destroy_process_group()
    return results


def sharded_layers(scheme: str, dtype: torch.dtype, rank: int) -> dict[str, Tensor]:
    up, down = layer(scheme, UP, dtype), layer(scheme, DOWN, dtype)
    x = tokens(UP, dtype)
    mine = up(x.chunk(RANKS)[rank])
    everyones = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(everyones, mine)
    return {
        "column": ColumnParallel(shard(up, "N", rank, RANKS))(x),
        "row": RowParallel(shard(down, "K", rank, RANKS))(tokens(DOWN, dtype).chunk(RANKS, -1)[rank]),
        "tokens": torch.cat(everyones),
    }


def sharded_mlp(scheme: str, rank: int) -> dict[str, Tensor]:
    up = ColumnParallel(shard(layer(scheme, UP, torch.float32), "N", rank, RANKS), gather=False)
    down = RowParallel(shard(layer(scheme, DOWN, torch.float32), "K", rank, RANKS))
    x = tokens(DOWN, torch.float32)
    x[3, 500] = torch.nan  # in the last rank's half
    return {
        "mlp": down(nn.functional.gelu(up(tokens(UP, torch.float32)), approximate="tanh")),
        "nan": down(x.chunk(RANKS, -1)[rank]),
    }


def context_parallel(model: nn.Module, rank: int) -> None:
    """diffusers' own, over a mesh of CPUs; it asks for the number of accelerators and divides by it."""
    torch.accelerator.device_count = lambda: 1
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=RANKS, mesh=mesh))


def tensor_parallel(model: nn.Module, rank: int) -> None:
    """Every layer of diffusers' plan for the model, as it says; attention then runs on a rank's own heads."""
    for pattern, style in model._tp_plan.items():
        blocks, _, name = pattern.partition(".*.")
        for block in model.get_submodule(blocks):
            whole = block.get_submodule(name)
            assert isinstance(whole, QuantLinear)
            if style == "colwise":
                sharded = ColumnParallel(shard(whole, "N", rank, RANKS), gather=False)
            else:
                n = whole.out_features  # a single block's proj_out reads [attention, MLP]
                parts = () if style == "rowwise" else (n, whole.in_features - n)
                sharded = RowParallel(shard(whole, "K", rank, RANKS, parts))
            block.set_submodule(name, sharded)


def gathered(model: nn.Module, rank: int) -> None:
    """Every quantized layer column parallel: each rank holds half of the codes, and all see whole activations."""
    for name, whole in list(model.named_modules()):
        if isinstance(whole, QuantLinear):
            model.set_submodule(name, ColumnParallel(shard(whole, "N", rank, RANKS)))


# What both sides share.


@functools.cache
def weights() -> dict[str, Tensor]:
    return load_file(tiny.path() / "transformer" / "diffusion_pytorch_model.safetensors")


def layer(scheme: str, name: str, dtype: torch.dtype) -> QuantLinear:
    """A Linear of the embedded model under a scheme, with a low-rank branch if the scheme has a rank."""
    parsed = Scheme.parse(scheme)
    w, bias = weights()[f"{name}.weight"].float(), weights()[f"{name}.bias"].to(dtype)
    input_scale = torch.tensor(0.003) if parsed.static_input else None
    q = QuantizedTensor.quantize(w, parsed.weights)
    made = QuantLinear.from_quantized(q, bias, replace(parsed, rank=0), input_scale)
    if parsed.rank:
        u, s, v = torch.linalg.svd(w - q.dequantize())
        r = parsed.rank
        made.append_low_rank(v[:r], u[:, :r] * s[:r])
    return made


def prepared_shard(how: str, rank: int) -> QuantLinear:
    part = shard(layer("nvfp4-nvfp4-static", DOWN, torch.float32), "K", rank, RANKS)
    PREPARED[how](part, ("int8",))
    return part


def eight_bit_weight(part: QuantLinear) -> QuantizedTensor:
    """Return the weight that a prepared layer multiplies."""
    row_scale = part.stored("weight_row_scale")
    return part.quantized_weight if row_scale is None else reencode(part.quantized_weight, "int8", row_scale)


def tokens(name: str, dtype: torch.dtype) -> Tensor:
    """24 tokens of very different size (24, K), with the outliers of each in one half of the row."""
    k = weights()[f"{name}.weight"].shape[1]
    x = torch.randn(24, k, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 24)[:, None]
    x[::2, 5] *= 20
    x[1::2, -5] *= 20
    return x.to(dtype)


def load(folder: Path, dtype: torch.dtype) -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def output(model: nn.Module) -> Tensor:
    """The velocity of 16 samples of 16 image and 8 text tokens each."""
    noise = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    return model(
        hidden_states=torch.randn(16, 16, 16, generator=noise).to(model.dtype),
        encoder_hidden_states=torch.randn(16, 8, 64, generator=noise).to(model.dtype),
        pooled_projections=torch.randn(16, 64, generator=noise).to(model.dtype),
        timestep=torch.linspace(0.05, 0.95, 16).to(model.dtype),
        img_ids=torch.stack([torch.zeros(16), rows.flatten(), columns.flatten()], dim=1),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]


def error(got: Tensor, want: Tensor) -> float:
    """Root of the relative squared error."""
    return float((got.double() - want.double()).norm() / want.double().norm())


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    checkpoints = dict(argument.split("=", 1) for argument in sys.argv[3:])
    results = rank_main(rank, folder, {recipe: Path(path) for recipe, path in checkpoints.items()})
    save_file(results, folder / f"{rank}.safetensors")
