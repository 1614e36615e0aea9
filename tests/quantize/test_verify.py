"""`fluxq verify`: an undamaged checkpoint passes; every single damage is found by the right check and named."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from shared import copy_of
from torch import Tensor

from fluxq.base.files import sha256_file
from fluxq.base.tensors import TensorFile
from fluxq.cli import cli, main
from fluxq.jobs import making
from fluxq.quantize import record
from fluxq.quantize.record import DIGEST, DIGESTS, read_record, write_digests
from fluxq.quantize.verify import CHECKS, stored_fault, verify
from fluxq.recipes.formats import Scheme
from fluxq.recipes.recipe import shipped_recipes

LAYER = "transformer_blocks.0.attn.to_k"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
CONFIG = "transformer/config.json"
PLAN = "fluxq_plan.json"


@pytest.fixture
def copied(checkpoint, tmp_path) -> Callable[[str], Path]:
    """copied("nvfp4") is a checkpoint of that recipe that a test may damage."""
    return lambda recipe: Path(shutil.copytree(checkpoint(recipe), tmp_path / recipe))


def failed(folder: Path) -> dict[str, str]:
    """Failed check -> all that it found, as text."""
    return {r.check: "\n".join(f"{f.where}: {f.what}" for f in r.findings) for r in verify(folder) if r.findings}


def statuses(folder: Path) -> dict[str, str]:
    return {result.check: result.status for result in verify(folder)}


def edit_json(folder: Path, file: str, edit: Callable[[dict], object], recorded: bool = True) -> None:
    """Change a file as its writer would write it; the record's own SHA-256 too."""
    value = json.loads((folder / file).read_text())
    edit(value)
    if file == PLAN and value.pop("sha256", None):
        value["sha256"] = record._hash(value)
    (folder / file).write_text(json.dumps(value))
    if recorded and file != PLAN:
        record_hash(folder, file)


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object], file: str = WEIGHTS) -> None:
    """Change tensors, record the new hash and forget digests, so that only a look at the tensors can tell."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    record_hash(folder, file)
    forget_digests(folder)


def forget_digests(folder: Path) -> None:
    for config in folder.glob("*/config.json"):
        if "quantization_config" in json.loads(config.read_text()):
            edit_json(folder, str(config.relative_to(folder)), quantization(lambda q: [q.pop(DIGEST), q.pop(DIGESTS)]))


def record_hash(folder: Path, file: str) -> None:
    edit_json(folder, PLAN, lambda plan: plan["files"].update({file: sha256_file(folder / file)}))


# What is whole


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_an_undamaged_checkpoint_passes_every_check(checkpoint, recipe):
    assert statuses(checkpoint(recipe)) == dict.fromkeys(CHECKS, "ok")


@pytest.mark.often(1)
@pytest.mark.parametrize("recipe", shipped_recipes())
def test_what_diffusers_saved_again_passes_and_says_what_is_not_recorded(checkpoint, recipe, tmp_path):
    pipe = diffusers.DiffusionPipeline.from_pretrained(checkpoint(recipe), dtype=torch.bfloat16)
    pipe.save_pretrained(tmp_path / "again", max_shard_size="300KB")
    found = statuses(tmp_path / "again")
    assert found.pop("hashes") == found.pop("plan") == "not recorded"
    assert found.pop("digests") == "not recorded", "only that of the transformer is"
    assert found == dict.fromkeys(found, "ok")
    swap_two(tmp_path / "again" / "transformer")
    assert failed(tmp_path / "again").keys() == {"digests"}


def swap_two(folder: Path) -> None:
    """Exchange the weights of two layers of the same shape and format: well-formed, and wrong."""
    one, two = f"{LAYER}.weight", f"{LAYER.replace('to_k', 'to_v')}.weight"
    files = {file: load_file(file) for file in folder.glob("*.safetensors")}
    held = {name: tensors[name] for tensors in files.values() for name in (one, two) if name in tensors}
    for file, tensors in files.items():
        for name, other in ((one, two), (two, one)):
            if name in tensors:
                tensors[name] = held[other]
        save_file(tensors, file, metadata={"format": "pt"})


def test_without_the_plan_file_digests_in_config_json_still_tell(copied):
    folder = copied("nvfp4")
    (folder / PLAN).unlink()
    assert statuses(folder)["digests"] == "ok" and failed(folder) == {}
    swap_two(folder / "transformer")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_in.bias"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    found = failed(folder)
    assert found.keys() == {"digests"}
    assert [line.split(":")[0] for line in found["digests"].splitlines()] == ["transformer", "vae"]


def test_a_model_that_was_saved_alone_says_its_digest_whatever_its_shards(checkpoint, tmp_path):
    load = diffusers.FluxTransformer2DModel.from_pretrained
    model = load(checkpoint("fp8"), subfolder="transformer", dtype=torch.bfloat16)
    said = []
    for name, size in (("whole", "1GB"), ("shards", "300KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        assert statuses(tmp_path / name)["digests"] == "ok"
        said.append(json.loads((tmp_path / name / "config.json").read_text())["quantization_config"][DIGEST])
    (original,) = [json.loads((checkpoint("fp8") / CONFIG).read_text())["quantization_config"][DIGEST]]
    assert said == [original, original]


def test_quantized_text_encoders_pass_and_codes_without_their_last_axis_do_not(tmp_path):
    """T5's tied embedding is in the file under one of its two names; codes are stored (N, K, 1)."""
    components = ("text_encoder", "text_encoder_2")
    options = making.JobOptions("tiny", "mxfp8", components=components, output=str(tmp_path / "out"), check=False)
    making.quantize(making.job_of(options))
    assert failed(tmp_path / "out") == {}
    layer = "encoder.block.0.layer.0.SelfAttention.q.weight"
    file = "text_encoder_2/model.safetensors"
    edit_weights(tmp_path / "out", lambda tensors: tensors.update({layer: tensors[layer].squeeze(-1)}), file)
    found = failed(tmp_path / "out")
    assert found.keys() == {"tensors"} and f"text_encoder_2: {layer}: torch.float8_e4m3fn" in found["tensors"]


