"""train.py and sample.py: batches, flags, a run and its files, and all the ways it can end."""
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import sample
import train
from data import Shards
from helpers import TOP, TOY, assert_value_error, complaint, contents
from model import ATTENTION, GPT, GPTConfig, Linear

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another


def one_run(*flags):
    """The config of a command line that asks for one run."""
    (config,) = train.parse(["--device=cpu", *flags])
    return config


def folders(*flags):
    """The folders of the runs that a command line asks for."""
    return [str(config.out) for config in train.parse(["--device=cpu", *flags])]


# batches and schedule


def first_tokens(data, config, steps):
    """The first token of each sequence that these steps train on."""
    tokens = []
    for step in steps:
        tokens += train.batch(data, config, step, micro_step=0)[:, 0].tolist()
    return tokens


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own():
    data = Shards([np.arange(1001, dtype="<u2")])  # 100 sequences, which begin with 0, 10, 20, ...
    orders = []
    for seed in (1, 2):
        flags = ["--block_size=10", "--batch_size=4", "--total_batch=40", f"--seed={seed}"]
        config = one_run(*flags, "--steps=50")
        config.vocab_size = 1001
        orders.append(first_tokens(data, config, range(0, 25)))
        orders.append(first_tokens(data, config, range(25, 50)))
    for order in orders:
        assert sorted(order) == list(range(0, 1000, 10))
    assert len({tuple(order) for order in orders}) == 4


def test_the_processes_share_a_batch():
    data = Shards([np.arange(1001, dtype="<u2")])
    config = one_run("--block_size=10", "--batch_size=4", "--total_batch=40", "--steps=50")
    config.vocab_size = 1001
    together = train.batch(data, config, step=3, micro_step=0)
    config.batch_size = 2
    config.world = 2
    parts = []
    for rank in (0, 1):
        config.rank = rank
        parts.append(train.batch(data, config, step=3, micro_step=0))
    assert torch.equal(torch.cat(parts), together)


