"""Files from strangers: read or refused by name, soon, in little memory and inside their folder, whatever they hold."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_report
import forked
import hostile
import pyarrow.parquet
import pytest
import torch
from exchange_files import tensors_of, write_model
from PIL import Image
from safetensors.torch import load_file, save_file
from shared import copy_of, write_lora
from tiny_configs import TINY_CONFIGS

from fluxq import tiny
from fluxq.base.files import read_json, read_sealed_json, sha256_json, write_json, write_sealed_json
from fluxq.base.model import load_pipeline, resolve_model
from fluxq.base.tensors import TensorFile, save_sealed
from fluxq.calibrate import calls, nested
from fluxq.calibrate.blocks import _Outputs
from fluxq.calibrate.capture import run_pipeline
from fluxq.calibrate.prompts import load_prompts
from fluxq.calibrate.statistics import GroupSums, Statistics
from fluxq.eval.report.card import with_evaluation
from fluxq.jobs.requirements import require_call
from fluxq.quantize.exchange import nunchaku
from fluxq.quantize.exchange.inspect import inspect_path
from fluxq.quantize.group import OutputSqnr, Stage
from fluxq.quantize.lora import LoraFile, read_updates
from fluxq.quantize.run import GroupOutcome, Outcome, finish, is_finished
from fluxq.quantize.structure import list_linears
from fluxq.recipes.all_families import FAMILIES
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import find_recipe, load_recipe
from tests.exchange.test_inspect import gguf_bytes

WEIGHTS = "diffusion_pytorch_model.safetensors"
SAME: Any = SimpleNamespace(differing=lambda _: [])  # a source that has not changed
FEW = {  # cases of every run, of the files that are read in no time
    **dict.fromkeys(("generation", "block", "calls", "call", "outputs", "outputs done", "levels", "job"), 6),
    **{f"{name} config": 1 for name in (*hostile.FAMILIES, "tokenizer")},
    **{f"prompts{suffix}": 4 for suffix in hostile.PROMPTS},
    **{f"inspect {name}": 2 for name in hostile.EXCHANGE},
    **{f"import {name}": 1 for name in hostile.IMPORTED},
    **{"second expert": 1, "scheduler": 1, "tokenizer": 1},
}
QUICK = {  # cases of every run
    **FEW,
    **{"weights": 40, "index": 20, "model_index": 20, "config": 20, "quantized config": 20, "plan": 10, "subject": 10},
    **{"load weights": 3, "load config": 3, "lora": 15, "statistics": 40, "recipe": 60, "report": 40},
}
ALL = {  # 3,000, and of each of the rest as many as take twenty seconds
    **{name: 30 * count for name, count in FEW.items()},
    **{"weights": 500, "index": 250, "model_index": 250, "config": 150, "encoder config": 150},
    **{"quantized config": 200, "quantized weights": 100, "plan": 100, "subject": 150, "load weights": 50},
    **{"load config": 50, "lora": 250, "statistics": 300, "recipe": 500, "report": 150},
}


@pytest.fixture(scope="module")
def strange(tmp_path_factory, pipe, plain_checkpoint) -> Path:
    """The folder that `hostile.py` damages."""
    root = tmp_path_factory.mktemp("strange") / "folder"
    copy_of(tiny.path(), root / "model")
    transformer = root / "model" / "transformer"
    shutil.copyfile(transformer / WEIGHTS, root / "model" / "outside.safetensors")
    names = TensorFile(transformer / WEIGHTS).keys()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, WEIGHTS)}
    (transformer / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    copy_of(plain_checkpoint("fp8"), root / "quantized")
    write_lora(root / "lora.safetensors", pipe.transformer, ("to_q", "ff.net.2"))
    (root / "report.json").write_text(example_report.example(1, count=2).model_dump_json())
    shutil.copyfile(find_recipe("int4-svd"), root / "recipe.yaml")
    sums = GroupSums.zeros(2, 8)
    sums.add(1, torch.ones(3, 8))
    trajectory = {"items": [["a red three", 0]], "model": "0" * 64}
    Statistics({"qkv": sums}, trajectory, sha256_json(trajectory)).save(root / "statistics.safetensors")
    write_families(root / "families")
    write_work(root / "work")
    begun = {"fluxq": "1", "model": {"transformer": "b", "text_encoder": "c"}, "copied": "d", "dtype": "bfloat16"}
    write_json(root / "begun" / ".out.0123456789abcdef.work" / "job.json", begun)
    write_prompts(root / "prompts")
    write_exchange(root / "exchange")
    return root


def write_families(root: Path) -> None:
    """A folder of each, whose components have configurations and no weights."""
    for name in hostile.FAMILIES:
        family = FAMILIES[name]
        components = ("one", "two") if name == "wan" else ("one",)
        entries = {component: [family.library, family.model] for component in components}
        write_json(root / name / "model_index.json", {"_class_name": "WanPipeline", **entries})
        for component in components:
            write_json(root / name / component / "config.json", TINY_CONFIGS[family.name])


def write_exchange(root: Path) -> None:
    """A small model in every layout whose words stand in a header or a configuration."""
    root.mkdir()
    write_model(root / "comfy.safetensors", "comfy", "nvfp4-nvfp4-static")
    write_model(root / "torchao", "torchao", "fp8-fp8")
    write_model(root / "modelopt", "modelopt", "nvfp4-nvfp4-static")
    write_model(root / "compressed_tensors", "compressed_tensors", "int8-16bit")
    write_model(root / "nunchaku_lite", "nunchaku_lite", "int4-int4")
    weight = torch.zeros(128, 128)
    layer = tensors_of(weight, Scheme.parse("int4-int4"), torch.zeros(128).bfloat16())
    encoded = nunchaku.encode(layer, single_file=True)
    header = nunchaku.metadata({"a": encoded.entry}, "NunchakuFluxTransformer2dModel", {"num_layers": 1})
    save_file({f"a.{name}": tensor for name, tensor in encoded.tensors.items()}, root / "nunchaku.safetensors", header)
    blocks = {"a.weight": (1, (2, 32), b"\1" * 128), "b.weight": (0, (2, 2), b"\0" * 16)}  # F16 and F32
    (root / "model.gguf").write_bytes(gguf_bytes(blocks))


def write_work(work: Path) -> None:
    """A finished block, a captured call, a block's outputs and the weights of steps."""
    cpu = torch.device("cpu")
    stages = (Stage("smooth", True, 0.5, 0.1, "pays"),)
    groups = {"qkv": GroupOutcome(("a.to_q", "a.to_k"), stages, OutputSqnr(20.0, (19.0, 21.0), 19.5, 18.0, 99), None)}
    outcome = Outcome({"a.to_q": Scheme.parse("fp8-fp8")}, {"a.to_q": 30.5}, groups)
    finish(work / "0000.safetensors", {"a.to_q.weight": torch.zeros(4, 8)}, outcome)
    given = ((torch.zeros(2, 4, 8).transpose(1, 2),), {"mask": None, "list": [1, torch.ones(3).expand(2, 3)]})
    layout, tensors = nested.pack(given, "given", cpu, cpu)
    stem = work / "calls" / "batch-0000"
    stem.parent.mkdir()
    save_sealed(tensors, Path(f"{stem}-transformer-000.safetensors"), {})
    outputs = {"blocks.0": nested.layout_of((torch.zeros(2, 3), 1.5), "output", cpu)}
    made = {"file": f"{stem.name}-transformer-000.safetensors", "step": 1, "arguments": layout, "outputs": outputs}
    write_sealed_json(
        stem.with_suffix(".json"), {"sigmas": [1.0, 0.5], "held": False, "calls": {"transformer": [made]}}
    )
    kept = _Outputs(work / "outputs", "whose they are", 1)
    kept.begin(0)
    kept.save(0, 0, (torch.zeros(2, 3), [torch.ones(1)]), "output", cpu)
    kept.finish(0)
    write_sealed_json(work / "levels.json", {"0": 0.5, "7": 1.5})


