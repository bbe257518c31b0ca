"""The pages are what the data say, and their links lead somewhere."""
import re
from pathlib import Path

import pytest

from port import pages

ROOM = Path(__file__).parents[1]


def text_of(name):
    return (ROOM / name).read_text(encoding="utf-8")


def test_the_page_of_mistakes_is_written_from_the_list():
    assert text_of("mistakes.md") == pages.mistakes_page()  # else run python -m port.pages


def test_the_page_for_an_agent_is_short():
    assert len(text_of("README.md").split()) <= 700


@pytest.mark.parametrize("name", ["README.md", "mistakes.md", "ports.md", "vectors.md"])
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(name)):
        assert link.startswith("http") or (ROOM / link).exists(), link
