"""The notebook runs from its first cell to its last, in a small setting."""
from pathlib import Path

import pytest

needed = "needs lab/requirements.txt"
nbclient = pytest.importorskip("nbclient", reason=needed)
nbformat = pytest.importorskip("nbformat", reason=needed)
pytest.importorskip("ipykernel", reason=needed)
TOP = Path(__file__).parents[2]  # of the repository


def test_the_notebook_runs_and_its_pictures_are_saved(monkeypatch):
    text = (TOP / "notebook.ipynb").read_text(encoding="utf-8")
    saved = [out for cell in nbformat.reads(text, 4).cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in saved) == 5  # GitHub shows these
    assert not any(out.output_type == "error" for out in saved)
    for steps in ("LOOKUP_STEPS = 1500", "TEXT_STEPS = 250"):
        assert steps in text
        text = text.replace(steps, f"{steps.split()[0]} = 2")
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    Path("model.py").symlink_to(TOP / "model.py")  # the first cell sees a checkout: no clone
    nbclient.execute(nbformat.reads(text, 4), cwd=str(Path.cwd()), timeout=300)
    assert Path("out/notebook/text/diff/ckpt.pt").exists()
    assert Path("out/notebook/mine.png").exists()
