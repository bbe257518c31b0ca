"""train.py and sample.py: batches, flags, a run and all the ways in which it can end, text."""
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sample
import train
from data import get_tokenizer, load_data, load_sequences
from helpers import ARMS, TOP, TOY, log_of, need_gpt2, refusal
from model import ATTENTION, GPT, Diff, DiffLinear, GPTConfig, Softmax, average_map, linear_map
from model import rotate, running_mean, softmax_attention, softmax_map

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


def test_matrices_decay_and_vectors_do_not():
    (config,) = train.parse([*TOY, "--attn=diff"])
    optimizer = train.make_optimizer(GPT(config), config)
    matrices, vectors = optimizer.param_groups
    assert {p.ndim for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0
    assert {p.ndim for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1
    assert matrices["betas"] == vectors["betas"] == (0.9, 0.95)


def test_lambdas_of_any_shape_do_not_decay():
    model = torch.nn.Module()
    model.lam, model.matrix = [torch.nn.Parameter(torch.ones(*n)) for n in ((4, 1, 1), (4, 1, 3))]
    matrices, vectors = train.make_optimizer(model, train.parse(TOY)[0]).param_groups
    assert matrices["params"] == [model.matrix] and vectors["params"] == [model.lam]


def test_gradients_have_a_limit(story):
    (loss,) = train.main([*TOY, story, "--grad_clip=1e-12", "--weight_decay=0", "--steps=2"])
    assert loss == pytest.approx(math.log(257), abs=0.2)
    assert log_of("out/toy/softmax")[-1]["grad_norm"] > 1  # that before it


def test_another_seed_starts_with_other_weights(story):
    for seed in ("1", "2", "3"):
        train.main([*TOY, story, f"--seed={seed}", "--steps=1", "--lr=1e-30", f"--out={seed}"])
    weights = {GPT.load(f"{seed}/softmax/ckpt.pt").wte.weight[0, 0].item() for seed in "123"}
    assert len(weights) == 3


def test_bf16_is_used_where_it_is_asked_for(story):
    losses = []
    for dtype in ("float32", "bfloat16"):
        losses += train.main([*TOY, story, f"--dtype={dtype}", "--steps=4", f"--out={dtype}"])
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], abs=0.05)
    state = GPT.load("bfloat16/softmax/ckpt.pt").state_dict()
    assert {p.dtype for p in state.values()} == {torch.float32}


def test_what_a_log_says_of_the_clock(monkeypatch):
    (config,) = train.parse(TOY)  # 24 steps of 128 tokens
    said = train.speed(config, size=10**6, steps=4, step=8, seconds=2.0)
    assert said == dict(tok_per_s=256, minutes_left=(24 - 8) * 128 / 256 / 60)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    config.device = "cuda"
    said = train.speed(config, size=10**6, steps=4, step=8, seconds=2.0)
    # 6 FLOP for a parameter and a token, and 12 n_layer n_embd T for the maps
    assert said["mfu"] == pytest.approx(256 * (6 * 10**6 + 12 * 1 * 32 * 32) / 989e12)


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
    ("--lr=nan", "lr must be above 0"),
    ("--seed=-1", "seed must be 0 or more"),
    ("--warmup=-5", "warmup must be 0 or more"),
    ("--mlp_width=0", "mlp_width must be above 0"),
    ("--total_batch=-128", "total_batch must be above 0"),
    ("--attn=softmax,cosine", "one of softmax, softmax_average, diff, "),
    ("--attn=softmax,diff --n_head=1", "n_head must be a multiple of 2, not 1"),
    ("--total_batch=3000", "total_batch must be a multiple of 2048, not 3000"),
    ("--device=tpu9", "PyTorch sees no tpu9 here"),
    ("--device=cuda:9", "PyTorch sees no cuda:9 here"),
    ("--device=mps", "PyTorch sees no mps here"),
    ("--kernel=flash_attn", "--kernel=flash_attn needs --device=cuda and --dtype=bfloat16"),
    ("--out=short.txt/x", "short.txt"),
    ("--data=nowhere", "--data=nowhere is not there"),
    ("--data=short.txt", "short.txt is too short for a block of 256 tokens"),
    ("--data=latin1.txt", "latin1.txt can't be read as UTF-8 text"),
    ("--data=half", "half/train.bin can't be read as tokens"),
])
def test_what_a_command_line_gets_wrong_is_one_sentence(flags, says, monkeypatch, capsys):
    Path("short.txt").write_text("too short")
    Path("latin1.txt").write_bytes("Größe".encode("latin1") * 1000)
    Path("half").mkdir()
    Path("half/train.bin").write_bytes(b"1" * 9999)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed
    assert says in refusal(f"train.py --preset=toy {flags}", monkeypatch, capsys)
    assert not list(Path().rglob("log.jsonl"))


