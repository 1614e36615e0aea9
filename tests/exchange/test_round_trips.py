"""Whole checkpoints there and back, native -> X -> native: what comes back byte for byte, and how near the rest is.

What an export may change, and nothing else: means and factors that fold into modulation, side layers that the dialect
has in 16 bit, and tensors that the format's row says it `rounds`. All of that happens once: a second trip of what came
back changes no byte.
"""

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import diffusers
import pytest
import torch
from click.testing import CliRunner
from exchange_files import export
from exchange_readers import rounds
from safetensors.torch import load_file, save_file
from tiny_configs import TINY_CONFIGS
from torch import Tensor

import fluxq
from fluxq import tiny
from fluxq.base.model import ModelFolder, resolve_model
from fluxq.cli import cli
from fluxq.jobs import making
from fluxq.kernels.tensor import QuantizedTensor
from fluxq.kernels.transforms import rotate
from fluxq.quantize.checkpoint import WEIGHTS_NAME, filed_shape, library_of
from fluxq.quantize.exchange.dialects import DIALECTS, WRITERS
from fluxq.quantize.exchange.export import MOST_ADDED, Exported, SideLayers
from fluxq.quantize.exchange.importing import import_model
from fluxq.quantize.exchange.native import NativeComponent
from fluxq.quantize.exchange.nunchaku import GELU_SHIFT
from fluxq.quantize.structure import list_linears
from fluxq.recipes.all_families import FAMILIES, family_of
from fluxq.recipes.computing import QuantizationConfig
from fluxq.recipes.family import Family
from fluxq.recipes.formats import Scheme, find_format
from fluxq.recipes.plan import MODULATION_ROLE
from fluxq.recipes.recipe import shipped_recipes
from tests.exchange.test_layers import same_bytes
from tests.exchange.test_page import found_formats, no_reciprocal

Tensors = dict[str, Tensor]
TINY = Path(tiny.path())
TRANSFORMERS = [row for row in FAMILIES.values() if row.kind == "transformer"]

# Of what a row rounds, in each element. Reciprocals of 16-bit numbers in 16 bit are off by one place at most.
NEAR = {"nunchaku": 2.0**-7, "nunchaku_lite": 2.0**-7, "comfy": 2.0**-7, "compressed_tensors": 2.0**-22}


def tensors_of(folder: Path, component: str = "transformer") -> Tensors:
    return {
        name: t for file in sorted((folder / component).glob("*.safetensors")) for name, t in load_file(file).items()
    }


def source_of(folder: Path, component: str = "transformer", dialect: str = "") -> NativeComponent:
    """A component as an export for the dialect has it: all that folds is folded, but what costs nothing there."""
    stay = {(row.weights, row.activations) for row in DIALECTS[dialect].rows if row.factors_stay} if dialect else set()

    def stays(scheme: Scheme) -> bool:
        return scheme.formats in stay

    return NativeComponent(resolve_model(str(folder)), component, stays)


def there_and_back(folder: Path, dialect: str, work: Path, base: Path = TINY, **how: Any) -> tuple[Exported, Path]:
    """(what the export said, the pipeline that an import of what it wrote makes)."""
    work.mkdir()
    target = work / ("model.safetensors" if WRITERS[dialect].is_file else "model")
    done = export(resolve_model(str(folder)), dialect, target, **how)
    is_pipeline = WRITERS[dialect].is_pipeline
    (report,) = import_model(target, work / "back", None if is_pipeline else base)
    assert report.mended == report.dequantized == {} and not report.notes
    return done, work / "back"


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """Tensors that came, went, or are not the same bytes."""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in both if not same_bytes(before[name], after[name])}


def require_second_trip(back: Path, dialect: str, tmp_path: Path, component: str = "transformer", **how: Any) -> None:
    """Check that what an import made goes through the dialect without a change of any kind."""
    done, again = there_and_back(back, dialect, tmp_path / "second", **how)
    assert not (done.dequantized or done.requantized or done.folded)
    assert not changed(tensors_of(back, component), tensors_of(again, component))
    assert source_of(back, component).schemes == source_of(again, component).schemes


