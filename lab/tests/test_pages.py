"""The pages hang together: their links lead somewhere, and the README says what they say."""
import re
from pathlib import Path

import pytest

from lab.tests.pages import words_of

TOP = Path(__file__).parents[2]
PAGES = [TOP / "CONTRIBUTING.md", TOP / "lab/README.md",
         *sorted((TOP / "lab/results").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("front", ["README.md", "lab/README.md"])
def test_the_intervals_of_a_front_page_stand_on_a_page(front):
    text = " ".join((TOP / front).read_text(encoding="utf-8").split())
    intervals = re.findall(r"[\d.]+ ± [\d.]*\d|\([−\d.]+ to [\d.]*\d", text)
    pages = " ".join(" ".join(page.read_text(encoding="utf-8") for page in PAGES[2:]).split())
    assert len(intervals) > 5
    assert [interval for interval in intervals if interval not in pages] == []


@pytest.mark.parametrize("number, page", [
    ("0.016 ± 0.010", "start.md"), ("0.041 ± 0.008", "start.md"), ("0.062 ± 0.020", "text.md"),
    ("0.014 ± 0.004", "minus.md"),
])
def test_a_number_of_the_readme_stands_on_the_page_that_it_names(number, page):
    readme = " ".join((TOP / "README.md").read_text(encoding="utf-8").split())
    assert number in readme and number in words_of(page)
