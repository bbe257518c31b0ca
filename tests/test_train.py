"""train.py and sample.py: batches, flags, a run and its files, and all the ways it can end."""
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.utils.flop_counter import FlopCounterMode

import sample
import train
from common import UserError, read_log
from data import Shards, get_tokenizer, load_data
from helpers import TOP, TOY, complaint
from model import ATTENTION, GPT, Attention, Diff, GPTConfig, ModelError, Softmax
from model import check_forms, softmax_map

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another


def one_run(*flags):
    """The config of a command line that asks for one run."""
    (config,) = train.parse(["--device=cpu", *flags])
    return config


def records_without_clock(folder):
    _, records = read_log(f"{folder}/log.jsonl")
    for record in records:
        record.pop("tok_per_s", None)
    return records


def lines_of(folder):
    """The lines of a log, each of which must be JSON."""
    return [json.loads(line) for line in Path(f"{folder}/log.jsonl").read_text().splitlines()]


@pytest.fixture
def story():
    """A text with characters of one to four bytes."""
    Path("story.txt").write_text("Once upon a time there was a Größe 🙂. " * 200, encoding="utf-8")
    return "--data=story.txt"


# batches and flags


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    data = Shards([np.arange(1001, dtype="<u2")])  # 100 sequences, which begin with 0, 10, 20, ...
    orders = set()
    for seed in (1, 2):
        config = one_run("--block_size=10", "--batch_size=4", "--total_batch=40", f"--seed={seed}")
        config.vocab_size = 1001
        for epoch in (0, 1):
            order = []
            for step in range(25 * epoch, 25 * epoch + 25):
                order += train.batch(data, config, step, micro_step=0)[:, 0].tolist()
            assert sorted(order) == list(range(0, 1000, 10))
            orders.add(tuple(order))
    assert len(orders) == 4


def test_presets_fill_in_what_no_flag_says():
    toy = one_run()
    assert (toy.preset, toy.steps, toy.total_batch, toy.lr) == ("toy", 500, 2048, 2e-3)
    assert (toy.n_layer, toy.n_embd, str(toy.out)) == (4, 128, "out/toy/softmax")
    gpt2 = one_run("--preset=gpt2", "--n_layer=2", "--attn=diff")
    assert (gpt2.n_layer, gpt2.block_size, str(gpt2.data)) == (2, 1024, "data/fineweb_edu")
    assert gpt2.steps * gpt2.total_batch == pytest.approx(2.8e9, rel=1e-3)
    assert str(gpt2.out) == "out/gpt2/diff"  # the two can't meet in one folder


def test_the_rate_goes_up_to_its_peak_and_down_to_0():
    config = one_run("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    short = one_run("--steps=3", "--warmup=10", "--lr=1")
    assert [train.learning_rate(step, short) for step in range(3)] == [0.5, 1, 1]


@pytest.mark.parametrize("command, says", [
    ("train.py --attn=softmax,cosine", "attn must be one of softmax, diff, "),
    ("train.py --n_layer=1.9", "--n_layer: '1.9' is not a whole number"),
    ("train.py --lr=-1", "--lr: '-1' is not a number from 0 on"),
    ("train.py --total_batch=3000", "--total_batch=3000 is no multiple of 256"),
    ("train.py --attn=softmax,diff --n_head=1", "n_head must be even for diff"),
    ("train.py --device=tpu9", "the device tpu9"),
    ("train.py --data=short.txt", "short.txt is too short: a run needs more than 2,048 to train"),
    ("sample.py", "no checkpoint under out/: python train.py --attn=diff makes one"),
    ("sample.py --top_p=1.5 --ckpt=bare", "top_p must be above 0 and at most 1"),
    ("train.py --out=bare", "bare/ckpt.pt is not of train.py. Take another --out"),
    ("train.py --out=short.txt", "short.txt can't be a folder: there is a file of that name"),
])
def test_what_is_refused_and_in_which_words(command, says, monkeypatch, capsys):
    Path("short.txt").write_text("too short")
    Path("bare").mkdir()
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=257))
    model.save("bare/ckpt.pt", tokenizer="bytes")
    assert says in complaint(command, monkeypatch, capsys)
    assert not list(Path().rglob("log.jsonl"))