def require_near(before: NativeComponent, after: NativeComponent, name: str, dialect: str) -> None:
    """A layer whose scales or factors were rounded: in each channel, and as the weight that it multiplies x by."""
    pair = [source.layer(name) for source in (before, after)]
    products = [
        layer.tensors.get("weight_scale_2", torch.ones(())).double()
        * layer.tensors.get("pre_quant_scale", torch.ones(layer.shape[1])).double()
        for layer in pair
    ]
    assert (products[1] / products[0] - 1).abs().max() <= NEAR[dialect], name
    a, b = (layer.linear().collapsed()[0].double() for layer in pair)
    assert (a - b).norm() <= 2.0**-8 * a.norm(), name


# --- shipped recipes


ROUND_TRIPS = [
    *(("nvfp4", dialect) for dialect in ("bfl", "modelopt", "comfy", "torchao", "nunchaku_lite")),
    *(("fp8", dialect) for dialect in ("bfl", "modelopt", "torchao")),
    *(("mxfp8", dialect) for dialect in ("modelopt", "comfy", "torchao")),
    *(("int8", dialect) for dialect in ("comfy", "torchao")),
    *(("fp8-comfy", dialect) for dialect in ("comfy", "modelopt", "torchao")),
    ("int4", "nunchaku_lite"),
    *(("mxfp4", dialect) for dialect in ("modelopt", "torchao")),
    *(("int4-svd", dialect) for dialect in ("nunchaku_lite", "nunchaku", "comfy")),
]
QUICK = {("nvfp4", "bfl"), ("nvfp4", "comfy"), ("nvfp4", "nunchaku_lite"), ("mxfp8", "torchao"), ("fp8-comfy", "comfy")}
FITTED = [pair for pair in ROUND_TRIPS if pair[0] not in ("fp8", "fp8-comfy", "mxfp8")]  # which fit nothing
QUICK_FITTED = {("nvfp4", "modelopt"), ("int8", "torchao")}