def test_a_snapshot_of_the_hubs_cache_is_links_to_blobs_and_passes(checkpoint, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    blobs.mkdir()
    source = checkpoint("fp8")
    for number, file in enumerate(sorted(file for file in source.rglob("*") if file.is_file())):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blobs / str(number))
        link.symlink_to(blobs / str(number))
    assert failed(snapshot) == {}


# One value of one tensor


def put(value: float) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.view(-1)[-1:].fill_(value)


def put_byte(byte: int) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.view(torch.uint8).view(-1)[-1:].fill_(byte)


VALUES = [
    *(("fp8", f"{LAYER}.weight_scale", put(value)) for value in (0.0, -1.0, float("inf"), float("nan"))),
    *(("int8", f"{LAYER}.weight_scale", put(value)) for value in (0.0, float("nan"))),
    *(("int4", f"{LAYER}.weight_scale", put(value)) for value in (0.0, -1.0, float("inf"), float("nan"))),
    *(("mxfp8", f"{LAYER}.weight_scale", put_byte(byte)) for byte in (0, 255)),
    *(("nvfp4", f"{LAYER}.weight_scale", put_byte(byte)) for byte in (0x00, 0x7F, 0xFF, 0x81)),
    *(("nvfp4", f"{LAYER}.weight_scale_2", put(value)) for value in (0.0, -1.0, float("inf"))),
    *(("nvfp4", f"{LAYER}.input_scale", put(value)) for value in (0.0, -1.0, float("nan"))),
    *((recipe, f"{LAYER}.weight", put_byte(byte)) for recipe in ("fp8", "mxfp8") for byte in (0x7F, 0xFF)),
    *((recipe, f"{LAYER}.bias", put(float("nan"))) for recipe in shipped_recipes()),
    ("fp8", "x_embedder.weight", put(float("-inf"))),
    *((recipe, f"{LAYER}.weight_scale", put(3e38)) for recipe in ("fp8", "int8")),
    ("mxfp8", f"{LAYER}.weight_scale", put_byte(0xFE)),
    ("nvfp4", f"{LAYER}.weight_scale_2", put(1e30)),
    *(("nvfp4", f"{LAYER}.input_scale", put(value)) for value in (3e38, 1e30, 1e-30)),
    ("int4", f"{LAYER}.bias", put(3e38)),
]


@pytest.mark.parametrize(("recipe", "name", "damage"), VALUES)
def test_one_bad_value_is_found_though_the_hash_agrees(copied, recipe, name, damage):
    folder = copied(recipe)
    edit_weights(folder, lambda tensors: damage(tensors[name]))
    found = failed(folder)
    assert found.keys() == {"tensors"}
    assert f"transformer: {name}: 1 of " in found["tensors"] and "quantize again" in found["tensors"]
    assert len(found["tensors"].splitlines()) == 1


# One tensor


def drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


