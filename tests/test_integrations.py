"""Our checkpoints in the evaluation harness and in transformers."""
import pytest
import torch

needed = "needs requirements-extra.txt"
pytest.importorskip("lm_eval", reason=needed)
transformers = pytest.importorskip("transformers", reason=needed)

import lm_eval.utils  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from data import EOT, get_tokenizer  # noqa: E402
from helpers import TOP  # noqa: E402
from integrations import hf  # noqa: E402
from integrations import lm_eval as harness  # noqa: E402
from model import ATTENTION, GPT, GPTConfig  # noqa: E402

BLOCK = 16


def trained(attn, **settings):
    """A model of three layers, each of whose parameters has moved away from its first value."""
    config = dict(n_layer=3, n_head=4, n_embd=32, block_size=BLOCK, vocab_size=257) | settings
    model = GPT(GPTConfig(attn=attn, **config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            moved = 0.3 if "lambda" in name or "norm" in name or "subln" in name else 0.1
            p += moved * torch.randn(p.shape, generator=generator)
    return model


def save(model, path, dtype="float32"):
    path.parent.mkdir(exist_ok=True)
    model.save(path, tokenizer="bytes", step=7, run=dict(dtype=dtype))


# -----------------------------------------------------------------------------
# the evaluation harness


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
    model = trained(attn)
    enc = get_tokenizer("bytes")
    asked = harness.HarnessModel(model, enc, batch_size=3)
    # of different lengths, so that a batch has padding. The last one fills the block
    pairs = [("a b", " c"), ("", "all of it"), ("x", "yz" * 6), ("", "sixteen letters!")]
    found = asked.loglikelihood([ask("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(pairs, found):
        tokens = list(context.encode()) or [enc.eot_token]
        expected = plain_log_p(model, tokens, continuation.encode())
        assert log_p == pytest.approx(expected[0], abs=1e-4)
        assert greedy == expected[1]


def test_a_greedy_continuation_is_called_greedy():
    model = trained("diff")
    asked = harness.HarnessModel(model, get_tokenizer("bytes"))
    tokens = [5, 6, 7]
    while len(tokens) < 8:
        tokens.append(model(torch.tensor([tokens]))[0].argmax().item())
    (_, greedy), (_, other) = asked._loglikelihood_tokens(
        [(None, tokens[:3], tokens[3:]), (None, tokens[:3], [*tokens[3:7], (tokens[7] + 1) % 257])]
    )
    assert greedy and not other


def test_a_long_context_loses_its_beginning():
    model = trained("softmax")
    asked = harness.HarnessModel(model, get_tokenizer("bytes"))
    context = [*range(40)]
    (log_p, _), = asked._loglikelihood_tokens([(None, context, [41, 42, 43])])
    # the model reads as many tokens as a block has, the last one is only predicted
    expected, _ = plain_log_p(model, context[-(BLOCK - 2) :], [41, 42, 43])
    assert log_p == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_long_text_is_read_in_the_windows_of_the_harness(length):
    model = trained("linear")
    enc = get_tokenizer("bytes")
    text = ("The quick brown fox jumps over the lazy dog. " * 3)[:length]
    asked = harness.HarnessModel(model, enc)
    found, = asked.loglikelihood_rolling([ask("loglikelihood_rolling", text)], disable_tqdm=True)
    expected = 0.0
    windows = lm_eval.utils.get_rolling_token_windows(
        list(text.encode()), prefix_token=enc.eot_token, max_seq_len=BLOCK, context_len=1
    )
    for tokens, targets in windows:
        context = tokens[: len(tokens) - len(targets) + 1]
        expected += plain_log_p(model, context, targets)[0]
    assert found == pytest.approx(expected, abs=1e-4)


def test_texts_are_made_by_our_sampler_and_end_before_a_stop():
    model = trained("diff_linear")
    enc = get_tokenizer("bytes")
    idx = torch.tensor([list(b"Once")])
    made = [token.item() for token in model.generate(idx, 20, temperature=0)]
    text = enc.decode(made[: made.index(enc.eot_token)] if enc.eot_token in made else made)
    assert len(text) > 2
    asked = harness.HarnessModel(model, enc)
    options = dict(until=["\n\n\n"], max_gen_toks=20)
    whole, stopped = asked.generate_until(
        [
            ask("generate_until", "Once", options),
            ask("generate_until", "Once", options | dict(until=[text[2]])),
        ],
        disable_tqdm=True,
    )
    assert whole == text
    assert stopped == text[: text.index(text[2])]


def test_a_task_from_a_file_prints_the_table_of_the_harness(tmp_path, capsys, monkeypatch):
    """The task of the page assets/results/harness, with a checkpoint in bf16."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(TOP)  # the task names its file from here
    path = tmp_path / "run" / "ckpt.pt"
    save(trained("diff", block_size=256), path, dtype="bfloat16")
    folder = "assets/results/harness"
    harness.main([f"--ckpt={path}", "--tasks=manual", f"--include_path={folder}", "--device=cpu"])
    said = capsys.readouterr().out
    assert "diff, step 7" in said
    assert "|manual|" in said and "|acc " in said
    assert harness.load(path, torch.device("cpu")).autocast.fast_dtype == torch.bfloat16


def test_an_unknown_task_is_refused(tmp_path):
    path = tmp_path / "run" / "ckpt.pt"
    save(trained("softmax"), path)
    with pytest.raises(ValueError, match="knows no task nonsense"):
        harness.main([f"--ckpt={path}", "--tasks=nonsense", "--device=cpu"])


# -----------------------------------------------------------------------------
# transformers


@pytest.mark.parametrize("attn", ["softmax", "diff"])
@pytest.mark.parametrize("n_head", [2, 6])
def test_logits_and_greedy_texts_are_the_same_in_transformers(attn, n_head, tmp_path):
    model = trained(attn, n_head=n_head, n_embd=48, block_size=64)
    path = tmp_path / "run" / "ckpt.pt"
    save(model, path)
    hf.main([str(path), str(tmp_path / "hub")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert type(theirs).__name__ == {"softmax": "Llama", "diff": "DiffLlama"}[attn] + "ForCausalLM"

    idx = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    made = torch.stack(list(model.generate(idx[:, :8], 40, temperature=0)), dim=1)
    their_text = theirs.generate(
        idx[:, :8], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(their_text[:, 8:], made)

    ours = model.double()
    expected, _ = ours(idx, idx)
    found = theirs.double()(idx).logits
    # their rotary table is float32. Large logits, so that an error would be large as well
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_gives_the_same_numbers(name, tmp_path):
    try:
        enc = get_tokenizer(name)
    except OSError as e:  # no network
        pytest.skip(f"no gpt2 vocabulary: {e}")
    hf.convert_tokenizer(enc).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello  world,\n\n\tthe naïve café costs 1234 €. It's 日本語 🙂\x00\x7f"
    text += (TOP / "model.py").read_text()
    assert theirs.encode(text) == enc.encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.encode(EOT) == [enc.eot_token]
    assert theirs.eos_token_id == enc.eot_token
    assert len(theirs) == enc.n_vocab


@pytest.mark.parametrize(
    "settings",
    [
        dict(attn="linear"),
        dict(attn="diff_linear"),
        dict(attn="diff_v2"),
        dict(attn="softmax", decay=True),
        dict(attn="softmax", minus_average=True),
        dict(attn="softmax", rope_theta=0.0),
        dict(attn="softmax", subln=True),
        dict(attn="diff", subln=False),
        dict(attn="diff", lambda_init=0.5),
    ],
)
def test_what_transformers_does_not_have_is_refused(settings):
    with pytest.raises(ValueError, match="transformers has no model with"):
        hf.convert(trained(**settings))


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    path = tmp_path / "run" / "ckpt.pt"
    save(trained("softmax"), path)
    with pytest.raises(ValueError, match="is there already"):
        hf.main([str(path), str(tmp_path)])
