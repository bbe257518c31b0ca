"""The lab's pages: their links lead somewhere, and each figure is on one."""
import re
from pathlib import Path

LAB = Path(__file__).parents[1]
PAGES = [LAB / "README.md", *LAB.glob("results/**/*.md")]


def links(page, pattern):
    return [page.parent / link for link in re.findall(pattern, page.read_text(encoding="utf-8"))]


def test_links_lead_somewhere():
    for page in PAGES:
        for link in links(page, r"\]\((?!http)([^)#\s]+)[^)]*\)"):
            assert link.exists(), f"{page}: {link}"


def test_all_figures_are_shown_on_a_page():
    shown = set()
    for page in PAGES:
        shown.update(link.resolve() for link in links(page, r"!\[[^]]*\]\(([^)]+)\)"))
    # a figure on no page is a figure that nobody keeps up to date
    assert {path.resolve() for path in LAB.glob("results/**/*.png")} <= shown
