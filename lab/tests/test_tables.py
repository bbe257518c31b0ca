"""lab/tables.py: both pages have the tables of the published runs, and a copy is not new seeds."""
import json
import re
from pathlib import Path

import pytest

from lab import tables
from lab.stats import RESULTS, one_line, read_runs
from lab.toys import AS_DRAWN, Cell
from model import Refused


def test_the_pages_have_the_tables_of_the_runs():
    published = tables.published()
    there = []
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        there += re.findall(r"<!-- (\w+) -->", text)
        assert tables.renew(text, published) == text, "python -m lab.tables --write"
    assert sorted(there) == sorted([*published, *["end"] * len(published)])


def run_of(row, place, seed, purpose="reported", shift=0.0):
    at, data_hash = place
    return vars(Cell(row, "own")) | dict(std=1.0, lr=1e-3, seed=seed, at=at, purpose=purpose,
                                         val_loss=seed + shift, data_hash=data_hash)


def test_two_rows_are_compared_at_one_place():
    gpu, cpu, other_text = ("H200", "a"), ("CPU", "a"), ("H200", "b")
    runs = [run_of("diff", gpu, 1, "rate"), *(run_of("diff", gpu, seed) for seed in (3, 4, 9))]
    runs += [run_of("diff", cpu, seed, shift=0.5) for seed in (3, 4)]
    runs += [run_of("softmax", cpu, 1, "rate"), run_of("softmax", cpu, 3, shift=0.5)]
    runs += [run_of("softmax", other_text, seed) for seed in (3, 4)]
    where = dict(head="own", std=1.0)
    assert tables.Results(runs).pair("diff", "softmax", **where) == [[3.5], [3.5]]
    runs += [run_of("softmax", gpu, seed) for seed in (3, 4)]
    assert tables.Results(runs).pair("diff", "softmax", **where) == [[3, 4], [3, 4]]
    assert tables.Results(runs).pair("diff", "softmax", seeds=[4], **where) == [[4], [4]]
    assert tables.Results(runs).pair("diff", "diff_v2", **where) is None
    apart = [run_of("diff", gpu, 3), run_of("softmax", gpu, 5)]  # if they share none, all count
    assert tables.Results(apart).pair("diff", "softmax", **where) == [[3], [5]]
    with pytest.raises(Refused, match="diff has two reported rates on seed 9"):
        other_rate = run_of("diff", gpu, 9, shift=0.1) | dict(lr=2e-3)
        tables.Results([*runs, other_rate]).at("diff", **where)


def test_a_copy_of_a_file_of_runs_is_not_new_seeds(capsys):
    runs = [run for run in read_runs(RESULTS / "toys.json") if run["std"] == AS_DRAWN]
    lookups = read_runs(RESULTS / "lookup.json")
    Path("runs").mkdir()
    printed = []
    for name in ("a", "copy"):
        lines = "".join(json.dumps(run) + "\n" for run in [*runs, *lookups])
        Path("runs", f"{name}.jsonl").write_text(lines)
        tables.main(["runs"])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "**0.041 ± 0.008** (20)" in printed[0]
    assert "| minus the average | 100 | 100 | 100 | 99.7 | 10 |" in printed[0]


def test_the_end_of_a_program_is_one_line():
    for error, said in ((KeyboardInterrupt(), "stopped"), (Refused("no runs"), "no runs")):
        with pytest.raises(SystemExit, match=said):
            with one_line():
                raise error
