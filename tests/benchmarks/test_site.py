"""The site: links of documents, pages that are made, and Sphinx's word on all of it."""

import json
import shutil
from pathlib import Path

import pytest

import fluxq
from benchmarks.site import made, staging
from benchmarks.site.__main__ import build
from benchmarks.site.links import anchors, dead_links
from fluxq.cli import cli
from fluxq.recipes.recipe import shipped_recipes

ROOT = Path(__file__).parents[2]
PAGE = """# A `word`, [linked](b.md)
## Twice
## Twice
```
[not a link](nowhere.md)
# not a heading
```
Here `[nor](here.md)`, [this](b.md#there) is, [a file](b.md), ![an image](no.png), [across
lines](#twice-1), [far](https://example.org/x), [off](#thrice), [out](b.md#nowhere).
"""


def test_dead_links_and_headings_are_named(tmp_path):
    (tmp_path / "a.md").write_text(PAGE)
    (tmp_path / "b.md").write_text("# There\n")
    assert anchors(PAGE) == {"a-word-linked", "twice", "twice-1"}
    assert [*dead_links(tmp_path / "a.md")] == [
        "a.md -> no.png: no such file",
        "a.md -> #thrice: no such heading",
        "a.md -> b.md#nowhere: no such heading",
    ]


def test_every_recipe_has_a_page_with_its_measured_row():
    rows = json.loads((ROOT / "benchmarks" / "tiny_quality.json").read_text(encoding="utf-8"))["recipes"]
    measured = {row["recipe"]: row for row in rows}
    for name in shipped_recipes():
        page = made.recipe_page(name)
        low, high = measured[name]["psnr_db"][1:]
        assert f"[{low:.1f}, {high:.1f}]" in page and f"| {measured[name]['bits_per_weight']:.2f} |" in page
        assert f"`{name}`" in page and "| FLUX.1-dev | 23.8 |" in page
        assert (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").rstrip() in page
    assert "`nvfp4-max`" not in made.recipe_page("nvfp4")


def test_every_command_and_every_public_name_has_its_entry():
    commands, api = made.commands_page(), made.api_page()
    assert all(f"## fluxq {name}\n" in commands for name in cli.commands)
    assert all(f"}} fluxq.{name}" in api for name in fluxq.__all__ if name not in ("__version__", "tiny"))
    assert "{py:function} fluxq.keep_steps(" in api and "- **recipe**: a shipped recipe's name" in api
    assert "{py:method} fluxq.Checkpoint.load(**arguments: Any) -> DiffusionPipeline" in api
    assert "{py:function} fluxq.tiny.load(" in api


@pytest.mark.slow
def test_links_lead_to_the_same_on_the_site(tmp_path):
    """The README is the first page, a recipe's file its page, a file comes along, a folder is its words alone."""
    root, copy = tmp_path / "checkout", tmp_path / "copy"
    (root / "docs").mkdir(parents=True)
    for file in ("README.md", "docs/exchange.md", "docs/families.md", "recipes/README.md", "recipes/fp8.yaml"):
        (root / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / file, root / file)
    (root / "docs" / "a.md").write_text("[1](../README.md#x) [2](../recipes/fp8.yaml) [3](b.py) [4 `c`](../recipes)")
    (root / "docs" / "b.py").write_text("")
    staging.stage(copy, root)
    assert (copy / "docs" / "a.md").read_text() == "[1](../index.md#x) [2](../recipes/fp8.md) [3](b.py) 4 `c`"
    assert (copy / "docs" / "b.py").is_file() and not (copy / "README.md").exists()
    assert all((copy / "recipes" / f"{name}.md").is_file() for name in shipped_recipes())
    listed = [line for line in (copy / "index.md").read_text().splitlines() if line.endswith(".md")]
    assert "docs/a.md" in listed and len(listed) == len({*listed}) == len([*copy.rglob("*.md")]) - 1


@pytest.mark.long
def test_the_site_is_built_and_a_dead_link_is_an_error(tmp_path, capfd):
    pytest.importorskip("furo")
    assert build(str(tmp_path / "site")) == 0, capfd.readouterr().err
    index = (tmp_path / "site" / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("fluxq.quantize_pipeline", "recipes/nvfp4", "docs/troubleshooting"))
    root = tmp_path / "checkout"
    for page in staging.documents():
        (root / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, root / page.relative_to(ROOT))
    (root / "README.md").write_text("# fluxq\n[a](docs/gpu.md#nowhere) [b](docs/nowhere.md)\n")
    capfd.readouterr()
    assert build(str(tmp_path / "broken"), root) == 1
    said = capfd.readouterr().err
    assert "index.md:2: WARNING: local id not found in doc 'docs/gpu': 'nowhere'" in said
    assert "index.md:2: WARNING: 'myst' cross-reference target not found: 'docs/nowhere.md'" in said
