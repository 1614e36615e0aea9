"""Faults of a recipe file: all of them, each with its line and a cure."""

import re

import pytest

from fluxq.recipes.checking import faults_of
from fluxq.recipes.recipe import find_recipe, shipped_recipes

WRONG = """extends: nvfp4
profil: rtn
components:
  transformer:
    weights: {format: nvfp5, sign: true}
    rounding: {method: gptqq}
    overrides:
      - {role: qkv}
gates: ["psnr>>2"]
"""


@pytest.fixture
def file(tmp_path):
    def written(text: str) -> str:
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return written


def test_all_faults_are_found_also_behind_unknown_keys(file):
    found = [re.sub(r"^.*mine\.yaml:", "", fault) for fault in faults_of(file(WRONG))]
    lines = [int(fault.partition(":")[0]) for fault in found]
    assert sorted(lines) == [2, 5, 5, 6, 8, 9] and len({*found}) == 6, found
    for cure in ("did you mean 'profile'?", "unknown key 'sign'", "did you mean 'nvfp4'?", "'rtn' or 'gptq'"):
        assert sum(cure in fault for fault in found) == 1, cure
    assert any("reason: Field required; write `reason: …`" in fault for fault in found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("components: {transformer: {}}\n", r":1: .*weights: Field required; write `weights: \{format: nvfp4\}`"),
        ("profile: rtn\n", r":1: components: Field required; write `extends: nvfp4`"),
        ("components:\n  - [\n", r":3: .*; mend brackets, quotes or indentation there, or above"),
        (
            "extends: nvfp4\ncomponents:\n  transformer:\n    overrides:\n      - {role: qvk, reason: x}\n",
            r":5: no family has a role 'qvk' \(did you mean 'qkv'\?\)",
        ),
        ("extends: nvfp4\nqqq: 1\n", r":2: unknown key 'qqq'; keys here: extends, version, components, "),
        (
            "extend: a\ncomponents: {vae: {weights: {format: fp8}}}\n",
            r":1: unknown key 'extend' \(did you mean 'extends'\?\)",
        ),
        ("extends: nvfp4\ncalibration: {extends: int8}\n", r":2: unknown key 'extends'; keys here: prompts, "),
        ("extends: nvfp44\n", r":1: .*did you mean 'nvfp4'"),
    ],
)
def test_a_fault_has_its_line_and_a_cure(text, fault, file):
    (found,) = faults_of(file(text))
    assert re.search(rf"mine\.yaml{fault}", found), found


def test_a_role_that_only_a_denoiser_without_a_row_has_is_no_fault(file):
    override = "{role: unnamed, reason: as `fluxq auto` writes it}"
    assert faults_of(file(f"extends: nvfp4\ncomponents: {{transformer: {{overrides: [{override}]}}}}\n")) == []


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_faultless_and_name_the_schema_beside_them(name):
    assert faults_of(name) == []
    lines = find_recipe(name).read_text(encoding="utf-8").splitlines()
    (modeline,) = [line for line in lines if line.startswith("# yaml-language-server: ")]
    schema = modeline.removeprefix("# yaml-language-server: $schema=")
    assert (find_recipe(name).parent / schema).is_file()


def test_no_recipe_is_another_error():
    with pytest.raises(FileNotFoundError, match="shipped: "):
        faults_of("nowhere.yaml")
