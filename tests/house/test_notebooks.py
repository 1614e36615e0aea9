"""Every notebook runs from top to bottom; on every run the first one, with less work in its first call."""

import json
import re
from pathlib import Path

import forked
import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
PRINTS = {
    "01_quantize_and_load": ("paired PSNR", "bits per weight"),
    "02_which_layer_hurts": ("make half of the error", "row 7, columns 48 to 63 are", "bits per weight", "measured"),
    "03_roofline": ("11.9 B parameters", "narrowest Linear", "re-encoded at load", "only attention left"),
    "04_auto": ("% of the weights", "bits, predicted", "still nvfp4:"),
}


CALL = 'fluxq.quantize_pipeline("tiny", "nvfp4", '
CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for source in json.loads(sys.argv[1]):
    shell.run_cell(source).raise_error()
"""


@pytest.mark.slow
def test_the_first_notebook_runs_with_weights_rounded_to_nearest(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    (cell,) = [cell for cell in notebook.cells if CALL in cell.source]
    cell.source = cell.source.replace(CALL, f'{CALL}profile="rtn", ')
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    done = forked.run("-c", CELLS, json.dumps(sources), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [words for words in PRINTS[NOTEBOOKS[0].stem] if words not in done.stdout] == []


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    require_runs(nbformat.read(path, as_version=4), path.stem, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(path: Path) -> None:
    """From top to bottom, without errors and warnings, on a machine that they do not name."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "".join(output.get("text", "") for output in outputs)
    assert [words for words in PRINTS[path.stem] if words not in text] == []
    assert not re.search(r"/(tmp|home|root|work)/", text)


def require_runs(notebook: nbformat.NotebookNode, name: str, tmp_path: Path) -> None:
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert [words for words in PRINTS[name] if words not in text] == []