@pytest.mark.parametrize("rank, world", [("1", ""), ("0", "2"), ("2", "2")])
def test_a_rank_without_torchrun_is_one_sentence(rank, world):
    """A job script may have left it in the environment."""
    env = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    command = [sys.executable, TOP / "train.py", *TOY]
    ended = subprocess.run(command, env=env | dict(RANK=rank, WORLD_SIZE=world), text=True,
                           capture_output=True)
    assert ended.returncode == 1 and not Path("out").exists()
    assert f"train.py: RANK is {rank} and WORLD_SIZE is {world or 1}: start it" in ended.stderr


def test_help_names_all_arms(capsys):
    with pytest.raises(SystemExit):
        train.parse(["--help"])
    said = capsys.readouterr().out.replace("│", " ")
    assert ", ".join(ARMS) in " ".join(said.split())


def test_a_run_writes_a_log_and_the_model_that_it_evaluated(story):
    # 300 tokens of val are 9 sequences, so the last batch of an evaluation is smaller
    flags = ["--steps=6", "--eval_every=4", "--log_every=2", "--eval_tokens=300", "--attn=diff"]
    (loss,) = train.main([*TOY, *flags, story])
    head, *records = log_of("out/toy/diff")
    model = GPT.load("out/toy/diff/ckpt.pt")
    assert (head["attn"], head["n_layer"], head["lr"], head["subln"]) == ("diff", 1, 0.002, 1)
    assert head["parameters"] == sum(p.numel() for p in model.parameters())
    assert [record["step"] for record in records] == [2, 4, 6]
    rates = [train.learning_rate(step - 1, train.parse([*TOY, *flags])[0]) for step in (2, 4, 6)]
    assert [record["lr"] for record in records] == rates
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
    losses = train.main([*TOY, *flags, f"--attn={','.join(ARMS)}"])
    for attn, loss in zip(ARMS, losses, strict=True):
        assert loss < 2, attn  # it begins at log(257) = 5.5


def test_val_of_the_toy_has_no_long_line_that_train_has():
    lines = []
    for tokens in load_data(None)[:2]:
        text = bytes(np.where(tokens == 256, ord("\n"), tokens).astype("u1"))
        lines.append({line for line in text.split(b"\n") if len(line) >= 32})
    assert min(map(len, lines)) > 500
    assert not lines[0] & lines[1]


def write_tokens(folder, tokens):
    Path(folder).mkdir()
    np.array(tokens, dtype=np.uint16).tofile(f"{folder}/train.bin")
    np.array(tokens[:200], dtype=np.uint16).tofile(f"{folder}/val.bin")


def test_tokens_of_nanogpt_train_and_are_sampled(capsys):
    tokens = need_gpt2().encode_ordinary(STORY)
    write_tokens("shakespeare", tokens)
    train.main([*TOY, "--data=shakespeare", "--steps=4"])
    sample.main(["--prompt=Once", "--max_new_tokens=5", "--device=cpu"])
    assert len(capsys.readouterr().out) > len("Once\n")
    write_tokens("foreign", [*tokens[:1500], 50300, *tokens])
    with pytest.raises(SystemExit, match="foreign has a token 50300, and its tokenizer only 50257"):
        train.main([*TOY, "--data=foreign", "--out=other"])


