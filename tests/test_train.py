"""train.py and sample.py: batches, flags, a run and its files, and all the ways it can end."""
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
import train
from data import Shards
from helpers import TOP, TOY, complaint
from model import GPT, GPTConfig

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another


def one_run(*flags):
    """The config of a command line that asks for one run."""
    (config,) = train.parse(["--device=cpu", *flags])
    return config


def folders(*flags):
    """The folders of the runs that a command line asks for."""
    return [str(config.out) for config in train.parse(["--device=cpu", *flags])]


def records_without_clock(folder):
    _, records = train.read_log(f"{folder}/log.jsonl")
    for record in records:
        record.pop("tok_per_s", None)
    return records


@pytest.fixture
def story():
    """A text with characters of one to four bytes."""
    Path("story.txt").write_text("Once upon a time there was a Größe 🙂. " * 200, encoding="utf-8")
    return "--data=story.txt"


# batches


def counting(**settings):
    """100 sequences, which begin with the tokens 0, 10, 20, ..., and a config for them."""
    config = one_run("--block_size=10", "--batch_size=4", "--total_batch=40", "--steps=50")
    return Shards([np.arange(1001, dtype="<u2")]), replace(config, vocab_size=1001, **settings)


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    orders = []
    for seed in (1, 2):
        data, config = counting(seed=seed)
        for epoch in (0, 1):
            order = []
            for step in range(25 * epoch, 25 * epoch + 25):
                order += train.batch(data, config, step, micro_step=0)[:, 0].tolist()
            assert sorted(order) == list(range(0, 1000, 10))
            orders.append(tuple(order))
    assert len(set(orders)) == 4


def test_the_processes_share_a_batch():
    data, config = counting()
    parts = []
    for rank in (0, 1):
        half = replace(config, rank=rank, world=2)
        assert half.batch_size == 2
        parts.append(train.batch(data, half, step=3, micro_step=0))
    assert torch.equal(torch.cat(parts), train.batch(data, config, step=3, micro_step=0))


# flags


def test_presets_fill_in_what_no_flag_says():
    toy = one_run()
    assert (toy.preset, toy.steps, toy.total_batch, toy.lr) == ("toy", 500, 2048, 2e-3)
    gpt2 = one_run("--preset=gpt2", "--n_layer=2")
    assert (gpt2.n_layer, gpt2.block_size, str(gpt2.data)) == (2, 1024, "data/fineweb_edu")
    assert gpt2.steps == 5341  # 2.8e9 tokens, 524,288 a step
    assert one_run("--preset=gpt2", "--steps=7").tokens == 7 * 524_288
    assert one_run("--tokens=1e6").steps == math.ceil(1e6 / 2048)