def slow_but(pairs: Iterable[Any], quick: set[Any]) -> list[Any]:
    return [pytest.param(*pair, marks=[] if pair in quick else pytest.mark.slow) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dialect"), slow_but(ROUND_TRIPS, QUICK))
def test_recipes_rounded_to_nearest_come_back(recipe, dialect, plain_checkpoint, tmp_path) -> None:
    require_recipe_back(plain_checkpoint(recipe), dialect, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dialect"), slow_but(FITTED, QUICK_FITTED))
def test_fitted_recipes_come_back(recipe, dialect, checkpoint, tmp_path) -> None:
    """With the calibrated scales, means and factors that are folded, factors that are not, and low-rank pairs."""
    folder = checkpoint(recipe)
    schemes = source_of(folder).schemes
    assert any(scheme.smooth for scheme in schemes.values())
    assert any(scheme.static_input for scheme in schemes.values()) == (recipe == "nvfp4")
    assert any(scheme.rank for scheme in schemes.values()) == (recipe == "int4-svd")
    require_recipe_back(folder, dialect, tmp_path)


def said_of_export(source: Path, dialect: str, side_layers: SideLayers, work: Path) -> str | None:
    """Return what `inspect --base` and `import --base` find wrong with an export.

    None where the dialect does not take it.
    """
    work.mkdir()
    target = work / ("model.safetensors" if WRITERS[dialect].is_file else "model")
    try:
        export(resolve_model(str(source)), dialect, target, side_layers=side_layers)
    except ValueError as error:
        assert "cannot hold" in str(error) or "has no component" in str(error), error
        return None
    commands = ["inspect", str(target)], ["import", str(target), "-o", str(work / "back")]
    done = [CliRunner().invoke(cli, [*command, "--base", str(TINY), "--quiet"]) for command in commands]
    return "".join(each.output for each in done if each.exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_export_of_a_shipped_recipe_is_found_right_beside_its_base(recipe, checkpoint, tmp_path) -> None:
    pairs = [(dialect, side) for dialect in WRITERS for side in get_args(SideLayers)]
    said = {pair: said_of_export(checkpoint(recipe), *pair, tmp_path / "-".join(pair)) for pair in pairs}
    taken = {pair: words for pair, words in said.items() if words is not None}
    assert not any(taken.values()), taken
    assert bool(taken) == (recipe not in ("nvfp4-max", "mxfp4-max"))  # which no dialect takes


@pytest.mark.slow
def test_modulation_that_was_codes_is_found_right_beside_its_base(checkpoint, tmp_path) -> None:
    assert said_of_export(checkpoint("nvfp4"), "modelopt", "8bit", tmp_path / "export") == ""


@pytest.fixture(scope="module")
def nvfp4_with_rank(tmp_path_factory) -> Path:
    """nvfp4 with factors and a low-rank branch, as nunchaku's files have it."""
    folder = tmp_path_factory.mktemp("ranked")
    (folder / "ranked.yaml").write_text(
        "extends: nvfp4\ncompat: nunchaku\ncalibration: {count: 8, steps: 2}\ngate: {db_per_percent: 0}\n"
        "components: {transformer: {transforms: [smooth], low_rank: {rank: 16, deflate: false}, "
        "modulation: {format: int4, group_size: 64}}}\n"
    )
    asked = making.JobOptions(
        model="tiny", recipe=str(folder / "ranked.yaml"), output=str(folder / "tiny-ranked"), check=False
    )
    making.quantize(making.job_of(asked))
    return folder / "tiny-ranked"


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["nunchaku", "nunchaku_lite", "modelopt"])
def test_nvfp4_with_factors_and_rank_comes_back(dialect, nvfp4_with_rank, tmp_path) -> None:
    held = source_of(nvfp4_with_rank).schemes.values()
    assert {scheme.rank for scheme in held if scheme.weights.name == "nvfp4"} == {16}
    assert any(scheme.smooth and scheme.static_input for scheme in held)
    require_recipe_back(nvfp4_with_rank, dialect, tmp_path)


def require_recipe_back(folder: Path, dialect: str, tmp_path: Path) -> None:
    """Of a shipped recipe's checkpoint: all that the dialect holds came back, the rest as it should, and stays."""
    done, back = there_and_back(folder, dialect, tmp_path / "first")
    source, after = source_of(folder, dialect=dialect), source_of(back, dialect=dialect)
    modulation = {name for name in source.schemes if "norm" in name}
    again = modulation if done.requantized else set[str]()
    codes = source.schemes.keys() - again - (modulation if done.dequantized else set())
    assert len(done.dequantized) + len(done.requantized) in (0, len(modulation))
    assert after.schemes.keys() == codes | again
    require_back(source, after, dialect, codes, again)
    in_file = tensors_of(folder)
    took = done.folded.keys() & codes
    assert done.folded.keys() == source.folds.keys()
    for name in codes - took:  # what no fold touches is what lies in the file
        own = {key: in_file[f"{name}.{key}"] for key in source.layer(name).tensors}
        assert not changed(own, source.layer(name).tensors), name
    for name in took:  # codes stay, rows of the scale and the bias are what `test_export.py` asks of a fold
        assert same_bytes(source.layer(name).tensors["weight"], in_file[f"{name}.weight"]), name
    require_second_trip(back, dialect, tmp_path)


def require_back(
    source: NativeComponent,
    after: NativeComponent,
    dialect: str,
    codes: Iterable[str],
    again: Collection[str] = (),
) -> set[str]:
    """That a component came back, with the codes of these layers; returns the tensors that it says to be rounded.

    again: layers that the export rounded again.
    """
    expected, rounded = {name: source.tensor(name) for name in source.plain}, set[str]()
    for name, scheme in source.schemes.items():
        layer = source.layer(name)
        if name in again:
            (was, bias), (now, same) = (each.linear().collapsed() for each in (layer, after.layer(name)))
            assert 0.005 < (now - was).norm() / was.norm() < MOST_ADDED and not changed({"": bias}, {"": same}), name
            continue
        if name not in codes:
            weight, bias = layer.linear().collapsed()
            expected[f"{name}.weight"] = weight.bfloat16().reshape(after.stored[f"{name}.weight"].shape)
            expected |= {} if bias is None else {f"{name}.bias": bias.detach().bfloat16()}
            continue
        assert str(after.schemes[name]) == str(as_read(source.scheme(name), dialect)), name
        found, rounds = after.layer(name).tensors, rounds_of(scheme, dialect)
        other = changed(layer.tensors, found)
        if dialect == "nunchaku" and scheme.weights.name == "int4" and name.endswith(BIAS_MOVES):
            own, shift = layer.tensors["bias"].float(), GELU_SHIFT * layer.linear().collapsed()[0].abs().sum(1)
            moved = own.abs() + (1 if "norm" in name else shift)
            assert ((found["bias"].float() - own).abs() <= 2.0**-7 * moved).all(), name
            other.discard("bias")
        assert other <= rounds, (name, other)
        if other and dialect in NEAR:
            require_near(source, after, name, dialect)
        rounded |= {f"{name}.{suffix}" for suffix in other}
    found = {name: after.tensor(name) for name in after.plain}
    other = changed(expected, found)
    assert not other, sorted(other)[:3]
    return rounded


# nunchaku adds 1 to biases of modulations and, in int4, takes GELU's shift from those behind it, in 16 bit.
BIAS_MOVES = ("norm.linear", "norm1.linear", "norm1_context.linear", "net.2", "proj_out")


def rounds_of(scheme: Scheme, dialect: str) -> set[str]:
    rows = [row for row in DIALECTS[dialect].rows if row.weights == scheme.weights.name]
    activations = scheme.activations.name if scheme.activations else None
    rows = [row for row in rows if activations in (row.activations, *row.also)]
    dropped = {"input_scale"} if all(row.input_scale == "none" for row in rows) else set[str]()
    return dropped | {name for row in rows for name in rounds(row)}


def as_read(scheme: Scheme, dialect: str) -> Scheme:
    """Return the scheme that an import gives a layer.

    x is as its dialect has it. In nunchaku's a calibrated scale of x becomes a power of two among the factors.
    """
    rows = [row for row in DIALECTS[dialect].rows if row.weights == scheme.weights.name]
    activations = scheme.activations.name if scheme.activations else None
    if activations not in [row.activations for row in rows]:
        (row,) = [row for row in rows if activations in row.also]
        return replace(scheme, activations=find_format(row.activations or ""))
    if dialect.startswith("nunchaku") and scheme.static_input:
        return replace(scheme, static_input=False, smooth=True)
    takes_scale = any(row.input_scale != "none" for row in rows if row.activations == activations)
    return replace(scheme, static_input=scheme.static_input and takes_scale)


# --- every format


FORMATS = [
    (dialect, name)
    for dialect in WRITERS
    for name in dict.fromkeys(row.name for row in DIALECTS[dialect].rows if not (row.needs or row.unread))
    if (dialect, name) != ("nunchaku", "awq_w4a16")  # which its file has of modulations, beside the others
]
QUICK_FORMATS = {
    ("comfy", "nvfp4"),
    ("modelopt", "NVFP4_SVD"),
    ("nunchaku", "svdq_w4a4 nvfp4"),
    ("compressed_tensors", "pack-quantized"),
}
written = cache(found_formats)  # what the table of docs/exchange.md is made of


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "name"), slow_but(FORMATS, QUICK_FORMATS))
def test_models_of_every_scheme_of_a_format_come_back(dialect, name, tmp_path) -> None:
    """The page's row: inputs of one model take its schemes in turn, so that mixtures are read too."""
    schemes = [scheme for scheme, _ in written(dialect)[name].exported]
    component = "text_encoder_2" if dialect == "compressed_tensors" else "transformer"
    modulation = "int4-16bit" if dialect == "nunchaku" else ""
    folder = native(tmp_path / "native", TINY, component, schemes, modulation)
    done, back = there_and_back(folder, dialect, tmp_path / "first")
    source, after = source_of(folder, component, dialect), source_of(back, component, dialect)
    found = {str(source.scheme(name)) for name in source.schemes}  # some of them after a fold
    assert found >= {*map(str, schemes), *filter(None, [modulation])}
    assert not (done.dequantized or done.requantized)
    rounded = require_back(source, after, dialect, source.schemes)
    expected = {suffix for row in DIALECTS[dialect].rows if row.name == name for suffix in rounds(row)}
    expected |= {"input_scale"} if any(s.static_input and s != as_read(s, dialect) for s in schemes) else set()
    assert {full.rpartition(".")[2] for full in rounded} == expected
    if rounded or done.folded:
        require_second_trip(back, dialect, tmp_path, component)


