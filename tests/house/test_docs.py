"""Tests that the documents say what the code does."""

import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import real_models
from benchmarks.site.links import dead_links
from benchmarks.site.made import table_behind
from benchmarks.site.staging import documents
from fluxq.cli import cli
from fluxq.recipes.recipe import shipped_recipes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DIFFUSERS = (ROOT / "docs" / "diffusers.md").read_text(encoding="utf-8")
LARGE = (ROOT / "docs" / "large-models.md").read_text(encoding="utf-8")
PEERS = json.loads((ROOT / "benchmarks" / "peers.json").read_text(encoding="utf-8"))["rows"]
ROOMS = ("recipes", "kernels", "calibrate", "quantize", "eval")
QUALITY = json.loads((ROOT / "benchmarks" / "tiny_quality.json").read_text(encoding="utf-8"))


def load_script(name: str) -> ModuleType:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


QUALITY_SCRIPT = load_script("tiny_quality")


@pytest.mark.parametrize("page", QUALITY_SCRIPT.TABLES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_generated_tables_are_those_of_the_committed_results(page: Path) -> None:
    assert QUALITY_SCRIPT.with_tables(page, QUALITY) == page.read_text(encoding="utf-8")


def test_the_generated_tables_have_a_row_for_every_recipe_and_its_rtn_profile() -> None:
    table = QUALITY_SCRIPT.recipes_table(QUALITY)
    for recipe in shipped_recipes():
        assert f"| `{recipe}` |" in table and f"| `{recipe}` |" in QUALITY_SCRIPT.quality_table(QUALITY)
    for recipe in ("nvfp4", "mxfp4", "int4", "int8", "int4-svd"):
        assert f"| `{recipe}` rtn |" in table
    assert f"| `{QUALITY_SCRIPT.REENCODED}` as int8 |" in table


def test_the_table_of_drawn_layers_is_that_of_the_committed_result() -> None:
    """Every number, as it is printed there."""
    rows = json.loads((ROOT / "benchmarks" / "compare_synthetic.json").read_text(encoding="utf-8"))["rows"]
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8").split("<!-- compare -->\n")[1]
    printed = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]
    assert len(printed) == len(rows)
    for (formats, method, bits, adaln, ffn, attn, mean, seconds, microseconds), row in zip(printed, rows, strict=True):
        assert (formats, method, bits) == (row["formats"], row["row"], f"{row['bits']:.2f}")
        assert [adaln, ffn, attn] == [f"{row['db'][family]:.1f}" for family in ("adaln", "ffn", "attn")]
        assert mean == f"{row['mean']:.2f} ± {row['error']:.2f}"
        assert (seconds, microseconds) == (f"{row['seconds']:.1f}", f"{row['microseconds']:.0f}")


def test_the_table_of_a_model_at_full_size_is_that_of_the_committed_result() -> None:
    found = json.loads((ROOT / "benchmarks" / "full_size_rtn.json").read_text(encoding="utf-8"))
    table = LARGE.split("<!-- rounded -->\n")[1].splitlines()[2:]
    assert len(table) == len(found["recipes"])
    for line, (recipe, row) in zip(table, found["recipes"].items(), strict=True):
        seconds = row["seconds"]
        cells = [f"`{recipe}`", f"{row['bytes'] / 1e9:.2f}", f"{row['peak_memory_bytes']['quantize'] / 1e9:.2f}"]
        cells += [f"{seconds[part]:.0f}" for part in ("quantize", "copying alone", "rounding alone")]
        cells += [f"{row['times_the_bound']:.2f}"]
        assert [cell.strip() for cell in line.strip("|").split("|")] == cells


def test_the_tables_of_trained_layers_are_those_of_the_committed_result() -> None:
    report = json.loads((ROOT / "benchmarks" / "real_models.json").read_text(encoding="utf-8"))
    page = real_models.PAGE.read_text(encoding="utf-8")
    assert real_models.with_tables(page, report) == page


def test_drawn_layers_reach_what_was_aimed_at() -> None:
    """Held-out dB at the format's bits and at most .42 more."""
    rows = json.loads((ROOT / "benchmarks" / "compare_synthetic.json").read_text(encoding="utf-8"))["rows"]
    mean = {(row["formats"], row["row"].removesuffix(" balanced")): row["mean"] for row in rows}
    assert mean["nvfp4-nvfp4", "nvfp4"] >= 20.6 and mean["nvfp4-nvfp4", "nvfp4-max"] >= 23.3
    assert mean["mxfp4-mxfp4", "mxfp4"] >= 16.3 and mean["mxfp4-mxfp4", "mxfp4-max"] >= 20.8
    assert mean["int4-int4", "int4-svd"] >= 18.8
    assert mean["int4-16bit", "int4"] >= mean["int4-16bit", "RTN"] + 4
    assert mean["int8-int8", "int8"] >= 36.5 and mean["int8-int8", "Hadamard + GPTQ"] >= 40
    assert all(row["most_above"] <= 0.42 for row in rows)