def test_letters_of_nanogpt_train_and_are_sampled(monkeypatch, capsys):
    letters = sorted(set(STORY))
    write_tokens("char", [letters.index(letter) for letter in STORY])
    itos = dict(enumerate(letters))
    meta = dict(vocab_size=len(letters), itos=itos, stoi={c: i for i, c in itos.items()})
    Path("char/meta.pkl").write_bytes(pickle.dumps(meta))
    train.main([*TOY, "--data=char", "--steps=100", "--lr=1e-2", "--eval_every=100"])
    head, *_, last = log_of("out/toy/softmax")
    assert head["vocab_size"] == len(letters) + 1 and last["val_loss"] < 2
    assert last["sample"].startswith("Once upon a time") and set(last["sample"]) <= set(letters)
    said = say(capsys, "--prompt=Größe", "--temperature=0")
    assert said.startswith("Größe 🙂. Once") or set(said) <= {*letters, "\n"}
    says = refusal("sample.py --device=cpu --prompt=XYZ", monkeypatch, capsys)
    assert "the tokenizer has no 'X'" in says


def test_a_pickle_that_would_run_code_is_refused():
    class RunsCode:
        def __reduce__(self):
            return os.mkdir, ("boom",)

    write_tokens("char", list(range(50)) * 20)
    Path("char/meta.pkl").write_bytes(pickle.dumps(dict(itos=RunsCode())))
    with pytest.raises(SystemExit, match="char/meta.pkl can't be read as nanoGPT's letters"):
        train.main([*TOY, "--data=char"])
    assert not Path("boom").exists()


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
        (Path, "replace", 2),  # a checkpoint lies there under its temporary name
        (Path, "write_text", 1),  # the log is about to be cut to the steps of the checkpoint
        (Path, "write_text", 5),  # the checkpoint is ahead of the log
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


@pytest.mark.parametrize("place, saved", [
    ((train, "training_step", 3), 0),
    ((train, "training_step", 8), 4),
    ((Path, "replace", 2), 4),  # while the second checkpoint is written
    ((train, "write_log", 6), 4),  # when the first is, and the log is behind it
])
def test_ctrl_c_says_from_which_step_the_run_goes_on(place, saved, capsys):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
        send_before(patch, signal.SIGINT, *place)
        train.main(TOY)
    assert error.value.code == f"\nstopped: the same command goes on from step {saved}"
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


@pytest.mark.parametrize("flag, difference", [
    ("--steps=8", "steps is 4 there and 8 here"),
    ("--subln=0.5", "subln is 1.0 there and 0.5 here"),
    ("--data=other.txt", "--data's data_hash is "),
])
def test_another_run_is_refused_before_any_arm_is_trained(flag, difference, story):
    Path("other.txt").write_text(STORY.swapcase(), encoding="utf-8")
    flags = [*TOY, "--steps=4", story]
    train.main([*flags, "--attn=diff"])
    before = log_of("out/toy/diff")
    with pytest.raises(SystemExit, match=f"toy/diff is another run: {difference}.*--restart"):
        train.main([*flags, "--attn=softmax,diff", flag])
    assert not Path("out/toy/softmax").exists()
    assert log_of("out/toy/diff") == before


def test_restart_keeps_the_old_run_until_the_first_checkpoint_of_the_new_one(monkeypatch):
    train.main([*TOY, "--steps=4", "--attn=diff"])
    flags = [*TOY, "--steps=8", "--attn=diff", "--restart"]
    stopped = "stopped: without --restart the run there goes on from step 4"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=stopped):
        send_before(patch, signal.SIGINT, train, "training_step", 3)
        train.main(flags)
    assert GPT.load("out/toy/diff/ckpt.pt").extra["log"][0]["steps"] == 4
    with pytest.raises(SystemExit, match="steps is 4 there and 8 here"):
        train.main(flags[:-1])
    train.main(flags)
    assert [record["step"] for record in log_of("out/toy/diff")[1:]] == list(range(1, 9))


def test_a_damaged_checkpoint_and_a_lost_one_are_named():
    train.main([*TOY, "--steps=4"])
    checkpoint, log = Path("out/toy/softmax/ckpt.pt"), log_of("out/toy/softmax")
    checkpoint.write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="softmax/ckpt.pt can't be loaded: it is damaged"):
        train.main([*TOY, "--steps=4"])
    checkpoint.unlink()  # to save space, say
    with pytest.raises(SystemExit, match="ckpt.pt is gone, but not its log: --restart discards"):
        train.main([*TOY, "--steps=4"])
    assert log_of("out/toy/softmax") == log


