"""Tests of `fluxq auto --from`: plans of layers that were fitted before, and the checkpoint put together of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared import copy_of

import fluxq
from fluxq import tiny
from fluxq.base.tensors import TensorFile, fingerprint_of
from fluxq.calibrate.capture import run_pipeline
from fluxq.calibrate.stand_ins import module_of, replaced
from fluxq.jobs import assembling, choosing
from fluxq.jobs.assembling import assemble
from fluxq.jobs.choosing import choose
from fluxq.jobs.job import JobOptions
from fluxq.jobs.menu import stored_size
from fluxq.jobs.requirements import base_recipe
from fluxq.jobs.search import AutoOptions, Search, search_of
from fluxq.jobs.trials import Bench
from fluxq.kernels.linear import in_place_of
from fluxq.quantize.record import Record, read_record, write_record
from fluxq.quantize.verify import verify
from fluxq.recipes.budget import total
from fluxq.recipes.recipe import load_recipe

CALL = {"num_inference_steps": 1}
MENU = ("nvfp4", "int8", "16bit")
Folders = tuple[str, str]


def search(folders: Folders, place: Path, **options: Any) -> Search:
    """The search that a test asks for; bits, menu, measure, count and dtype unless it says others."""
    job: dict[str, Any] = {"model": "tiny", "call": CALL, "output": str(place / "mixed.yaml")}
    job |= {name: options.pop(name) for name in ("dtype", "overwrite") if name in options}
    asked = {"menu": MENU, "measure": "velocity", "count": 1, "fitted": folders, "assemble": str(place / "mixed")}
    asked |= {} if options.keys() & {"size", "gate"} else {"bits": 8.0}
    return search_of(JobOptions(recipe=base_recipe(None, folders), **job), AutoOptions(**asked | options))


@dataclass(frozen=True)
class Mixed:
    """A search, what it wrote, and the folder that was put together."""

    folders: Folders
    search: Search
    result: dict[str, Any]
    folder: Path

    @property
    def options(self) -> dict[str, str]:
        return {layer: each["option"] for each in self.result["units"] for layer in each["layers"]}


def chosen_by(asked: Search) -> dict[str, Any]:
    result = choose(asked)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def folders(checkpoint) -> Folders:
    return str(checkpoint("nvfp4-max")), str(checkpoint("int8"))


@pytest.fixture(scope="module")
def mixed(folders, tmp_path_factory) -> Mixed:
    place = tmp_path_factory.mktemp("mixed")
    asked = search(folders, place)
    result = chosen_by(asked)
    assemble(asked, result)
    return Mixed(folders, asked, result, place / "mixed")


@pytest.fixture
def unchecked(monkeypatch) -> None:
    """Checkpoints without the closing check, which the module's one has had."""
    monkeypatch.setattr(assembling, "makes_pictures", lambda _: False)


def weights_of(folder: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "transformer" / "diffusion_pytorch_model.safetensors")


def groups_of(record: Record) -> set[str]:
    return {group.group for group in record.components[0].groups}


@pytest.mark.slow
def test_every_tensor_is_that_of_the_checkpoint_whose_format_was_chosen(mixed, unchecked, tmp_path) -> None:
    assert set(mixed.options.values()) >= {"nvfp4", "int8"}
    result = {"units": [{**each, "option": MENU[index % 3]} for index, each in enumerate(mixed.result["units"])]}
    asked = replace(mixed.search, options=replace(mixed.search.options, assemble=str(tmp_path / "mixed")))
    mixed = replace(mixed, result=result, folder=tmp_path / "mixed")
    record = assemble(asked, result)
    of = dict(zip(MENU, (*map(weights_of, mixed.folders), weights_of(tiny.path())), strict=True))
    expected: dict[str, torch.Tensor] = {}
    for option, tensors in of.items():
        for name, tensor in tensors.items():
            layer = f"transformer.{name.rpartition('.')[0]}"
            if mixed.options.get(layer, "nvfp4") == option:
                expected[name] = tensor.bfloat16() if option == "16bit" else tensor
    written = weights_of(mixed.folder)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, fingerprint_of(tensor)) == (written[name].dtype, fingerprint_of(written[name])), name
    assert any(name.endswith("svdquant_lora_a") for name in written)
    groups = groups_of(record)
    assert groups and groups < groups_of(read_record(Path(mixed.folders[0]))), "some are whole, some are mixed"
    schemes = {f"transformer.{layer.name}": layer.scheme for layer in record.components[0].layers}
    assert all(schemes[layer].startswith(option) for layer, option in mixed.options.items())
    assert not any(result.findings for result in verify(tmp_path / "mixed"))


