"""Recipes: what is read, what is refused, and that every refusal names file and line."""

import json
import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fluxq.recipes.recipe import (
    COMPATS,
    PROFILES,
    TRANSFORMS,
    Component,
    Gate,
    LowRank,
    Recipe,
    Rotation,
    Rounding,
    find_recipe,
    gate_holds,
    load_recipe,
    parse_gate,
    shipped_recipes,
    split_gates,
)

MINIMAL = "version: 1\ncomponents:\n  transformer:\n    weights: {format: fp8}\n"
FULL = """\
version: 1
components:
  transformer:
    weights: {format: int4, group_size: 128}
    activations: {format: nvfp4}
    transforms: []
    low_rank: null
    rounding: {method: rtn, scales: amax}
    modulation: {format: fp8}
    overrides:
      - {role: mixed_out, weights: {format: fp8}, activations: {format: fp8}, reason: "fragile"}
      - {match: "transformer_blocks.0.**", reason: "first block"}
    exclude: ["single_transformer_blocks.*.proj_mlp"]
calibration: {prompts: default, count: 64, steps: 8, seed: 0}
model: tiny
profile: balanced
compat: portable
gates: ["psnr>=20"]
gate: {db_per_percent: 0.1, gpu: b200, tokens: 4608}
"""
# Everything that may be tried; each key on a line of its own.
TRYING = """\
version: 1
components:
  transformer:
    weights: {format: nvfp4, four_over_six: true}
    activations: {format: nvfp4, four_over_six: true}
    transforms: [center, smooth, hadamard]
    low_rank: {rank: 1/96, deflate: true}
    rounding: {method: gptq, scales: search}
calibration: {count: 8, steps: 2}
compat: full
"""