def test_the_rate_goes_up_to_its_peak_and_down_to_0():
    config = one_run("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    short = one_run("--steps=3", "--warmup=10", "--lr=1")
    assert [train.learning_rate(step, short) for step in range(3)] == [0.5, 1, 1]


def test_a_folder_has_the_name_of_what_differs_from_the_preset():
    assert folders("--attn=diff", "--lr=2e-3", "--seed=1337", "--steps=9") == ["out/diff"]
    flags = ["--attn=diff", "--no-subln", "--lr=3e-3", "--seed=2"]
    assert folders(*flags) == ["out/diff-nosubln-lr3e-3-seed2"]
    assert folders("--n_layer=2", "--no-flash") == ["out/softmax-n_layer2"]
    assert folders("--subln", "--decay") == ["out/softmax-subln-decay"]
    assert folders("--lr=0.00123456789") != folders("--lr=0.00123456788")
    # one run, or several below one folder
    assert folders("--out=here") == ["here"]
    assert folders("--seed=1,2,1", "--out=x") == ["x/softmax-seed1", "x/softmax-seed2"]
    names = folders("--attn=softmax,diff", "--lr=1e-3,2e-3")
    assert names == ["out/softmax-lr1e-3", "out/diff-lr1e-3", "out/softmax", "out/diff"]


def test_what_changes_nothing_in_an_arm_names_nothing():
    assert folders("--lambda_init=0.5", "--subln_init=0.2") == ["out/softmax"]
    assert folders("--attn=diff_v2", "--lambda_init=0.5", "--subln_init=2") == ["out/diff_v2"]
    assert folders("--attn=diff", "--no-subln", "--subln_init=0.2") == ["out/diff-nosubln"]
    assert folders("--attn=diff", "--subln", "--lambda_init=0") == ["out/diff-lambda_init0"]
    assert folders("--subln", "--subln_init=0.2") == ["out/softmax-subln-subln_init0.2"]


@pytest.mark.parametrize("command, says", [
    ("train.py --attn=softmax,cosine", "--attn: 'cosine' is not one of softmax, diff"),
    ("train.py --n_layer=1.9", "--n_layer: '1.9' is not a whole number"),
    ("train.py --steps=0", "--steps: "),
    ("train.py --seed=-1", "--seed: '-1' is not a whole number"),
    ("train.py --lr=1e-3,inf", "--lr: 'inf' is not a number"),
    ("train.py --lr=-1", "--lr: '-1' is not a number from 0 on"),
    ("train.py --subln_init=nan", "--subln_init: 'nan' is not a number"),
    ("train.py --steps=3 --tokens=3", "--steps and --tokens"),
    ("train.py --total_batch=3000", "--total_batch=3000 is no multiple of 256"),
    ("train.py --attn=softmax,diff --n_head=1", "n_head must be even for diff"),
    ("train.py --device=tpu9", "the device tpu9"),
    ("train.py --data=short.txt", "short.txt is too short for a step and an evaluation: 9 + 1"),
    ("sample.py", "no checkpoint under out/: python train.py --attn=diff makes one"),
    ("sample.py --ckpt=nope", "--ckpt=nope: no checkpoint there"),
    ("sample.py --top_p=1.5 --ckpt=good.pt", "top_p must be above 0 and at most 1"),
    ("sample.py --ckpt=mine.pt", "--ckpt=... names another checkpoint"),
])
def test_what_is_refused_and_in_which_words(command, says, monkeypatch, capsys):
    Path("short.txt").write_text("too short")
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=257))
    model.save("good.pt", tokenizer="bytes")
    model.config.attn = "mine"
    model.save("mine.pt", tokenizer="bytes")
    before = set(os.listdir())
    assert says in complaint(command, monkeypatch, capsys)
    assert set(os.listdir()) == before


# a run and what it writes


def test_a_run_writes_a_log_and_learns(story, capsys):
    flags = [*TOY, "--steps=6", "--eval_every=4", "--log_every=2", "--attn=diff", story]
    (loss,) = train.main(flags + ["--lr=3e-3", "--out=run"])
    head, records = train.read_log("run/log.jsonl")

    assert (head["attn"], head["n_layer"], head["tokenizer"]) == ("diff", 1, "bytes")
    assert head["arm"].startswith("diff-n_layer1-") and "lr" not in head["arm"]
    assert head["data"] == "story.txt"
    assert head["torch"] == torch.__version__
    assert head["parameters"] == sum(p.numel() for p in GPT.load("run/ckpt.pt").parameters())

    tokens = 4 * 32  # a step
    steps = [(record["step"], record["tokens"]) for record in records]
    assert steps == [(0, 0), (2, 2 * tokens), (4, 4 * tokens), (6, 6 * tokens)]
    of_a_step = {"step", "tokens", "train_loss", "lr", "grad_norm", "tok_per_s", "mfu"}
    assert records[0].keys() == {"step", "tokens", "val_loss", "lambda"}
    assert records[1].keys() == of_a_step
    assert records[2].keys() == records[3].keys() == of_a_step | {"val_loss", "lambda", "sample"}
    assert len(records[2]["lambda"]) == 1
    assert records[2]["sample"].startswith("Once upon a time")
    assert loss == records[-1]["val_loss"] < records[0]["val_loss"]
    said = capsys.readouterr().out
    assert f"step     6/6 | train {records[-1]['train_loss']:.4f} |" in said
    assert "sample.py --ckpt=run/ckpt.pt" in said


def test_the_losses_of_the_log_are_those_of_the_model(story):
    # 300 tokens of val are 9 sequences, so the last batch is filled up
    flags = [*TOY, "--steps=3", "--eval_tokens=300", story, "--out=run"]
    (loss,) = train.main(flags)
    data = train.open_data(one_run(*flags))
    tokens = torch.from_numpy(np.stack([data.val.sequence(i, 32) for i in range(9)]))
    with torch.no_grad():
        _, expected = GPT.load("run/ckpt.pt")(tokens[:, :-1], tokens[:, 1:])
    assert loss == pytest.approx(expected.item(), abs=1e-5)


