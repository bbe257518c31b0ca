"""What more than one of the test files needs."""
import runpy
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent  # of the repository

# flags of train.py for a run of a second: 24 steps of 4 sequences of 32 bytes
TOY = [
    "--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32", "--batch_size=4",
    "--total_batch=128", "--steps=24", "--eval_every=4", "--log_every=1", "--eval_tokens=256",
]


def complaint(command, monkeypatch, capsys):
    """What a program says when it refuses a command line like "train.py --lr=x".

    Runs it as a user would. It has to fail with one line that names the program, or with argparse's
    usage and such a line.
    """
    program, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [program, *flags])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(TOP / program), run_name="__main__")
    assert error.value.code not in (0, None), f"{command} was not refused"

    said = capsys.readouterr().err
    if isinstance(error.value.code, str):
        said += error.value.code  # Python prints this as it ends
    lines = said.strip().splitlines()
    if lines[0].startswith("usage: "):
        del lines[0]
    assert len(lines) == 1, f"{command} is refused in more than one line:\n{said}"
    assert lines[0].startswith(f"{program}: "), f"{command} is refused in an unusual way:\n{said}"
    return lines[0]