@pytest.fixture
def recipe(tmp_path):
    """recipe(text, name) writes a file and returns its path."""

    def write(text: str, name: str = "mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refused(path: str, message: str, line: int | None = None) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert message in text, text
    assert text.startswith(path + (f":{line}: " if line else ":")), text


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_with_and_without_its_suffix(name):
    assert load_recipe(name) == load_recipe(f"{name}.yaml") == load_recipe(str(find_recipe(name)))
    assert load_recipe(name)[0] == name


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_says_for_whom_and_writes_every_key_out(name):
    text = find_recipe(name).read_text()
    assert text.startswith("# For whom: ")
    said = yaml.safe_load(text)
    (component,) = said["components"].values()
    assert component.keys() == Component.model_fields.keys()
    is_gated = component["transforms"] or component["low_rank"]  # without stages that cost time there is no price
    assert said.keys() == Recipe.model_fields.keys() - {"model", "auto"} - (set() if is_gated else {"gate"})
    assert component["rounding"].keys() == Rounding.model_fields.keys()
    assert "match" not in text and "." not in str(component["overrides"])  # layers by role, never by name


def test_every_key_of_the_design_is_read(recipe):
    name, read = load_recipe(recipe(FULL))
    assert name == "mine"
    part = read.components["transformer"]
    assert (part.weights.row.name, part.weights.row.block) == ("int4_g128", (1, 128))
    assert part.overrides[1].weights is None and part.exclude == ["single_transformer_blocks.*.proj_mlp"]
    assert (read.calibration.count, read.model, read.gates) == (64, "tiny", ["psnr>=20"])


def test_attention_is_16_bit_or_fp8(recipe):
    read = load_recipe(recipe(MINIMAL + "    attention: fp8\n"))[1]
    assert read.components["transformer"].attention == "fp8"
    assert read.digest != load_recipe(recipe(MINIMAL))[1].digest
    for wrong in ("fp4", "sage", "16", "null", "{format: fp8}", "{fp8: blocks.0.attn}", "{16bit: ['**']}", "{}"):
        message = "components.transformer.attention: expected one of 16bit, fp8, int8, or patterns as in {fp8: "
        refused(recipe(MINIMAL + f"    attention: {wrong}\n"), message, 5)
    some = {"fp8": ["blocks.*.attn"], "int8": ["blocks.3.attn"]}
    read = load_recipe(recipe(MINIMAL + f"    attention: {json.dumps(some)}\n"))[1]
    assert read.components["transformer"].attention == some
    refused(recipe(MINIMAL + "    atention: fp8\n"), "unknown key 'atention' (did you mean 'attention'?)", 5)
    extending = "extends: nvfp4\ncomponents: {transformer: {attention: fp8}}\n"
    parts = [load_recipe(name)[1].components["transformer"] for name in (recipe(extending), "nvfp4")]
    assert parts[0] == parts[1].model_copy(update={"attention": "fp8"})


def test_what_is_left_out_has_a_default(recipe):
    read = load_recipe(recipe(MINIMAL))[1]
    part = read.components["transformer"]
    assert (part.activations, part.modulation, part.transforms, part.low_rank) == (None, None, [], None)
    assert (read.calibration, read.profile, read.compat, read.gates) == (None, "balanced", "portable", [])
    assert (part.rounding, read.gate) == (Rounding(method="rtn", scales="amax"), Gate(db_per_percent=0.1, gpu="b200"))
    assert not part.weights.four_over_six and part.attention == "16bit"


@pytest.mark.parametrize(
    ("base", "format", "cure"),
    [("nvfp4", "fp8", "four_over_six: false"), ("int4", "int8", "group_size: null")],
)
def test_a_key_of_the_extended_recipe_that_a_format_does_not_take_is_refused_with_what_to_write(
    tmp_path, base, format, cure
):
    file = tmp_path / "r.yaml"
    recipe = f"extends: {base}\ncomponents: {{transformer: {{weights: {{format: {format}}}}}}}"
    file.write_text(recipe)
    with pytest.raises(ValueError, match=rf"r\.yaml:2: components\.transformer\.weights: .*write `{cure}`"):
        load_recipe(str(file))
    file.write_text(recipe.replace(f"format: {format}", f"format: {format}, {cure}"))
    load_recipe(str(file))


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("weights: {format: int4", "weigths: {format: int4", "unknown key 'weigths' (did you mean 'weights'?)", 4),
        ("profile:", "profil:", "unknown key 'profil' (did you mean 'profile'?)", 16),
        ("steps: 8", "stepps: 8", "unknown key 'stepps' (did you mean 'steps'?)", 14),
        ("group_size: 128", "zzz: 128", "unknown key 'zzz'; keys here: format, group_size", 4),
        ('reason: "first block"', "because: 1", "unknown key 'because'", 12),
        ("{format: nvfp4}", "{format: nvfp}", "unknown format 'nvfp' (did you mean 'nvfp4'?)", 5),
        ("group_size: 128", "group_size: 32", "group_size 32 is not offered for int4: it is 64 or 128", 4),
        (
            "transforms: []",
            "transforms: [smoth]",
            "unknown transform 'smoth' (did you mean 'smooth'?); transforms: ",
            6,
        ),
        ("transforms: []", "transforms: [8]", "unknown transform 8; transforms: center, smooth, hadamard", 6),
        ("transforms: []", "transforms: [smooth, center]", "in one order, each once: write [center, smooth]", 6),
        ("transforms: []", "transforms: [smooth, smooth]", "in one order, each once: write [smooth]", 6),
        ("transforms: []", "transforms: smooth", "transforms: Input should be a valid list, got 'smooth'", 6),
        ("low_rank: null", "low_rank: 8", "low_rank: expected a mapping", 7),
        ("low_rank: null", "low_rank: {rank: 0}", "low_rank.rank: write a rank as an integer from 1 on, or as a", 7),
        ("low_rank: null", "low_rank: {deflate: true}", "low_rank.rank: Field required", 7),
        ("low_rank: null", "low_rank: {rank: 8, deflat: 1}", "unknown key 'deflat' (did you mean 'deflate'?)", 7),
        ("method: rtn", "method: gtpq", "rounding.method: Input should be 'rtn' or 'gptq', got 'gtpq'", 8),
        ("scales: amax", "scales: mse", "rounding.scales: Input should be 'amax' or 'search', got 'mse'", 8),
        ("group_size: 128", "four_over_six: true", "four_over_six is a choice between two scales of an nvfp4 block", 4),
        ("modulation: {format: fp8}", "modulation: {format: nvfp4, four_over_six: true}", "is rounded plainly", 9),
        ("per_percent: 0.1", "per_percent: -1", "gate.db_per_percent: Input should be greater than or equal to 0", 19),
        ("per_percent: 0.1", "per_percent: .inf", "gate.db_per_percent: Input should be a finite number", 19),
        ("gpu: b200", "gpu: b20", "gate.gpu: unknown GPU 'b20' (did you mean b200?); known: a100", 19),
        ("tokens: 4608", "tokens: 0", "gate.tokens: Input should be greater than or equal to 1", 19),
        ("modulation: {format: fp8}", "modulation: fp8", "expected a mapping", 9),
        ("count: 64", "count: '64'", "calibration.count: Input should be a valid integer, got '64'", 14),
        ("count: 64", "count: 0", "calibration.count: Input should be greater than or equal to 1, got 0", 14),
        ("seed: 0", "seed: -1", "calibration.seed: Input should be greater", 14),
        ("seed: 0", f"seed: {1 << 63}", "calibration.seed: Input should be less", 14),
        ("count: 64", "count: true", "calibration.count: Input should be a valid integer, got True", 14),
        ("version: 1", "version: 2", "version: Input should be 1, got 2", 1),
        ("version: 1", "version: '1'", "version: Input should be 1, got '1'", 1),
        ("balanced", "thorough", "profile: Input should be 'rtn', 'fast', 'balanced' or 'best', got 'thorough'", 16),
        ("portable", "everything", "compat: Input should be", 17),
        ('["psnr>=20"]', '["fid=3"]', "gate 'fid=3': write metric, comparison and number", 18),
        ('["psnr>=20"]', '["fit<=3"]', "gate 'fit<=3': unknown metric 'fit' (did you mean 'fid'?)", 18),
        ('["psnr>=20"]', "psnr>=20", "gates: Input should be a valid list", 18),
        ("{role: mixed_out, ", "{", "an override names either `role` or `match`", 11),
        ("{role: mixed_out, ", "{role: a, match: b, ", "an override names either `role` or `match`", 11),
        ("weights: {format: fp8}, activations", "activations", "cannot be quantized where the weights stay", 11),
        (', reason: "fragile"', "", "components.transformer.overrides.0.reason: Field required", 11),
        ("exclude: [", "exclude: [3, ", "components.transformer.exclude.0: Input should be a valid string, got 3", 13),
        ("model: tiny", "model: 5", "model: Input should be a valid string, got 5", 15),
        ("model: tiny", "model: tiny\nmodel: tiny", "key 'model' is given twice", 16),
        ("model: tiny", "model: &m tiny", "anchors and aliases are not allowed", 15),
        ("model: tiny", "model: *m", "anchors and aliases are not allowed", 15),
        ("model: tiny", "model: !!python/object/apply:os.getcwd []", "could not determine a constructor", 15),
        ("model: tiny", "model: [tiny", "expected ',' or ']'", 16),
        ("model: tiny", "model: 2020-13-45", "month must be in 1..12", None),
    ],
)
def test_a_mistake_is_named_with_file_line_and_cure(recipe, old, new, message, line):
    assert FULL.count(old) == 1 or old in ("balanced", "portable"), old
    refused(recipe(FULL.replace(old, new, 1)), message, line)


