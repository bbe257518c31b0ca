"""train.py and sample.py: batches, flags, a run and all the ways in which it can end, text."""
import itertools
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
from data import get_tokenizer, load_data, load_sequences
from helpers import TOP, TOY, log_of, need_gpt2, refusal
from model import ATTENTION, GPT, Softmax

STORY = "Once upon a time there was a Größe 🙂. " * 200


@pytest.fixture
def story():
    Path("story.txt").write_text(STORY, encoding="utf-8")
    return "--data=story.txt"


def test_an_epoch_has_each_sequence_once_in_an_order_of_its_own():
    data = np.arange(1001, dtype="<u2")  # 100 sequences, which begin with 0, 10, 20, ...
    flags = ["--attn=softmax,diff", "--block_size=10", "--total_batch=80"]
    softmax, diff = train.parse([*TOY, *flags])
    batches = []
    for step, micro_step in itertools.product(range(25), range(2)):
        batches.append(train.batch(data, softmax, step, micro_step))
        assert torch.equal(batches[-1], train.batch(data, diff, step, micro_step))
    order = torch.cat(batches)[:, 0].tolist()
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(0, 1000, 10))
    assert order[:100] != order[100:]
    assert not torch.equal(batches[0], train.batch(data, replace(softmax, seed=2), 0, 0))
    # what two processes read together, in smaller parts, is what one reads
    half = replace(softmax, batch_size=2)
    parts = [train.batch(data, half, 0, m, rank, world=2) for m in (0, 1) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), torch.cat(batches[:2]))