def native(folder: Path, base: Path, component: str, schemes: list[Scheme], modulation: str = "") -> Path:
    """A copy of a pipeline of which a component's Linears are rounded to nearest, input by input under other schemes.

    Linears of one input share what belongs to x, and global scales. Modulations stay in 16 bit unless a scheme is said.
    """
    shutil.copytree(base, folder)
    source, state = ModelFolder("base", base), tensors_of(base, component)
    family = family_of(source.components[component])
    inputs: dict[str, list[str]] = {}
    for linear in list_linears(source, component):
        found = family.locate(linear.name)
        if found is not None:
            inputs.setdefault(f"{found[1]}.{found[0].role}.{found[0].members[0]}", []).append(linear.name)
    layers: dict[str, Scheme] = {}
    turns: Counter[Scheme] = Counter()
    for name, members in inputs.items():
        role, k = family.locate(members[0])[0].role, state[f"{members[0]}.weight"].shape[1]  # pyright: ignore[reportOptionalSubscript]
        if role == MODULATION_ROLE:
            fitting = [Scheme.parse(modulation)] if modulation else []
        else:
            fitting = [scheme for scheme in schemes if k % (scheme.weights.group_size or 1) == 0]
        if not fitting:
            continue
        scheme = min(fitting, key=turns.__getitem__)
        turns[scheme] += 1
        layers |= dict.fromkeys(members, scheme)
        state |= under(scheme, {member: state.pop(f"{member}.weight") for member in members}, zlib.crc32(name.encode()))
    library = library_of(source, component)
    for name in layers:
        state[f"{name}.weight"] = state[f"{name}.weight"].reshape(filed_shape(library, state[f"{name}.weight"].shape))
    for file in (folder / component).glob("*.safetensors"):
        file.unlink()
    save_file(state, folder / component / f"{WEIGHTS_NAME[library]}.safetensors", {"format": "pt"})
    config = json.loads((folder / component / "config.json").read_text())
    config["quantization_config"] = QuantizationConfig.of(layers.items()).to_dict()
    (folder / component / "config.json").write_text(json.dumps(config))
    return folder