@pytest.mark.parametrize(
    "rank", ["0", "-3", "true", "1.0", "0.0", ".nan", ".inf", "5/4", "3/3", "0/9", "1/0", "half", "[1]"]
)
def test_a_rank_that_is_none_is_refused(recipe, rank):
    assert rank == "0" or not rank.isdigit()
    refused(recipe(TRYING.replace("1/96", rank)), "low_rank.rank: write a rank as an integer from 1 on", 7)


@pytest.mark.parametrize(
    ("rank", "n", "k", "whole"),
    [
        ("1/96", 3072, 3072, 32),
        ("1/96", 9216, 3072, 32),
        ("1/96", 512, 512, 5),  # 5.33
        ("1/96", 528, 4096, 6),  # 5.5
        ("1/96", 40, 3072, 1),  # at least 1
        ("1/3", 3, 9, 1),
        (0.5, 5, 8, 3),
        (32, 3072, 3072, 32),
        (32, 16, 16, 32),  # the plan refuses it by the layer's name
    ],
)
def test_a_share_is_of_the_smaller_side_to_the_nearest_whole_rank(rank, n, k, whole):
    assert LowRank(rank=rank).rank_of(n, k) == LowRank(rank=rank).rank_of(k, n) == whole


@pytest.mark.parametrize("chosen", [[], ["center"], ["smooth", "hadamard"], ["center", "hadamard"], list(TRANSFORMS)])
def test_any_subset_of_the_transforms_is_read(recipe, chosen):
    text = TRYING.replace("[center, smooth, hadamard]", f"[{', '.join(chosen)}]")
    assert load_recipe(recipe(text))[1].components["transformer"].transforms == chosen


