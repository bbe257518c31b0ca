"""The lab's arms are in ATTENTION in the lab's tests, and not in those of the root."""
import pytest

from lab import text
from model import ATTENTION

# the tests of the root go over all arms, and pytest asks for their list when the lab is imported
for name in text.ARMS:
    del ATTENTION[name]


@pytest.fixture(autouse=True)
def the_arms_of_the_lab(monkeypatch):
    for name, cls in text.ARMS.items():
        monkeypatch.setitem(ATTENTION, name, cls)
