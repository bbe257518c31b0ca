"""The averages of lab/another.py are those that it names."""
import torch

from lab import another, crowd
from lab.tests.test_crowd import tokenizer
from model import GPT, GPTConfig


def test_the_own_average_is_that_of_lab_crowd_and_another_list_has_the_partner_s():
    words = tokenizer()
    vocab_size = len(words["tokens"]) + 1
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=vocab_size)
    GPT(config).save("ckpt.pt", tokenizer=words)
    model, enc = crowd.load("ckpt.pt")
    pools = crowd.find_words(enc)
    batch = crowd.make_batch(enc, pools, range(6), pairs=12, crowd=4)
    chosen = [[0, 1], [1, 0], [1, 3]]
    heads = {0: [1], 1: [0, 3]}
    plain = another.answer(model, batch, heads, "none", {})
    own = another.answer(model, batch, heads, "own", {})
    crowd.set_change(model, chosen, "average", another.STRENGTH, True)
    expected = crowd.answer(model, batch)
    assert own["logp"] == expected["logp"] != plain["logp"]
    crowd.set_change(model, [], "none", 0, None)

    # a list beside its own copy has the average that it had
    twice = tuple(torch.cat((part, part)) for part in batch[:3]) + (batch[3],)
    assert another.answer(model, twice, heads, "another", {})["logp"] == own["logp"]
    # beside others it has another one
    shifted = tuple(torch.cat((part, part.roll(1, 0))) for part in batch[:3]) + (batch[3],)
    assert another.answer(model, shifted, heads, "another", {})["logp"] != own["logp"]


def test_the_fixed_vectors_are_means_over_lists_and_places():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=40))
    idx = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(0))
    fixed = another.fixed_vectors(model, (idx,), {0: [1]})[0]
    layer = model.blocks[0].attn
    v = layer.project(model.blocks[0].norm1(model.wte(idx)))[2][:, 1]  # (B, T, d)
    assert fixed.shape == (1, 1, 8)
    assert torch.allclose(fixed[0, 0], v[:, 1:].mean((0, 1)), atol=0.02)  # those are in bfloat16
    u = another.running_mean(v)
    assert torch.allclose(u[:, 5], v[:, 1:6].mean(1), atol=1e-6)
    assert u[:, 0].abs().max() == 0