@pytest.mark.parametrize(
    ("compat", "old", "new", "line", "beyond"),
    [
        ("portable", "", "", 6, "hadamard is more than `compat: portable` allows, which is what every export target"),
        ("portable", ", hadamard", "", 7, "components.transformer.low_rank: a low-rank branch is more than"),
        (
            "nunchaku",
            "",
            "",
            6,
            "center is more than `compat: nunchaku` allows, which is what nunchaku's file can hold",
        ),
        ("nunchaku", "center, ", "", 6, "components.transformer.transforms.1: hadamard is more than"),
        ("nunchaku", "center, smooth, hadamard", "smooth", 7, "low_rank.deflate: deflation is more than"),
    ],
)
def test_what_the_target_cannot_hold_is_refused(recipe, compat, old, new, line, beyond):
    text = TRYING.replace("compat: full", f"compat: {compat}").replace(old, new, 1)
    refused(recipe(text), beyond, line)
    with pytest.raises(
        ValueError, match=r"write `(low_rank: null|deflate: false)`|leave it out, or write `compat: full`"
    ):
        load_recipe(recipe(text), profile="rtn")  # a profile changes what is read of a file, not what it may say


@pytest.mark.parametrize("compat", ["portable", "nunchaku"])
def test_four_over_six_of_activations_is_for_fluxq_alone(recipe, compat):
    plain = TRYING.replace("compat: full", f"compat: {compat}").replace("center, smooth, hadamard", "smooth")
    plain = plain.replace("low_rank: {rank: 1/96, deflate: true}", "low_rank: null")
    refused(recipe(plain), "activations.four_over_six: four_over_six of activations is more than", 5)
    nvfp4 = "{format: nvfp4}"
    kept = plain.replace("activations: {format: nvfp4, four_over_six: true}", f"activations: {nvfp4}")
    assert load_recipe(recipe(kept))[1].components["transformer"].weights.four_over_six
    tried = "activations: {format: nvfp4, four_over_six: true}"
    override = f"    overrides: [{{role: qkv, weights: {nvfp4}, {tried}, reason: r}}]"
    refused(
        recipe(kept.replace("calibration:", override + "\ncalibration:")), "overrides.0.activations.four_over_six", 9
    )


def test_nunchaku_holds_a_low_rank_branch_and_everything_else_is_for_full(recipe):
    held = TRYING.replace("center, smooth, hadamard", "smooth").replace("deflate: true", "deflate: false")
    held = held.replace("compat: full", "compat: nunchaku").replace("four_over_six: true", "four_over_six: false")
    assert load_recipe(recipe(held))[1].components["transformer"].low_rank == LowRank(rank="1/96")
    assert load_recipe(recipe(TRYING))[1].compat == "full" and set(COMPATS) == {"portable", "comfy", "nunchaku", "full"}


ROTATED = """version: 1
components:
  transformer:
    weights: {format: int8}
    activations: {format: int8}
    hadamard: {kind: regular, size: 256}
compat: full
"""


def test_a_rotation_names_its_kind_and_size_and_needs_no_data(recipe):
    _, read = load_recipe(recipe(ROTATED))
    rotation = read.components["transformer"].hadamard
    assert rotation == Rotation(kind="regular", size=256) and rotation.sizes == (16, 64, 256)
    assert read.calibration is None and not read.needs_data(read.components["transformer"])
    assert Rotation(kind="sylvester", size=64).sizes == (16, 32, 64) and Rotation(size=16).is_regular
    assert load_recipe(recipe(ROTATED.replace("full", "comfy")))[1].digest != read.digest


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("size: 256", "size: 128", "hadamard: blocks of the regular matrix have 16, 64, 256 columns"),
        ("regular, size: 256", "sylvester, size: 256", "blocks of the sylvester matrix have 16, 32, 64, 128 columns"),
        ("regular, size: 256", "sylvester, size: 0", "blocks of the sylvester matrix have 16"),
        ("kind: regular", "kind: walsh", "hadamard.kind: Input should be 'regular' or 'sylvester'"),
        (", size: 256", "", "hadamard.size: Field required"),
        ("    activations: {format: int8}\n", "", "hadamard: it rotates inputs that are quantized: give activations"),
        ("activations: {format: int8}", "activations: {format: nvfp4}", "hadamard: nvfp4 activations have one scale"),
        ("256}\n", "256}\n    transforms: [hadamard]\n", "hadamard: it rotates every input: take hadamard out of"),
        ("compat: full", "compat: portable", "hadamard: a rotation is more than `compat: portable` allows"),
        ("compat: full", "compat: nunchaku", "write `hadamard: null`, `compat: comfy`, or write `compat: full`"),
        (
            "regular, size: 256}\ncompat: full",
            "sylvester, size: 64}\ncompat: comfy",
            "hadamard: a rotation by Sylvester's matrix is more than `compat: comfy` allows",
        ),
    ],
)
def test_a_rotation_that_cannot_be_is_refused(recipe, old, new, words):
    assert old in ROTATED
    with pytest.raises(ValueError, match=re.escape(words)):
        load_recipe(recipe(ROTATED.replace(old, new)))


