import pytest
import torch

from check_arm import check_arm
from lab.pretrained import ARMS, give, make_optimizer, training_step
from model import GPT, GPTConfig

SIZE = dict(n_layer=2, n_head=3, n_embd=48, mlp_width=64, block_size=32, vocab_size=64)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_starts_as_the_model_and_its_lambda_leaves_0(arm):
    model = GPT(GPTConfig(**SIZE))
    tuned = give(model, arm)
    tokens = torch.randint(64, (2, 33))
    before = model(tokens[:, :-1], tokens[:, 1:])[0]
    assert torch.equal(tuned(tokens[:, :-1], tokens[:, 1:])[0], before)

    optimizer = make_optimizer(tuned, 1e-4, 1e-2)
    training_step(tuned, optimizer, tokens, step=0)
    training_step(tuned, optimizer, tokens, step=1)
    for name, p in tuned.named_parameters():
        assert "lambda_" not in name or p.abs().sum() > 0


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_causal(arm):
    check_arm(GPTConfig(**SIZE, attn=f"pretrained_{arm}"))
