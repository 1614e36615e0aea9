"""docs/format.md, its reader in numpy and its vectors: what they say is what fluxq writes, reads and refuses."""

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fluxq.kernels import ops
from fluxq.kernels.linear import QuantLinear, quant_layers
from fluxq.quantize.verify import verify
from fluxq.recipes.formats import FEATURES, FORMATS, Scheme, find_format, hadamards
from fluxq.recipes.recipe import shipped_recipes

ROOT = Path(__file__).parents[2]
VECTORS, GOLDEN = ROOT / "docs" / "vectors", ROOT / "tests" / "golden"
PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
REFUSED = json.loads((VECTORS / "refused.json").read_text(encoding="utf-8"))
# fluxq multiplies in fp32, in whatever order a device adds up; the reader and the vectors do in fp64. Of a layer's
# largest number that is 2^-20 here, of wide layers a little more; its bias is a difference of sums.
WEIGHT, BIAS = 2.0**-17, 2.0**-15
DAMAGED = ("cut_off", "goes_on", "hole", "overlap", "negative_offset", "long_header")  # of which diffusers says so

MOST_STEPS = ("nvfp4-max", "mxfp4-max", "int4-svd")


def loaded(path: Path) -> ModuleType:
    """A file that is no module of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a neighbour imports it, dataclasses look there
    spec.loader.exec_module(module)
    return module


reader = loaded(ROOT / "docs" / "read_checkpoint.py")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The two scripts that write the vectors."""
    names = ("make_vectors", "make_refused")
    yield SimpleNamespace(**{name: loaded(GOLDEN / f"{name}.py") for name in names})
    for name in names:
        del sys.modules[name]


class Layers(ModelMixin, ConfigMixin):
    """The model that the vectors of diffusers are of. linears: name -> [N, K, has a bias]."""

    @register_to_config
    def __init__(self, linears: dict[str, Any]) -> None:
        super().__init__()
        self.layers, self.plain = _linears(linears), nn.Linear(16, 4)


class LayersConfig(PretrainedConfig):
    model_type = "layers"

    def __init__(self, linears: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.linears = linears or {}


class TextLayers(PreTrainedModel):
    """The same of transformers."""

    config_class = LayersConfig

    def __init__(self, config: LayersConfig) -> None:
        super().__init__(config)
        self.layers, self.plain = _linears(config.linears), nn.Linear(16, 4)
        self.post_init()


def _linears(linears: dict[str, Any]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(k, n, bias) for name, (n, k, bias) in linears.items()})


def load(folder: Path) -> nn.Module:
    """Load vectors with fluxq, as a user would."""
    is_of_diffusers = "_class_name" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model: Any = Layers if is_of_diffusers else TextLayers
    return model.from_pretrained(folder, dtype=torch.bfloat16 if is_of_diffusers else torch.float16)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and bool((a.view(np.uint32) == b.view(np.uint32)).all())


def near(a: Any, b: Any, bound: float) -> bool:
    """Tell whether numbers agree within a bound, relative to the largest."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return a.shape == b.shape and bool(np.abs(a - b).max() <= bound * np.abs(b).max())


def agrees(layer: QuantLinear, said: tuple[str, np.ndarray, np.ndarray, np.ndarray | None]) -> bool:
    """Tell whether the reader's numbers of a layer are those of fluxq."""
    scheme, decoded, weight, bias = said
    ours, our_bias = layer.collapsed()
    is_product = layer.scheme.deflate or layer.scheme.hadamard or layer.scheme.rank
    return (
        str(layer.scheme) == scheme
        and same_bits(decoded, layer.quantized_weight.dequantize())
        and (near(ours, weight, WEIGHT) if is_product else same_bits(ours, weight))
        and (bias is None) == (our_bias is None)
        and (our_bias is None or bias is None or near(our_bias.float(), bias, BIAS))
    )


def assert_read(folder: Path, model: nn.Module) -> None:
    """Hold what the reader makes of a folder to the model that fluxq made of it."""
    layers = dict(quant_layers(model))
    read = {name: said for name, *said in reader.read(folder)}
    assert read.keys() == layers.keys() and layers
    assert [name for name, layer in layers.items() if not agrees(layer, read[name])] == []


