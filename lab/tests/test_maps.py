"""maps.py: the maps, the outliers and the few bits of trained models."""
import json
import math

import pytest
import torch

import train
from common import UserError, read_log
from lab import maps, text
from model import ATTENTION, GPT, GPTConfig

torch.set_num_threads(1)

# a run of a second
TINY = "--preset=toy --device=cpu --n_layer=1 --n_embd=16 --n_head=2 --block_size=16 "
TINY += "--total_batch=32 --steps=2 --eval_tokens=64"


def test_scores_are_rounded_to_equal_steps():
    scores = torch.tensor([[7.0, 99.0], [-2.4, 3.6]])[None, None]  # 99 is in the future
    rounded = maps.round_scores(scores, bits=4)  # 7 steps of 1 on either side of 0
    assert rounded[0, 0].tril().tolist() == [[7.0, 0.0], [-2.0, 4.0]]
    rounded = maps.round_scores(scores, bits=2)  # 1 step of 7
    assert rounded[0, 0].tril().tolist() == [[7.0, 0.0], [0.0, 7.0]]


def test_the_largest_values_come_in_their_order():
    extremes = maps.Extremes()
    extremes.add(torch.tensor([[1.0, -5.0], [2.0, 0.0]]))
    extremes.add(torch.arange(98.0))
    found = extremes.row()
    assert [found["top 1"], found["top 2"], found["top 10"]] == [97.0, 96.0, 88.0]
    assert found["top 100"] == 1.0  # of 102 values, the last two are 0
    assert found["median"] == 0.0  # of the sample, the first value of each tensor


def test_a_map_in_numbers():
    A = torch.tensor([[[1.0, 0.0], [-0.5, 1.5]]])  # one head
    found = maps.describe_map(A)
    expected = {"sum of a row": 1.0, "negative": 0.5 / 3, "on the first token": 0.625}
    assert found == pytest.approx(expected | {"on the token before": 0.25})


@pytest.mark.parametrize("attn", [*ATTENTION, *text.ARMS])
@pytest.mark.parametrize("decay", [False, True])
@torch.no_grad()
def test_maps_and_scores_are_those_of_the_model(attn, decay):
    config = GPTConfig(attn, 2, 4, 32, block_size=32, vocab_size=32, decay=decay, subln=True)
    model = GPT(config).eval()
    tokens = torch.randint(32, (2, 21), generator=torch.Generator().manual_seed(0))
    exact, streams = maps.read(model, tokens, lambda scores: scores)
    assert exact == pytest.approx(model(tokens[:, :-1], tokens[:, 1:])[1].item(), abs=1e-5)
    torch.testing.assert_close(streams[-1], model.read(tokens[:, :-1]))
    other, _ = maps.read(model, tokens, lambda scores: -scores)
    assert abs(other - exact) > 1e-4

    x, rope = model.embed(tokens[:1, :-1])
    for block, of_layer in zip(model.blocks, maps.attention_maps(model, tokens[:1, :-1])):
        *branches, A = of_layer.values()
        x_1 = block.norm1(x)
        torch.testing.assert_close(A, block.attn.map(x_1)[0])
        lam = block.attn.lambda_full()
        if lam is not None:
            torch.testing.assert_close(A, branches[0] - lam * branches[1])
        x = block(x, rope)


def test_the_average_is_even():
    config = GPTConfig("softmax_average", 1, 2, 16, block_size=16, vocab_size=32)
    (of_layer,) = maps.attention_maps(GPT(config), torch.arange(10)[None])
    assert list(of_layer) == ["A", "U", "A - λ U"]
    assert of_layer["U"][:, 3, :4].tolist() == [[0.25] * 4] * 2


def test_a_page_of_a_first_run(tmp_path, capsys):
    """The newest run is found without a flag, and two seeds of an arm are one row of the table."""
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    for seed in (1, 2):
        train.main(f"{TINY} --attn=diff --seed={seed} --out=out/diff{seed}".split())
    maps.main(["--text=one, two"])
    page = (tmp_path / "out/maps/maps.md").read_text()
    assert "| diff | 1 | 1 |" in page and "mean of all heads" in page
    assert "seed 2" in capsys.readouterr().err

    folders = sorted(tmp_path.glob("out/diff*"))
    maps.main(["outliers", "--tokens=64", "--ckpt", *map(str, folders)])
    runs = json.loads((tmp_path / "out/maps/outliers.json").read_text())["runs"]
    logs = [read_log(folder / "log.jsonl")[1] for folder in folders]
    losses = [records[-1]["val_loss"] for records in logs]
    assert [run["exact"] for run in runs] == pytest.approx(losses, abs=1e-4)
    assert {run["arm"] for run in runs} == {"diff"}
    assert all(math.isfinite(run["4 bits"]) for run in runs)


def test_a_name_has_the_settings_in_which_checkpoints_differ():
    for lr in ("1e-3", "2e-3"):
        for seed in (3, 4):
            out = f"out/{lr}/{seed}"
            train.main(f"{TINY} --attn=linear --lr={lr} --seed={seed} --out={out}".split())
    folders = ["out/1e-3/3", "out/1e-3/4", "out/2e-3/3"]
    found = maps.open_checkpoints(folders, "cpu")
    assert [c.arm for c in found] == ["linear lr=0.001"] * 2 + ["linear lr=0.002"]
    assert [c.arm for c in maps.open_checkpoints(folders[:2], "cpu")] == ["linear"] * 2


def test_a_model_that_train_py_has_not_made():
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    model = GPT(GPTConfig("linear", 1, 2, 16, block_size=16, vocab_size=257))
    model.save("ckpt.pt", tokenizer="bytes")
    maps.main(["--ckpt=ckpt.pt", "--text=one, two", "--head=2", "--out=out"])
    assert json.load(open("out/maps.json"))["runs"][0]["arm"] == "linear"
    with pytest.raises(UserError, match="on which text"):
        maps.main(["outliers", "--ckpt=ckpt.pt"])


@pytest.mark.parametrize("flags", ["--ckpt=x", "--text=a", "--layer=9", "--head=9",
                                   "outliers --tokens=3"])
def test_wrong_flags_end_in_a_sentence(flags):
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    train.main(f"{TINY} --out=out/run".split())
    with pytest.raises(UserError) as error:
        maps.main(flags.split())
    assert "\n" not in str(error.value)
