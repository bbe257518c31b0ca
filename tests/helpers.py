"""What more than one of the test files needs."""
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from data import get_tokenizer
from model import ATTENTION

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another

TOP = Path(__file__).parent.parent  # of the repository

ARMS = [name for name, arm in ATTENTION.items() if arm.__module__ == "model"]  # not the lab's

# flags of train.py for a run of a second: 24 steps of 4 sequences of 32 bytes
TOY = """--preset=toy --device=cpu --n_layer=1 --n_embd=32 --n_head=2 --block_size=32 --batch_size=4
    --total_batch=128 --steps=24 --eval_every=4 --log_every=1 --eval_tokens=256""".split()


def need_gpt2():
    """tiktoken's gpt2. Skips the test if its vocabulary can't be had."""
    try:
        return get_tokenizer("gpt2")
    except OSError as e:  # a ConnectionError is one
        pytest.skip(f"GPT-2's vocabulary needs a network, or TIKTOKEN_CACHE_DIR: {e}")


def log_of(folder):
    """The lines of a log, but for the clock and the folder."""
    records = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    for record in records:
        for name in ("tok_per_s", "minutes_left", "date", "out"):
            record.pop(name, None)
    return records


def refusal(command, monkeypatch, capsys):
    """Runs a command line like "train.py --lr=x", which has to fail. Returns what it says."""
    program, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [program, *flags])
    with pytest.raises(SystemExit) as error:  # a traceback fails the test
        runpy.run_path(str(TOP / program), run_name="__main__")
    code = error.value.code
    if isinstance(code, str):  # Python prints it and exits with 1
        assert "\n" not in code
        return code
    assert code in (1, 2), f"{command} was not refused"
    return " ".join(capsys.readouterr().err.replace("│", " ").split())  # the box is tyro's
