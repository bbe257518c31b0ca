"""train.py and sample.py: batches, a run and the ways in which it can end, text."""
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import sample
import train
from data import get_tokenizer, hash_of, load_data
from model import ATTENTION, GPT

TOP = Path(__file__).parent.parent
TOY = """--preset=toy --device=cpu --n_layer=1 --n_embd=32 --n_head=2 --block_size=32 --batch_size=4
    --total_batch=128 --steps=24 --eval_every=4 --log_every=1 --eval_tokens=256""".split()
STORY = "Once upon a time there was a Größe 🙂. " * 200


def log_of(folder):
    records = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    clock = ("tok_per_s", "minutes_left", "out", "date")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


@pytest.fixture
def write_own(monkeypatch):
    """Writes myarm.py, an attention of one's own, which --use=myarm finds and imports anew."""
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text):
        sys.modules.pop("myarm", None)
        ATTENTION.pop("mine", None)
        Path("myarm.py").write_text("from model import ATTENTION, Attention, softmax_map\n" + text)

    yield write
    write("")


MINE = """
class Mine(Attention):
    def make_map(self, q, k, x, rope):
        return softmax_map(q, k, rope)
ATTENTION["mine"] = Mine
"""

# ---- a step

def test_an_epoch_has_each_sequence_once_in_an_order_of_its_own():
    data = np.arange(1001, dtype="<u2")  # 100 sequences, which begin with 0, 10, 20, ...
    (config,) = train.parse([*TOY, "--block_size=10", "--total_batch=80"])
    places = itertools.product(range(25), range(2))
    order = torch.cat([train.batch(data, config, *place) for place in places])[:, 0].tolist()
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(0, 1000, 10))
    assert order[:100] != order[100:]
    other = train.batch(data, replace(config, seed=2), 0, 0)
    assert not torch.equal(other, train.batch(data, config, 0, 0))


