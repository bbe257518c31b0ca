"""The maps of a checkpoint are those that the model uses, and become a picture."""
from pathlib import Path

import pytest
import torch

from lab import maps
from model import GPT, GPTConfig, Refused


@pytest.mark.parametrize("attn", ["softmax", "diff", "softmax_average", "diff_linear"])
@torch.no_grad()
def test_the_maps_are_those_of_the_model(attn):
    model = GPT(GPTConfig(attn, n_layer=2, n_head=4, n_embd=32, block_size=32, vocab_size=257))
    idx = torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(0))
    x = model.wte(idx)
    for block, (A, lam) in zip(model.blocks, maps.attention_maps(model, idx)):
        h = block.norm1(x)
        y = block.attn(h)
        if not hasattr(block.attn, "subln"):
            by_map = A[None] @ block.attn.project(h)[2]
            by_map = by_map.transpose(1, 2).flatten(2) @ block.attn.out_proj.weight.T
            torch.testing.assert_close(y, by_map)
        torch.testing.assert_close(A[None], block.attn.map(h))
        assert lam == (None if attn == "softmax" else pytest.approx(block.attn.lam(h).item()))
        x = x + y
        x = x + block.mlp(block.norm2(x))


def test_the_newest_checkpoint_has_a_picture():
    with pytest.raises(Refused, match="no checkpoint"):
        maps.main([])
    model = GPT(GPTConfig("diff", n_layer=2, n_head=4, n_embd=32, vocab_size=257))
    Path("out").mkdir()
    model.save("out/ckpt.pt", tokenizer="bytes")
    maps.main([])
    assert Path("out/maps/maps.png").exists()
    assert maps.readable(" $\n") == r"␣\$↵"  # between two $ would be a formula
    with pytest.raises(Refused, match="has 1 tokens"):
        maps.main(["--text=x"])
    model.save("out/ckpt.pt")
    with pytest.raises(Refused, match="none lies beside it"):
        maps.main([])


def test_titles_are_free():
    """None of them lies on a panel, or outside of the figure."""
    model = GPT(GPTConfig("softmax", n_layer=4, n_head=4, n_embd=32, vocab_size=257))
    found = maps.attention_maps(model, torch.arange(18)[None])
    figure = maps.draw(found, list("to be or not to be"))
    figure.savefig("maps.png")
    panels = [ax.get_tightbbox() for ax in figure.axes[:-1]]
    for i, one in enumerate(panels):
        assert one.y1 <= figure.bbox.y1 and one.x0 >= 0
        assert not any(one.overlaps(other) for other in panels[:i])