def test_a_table_of_other_results_is_noticed() -> None:
    page = ROOT / "recipes" / "README.md"
    other = QUALITY | {"recipes": [row | {"velocity_error": 0.5} for row in QUALITY["recipes"]]}
    assert QUALITY_SCRIPT.with_tables(page, other) != page.read_text(encoding="utf-8")


def test_a_large_model_keeps_what_its_counterpart_kept() -> None:
    """One double block stands for 19, four single ones for 38; ranks and Hadamard blocks are the large model's own."""
    plan = QUALITY_SCRIPT.flux_dev_plan("nvfp4-max")
    counts, kept = {"transformer_blocks": 1, "single_transformer_blocks": 4}, {}
    for layer in plan.quantized:
        kind, index, _ = layer.name.split(".", 2)
        if int(index) < counts[kind]:
            changes = {"smooth": True, "rank": 2, "deflate": 2, "hadamard": 16} if int(index) else {"center": True}
            kept[layer.name] = replace(layer.scheme, **changes) if layer.is_observed else layer.scheme
    full = {layer.name: layer.scheme for layer in QUALITY_SCRIPT.at_full_size(plan, kept).quantized}
    assert full["transformer_blocks.18.attn.to_q"].center
    for index, is_first in ((0, True), (9, True), (10, False), (37, False)):
        scheme = full[f"single_transformer_blocks.{index}.attn.to_q"]
        assert scheme.center == is_first
        assert (scheme.rank, scheme.deflate, scheme.hadamard) == ((0, 0, 0) if is_first else (16, 16, 128))
    assert str(full["transformer_blocks.18.norm1.linear"]) == "int8-16bit"


def peers_cell(found: object) -> str:
    """Return a cell of the side-by-side table: words as they are, errors short, numbers as what is off."""
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
    marked = re.findall(r'mark\.feature\("([^"]+)"\)', "".join(p.read_text() for p in ROOT.glob("tests/*/test_*.py")))
    assert sorted(rows[1:]) == sorted(set(marked))


def test_the_snippets_of_the_diffusers_page_run(checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-nvfp4").symlink_to(checkpoint("nvfp4"))
    plain = checkpoint("16 bit")
    (tmp_path / "my-flux.safetensors").symlink_to(next((plain / "transformer").glob("*.safetensors")))
    names: dict = {}
    for snippet in re.findall(r"```python\n(.*?)```", DIFFUSERS, flags=re.DOTALL):
        for place in ("path/to/16-bit/pipeline", "black-forest-labs/FLUX.1-dev"):
            snippet = snippet.replace(f'"{place}"', repr(str(plain)))
        exec(compile(snippet, "diffusers.md", "exec"), names)
    assert type(names["pipe"].text_encoder_2.encoder.block[0].layer[0].SelfAttention.q).__name__ == "QuantLinear"
    assert (tmp_path / "my-flux" / "model_index.json").is_file()


def test_the_quick_start_holds_exactly_the_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    commands = re.findall(r"^python -m pip install .*$", section, flags=re.MULTILINE)
    assert commands == [
        'python -m pip install -e ".[all]" && fluxq quantize --recipe nvfp4.yaml',
        'python -m pip install -e ".[test]" && pytest',
    ]


def test_the_sizes_under_the_readme_s_picture_are_measured() -> None:
    rows = {row["recipe"]: row for row in QUALITY["recipes"]}
    shown = [rows[name] for name in ("fp8", "nvfp4", "nvfp4-max", "int4")]
    sizes = [round(100 * row["bytes_after"] / row["bytes_before"]) for row in shown]
    assert [int(size) for size in re.findall(r"(\d+) %", README.split("## Quick start")[0])] == sizes


def test_every_command_is_in_the_readme() -> None:
    for name in cli.commands:
        assert f"`fluxq {name} " in README


@pytest.mark.parametrize("page", documents(), ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    assert [*dead_links(page)] == []


@pytest.mark.parametrize("page", documents(), ids=lambda page: f"{page.parent.name}-{page.name}")
def test_what_follows_fluxq_in_code_is_a_command(page: Path) -> None:
    words = re.findall(r"`fluxq\s+([^\s`]+)", page.read_text(encoding="utf-8"))
    assert {*words} - {*cli.commands} == set()


def test_messages_that_troubleshooting_quotes_are_said_somewhere() -> None:
    """Each piece of a message between values, in our source with its strings joined; two messages are of libraries."""
    files = [file for room in ("src/fluxq", *ROOMS) for file in (ROOT / room).rglob("*.py")]
    said = "".join(file.read_text(encoding="utf-8") for file in [*files, ROOT / "setup.py"])
    said = re.sub(r'"\s*f?"', "", said) + "Unknown quantization type, got fluxq; Field required"
    _, rows = table_behind(ROOT / "docs" / "troubleshooting.md", "# When")
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row[0])]
    pieces = [piece.strip(" '") for text in quoted for piece in text.split("…")]
    assert len(pieces) > 25 and [piece for piece in pieces if piece not in said] == []


