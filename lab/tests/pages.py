"""What the tests of pages share."""
from lab.stats import RESULTS, markdown


def words_of(page):
    """A page of lab/results in one line, with the minus of code."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    return " ".join(text.split()).replace("−", "-")


def has_part(page, part):
    """Does the page have this text, however its lines are broken?"""
    return " ".join(part.split()).replace("−", "-") in words_of(page)


def has_table(page, table):
    return has_part(page, markdown(table))