def test_the_rate_goes_up_to_its_peak_and_down_to_0():
    config = one_run("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])


# flags


def test_presets_fill_in_what_no_flag_says():
    toy = one_run()
    assert (toy.preset, toy.steps, toy.total_batch, toy.lr) == ("toy", 500, 2048, 2e-3)
    assert toy.data is None
    gpt2 = one_run("--preset=gpt2")
    assert (gpt2.n_layer, gpt2.block_size, str(gpt2.data)) == (12, 1024, "data/fineweb_edu")
    assert gpt2.steps == 5341  # 2.8e9 tokens, 524,288 a step
    assert one_run("--preset=gpt2", "--n_layer=2").n_layer == 2


def test_steps_and_tokens_replace_each_other():
    assert one_run("--tokens=1e6").steps == math.ceil(1e6 / 2048)
    assert one_run("--preset=gpt2", "--steps=7").tokens == 7 * 524_288
    assert one_run("--steps=7", "--warmup=50").warmup == 6  # the peak comes before the end


def test_a_folder_has_the_name_of_what_differs_from_the_preset():
    assert folders("--attn=diff") == ["out/diff"]
    assert folders("--attn=diff", "--lr=2e-3", "--seed=1337", "--steps=9") == ["out/diff"]
    flags = ["--attn=diff", "--no-subln", "--lr=3e-3", "--seed=2"]
    assert folders(*flags) == ["out/diff-nosubln-lr3e-3-seed2"]
    assert folders("--n_layer=2", "--no-flash") == ["out/softmax-n_layer2-noflash"]
    assert folders("--mlp_width=48") == ["out/softmax-mlp_width48"]
    assert folders("--lambda_init=0.5") == ["out/softmax-lambda_init0.5"]
    # to the last digit
    assert folders("--seed=9007199254740993") == ["out/softmax-seed9007199254740993"]
    assert folders("--lr=0.00123456789") != folders("--lr=0.00123456788")


def test_out_is_the_folder_of_one_run_or_holds_those_of_several():
    assert folders("--out=here") == ["here"]
    assert folders("--seed=1,2,1", "--out=x") == ["x/softmax-seed1", "x/softmax-seed2"]
    names = folders("--attn=softmax,diff", "--lr=1e-3,2e-3")
    assert names == ["out/softmax-lr1e-3", "out/diff-lr1e-3", "out/softmax", "out/diff"]


def test_numbers_may_be_written_as_1e3():
    assert one_run("--steps=1e3").steps == 1000
    assert [config.seed for config in train.parse(["--seed=1,2e1"])] == [1, 20]


def test_linear_arms_ignore_the_kernel_of_their_neighbours():
    runs = train.parse(["--device=cpu", "--attn=diff,linear", "--kernel=efficient"])
    assert [run.kernel for run in runs] == ["efficient", "auto"]
    assert one_run("--attn=linear", "--kernel=efficient").kernel == "efficient"  # refused later


def test_processes_share_the_tokens_of_a_step(monkeypatch):
    monkeypatch.setenv("RANK", "2")  # torchrun sets both
    assert_value_error("RANK=2 does not fit WORLD_SIZE=1", one_run)
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = one_run("--total_batch=7680")
    assert (config.rank, config.world) == (2, 3)
    assert config.batch_size == 5  # 10 sequences each, so the next below 8 that divides 10
    assert_value_error("not a multiple of 768", one_run, "--total_batch=2048")
    assert one_run("--total_batch=7680", "--batch_size=1e15").batch_size == 10


@pytest.mark.parametrize("command, says", [
    ("train.py --attn=softmax,cosine", "--attn: 'cosine' is not one of softmax, diff, linear"),
    ("train.py --n_layer=1.9", "--n_layer: '1.9' is not a whole number from 1 on, like 12 or 1e9"),
    ("train.py --n_layer=x", "--n_layer: 'x' is not a"),
    ("train.py --steps=0", "--steps: '0' is not a whole number from 1 on"),
    ("train.py --tokens=inf", "--tokens: 'inf' is not a"),
    ("train.py --warmup=-5", "--warmup: '-5' is not a whole number from 0 on"),
    ("train.py --seed=-1", "--seed: '-1' is not a whole number from 0 on"),
    ("train.py --seed=1,", "--seed: '' is not a"),
    ("train.py --lr=", "--lr: '' is not a finite number, like 0.5 or 1e-3"),
    ("train.py --lr=0", "--lr: '0' is not a number above 0"),
    ("train.py --lr=1e-3,inf", "--lr: 'inf' is not a finite number"),
    ("train.py --subln_init=nan", "--subln_init: 'nan' is not a finite number"),
    ("train.py --dec", "unrecognized arguments: --dec"),
    ("train.py --steps=3 --tokens=3", "--tokens: not allowed with argument --steps"),
    ("train.py --total_batch=3000", "--total_batch=3000 is not a multiple of 256"),
    ("train.py --attn=softmax,diff --n_head=3", "n_embd must be a multiple of 6, not 128"),
    ("train.py --attn=softmax,diff --n_head=1", "n_head must be even for diff"),
    ("train.py --kernel=sdpa --no-flash", "kernel sdpa would not be used"),
    ("train.py --device=tpu9", "the device tpu9"),
    ("train.py --data=short.txt", "short.txt is too short for a step and an evaluation: 9 + 1"),
    ("train.py --data=nothing.txt", "No such file or directory: 'nothing.txt'"),
    ("train.py --data=cut", "x_train_0.bin is cut"),
    ("train.py --data=far", "--data holds token 300, but its tokenizer has 257 tokens"),
    ("train.py --preset=gpt2", "no *_train*.bin in data/fineweb_edu: "),
    ("sample.py", "no checkpoint under out/: `python train.py --attn=diff` makes one"),
    ("sample.py --ckpt=nope", "--ckpt=nope: no checkpoint there"),
    ("sample.py --ckpt=cut", "--ckpt=cut/ckpt.pt: no checkpoint there"),
    ("sample.py --ckpt=short.txt", "short.txt is damaged, or no checkpoint of this project"),
    ("sample.py --ckpt=nameless.pt", "the tokenizer must be gpt2 or bytes, not None"),
    ("sample.py --top_p=1.5 --ckpt=good.pt", "top_p must be above 0 and at most 1"),
    ("sample.py --top_k=0", "--top_k: '0' is not a whole number from 1 on"),
    ("sample.py --max_new_tokens=none", "--max_new_tokens: 'none' is not a"),
    ("sample.py --device=tpu9", "the device tpu9"),
])
def test_what_is_refused_and_in_which_words(command, says, monkeypatch, capsys):
    for folder in ("cut", "far"):
        Path(folder).mkdir()
    Path("short.txt").write_text("too short")
    header = np.array([20240520, 1, 9000] + [0] * 253, "<i4").tobytes()
    shard = header + np.full(9000, 300, "<u2").tobytes()
    Path("cut/x_train_0.bin").write_bytes(shard[:-1])
    Path("far/x_train_0.bin").write_bytes(shard)
    Path("far/x_val_0.bin").write_bytes(shard)
    Path("far/manifest.json").write_text('{"tokenizer": "bytes", "shards": []}')
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=257))
    model.save("nameless.pt")
    model.save("good.pt", tokenizer="bytes")
    before = set(os.listdir())

    assert says in complaint(command, monkeypatch, capsys)
    assert set(os.listdir()) - {"out"} == before
    assert not list(Path().rglob("ckpt.pt"))


