"""Every notebook runs from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
PRINTS = {
    "01_quantize_and_load": ("checkpoint: quantized", "bits per weight"),
    "02_which_layer_hurts": ("make half of the error", "row 7, columns 48 to 63 are", "bits per weight", "measured"),
    "03_roofline": ("11.9 B parameters", "narrowest Linear", "re-encoded at load", "only attention left"),
}


# tests/test_eval_debug.py and tests/test_cost.py check the functions whose figures these print.
SLOW = {"02_which_layer_hurts", "03_roofline"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are stored without output"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert [words for words in PRINTS[path.stem] if words not in text] == []