def test_a_step_is_the_same_in_one_micro_step_or_in_four(story):
    for batch_size in (4, 1):
        sizes = ["--total_batch=128", f"--batch_size={batch_size}"]
        train.main([*TOY, *sizes, "--steps=3", story, f"--out=of{batch_size}"])
    in_one = records_without_clock("of4")
    in_four = records_without_clock("of1")
    for a, b in zip(in_one[1:], in_four[1:], strict=True):
        for key in ("train_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), (key, a["step"])


def test_mfu_counts_the_matmuls_of_a_step(monkeypatch):
    monkeypatch.setitem(train.PEAK, "cpu", 1.0)
    config = one_run("--n_layer=2", "--n_embd=64", "--block_size=256")
    matrices = [p for p in GPT(config.model_config()).parameters() if p.ndim == 2]
    weights = 6 * sum(p.numel() for p in matrices)
    maps = 2 * 3 * (2 + 2) * 256 * 64  # 2 layers, QK^T and AV, 2 T C each, forward and backward
    assert train.full_speed(config) == pytest.approx(1 / (weights + maps))


# sample.py


def test_sample_says_the_same_for_the_same_seed(story, capsys):
    train.main([*TOY, "--steps=2", "--attn=diff", story])
    capsys.readouterr()
    # the prompt may be empty, or longer than a block
    for prompt, dtype in [("Once", "float32"), ("", "bfloat16"), ("Größe 🙂" * 20, "float32")]:
        flags = ["--max_new_tokens=9", "--num_samples=2", "--device=cpu", f"--dtype={dtype}"]
        flags.append(f"--prompt={prompt}")
        said = []
        for seed in (1, 1, 2):
            sample.main([*flags, f"--seed={seed}"])  # the newest checkpoint under out/
            said.append(capsys.readouterr())
        assert said[0].out.startswith(prompt)
        assert "\n--- sample 2\n" in said[0].out
        assert said[0].out == said[1].out != said[2].out
        assert "tokens/s" in said[0].err


def test_sample_prints_whole_characters_and_stops_at_the_end_of_a_text(story, monkeypatch, capsys):
    train.main([*TOY, "--steps=1", story, "--out=run"])
    capsys.readouterr()
    rows = [
        [*"é🙂".encode(), 256, *b"no"],
        [*b"ab", 256, *b"no no!"],
    ]
    monkeypatch.setattr(GPT, "generate", lambda *args, **kwargs: iter(torch.tensor(rows).T))
    written = []
    monkeypatch.setattr(sys.stdout, "write", written.append, raising=False)
    sample.main(["--ckpt=run", "--num_samples=2", "--device=cpu"])
    assert "".join(written) == "é🙂\n\n--- sample 2\nab\n"
    assert "é" in written
    assert "🙂" in written


# stopping and going on


def train_in_child(flags, interrupt_before=None, by=None):
    """Runs train.main in a child process, as a program would.

    interrupt_before=("os.replace", 2) calls `by` just before its second call of os.replace. Without
    `by` it is killed there.
    """

    def child():
        if interrupt_before is not None:
            do_before(*interrupt_before, by or kill)
        train.cli(lambda: train.main(flags))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def do_before(call, n, do):
    """Makes a function like "os.replace" do something else first, at its nth call."""
    module = {"os": os, "train": train}[call.split(".")[0]]
    name = call.split(".")[1]
    function = getattr(module, name)
    calls = []

    def replacement(*args, **kwargs):
        calls.append(args)
        if len(calls) == n:
            do()
        return function(*args, **kwargs)

    setattr(module, name, replacement)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def press_ctrl_c():
    raise KeyboardInterrupt


def assert_same_run(a, b):
    """Two folders hold the same weights and the same log, to the bit, but for what a clock says."""
    model_a = GPT.load(f"{a}/ckpt.pt")
    model_b = GPT.load(f"{b}/ckpt.pt")
    torch.testing.assert_close(model_a.state_dict(), model_b.state_dict(), rtol=0, atol=0)
    assert model_a.extra["step"] == model_b.extra["step"]
    assert records_without_clock(a) == records_without_clock(b)


@pytest.mark.parametrize("arm", ["--attn=softmax", "--attn=diff_linear --decay --total_batch=256"])
def test_killed_anywhere_a_run_ends_in_the_same_bits(arm):
    flags = [*TOY, *arm.split()]
    train.main([*flags, "--out=whole"])
    cut = [*flags, "--out=cut"]
    for place in [
        ("os.replace", 1),  # before the first checkpoint
        ("os.replace", 3),  # the log is ahead of the checkpoint
        ("train.training_step", 3),
    ]:
        assert train_in_child(cut, place) == -signal.SIGKILL
    with open("cut/log.jsonl", "a") as file:
        file.write('{"step": 5, "tok')  # killed while it wrote
    assert 0 < GPT.load("cut/ckpt.pt").extra["step"] < 24
    train.main(cut)
    assert_same_run("cut", "whole")
    assert train.main(cut) == train.main([*flags, "--out=whole"])  # they return at once


def test_ctrl_c_says_how_to_go_on(capfd):
    place = ("train.training_step", 7)
    assert train_in_child([*TOY, "--out=run"], place, press_ctrl_c) == 130
    said = capfd.readouterr().err
    assert "the same command goes on after step 4" in said
    assert "Traceback" not in said


def test_a_run_that_diverged_stays_so_and_keeps_its_checkpoint(capsys, monkeypatch):
    flags = [*TOY, "--lr=1e30", "--out=wild"]
    assert train.main(flags) == [math.inf]
    assert "wild diverged at step 2: " in capsys.readouterr().err
    _, records = train.read_log("wild/log.jsonl")
    assert records[-1]["step"] == 2
    assert "grad_norm nan" in records[-1]["diverged"]
    assert GPT.load("wild/ckpt.pt").extra["step"] == 0
    monkeypatch.setattr(train, "training_step", None)  # nobody trains it again
    assert train.main(flags) == [math.inf]


def test_another_run_is_refused_and_left_alone():
    Path("other.txt").write_text("Once upon a time there was another text. " * 900)
    flags = [*TOY, "--attn=diff", "--steps=4", "--total_batch=128", "--out=run"]
    train_in_child(flags, ("train.training_step", 3))
    before = Path("run/log.jsonl").read_bytes()
    for flag, says in [
        ("--attn=softmax", "attn is 'diff' there and 'softmax' here"),
        ("--lr=1", "lr is 0.002 there and 1.0 here"),
        ("--steps=5", "steps is 4 there and 5 here"),
        ("--dtype=bfloat16", "dtype is 'float32' there and 'bfloat16' here"),
        ("--data=other.txt", "data_sha256 is '"),
    ]:
        with pytest.raises(ValueError, match=says):
            train.main([*flags, flag])
        assert Path("run/log.jsonl").read_bytes() == before, flag
    # another pace is not another run
    train.main([*flags, "--log_every=2", "--eval_every=2", "--batch_size=2", "--no-flash"])
    assert GPT.load("run/ckpt.pt").extra["step"] == 4


def test_a_log_without_its_checkpoint_is_refused_until_restart():
    flags = [*TOY, "--steps=2", "--out=run"]
    train.main(flags)
    Path("run/ckpt.pt").unlink()
    with pytest.raises(ValueError, match="--restart"):
        train.main(flags)
    train.main([*flags, "--lr=1e-3", "--restart"])
    head, records = train.read_log("run/log.jsonl")
    assert head["lr"] == 1e-3
    assert [record["step"] for record in records] == [0, 1, 2]


def test_two_programs_do_not_write_to_one_folder():
    Path("run").mkdir()
    with train.FileLock("run/lock"):
        assert train_in_child([*TOY, "--out=run"]) == 1
    assert not Path("run/log.jsonl").exists()


# several runs, several processes


def test_a_comparison_goes_on_where_it_stopped():
    flags = [*TOY, "--steps=8", "--attn=softmax,linear", "--seed=1,2", "--out=."]
    third_run = ("train.training_step", 2 * 8 + 6)
    assert train_in_child(flags, third_run) == -signal.SIGKILL
    losses = train.main(flags)
    alone = [*TOY, "--steps=8", "--attn=softmax", "--seed=2", "--out=alone"]
    assert train.main(alone) == losses[2:3]
    (third,) = Path().glob("softmax-*seed2")
    assert_same_run(third, "alone")


def test_two_processes_give_the_losses_of_one():
    flags = [*TOY, "--total_batch=512", "--eval_tokens=1600", "--attn=diff_linear"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = subprocess.check_output([*torchrun, TOP / "train.py", *flags, "--out=two"], text=True)
    assert said.count("step    24") == 1  # only one of them speaks
    train.main([*flags, "--out=one"])
    one = records_without_clock("one")
    two = records_without_clock("two")
    for a, b in zip(one, two, strict=True):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5), (key, a["step"])
