"""Runs of toys (lab/toys.py), read to be compared: on one machine, and one text."""
from dataclasses import fields

from lab.stats import RESULTS
from lab.toys import OUT, Cell, read_lines

TOYS_JSON = RESULTS / "toys.json"  # the published runs
TEXT_JSON = RESULTS / "text.json"  # and older ones, of the pages on text and on linear attention


def read_runs():
    """The runs below out/toys."""
    files = sorted(OUT.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"there are no runs below {OUT}: python -m lab.train_toys makes them")
    return [run for file in files for run in read_lines(file)]


def cell_of(run):
    """The cell that a run belongs to, by its line."""
    return Cell(**{field.name: run[field.name] for field in fields(Cell)})


def losses_of(runs):
    return [run["val_loss"] for run in runs]


class Results:
    """Runs by cell, the embedding's start, and place.

    A place is a machine and the hash of a text. (The published runs have no hash.)
    """

    def __init__(self, runs):
        self.groups = {}  # {(cell, std): {place: runs}}
        for run in runs:
            places = self.groups.setdefault((cell_of(run), run["std"]), {})
            places.setdefault((run["at"], run.get("data_hash")), []).append(run)

    def at(self, cell, std, lr=None, seeds=None):
        """{place: runs} of those that are reported, or with lr of those at this rate.

        seeds: of these alone.
        """
        found = {}
        for place, runs in self.groups.get((cell, std), {}).items():
            if lr is None:
                runs = [run for run in runs if run["purpose"] == "reported"]
            else:
                runs = [run for run in runs if run["lr"] == lr]
            if seeds is not None:
                runs = [run for run in runs if run["seed"] in seeds]
            if runs:
                found[place] = runs
        return found

    def runs(self, cell, std, **which):
        """The runs at the place that has most of them. which: see at."""
        return max(self.at(cell, std, **which).values(), key=len, default=[])

    def losses(self, cell, std, **which):
        """The losses at the place that has most of them. which: see at."""
        return losses_of(self.runs(cell, std, **which))

    def pair(self, a, b, std, **which):
        """The losses of two cells at one place: the one that has most runs of both.

        which: see at. ([], []) if no place has both.
        """
        runs_a = self.at(a, std, **which)
        runs_b = self.at(b, std, **which)
        places = [place for place in runs_a if place in runs_b]
        if not places:
            return [], []
        best = max(places, key=lambda place: min(len(runs_a[place]), len(runs_b[place])))
        return losses_of(runs_a[best]), losses_of(runs_b[best])