def test_the_reader_is_short_and_needs_numpy_alone() -> None:
    source = (ROOT / "docs" / "read_checkpoint.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    imported = re.findall(r"^(?:import|from) (\w+)", source, flags=re.MULTILINE)
    assert set(imported) - set(sys.stdlib_module_names) == {"numpy"}


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_the_reader_decodes_what_every_recipe_writes(recipe, checkpoint) -> None:
    folder = checkpoint(recipe) / "transformer"
    assert_read(folder, FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16))


@pytest.mark.often(3)
@pytest.mark.parametrize("recipe", sorted(shipped_recipes(), key=lambda recipe: recipe not in MOST_STEPS))
def test_the_reader_decodes_what_an_earlier_version_wrote(recipe) -> None:
    folder = GOLDEN / "checkpoints" / recipe
    assert_read(folder, FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    return {file.stem: load_file(file) for file in (VECTORS / "expected").glob("*.safetensors")}


EITHER = pytest.mark.parametrize("component", ["transformer", "text_encoder"])


@EITHER
def test_the_reader_passes_the_vectors(component, expected) -> None:
    wanted = expected[component]
    read = {name: said for name, *said in reader.read(VECTORS / component)}
    assert read.keys() == {name.removesuffix(".decoded") for name in wanted if name.endswith(".decoded")}
    for name, (_, decoded, weight, bias) in read.items():
        assert same_bits(decoded, wanted[f"{name}.decoded"]), name
        assert near(weight, wanted.get(f"{name}.weight", wanted[f"{name}.decoded"]), 2.0**-23), name
        assert (bias is None) == (f"{name}.bias" not in wanted), name
        assert bias is None or near(bias, wanted[f"{name}.bias"], 2.0**-23), name


@EITHER
def test_the_loader_passes_the_vectors(component, expected) -> None:
    wanted, model = expected[component], load(VECTORS / component)
    assert_read(VECTORS / component, model)
    for name, layer in quant_layers(model):
        weight, bias = layer.collapsed()
        assert same_bits(layer.quantized_weight.dequantize(), wanted[f"{name}.decoded"]), name
        assert near(weight, wanted.get(f"{name}.weight", wanted[f"{name}.decoded"]), WEIGHT), name
        assert bias is None or near(bias.float(), wanted[f"{name}.bias"], BIAS), name


def test_the_layers_change_inputs_as_the_vectors_say(expected) -> None:
    """z, and the output where nothing is rounded: x is fp32, so that no step is in 16 bit."""
    wanted, model = expected["transformer"], load(VECTORS / "transformer")
    for name, layer in quant_layers(model):
        if f"{name}.z" not in wanted:
            continue
        x = wanted["x"].float()[:, : layer.in_features]
        mean, smooth, basis, _ = layer.tensors.steps
        assert near(ops.transformed(x, layer.scheme, mean, smooth, basis)[0], wanted[f"{name}.z"], WEIGHT), name
        assert near(layer.without_rounding(x), wanted[f"{name}.y"], WEIGHT), name


def test_activations_are_rounded_as_the_vectors_say(expected) -> None:
    held = expected["activations"]
    labels = {name.split(".")[0] for name in held} - {"v"}
    for label in labels:
        name, *words = label.split("-")
        q = ops.quantize_activation(held["v"], find_format(name), held.get(f"{label}.input_scale"), "46" in words)
        assert same_bits(q.dequantize(), held[f"{label}.decoded"]), label
        assert torch.equal(q.codes.view(torch.uint8), held[f"{label}.codes"].view(torch.uint8)), label
        assert "static" in words or torch.equal(q.scale.float(), held[f"{label}.scale"].float()), label
    assert {label.split("-")[0] for label in labels} == reader.INPUTS - {"16bit"}


@pytest.mark.parametrize("case", REFUSED)
def test_the_reader_and_fluxq_refuse_what_must_be_refused(case, monkeypatch) -> None:
    folder = VECTORS / "refused" / case
    with pytest.raises(ValueError):
        list(reader.read(folder))
    if REFUSED[case]["found_by"] == "loading":
        with pytest.raises(Exception) as found:
            load(folder)
        assert isinstance(found.value, OSError if case in DAMAGED else ValueError), found.value
    else:
        monkeypatch.setattr(diffusers, "Layers", Layers, raising=False)
        load(folder)
        assert [result.check for result in verify(folder) if result.status == "failed"] == ["tensors"]


def test_without_its_fault_every_refused_model_is_read(scripts, tmp_path) -> None:
    cases = scripts.make_refused.LOADING | scripts.make_refused.VERIFY
    broken = ("ragged_blocks", "too_many_directions")  # whose sound model has the fault, or is of another kind
    for name, (_, make, _) in cases.items():
        if name not in broken:
            make().write(tmp_path / name)
            assert [said[0] for said in reader.read(tmp_path / name)] == ["layers.refused"], name


def test_a_folder_has_one_set_of_weights(tmp_path, scripts) -> None:
    scripts.make_refused.Model().write(tmp_path)
    file, index = tmp_path / scripts.make_refused.FILE, tmp_path / f"{scripts.make_refused.FILE}.index.json"
    other = tmp_path / "other.safetensors"
    other.write_bytes(file.read_bytes())
    for weight_map, message in (
        (None, "no single set|of other files"),
        ({"a": file.name}, "no single set|of other files"),
        ({"a": file.name, "b": other.name}, "no single set|of other files"),
        ({"a": other.name}, "no single set|of other files"),
        ({"a": "../a.safetensors"}, "no single set|of other files"),
        ({"a": 5}, "no single set|of other files"),
        ([other.name], "no single set|of other files"),
    ):
        if weight_map is not None:
            index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            list(reader.read(tmp_path))
    index.unlink()
    file.rename(tmp_path / "model.safetensors")
    other.unlink()
    with pytest.raises(ValueError, match="no single set"):
        list(reader.read(tmp_path))


CONFIGS: dict[str, tuple[Any, str]] = {  # what takes the place of a config.json, or of keys in its quantization_config
    "list": ([], "no JSON object"),
    "text": ("fluxq", "no JSON object"),
    "nothing": ({}, "not of fluxq"),
    "null": ({"quantization_config": None}, "not of fluxq"),
    "other backend": ({"quant_method": "bitsandbytes"}, "not of fluxq"),
    "true version": ({"format_version": True}, "format version True"),
    "text of a version": ({"format_version": "1"}, "format version 1"),
    "features as text": ({"required_features": "center"}, "required_features are not"),
    "features in lists": ({"required_features": [["center"]]}, "required_features are not"),
    "layers as a list": ({"layers": ["layers.refused"]}, "no lists of layers"),
    "layers as texts": ({"layers": {"fp8-16bit": "layers.refused"}}, "no lists of layers"),
    "layers as numbers": ({"layers": {"fp8-16bit": [1]}, "required_features": []}, "layers.refused|1 .* is not for"),
    "layers as lists": ({"layers": {"fp8-16bit": [[]]}, "required_features": []}, "layers.refused|is not for"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_damaged_config_is_refused_by_name(case, tmp_path, scripts) -> None:
    value, message = CONFIGS[case]
    model = scripts.make_refused.Model()
    model.write(tmp_path)
    if isinstance(value, dict) and value and "quantization_config" not in value:
        value = {"_class_name": "Layers", "quantization_config": model.said | value}
    (tmp_path / "config.json").write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        list(reader.read(tmp_path))


ENTRY = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, str]] = {  # of a file with 8 bytes of data; bytes: the whole file
    "empty": (b"", "no JSON object"),
    "short": (b"\x10\0\0", "no JSON object"),
    "endless": (b"\xff" * 8 + b"{}", "cut off"),
    "no UTF-8": (struct.pack("<Q", 2) + b"\xff\xff", "no JSON object"),
    "UTF-16": (struct.pack("<Q", 4) + "{}".encode("utf-16-le"), "no JSON object"),
    "nested": (struct.pack("<Q", 100_000) + b"[" * 100_000, "no JSON object"),
    "list": ([], "no JSON object"),
    "no tensors": ({}, "cut off, or has bytes behind"),
    "entry": ({"plain.bias": 5}, "plain.bias is damaged"),
    "no shape": ({"plain.bias": {"dtype": "BF16", "data_offsets": [0, 8]}}, "plain.bias is damaged"),
    **{
        f"{key} {value}": ({"plain.bias": ENTRY | {key: value}}, "plain.bias (is damaged|overlaps)")
        for key, values in {
            "dtype": ([], None, {}, "F32"),
            "shape": (4, None, ["4"], [4.0], [True], [-4], [-2, -2], [1 << 70]),
            "data_offsets": (8, [0], [0, 8, 8], [0.0, 8], [0, "8"], [8, 0], [2, 10], [0, 1 << 70]),
        }.items()
        for value in values
    },
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_refused_by_name(case, tmp_path, scripts) -> None:
    value, message = HEADERS[case]
    scripts.make_refused.Model().write(tmp_path)
    if not isinstance(value, bytes):
        text = json.dumps(value).encode()
        value = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / scripts.make_refused.FILE).write_bytes(value)
    with pytest.raises(ValueError, match=message):
        list(reader.read(tmp_path))


def test_the_committed_vectors_are_what_the_scripts_write(scripts, tmp_path) -> None:
    scripts.make_vectors.main(tmp_path)
    scripts.make_refused.main(tmp_path)
    made, committed = (
        {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}
        for root in (tmp_path, VECTORS)
    )
    assert made.keys() == committed.keys()
    assert [name for name in made if made[name] != committed[name]] == [], "run both scripts of tests/golden again"
    assert sum(map(len, committed.values())) < 640_000


def test_the_vectors_have_every_format_and_the_steps_of_every_recipe() -> None:
    said = json.loads((VECTORS / "transformer" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    schemes = [Scheme.parse(text) for text in said["layers"]]
    assert {scheme.weights.name for scheme in schemes} == {*FORMATS, "int4_g128"}
    for regular in (False, True):
        sizes = {scheme.hadamard for scheme in schemes if scheme.hadamard and scheme.regular == regular}
        assert sizes == {*hadamards(regular)}
    assert set(said["required_features"]) == FEATURES.keys()
    have = {_kind(scheme) for scheme in schemes}
    for recipe in shipped_recipes():
        config = json.loads((GOLDEN / "checkpoints" / recipe / "config.json").read_text(encoding="utf-8"))
        for text in config["quantization_config"]["layers"]:
            scheme = Scheme.parse(text)
            assert _kind(scheme) in have, f"{recipe}: {text}; add it to TRANSFORMED in make_vectors.py"


def _kind(scheme: Scheme) -> tuple[object, ...]:
    """Formats and steps, without the sizes of the steps."""
    return (*scheme.formats, *scheme.features)


def test_the_page_has_every_format_word_and_refusal() -> None:
    storage = {"uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    scales = {"fp32": "F32", "bf16": "BF16", "e4m3": "F8_E4M3", "e8m0": "U8"}
    for row in (*FORMATS.values(), find_format("int4_g128")):
        shape = "[N, K/2]" if row.element.bits == 4 else "[N, K]"
        scale = (
            "[⌈N/128⌉, ⌈K/128⌉]"
            if row.spans_rows
            else f"[N, K/{row.group_size}]"
            if row.group_size
            else "[N]"
            if row.block[0]
            else "[]"
        )
        stored = f"{storage[row.element.storage]} {shape} | {scales[row.scale]} {scale}"
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| `{row.name}` | "))
        assert f"| {row.element.name.upper()} | {stored}" in line
        assert (
            line.endswith(f"| {row.unit if row.spans_rows else row.group_size or 1} |")
            and ("weight_scale_2" in line) == row.two_level
        )
        assert row.name in reader.FORMATS
    assert reader.FEATURES.keys() == FEATURES.keys()
    assert all(re.search(rf"\| (`hadamard` and )?`{feature}` \|", PAGE) for feature in FEATURES)
    for word, regular in (("h", False), ("hr", True)):
        *sizes, last = map(str, hadamards(regular))
        assert reader.ROTATIONS[word][1] == hadamards(regular)
        assert f"blocks of {', '.join(sizes)} or {last} columns" in PAGE
    rounded = PAGE.split("| ACTIVATIONS | scale |")[1].split("\n\n")[0]
    assert {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*", rounded, re.MULTILINE)))} == reader.INPUTS - {
        "16bit"
    }


@pytest.mark.skipif(os.name == "nt", reason="the page's command is one of a POSIX shell")
def test_the_command_of_the_page_runs() -> None:
    command = PAGE.split("```sh\n")[1].split("```")[0]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
    made = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "layers.int4_g128-16bit int4_g128-16bit (4, 256)" in made.stdout.splitlines()