def test_every_exit_code_of_a_verdict_is_in_troubleshooting() -> None:
    from fluxq.eval.gate.result import EXIT_CODES

    rows = rows_of(ROOT / "docs" / "troubleshooting.md", "Exit codes")
    assert {str(code) for code in EXIT_CODES.values()} <= {row[0] for row in rows}


@pytest.mark.parametrize("room", [*ROOMS, *(f"src/fluxq/{room}" for room in ("jobs", "runtime", "serve", "demo"))])
def test_every_file_of_a_room_is_in_its_page(room: str) -> None:
    """All but families, dialects and ops, which are rows of one kind."""
    page = (ROOT / room / "README.md").read_text(encoding="utf-8")
    rows = {file.parent for file in (ROOT / room).rglob("op.py")}
    files = [file for file in (ROOT / room).rglob("*.py") if file.parent.name not in ("families", "exchange")]
    files = [file for file in files if file.parent not in rows]
    names = Counter(file.name for file in files if file.name != "__init__.py")
    written = Counter(name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", page))
    assert names - written == Counter()


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
    from fluxq.eval.report.card import model_card
    from fluxq.quantize.record import read_record

    assert "dtype=torch.bfloat16" in model_card(read_record(checkpoint("fp8")))


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, its first two lines left out."""
    lines = page.read_text(encoding="utf-8").split(f"## {heading}\n")[1].splitlines()
    table = [line for line in lines[: lines.index("")] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_metric_has_its_row_and_margin() -> None:
    from fluxq.eval.metrics.metrics import METRICS
    from fluxq.eval.metrics.verdict import GUARDS, TOLERANCE

    rows = rows_of(ROOT / "docs" / "evaluation.md", "Metrics")
    said = {key: margin for keys, _, margin, _ in rows for key in re.findall(r"`(\w+)`", keys)}
    assert said.keys() == METRICS.keys() | {"velocity_error"}
    for key in METRICS:
        if key in TOLERANCE:
            assert said[key] == "published, 16 bit's noise"
        elif key in GUARDS:
            low = f"{GUARDS[key].low}".replace("-", "")
            assert low in said[key] and said[key].startswith("change ")
        elif key != "hpsv2":
            assert not said[key], key


def published_table() -> str:
    """The table of docs/evaluation.md: what the best published quantizers reach."""
    from fluxq.eval.metrics.verdict import FEW_STEPS, PUBLISHED

    lines = ["| bits | steps | model | by | PSNR, dB | LPIPS | CLIP score | ImageReward |", "|" + "---|" * 8]
    for row in sorted(PUBLISHED, key=lambda row: (-row.bits, row.steps <= FEW_STEPS)):
        figures = [row.figures.get(key) for key in ("psnr", "lpips")]
        changes = [row.figures.get(key) for key in ("clip_score", "image_reward")]
        cells = ["" if value is None else f"{value:g}" for value in figures]
        cells += ["" if value is None else f"{value:+g}" for value in changes]
        lines.append(f"| {row.bits} | {row.steps} | {row.model} | {row.method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_published_figures_are_those_of_the_rows() -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert page.split("<!-- published -->\n")[1].strip() == published_table()


def test_the_gates_that_the_page_quotes_are_the_shipped_ones() -> None:
    from fluxq.recipes.recipe import load_recipe, shipped_recipes

    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    gates = {load_recipe(name)[1].gates[0] for name in shipped_recipes()}
    assert gates == {"psnr>=18", "psnr>=13"} and "18 dB for 8 bits and 13 dB for 4" in page


def test_every_protocol_has_its_row() -> None:
    from fluxq.eval.images.protocols import PROTOCOLS

    rows = rows_of(ROOT / "docs" / "evaluation.md", "Protocols")
    assert [name.strip("`") for name, *_ in rows] == list(PROTOCOLS)
    for (_, prompts, seeds, metrics, resize, _), row in zip(rows, PROTOCOLS.values(), strict=True):
        assert prompts.startswith(str(row.count)) and seeds == str(row.seeds)
        assert metrics == (", ".join(row.metrics) if row.metrics else "all that can be taken")
        assert resize == (row.fid_resize or ("clean" if row.metrics is None else ""))


@pytest.mark.slow
def test_the_report_that_is_shown_can_be_drawn_again() -> None:
    from fluxq.eval.metrics.schema import read_report
    from fluxq.eval.report.report import render

    report = read_report(ROOT / "docs" / "report.json")
    assert report.protocol.count == 256 and {run.recipe for run in report.runs} == {"nvfp4", "fp8"}
    page = render(report)
    assert all(run.verdict.text.split(":")[0] in page for run in report.runs)