def uses_data(read):
    return any(map(read.needs_data, read.components.values()))


@pytest.mark.parametrize(
    ("key", "profiles"),
    [
        ("transforms: [center]", ("fast", "balanced", "best")),
        ("low_rank: {rank: 8}", ("fast", "balanced", "best")),
        ("rounding: {scales: search}", ("fast", "balanced", "best")),
        ("rounding: {method: gptq}", ("balanced", "best")),  # fast skips it
        ("weights: {format: nvfp4, four_over_six: true}", ()),
    ],
)
def test_what_is_fitted_to_data_asks_for_it(recipe, key, profiles):
    weights = "" if key.startswith("weights") else "    weights: {format: nvfp4}\n"
    text = f"version: 1\ncomponents:\n  transformer:\n{weights}    {key}\ncompat: full\n"
    for profile in PROFILES:
        read = load_recipe(recipe(text + "calibration: {count: 4}\n"), profile=profile)[1]
        assert uses_data(read) == (profile in profiles)
        assert not read.has_static_scales(read.components["transformer"])
        if profile in profiles:
            with pytest.raises(ValueError, match=r"calibration: what transformer says is fitted to data, and there is"):
                load_recipe(recipe(text), profile=profile)
        else:
            assert not uses_data(load_recipe(recipe(text), profile=profile)[1])
    if profiles:
        lines = len(text.splitlines())
        refused(recipe(text + "calibration: null\n"), "give {count: 64, steps: 8}, or write `profile: rtn`", lines + 1)


def test_a_missing_key_is_named(recipe):
    refused(recipe("version: 1\n"), "components: Field required", 1)
    refused(recipe("version: 1\ncomponents: {}\n"), "components: Dictionary should have at least 1 item", 2)
    refused(recipe("version: 1\ncomponents:\n  transformer: {}\n"), "components.transformer.weights: Field required", 3)


def test_all_mistakes_are_told_at_once(recipe):
    path = recipe(FULL.replace("profile: balanced", "profile: x").replace("steps: 8", "steps: 0"))
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:14", f"{path}:16"]


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n", "3\n", "# only a comment\n"])
def test_a_file_that_is_no_mapping_is_no_recipe(recipe, text):
    refused(recipe(text), "a recipe is a mapping, for example `extends: nvfp4`", 1)


def test_two_documents_are_no_recipe(recipe):
    refused(recipe(MINIMAL + "---\n" + MINIMAL), "another document", 5)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"version: \xff\xfe\x00")
    refused(str(path), "not a text file")
    path.write_bytes(b"version: \x00\x01")
    refused(str(path), "special characters")


def test_a_bomb_is_refused_at_once(recipe):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, here in zip("abcdefgh", "bcdefghi", strict=True)
    )
    start = time.process_time()
    refused(recipe(bomb), "anchors and aliases are not allowed; write the value out", 1)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("nesting", ["[" * 60_000, "a: " + "{b: " * 1000, "- " * 5000])
def test_deep_nesting_is_refused_at_once(recipe, nesting):
    start = time.process_time()
    refused(recipe(nesting), "nested more than 32 deep", 1)
    assert time.process_time() - start < 2


def test_a_huge_file_is_refused_unread(recipe):
    refused(recipe("# " + "x" * (1 << 16)), "larger than 65536 bytes")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch {}']", "!!python/name:os.system", "!x {}"])
def test_a_tag_runs_nothing(recipe, tmp_path, tag):
    trace = tmp_path / "trace"
    refused(recipe(MINIMAL + f"model: {tag.format(trace)}\n"), "could not determine a constructor", 5)
    assert not trace.exists()