def test_micro_steps_add_up_to_one_large_batch(story):
    data, _, _ = load_data("story.txt")
    results = []
    for batch_size in (8, 2):
        (config,) = train.parse([*TOY, "--total_batch=256", f"--batch_size={batch_size}"])
        model = GPT(replace(config, vocab_size=257))
        optimizer = train.make_optimizer(model, config)
        results.append([train.training_step(model, optimizer, data, config, s) for s in range(3)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def test_the_rate_rises_to_its_peak_and_falls_to_0():
    (config,) = train.parse([*TOY, "--steps=100", "--warmup=10", "--lr=1"])
    rates = [train.learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    short = replace(config, steps=3)
    assert [train.learning_rate(step, short) for step in range(3)] == [0.5, 1, 1]


@pytest.mark.parametrize("flags, says", [
    ("--atn=diff", "Unrecognized options: --atn=diff"),
    ("--lr=-1", "lr must be above 0"),
    ("--attn=softmax,cosine", "one of softmax, softmax_average, diff, "),
    ("--attn=softmax,diff --n_head=1", "n_head must be a multiple of 2, not 1"),
    ("--total_batch=3000", "total_batch must be a multiple of 2048, not 3000"),
    ("--device=tpu9", "tpu9"),
    ("--device=cuda", "PyTorch sees no cuda here"),
    ("--kernel=flash_attn", "flash_attn"),
    ("--out=short.txt/x", "short.txt"),
    ("--data=short.txt", "short.txt is too short"),
    ("--data=latin1.txt", "latin1.txt can't be read as UTF-8 text"),
    ("--data=half", "half/train.bin can't be read as tokens"),
])
def test_what_a_command_line_gets_wrong_is_one_sentence(flags, says, monkeypatch, capsys):
    Path("short.txt").write_text("too short")
    Path("latin1.txt").write_bytes("Größe".encode("latin1") * 1000)
    Path("half").mkdir()
    Path("half/train.bin").write_bytes(b"1" * 9999)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    assert says in refusal(f"train.py --preset=toy {flags}", monkeypatch, capsys)
    assert not list(Path().rglob("log.jsonl"))


def test_a_run_writes_a_log_and_the_model_that_it_evaluated(story):
    # 300 tokens of val are 9 sequences, so the last batch of an evaluation is smaller
    flags = ["--steps=6", "--eval_every=4", "--log_every=2", "--eval_tokens=300", "--attn=diff"]
    (loss,) = train.main([*TOY, *flags, story])
    head, *records = log_of("out/toy/diff")
    model = GPT.load("out/toy/diff/ckpt.pt")
    assert (head["attn"], head["n_layer"], head["lr"], head["subln"]) == ("diff", 1, 0.002, 1)
    assert head["parameters"] == sum(p.numel() for p in model.parameters())
    assert [record["step"] for record in records] == [2, 4, 6]
    of_a_step = {"step", "tokens", "train_loss", "lr", "grad_norm"}
    assert records[0].keys() == of_a_step
    assert records[1].keys() == records[2].keys() == of_a_step | {"val_loss", "lambda", "sample"}
    text, val, _ = load_data("story.txt")  # as bytes, and the last tenth is val
    assert [*text.tolist(), *val.tolist()] == [256, *STORY.encode()]
    assert len(val) == len(STORY.encode()) // 10
    sequences = load_sequences(val, range(9), 32)
    expected = model(sequences[:, :-1], sequences[:, 1:])[1].item()
    assert loss == records[2]["val_loss"] == pytest.approx(expected, abs=1e-5)


def test_all_arms_learn_a_text(story):
    flags = ["--steps=60", "--lr=1e-2", "--warmup=10", "--eval_every=60", story]
    losses = train.main([*TOY, *flags, f"--attn={','.join(ATTENTION)}"])
    for attn, loss in zip(ATTENTION, losses, strict=True):
        assert loss < 2, attn  # it begins at log(257) = 5.5


def test_val_of_the_toy_has_no_long_line_that_train_has():
    lines = []
    for tokens in load_data(None)[:2]:
        text = bytes(np.where(tokens == 256, ord("\n"), tokens).astype("u1"))
        lines.append({line for line in text.split(b"\n") if len(line) >= 32})
    assert min(map(len, lines)) > 500
    assert not lines[0] & lines[1]


def test_data_of_nanogpt_trains_and_is_sampled(capsys):
    tokens = np.array(need_gpt2().encode_ordinary(STORY), dtype=np.uint16)
    Path("shakespeare").mkdir()
    tokens.tofile("shakespeare/train.bin")
    tokens[:200].tofile("shakespeare/val.bin")
    Path("shakespeare/meta.pkl").write_bytes(b"no pickle")
    train.main([*TOY, "--data=shakespeare", "--steps=4"])
    assert "shakespeare/meta.pkl is not read" in capsys.readouterr().out
    sample.main(["--prompt=Once", "--max_new_tokens=5", "--device=cpu"])
    assert len(capsys.readouterr().out) > len("Once\n")
    (tokens[:200] * 0 + 50257).tofile("shakespeare/val.bin")
    with pytest.raises(SystemExit, match="=shakespeare is too short, or not of a tokenizer that"):
        train.main([*TOY, "--data=shakespeare", "--out=other"])


def send_before(monkeypatch, number, module, name, n):
    """Has this process get a signal just before the nth call of a function of a module."""
    function = getattr(module, name)
    calls = itertools.count(1)

    def replacement(*args, **kwargs):
        if next(calls) == n:
            signal.raise_signal(number)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, replacement)


def test_killed_anywhere_a_run_ends_in_the_same_bits(monkeypatch):
    flags = [*TOY, "--attn=softmax,diff_linear"]
    losses = train.main([*flags, "--out=whole"])

    def child(*place):
        send_before(monkeypatch, signal.SIGKILL, *place)
        train.main([*flags, "--out=cut"])

    for place in [
        (train, "training_step", 3),  # before the first checkpoint
        (GPT, "save", 1),  # the log has four steps, and there is no checkpoint
        (os, "replace", 2),  # a checkpoint lies there under its temporary name
        (Path, "write_text", 1),  # the log is about to be cut to the steps of the checkpoint
        (train, "training_step", 6),
        (GPT, "save", 3),  # the log is ahead of the checkpoint
        (train, "training_step", 14),  # in the second arm
    ]:
        process = multiprocessing.get_context("fork").Process(target=child, args=place)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert 0 < GPT.load("cut/diff_linear/ckpt.pt").extra["step"] < 24
    for _ in range(2):  # the second time it returns at once
        assert train.main([*flags, "--out=cut"]) == losses
        for arm in ("softmax", "diff_linear"):
            assert log_of(f"cut/{arm}") == log_of(f"whole/{arm}")
            cut, whole = [GPT.load(f"{out}/{arm}/ckpt.pt").state_dict() for out in ("cut", "whole")]
            torch.testing.assert_close(cut, whole, rtol=0, atol=0)


@pytest.mark.parametrize("place, stopped, saved", [
    ((train, "training_step", 3), 2, 0),
    ((train, "training_step", 8), 7, 4),
    ((os, "replace", 2), 8, 4),  # while the second checkpoint is written
])
def test_ctrl_c_says_from_which_step_the_run_goes_on(place, stopped, saved, capsys):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
        send_before(patch, signal.SIGINT, *place)
        train.main(TOY)
    assert f"stopped at step {stopped}:" in error.value.code
    assert error.value.code.endswith(f"goes on from step {saved}")
    train.main(TOY)
    assert f"from step {saved} -> out/toy/softmax" in capsys.readouterr().out


def test_a_log_that_is_missing_or_cut_is_written_anew():
    train.main([*TOY, "--steps=4"])
    log = Path("out/toy/softmax/log.jsonl")
    whole = log.read_bytes()
    for content in (None, b"", whole[:20], whole[:-20], whole + b'{"step": 5, "tok'):
        log.unlink()
        if content is not None:
            log.write_bytes(content)
        train.main([*TOY, "--steps=4"])
        assert log.read_bytes() == whole


def test_another_run_is_refused_before_any_arm_is_trained(story, monkeypatch):
    flags = [*TOY, "--attn=diff", "--steps=4", story]
    train.main(flags)
    before = log_of("out/toy/diff")
    Path("other.txt").write_text(STORY.swapcase(), encoding="utf-8")
    for flag, difference in [("--steps=8", "steps is 4 there"), ("--data=other.txt", "ends is ")]:
        with pytest.raises(SystemExit, match=f"toy/diff is another run: {difference}.*--restart"):
            train.main([*flags, "--attn=softmax,diff", flag])
    assert not Path("out/toy/softmax/log.jsonl").exists()
    assert log_of("out/toy/diff") == before
    with monkeypatch.context() as patch, pytest.raises(TypeError):  # stopped before it trains
        patch.setattr(train, "train", None)
        train.main([*flags, "--attn=softmax,diff", "--steps=8", "--restart"])
    train.main([*flags, "--steps=8"])
    assert [record["step"] for record in log_of("out/toy/diff")[1:]] == list(range(1, 9))
    # a checkpoint of another run, and a damaged one
    Path("other/diff").mkdir(parents=True)
    for content in (Path("out/toy/diff/ckpt.pt").read_bytes(), b"damaged"):
        Path("other/diff/ckpt.pt").write_bytes(content)
        with pytest.raises(SystemExit, match="steps is 8 there|can't be loaded.*--restart"):
            train.main([*flags, "--out=other"])


def test_a_finished_run_is_found_by_the_same_settings_in_other_words(capsys):
    (loss,) = train.main([*TOY, "--steps=4", "--attn=diff"])
    for flags in [
        ["--attn=diff", "--subln=1", "--mlp_width=80"],  # that is what they are anyway
        ["--attn=diff", "--eval_every=2", "--log_every=2", "--batch_size=2", "--kernel=map"],
        ["--attn=softmax,diff"],  # an arm that joins the list
    ]:
        assert train.main([*TOY, "--steps=4", *flags])[-1] == loss
        assert "from step 4 -> out/toy/diff" in capsys.readouterr().out


def test_an_arm_that_diverges_keeps_its_checkpoint_and_the_others_go_on(monkeypatch, capsys):
    usual = train.learning_rate

    def rate(step, config):
        return 1e30 if (config.attn, step) == ("softmax", 6) else usual(step, config)

    monkeypatch.setattr(train, "learning_rate", rate)
    softmax, diff = train.main([*TOY, "--attn=softmax,diff"])
    assert softmax == math.inf and diff < 5
    assert "Try a lower --lr" in log_of("out/toy/softmax")[-1]["diverged"]
    assert GPT.load("out/toy/softmax/ckpt.pt").extra["step"] == 4
    # as a program, whose exit code is 1
    refusal(" ".join(["train.py", *TOY, "--lr=1e30", "--out=high"]), monkeypatch, capsys)
    assert "diverged" in log_of("high/softmax")[-1]


def test_two_processes_give_the_losses_of_one(story):
    flags = [*TOY, "--total_batch=512", "--steps=8", "--eval_tokens=700", "--attn=diff", story]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [TOP / "train.py", *flags, "--out=two"]
    said = subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    assert said.count("step 8 |") == 1  # only one of them speaks
    train.main([*flags, "--out=one"])
    for one, two in zip(log_of("one/diff")[1:], log_of("two/diff")[1:], strict=True):
        for name in ("step", "train_loss", "val_loss", "grad_norm", "lr"):
            assert one.get(name) == pytest.approx(two.get(name), abs=1e-5), (name, one["step"])


def say(capsys, *flags):
    capsys.readouterr()
    sample.main(["--device=cpu", "--max_new_tokens=40", *flags])
    return capsys.readouterr().out


def test_a_character_is_printed_as_soon_as_its_last_byte_is_there(capsys):
    printed = []

    def tokens():
        for token in [*"é🙂".encode(), *b"a", 256, *b"another text"]:
            yield torch.tensor([token])
            printed.append(capsys.readouterr().out)

    sample.print_sample(tokens(), get_tokenizer("bytes"), ends=[256])
    assert printed == ["", "é", "", "", "", "🙂", "a"]  # and then the text was over


def test_a_seed_says_the_same_again_and_another_one_does_not(capsys):
    train.main([*TOY, "--steps=1", "--attn=softmax,diff"])
    os.utime("out/toy/softmax/ckpt.pt", (0, 0))  # then diff's is the newest
    for prompt in ("Once", "", "Größe 🙂" * 20):  # the last one is longer than block_size
        one = say(capsys, f"--prompt={prompt}")
        assert one == say(capsys, f"--prompt={prompt}", "--ckpt=out/toy/diff")
        two = say(capsys, f"--prompt={prompt}", "--num_samples=2")
        assert two.startswith(one + prompt) and two != one + one
        for flag in ("--seed=2", "--ckpt=out/toy/softmax/ckpt.pt"):
            assert say(capsys, f"--prompt={prompt}", flag) != one


def test_what_cannot_be_sampled_is_one_sentence(monkeypatch, capsys):
    def says(flags):
        return refusal(f"sample.py --device=cpu {flags}", monkeypatch, capsys)

    assert says("") == "there is no checkpoint below out/: python train.py makes one"
    assert "nowhere can't be loaded" in says("--ckpt=nowhere")
    assert "temperature must be 0 or more, and top_k 1 or more" in says("--top_k=0")
    with monkeypatch.context() as patch:  # an arm of another file
        patch.setitem(ATTENTION, "mine", type("Mine", (Softmax,), {}))
        train.main([*TOY, "--steps=1", "--attn=mine"])
    assert "attn is 'mine' (yours? run its file)" in says("--ckpt=out/toy/mine")
    os.truncate("out/toy/mine/ckpt.pt", 10_000)
    assert "out/toy/mine/ckpt.pt can't be loaded" in says("")