# a run and what it writes, and samples


def test_a_run_writes_a_log_and_learns(story):
    # 300 tokens of val are 9 sequences, so the last batch is smaller
    flags = [*TOY, "--steps=6", "--eval_every=4", "--log_every=2", "--eval_tokens=300"]
    (loss,) = train.main([*flags, "--lr=3e-3", "--attn=diff", story, "--out=run"])
    model = GPT.load("run/ckpt.pt")
    head, records = read_log("run/log.jsonl")
    assert (head["attn"], head["n_layer"], head["tokenizer"]) == ("diff", 1, "bytes")
    assert (head["data"], head["torch"]) == ("story.txt", torch.__version__)
    assert head["parameters"] == sum(p.numel() for p in model.parameters())

    tokens = 128  # a step
    steps = [(record["step"], record["tokens"]) for record in records]
    assert steps == [(0, 0), (2, 2 * tokens), (4, 4 * tokens), (6, 6 * tokens)]
    of_a_step = {"step", "tokens", "train_loss", "lr", "grad_norm", "tok_per_s", "mfu"}
    assert records[0].keys() == {"step", "tokens", "val_loss", "lambda"}
    assert records[1].keys() == of_a_step
    assert records[2].keys() == records[3].keys() == of_a_step | {"val_loss", "lambda", "sample"}
    assert records[2]["sample"].startswith("Once upon a time")
    assert loss == records[-1]["val_loss"] < records[0]["val_loss"]

    _, val, _, _ = load_data(Path("story.txt"))
    sequences = torch.from_numpy(np.stack([val.sequence(i, 32) for i in range(9)]))
    with torch.no_grad():
        _, expected = model(sequences[:, :-1], sequences[:, 1:])
    assert loss == pytest.approx(expected.item(), abs=1e-5)