def test_extends_merges_mappings_and_replaces_the_rest(recipe):
    recipe(FULL, "base.yaml")
    top = "extends: base.yaml\ncomponents:\n  transformer:\n    modulation: null\n    exclude: []\ngates: []\n"
    name, read = load_recipe(recipe(top))
    base = load_recipe(recipe(FULL, "base.yaml"))[1]
    part, below = read.components["transformer"], base.components["transformer"]
    assert name == "mine" and (part.modulation, part.exclude, read.gates) == (None, [], [])
    assert (part.weights, part.overrides, read.calibration) == (below.weights, below.overrides, base.calibration)


def test_extends_takes_a_shipped_recipe_and_chains(recipe):
    recipe("extends: nvfp4\ncalibration: {count: 3}\n", "middle.yaml")
    read = load_recipe(recipe("extends: middle.yaml\ncalibration: {steps: 2}\n"))[1]
    assert (read.calibration.count, read.calibration.steps) == (3, 2)
    assert read.components == load_recipe("nvfp4")[1].components


def test_a_recipe_may_extend_the_shipped_one_of_its_own_name(recipe):
    assert load_recipe(recipe("extends: nvfp4\n", "nvfp4.yaml"))[1] == load_recipe("nvfp4")[1]


def test_a_mistake_below_extends_is_found_in_its_own_file(recipe):
    base = recipe(FULL.replace("steps: 8", "steps: 0"), "base.yaml")
    with pytest.raises(ValueError, match=re.escape(f"{base}:14: calibration.steps")):
        load_recipe(recipe("extends: base.yaml\n"))


def test_a_mistake_above_a_base_is_not_blamed_on_the_base(recipe):
    recipe(FULL, "base.yaml")
    top = "extends: base.yaml\ncomponents:\n  transformer:\n    overrides:\n      - {role: mixed_out}\n"
    refused(recipe(top), "overrides.0.reason: Field required", 5)


@pytest.mark.parametrize(
    ("value", "message"),
    [("nowhere", "'nowhere' is neither a file nor a shipped recipe; shipped: fp8"), ("[fp8]", "takes the name of one")],
)
def test_extends_that_leads_nowhere_is_named(recipe, value, message):
    refused(recipe(f"version: 1\nextends: {value}\n"), message, 2)


def test_extends_in_a_circle_is_refused(recipe):
    recipe("extends: b.yaml\n", "a.yaml")
    with pytest.raises(ValueError, match="`extends` leads back to this file"):
        load_recipe(recipe("extends: a.yaml\n", "b.yaml"))
    with pytest.raises(ValueError, match="`extends` leads back to this file"):
        load_recipe(recipe("extends: ../sub/c.yaml\n", "sub/c.yaml"))


def test_an_unknown_recipe_lists_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match=r"'nvfp5' is neither .* shipped: fp8, fp8-comfy, int4, .*nvfp4"):
        load_recipe("nvfp5")


def test_digest_depends_on_what_is_said_and_nothing_else(recipe):
    digest = load_recipe(recipe(FULL))[1].digest
    shuffled = yaml.safe_load(FULL)
    shuffled = dict(reversed(shuffled.items()))
    assert load_recipe(recipe("# a comment\n" + yaml.safe_dump(shuffled), "other.yaml"))[1].digest == digest
    assert load_recipe(recipe(f"extends: {recipe(FULL, 'base.yaml')}\n"))[1].digest == digest
    for old, new in [("steps: 8", "steps: 9"), ("128", "64"), ("psnr>", "latent_sqnr>"), ("first block", "1st block")]:
        assert load_recipe(recipe(FULL.replace(old, new)))[1].digest != digest, old


@pytest.mark.parametrize("profile", PROFILES)
def test_profile_on_the_command_line_overrides_the_file(recipe, profile):
    assert load_recipe(recipe(FULL), profile=profile)[1].profile == profile


@pytest.mark.parametrize("name", shipped_recipes())
def test_rtn_never_calibrates(name):
    assert not uses_data(load_recipe(name, profile="rtn")[1])
    assert uses_data(load_recipe(name)[1]) == (load_recipe(name)[1].calibration is not None)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_one_level_activations_need_no_data(recipe, name):
    assert not uses_data(load_recipe(name)[1])
    assert not uses_data(load_recipe(recipe(f"extends: {name}\ncalibration: {{count: 4}}\n"))[1])


