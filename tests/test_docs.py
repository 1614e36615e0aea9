"""What the documents say is what the code does."""

import json
import re
from pathlib import Path

import pytest

from fluxq.cli import cli
from fluxq.recipes.recipe import shipped_recipes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
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
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("*/README.md")), ids=lambda p: p.parent.name
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