TENSORS = {
    "scale missing": ("fp8", f"{LAYER}.weight_scale", drop, "missing"),
    "input scale missing": ("nvfp4", f"{LAYER}.input_scale", drop, "missing"),
    "bias missing": ("int4", f"{LAYER}.bias", drop, "missing"),
    "16-bit tensor missing": ("fp8", "proj_out.weight", drop, "missing"),
    "a scale too many": (
        "fp8",
        f"{LAYER}.weight_scale_2",
        lambda t, n: t.update({n: torch.ones(())}),
        "no such tensor",
    ),
    "a stranger": ("int8", "adapter.weight", lambda t, n: t.update({n: torch.ones(2)}), "no such tensor"),
    "scales as bf16": ("fp8", f"{LAYER}.weight_scale", lambda t, n: t.update({n: t[n].bfloat16()}), "torch.float32"),
    "codes as int8": ("nvfp4", f"{LAYER}.weight", lambda t, n: t.update({n: t[n].view(torch.int8)}), "torch.uint8"),
    "a scale per tensor": ("int8", f"{LAYER}.weight_scale", lambda t, n: t.update({n: t[n][:1]}), "(128,)"),
    "codes transposed": ("int4", f"{LAYER}.weight", lambda t, n: t.update({n: t[n].t().contiguous()}), "(128, 64)"),
    "bias as fp8": ("fp8", f"{LAYER}.bias", lambda t, n: t.update({n: t[n].to(torch.float8_e4m3fn)}), "torch.bfloat16"),
}


@pytest.mark.often(2)
@pytest.mark.parametrize("damage", TENSORS)
def test_one_damaged_tensor_is_named(copied, damage):
    recipe, name, edit, words = TENSORS[damage]
    folder = copied(recipe)
    edit_weights(folder, lambda tensors: edit(tensors, name))
    found = failed(folder)
    assert found.keys() <= {"tensors", "plan"}, "the plan records the size of all tensors"
    (line,) = found["tensors"].splitlines()
    assert line.startswith(f"transformer: {name}: ") and words in line and "again" in line


def test_tensors_of_both_16_bit_dtypes_are_found(copied):
    folder = copied("fp8")
    edit_weights(folder, lambda tensors: tensors.update({"x_embedder.bias": tensors["x_embedder.bias"].half()}))
    assert "x_embedder.bias is F16, of which a model has one" in failed(folder)["tensors"]


# Files


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("file", [WEIGHTS, "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"])
def test_one_flipped_bit_changes_the_hash(copied, file):
    folder = copied("int4")
    flip(folder / file)
    found = failed(folder)
    assert found.keys() == {"hashes", "digests"} and found["hashes"].startswith(f"{file}: SHA-256 is ")


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_truncated_weight_file_is_reported_once_and_named(copied, recipe):
    folder = copied(recipe)
    truncate(folder / WEIGHTS)
    found = statuses(folder)
    assert found["hashes"] == found["files"] == "failed" and found["tensors"] == "not made"
    assert "truncated or damaged" in failed(folder)["files"] and WEIGHTS in failed(folder)["files"]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    "file",
    [CONFIG, WEIGHTS, "model_index.json", "vae/config.json", "text_encoder_2/model.safetensors", "LICENSE.txt"],
)
def test_a_missing_file_is_named(copied, file):
    folder = copied("fp8")
    (folder / file).unlink()
    found = failed(folder)
    assert f"{file}: missing" in found["hashes"]
    edit_json(folder, PLAN, lambda plan: plan.pop("files"))
    found = "\n".join(failed(folder).values())
    assert Path(file).name in found or Path(file).parent.name in found or file == "LICENSE.txt"