def test_it_loads_and_its_latents_are_those_of_the_layers_in_the_model(mixed, pipe) -> None:
    from diffusers import DiffusionPipeline

    fitted = mixed.search.offer.fitted
    option_of = {name: mixed.options.get(name, "nvfp4") for name in fitted["nvfp4"].schemes}
    layers = {n: in_place_of(module_of(pipe, n), fitted[o].layer(n)) for n, o in option_of.items() if o != "16bit"}
    call = mixed.search.job.call
    with torch.no_grad(), replaced(pipe, layers):
        ((_, meant),) = run_pipeline(pipe, mixed.search.measuring, call)
    loaded = DiffusionPipeline.from_pretrained(mixed.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        ((_, latents),) = run_pipeline(loaded, mixed.search.measuring, call)
        ((_, plain),) = run_pipeline(pipe, mixed.search.measuring, call)
    assert torch.equal(latents, meant) and not torch.equal(latents, plain)


def test_runs_and_measures_are_of_the_fitted_layers(mixed, pipe, tmp_path) -> None:
    bench = Bench(mixed.search, pipe, tmp_path / "runs.json")
    stored = dict(zip(MENU, map(weights_of, mixed.folders), strict=False))
    for unit, names in mixed.search.offer.units.items():
        for option in ("nvfp4", "int8"):
            for name, layer in bench.layers(unit, option).items():
                path = name.partition(".")[2]
                tensors = {f"{path}.{part}": value.data for part, value in layer.named_parameters()}
                assert name in names and tensors.keys() == {n for n in stored[option] if n.rpartition(".")[0] == path}
                assert all(fingerprint_of(value) == fingerprint_of(stored[option][n]) for n, value in tensors.items())


def test_it_is_whole_and_says_where_its_layers_are_from(mixed) -> None:
    results = verify(mixed.folder)
    assert {result.check: result.findings for result in results if result.findings} == {}
    record, first = read_record(mixed.folder), read_record(Path(mixed.folders[0]))
    assert [(each.format, each.checkpoint) for each in record.mixed] == [
        ("nvfp4", "tiny-nvfp4-max"),
        ("int8", "tiny-int8"),
    ]
    assert {layer: each.format for each in record.mixed for layer in each.layers} == {
        layer: option for layer, option in mixed.options.items() if option != "16bit"
    }
    schemes = {f"transformer.{layer.name}": layer.scheme for layer in record.components[0].layers}
    assert all(schemes[layer].startswith(option) for layer, option in mixed.options.items())
    assert record.check is not None and record.check.finite
    assert groups_of(record) <= groups_of(first)
    assert "fitted in the checkpoint `tiny-int8`" in (mixed.folder / "README.md").read_text()
    checkpoints = dict(zip(MENU, mixed.folders, strict=False))
    assert mixed.result["checkpoints"] == checkpoints
    assert all(each["checkpoint"] == checkpoints.get(each["option"]) for each in mixed.result["units"])


def test_the_recipe_gives_the_formats_and_the_bits_count_what_fitting_kept(mixed, tmp_path) -> None:
    asked = search_of(
        JobOptions(model="tiny", recipe=str(mixed.search.job.output), call=CALL, output=str(tmp_path / "x.yaml")),
        AutoOptions(bits=8.0, measure="velocity", count=1),
        writes=False,
    )
    schemes = {f"transformer.{layer.name}": str(layer.scheme or "16bit") for layer in asked.job.plans[0].layers}
    assert all(schemes[layer].startswith(option) for layer, option in mixed.options.items())
    layers = {f"transformer.{layer.name}": layer for layer in read_record(mixed.folder).components[0].layers}
    weights = sum(layers[name].weights for name in mixed.options)
    bits = sum(layers[name].bits_per_weight * layers[name].weights for name in mixed.options) / weights
    assert bits == pytest.approx(mixed.result["cost"], abs=1e-3) and bits <= 8.0


def test_a_size_is_that_of_the_files_to_the_byte(mixed) -> None:
    costs = stored_size(mixed.search.job, mixed.search.offer)
    choice = {each["unit"]: each["option"] for each in mixed.result["units"]}
    files = [*mixed.folder.rglob("*.safetensors")]
    tensors = sum(TensorFile(file).nbytes for file in files if file.parent.name == "transformer")
    others = sum(file.stat().st_size for file in files if file.parent.name != "transformer")
    assert total(costs.numbers, choice) + costs.fixed == 8 * (tensors + others)


@pytest.mark.slow
def test_what_stands_is_not_written_again_and_an_interrupted_one_is(mixed, unchecked, tmp_path, monkeypatch) -> None:
    shutil.copytree(mixed.folder.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(choosing, "measure_errors", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setattr(choosing, "Bench", lambda *_: pytest.fail("run again"))
    asked = search(mixed.folders, tmp_path)
    result = chosen_by(asked)
    assert result == mixed.result
    with monkeypatch.context() as patched:
        patched.setattr(assembling, "_write", lambda *_: pytest.fail("written again"))
        assemble(asked, result)
    shutil.rmtree(tmp_path / "mixed")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(assembling, "write_digests", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assemble(asked, result)
    assert not (tmp_path / "mixed").exists()
    assemble(asked, result)
    for file in ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"):
        assert (tmp_path / "mixed" / file).read_bytes() == (mixed.folder / file).read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_python_has_it_too(mixed, unchecked, tmp_path, monkeypatch) -> None:
    shutil.copytree(mixed.folder.parent, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(choosing, "Bench", lambda *_: pytest.fail("run again"))
    shutil.rmtree(tmp_path / "mixed")
    options: dict[str, Any] = {"menu": MENU, "measure": "velocity", "count": 1, "call": CALL}
    places = {"output": tmp_path / "mixed.yaml", "assemble": tmp_path / "mixed"}
    recipe = fluxq.auto("tiny", bits=8.0, fitted=mixed.folders, **options, **places)
    assert recipe == load_recipe(str(tmp_path / "mixed.yaml"))[1]
    assert fluxq.Checkpoint.open(tmp_path / "mixed").record.mixed == read_record(mixed.folder).mixed


def test_another_choice_is_not_written_over_a_checkpoint(mixed, tmp_path) -> None:
    shutil.copytree(mixed.folder, tmp_path / "mixed")
    result = json.loads(json.dumps(mixed.result))
    result["units"][0]["option"] = next(each for each in MENU if each != result["units"][0]["option"])
    with pytest.raises(ValueError, match="exists; give another --output, or --overwrite"):
        assemble(replace(mixed.search, options=replace(mixed.search.options, assemble=str(tmp_path / "mixed"))), result)


@pytest.mark.slow
def test_a_search_that_has_to_run_writes_over_no_checkpoint(folders, mixed, tmp_path) -> None:
    shutil.copytree(mixed.folder.parent, tmp_path, dirs_exist_ok=True)
    assert search(folders, tmp_path).job.finished  # its own checkpoint
    with pytest.raises(ValueError, match=r"mixed exists; give another --assemble, or --overwrite to replace it"):
        search_of(
            replace(mixed.search.job.options, output=str(tmp_path / "other.yaml")),
            replace(mixed.search.options, bits=9.0, assemble=str(tmp_path / "mixed")),
        )


def test_another_first_checkpoint_is_not_taken_for_the_one_that_gave_all_else(mixed, tmp_path) -> None:
    shutil.copytree(mixed.folder, tmp_path / "mixed")
    asked = replace(mixed.search, options=replace(mixed.search.options, assemble=str(tmp_path / "mixed")))
    (name, first), (other, second) = asked.offer.fitted.items()
    changed = replace(first, record=first.record.model_copy(update={"files": {"vae/config.json": "0"}}))
    for fitted in ({other: second, name: first}, {name: changed, other: second}):
        with pytest.raises(ValueError, match="exists; give another --output, or --overwrite"):
            assemble(replace(asked, offer=replace(asked.offer, fitted=fitted)), mixed.result)


@pytest.mark.slow
def test_a_checkpoint_that_changes_meanwhile_is_refused(folders, mixed, tmp_path) -> None:
    copies = copies_of(folders, tmp_path)
    asked = search(copies, tmp_path / "out")
    file = Path(copies[1]) / "transformer" / "diffusion_pytorch_model.safetensors"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"1: changed since the search began; start again"):
        assemble(asked, mixed.result)
    assert not (tmp_path / "out" / "mixed").exists()


def copies_of(folders: Folders, place: Path) -> Folders:
    return tuple(str(copy_of(Path(folder), place / str(index))) for index, folder in enumerate(folders))  # pyright: ignore[reportReturnType]


def recorded(**changes: Any) -> Callable[[Path], None]:
    """A change of a checkpoint's record."""

    def change(folder: Path) -> None:
        write_record(folder, read_record(folder).model_copy(update=changes))

    return change


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "transformer" / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"] |= changes
        file.write_text(json.dumps(config))

    return change


def without_a_layer(folder: Path) -> None:
    """A layer goes back to 16 bit, as --exclude would have it."""
    with_config(layers={s: [n for n in names if n != LAYER] for s, names in schemes_in(folder).items()})(folder)
    weights = {n: t for n, t in weights_of(folder).items() if n.rpartition(".")[0] != LAYER}
    plain = weights_of(tiny.path())
    weights |= {f"{LAYER}.{part}": plain[f"{LAYER}.{part}"].bfloat16() for part in ("weight", "bias")}
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")


def schemes_in(folder: Path) -> Mapping[str, list[str]]:
    return json.loads((folder / "transformer" / "config.json").read_text())["quantization_config"]["layers"]


def flipped(folder: Path) -> None:
    weights = weights_of(folder)
    weights[f"{LAYER}.bias"] = -weights[f"{LAYER}.bias"]
    save_file(weights, folder / "transformer" / "diffusion_pytorch_model.safetensors")


LAYER = "transformer_blocks.0.ff.net.2"
LORA = {"file": "x.safetensors", "weight": 1.0, "sha256": "0", "component": "transformer"}


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "fluxq_plan.json").unlink(), r"its fluxq_plan\.json is missing.*fetch it too"),
        (
            lambda folder: folder.rename(folder.with_name(f".{folder.name}.{'0' * 16}.work")),
            "1 is not finished yet: the command that began it goes on with it",
        ),
        (shutil.rmtree, "1 is no folder.*give one that `fluxq quantize` wrote"),
        (recorded(imported=[]), "imported from another program.*quantize the model"),
        ("lora", "a LoRA is fused into it.*quantize without --lora"),
        ("model", "made of other weights than those of tiny; give the model that it was made of, tiny"),
        ("dtype", "fitted in float16, and plans would run in bfloat16; give --dtype float16"),
        (with_config(attention="fp8"), "attention of the transformer is 16bit in .*0 and fp8 in .*1; quantize both"),
        (with_config(steps={"first": 1}), "steps of the transformer is all alike in .* and the first step in .*1"),
        (without_a_layer, rf"does not quantize transformer\.{LAYER} \(1 layers\).*the same --exclude"),
        (flipped, "tensors of its transformer changed since they were written; copy it again"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_computed(
    folders, tmp_path, change, words
) -> None:
    copies = copies_of(folders, tmp_path)
    folder = Path(copies[1])
    if isinstance(change, str):
        record = read_record(folder)
        change = recorded(
            **{
                "lora": {"loras": [record.model_validate({**record.to_json(), "loras": [LORA]}).loras[0]]},
                "model": {"model": record.model.model_copy(update={"digests": {"transformer": "0" * 64}})},
                "dtype": {"identity": record.identity.model_copy(update={"dtype": "float16"})},
            }[change]
        )
    change(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        search(copies, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"menu": ("nvfp4", "fp8")}, r"no checkpoint of --from is fp8; choose of nvfp4, int8, 16bit, or give"),
        ({"dialect": "comfy"}, "--for chooses before layers are fitted: leave it out"),
        ({"fitted": ()}, "--assemble puts fitted layers together: give their checkpoints"),
        ({"assemble": "{1}"}, r"output .*tiny-int8 is the checkpoint .*tiny-int8, .*give another --assemble"),
        ({"bits": 4.5}, r"the smallest plan takes \d\.\d+ bits"),
    ],
)
def test_options_that_contradict_are_refused(folders, tmp_path, options, words) -> None:
    options = {name: value.format(*folders) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=words):
        search(folders, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_record_without_a_recipe_is_refused(folders, tmp_path) -> None:
    copies = copies_of(folders, tmp_path)
    recipe = read_record(Path(copies[0])).recipe
    recorded(recipe=recipe.model_copy(update={"components": {}}))(Path(copies[0]))
    with pytest.raises(ValueError, match=r"0/fluxq_plan\.json: holds no recipe \(.*\); quantize the model again"):
        search(copies, tmp_path / "out")


def test_two_of_one_format_and_a_recipe_beside_them_are_refused(folders, tmp_path) -> None:
    copies = copies_of(folders, tmp_path)
    with pytest.raises(ValueError, match=r"0 and .*nvfp4-max are both nvfp4.*leave out one"):
        search((copies[0], folders[0]), tmp_path / "out")
    with pytest.raises(ValueError, match="with --from the recipe is that of the first checkpoint; leave it out"):
        fluxq.auto("tiny", "fp8", bits=6.0, fitted=folders)
    with pytest.raises(ValueError, match="with --from the recipe is that of the first checkpoint; leave it out"):
        fluxq.auto("tiny", "fp8", bits=6.0, fitted=Path(folders[0]))


@pytest.mark.slow
def test_options_are_the_checkpoints_formats_and_16_bit_only_where_a_menu_says_so(folders, tmp_path) -> None:
    asked = search(folders, tmp_path, menu=(), bits=7.0)
    assert asked.offer.options == ("nvfp4", "int8")
    assert asked.job.recipe == load_recipe(f"{folders[0]}/fluxq_plan.json")[1]
    other = search((folders[1], folders[0]), tmp_path, menu=(), bits=7.0)
    assert other.offer.options == ("int8", "nvfp4") and other.job.recipe_name == "int8"


@pytest.mark.slow
def test_a_table_is_of_the_tensors_that_were_there(folders, tmp_path) -> None:
    copies = copies_of(folders, tmp_path)
    digests = [search(copies, tmp_path).table_digest("velocity"), search(folders, tmp_path).table_digest("velocity")]
    flipped(Path(copies[1]))
    with_config(digest=None)(Path(copies[1]))
    digests.append(search(copies, tmp_path).table_digest("velocity"))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.slow
def test_input_groups_with_one_mean_and_one_set_of_factors_stay_together(folders, tmp_path) -> None:
    """Both outputs of an attention have them in the checkpoint that can be exported, in the other one their own."""
    ends = {f"transformer.transformer_blocks.0.attn.{name}" for name in ("to_out.0", "to_add_out")}
    both = search(folders, tmp_path)
    assert {*both.offer.units[min(ends, key=len)]} == ends
    alone = search(folders[:1], tmp_path, menu=("nvfp4", "16bit"))  # pyright: ignore[reportArgumentType]
    assert all(alone.offer.units[end] == (end,) for end in ends)


@pytest.mark.slow
def test_the_adjoint_predicts_what_fitted_layers_do(folders, tmp_path) -> None:
    assert chosen_by(search(folders, tmp_path, menu=(), measure="adjoint", count=4, assemble=None, bits=6.5))["agrees"]
