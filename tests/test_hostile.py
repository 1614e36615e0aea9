"""Files from strangers: read or refused by name, soon, in little memory and inside their folder, whatever they hold."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import example_report
import hostile
import pytest
import torch
from conftest import copy_of, write_lora
from safetensors.torch import load_file, save_file

from fluxq import tiny
from fluxq.base.files import read_json, sha256_json, write_json
from fluxq.base.model import resolve_model
from fluxq.base.tensors import TensorFile
from fluxq.calibrate.statistics import GroupSums, Statistics
from fluxq.quantize.checkpoint import list_linears
from fluxq.quantize.lora import LoraFile, read_updates
from fluxq.recipes.recipe import find_recipe, load_recipe

WEIGHTS = "diffusion_pytorch_model.safetensors"
QUICK = {  # cases of every run
    **{"weights": 40, "index": 20, "model_index": 20, "config": 20, "quantized config": 20, "plan": 10, "subject": 10},
    **{"load weights": 3, "load config": 3, "lora": 15, "statistics": 40, "recipe": 60, "report": 40},
}
ALL = {  # 10,000
    **{"weights": 1500, "index": 800, "model_index": 800, "config": 500, "encoder config": 500},
    **{"quantized config": 700, "quantized weights": 300, "plan": 300, "subject": 500, "load weights": 150},
    **{"load config": 150, "lora": 800, "statistics": 1000, "recipe": 1500, "report": 500},
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory, pipe, plain_checkpoint) -> Path:
    """The folder that `hostile.py` damages."""
    root = tmp_path_factory.mktemp("strange") / "folder"
    copy_of(tiny.path(), root / "model")
    transformer = root / "model" / "transformer"
    shutil.copyfile(transformer / WEIGHTS, root / "model" / "outside.safetensors")
    names = TensorFile(transformer / WEIGHTS).keys()
    (transformer / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    copy_of(plain_checkpoint("fp8"), root / "quantized")
    write_lora(root / "lora.safetensors", pipe.transformer, ("to_q", "ff.net.2"))
    (root / "report.json").write_text(example_report.example(1, count=2).model_dump_json())
    shutil.copyfile(find_recipe("int4-svd"), root / "recipe.yaml")
    sums = GroupSums.zeros(2, 8)
    sums.add(1, torch.ones(3, 8))
    trajectory = {"items": [["a red three", 0]], "model": "0" * 64}
    Statistics({"qkv": sums}, trajectory, sha256_json(trajectory)).save(root / "statistics.safetensors")
    return root


def in_a_process_of_its_own(*arguments: object) -> str:
    """What Python prints with these arguments, where modules are found in packages and tests alone."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hostile.__file__).parent)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("counts", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_damaged_files_are_read_or_refused(strange, counts):
    asked = [f"{name}={count}" for name, count in counts.items()]
    found = json.loads(in_a_process_of_its_own(hostile.__file__, strange, 20 if counts is QUICK else 7, *asked))
    assert found["faults"] == [] and found["cases"] == sum(counts.values())
    assert found["refused"] > found["cases"] / 2  # the damage is none that nobody sees


PLANTED = """
import json, re, sys
from pathlib import Path
import hostile

def unnamed(folder): int((folder / "recipe.yaml").read_text()[:1])
def crashes(folder): {}["weights"]
def hides_memory(folder):
    try: bytes(1 << 28)
    except Exception as error: raise ValueError(f"{folder}: {error}")
def is_slow(folder):
    while True: pass
def is_slow_in_c(folder): re.fullmatch("(a*)*b", "a" * 23)
def looks_elsewhere(folder):
    try: open(folder.parent / "elsewhere")
    except OSError: pass
def looks_at_the_neighbour(folder):
    try: open(folder / "model" / "outside.safetensors")
    except OSError: pass
def is_sound(folder): raise ValueError(f"{folder}: refused")

hostile.SECONDS, hostile.BYTES = 0.3, 1 << 26
folder = Path(sys.argv[1])
watch = hostile.Watch(folder)
hostile.limit_memory()
readers = [value for value in list(vars().values()) if getattr(value, "__module__", "") == "__main__"]
told = {read.__name__: hostile.fault_of(hostile.Target("recipe.yaml", read), folder, watch)[1] for read in readers}
print(json.dumps(told))
"""


def test_the_watch_sees_what_it_is_there_for(strange):
    told = json.loads(in_a_process_of_its_own("-c", PLANTED, strange))
    starts = {
        "unnamed": "names no file: ValueError",
        "crashes": "KeyError",
        "hides_memory": "wanted more than",
        "is_slow": "took",
        "is_slow_in_c": "took",
        "looks_elsewhere": "opened",
        "looks_at_the_neighbour": "opened",
    }
    assert told.pop("is_sound") == ""
    assert told.keys() == starts.keys()
    assert all(told[name].startswith(start) for name, start in starts.items()), told


# One stranger's idea each


@pytest.mark.parametrize("linked", [f"transformer/{WEIGHTS}", "vae/config.json", "text_encoder", "model_index.json"])
def test_a_link_that_leads_out_of_a_model_is_refused(tiny_folder, tmp_path, linked):
    (tiny_folder / linked).rename(tmp_path / "outside")
    (tiny_folder / linked).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{linked}: a link that leads out of the folder; put the file itself there"):
        resolve_model(str(tiny_folder))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "text_config"])