# a run and what it writes


@pytest.fixture
def story():
    """A text with characters of one to four bytes."""
    Path("story.txt").write_text("Once upon a time there was a Größe 🙂. " * 200, encoding="utf-8")
    return "--data=story.txt"


def test_a_run_writes_a_log_and_learns(story, capsys):
    flags = [*TOY, "--steps=6", "--eval_every=4", "--log_every=2", "--attn=diff", story]
    train_to_the_end(flags + ["--out=run"])
    head, records = train.read_log("run/log.jsonl")

    assert (head["attn"], head["n_layer"], head["tokenizer"]) == ("diff", 1, "bytes")
    assert (head["data"], head["val"]) == ("story.txt", "the last tenth")
    assert head["torch"] == torch.__version__
    assert head["parameters"] == sum(p.numel() for p in GPT.load("run/ckpt.pt").parameters())

    tokens = 4 * 32  # a step
    steps = [(record["step"], record["tokens"]) for record in records]
    assert steps == [(0, 0), (2, 2 * tokens), (4, 4 * tokens), (6, 6 * tokens)]
    of_a_step = {"train_loss", "lr", "grad_norm", "tok_per_s", "mfu"}
    of_an_evaluation = {"val_loss", "lambda", "sample"}
    assert records[1].keys() == {"step", "tokens"} | of_a_step
    for i in (0, 2, 3):
        assert records[i].keys() == {"step", "tokens"} | of_a_step | of_an_evaluation
        assert len(records[i]["lambda"]) == 1
        assert records[i]["sample"].startswith("Once upon a time")
    assert records[-1]["val_loss"] < records[0]["val_loss"]
    # the first step may compile the model, so the speed is measured from the second one on
    assert records[1]["tok_per_s"] > 0

    said = capsys.readouterr().out
    assert f"step     6/6 | train {records[-1]['train_loss']:.4f} |" in said
    assert f"val {records[-1]['val_loss']:.4f} | lambda {records[-1]['lambda'][0]:.2f}\n" in said