def test_a_step_is_the_same_in_one_micro_step_or_in_two(story):
    for batch_size in (4, 3):
        size = f"--batch_size={batch_size}"
        train.main([*TOY, size, "--steps=3", story, f"--out=of{batch_size}"])
    in_one = records_without_clock("of4")[1:]
    in_two = records_without_clock("of3")[1:]
    assert lines_of("of3")[0]["batch_size"] == 2  # 4 sequences can't be cut into parts of 3
    for a, b in zip(in_one, in_two, strict=True):
        for key in ("train_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), (key, a["step"])


def test_mfu_counts_the_matmuls_of_a_step():
    sizes = dict(n_layer=2, n_embd=64, n_head=4, block_size=256, vocab_size=128)
    model = GPT(GPTConfig(**sizes, flash=False))  # a map is what the formula counts
    idx = torch.zeros(1, 256, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    # the formula takes the norms, which are no matrices, for weights, and so it is a little larger
    assert 256 * train.flops_per_token(model) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_sample_says_the_same_for_the_same_seed(story, capsys):
    train.main([*TOY, "--steps=2", "--attn=diff", story])
    capsys.readouterr()
    # of the newest checkpoint under out/. The prompt may be empty, or longer than a block
    for prompt, dtype in [("Once", "float32"), ("", "bfloat16"), ("Größe 🙂" * 20, "float32")]:
        flags = ["--max_new_tokens=9", "--num_samples=2", "--device=cpu", f"--dtype={dtype}"]
        said = []
        for seed in (1, 1, 2):
            sample.main([*flags, f"--prompt={prompt}", f"--seed={seed}"])
            said.append(capsys.readouterr().out)
        assert said[0].startswith(prompt)
        assert said[0] == said[1] != said[2]


def test_sample_prints_whole_characters_and_stops_at_the_end_of_a_text(capsys):
    rows = [[*"é🙂".encode(), 256, *b"no"], [*b"ab", 256, *b"no no!"]]
    sample.print_samples(torch.tensor(rows).T, get_tokenizer("bytes"), "", num_samples=2)
    assert capsys.readouterr().out == "é🙂\n\n--- sample 2\nab\n"


# stopping and going on


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def press_ctrl_c():
    raise KeyboardInterrupt


def train_in_child(flags, place=None, do=kill):
    """Runs train.py in a child process. Returns its exit code.

    At place=(os, "replace", 2) it does something first: just before its second call of os.replace.
    """

    def child():
        if place is not None:
            do_before(*place, do)
        sys.argv[1:] = flags
        train.cli(train.run)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def do_before(module, name, n, do):
    """Makes a function of a module do something else first, at its nth call."""
    function = getattr(module, name)
    calls = []

    def replacement(*args, **kwargs):
        calls.append(args)
        if len(calls) == n:
            do()
        return function(*args, **kwargs)

    setattr(module, name, replacement)


def test_stopped_anywhere_a_run_ends_in_the_same_bits(capfd):
    flags = [*TOY, "--decay", "--batch_size=2"]
    arms = ["softmax", "diff_linear"]
    whole = []
    for attn in arms:
        whole += train.main([*flags, f"--attn={attn}", f"--out=whole/{attn}"])
    cut = [*flags, "--attn=softmax,diff_linear", "--out=cut"]
    for place in [
        (os, "replace", 1),  # before the first checkpoint
        (os, "replace", 2),  # there is a checkpoint, and no log
        (os, "replace", 4),  # the log is ahead of the checkpoint
        (train, "training_step", 3),
    ]:
        assert train_in_child(cut, place) == -signal.SIGKILL
    with open("cut/softmax/log.jsonl", "a") as file:
        file.write('{"step": 5, "tok')  # killed while it wrote
    assert train_in_child(cut, (train, "training_step", 7), press_ctrl_c) == 130
    said = capfd.readouterr().err
    assert "without --restart the same command goes on" in said
    assert "Traceback" not in said
    assert 0 < GPT.load("cut/softmax/ckpt.pt").extra["step"] < 24
    assert train_in_child(cut, (train, "training_step", 24)) == -signal.SIGKILL  # the second arm
    assert 0 < GPT.load("cut/diff_linear/ckpt.pt").extra["step"] < 24

    assert train.main(cut) == whole
    for attn in arms:
        a = f"cut/{attn}"
        b = f"whole/{attn}"
        weights = GPT.load(f"{b}/ckpt.pt").state_dict()
        torch.testing.assert_close(GPT.load(f"{a}/ckpt.pt").state_dict(), weights, rtol=0, atol=0)
        assert records_without_clock(a) == records_without_clock(b)
        assert lines_of(a)[0] == lines_of(b)[0] | dict(out=a)
    assert train.main(cut) == whole  # it returns at once


@pytest.mark.parametrize("program", ["train", "sample", "bench", "prepare_fineweb"])
def test_ctrl_c_while_a_program_is_imported_is_one_line(program):
    Path("numpy.py").write_text("raise KeyboardInterrupt")  # in the place of the real one
    command = [sys.executable, TOP / f"{program}.py"]
    environment = os.environ | {"PYTHONPATH": "."}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode not in (0, 1)
    assert child.stderr == f"\n{program}.py: stopped\n"


def test_a_run_that_diverges_stops_and_keeps_its_checkpoint():
    flags = [*TOY, "--lr=1e30", "--out=wild"]
    assert train.main(flags) == [math.inf]
    assert lines_of("wild")[-1].keys() == {"step", "tokens", "diverged"}
    assert "grad_norm nan" in lines_of("wild")[-1]["diverged"]
    assert GPT.load("wild/ckpt.pt").extra["step"] == 0
    assert train_in_child(flags) == 1


def test_another_run_is_refused_and_left_alone():
    Path("other.txt").write_text("Once upon a time there was another text. " * 900)
    flags = [*TOY, "--attn=diff", "--steps=4", "--out=run"]
    train_in_child(flags, (train, "training_step", 3))
    before = Path("run/log.jsonl").read_bytes()
    for flag, says in [
        ("--attn=softmax", "attn is 'diff' there and 'softmax' here"),
        ("--lr=1", "lr is 0.002 there and 1.0 here"),
        ("--data=other.txt", "data_sha256 is '"),
    ]:
        with pytest.raises(UserError, match=says):
            train.main([*flags, flag])
        assert Path("run/log.jsonl").read_bytes() == before, flag
    # another pace is not another run
    train.main([*flags, "--log_every=2", "--eval_every=2", "--batch_size=2", "--no-flash"])
    assert GPT.load("run/ckpt.pt").extra["step"] == 4


def test_restart_keeps_the_old_run_until_the_new_one_has_a_checkpoint():
    flags = [*TOY, "--steps=2", "--out=run"]
    train.main(flags)
    before = Path("run/ckpt.pt").read_bytes(), Path("run/log.jsonl").read_bytes()
    assert train_in_child([*flags, "--restart"], (os, "replace", 1)) == -signal.SIGKILL
    assert (Path("run/ckpt.pt").read_bytes(), Path("run/log.jsonl").read_bytes()) == before
    # killed between the new checkpoint and the new log
    other = [*flags, "--lr=1e-3"]
    assert train_in_child([*other, "--restart"], (os, "replace", 2)) == -signal.SIGKILL
    train.main(other)
    assert lines_of("run")[0]["lr"] == 1e-3
    assert [record["step"] for record in lines_of("run")[1:]] == [0, 1, 2]
    # a log without its checkpoint
    Path("run/ckpt.pt").unlink()
    with pytest.raises(UserError, match="--restart"):
        train.main(other)
    train.main([*flags, "--restart"])
    assert lines_of("run")[0]["lr"] == 2e-3


def test_two_programs_do_not_write_to_one_folder(capfd):
    Path("run").mkdir()
    with FileLock("run/lock"):
        assert train_in_child([*TOY, "--out=run"]) == 1
    assert "another program is writing to run" in capfd.readouterr().err
    assert not Path("run/log.jsonl").exists()


def test_a_folder_that_was_moved_is_not_written_to(capfd):
    def move_and_begin_another():
        os.rename("run", "old")
        train.main([*TOY, "--steps=2", "--lr=1", "--out=run"])

    place = (train, "training_step", 7)
    assert train_in_child([*TOY, "--out=run"], place, move_and_begin_another) == 1
    assert "run was moved or deleted" in capfd.readouterr().err
    assert [record["step"] for record in lines_of("run")[1:]] == [0, 1, 2]


def test_output_that_cannot_show_a_name_does_not_stop_a_run():
    """As on Windows, where `> log.txt` has the code page of the country."""
    command = [sys.executable, TOP / "train.py", *TOY, "--steps=1", "--out=Größe"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, env=environment, capture_output=True)
    assert said.returncode == 0, said.stderr
    assert b"Gr\\xf6\\xdfe" in said.stdout


def test_a_full_memory_is_one_line_and_names_the_flags(monkeypatch):
    def full():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 EB")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match="train.py: out of memory: a smaller --batch_size"):
        train.cli(full)


# arms of one's own


class Sharp(Softmax):
    """Overrides maps alone: the fused form and the step that it inherits know nothing of it."""

    def maps(self, q, k, rope, log_D):
        A = super().maps(q, k, rope, log_D) ** 2
        return A / A.sum(-1, keepdim=True)


class OnlyMaps(Attention):
    maps = Softmax.maps


class OnlyForward(Attention):
    """A whole layer of one's own, as one would paste it, and with dropout."""

    def forward(self, x, rope=None):
        q, k, v, _ = self.project(x)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.nn.functional.dropout(self.output(y), 0.5, self.training)


@pytest.mark.parametrize("arm", [OnlyMaps, OnlyForward])
def test_an_arm_of_ones_own_trains_and_samples_what_it_says(arm, story, monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", arm)
    train.main([*TOY, "--attn=mine", "--steps=4", story, "--out=run"])
    model = GPT.load("run/ckpt.pt")
    idx = torch.randint(257, (2, 40))
    tokens = torch.stack(list(model.generate(idx[:, :5], 20, temperature=0)), dim=1)
    whole = torch.cat((idx[:, :5], tokens), dim=1)
    for t in range(20):
        assert torch.equal(model(whole[:, : 5 + t])[0][:, -1].argmax(-1), tokens[:, t])
    # what is evaluated in training is what is loaded, without dropout
    _, val, _, _ = load_data(Path("story.txt"))
    config = one_run(*TOY, "--attn=mine", story)
    config.vocab_size = 257
    assert train.evaluate(model, val, config) == pytest.approx(model.extra["val_loss"], abs=1e-6)


def test_an_arm_whose_forms_differ_is_refused(monkeypatch):
    monkeypatch.setitem(ATTENTION, "sharp", Sharp)
    with pytest.raises(ModelError, match="attn=sharp: the form that trains and its"):
        train.main([*TOY, "--attn=sharp", "--out=run"])
    assert not Path("run/log.jsonl").exists()


def test_forms_are_compared_over_a_whole_training_sequence(monkeypatch):
    class Near(Softmax):  # its maps, but not its fast form, see 128 tokens at most
        def maps(self, q, k, rope, log_D):
            far = rope.position[:, None] - rope.position >= 128
            return super().maps(q, k, rope, log_D.masked_fill(far, -torch.inf))

    monkeypatch.setitem(ATTENTION, "near", Near)
    size = dict(n_layer=1, n_head=2, n_embd=32)
    check_forms(GPTConfig("near", block_size=128, **size))
    with pytest.raises(ModelError, match="attn=near: the form that trains and its map differ"):
        check_forms(GPTConfig("near", block_size=256, **size))


def test_forms_are_compared_at_another_length_than_that_of_training(monkeypatch):
    class WholeChunks(Softmax):  # its fast form is right at multiples of 64 tokens
        def fast(self, q, k, v, lam, rope):
            return super().fast(q, k, v, lam, rope) * (q.shape[2] % 64 == 0)

    class Mine(Attention):
        def maps(self, q, k, rope, log_D):
            return softmax_map(q, k, log_D)

    monkeypatch.setitem(ATTENTION, "whole_chunks", WholeChunks)
    monkeypatch.setitem(ATTENTION, "mine", Mine)
    size = dict(n_layer=1, n_head=2, n_embd=32)
    with pytest.raises(ModelError, match="attn=whole_chunks: .* its steps differ"):
        check_forms(GPTConfig("whole_chunks", block_size=64, **size))
    for T in (1, 2, 31):
        check_forms(GPTConfig("mine", block_size=T, **size))


def test_a_lambda_for_each_head_is_not_logged(monkeypatch):
    class EachHead(Diff):
        def lambda_full(self):
            return super().lambda_full().expand(self.n_value_head, 1, 1)

    monkeypatch.setitem(ATTENTION, "each_head", EachHead)
    config = GPTConfig("each_head", n_layer=1, n_head=4, n_embd=32)
    check_forms(config)
    assert train.lambdas_of(GPT(config)) is None


def test_a_mistake_in_an_arm_of_ones_own_has_its_traceback(monkeypatch, capfd):
    class Forgets(Softmax):
        def project(self, x):
            q, k, v, _ = super().project(x)
            return q, k, v

    monkeypatch.setitem(ATTENTION, "forgets", Forgets)
    assert train_in_child([*TOY, "--attn=forgets", "--out=run"]) == 1
    assert "Traceback" in capfd.readouterr().err


# several runs, several processes


def test_no_arm_is_trained_if_the_folder_of_another_one_is_taken():
    train.main([*TOY, "--steps=2", "--attn=diff", "--out=both/diff"])
    with pytest.raises(UserError, match="both/diff is another run's: steps is 2 there and 24 here"):
        train.main([*TOY, "--attn=softmax,diff", "--out=both"])
    assert not Path("both/softmax").exists()


def test_a_rank_without_torchrun_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="RANK=1, but WORLD_SIZE=1"):
        train.main([*TOY, "--out=run"])


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