def test_a_config_fetches_no_kernel(tiny_folder, key):
    file = tiny_folder / "text_encoder_2" / "config.json"
    value = {"_attn_implementation": {"": "stranger/kernel"}} if key == "text_config" else "stranger/kernel"
    write_json(file, {**read_json(file), key: value})
    with pytest.raises(ValueError, match=r"text_encoder_2/config\.json: asks for attention from 'stranger/kernel'"):
        resolve_model(str(tiny_folder))


def test_links_inside_a_model_are_followed(tiny_folder):
    (tiny_folder / "transformer" / WEIGHTS).rename(tiny_folder / "transformer" / "kept")
    (tiny_folder / "transformer" / WEIGHTS).symlink_to("kept")
    assert resolve_model(str(tiny_folder)).weight_files("transformer")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.safetensors", "leads out of the folder"),
        ("/etc/passwd", "leads out of the folder"),
        ("..", "leads out of the folder"),
        ("", "missing, though"),
        ("folder.safetensors", "missing, though"),
        ("a\0b", "missing, though"),
        ("none.safetensors", "missing, though"),
        (["x"], "something else than text"),
    ],
)
def test_an_index_names_files_beside_it(tiny_folder, name, message):
    folder = tiny_folder / "transformer"
    shutil.copyfile(folder / WEIGHTS, tiny_folder / "outside.safetensors")
    (folder / "folder.safetensors").mkdir()
    write_json(folder / f"{WEIGHTS}.index.json", {"weight_map": {"x": name}})
    with pytest.raises(ValueError, match=message):
        resolve_model(str(tiny_folder)).weight_files("transformer")


@pytest.mark.parametrize(("component", "key"), [("transformer", "num_single_layers"), ("text_encoder_2", "num_layers")])
def test_a_number_of_layers_fills_no_memory(tiny_folder, component, key):
    file = tiny_folder / component / "config.json"
    write_json(file, {**read_json(file), key: 10**9})
    with pytest.raises(ValueError, match=r"config\.json.* its numbers ask for more than 8000 modules"):
        list_linears(resolve_model(str(tiny_folder)), component)


@pytest.mark.parametrize(
    "text", ["9" * 5000, "[" * 100_000 + "]" * 100_000, '{"a": ' + "9" * 5000 + "}", "\xff", "[]", '{"a": NaN', ""]
)
def test_no_json_is_named(tmp_path, text):
    (tmp_path / "some.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"some\.json: "):
        read_json(tmp_path / "some.json")


def test_a_json_larger_than_any_is_refused_unread(tmp_path):
    with (tmp_path / "some.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"some\.json: 1099511627776 bytes"):
        read_json(tmp_path / "some.json")


def with_configuration(file: Path, **changes: object) -> LoraFile:
    """The LoRA with another PEFT configuration in its header."""
    said = json.loads(TensorFile(file).metadata()["lora_adapter_metadata"])
    said |= {f"transformer.{key}": value for key, value in changes.items()}
    changed = file.with_name("changed.safetensors")
    save_file(load_file(file), changed, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(said)})
    return LoraFile(changed, 1)


def test_a_lora_imports_no_module_and_its_expressions_are_not_run(lora_file, tmp_path, monkeypatch):
    file = lora_file("plain.safetensors", ("to_q", "ff.net.2"), alpha=3)
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    strange = with_configuration(
        file, megatron_config={"a": 1}, megatron_core="planted", target_modules="(.*.*)*x", exclude_modules="(.*)*y"
    )
    model = resolve_model("tiny")
    plain, read = read_updates(LoraFile(file, 1), model, "transformer"), read_updates(strange, model, "transformer")
    assert plain.keys() == read.keys() and all(torch.equal(plain[name].delta, read[name].delta) for name in plain)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {"(.*.*)*x": 4}),
        ("alpha_pattern", {"a": "b"}),
        ("lora_alpha", 1e300),
        ("r", "4"),
        ("r", True),
        ("use_rslora", 1),
    ],
)
def test_a_lora_whose_scaling_is_no_plain_number_is_refused(lora_file, key, value):
    strange = with_configuration(lora_file("plain.safetensors", ("to_q",)), **{key: value})
    with pytest.raises(ValueError, match=rf"changed\.safetensors: says {key} is"):
        read_updates(strange, resolve_model("tiny"), "transformer")


@pytest.mark.parametrize("name", ["../outside.yaml", "{outside}", "link.yaml"])
def test_a_recipe_extends_nothing_outside_its_folder(tmp_path, name):
    outside, folder = tmp_path / "outside.yaml", tmp_path / "folder"
    outside.write_text("extends: fp8\n")
    folder.mkdir()
    (folder / "link.yaml").symlink_to(outside)
    (folder / "mine.yaml").write_text(f"extends: {name.format(outside=outside)}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml:1: .* leads out of .*folder; .* put the file there"):
        load_recipe(str(folder / "mine.yaml"))
    (folder / "below").mkdir()
    (folder / "below" / "base.yaml").write_text("extends: fp8\n")
    (folder / "mine.yaml").write_text("extends: below/base.yaml\n")
    assert load_recipe(str(folder / "mine.yaml"))[1] == load_recipe("fp8")[1]


def test_a_chain_of_recipes_ends(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    with pytest.raises(ValueError, match=r"8\.yaml: the 9th recipe of a chain"):
        load_recipe(str(tmp_path / "0.yaml"))


@pytest.mark.parametrize("text", ["count: 0x" + "f" * 9999, "? [a]\n: b", f"{'9' * 50}: 1", "a: " + "1" + ":59" * 999])
def test_a_recipe_that_is_hard_to_print_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(f"version: 1\n{text}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml:2: "):
        load_recipe(str(tmp_path / "mine.yaml"))