def test_the_losses_of_the_log_are_those_of_the_model(story):
    train_to_the_end([*TOY, "--steps=2", "--eval_tokens=1000", story, "--out=run"])
    last = train.read_log("run/log.jsonl")[1][-1]
    config = one_run(*TOY, "--steps=2", story)
    data = train.open_data(config)
    config.vocab_size = 257
    model = GPT.load("run/ckpt.pt")

    # not 1,000 tokens of val, but as many as the run trains on: 256
    sequences = [data.val.sequence(i, 32) for i in range(8)]
    tokens = torch.from_numpy(np.stack(sequences))
    with torch.no_grad():
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
    assert last["val_loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_a_step_is_the_same_in_one_micro_step_or_in_four(story):
    for batch_size in (4, 1):
        sizes = ["--total_batch=128", f"--batch_size={batch_size}"]
        train_to_the_end([*TOY, *sizes, "--steps=3", story, f"--out=of{batch_size}"])
    in_one = records_without_clock("of4")
    in_four = records_without_clock("of1")
    for a, b in zip(in_one[1:], in_four[1:], strict=True):
        for key in ("train_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-4), (key, a["step"])


def flops_of_attention(attn, block_size):
    """What count_flops counts beyond 6 FLOPs for each weight of a matrix."""
    sizes = ["--n_layer=2", "--n_embd=64", "--n_head=4", f"--block_size={block_size}"]
    config = one_run(*sizes, f"--attn={attn}", "--total_batch=2048", "--batch_size=1")
    config.vocab_size = 257
    matrices = [p for p in GPT(config.model_config()).parameters() if p.ndim == 2]
    return train.count_flops(config) - 6 * sum(p.numel() for p in matrices)


def test_mfu_counts_the_matmuls_of_each_arms_own_attention():
    # softmax: 2 layers, two products (QK^T, AV) of 2 T C each, three times with the backward pass
    assert flops_of_attention("softmax", 256) == 2 * 3 * (2 + 2) * 256 * 64
    # diff: the values are twice as wide
    assert flops_of_attention("diff", 256) == 2 * 3 * (2 + 4) * 256 * 64
    # linear: the longer the text, the less is it worth to look at the whole map
    short = flops_of_attention("linear", 256) / flops_of_attention("softmax", 256)
    long = flops_of_attention("linear", 2048) / flops_of_attention("softmax", 2048)
    assert 0 < long < 0.3 * short


def test_mfu_is_the_share_of_the_peak(story, monkeypatch):
    monkeypatch.setitem(train.PEAK, "cpu", 1e9)
    train_to_the_end([*TOY, "--steps=2", story, "--out=run"])
    last = train.read_log("run/log.jsonl")[1][-1]
    config = one_run(*TOY)
    config.vocab_size = 257
    flops = train.count_flops(config)
    assert last["mfu"] == pytest.approx(last["tok_per_s"] * flops / 1e9)


# sample.py


def test_sample_says_the_same_for_the_same_seed(story, capsys):
    train_to_the_end([*TOY, "--steps=2", "--attn=diff", story])
    capsys.readouterr()
    # the prompt may be empty, or longer than a block
    for prompt, dtype in [("Once", "float32"), ("", "bfloat16"), ("Größe 🙂" * 20, "float32")]:
        flags = ["--max_new_tokens=9", "--num_samples=2", "--device=cpu", f"--dtype={dtype}"]
        flags.append(f"--prompt={prompt}")
        sample.main(flags)  # the newest checkpoint under out/
        first = capsys.readouterr()
        sample.main(flags)
        second = capsys.readouterr()
        assert first.out.startswith(prompt)
        assert "\n--- sample 2\n" in first.out
        assert first.out == second.out
        assert "tokens/s" in first.err
        sample.main([*flags, "--seed=2"])
        assert capsys.readouterr().out != first.out


def test_sample_takes_the_newest_checkpoint(story, capsys):
    for name in ("old", "new"):
        train_to_the_end([*TOY, "--steps=1", story, f"--out=out/{name}"])
    os.utime("out/old/ckpt.pt", (0, 0))
    sample.main(["--max_new_tokens=1", "--device=cpu"])
    assert "out/new/ckpt.pt: softmax, step 1" in capsys.readouterr().err


def test_sample_prints_whole_characters_and_stops_at_the_end_of_a_text(story, monkeypatch, capsys):
    train_to_the_end([*TOY, "--steps=1", story, "--out=run"])
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


def train_in_child(flags, kill_before=None, do_before=None, exit_code=0):
    """Runs train.main in a child process, which has to end with this exit code.

    kill_before=("os.replace", 2) kills it just before its second call of os.replace. do_before does
    something else at such a place: ("os.replace", 2, f) calls f.
    """
    if kill_before is not None:
        do_before = (*kill_before, kill)
        exit_code = -signal.SIGKILL

    def child():
        if do_before is not None:
            do_before_call(*do_before)
        sys.exit(0 if train.main(flags) == "finished" else 1)  # as the program does

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == exit_code, f"{flags}, {do_before}"


def train_to_the_end(flags):
    outcome = train.main(flags)
    assert outcome == "finished"


def do_before_call(call, n, do):
    """Makes a function like "os.replace" do something else first, at its nth call."""
    module = {"os": os, "train": train}[call.split(".")[0]]
    name = call.split(".")[1]
    function = getattr(module, name)
    calls = []

    def replacement(*args):
        calls.append(args)
        if len(calls) == n:
            do()
        return function(*args)

    setattr(module, name, replacement)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes of a file, fewer than ours


def done_steps(folder):
    return GPT.load(f"{folder}/ckpt.pt").extra["step"]


def assert_same_run(a, b):
    """Two folders hold the same weights and the same log, to the bit, but for what a clock says."""
    model_a = GPT.load(f"{a}/ckpt.pt")
    model_b = GPT.load(f"{b}/ckpt.pt")
    assert model_a.extra["step"] == model_b.extra["step"]
    torch.testing.assert_close(
        model_a.state_dict(), model_b.state_dict(), rtol=0, atol=0,
        msg=lambda message: f"the weights of {a} and {b} differ: {message}",
    )
    assert records_without_clock(a) == records_without_clock(b)


def records_without_clock(folder):
    _, records = train.read_log(f"{folder}/log.jsonl")
    for record in records:
        del record["tok_per_s"]
    return records


ARMS = ["--attn=softmax", "--attn=diff_linear --decay --subln_init=0.2 --total_batch=256"]


@pytest.mark.parametrize("arm", ARMS)
def test_killed_anywhere_a_run_ends_in_the_same_bits(arm):
    flags = [*TOY, *arm.split(), "--out=cut"]
    # a save is an fsync of the log, one of the checkpoint, and a replace. the first save is that of
    # step 0, and a run that goes on has no such one
    for place in [
        ("os.fsync", 1),
        ("os.replace", 1),
        ("os.fsync", 2),
        ("os.fsync", 3),
        ("os.replace", 2),
        ("os.fsync", 6),
        ("train.training_step", 2),
        ("train.training_step", 5),
        ("train.training_step", 3),
    ]:
        train_in_child(flags, kill_before=place)
    assert 0 < done_steps("cut") < 24
    train_in_child(flags)
    train_in_child([*TOY, *arm.split(), "--out=whole"])
    assert_same_run("cut", "whole")


def test_a_full_disk_leaves_the_last_checkpoint(capfd):
    flags = [*TOY, "--attn=softmax", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 5))
    before = contents("run", "ckpt.pt")
    train_in_child(flags, do_before=("train.training_step", 1, fill_the_disk), exit_code=1)
    # the child ends in a traceback. the program prints its last line only
    assert "OSError: run/ckpt.pt could not be written" in capfd.readouterr().err.splitlines()[-1]
    assert contents("run", "ckpt.pt*") == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_and_saves(number, capfd):
    def send_signal():
        signal.signal(number, train.request_stop)
        signal.raise_signal(number)

    flags = [*TOY, "--out=run", "--save_every=100"]
    train_in_child(flags, do_before=("train.training_step", 3, send_signal), exit_code=1)
    assert "stopped after step 3 of 24" in capfd.readouterr().out
    saved = GPT.load("run/ckpt.pt").extra
    last = train.read_log("run/log.jsonl")[1][-1]
    assert saved["step"] == last["step"] == 3
    assert saved["optimizer"]["param_groups"][0]["lr"] == last["lr"]
    train_in_child(flags, do_before=("train.training_step", 1, send_signal), exit_code=1)
    assert done_steps("run") == 4


def test_a_loss_that_is_not_finite_stops_the_run(capsys):
    outcome = train.main([*TOY, "--lr=1e30", "--out=wild"])
    assert outcome == "diverged"
    assert "wild stops at step 2: grad_norm nan" in capsys.readouterr().err
    _, records = train.read_log("wild/log.jsonl")
    assert records[-1]["step"] == 2
    assert records[-1]["not_finite"].startswith("grad_norm nan")
    assert done_steps("wild") == 0


def test_a_failing_compiler_is_named_and_what_helps(monkeypatch):
    compile = torch.compile

    def broken(graph, inputs):
        raise OSError("file too short")

    monkeypatch.setattr(torch, "compile", lambda model: compile(model, backend=broken))
    says = r"torch.compile failed \(.* file too short\). --no-compile does without it. .* in /"
    assert_value_error(says, train.main, [*TOY, "--compile", "--out=run"])


def test_another_run_is_refused_and_left_alone():
    Path("other.txt").write_text("Once upon a time there was another text. " * 900)
    flags = [*TOY, "--attn=diff", "--steps=4", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 3))
    before = contents("run")
    for flag, says in [
        ("--attn=softmax", "attn is 'diff' there and 'softmax' here"),
        ("--n_embd=64", "n_embd is 32 there and 64 here"),
        ("--mlp_width=48", "mlp_width is None there and 48 here"),
        ("--lr=1", "lr is 0.002 there and 1.0 here"),
        ("--seed=2", "seed is 1337 there and 2 here"),
        ("--steps=5", "steps is 4 there and 5 here"),
        ("--eval_tokens=512", "eval_tokens is 256 there and 512 here"),
        ("--data=other.txt", "data_sha256 is '"),
    ]:
        assert_value_error(says, train.main, [*flags, flag])
        assert contents("run") == before, flag


