"""maps.py: the maps, the outliers and the few bits of trained models."""
import argparse
import json
import math
from pathlib import Path

import pytest
import torch

import train
from common import UserError, read_log
from lab import maps
from model import GPT, GPTConfig

torch.set_num_threads(1)

# a run of a second
TINY = "--preset=toy --device=cpu --n_layer=1 --n_embd=16 --n_head=2 --block_size=16 "
TINY += "--total_batch=32 --steps=2 --eval_tokens=64"


def test_scores_are_rounded_to_equal_steps():
    scores = torch.tensor([[7.0, 99.0], [-2.4, 3.6]])[None, None]  # 99 is in the future
    rounded = maps.round_scores(scores, bits=4)  # 7 steps of 1 on either side of 0
    assert rounded[0, 0].tril().tolist() == [[7.0, 0.0], [-2.0, 4.0]]


def test_a_map_in_numbers():
    A = torch.tensor([[[1.0, 0.0], [-0.5, 1.5]]])  # one head
    found = maps.describe_map(A)
    expected = {"sum of a row": 1.0, "negative": 0.5 / 3, "on the first token": 0.625}
    assert found == pytest.approx(expected | {"on the token before": 0.25})


def test_the_axes_name_words_of_letters_or_tokens():
    pytest.importorskip("matplotlib")
    for tokens, names, places in (
        (list("to be"), ["to", "be"], [0.5, 3.5]),  # bytes: a word's name stands at its middle
        (["un", "like", " $"], ["un", "like", r" \$"], [0, 1, 2]),  # a BPE
    ):
        A = torch.eye(len(tokens))
        ax = maps.draw_maps({"diff": {"A": A + A.roll(1, 0).tril()}}, tokens).axes[0]
        assert [label.get_text() for label in ax.get_xticklabels()] == names
        assert list(ax.get_xticks()) == list(ax.get_yticks()) == places


@pytest.mark.parametrize("attn", ["softmax", "diff", "linear_average", "diff_linear"])
@torch.no_grad()
def test_maps_and_scores_are_those_of_the_model(attn):
    config = GPTConfig(attn, 2, 4, 32, block_size=32, vocab_size=32, decay=True, subln=True)
    model = GPT(config)
    tokens = torch.randint(32, (1, 21), generator=torch.Generator().manual_seed(0))
    idx = tokens[:, :-1]
    exact, largest = maps.read(model, tokens, lambda scores: scores)
    assert exact == pytest.approx(model(idx, tokens[:, 1:])[1].item(), abs=1e-5)
    other, _ = maps.read(model, tokens, lambda scores: -scores)
    assert abs(other - exact) > 1e-4
    x, rope = model.embed(idx)
    residuals = []
    for block, of_layer in zip(model.blocks, maps.attention_maps(model, idx)):
        *branches, A = of_layer.values()
        torch.testing.assert_close(A, block.attn.map(block.norm1(x))[0])
        if branches:
            torch.testing.assert_close(A, branches[0] - block.attn.lambda_full() * branches[1])
        x = block(x, rope)
        residuals.append(x.abs().max().item())
    assert largest == pytest.approx(max(residuals), abs=1e-5)


def test_a_head_less_the_average():
    A = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.0, 0.8]])
    of_layers = [{"A": torch.zeros(2, 3, 3)}, {"A": torch.stack((torch.zeros(3, 3), A))}]
    args = argparse.Namespace(layer=None, head=(1, 1), minus=0.5)
    name, found = maps.choose_maps(args, "softmax", of_layers)
    assert name == "softmax 1.1"
    assert torch.equal(found["A"], A)
    # the average leaves out the first token, so the first row has none
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.2, -0.25, 0.55]])
    torch.testing.assert_close(found["A - 0.5 U"], expected)


def test_pages_of_runs(tmp_path, monkeypatch):
    """The newest run is found without a flag, and seeds of an arm are one row of the table."""
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    for seed in (1, 2):
        train.main(f"{TINY} --attn=diff --seed={seed} --out=out/diff{seed}".split())
    maps.main(["--text=one, two"])
    page = (tmp_path / "out/maps/maps.md").read_text()
    assert "| diff | 1 | 1 |" in page and "mean of all heads" in page

    monkeypatch.setattr(maps, "TOKENS", 64)
    maps.main(["outliers", "--ckpt", "out/diff1", "out/diff2"])
    assert "| diff | 2 |" in (tmp_path / "out/maps/outliers.md").read_text()
    runs = json.loads((tmp_path / "out/maps/outliers.json").read_text())["runs"]
    losses = [read_log(Path(f"out/diff{seed}/log.jsonl"))[1][-1]["val_loss"] for seed in (1, 2)]
    assert [run["exact"] for run in runs] == pytest.approx(losses, abs=1e-4)
    assert all(math.isfinite(run["4 bits"]) and run["largest score"] > 0 for run in runs)

    # a name has the settings in which checkpoints differ
    train.main(f"{TINY} --attn=linear --lr=1e-3 --out=out/other".split())
    found = maps.open_checkpoints(["out/diff1", "out/other"], "cpu")
    assert [arm for _, arm, _ in found] == ["diff lr=0.002", "linear lr=0.001"]
    maps.main(["--head=0.0", "--minus=0.5"])
    assert "| linear | A - 0.5 U | 1 |" in (tmp_path / "out/maps/maps.md").read_text()
    for flags in ("--ckpt=x", "--text=a", "--layer=9", "--head=9.0", "--head=0.9"):
        with pytest.raises(UserError):
            maps.main([flags])


def test_a_model_that_train_py_has_not_made():
    pytest.importorskip("pandas", reason="needs lab/requirements.txt")
    model = GPT(GPTConfig("linear", 1, 2, 16, block_size=16, vocab_size=257))
    model.save("ckpt.pt", tokenizer="bytes")
    maps.main(["--ckpt=ckpt.pt", "--text=one, two", "--out=out"])
    assert json.load(open("out/maps.json"))["runs"][0]["arm"] == "linear"
    with pytest.raises(UserError, match="reads the text"):
        maps.main(["outliers", "--ckpt=ckpt.pt"])
