"""What every test of this folder begins with and leaves behind."""
import pytest

from model import ATTENTION


@pytest.fixture(autouse=True)
def clean_table(tmp_path, monkeypatch):
    """An empty folder for each test. The arms that it registers are gone after it."""
    monkeypatch.chdir(tmp_path)
    before = dict(ATTENTION)  # one table for the whole process, so for all tests
    yield
    ATTENTION.clear()
    ATTENTION.update(before)
