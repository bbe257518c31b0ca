"""The notebook runs from its first cell to its last, in a small setting."""
from pathlib import Path

import pytest

from helpers import TOP

needed = "needs requirements-extra.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)


def read_notebook():
    return nbformat.read(TOP / "notebook.ipynb", as_version=4)


def test_the_notebook_runs(monkeypatch):
    notebook = read_notebook()
    for long, short in (("STEPS = 500", "STEPS = 4"), ("LOOKUP_STEPS = 1500", "LOOKUP_STEPS = 4")):
        assert any(long in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout, and clones none
    nbclient.NotebookClient(notebook, timeout=300, coalesce_streams=True).execute(cwd=str(Path.cwd()))
    assert Path("out/notebook/softmax/ckpt.pt").exists()


def test_its_outputs_are_saved():
    """GitHub shows the pictures of a notebook only if they lie in it."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
