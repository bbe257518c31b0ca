"""lab/losses.py on logs written here: what counts, what is left out, what is refused."""
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import train
from lab import losses


def write_run(folder, attn, seed, loss, steps_done=100, diverged=False, **settings):
    """A log as train.py writes it, with an evaluation at half of the steps and at the end."""
    config = replace(train.PRESETS["toy"], attn=attn, steps=100, seed=seed, vocab_size=257)
    ran = dict(mlp_width=340, subln=float(attn == "diff"))
    ran |= dict(train_tokens=1000, val_tokens=99, data_hash="7")
    records = [asdict(config) | ran | settings]
    for step in range(50, steps_done + 1, 50):
        records.append(dict(step=step, val_loss=loss + (100 - step) / 100))
    if diverged:
        records.append(dict(step=steps_done + 20, diverged="step 50 is kept"))
    Path(folder).mkdir(parents=True)
    Path(folder, "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def cells(printed):
    """The lines of the printed table as lists of cells."""
    return [line[2:-2].split(" | ") for line in printed.splitlines() if line.startswith("|")]


def test_seeds_are_pooled_and_settings_that_differ_are_shown(capsys):
    for seed, loss in enumerate([1.5, 1.7]):
        write_run(f"out/{seed}/diff", "diff", seed, loss)
        write_run(f"out/{seed}/softmax", "softmax", seed, loss - 0.1)
        # another batch_size is no other setting
        write_run(f"out/day/{seed}/2/diff", "diff", seed + 5, loss, batch_size=4)
        write_run(f"out/none/{seed}", "diff", seed, loss, subln=0.0)
    losses.main(["out"])
    printed = capsys.readouterr().out
    header, _, *rows = cells(printed)
    assert header == ["attn", "subln", "n", "val loss", "less the first"]
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert list(found) == [("softmax", "0"), ("diff", "0"), ("diff", "1")]
    # the sd of two losses 0.2 apart is 0.141. t is 12.706, and 4.3027 with two degrees of freedom
    assert found["softmax", "0"] == ["2", "1.500 ± 1.271", "–"]
    assert found["diff", "0"] == ["2", "1.600 ± 1.271", "0.100 ± 0.608"]
    assert found["diff", "1"][0] == "4"
    assert "left out" not in printed and "-> out/losses.png" in printed
    assert Path("out/losses.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_out_is_named(capsys):
    write_run("out/a", "softmax", 1, 1.5)
    write_run("out/b", "softmax", 2, 1.6, steps_done=50)
    write_run("out/copy", "softmax", 1, 1.5)
    write_run("elsewhere/c", "softmax", 3, 1.7)
    write_run("out/d", "diff", 1, 1.7, steps_done=50, diverged=True)
    Path("out/link").symlink_to(Path("elsewhere").resolve())
    write_run("out/other", "diff", 2, 1.5)
    Path("out/other/log.jsonl").write_text("[]\n")
    losses.main(["out"])
    printed = capsys.readouterr().out
    assert "left out: out/b: not finished: step 50 of 100" in printed
    assert "left out: out/copy: the same arm, settings and seed as out/a, which counts" in printed
    assert "left out: out/other: not a log of train.py" in printed
    assert "diverged: out/d\n" in printed
    _, _, softmax, diff = cells(printed)
    assert softmax[:3] == ["softmax", "0", "2"]  # one behind the link
    assert diff == ["diff", "1", "1", "inf", "inf"]


@pytest.mark.parametrize("name", [
    "train_tokens", "steps", "total_batch", "vocab_size", "data_hash",
])
def test_what_cannot_be_compared_is_refused(name):
    write_run("out/a", "softmax", 1, 1.5, steps_done=50)
    with pytest.raises(SystemExit, match="no run below out is finished"):
        losses.main(["out"])
    write_run("out/b", "softmax", 1, 1.5)
    write_run("out/c", "softmax", 2, 1.5, **{name: 64})
    where = f"{name} is .* in out/[bc] and .* in out/[bc]"
    with pytest.raises(SystemExit, match=f"these runs can't be compared: {where}"):
        losses.main(["out"])


def test_a_shorter_run_is_not_taken_for_the_same(capsys):
    write_run("out/a", "softmax", 1, 1.5)
    write_run("out/b", "softmax", 1, 1.7, steps=50)
    with pytest.raises(SystemExit, match="steps is 100 in out/a and 50 in out/b"):
        losses.main(["out"])
    assert "left out" not in capsys.readouterr().out
