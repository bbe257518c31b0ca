"""The pages hang together: their links lead somewhere, and the README says what they say."""
import re
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
PAGES = [TOP / "CONTRIBUTING.md", TOP / "lab/README.md",
         *sorted((TOP / "lab/results").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("number, page", [
    ("0.016 ± 0.010", "start.md"),
    ("0.041 ± 0.008", "start.md"),
    ("0.062 ± 0.020", "text.md"),
    ("0.014 ± 0.004", "minus.md"),
])
def test_a_number_of_the_readme_stands_on_its_page(number, page):
    readme = " ".join((TOP / "README.md").read_text(encoding="utf-8").split())
    text = " ".join((TOP / "lab/results" / page).read_text(encoding="utf-8").split())
    assert number in readme and number in text