def test_another_pace_is_not_another_run():
    flags = [*TOY, "--attn=diff", "--steps=4", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 3))
    pace = ["--save_every=1", "--log_every=2", "--eval_every=2", "--dtype=bfloat16", "--no-flash"]
    config = one_run(*flags, *pace)
    data = train.open_data(config)
    config.vocab_size = data.enc.n_vocab
    run = train.start_or_resume(config, data)
    assert not run.model.blocks[0].attn.flash
    train_to_the_end([*flags, *pace])
    assert done_steps("run") == 4
    _, records = train.read_log("run/log.jsonl")
    changed = dict(dtype="bfloat16", flash=False)
    assert dict(step=2, tokens=2 * 128, resumed=changed) in records


def test_the_log_says_what_is_different_after_a_resume():
    flags = [*TOY, "--steps=6", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 3))
    by_map = [*flags, "--no-flash"]
    train_in_child(by_map, kill_before=("train.training_step", 1))  # it is still at step 2
    train_in_child(by_map, kill_before=("train.training_step", 3))
    train_to_the_end(flags)
    head, records = train.read_log("run/log.jsonl")
    assert head["flash"]
    assert [record for record in records if "resumed" in record] == [
        dict(step=2, tokens=2 * 128, resumed=dict(flash=False)),
        dict(step=4, tokens=4 * 128, resumed=dict(flash=True)),
    ]
    assert [record["step"] for record in records if "train_loss" in record] == list(range(7))