def under(scheme: Scheme, weights: Tensors, seed: int) -> Tensors:
    """Linears of one input under a scheme, with factors, a pair and an input_scale as they come: no powers of two."""
    g, made = torch.Generator().manual_seed(seed), Tensors()
    k = next(iter(weights.values())).shape[1]
    shared = Tensors()
    if scheme.smooth:
        shared["pre_quant_scale"] = (torch.rand(k, generator=g) + 0.5).bfloat16()
    if scheme.rank:
        shared["svdquant_lora_a"] = (torch.randn(scheme.rank, k, generator=g) * 0.01).bfloat16()
    if scheme.static_input:
        shared["input_scale"] = no_reciprocal(0.002 * (1 + torch.rand((), generator=g)))
    rest: Tensors = {}
    for name, weight in weights.items():
        rest[name] = weight.float()
        if scheme.rank:
            made[f"{name}.svdquant_lora_b"] = b = (torch.randn(len(weight), scheme.rank, generator=g) * 0.01).bfloat16()
            rest[name] = rest[name] - b.float() @ shared["svdquant_lora_a"].float()
        rest[name] = rest[name] / shared["pre_quant_scale"].float() if scheme.smooth else rest[name]
        rest[name] = rotate(rest[name], scheme.hadamard, scheme.regular)
        made |= {f"{name}.{suffix}": tensor.clone() for suffix, tensor in shared.items()}
    largest = torch.stack([weight.abs().amax() for weight in rest.values()]).amax()
    scale = no_reciprocal(largest / (6 * 448)) if scheme.weights.two_level else None
    for name, weight in rest.items():
        one = None if scheme.weights.block[0] else largest / scheme.weights.element.max  # of all parts of a fused layer
        tensors = QuantizedTensor.quantize(weight, scheme.weights, global_scale=scale, tensor_scale=one).tensors()
        made |= {f"{name}.{suffix}": tensor.clone() for suffix, tensor in tensors.items()}
    return made


