"""What the documents say is what the code does."""

import json
import re
from pathlib import Path

import pytest

from fluxq.cli import cli
from fluxq.recipes.recipe import shipped_recipes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DIFFUSERS = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")
PEERS = json.loads((ROOT / "benchmarks" / "peers.json").read_text(encoding="utf-8"))["rows"]
QUALITY = json.loads((ROOT / "benchmarks" / "tiny_quality.json").read_text(encoding="utf-8"))


def quality_line(row: dict) -> str:
    """One line of the README's table, from the committed result file."""
    (psnr, low, high), sqnr = row["psnr_db"], row["latent_sqnr_db"][0]
    size = row["bytes_after"] / row["bytes_before"]
    return (
        f"| `{row['recipe']}` | {row['bits_per_weight']:.2f} | {size:.0%} "
        f"| {psnr:.1f} [{low:.1f}, {high:.1f}] | {sqnr:.1f} |"
    )


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_the_readme_quotes_the_committed_results(recipe: str) -> None:
    row = next(row for row in QUALITY["recipes"] if row["recipe"] == recipe)
    assert quality_line(row) in README
    assert f"over {QUALITY['prompts']} prompts with {QUALITY['seeds_per_prompt']} seeds each" in README


def peers_cell(found: object) -> str:
    """What a cell of the side-by-side table says: words as they are, errors short, numbers as what is off."""
    if isinstance(found, float):
        return f"{found:.4f} off"
    if "Error:" in str(found):
        return "fails"
    return "crashes" if str(found).startswith("killed") else str(found)


def peers_line(row: str) -> str:
    """One line of the side-by-side table, from the committed result file."""
    found = dict(PEERS[row])
    error, with_lora = found.pop("error to 16 bit"), found.pop("LoRA, error to 16 bit + LoRA")
    if row == "16 bit":
        found["dequantize and save"] = "–"
    return f"| {row} | {error:.4f} | {with_lora:.4f} | {' | '.join(map(peers_cell, found.values()))} |"


@pytest.mark.parametrize("row", PEERS)
def test_the_side_by_side_table_quotes_the_committed_results(row: str) -> None:
    assert peers_line(row) in DIFFUSERS


def test_beside_its_peers_every_operation_on_a_fluxq_model_is_exact() -> None:
    for row, found in PEERS.items():
        operations = {operation: word for operation, word in found.items() if "error" not in operation}
        if row.startswith("fluxq"):
            assert set(operations.values()) == {"identical", "exact"}, row


def test_every_row_of_the_feature_table_is_a_feature_of_some_test() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", DIFFUSERS.split("<!-- features -->")[1], flags=re.MULTILINE)
    marked = re.findall(r'mark\.feature\("([^"]+)"\)', "".join(p.read_text() for p in ROOT.glob("tests/test_*.py")))
    assert sorted(rows[1:]) == sorted(set(marked))


def test_the_snippets_of_the_diffusers_page_run(checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-nvfp4").symlink_to(checkpoint("nvfp4"))
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", DIFFUSERS, flags=re.DOTALL):
        snippet = snippet.replace('"path/to/16-bit/pipeline"', repr(str(checkpoint("16 bit"))))
        exec(compile(snippet, "diffusers.md", "exec"), names)
    assert type(names["pipe"].text_encoder_2.encoder.block[0].layer[0].SelfAttention.q).__name__ == "QuantLinear"


def test_the_quick_start_holds_exactly_the_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    commands = re.findall(r"^python -m pip install .*$", section, flags=re.MULTILINE)
    assert commands == [
        "python -m pip install -e . && fluxq quantize --recipe nvfp4.yaml",
        'python -m pip install -e ".[test]" && pytest',
    ]


def test_every_command_is_in_the_readme() -> None:
    for name in cli.commands:
        assert f"`fluxq {name} " in README


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("docs/*.md"))],
    ids=lambda page: f"{page.parent.name}-{page.name}",
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_every_recipe_is_in_the_recipes_page() -> None:
    page = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for recipe in shipped_recipes():
        assert f"| `{recipe}` |" in page


def test_the_readme_snippet_makes_an_image(checkpoint, tmp_path, monkeypatch) -> None:
    snippet = README.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-nvfp4").symlink_to(checkpoint("nvfp4"))
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    assert names["image"].size == (16, 16)


def test_the_cards_snippet_names_the_dtype(checkpoint) -> None:
    from fluxq.eval.card import model_card

    record = json.loads((checkpoint("fp8") / "fluxq_plan.json").read_text(encoding="utf-8"))
    assert "dtype=torch.bfloat16" in model_card(record)