def test_restart_trains_anew():
    flags = [*TOY, "--steps=2", "--out=run"]
    train_to_the_end(flags)
    train_to_the_end([*flags, "--lr=1e-3", "--restart"])
    head, records = train.read_log("run/log.jsonl")
    assert head["lr"] == 1e-3
    assert [record["step"] for record in records] == [0, 1, 2]


def test_two_processes_do_not_write_to_one_folder():
    flags = [*TOY, "--steps=2", "--out=run"]
    train_to_the_end(flags)
    with open("run/log.jsonl", "ab") as log_file:
        train.lock(log_file, "here")
        assert_value_error("another run is writing to run", train.main, [*flags, "--restart"])


def test_a_checkpoint_that_comes_late_is_looked_at_too(monkeypatch):
    """Another run's checkpoint comes into the folder after the first look and before the lock."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257)
    Path("run").mkdir()
    lock = train.lock

    def lock_late(*args):
        lock(*args)
        GPT(config).save("run/ckpt.pt", tokenizer="bytes", step=2)

    monkeypatch.setattr(train, "lock", lock_late)
    assert_value_error("n_layer is 2 there and 1 here", train.main, [*TOY, "--out=run"])


def test_a_checkpoint_is_read_once(monkeypatch):
    flags = [*TOY, "--steps=4", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 3))
    load = GPT.load
    paths = []

    def counting_load(path, device):
        paths.append(str(path))
        return load(path, device)

    monkeypatch.setattr(GPT, "load", counting_load)
    train_to_the_end(flags)
    assert paths == ["run/ckpt.pt"]


def test_a_run_from_before_a_setting_existed_goes_on():
    flags = [*TOY, "--steps=4", "--out=run"]
    train_in_child(flags, kill_before=("train.training_step", 3))
    checkpoint = torch.load("run/ckpt.pt", weights_only=True)
    head, *records = Path("run/log.jsonl").read_text().splitlines(keepends=True)
    old_head = json.loads(head)
    for setting in ("mlp_width", "decay", "subln_init"):
        del checkpoint["config"][setting]
        del checkpoint["run"][setting]
        del old_head[setting]
    torch.save(checkpoint, "run/ckpt.pt")
    Path("run/log.jsonl").write_text(json.dumps(old_head) + "\n" + "".join(records))
    assert_value_error("decay is False there and True here", train.main, [*flags, "--decay"])
    train_to_the_end(flags)
    assert done_steps("run") == 4


def test_the_log_is_on_the_disk_before_its_checkpoint(monkeypatch):
    calls = []
    fsync = os.fsync
    replace = os.replace

    def recorded_fsync(descriptor):
        calls.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    train_to_the_end([*TOY, "--steps=1", "--save_every=1", "--out=run"])
    save = ["fsync log.jsonl", "fsync ckpt.pt.tmp", "replace ckpt.pt"]
    assert calls == save * 2  # of steps 0 and 1


def test_both_programs_run_where_there_is_no_fcntl(story):
    """As on Windows."""
    program = f"""
