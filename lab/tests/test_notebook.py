"""The notebook runs from its first cell to its last, in a small setting."""
from pathlib import Path

import pytest

needed = "needs lab/requirements.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)
TOP = Path(__file__).parents[2]  # of the repository


def read_notebook():
    return nbformat.read(TOP / "notebook.ipynb", as_version=4)


def test_the_notebook_runs(monkeypatch):
    notebook = read_notebook()
    for long, short in (("STEPS = 500", "STEPS = 4"), ("LOOKUP_STEPS = 1500", "LOOKUP_STEPS = 4")):
        assert any(long in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout: no clone
    client = nbclient.NotebookClient(notebook, timeout=300, coalesce_streams=True)
    client.execute(cwd=str(Path.cwd()))
    assert Path("out/notebook/softmax/ckpt.pt").exists()


def test_its_outputs_are_saved():
    """GitHub shows the pictures of a notebook only if they lie in it."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
