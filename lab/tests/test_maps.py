"""The maps of a checkpoint are those that the model uses, and become a picture."""
import pytest
import torch

from lab import maps
from model import ATTENTION, GPT, GPTConfig, Softmax


@pytest.mark.parametrize("attn", ["softmax", "diff", "linear_average", "diff_linear"])
@torch.no_grad()
def test_the_maps_are_those_of_the_model(attn):
    model = GPT(GPTConfig(attn, n_layer=2, n_head=4, n_embd=32, block_size=32, vocab_size=257))
    idx = torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(0))
    x = model.wte(idx)
    for block, (A, lam) in zip(model.blocks, maps.attention_maps(model, idx)):
        h = block.norm1(x)
        y = block.attn(h)
        if block.attn.subln is None:
            by_map = A[None] @ block.attn.project(h)[2]
            by_map = by_map.transpose(1, 2).flatten(2) @ block.attn.out_proj.weight.T
            torch.testing.assert_close(y, by_map)
        torch.testing.assert_close(A[None], block.attn.map(h))
        assert lam == (None if attn == "softmax" else pytest.approx(block.attn.lam(h).item()))
        x = x + y
        x = x + block.mlp(block.norm2(x))


def test_a_lambda_may_be_a_number(monkeypatch):
    class Mine(Softmax):
        lam = 0.5

    monkeypatch.setitem(ATTENTION, "mine", Mine)
    model = GPT(GPTConfig("mine", n_layer=1, n_head=2, n_embd=16, vocab_size=257))
    ((_, lam),) = maps.attention_maps(model, torch.arange(5)[None])
    assert lam == 0.5


def test_the_newest_checkpoint_has_a_picture(tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        maps.main([])
    model = GPT(GPTConfig("diff", n_layer=2, n_head=4, n_embd=32, vocab_size=257))
    (tmp_path / "out").mkdir()
    model.save("out/ckpt.pt", tokenizer="bytes")
    maps.main([])
    assert (tmp_path / "out/maps/maps.png").exists()
    assert maps.readable(" $\n") == r"␣\$↵"  # between two $ would be a formula
    with pytest.raises(SystemExit, match="has 1 tokens"):
        maps.main(["--text=x"])