def test_other_code_goes_on_and_says_so(monkeypatch, capsys):
    class Mine(Softmax):
        pass

    Mine.__module__ = "mine"
    monkeypatch.setitem(ATTENTION, "mine", Mine)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(__file__="mine.py"))
    Path("mine.py").write_text("a = 1")
    for _ in range(2):
        train.main([*TOY, "--steps=4", "--attn=mine"])
        assert "other code" not in capsys.readouterr().out
    Path("mine.py").write_text("a = 2")
    train.main([*TOY, "--steps=4", "--attn=mine"])
    assert "by other code than this, and is finished: --restart" in capsys.readouterr().out
    assert "went_on_with" not in log_of("out/toy/mine")[0]


def test_what_changes_when_a_run_goes_on_is_noted(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        send_before(patch, signal.SIGINT, train, "training_step", 7)
        train.main(TOY)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        send_before(patch, signal.SIGINT, train, "training_step", 6)  # at step 10
        train.main([*TOY, "--kernel=map", "--batch_size=2"])
    train.main(TOY)
    first, second = log_of("out/toy/softmax")[0]["went_on_with"]
    assert first == dict(step=4, kernel="map", batch_size=2)
    assert second == dict(step=8, kernel="sdpa", batch_size=4)


def test_a_lam_that_is_a_module_is_no_error(monkeypatch, capsys):
    class Module(Softmax):
        def __init__(self, config, depth):
            super().__init__(config, depth)
            self.lam = torch.nn.Linear(config.n_embd, self.h)

    monkeypatch.setitem(ATTENTION, "mine", Module)
    train.main([*TOY, "--attn=mine", "--steps=1"])
    assert "no gradient: lam.weight, lam.bias" in capsys.readouterr().out


def test_an_edit_in_the_middle_of_a_text_is_another_run():
    text = "".join(f"{i} " for i in range(3000))
    Path("text.txt").write_text(text)
    train.main([*TOY, "--steps=4", "--data=text.txt"])
    Path("text.txt").write_text(text[:5000] + text[5000:9000][::-1] + text[9000:])
    with pytest.raises(SystemExit, match="is another run: --data's data_hash is"):
        train.main([*TOY, "--steps=4", "--data=text.txt"])


def test_the_hash_of_data_has_every_token_of_a_text_and_pieces_of_more():
    tokens = np.zeros(900_000, "<u2")
    changed = tokens.copy()
    changed[654_321] = 1
    assert train.hash_of(tokens) != train.hash_of(changed)
    long, changed = np.zeros(5_000_000, "<u2"), np.zeros(5_000_000, "<u2")
    changed[:4000] = 1
    assert train.hash_of(long) != train.hash_of(changed)


def test_a_finished_run_is_found_by_the_same_settings_in_other_words(capsys):
    (loss,) = train.main([*TOY, "--steps=4", "--attn=diff"])
    for flags in [
        ["--attn=diff", "--subln=1", "--mlp_width=80"],  # that is what they are anyway
        ["--attn=diff", "--eval_every=2", "--log_every=2", "--batch_size=2", "--kernel=map"],
        ["--attn=softmax, diff"],  # an arm that joins the list
    ]:
        assert train.main([*TOY, "--steps=4", *flags])[-1] == loss
        assert "from step 4 -> out/toy/diff" in capsys.readouterr().out


def test_an_arm_that_diverges_keeps_its_checkpoint_and_the_others_go_on(monkeypatch):
    usual = train.learning_rate

    def rate(step, config):
        return 1e30 if (config.attn, step) == ("softmax", 6) else usual(step, config)

    monkeypatch.setattr(train, "learning_rate", rate)
    softmax, diff = train.main([*TOY, "--attn=softmax,diff"])
    assert softmax == math.inf and diff < 5
    assert "Try a lower --lr" in log_of("out/toy/softmax")[-1]["diverged"]
    assert GPT.load("out/toy/softmax/ckpt.pt").extra["step"] == 4


def test_a_program_whose_run_diverges_exits_with_1(monkeypatch, capsys):
    refusal(" ".join(["train.py", *TOY, "--lr=1e30", "--out=high"]), monkeypatch, capsys)
    assert "diverged" in log_of("high/softmax")[-1]


# ---- what can go wrong beside the command line

def test_a_sample_that_stdout_cannot_print_ends_no_run():
    Path("ru.txt").write_text("Съешь же ещё этих мягких булок. " * 200, encoding="utf-8")
    flags = [*TOY, "--data=ru.txt", "--steps=100", "--eval_every=50", "--log_every=50", "--lr=1e-2"]
    env = os.environ | dict(PYTHONIOENCODING="cp1252", OMP_NUM_THREADS="1")
    subprocess.run([sys.executable, TOP / "train.py", *flags], env=env, check=True)
    command = [sys.executable, TOP / "sample.py", "--prompt=Съешь", "--max_new_tokens=9"]
    said = subprocess.check_output([*command, "--device=cpu"], env=env, text=True)
    assert said.startswith("\\u0421\\u044a")


@pytest.mark.parametrize("error, says", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "too little memory (CUDA out"),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "too little mem"),
    (RuntimeError("[enforce fail at x] . unexpected pos 576 vs 534"), "is the disk full?"),
    (OSError(28, "No space left on device"), "No space left on device"),
])
def test_too_little_memory_or_disk_is_one_sentence_and_loses_nothing(error, says, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    train.main([*TOY, "--steps=4"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(torch, "save", fail)
        train.main([*TOY, "--steps=8", "--restart"])
    assert ended.value.code.startswith("train.py: ") and says in ended.value.code
    assert GPT.load("out/toy/softmax/ckpt.pt").extra["step"] == 4
    assert not Path("out/toy/softmax/ckpt.pt.tmp").exists()


class WrongShapes(Softmax):
    def make_map(self, q, k, x, rope):
        return q @ k


class WrongCount(Softmax):
    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.a, self.b = 1, 2, 3


class WrongWrite(Softmax):
    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A.mean(1, keepdim=True).expand_as(A).mul_(2)


@pytest.mark.parametrize("arm, error", [
    (WrongShapes, RuntimeError), (WrongCount, ValueError), (WrongWrite, RuntimeError),
])
def test_a_programmers_mistake_keeps_its_traceback(arm, error, monkeypatch):
    monkeypatch.setitem(ATTENTION, "wrong", arm)
    with pytest.raises(error):
        train.main([*TOY, "--attn=wrong"])


def test_without_a_network_the_way_out_is_named(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "empty")
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: open("https://there is no network"))
    with pytest.raises(OSError, match="set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has"):
        get_tokenizer("gpt2")


def test_a_folder_below_home_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    train.main([*TOY, "--steps=1", "--out=~/x"])
    assert Path("home/x/softmax/ckpt.pt").exists() and not Path("~").exists()
    sample.main(["--ckpt=~/x/softmax", "--max_new_tokens=1", "--device=cpu"])


# ---- an arm of one's own

class Contradiction(Softmax):
    """Its attend is not its map."""

    def make_map(self, q, k, x, rope):
        return super().make_map(q, k, x, rope) / 2

    attend = Softmax.attend


class ZeroAtFirst(DiffLinear):
    """The fold has a wrong sign, which a gate of 0 hides in a new model."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.gate = torch.nn.Parameter(torch.zeros(()))

    def lam(self, x):
        return self.gate

    def make_map(self, q, k, x, rope):
        A = linear_map(q, k, rope)
        return A[:, 0::2] + self.lam(x) * A[:, 1::2]

    attend = DiffLinear.attend


class FarWindow(Softmax):
    """Its map ends after 200 tokens, and its attend does not."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - A.tril(-200)

    attend = Softmax.attend


class ForgetsTheAverage(Softmax):
    """It keeps softmax's state, and not the values that it averages."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A - 0.5 * average_map(A)

    def attend(self, q, k, v, x, rope, state):
        y = softmax_attention(q, k, v, rope, state, self.config.kernel)
        return y - 0.5 * running_mean(v, {})


class LeaksInChunks(Softmax):
    """Chunks of 64 tokens, in which somebody has forgotten the tril."""

    def make_map(self, q, k, x, rope):
        T = q.shape[2]
        chunk = torch.arange(T) // 64
        scores = rotate(q, rope) @ rotate(k, rope).mT
        return scores.masked_fill(chunk[:, None] < chunk, -math.inf).softmax(-1)


class PooledKeys(Softmax):
    """Neighbouring tokens have one key: the mean of both."""

    def project(self, x):
        q, k, v = super().project(x)
        even = F.pad(k, (0, 0, 0, k.shape[2] % 2)).unflatten(2, (-1, 2)).mean(3)
        return q, even.repeat_interleave(2, dim=2)[:, :, : k.shape[2]], v


class WrongInTheLastLayer(Softmax):
    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.is_first = depth == 0

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A if self.is_first else A / 2

    attend = Softmax.attend


class ForgetsInASecondStep(Softmax):
    """What it shifts is right for a second part, but not for the next single tokens."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A + 0.5 * torch.diag(torch.ones(A.shape[-1] - 2, dtype=A.dtype), -2)

    def attend(self, q, k, v, x, rope, state):
        y = softmax_attention(q, k, v, rope, state, self.config.kernel)
        last = torch.cat((state.get("last", torch.zeros_like(v[:, :, :0])), v), dim=2)
        state["last"] = v[:, :, -2:]  # of this part alone
        return y + 0.5 * F.pad(last, (0, 0, 2, 0))[:, :, -v.shape[2] - 2 : -2]


class NoMask(Softmax):
    def make_map(self, q, k, x, rope):
        return (rotate(q, rope) @ rotate(k, rope).mT).softmax(-1)


class MeanOverTime(Softmax):
    def forward(self, x, rope, state):
        return self.v_proj(x.mean(1, keepdim=True).expand_as(x))


class MixesTheBatch(Diff):
    def lam(self, x):
        return x[..., :1].mean((0, 2)).sigmoid()[None, None, :, None]


class NotANumber(Softmax):
    def make_map(self, q, k, x, rope):
        A = F.relu(softmax_map(q, k, rope) - 0.5)
        return A / A.sum(-1, keepdim=True)


class HiddenModule(Diff):
    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.lam = torch.nn.Linear(config.n_embd, 1)


class FarLeak(Softmax):
    """A token sees the one 400 behind it."""

    def make_map(self, q, k, x, rope):
        A = softmax_map(q, k, rope)
        return A + torch.diag(torch.ones(max(0, A.shape[-1] - 400), dtype=A.dtype), 400)[
            : A.shape[-1], : A.shape[-1]]


class LeaksInTraining(Softmax):
    """A BatchNorm over all tokens, as it computes while it trains."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.batch_norm = torch.nn.BatchNorm1d(config.n_embd)

    def project(self, x):
        return super().project(self.batch_norm(x.mT).mT)


@pytest.mark.parametrize("arm, says", [
    (LeaksInTraining, "mine sees later tokens while it trains"),
    (Contradiction, "mine has an attend that is not make_map times V"),
    (ZeroAtFirst, "mine has an attend that is not make_map times V"),
    (FarWindow, "mine has an attend that is not make_map times V"),
    (ForgetsTheAverage, "mine reads a text in parts in another way"),
    (ForgetsInASecondStep, "mine reads a text in parts in another way"),
    (NoMask, "mine sees later tokens"),
    (LeaksInChunks, "mine sees later tokens"),
    (PooledKeys, "mine sees later tokens"),
    (WrongInTheLastLayer, "mine has an attend that is not make_map times V"),
    (MeanOverTime, "mine sees later tokens"),
    (MixesTheBatch, "mine mixes the texts of a batch"),
    (NotANumber, "mine makes numbers that are not finite"),
    (HiddenModule, "mine has a module and a method lam: rename the module"),
])
def test_an_arm_that_is_wrong_is_not_trained(arm, says, monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", arm)
    flags = [*TOY, "--block_size=256", "--total_batch=1024", "--n_layer=2"]
    with pytest.raises(SystemExit, match=f"^train.py: {says}"):  # before any arm is trained
        train.main([*flags, "--attn=softmax,mine"])
    assert not list(Path("out").rglob("log.jsonl"))


def test_an_arm_of_your_own_is_read_for_1024_tokens(monkeypatch):
    class NoWindow(FarWindow):
        def make_map(self, q, k, x, rope):
            A = softmax_map(q, k, rope)
            return A - A.tril(-400)

        attend = Softmax.attend

    for arm, says in [(FarLeak, "sees later tokens"), (NoWindow, "has an attend that is not")]:
        monkeypatch.setitem(ATTENTION, "mine", arm)
        with pytest.raises(SystemExit, match=says):
            train.main([*TOY, "--attn=mine", "--block_size=512", "--total_batch=1024"])


def test_what_contradicts_its_map_can_be_trained_and_sampled_by_it(monkeypatch, capsys):
    monkeypatch.setitem(ATTENTION, "mine", Contradiction)
    train.main([*TOY, "--attn=mine", "--kernel=map", "--steps=1"])
    assert GPT.load("out/toy/mine/ckpt.pt").config.kernel == "map"
    monkeypatch.setitem(ATTENTION, "mine", type("Twice", (Softmax,), {"attend": Twice.attend}))
    with pytest.raises(SystemExit, match="mine has no make_map of its own, which --kernel=map"):
        train.main([*TOY, "--attn=mine", "--kernel=map", "--restart"])


def test_an_attend_alone_is_trained_and_said_to_be_compared_with_nothing(monkeypatch, capsys):
    for arm, is_said in [(Twice, True), (Softmax, False), (NotChecked, True)]:
        monkeypatch.setitem(ATTENTION, "mine", arm)
        train.main([*TOY, "--attn=mine", "--steps=1", "--restart"])
        assert ("mine is compared with no equation" in capsys.readouterr().out) == is_said


def test_a_lambda_that_nothing_reads_is_said(monkeypatch, capsys):
    class Unread(Softmax):
        def lam(self, x):
            return 0.3

    for arm, is_said in [(Unread, True), (Diff, False)]:
        monkeypatch.setitem(ATTENTION, "mine", arm)
        train.main([*TOY, "--attn=mine", "--steps=1", "--restart"])
        assert ("mine has a lam that nothing reads" in capsys.readouterr().out) == is_said


def test_a_forward_of_its_own_is_said(monkeypatch, capsys):
    class Half(Softmax):
        def forward(self, x, rope, state):
            return super().forward(x, rope, state) / 2

    monkeypatch.setitem(ATTENTION, "mine", Half)
    train.main([*TOY, "--attn=mine", "--steps=1"])
    assert "mine has a forward of its own: its map alone" in capsys.readouterr().out


class Twice(Softmax):
    def attend(self, *args):
        return 2 * super().attend(*args)


class NotChecked(torch.nn.Module):
    """It is no Attention at all."""

    def __init__(self, config, depth):
        super().__init__()
        self.v_proj = torch.nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, rope, state):
        return self.v_proj(x)


class Grouped(Softmax):
    """Two heads of queries share one of keys and values."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.h = config.n_head // 2
        self.k_proj = torch.nn.Linear(config.n_embd, config.n_embd // 2, bias=False)
        self.v_proj = torch.nn.Linear(config.n_embd, config.n_embd // 2, bias=False)


class Dropped(Softmax):
    """An arm that draws its first weights, and a dropout, of PyTorch's own generator."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        self.scale = torch.nn.Parameter(torch.rand(()))

    def forward(self, x, rope, state):
        return F.dropout(super().forward(x, rope, state), 0.2, self.training) * self.scale


def test_grouped_keys_need_no_more_than_their_projections(monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", Grouped)
    train.main([*TOY, "--attn=mine", "--steps=4", "--n_head=4"])
    first, *_ = log_of("out/toy/mine")
    train.main([*TOY, "--attn=softmax", "--steps=4", "--n_head=4"])
    assert first["parameters"] == pytest.approx(log_of("out/toy/softmax")[0]["parameters"], 0.01)


def test_what_an_arm_draws_is_the_same_after_a_kill(monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine", Dropped)
    (whole,) = train.main([*TOY, "--attn=mine", "--out=whole"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="goes on from step 4"):
        send_before(patch, signal.SIGINT, train, "training_step", 7)
        train.main([*TOY, "--attn=mine"])
    assert train.main([*TOY, "--attn=mine"]) == [whole]
    model = GPT.load("out/toy/mine/ckpt.pt")
    sequences = load_sequences(load_data(None)[1], range(8), 32)
    val_loss = model(sequences[:, :-1], sequences[:, 1:])[1].item()  # without the dropout
    assert val_loss == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("lam", [
    0.5, torch.full((4,), 0.5), lambda x: 0.5,
    lambda x: torch.tensor([0.4, 0.6])[:, None, None],  # one for each head
])
def test_any_lambda_is_logged(lam, monkeypatch, capsys):
    class Mine(Diff if callable(lam) else Softmax):
        def __init__(self, config, depth):
            super().__init__(config, depth)
            is_tensor = isinstance(lam, torch.Tensor)
            self.lam = torch.nn.Parameter(lam.clone()) if is_tensor else lam

    monkeypatch.setitem(ATTENTION, "mine", Mine)
    train.main([*TOY, "--attn=mine", "--steps=4", "--n_head=4"])
    unused = "mine has parameters that get no gradient: lambda_q1, lambda_k1, lambda_q2, lambda_k2"
    assert (unused in capsys.readouterr().out) == callable(lam)
    assert log_of("out/toy/mine")[-1]["lambda"] == [pytest.approx(0.5, abs=0.02)]


def test_lambda_of_the_second_version_is_its_mean_over_val(story):
    train.main([*TOY, "--attn=diff_v2", "--steps=4", "--lr=0.1", story])
    model = GPT.load("out/toy/diff_v2/ckpt.pt")
    idx = load_sequences(load_data("story.txt")[1], range(4), 32)[:, :-1]
    x = model.blocks[0].norm1(model.wte(idx))
    expected = model.blocks[0].attn.lam(x).mean().item()
    assert log_of("out/toy/diff_v2")[-1]["lambda"] == [pytest.approx(expected, abs=1e-4)]


def test_the_file_of_an_arm_trains_and_samples():
    Path("myarm.py").write_text(f"""import sys; sys.path.insert(0, {str(TOP)!r})
import torch.nn.functional as F, model, sample, train
class Sparse(model.Softmax):
    def make_map(self, q, k, x, rope):
        return F.relu(super().make_map(q, k, x, rope) - 0.05)
model.ATTENTION["sparse"] = Sparse
sample.main() if "--ckpt" in str(sys.argv) else train.main()
""")
    flags = [*TOY, "--attn=sparse", "--steps=2"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # what it prints says python
    env = os.environ | dict(OMP_NUM_THREADS="1", PATH=path)
    said = subprocess.check_output([sys.executable, "myarm.py", *flags], env=env, text=True)
    (command,) = [line for line in said.splitlines() if line.startswith("sample from it:")]
    assert command.endswith("myarm.py --ckpt=out/toy/sparse")
    flags = ["--device=cpu", "--max_new_tokens=5"]
    subprocess.run([*command.split()[3:], *flags], env=env, check=True)


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


def test_two_processes_train_an_arm_with_parameters_that_it_does_not_use(story):
    Path("myarm.py").write_text(f"""import sys; sys.path.insert(0, {str(TOP)!r})
import model, train
class Mine(model.Diff):
    def lam(self, x):
        return 0.5
model.ATTENTION["mine"] = Mine
train.main()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["myarm.py", *TOY, "--total_batch=512", "--steps=4", "--attn=mine", story]
    said = subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    assert "step 4 |" in said and said.count("get no gradient") == 1


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

    sample.print_sample(tokens(), get_tokenizer("bytes"))
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

    nothing = "sample.py: there is no checkpoint in out: python train.py makes one"
    assert says("") == nothing
    assert "PyTorch sees no mps here" in says("--device=mps")
    assert "there is no checkpoint in nowhere" in says("--ckpt=nowhere")
    assert "temperature must be 0 or more, and top_k 1 or more" in says("--top_k=0")
    with monkeypatch.context() as patch:  # an arm of another file
        patch.setitem(ATTENTION, "mine", type("Mine", (Softmax,), {}))
        train.main([*TOY, "--steps=1", "--attn=mine"])
    assert "attn is 'mine' (yours? run its file)" in says("--ckpt=out/toy/mine")
    os.truncate("out/toy/mine/ckpt.pt", 10_000)
    assert "out/toy/mine/ckpt.pt can't be loaded: it is damaged" in says("")
    GPT(GPTConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=97)).save("ckpt.pt")
    assert "ckpt.pt has no tokenizer" in says("--ckpt=ckpt.pt")