def test_an_override_with_two_level_activations_needs_data(recipe):
    override = "[{role: qkv, weights: {format: nvfp4}, activations: {format: nvfp4}, reason: r}]"
    text = f"extends: fp8\ncalibration: {{count: 4}}\ncomponents: {{transformer: {{overrides: {override}}}}}\n"
    assert uses_data(load_recipe(recipe(text))[1])


def test_each_entry_needs_data_or_not(recipe):
    text = "extends: nvfp4\ncomponents:\n  text_encoder:\n    weights: {format: nvfp4}\n"
    read = load_recipe(recipe(text))[1]
    assert uses_data(read) and read.needs_data(read.components["transformer"])
    assert not read.needs_data(read.components["text_encoder"])


def test_gates():
    assert parse_gate(" psnr >= -2.5 ") == ("psnr", ((">=", -2.5),))
    assert parse_gate("23.01 <= fid<23.95") == ("fid", ((">=", 23.01), ("<", 23.95)))
    for gate, value, holds in [
        ("psnr>=20", 20.0, True),
        ("psnr>20", 20.0, False),
        ("psnr<=20", 20.0, True),
        ("psnr<20", 20.0, False),
        ("psnr>=20", float("inf"), True),
        ("psnr>=20", float("nan"), False),
        ("psnr<=20", float("nan"), False),
        ("psnr<=20", None, False),
        ("19<=psnr<=20", 18.9, False),
        ("19<=psnr<=20", 19.0, True),
        ("19<=psnr<=20", 20.0, True),
        ("19<=psnr<=20", 20.1, False),
        ("19<psnr<20", 19.0, False),
        ("19<psnr<20", 20.0, False),
        ("19<=psnr<=20", float("nan"), False),
    ]:
        assert gate_holds(gate, {"psnr": value, "ssim": 1.0}) is holds
    assert not gate_holds("psnr<=20", {})
    for gate in ("psnr", "psnr=20", "psnr>=", "psnr>=20dB", "PSNR>=20", "30>=psnr>=20", "20<=psnr", "1<=psnr>=2"):
        with pytest.raises(ValueError, match=r"in 'psnr>=20', or a window as in '23.01<=fid<=23.95'; metrics: psnr, "):
            parse_gate(gate)


@pytest.mark.parametrize(
    "gate, message",
    [
        ("psnr_db>=20", r"unknown metric 'psnr_db' \(did you mean 'psnr'\?\); metrics: psnr, ssim, "),
        ("0<=latent_sqn<=3", r"unknown metric 'latent_sqn' \(did you mean 'latent_sqnr'\?\)"),
        ("zzz>=20", r"unknown metric 'zzz'; metrics: psnr, "),
        ("24<=fid<=23", r"lets nothing by: a window goes from its lower to its higher number$"),
        ("24<fid<24", r"lets nothing by"),
    ],
)
def test_gates_that_mean_nothing(gate, message):
    with pytest.raises(ValueError, match=message):
        parse_gate(gate)


def test_gates_are_split_by_what_was_measured():
    gates = ["psnr>=20", "1<=fid<=3", "latent_sqnr>=5", "lpips<0.2"]
    assert split_gates(gates, {"psnr": 1.0, "latent_sqnr": 2.0}) == (
        ["psnr>=20", "latent_sqnr>=5"],
        ["1<=fid<=3", "lpips<0.2"],
    )
    assert split_gates([], ["psnr"]) == ([], [])


@pytest.mark.parametrize(("kind", "place"), [(Recipe, 0), (Component, 1)])
def test_the_tables_of_keys_name_every_key_and_its_default(kind, place):
    text = (find_recipe("fp8").parent / "README.md").read_text(encoding="utf-8")
    table = text.split("| key | default | value |\n|---|---|---|\n")[1 + place].split("\n\n")[0]
    rows = {cells[1].strip(" `"): cells[2].strip(" `") for cells in (line.split("|") for line in table.splitlines())}
    assert rows.keys() - {"extends"} == kind.model_fields.keys()
    for name, field in kind.model_fields.items():
        if field.is_required():
            assert rows[name] == "required"
        else:
            default = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
            assert yaml.safe_load(rows[name]) == default, name