def write_prompts(root: Path) -> None:
    """The same rows in a file of each kind, with an image beside them."""
    root.mkdir()
    Image.new("RGB", (8, 8)).save(root / "a.png")
    rows = [{"prompt": f"a red {word}", "negative_prompt": "blue", "image": "a.png"} for word in ("one", "two")]
    lines = ["\t".join(rows[0]), *("\t".join(row.values()) for row in rows)]
    texts = {
        ".txt": "\n".join(row["prompt"] for row in rows),
        ".jsonl": "\n".join(map(json.dumps, rows)),
        ".json": json.dumps(rows),
        ".yaml": json.dumps({"first": rows[0], "second": rows[1]}),
        ".csv": "\n".join(lines).replace("\t", ","),
        ".tsv": "\n".join(lines),
    }
    for suffix, text in texts.items():
        (root / f"p{suffix}").write_text(text)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "p.parquet")


def in_a_process_of_its_own(*arguments: object) -> str:
    """Return the last line that Python with these arguments prints."""
    done = forked.run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("counts", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_damaged_files_are_read_or_refused(strange, counts):
    asked = [f"{name}={count}" for name, count in counts.items()]
    found = json.loads(in_a_process_of_its_own(hostile.__file__, strange, 20 if counts is QUICK else 7, *asked))
    assert found["faults"] == [] and found["cases"] == sum(counts.values())
    assert found["refused"] > found["cases"] / 2  # the damage is none that nobody sees


PLANTED = """
import json, re, sys
from pathlib import Path
import forked
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


@pytest.mark.slow
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


TABLE = torch.linspace(-1, 1, 16)
IN_TENSORS = {  # layers whose JSON is the data of a tensor: what it is called, what it says, the rest
    "comfy": ("comfy_quant", {"format": "awq_w4a16", "group_size": 64, "params": {"convrot": False}}, {}),
    "bnb": (
        "weight.quant_state.bitsandbytes__nf4",
        {"shape": [64, 64], "blocksize": 64, "nested_blocksize": 64, "nested_offset": 0.5, "dtype": "bfloat16"},
        {"weight.nested_absmax": torch.ones(1), "weight.nested_quant_map": torch.zeros(256)},
    ),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("dialect", IN_TENSORS)
def test_json_in_a_tensor_may_say_anything(dialect, tmp_path):
    name, said, rest = IN_TENSORS[dialect]
    rest = rest or {"weight_scale": torch.ones(1, 64).bfloat16(), "weight_zeros": torch.zeros(1, 64).bfloat16()}
    if dialect == "bnb":
        rest |= {"weight.absmax": torch.zeros(64, dtype=torch.uint8), "weight.quant_map": TABLE}
    rest |= {"weight": torch.zeros((2048, 1) if dialect == "bnb" else (64, 32), dtype=torch.uint8)}
    path, kinds = tmp_path / "model.safetensors", set()
    for number in range(-1, 150):
        chance = random.Random(number)
        text = json.dumps(said) if number < 0 else hostile.changed(said, chance, hostile.FRAGMENTS)
        data = text.encode() if number % 4 else hostile.garbled(text.encode(), chance)
        stored = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
        save_file({f"a.{key}": tensor for key, tensor in (rest | {name: stored}).items()}, path)
        kinds |= {(number < 0, fault.kind) for fault in inspect_path(path)[""].faults if fault.is_error}
    assert kinds == {(False, "unreadable")}


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
    "text",
    [
        "9" * 5000,
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        "\xff",
        "[]",
        '{"\\ud800": 1}',
        '{"a": NaN',
        "",
    ],
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


@pytest.mark.parametrize(
    ("component", "file", "changes", "message"),
    [
        ("scheduler", "scheduler_config.json", {"num_train_timesteps": 10**12}, "num_train_timesteps is 1000000000000"),
        ("scheduler", "scheduler_config.json", {"num_train_timesteps": float("inf")}, "num_train_timesteps is inf"),
        ("tokenizer_2", "tokenizer_config.json", {"extra_ids": 10**9}, "extra_ids is 1000000000, expected a number up"),
        (
            "transformer",
            "config.json",
            {"attention_head_dim": 2**32 - 1},
            "attention_head_dim is 4294967295, expected a",
        ),
        ("text_encoder", "config.json", {"text_config": {"num_hidden_layers": 2**40}}, "more than 8000 modules"),
    ],
)
def test_a_number_makes_no_table_without_end(tiny_folder, component, file, changes, message):
    path = tiny_folder / component / file
    write_json(path, {**read_json(path), **changes})
    with pytest.raises(ValueError, match=f"{component}/{file}: .*{message}"):
        resolve_model(str(tiny_folder))


def test_numbers_that_published_models_have_are_read(tiny_folder):
    scheduler, tokenizer = tiny_folder / "scheduler/scheduler_config.json", tiny_folder / "tokenizer"
    write_json(scheduler, {**read_json(scheduler), "lambda_min_clipped": float("-inf"), "sigma_max": 700})
    own = tokenizer / "tokenizer_config.json"
    write_json(own, {**read_json(own), "model_max_length": int(1e30)})
    load_pipeline(resolve_model(str(tiny_folder)))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("height", 0, "expected a whole number from 1 to 16384"),
        ("height", "16", "expected a whole number"),
        ("width", None, "expected a whole number"),
        ("width", True, "expected a whole number"),
        ("num_inference_steps", 10**9, "expected a whole number from 1 to 10000"),
        ("guidance_scale", float("nan"), "expected finite numbers or text"),
        ("guidance_scale", {"a": 1}, "expected finite numbers or text"),
        ("sigmas", [[1.0]], "expected finite numbers or text"),
        ("num_images_per_prompt", 3, "expected 1$"),
    ],
)
def test_arguments_that_no_call_takes_are_named(tiny_folder, argument, value, message):
    write_json(tiny_folder / "fluxq_generation.json", {argument: value})
    with pytest.raises(ValueError, match=rf"fluxq_generation\.json: {argument} is .*{message}"):
        _ = resolve_model(str(tiny_folder)).generation_defaults


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"true_cfg_scale": "x", "negative_prompt": "b"}, "true_cfg_scale is 'x', expected a number"),
        ({"ip_adapter_image": "x"}, "ip_adapter_image is 'x', expected what no file can say; remove it"),
        ({"height": 1}, "height is 1, expected a multiple of 2 from 4 up"),
        ({"width": 17}, "width is 17, expected a multiple of 2"),
        ({"prompt_2": ["a", "b"]}, r"prompt_2 is .*, expected one text, which all prompts share"),
        ({"negative_prompt_2": 5}, "negative_prompt_2 is '5', expected a text or a list, each a text"),
        (
            {"negative_prompt": "x" * 20_000},
            "negative_prompt is .*, a text of 20000 characters, expected 10000 at most",
        ),
        ({"guidance_scale": None}, "guidance_scale is 'None', expected a number"),
        ({"guidance_scale": True}, "guidance_scale is 'True', expected a number"),
        ({"sigmas": ["a"]}, "sigmas is .*, expected a list, each a number"),
    ],
)
def test_values_of_a_kind_that_the_call_does_not_take_are_named(tiny_folder, said, message):
    write_json(tiny_folder / "fluxq_generation.json", said)
    model = resolve_model(str(tiny_folder))
    with pytest.raises(ValueError, match=rf"fluxq_generation\.json: {message}"):
        require_call(model, model.generation_defaults)


def test_values_of_every_kind_that_the_call_takes_pass(tiny_folder):
    said = {"height": 32, "guidance_scale": 1, "negative_prompt": "b", "sigmas": [1, 0.5], "prompt_2": None}
    write_json(tiny_folder / "fluxq_generation.json", {**said, "true_cfg_scale": 2.5, "max_sequence_length": 8})
    model = resolve_model(str(tiny_folder))
    require_call(model, model.generation_defaults)


def test_a_size_that_the_vae_does_not_make_is_said_of_the_option_that_asks_for_it():
    with pytest.raises(ValueError, match=r"^--height is 3, expected a multiple of 2 from 4 up"):
        require_call(resolve_model("tiny"), {"height": 3}, {"height"})


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"max_sequence_length": 2000}, "ValueError: `max_sequence_length` cannot be greater than 512"),
        ({"guidance_scale": 1.0, "timesteps": [1]}, "TypeError: "),  # of another pipeline
    ],
)
def test_what_only_the_call_finds_wrong_names_the_file_and_its_keys(tiny_folder, said, error):
    write_json(tiny_folder / "fluxq_generation.json", said)
    model = resolve_model(str(tiny_folder))
    with pytest.raises(
        RuntimeError, match=rf"call failed \({error}.*with {', '.join(said)} of .*fluxq_generation\.json"
    ):
        list(run_pipeline(load_pipeline(model), [("a", 0)], {**model.generation_defaults, "height": 16, "width": 16}))


@pytest.mark.parametrize("file", ["../batch-0000-x", "/etc/passwd", "batch-0001-x.safetensors", "batch-0000-/../x"])
def test_a_captured_call_lies_beside_its_batch(strange, tmp_path, file):
    path = tmp_path / "batch-0000.json"
    record = read_sealed_json(strange / "work" / "calls" / path.name)
    record["calls"]["transformer"][0]["file"] = file
    write_sealed_json(path, record)
    with pytest.raises(ValueError, match=r"batch-0000\.json: .* names a file '.*' that is not beside it"):
        calls._record(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"strides": [2**40, 1]},
        {"strides": [-3, 1]},
        {"shape": [2**40, 3], "strides": [0, 0]},
        {"dtype": "Tensor"},
        {"dtype": "__class__"},
        {"host": 1},
        {"tensor": None},
    ],
    ids=str,
)
def test_a_layout_takes_no_more_memory_than_its_tensors(changes):
    layout = nested.layout_of(torch.zeros(2, 3), "it", torch.device("cpu"))
    nested.require_sound({"tuple": [layout, {"dict": {"a": None}}]})
    with pytest.raises(ValueError, match="its layout"):
        nested.require_sound({"tuple": [{**layout, **changes}]})


def test_a_finished_block_whose_header_is_damaged_is_made_again(tmp_path, caplog):
    file = tmp_path / "0000.safetensors"
    finish(file, {"a.weight": torch.zeros(2)}, Outcome({"a": Scheme.parse("fp8-fp8")}))
    assert is_finished(file, SAME) and Outcome.read([file]).schemes == {"a": Scheme.parse("fp8-fp8")}
    for said in ("", "[]", '{"schemes": {"a": "fp9"}, "weight_sqnr": {}, "groups": {}}'):
        save_file({"a.weight": torch.zeros(2)}, file, metadata={"fluxq_block": said})
        assert not is_finished(file, SAME)
        assert "0000.safetensors: the header of this finished block is damaged" in caplog.messages[-1]


@pytest.mark.parametrize(("kind", "text"), [(".jsonl", '{"prompt": "\\ud800"}'), (".json", '["\\ud800"]')])
def test_half_a_surrogate_pair_is_no_prompt(tmp_path, kind, text):
    (tmp_path / f"p{kind}").write_text(text)
    with pytest.raises(ValueError, match=rf"p{kind}.*: the prompt holds half of a surrogate pair"):
        load_prompts(str(tmp_path / f"p{kind}"), resolve_model("tiny"))


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".yaml"])
@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000])
def test_prompts_that_are_hard_to_parse_are_named(tmp_path, kind, text):
    (tmp_path / f"p{kind}").write_text(text)
    with pytest.raises(ValueError, match=rf"p{kind}"):
        load_prompts(str(tmp_path / f"p{kind}"), resolve_model("tiny"))


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


def _bomb(levels: int, use: str) -> str:
    """YAML of a line a level, each of which stands for twice as much as the one before."""
    lines = ["a: &a0 [x]", *(f"b{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, levels)), use.format(levels - 1)]
    return "\n".join(lines)


def _merged(levels: int) -> str:
    """YAML tables of a line a level, each of which takes the one before in twice."""
    lines = ["a: &a0 {x: 1}", *(f"b{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, levels))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("matter", "message"),
    [
        (_bomb(40, "license: *a{}"), "more than 20000 values, with what its aliases stand for"),
        (_merged(40), "more than 20000 values"),
        ("license: " + "[" * 3000, "nested more than 20 deep"),
        ("a: &a [*a]\nlicense: *a", "'a' holds itself"),
        ("license: {a: b}", "license is a dict, expected a text"),
        ("license: mit\n" + "# \n" * 100_000, "no second line of --- within 256 KiB"),
    ],
)
def test_a_model_card_takes_neither_time_nor_memory(tiny_folder, caplog, matter, message):
    (tiny_folder / "README.md").write_text(f"---\n{matter}\n---\n# a model")
    assert resolve_model(str(tiny_folder)).license == {}
    assert "README.md: front matter cannot be read" in caplog.text and message in caplog.text


def test_what_a_model_card_says_of_its_licence_is_short_and_printable(tiny_folder, caplog):
    (tiny_folder / "README.md").write_text(f'---\nlicense: [mit, "a\\e[31m"]\nlicense_name: {"x" * 9999}\n---\n')
    assert resolve_model(str(tiny_folder)).license == {"license": r"mit, a\x1b[31m", "license_name": "x" * 299 + "…"}
    assert "license_name has 9999 characters; cut to 300" in caplog.text


def test_an_evaluation_is_not_added_to_a_card_that_stands_for_too_much():
    card = f"---\n{_bomb(40, 'license: *a{}')}\n---\n"
    with pytest.raises(ValueError, match="more than 20000 values"):
        with_evaluation(card, example_report.example(1, count=2))


def test_tables_that_take_each_other_in_are_no_prompts(tmp_path):
    (tmp_path / "p.yaml").write_text(_merged(40))
    with pytest.raises(ValueError, match=r"p\.yaml: not YAML \(more than 250000 values"):
        load_prompts(str(tmp_path / "p.yaml"), resolve_model("tiny"))
