"""lab/losses.py on logs written here: what counts, what is left out, what stands apart."""
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import train
from lab import losses
from model import Refused


def write_run(folder, attn, seed, loss, steps_done=100, **settings):
    """A log as train.py writes it, with an evaluation at half of the steps and at the end."""
    config = replace(train.PRESETS["toy"], attn=attn, steps=100, seed=seed)
    records = [asdict(config) | dict(data_hash="7") | settings]
    for step in range(50, steps_done + 1, 50):
        records.append(dict(step=step, val_loss=loss + (100 - step) / 100))
    Path(folder).mkdir(parents=True)
    Path(folder, "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def cells(printed):
    """The lines of the printed tables as lists of cells."""
    return [line[2:-2].split(" | ") for line in printed.splitlines() if line.startswith("|")]


def test_seeds_are_pooled_and_settings_that_differ_are_shown(capsys):
    for seed, loss in enumerate([1.5, 1.7]):
        # the first seed lies where train.py puts it
        folder = f"out/seeds/{seed}" if seed else "out/toy"
        write_run(f"{folder}/diff", "diff", seed, loss)
        write_run(f"{folder}/softmax", "softmax", seed, loss - 0.1)
        # another batch_size is no other setting, and a file of one's own has one arm
        write_run(f"out/day/{seed}/diff", "diff", seed + 5, loss, batch_size=4)
        write_run(f"out/high/{seed}", "diff", seed, loss, lr=0.5)
        write_run(f"out/gate/{seed}", "gate", seed, loss, file_hash="ab")
    losses.main([])
    printed = capsys.readouterr().out
    header, _, *rows = cells(printed)
    assert header == ["attn", "lr", "n", "val loss", "less the first"]
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert list(found) == [("softmax", "0.002"), ("diff", "0.002"), ("diff", "0.5"),
                           ("gate", "0.002")]
    # the sd of two losses 0.2 apart is 0.141. t is 12.706, and 4.3027 with two degrees of freedom
    assert found["softmax", "0.002"] == ["2", "1.500 ± 1.271", "–"]
    assert found["diff", "0.5"] == ["2", "1.600 ± 1.271", "0.100 ± 0.608"]
    assert found["diff", "0.002"][0] == "4"
    assert "left out" not in printed and "-> out/losses.png" in printed
    assert Path("out/losses.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_out_is_named(capsys):
    write_run("out/a", "softmax", 1, 1.5)
    write_run("out/b", "softmax", 2, 1.6, steps_done=50)
    write_run("out/copy", "softmax", 1, 1.5)
    write_run("elsewhere/c", "softmax", 3, 1.7)
    Path("out/link").symlink_to(Path("elsewhere").resolve())
    for name, text in (("other", "[]\n"), ("half", '{"attn": "so')):
        Path("out", name).mkdir()
        Path("out", name, "log.jsonl").write_text(text)
    losses.main(["out"])
    printed = capsys.readouterr().out
    assert "left out: out/b: stopped or diverged: step 50 of 100" in printed
    assert "left out: out/copy: the same arm, settings and seed as out/a, which counts" in printed
    assert "left out: out/other: not a log of train.py" in printed
    assert "left out: out/half: " in printed
    assert cells(printed)[2][:2] == ["softmax", "2"]  # one behind the link


@pytest.mark.parametrize("name", ["steps", "total_batch", "eval_tokens", "data_hash"])
def test_what_cannot_be_compared_stands_in_tables_of_their_own(name, capsys):
    write_run("out/a", "softmax", 1, 1.5, steps_done=50)
    with pytest.raises(Refused, match="no run below out is finished"):
        losses.main(["out"])
    write_run("out/b", "softmax", 1, 1.5)
    write_run("out/c", "diff", 2, 1.5)
    write_run("out/d", "diff", 2, 1.9, **{name: 64})
    losses.main(["out"])
    printed = capsys.readouterr().out
    assert [row[0] for row in cells(printed)] == ["attn", "---", "softmax", "diff", "attn", "---",
                                                  "diff"]
    assert f"{name} 64\n" in printed and Path("out/losses1.png").exists()
