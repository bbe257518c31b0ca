"""lm_eval.py: our checkpoints in the evaluation harness."""
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lab/requirements.txt")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.utils import get_rolling_token_windows  # noqa: E402

from common import UserError  # noqa: E402
from data import get_tokenizer  # noqa: E402
from lab.lm_eval import HarnessModel, main  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TOP = Path(__file__).parents[2]
BLOCK = 16
ENC = get_tokenizer("bytes")


def make_model(attn, block_size=BLOCK):
    """A model with weights so large that it is sure of its next tokens."""
    model = GPT(GPTConfig(attn, 2, 4, 32, block_size=block_size, vocab_size=257))
    with torch.no_grad():
        model.wte.weight.mul_(4)
    model.extra = dict(tokenizer="bytes", run=dict(dtype="float32"), step=7)
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
        log_p = model(torch.tensor([tokens]))[0][0, -1].log_softmax(-1)
        total += log_p[token].item()
        greedy &= log_p.argmax().item() == token
        tokens.append(token)
    return total, greedy


@pytest.mark.parametrize("attn", ["softmax", "diff_v2", "linear"])
def test_log_likelihoods_are_the_plain_sums_of_the_model(attn):
    model = make_model(attn)
    asked = HarnessModel(model, batch_size=3)
    # of different lengths, so that a batch has padding. The last context is too long for a block
    pairs = [("a b", " c"), ("x", "yz" * 6), ("", "sixteen letters!"), ("too long" * 3, "yes")]
    found = asked.loglikelihood([ask("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs, found):
        tokens = list(context.encode()) or [ENC.eot_token]
        tokens = tokens[-(BLOCK + 1 - len(continuation)) :]  # its beginning is lost
        expected = plain_log_p(model, tokens, continuation.encode())
        assert log_p == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_a_long_text_is_read_in_the_windows_of_the_harness():
    model = make_model("linear")
    text = "The quick brown fox jumps over the lazy dog. "
    request = ask("loglikelihood_rolling", text)
    (found,) = HarnessModel(model).loglikelihood_rolling([request], disable_tqdm=True)
    expected = 0.0
    windows = get_rolling_token_windows(list(text.encode()), ENC.eot_token, BLOCK, context_len=1)
    for tokens, targets in windows:
        context = tokens[: len(tokens) - len(targets) + 1]
        expected += plain_log_p(model, context, targets)[0]
    assert found == pytest.approx(expected, abs=1e-3)


def continuation(model, **options):
    options = dict(until=["\n\n"], max_gen_toks=20) | options
    asked = [ask("generate_until", "Once", options)]
    return HarnessModel(model).generate_until(asked, disable_tqdm=True)[0]


def test_texts_are_made_by_our_sampler_and_end_before_a_stop():
    model = make_model("diff_linear")
    idx = torch.tensor([list(b"Once")])
    text = ENC.decode([token.item() for token in model.generate(idx, 20, temperature=0)])
    assert continuation(model) == text
    assert continuation(model, until=[text[2]]) == text[: text.index(text[2])]
    # as vLLM and transformers write "all tokens"
    assert continuation(model, temperature=0, top_k=-1, top_p=0) == text
    assert continuation(model, temperature=0.7, do_sample=True, top_k=1) == text


def test_a_task_from_a_file_prints_the_table_of_the_harness(tmp_path, capsys, monkeypatch):
    """The task of the page lab/results/harness, in bf16."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(TOP)  # the task names its file from here
    path = tmp_path / "ckpt.pt"
    make_model("diff", 256).save(path, tokenizer="bytes", step=7, run=dict(dtype="bfloat16"))
    folder = "lab/results/harness"
    main([f"--ckpt={path}", "--tasks=manual", f"--include_path={folder}", "--device=cpu"])
    said = capsys.readouterr().out
    assert "diff, step 7" in said and "|manual|" in said
    with pytest.raises(UserError, match="knows no task nonsense"):
        main([f"--ckpt={path}", "--tasks=nonsense", "--device=cpu"])