def test_micro_steps_add_up_to_one_large_batch():
    data, _, _ = load_data(None)
    results = []
    for batch_size in (8, 2):
        (config,) = train.parse([*TOY, "--total_batch=256", f"--batch_size={batch_size}"])
        model = GPT(replace(config, vocab_size=257))
        optimizer = train.make_optimizer(model, config)
        results.append([train.training_step(model, optimizer, data, config, s) for s in range(3)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def test_matrices_decay_and_vectors_do_not():
    (config,) = train.parse([*TOY, "--attn=diff"])
    matrices, vectors = train.make_optimizer(GPT(config), config).param_groups
    assert {p.ndim for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0
    assert {p.ndim for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1


def test_the_rate_rises_to_its_peak_and_falls_to_0():
    (config,) = train.parse([*TOY, "--steps=100", "--warmup=10", "--lr=1"])
    rates = [train.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])


def test_two_processes_give_the_losses_of_one():
    flags = [*TOY, "--total_batch=512", "--steps=8", "--eval_tokens=700", "--attn=diff"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [TOP / "train.py", *flags, "--out=two"]
    said = subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    assert said.count("step 8 |") == 1  # only one of them speaks
    train.main([*flags, "--out=one"])
    for one, two in zip(log_of("one/diff")[1:], log_of("two/diff")[1:], strict=True):
        for name in ("step", "train_loss", "val_loss", "grad_norm", "lr"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5), (name, one["step"])


# ---- a run, and how it ends

def test_all_kinds_learn_a_text():
    Path("story.txt").write_text(STORY, encoding="utf-8")
    flags = ["--steps=60", "--lr=1e-2", "--warmup=10", "--eval_every=60", "--data=story.txt"]
    losses = train.main([*TOY, *flags, "--attn=softmax,diff,diff_v2,linear,diff_linear"])
    assert len(losses) == 5 and max(losses) < 2  # it begins at log(257) = 5.5


def test_val_of_the_toy_has_no_long_line_that_train_has():
    lines = []
    for tokens in load_data(None)[:2]:
        text = bytes(np.where(tokens == 256, ord("\n"), tokens).astype("u1"))
        lines.append({line for line in text.split(b"\n") if len(line) >= 32})
    assert min(map(len, lines)) > 500 and not lines[0] & lines[1]


def send_before(monkeypatch, number, module, name, n):
    """Has this process get a signal just before the nth call of a function of a module."""
    function, calls = getattr(module, name), itertools.count(1)

    def replacement(*args, **kwargs):
        if next(calls) == n:
            signal.raise_signal(number)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, replacement)


def test_killed_anywhere_a_run_ends_in_the_same_bits(monkeypatch, write_own):
    write_own("import torch" + MINE + """
Mine.output = lambda self, y: torch.nn.functional.dropout(y, 0.1, self.training)
""")
    flags = [*TOY, "--attn=diff,mine", "--use=myarm"]
    losses = train.main([*flags, "--out=whole"])

    def child(*place):
        send_before(monkeypatch, signal.SIGKILL, *place)
        train.main([*flags, "--out=cut"])

    for place in [
        (train, "training_step", 3),  # before the first checkpoint
        (Path, "replace", 2),  # a checkpoint lies there under its temporary name
        (Path, "write_text", 4),  # the checkpoint is ahead of the log
        (GPT, "save", 3),
        (Path, "replace", 3),  # the last checkpoint
        (train, "training_step", 14),  # in the second run
    ]:
        process = multiprocessing.get_context("fork").Process(target=child, args=place)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for _ in range(2):  # the second time it returns at once
        assert train.main([*flags, "--out=cut"]) == losses
        for attn in ("diff", "mine"):
            assert log_of(f"cut/{attn}") == log_of(f"whole/{attn}")
            cut, whole = [GPT.load(f"{out}/{attn}/ckpt.pt")[0] for out in ("cut", "whole")]
            for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
                assert torch.equal(a, b)


def test_a_log_that_is_missing_or_cut_is_written_anew():
    train.main([*TOY, "--steps=4"])
    log = Path("out/toy/softmax/log.jsonl")
    whole = log.read_text()
    for content in ("", whole[:-20], whole + '{"step": 5, "tok'):
        log.write_text(content)
        train.main([*TOY, "--steps=4"])
        assert log.read_text() == whole


def test_restart_keeps_the_old_run_until_the_new_one_has_a_checkpoint(monkeypatch):
    train.main([*TOY, "--steps=4"])
    before = log_of("out/toy/softmax")
    flags = [*TOY, "--steps=8", "--restart"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="goes on from the last"):
        send_before(patch, signal.SIGINT, train, "training_step", 3)
        train.main(flags)
    assert log_of("out/toy/softmax") == before
    assert GPT.load("out/toy/softmax/ckpt.pt")[1]["log"][0]["steps"] == 4
    train.main(flags)
    assert [record["step"] for record in log_of("out/toy/softmax")[1:]] == list(range(1, 9))


def test_a_run_that_diverges_keeps_its_checkpoint_and_the_others_go_on(monkeypatch, capsys):
    usual = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda step, config: (
        1e30 if (config.attn, step) == ("softmax", 6) else usual(step, config)))
    diff, softmax = train.main([*TOY, "--attn=diff,softmax"])
    assert softmax == math.inf and diff < 5
    assert GPT.load("out/toy/softmax/ckpt.pt")[1]["step"] == 4
    assert "sample.py --ckpt=out/toy/diff" in capsys.readouterr().out
    assert train.main([*TOY, "--steps=8", "--restart"]) == [math.inf]
    assert "sample.py" not in capsys.readouterr().out  # an older checkpoint lies there


def test_the_first_step_is_logged_with_the_minutes_that_are_left(monkeypatch):
    monkeypatch.setattr(train.time, "perf_counter", itertools.count().__next__)  # a second a look
    train.main([*TOY, "--steps=61", "--eval_every=61", "--log_every=30"])
    log = [json.loads(line) for line in Path("out/toy/softmax/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log[1:]] == [1, 30, 60, 61]
    assert log[1]["tok_per_s"] == 128 and log[1]["minutes_left"] == 1.0  # for 60 steps


def test_lambda_is_logged_where_there_is_one(write_own):
    write_own(MINE + "Mine.lam = lambda self, x: 0.25")
    train.main([*TOY, "--use=myarm", "--attn=diff,diff_v2,mine,softmax", "--steps=4"])
    assert log_of("out/toy/mine")[-1]["lambda"] == [0.25]
    assert "lambda" not in log_of("out/toy/softmax")[-1]
    diff, v2 = [log_of(f"out/toy/{attn}")[-1]["lambda"] for attn in ("diff", "diff_v2")]
    model, _ = GPT.load("out/toy/diff/ckpt.pt")
    assert diff == [pytest.approx(model.blocks[0].attn.lam(None).item(), abs=1e-4)]
    assert v2 == [pytest.approx(0.5, abs=0.1)]


# ---- what is refused before a run, in one sentence

@pytest.mark.parametrize("flags, says", [
    ("--lr=-1", "lr can't be -1.0"),
    ("--lr=nan", "lr can't be nan"),
    ("--steps=0", "steps can't be 0"),
    ("--seed=99999999999999999999", "seed can't be 99999999999999999999"),
    ("--attn=softmax,cosine", r"attn is 'cosine' \(yours\? name its file with --use\), not one of"),
    ("--attn=softmax,diff --n_head=1", "n_head must be a multiple of 2, not 1"),
    ("--n_head=3", "n_embd must be a multiple of 2 n_head = 6, not 128"),
    ("--total_batch=3000", "total_batch must be a multiple of 2048, not 3000"),
    ("--device=tpu9", "device can't be tpu9"),
    ("--device=mps", "device can't be mps"),
    ("--kernel=flash_attn", "--kernel=flash_attn needs the package flash-attn"),
    ("--use=nothing.at_all", "--use=nothing.at_all: Python finds no module of this name"),
    ("--out=short.txt/x", "--out=short.txt/x/softmax can't be made"),
    ("--data=nowhere", "--data=nowhere can't be read.*it is not there"),
    ("--data=data/fineweb_edu", "it is not there .prepare_fineweb.py makes"),
    ("--data=short.txt", "--data=short.txt is too short"),
    ("--data=latin1.txt", "--data=latin1.txt can't be read"),
    ("--data=half", "--data=half can't be read, or its tokenizer: .*val.bin"),
])
def test_what_a_command_line_gets_wrong_is_one_sentence(flags, says):
    Path("short.txt").write_text("too short")
    Path("latin1.txt").write_bytes("Größe".encode("latin1") * 1000)
    Path("half").mkdir()
    Path("half/train.bin").write_bytes(b"12" * 9999)
    with pytest.raises(SystemExit, match=says) as error:
        train.main(["--preset=toy", "--device=cpu", *flags.split()])
    assert "\n" not in error.value.code
    assert not list(Path().rglob("log.jsonl"))


def test_a_program_that_refuses_or_diverges_ends_with_the_code_1():
    command = [sys.executable, TOP / "train.py", *TOY]
    ended = subprocess.run([*command, "--lr=-1"], text=True, capture_output=True)
    assert (ended.returncode, ended.stderr) == (1, "train.py: lr can't be -1.0\n")
    assert subprocess.run([*command, "--lr=1e30"]).returncode == 1


@pytest.mark.parametrize("flags, says", [
    ("--steps=8", "is of another run: steps is 4 there and 8 here"),
    ("--data=edited.txt", "is of another run: data_hash is '.*' there and '.*' here"),
])
def test_another_run_is_refused_before_any_is_trained(flags, says):
    Path("story.txt").write_text(STORY)
    Path("edited.txt").write_text(STORY[:5000] + STORY[5000:].replace("time", "TIME", 1))
    train.main([*TOY, "--steps=4", "--attn=diff", "--data=story.txt"])
    before = log_of("out/toy/diff")
    with pytest.raises(SystemExit, match=says):
        train.main([*TOY, "--steps=4", "--attn=softmax,diff", "--data=story.txt", flags])
    assert not Path("out/toy/softmax/log.jsonl").exists() and log_of("out/toy/diff") == before
    os.rename("story.txt", "moved.txt")
    train.main([*TOY, "--steps=4", "--attn=diff", "--data=moved.txt"])  # it is finished


def test_a_hash_has_every_token_of_a_text_and_pieces_of_more():
    tokens = np.zeros(100_000, "<u2")
    changed = tokens.copy()
    changed[77_777] = 1
    hashes = {hash_of(a, b) for a in (tokens, changed, tokens[1:]) for b in (tokens, changed)}
    assert len(hashes) == 6


def test_a_damaged_checkpoint_says_so_and_a_lost_one_does_not_cost_the_log():
    train.main([*TOY, "--steps=4"])
    path, log = Path("out/toy/softmax/ckpt.pt"), log_of("out/toy/softmax")
    path.write_bytes(path.read_bytes()[:5000])
    for program, flags in [(sample, []), (train, [*TOY, "--steps=4"])]:
        with pytest.raises(SystemExit, match="softmax/ckpt.pt can't be read as a checkpoint"):
            program.main(["--device=cpu", *flags])
    path.unlink()  # to save space, say
    with pytest.raises(SystemExit, match="ckpt.pt is gone, but not its log: --restart discards"):
        train.main([*TOY, "--steps=4"])
    assert log_of("out/toy/softmax") == log


def test_an_edited_file_of_an_attention_is_another_run(write_own):
    write_own(MINE)
    train.main([*TOY, "--steps=4", "--use=myarm", "--attn=mine"])
    write_own(MINE.replace("rope)\nATT", "rope) / 2\nATT"))
    with pytest.raises(SystemExit, match="another run: file_hash is '.*' there and '.*' here"):
        train.main([*TOY, "--steps=4", "--use=myarm", "--attn=mine"])
    ATTENTION.pop("mine")
    with pytest.raises(SystemExit, match="attn is 'mine' .yours. name its file with --use"):
        sample.main(["--device=cpu"])


def test_what_is_wrong_in_ones_own_file_keeps_its_traceback(write_own):
    train_mine = [*TOY, "--steps=1", "--use=myarm", "--attn=mine"]
    write_own(MINE)
    train.main(train_mine)
    for program, flags in [(sample, ["--use=myarm", "--device=cpu"]), (train, train_mine)]:
        write_own("import not_installed")
        with pytest.raises(ModuleNotFoundError, match="not_installed"):
            program.main(flags)
        for mistake, error in [
            ("softmax_mpa(q, k, rope)", NameError),
            ("open('weights.txt')", OSError),
            ("torch.zeros(9) + torch.zeros(8)", RuntimeError),
            ("int('x')", ValueError),
        ]:
            write_own("import torch" + MINE.replace("softmax_map(q, k, rope)", mistake))
            with pytest.raises(error):
                program.main(flags)


def test_what_happens_in_a_run_keeps_its_traceback(monkeypatch):
    def no_memory(*args):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(train, "training_step", no_memory)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        train.main(TOY)


# ---- text, and the clock

def test_readmes_attention_trains_and_samples(write_own, capsys):
    layer, average = re.findall(r"```python\n(.*?)```", Path(TOP, "README.md").read_text(), re.S)
    exec(layer + "assert layer(torch.zeros(1, 5, 768)).shape == (1, 5, 768)", dict(torch=torch))
    write_own(average)
    train.main([*TOY, "--use=myarm", "--attn= average", "--steps=2"])
    assert "python sample.py --ckpt=out/toy/average --use=myarm" in capsys.readouterr().out
    os.utime("out/toy/average/ckpt.pt", (0, 0))
    train.main([*TOY, "--attn=diff", "--steps=2"])  # the newest
    said = []
    for flags in ([], ["--ckpt=out/toy/diff/ckpt.pt"], ["--seed=2"],
                  ["--ckpt=out/toy/average", "--use=myarm"]):
        capsys.readouterr()
        sample.main(["--prompt=Größe", "--max_new_tokens=40", "--device=cpu", *flags])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len({*said}) == 3 and "Größe" in said[0]
    assert log_of("out/toy/average")[0]["data_hash"] == log_of("out/toy/diff")[0]["data_hash"]
    for flags, says in [(["--ckpt=nowhere"], "there is no checkpoint in nowhere"),
                        (["--temperature=-1"], "temperature can't be -1"),
                        (["--top_k=0"], "top_k can't be 0")]:
        with pytest.raises(SystemExit, match=says):
            sample.main(["--device=cpu", *flags])
    assert get_tokenizer("bytes").n_vocab == 257


def test_readmes_commands_have_the_flags_that_they_use():
    for line in Path(TOP, "README.md").read_text().splitlines():
        command = line.strip().split("#")[0].split()
        if command[:2] == ["python", "train.py"]:
            train.parse([flag for flag in command[2:] if not flag.startswith("--use")])


def test_the_bench_compares_to_the_first(capsys, monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    bench.main([*TOY, "--attn=softmax,diff"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["softmax", "diff"] and rows[0][3] == "1.00"