import sys
sys.modules["fcntl"] = None
import sample, train
train.main({[*TOY, "--steps=1", story, "--out=run"]})
sample.main(["--ckpt=run", "--max_new_tokens=3"])
"""
    environment = os.environ | {"PYTHONPATH": str(TOP)}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert "step     1/1" in said


# several runs, several processes


def test_a_comparison_goes_on_where_it_stopped(monkeypatch, capfd):
    monkeypatch.setitem(ATTENTION, "mine", type("Mine", (Linear,), {}))  # an arm from another file
    toy = [*TOY, "--steps=8"]
    flags = [*toy, "--attn=softmax,mine", "--seed=1,2", "--lr=1e-3,3e-3", "--out=."]
    fifth_run = ("train.training_step", 4 * 8 + 4)
    train_in_child(flags, kill_before=fifth_run)
    train_in_child([*flags, "--kernel=sdpa"])  # the linear arm goes without
    said = capfd.readouterr().out
    assert said.count(": finished, 8 steps") == 4
    assert said.count("resumes after step 2") == 1
    assert "python bench.py loss ." in said

    alone = [*toy, "--attn=mine", "--seed=2", "--lr=3e-3", "--out=alone"]
    train_in_child(alone)
    (last,) = Path().glob("mine-*lr3e-3-seed2")
    assert_same_run(last, "alone")


def test_all_runs_are_checked_before_the_first_one():
    one_head = [*TOY, "--attn=softmax,diff", "--n_head=1"]
    assert_value_error("n_head must be even", train.main, one_head)
    flags = [*TOY, "--steps=2", "--attn=diff", "--lr=1e-3"]
    train_to_the_end([*flags, "--n_embd=64", "--out=out/diff-of-another-size"])
    Path("out/diff-of-another-size").rename(train.parse(flags)[0].out)
    both = [*flags, "--attn=softmax,diff"]
    assert_value_error("n_embd is 64 there and 32 here", train.main, both)
    assert len(list(Path("out").iterdir())) == 1  # the softmax run has not begun


def test_a_kernel_that_can_not_run_is_refused_before_the_first_run():
    # the linear run comes first, and it needs no kernel
    flags = [*TOY, "--attn=linear,softmax", "--kernel=cudnn"]
    assert_value_error("kernel cudnn can't run on cpu", train.main, flags)
    assert os.listdir() == []


def test_two_processes_give_the_losses_of_one():
    flags = [*TOY, "--total_batch=512", "--eval_tokens=1600", "--attn=diff_linear"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    said = subprocess.check_output([*torchrun, TOP / "train.py", *flags, "--out=two"], text=True)
    assert "processes: 2" in said
    assert said.count("step    24") == 1  # only one of them speaks
    train_in_child([*flags, "--out=one"])
    one = records_without_clock("one")
    two = records_without_clock("two")
    assert len(one) == len(two) == 25
    for a, b in zip(one, two):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5), (key, a["step"])