@pytest.mark.parametrize("file", [CONFIG, PLAN, "model_index.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"components": 3, "files": 3}'])
def test_bad_json_is_a_finding_and_no_traceback(copied, file, text):
    folder = copied("fp8")
    (folder / file).write_text(text)
    found = failed(folder)
    assert found and file.rpartition("/")[2] in "\n".join(found.values())


def test_a_pickle_and_links_that_lead_outside_are_found(copied, tmp_path):
    folder = copied("fp8")
    (folder / "vae" / "extra.BIN").write_bytes(b"")
    outside = tmp_path / "weights.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    found = failed(folder)
    assert found.keys() == {"safe"}
    assert "vae/extra.BIN: a pickle" in found["safe"] and f"{WEIGHTS}: a link that leads out" in found["safe"]


def test_recorded_hashes_that_make_no_sense_are_refused(copied):
    folder = copied("fp8")
    edit_json(folder, PLAN, lambda plan: plan["files"].update({"../secret": "0"}))
    assert "lead out of the folder" in failed(folder)["hashes"]
    edit_json(folder, PLAN, lambda plan: plan.update(files={CONFIG: None}))
    assert "no names and hashes" in failed(folder)["hashes"]


# What is said of the layers


def quantization(edit: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda config: edit(config["quantization_config"])


SAID = {
    "unknown feature": (lambda q: q["required_features"].append("x_rays"), "config", "x_rays"),
    "needless feature": (lambda q: q["required_features"].append("low_rank"), "config", "the layers need"),
    "feature missing": (lambda q: q.update(required_features=[]), "config", "static_input_scale"),
    "newer format": (lambda q: q.update(format_version=99), "config", "update fluxq"),
    "unknown scheme": (lambda q: q["layers"].update({"fp3-fp3": ["proj_out"]}), "config", "fp3"),
    "layers named by numbers": (lambda q: q["layers"].update({"fp8-fp8": [1]}), "config", "else than text"),
    "layers named by lists": (lambda q: q["layers"].update({"fp8-fp8": [[1]]}), "config", "transformer/config.json"),
    "no fluxq checkpoint": (lambda q: q.update(quant_method="other"), "config", "fluxq quantize"),
    "no such layer": (lambda q: q["layers"].update({"fp8-fp8": ["nobody"]}), "tensors", "'nobody'"),
    "another scheme": (lambda q: swap(q["layers"], LAYER, "int8-16bit"), "plan", "fluxq_plan.json says nvfp4"),
}


def swap(layers: dict[str, list[str]], name: str, scheme: str) -> None:
    for members in layers.values():
        if name in members:
            members.remove(name)
    layers[scheme].append(name)


@pytest.mark.often(2)
@pytest.mark.parametrize("case", SAID)
def test_what_config_json_says_wrongly_is_found(copied, case):
    edit, check, words = SAID[case]
    folder = copied("nvfp4")
    edit_json(folder, CONFIG, quantization(edit))
    assert words in failed(folder)[check]


def layer_of(plan: dict) -> dict:
    return next(layer for layer in plan["components"][0]["layers"] if layer["name"] == LAYER)


PLANNED = {
    "another scheme": (lambda plan: layer_of(plan).update(scheme="fp8-fp8"), f"{LAYER}: {PLAN} says fp8-fp8"),
    "left in 16 bit": (lambda plan: layer_of(plan).update(scheme="16bit"), f"{LAYER}: {PLAN} says 16bit"),
    "another size": (lambda plan: plan["components"][0].update(bytes_after=1), "says 1"),
    "another component": (lambda plan: plan["components"][0].update(component="vae"), "vae: fluxq_plan.json says"),
    "no layers": (lambda plan: plan["components"][0].pop("layers"), "copy it again"),
}


@pytest.mark.often(1)
@pytest.mark.parametrize("case", PLANNED)
def test_a_plan_that_is_not_the_tensors_is_found(copied, case):
    edit, words = PLANNED[case]
    folder = copied("int8")
    edit_json(folder, PLAN, edit)
    found = failed(folder)
    assert found.keys() == {"plan"} and words in found["plan"]


def test_a_record_that_was_changed_is_found_and_is_not_judged_by(copied):
    folder = copied("int8")
    text = (folder / PLAN).read_text()
    (folder / PLAN).write_text(text.replace('"dtype": "bfloat16"', '"dtype": "float16"'))
    assert failed(folder) == {"plan": f"{PLAN}: changed since fluxq wrote it; copy it again"}
    with pytest.raises(ValueError, match=f"{PLAN}: changed since fluxq wrote it; copy it again, or --overwrite"):
        read_record(folder)
    said = json.loads(text)
    said["model"]["source"] = "/moved"  # paths are the user's to change
    (folder / PLAN).write_text(json.dumps(said))
    assert failed(folder) == {} and read_record(folder).model.source == "/moved"
    assert said.pop("sha256")
    (folder / PLAN).write_text(json.dumps(said))  # of a fluxq that wrote none
    assert failed(folder) == {} and read_record(folder).files == said["files"]


# The command


@pytest.fixture
def command(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fluxq", "verify", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return caught.value.code or 0, *capsys.readouterr()

    return run


def test_exit_code_0_where_all_is_well(command, checkpoint):
    code, out, err = command(checkpoint("fp8"))
    assert code == 0 and err == ""
    assert [line.split()[:2] for line in out.splitlines()] == [["ok", name] for name in CHECKS]


def test_exit_code_1_with_every_finding_where_something_is_wrong(command, copied):
    folder = copied("fp8")
    edit_weights(folder, lambda tensors: put(0.0)(tensors[f"{LAYER}.weight_scale"]))
    code, out, err = command(folder)
    assert code == 1 and err.startswith("Error: ") and "1 of 7 checks failed (tensors)" in err
    assert f"{LAYER}.weight_scale: 1 of 128 values are not finite and above 0: 0.0 at (127,)" in out
    code, out, _ = command(folder, "--json")
    assert code == 1 and {row["check"]: row["status"] for row in json.loads(out)}["tensors"] == "failed"


def test_exit_code_2_where_there_is_no_folder(command, tmp_path):
    code, out, err = command(tmp_path / "nothing")
    assert code == 2 and out == "" and "is no folder" in err and "Traceback" not in err


def test_a_plain_pipeline_is_no_checkpoint(command, tiny_folder):
    code, out, _ = command(tiny_folder)
    assert code == 1 and "no component has a quantization_config of fluxq" in out


@pytest.mark.parametrize(
    "planted",
    [
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "text_encoder_2/adapter_config.json",
        "tokenizer/added_tokens.json",
        "transformer/stale-00001-of-00002.safetensors",
        "adapter_config.json",
    ],
)
def test_what_nobody_recorded_and_a_loader_may_read_is_found(plain_checkpoint, tmp_path, planted):
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    for harmless in ("notes.txt", "eval/report.json", ".cache/huggingface/x.json"):
        (folder / harmless).parent.mkdir(parents=True, exist_ok=True)
        (folder / harmless).write_text("{}")
    assert statuses(folder)["hashes"] == "ok"
    (folder / planted).write_text('{"weight_map": {}}')
    (found,) = (each for each in verify(folder) if each.check == "hashes")
    assert found.status == "failed" and [finding.where for finding in found.findings] == [planted]
    assert found.findings[0].what.startswith("recorded by nobody, and a loader may read it: remove it")


@pytest.mark.slow
def test_checks_that_could_not_be_made_are_no_success(plain_checkpoint, tmp_path, monkeypatch):
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    (folder / "fluxq_plan.json").unlink()
    done = CliRunner().invoke(cli, ["verify", str(folder)])
    assert done.exit_code == 1 and "checks could not be made (hashes, plan)" in done.output.splitlines()[-1]
    (folder / "transformer" / "modeling.py").write_text("")
    (folder / "tokenizer_2" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    found = failed(folder)
    assert "modeling.py: code" in found["hashes"] and "tokenizer_2: none of" in found["files"]
    assert found["digests"].startswith("tokenizer_2: other settings")
    last = CliRunner().invoke(cli, ["verify", str(folder)]).output.splitlines()[-1]
    assert last.endswith("3 of 7 checks failed (hashes, files, digests), 1 could not be made (plan)")
    (folder / "transformer" / "modeling.py").unlink()
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer_2" / "tokenizer.json")
    assert CliRunner().invoke(cli, ["verify", str(folder), "--allow-unrecorded"]).exit_code == 0
    monkeypatch.chdir(folder.parent)  # a relative path names the same files
    assert CliRunner().invoke(cli, ["verify", folder.name, "--allow-unrecorded"]).exit_code == 0


@pytest.mark.slow
def test_a_vocabulary_larger_than_json_is_read_is_digested_as_a_file(plain_checkpoint, tmp_path):
    """That of Wan's text encoder has 16.8 MB."""
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    (folder / "fluxq_plan.json").unlink()
    file = folder / "tokenizer_2" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + " " * (1 << 24), encoding="utf-8")
    write_digests(folder)
    assert not failed(folder)
    file.write_text(file.read_text(encoding="utf-8")[:-1], encoding="utf-8")
    assert failed(folder)["digests"].startswith("tokenizer_2: other settings")


def test_settings_without_a_digest_are_said_to_be_unchecked(plain_checkpoint, tmp_path):
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    (folder / "fluxq_plan.json").unlink()

    def forget(config: dict[str, Any]) -> None:
        del config["quantization_config"]["config_digest"]

    edit_json(folder, "transformer/config.json", forget, recorded=False)
    last = CliRunner().invoke(cli, ["verify", str(folder)]).output.splitlines()[-1]
    assert "checks could not be made (hashes, digests, plan)" in last


def swap_layers(config: dict[str, Any]) -> None:
    layers = config["quantization_config"]["layers"]
    layers.update({"fp8-16bit": layers.pop("fp8-fp8")})  # no tensor tells


@pytest.mark.often(3)
@pytest.mark.parametrize(
    ("file", "alter"),
    [
        ("transformer/config.json", swap_layers),
        ("transformer/config.json", lambda config: config["quantization_config"].update(attention="fp8")),
        ("transformer/config.json", lambda config: config["quantization_config"].update(steps={"first": 1})),
        ("transformer/config.json", lambda config: config["axes_dims_rope"].reverse()),
        ("vae/config.json", lambda config: config.update(scaling_factor=9.0)),
        ("scheduler/scheduler_config.json", lambda config: config.update(shift=9.0)),
        ("tokenizer/tokenizer_config.json", lambda config: config.update(model_max_length=3)),
        ("tokenizer/tokenizer.json", lambda tokens: tokens.update(_made=3)),
    ],
)
def test_altered_settings_are_found_without_a_plan_file(plain_checkpoint, tmp_path, file, alter):
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    (folder / "fluxq_plan.json").unlink()
    assert not failed(folder)
    edit_json(folder, file, alter, recorded=False)
    component = file.partition("/")[0]
    assert failed(folder)["digests"] == (
        f"{component}: other settings than transformer/config.json records; copy its files again"
    )
    done = CliRunner().invoke(cli, ["verify", str(folder), "--allow-unrecorded"])
    assert done.exit_code == 1 and "of 7 checks failed" in done.output and "digests" in done.output


@pytest.mark.parametrize(
    ("name", "largest"), [("fp8", 0x7E), ("fp8_tensor", 0x7E), ("mxfp8", 0x7E), ("fp8_e5m2", 0x7B)]
)
def test_codes_beyond_the_largest_are_no_numbers(name, largest):
    scheme = Scheme.parse(f"{name}-16bit")
    dtype = getattr(torch, scheme.weights.element.storage)
    numbers = [sign | code for sign in (0, 0x80) for code in range(largest + 1)]
    for code in range(256):
        fault = stored_fault(torch.tensor([[0, code]], dtype=torch.uint8).view(dtype), "weight", scheme)
        assert fault == "" if code in numbers else fault.startswith("1 of 2 values are not numbers: ")


# What cannot be read


def test_a_plan_file_that_is_no_file_is_not_taken_for_none(plain_checkpoint, tmp_path):
    folder = copy_of(plain_checkpoint("fp8"), tmp_path / "out")
    (folder / "fluxq_plan.json").unlink()
    os.mkfifo(folder / "fluxq_plan.json")
    done = CliRunner().invoke(cli, ["verify", str(folder), "--allow-unrecorded"])
    assert done.exit_code != 0 and "fluxq_plan.json is no regular file" in done.output, done.output


@pytest.mark.often(1)
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_file_that_cannot_be_read_is_a_check_not_made(plain_checkpoint, monkeypatch, number):
    """R11: trouble of a disk, or too many open files, is no damage; nothing that is accepted by --allow-unrecorded."""

    def trouble(*_: object) -> Tensor:
        raise OSError(number, os.strerror(number), WEIGHTS)

    folder = plain_checkpoint("int8")
    monkeypatch.setattr(TensorFile, "get_tensor", trouble)
    (result,) = [result for result in verify(folder) if result.check == "tensors"]
    assert result.status == "not made" and os.strerror(number) in result.findings[0].what
    assert {status for check, status in statuses(folder).items() if check != "tensors"} == {"ok"}
    for words in ([], ["--allow-unrecorded"]):
        done = CliRunner().invoke(cli, ["verify", str(folder), *words])
        last = done.output.strip().splitlines()[-1]
        assert done.exit_code == 1
        assert "1 of 7 checks could not be made (tensors): a file cannot be read; run this again" in last


def test_a_component_that_is_missing_is_said_once_and_the_others_are_looked_at(plain_checkpoint, tmp_path):
    folder = copy_of(plain_checkpoint("int8"), tmp_path / "checkpoint")
    shutil.rmtree(folder / "vae")
    edit_weights(folder, lambda tensors: tensors[f"{LAYER}.weight_scale"].fill_(-1))
    found = failed(folder)
    assert "Errno" not in "".join(found.values())
    assert found["files"].startswith("vae/config.json: missing, though model_index.json names the model")
    assert "config" not in found and found["tensors"].startswith(f"transformer: {LAYER}.weight_scale")
