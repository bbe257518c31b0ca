"""
The types of the programs' flags, for argparse: numbers that may be written as 1e9, and lists.

When one of them complains, argparse puts the name of the flag in front.
"""
import argparse
import math


def wrong(text, right):
    return argparse.ArgumentTypeError(f"{text!r} is not {right}")


def to_float(text):
    """NaN for text that is no number, so that our comparisons refuse it, too."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def number(text):
    value = to_float(text)
    # float() also reads "inf", which would pass for a large number
    if not math.isfinite(value):
        raise wrong(text, "a finite number, like 0.5 or 1e-3")
    return value


def positive_number(text):
    value = number(text)
    if value <= 0:
        raise wrong(text, "a number above 0, like 0.5 or 1e-3")
    return value


def number_from_0(text):
    value = number(text)
    if value < 0:
        raise wrong(text, "a number from 0 on, like 0.5 or 1e-3")
    return value


def whole_number(text, least):
    """The int of a text like 12 or 1e9."""
    try:
        value = int(text)  # keeps all digits of a long seed. a float would round it
    except ValueError:
        value = to_float(text)
    # the remainder of inf is NaN, so that inf is refused, too
    if not value >= least or value % 1 != 0:
        raise wrong(text, f"a whole number from {least} on, like 12 or 1e9")
    return int(value)


def int_from_0(text):
    return whole_number(text, least=0)


def positive_int(text):
    return whole_number(text, least=1)


def comma_list(of):
    """The type of a list: 1 or 1,2,3. A value that is repeated counts once."""

    def parse_list(text):
        return list(dict.fromkeys(of(part) for part in text.split(",")))

    return parse_list
