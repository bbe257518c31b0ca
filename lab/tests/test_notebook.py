"""The notebook runs from its first cell to its last, in a small setting."""
from pathlib import Path

import pytest

needed = "needs lab/requirements.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)
TOP = Path(__file__).parents[2]  # of the repository


def read_notebook(replace={}):
    """replace: {what stands in it: what stands there in this test}"""
    text = (TOP / "notebook.ipynb").read_text(encoding="utf-8")
    for old, new in replace.items():
        assert old in text
        text = text.replace(old, new)
    return nbformat.reads(text, as_version=4)


def execute(notebook, cells=None):
    notebook.cells = notebook.cells[:cells]
    client = nbclient.NotebookClient(notebook, timeout=300, coalesce_streams=True)
    client.execute(cwd=str(Path.cwd()))


def test_the_notebook_runs(monkeypatch):
    short = {"LOOKUP_STEPS = 1500": "LOOKUP_STEPS = 2", "TEXT_STEPS = 250": "TEXT_STEPS = 2"}
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout: no clone
    execute(read_notebook(short))
    assert Path("out/notebook/text/diff/ckpt.pt").exists()
    assert Path("out/notebook/mine.png").exists()


def test_without_a_checkout_it_clones_or_says_what_to_do():
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="Set REPOSITORY in this cell"):
        execute(read_notebook(), cells=2)
    if not (TOP / ".git").exists():
        pytest.skip("this is not a git repository that can be cloned")
    here = {r'REPOSITORY = \"\"': f"REPOSITORY = '{TOP}'", "%pip install": "# pip install"}
    execute(read_notebook(here), cells=2)
    assert Path("diffattn/model.py").exists()


def test_its_outputs_are_saved():
    """GitHub shows the pictures of a notebook only if they lie in it."""
    cells = [cell for cell in read_notebook().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert "/tmp/" not in str(outputs)