def test_layers_with_one_scale_each_are_joined_only_where_it_is_the_same(tmp_path) -> None:
    folder = native(tmp_path / "native", TINY, "transformer", [Scheme.parse("fp8_tensor-fp8_tensor")])
    file, key = next((folder / "transformer").glob("*.safetensors")), "transformer_blocks.0.attn.to_k.weight_scale"
    tensors = load_file(file)
    save_file(tensors | {key: tensors[key] * 2}, file, {"format": "pt"})
    target = tmp_path / "x.safetensors"
    with pytest.raises(
        ValueError, match=r"cannot hold 3 of 32 layers; --requantize .*\n.*layers whose weight_scale differ"
    ):
        export(resolve_model(str(folder)), "comfy", target)
    assert not target.exists()
    done = export(resolve_model(str(folder)), "comfy", target, requantize=True)
    assert [entry.name for entry in done.requantized] == ["double_blocks.0.img_attn.qkv"] and not done.dequantized


# --- every family


FAMILY_TRIPS = {"bfl": "fp8", "modelopt": "mxfp8", "comfy": "nvfp4", "torchao": "int8", "nunchaku_lite": "int4-svd"}
FAMILIES_TRIPS = [(row, dialect) for row in TRANSFORMERS for dialect in FAMILY_TRIPS]
QUICK_FAMILIES = {("sd3", "comfy"), ("qwen_image", "nunchaku_lite"), ("sana", "comfy")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "dialect"),
    [
        pytest.param(
            row,
            dialect,
            id=f"{row.name}-{dialect}",
            marks=[] if (row.name, dialect) in QUICK_FAMILIES else pytest.mark.slow,
        )
        for row, dialect in FAMILIES_TRIPS
    ],
)
def test_models_of_every_family_come_back(row: Family, dialect: str, tmp_path) -> None:
    recipe = FAMILY_TRIPS[dialect]
    base, folder = family_pipelines(row, recipe, tmp_path)
    done, back = there_and_back(folder, dialect, tmp_path / "first", base, requantize=True)
    source, after = source_of(folder, dialect=dialect), source_of(back, dialect=dialect)
    side = {name for name in source.schemes if name in source.pixelwise or is_modulation(row, name)}
    codes = after.schemes.keys()
    assert not (done.requantized or done.folded) and len(done.dequantized) <= len(side)
    assert codes >= source.schemes.keys() - side and len(codes) > 8
    require_back(source, after, dialect, codes)
    require_second_trip(back, dialect, tmp_path, base=base)


def is_modulation(row: Family, name: str) -> bool:
    found = row.locate(name)
    return found is not None and found[0].role == MODULATION_ROLE


def family_pipelines(row: Family, recipe: str, tmp_path: Path) -> tuple[Path, Path]:
    """(a pipeline of just a random model, the same under a recipe, rounded to nearest)."""
    torch.manual_seed(0)
    folders, model_class = [tmp_path / "16bit", tmp_path / "native"], getattr(diffusers, row.model)
    model_class.from_config(TINY_CONFIGS[row.name]).to(torch.bfloat16).save_pretrained(folders[0] / "transformer")
    config = fluxq.FluxqConfig(recipe=recipe, profile="rtn")
    model = model_class.from_pretrained(folders[0] / "transformer", dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(folders[1] / "transformer")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", row.model]}
    for folder in folders:
        (folder / "model_index.json").write_text(json.dumps(index))
    return folders[0], folders[1]
