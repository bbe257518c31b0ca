"""The notebook runs from its first cell to its last, small, with and without its answers."""
import re
from pathlib import Path

import pytest

needed = "needs lab/requirements.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)
TOP = Path(__file__).parents[1]  # of the repository
TEXT = (TOP / "notebook.ipynb").read_text(encoding="utf-8")
SAID = {  # of the class in the cell of a blank, if the answer is filled in
    "Difference": "Difference: train.py's check finds no fault\nSAME\n",
    "Leaky": "Leaky sees later tokens\n",
    "Folded": "Folded: train.py's check finds no fault\n",
}


def small_notebook():
    text = TEXT
    for steps in ("LOOKUP_STEPS = 1500", "TEXT_STEPS = 150"):
        assert steps in text
        text = text.replace(steps, f"{steps.split()[0]} = 2")
    return nbformat.reads(text, 4)


def blanks(notebook):
    """{name of the class: the cell that has it with a blank}"""
    found = {}
    for cell in notebook.cells:
        name = re.search(r"^class (\w+)", cell.source, re.MULTILINE)
        if "not yet" in cell.source:
            found[name[1]] = cell
    return found


def fill_in(notebook):
    """Put each answer in place of the class that has a blank."""
    cells = blanks(notebook)
    answers, = [cell.source for cell in notebook.cells if cell.source.startswith("## Answers")]
    for answer, name in re.findall(r"```python\n(class (\w+).*?)\n```", answers, re.DOTALL):
        before, _, rest = cells[name].source.partition(f"class {name}(")
        cells[name].source = before + answer + "\n\n\n" + rest.partition("\n\n\n")[2]


def run(notebook, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout: no clone
    nbclient.execute(notebook, cwd=str(Path.cwd()), timeout=300)


def printed(cell):
    return "".join(out.text for out in cell.outputs if out.get("name") == "stdout")


def test_the_notebook_runs_and_its_pictures_are_saved(monkeypatch):
    saved = [out for cell in nbformat.reads(TEXT, 4).cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in saved) == 5  # GitHub shows these
    assert not any(out.output_type == "error" for out in saved)
    notebook = small_notebook()
    run(notebook, monkeypatch)
    assert Path("out/notebook/text/diff/ckpt.pt").exists()
    assert Path("out/notebook/mine.png").exists()
    cells = blanks(notebook)
    assert cells.keys() == SAID.keys()
    assert all(printed(cell).startswith("not yet: ") for cell in cells.values())


def test_its_answers_are_right(monkeypatch):
    notebook = small_notebook()
    cells = blanks(notebook)
    fill_in(notebook)
    notebook.cells = [cell for cell in notebook.cells  # without the experiments
                      if cell.source.startswith("import") or cell in cells.values()]
    run(notebook, monkeypatch)
    for name, cell in cells.items():
        assert "not yet" not in cell.source and printed(cell).startswith(SAID[name])