def test_a_recipe_needs_no_version(tmp_path):
    (tmp_path / "own.yaml").write_text("components: {transformer: {weights: {format: fp8}}}\n")
    assert load_recipe(str(tmp_path / "own.yaml"))[1].version == 1


def test_a_shipped_recipe_is_found_in_any_case():
    assert load_recipe("NVFP4")[0] == load_recipe("nvfp4")[0] == "nvfp4"
    with pytest.raises(FileNotFoundError, match=r"\(did you mean 'nvfp4'\?\); shipped: "):
        load_recipe("nvpf4.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "3: auto: a search has one budget; write one of bits, size, vram, ms, gate"),
        ("{bits: 5.5, size: 9GB}", "bits and size are 2: leave out all but one, or write null for that"),
        ("{bits: 0}", "auto.bits: Input should be greater than 0, got 0"),
        ("{bits: .nan}", "auto.bits: Input should be a finite number"),
        ("{size: 9}", ""),
        ("{size: 9 GB of it}", "auto.size: write a size with its unit, as in 9GB"),
        ("{ms: 70}", "write gpu too, as in {ms: 70, gpu: h200}"),
        ("{ms: 70, gpu: h20000}", "auto.gpu: "),
        ("{gate: 'latent_sqnr~30'}", "auto.gate: "),
        ("{bits: 5.5, menu: [nvfp4, fp9]}", "auto.menu: "),
        ("{bits: 5.5, count: 0}", "auto.count: "),
        ("{bit: 5.5}", "unknown key 'bit' (did you mean 'bits'?)"),
        ("{bits: 5.5, menu: [nvfp4, 16bit], count: 4}", ""),
        ("{gate: 'latent_sqnr>=30', gpu: h200}", ""),
    ],
)
def test_a_search_is_read_strictly(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: nvfp4\nprofile: rtn\nauto: {text}\n")
    if message:
        with pytest.raises(ValueError) as caught:
            load_recipe(str(file))
        assert message in str(caught.value), caught.value
    else:
        read = load_recipe(str(file))[1]
        assert read.auto is not None and read.digest == load_recipe("nvfp4", profile="rtn")[1].digest


def test_a_search_s_size_is_in_bytes(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: nvfp4\nauto: {size: 1.5GiB}\n")
    auto = load_recipe(str(file))[1].auto
    assert auto is not None and auto.size == 3 << 29 and str(auto) == "size: 1610612736"


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors; `recipes/schema.json` holds it.

    A file with `extends` may leave out any key, so only a file without it needs `components`.
    """
    schema = Recipe.model_json_schema()
    extends = {"type": "string", "description": "Start from this recipe: a file, or the name of a shipped one."}
    del schema["required"], schema["$defs"]["Component"]["required"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {"extends": extends, **schema["properties"]},
        "anyOf": [{"required": ["extends"]}, {"required": ["components"]}],
    }


def test_the_committed_schema_is_up_to_date():
    committed = json.loads((find_recipe("fp8").parent / "schema.json").read_text())
    assert committed == json.loads(json.dumps(recipe_schema())), "write recipe_schema() to recipes/schema.json again"


@pytest.mark.often(1)
@pytest.mark.parametrize("name", shipped_recipes())
def test_the_schema_accepts_what_is_accepted_and_refuses_a_misspelt_key(name):
    jsonschema = pytest.importorskip("jsonschema")
    said = yaml.safe_load(find_recipe(name).read_text())
    jsonschema.validate(said, recipe_schema())
    jsonschema.validate(yaml.safe_load(TRYING), recipe_schema())
    jsonschema.validate({"extends": name, "components": {"transformer": {"modulation": None}}}, recipe_schema())
    low_rank = {"extends": name, "components": {"transformer": {"low_rank": {"rank": "1 of 96"}}}}
    for wrong in ({**said, "profil": "rtn"}, {**said, "version": 2}, {"profile": "rtn"}, low_rank):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, recipe_schema())


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.text(), st.tuples(st.integers(0, len(FULL)), st.text("{}[]:-,!&*'\"#|>%@` \n\t\x85a1", max_size=3)))
)
def test_any_text_is_read_or_refused_by_name(recipe, edit):
    text = edit if isinstance(edit, str) else FULL[: edit[0]] + edit[1] + FULL[edit[0] :]
    try:
        path = recipe(text)
    except UnicodeEncodeError:
        return
    try:
        load_recipe(path)
    except ValueError as error:
        assert str(error).startswith(path)
