"""lm_eval.py: our checkpoints in the evaluation harness."""
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lab/requirements.txt")

import lm_eval.utils  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from common import UserError  # noqa: E402
from data import get_tokenizer  # noqa: E402
from lab.lm_eval import HarnessModel, load, main  # noqa: E402
from model import ATTENTION, GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TOP = Path(__file__).parents[2]
BLOCK = 16
ENC = get_tokenizer("bytes")


def make_model(attn, block_size=BLOCK):
    """A model with weights so large that it is sure of its next tokens."""
    model = GPT(GPTConfig(attn, 2, 4, 32, block_size=block_size, vocab_size=257))
    with torch.no_grad():
        model.wte.weight.mul_(4)
    return model


def ask(kind, *arguments):
    """A request of the harness."""
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def plain_log_p(model, context, continuation):
    """log p of the continuation and whether it is the greedy one, token by token, with no batch."""
    tokens = list(context)
    total = 0.0
    greedy = True
    for token in continuation:
        logits, _ = model(torch.tensor([tokens]))
        log_p = logits[0, -1].log_softmax(-1)
        total += log_p[token].item()
        greedy &= log_p.argmax().item() == token
        tokens.append(token)
    return total, greedy


@pytest.mark.parametrize("attn", ATTENTION)
def test_log_likelihoods_are_the_plain_sums_of_the_model(attn):
    model = make_model(attn)
    asked = HarnessModel(model, ENC, batch_size=3)
    # of different lengths, so that a batch has padding. The last one fills the block
    pairs = [("a b", " c"), ("", "all of it"), ("x", "yz" * 6), ("", "sixteen letters!")]
    found = asked.loglikelihood([ask("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs, found):
        tokens = list(context.encode()) or [ENC.eot_token]
        expected = plain_log_p(model, tokens, continuation.encode())
        assert log_p == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_a_greedy_continuation_is_called_greedy():
    model = make_model("diff")
    tokens = [5, 6, 7]
    while len(tokens) < 8:
        tokens.append(model(torch.tensor([tokens]))[0].argmax().item())
    (_, greedy), (_, other) = HarnessModel(model, ENC)._loglikelihood_tokens(
        [(None, tokens[:3], tokens[3:]), (None, tokens[:3], [*tokens[3:7], (tokens[7] + 1) % 257])]
    )
    assert greedy and not other


def test_a_long_context_loses_its_beginning():
    model = make_model("softmax")
    context = [*range(40)]
    asked = [(None, context, [41, 42, 43])]
    (log_p, _), = HarnessModel(model, ENC)._loglikelihood_tokens(asked)
    # the model reads as many tokens as a block has, the last one is only predicted
    expected, _ = plain_log_p(model, context[-(BLOCK - 2) :], [41, 42, 43])
    assert log_p == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_long_text_is_read_in_the_windows_of_the_harness(length):
    model = make_model("linear")
    text = ("The quick brown fox jumps over the lazy dog. " * 3)[:length]
    request = ask("loglikelihood_rolling", text)
    (found,) = HarnessModel(model, ENC).loglikelihood_rolling([request], disable_tqdm=True)
    expected = 0.0
    windows = lm_eval.utils.get_rolling_token_windows(
        list(text.encode()), prefix_token=ENC.eot_token, max_seq_len=BLOCK, context_len=1
    )
    for tokens, targets in windows:
        context = tokens[: len(tokens) - len(targets) + 1]
        expected += plain_log_p(model, context, targets)[0]
    assert found == pytest.approx(expected, abs=1e-3)


def continuation(model, **options):
    options = dict(until=["\n\n\n"], max_gen_toks=20) | options
    asked = HarnessModel(model, ENC)
    return asked.generate_until([ask("generate_until", "Once", options)], disable_tqdm=True)[0]


def test_texts_are_made_by_our_sampler_and_end_before_a_stop():
    model = make_model("diff_linear")
    idx = torch.tensor([list(b"Once")])
    made = [token.item() for token in model.generate(idx, 20, temperature=0)]
    text = ENC.decode(made[: made.index(ENC.eot_token)] if ENC.eot_token in made else made)
    assert len(text) > 2
    assert continuation(model) == text
    assert continuation(model, until=[text[2]]) == text[: text.index(text[2])]
    # as vLLM and transformers write "all tokens"
    assert continuation(model, temperature=0, top_k=-1, top_p=0) == text
    for top_k in (0, -1):
        torch.manual_seed(1)
        sampled = continuation(model, temperature=0.7, do_sample=True, top_k=top_k)
        torch.manual_seed(1)
        assert sampled == continuation(model, temperature=0.7, do_sample=True)
    assert continuation(model, temperature=0.7, do_sample=True, top_k=1) == text


def test_a_task_from_a_file_prints_the_table_of_the_harness(tmp_path, capsys, monkeypatch):
    """The task of the page lab/results/harness, with a checkpoint in bf16."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(TOP)  # the task names its file from here
    path = tmp_path / "ckpt.pt"
    make_model("diff", 256).save(path, tokenizer="bytes", step=7, run=dict(dtype="bfloat16"))
    folder = "lab/results/harness"
    main([f"--ckpt={path}", "--tasks=manual", f"--include_path={folder}", "--device=cpu"])
    said = capsys.readouterr().out
    assert "diff, step 7" in said
    assert "|manual|" in said and "|acc " in said
    assert load(path, torch.device("cpu")).autocast.fast_dtype == torch.bfloat16
    with pytest.raises(UserError, match="knows no task nonsense"):
        main([f"--ckpt={path}", "--tasks=nonsense", "--device=cpu"])
