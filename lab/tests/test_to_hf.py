"""lab/to_hf.py: our models in transformers, and what is refused on the way."""
import json
from pathlib import Path

import pytest
import tiktoken
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from data import EOT  # noqa: E402
from lab import hf  # noqa: E402
from lab.tests.hf_models import BYTES, ODD, TRUST, refusal, save_ours  # noqa: E402
from lab.to_hf import convert_tokenizer  # noqa: E402
from model import ATTENTION  # noqa: E402
from tests.helpers import need_gpt2  # noqa: E402

ARMS = [name for name, arm in ATTENTION.items() if arm.__module__ == "model"]


@pytest.mark.parametrize("attn", ARMS)
def test_a_folder_has_the_bits_and_the_next_tokens_of_its_checkpoint(attn):
    model = save_ours(attn)
    hf.main(["to", "ckpt.pt", "folder"])
    theirs = AutoModelForCausalLM.from_pretrained("folder", **TRUST)
    idx = torch.randint(256, (2, 40))
    assert torch.equal(theirs(idx).logits, model(idx, idx)[0])
    _, expected = model(idx[:, :-1], idx[:, 1:])
    loss = theirs(idx, labels=idx).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in theirs.parameters())

    # the first text has no padding, and the second starts behind 15 tokens of it
    greedy = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)
    mask = torch.ones_like(idx)
    mask[1, :15] = 0
    for use_cache in (True, False):
        made = theirs.generate(idx, attention_mask=mask, use_cache=use_cache, **greedy)
        for text, start in zip(made, (0, 15)):
            ours = torch.cat(list(model.generate(text[None, start:40], 20, temperature=0)))
            assert torch.equal(text[40:], ours)
    with pytest.raises(ValueError, match="padding on the right"):
        theirs(idx, attention_mask=mask, labels=idx)


def test_transformers_knows_the_end_of_a_document_and_the_length():
    save_ours("diff")
    hf.main(["to", "ckpt.pt", "folder"])
    theirs = AutoModelForCausalLM.from_pretrained("folder", **TRUST)
    assert theirs.generation_config.eos_token_id == BYTES.eot_token == 256
    assert (theirs.config.max_position_embeddings, theirs.dtype) == (64, torch.float32)


@pytest.mark.parametrize("attn, kind", [("softmax", "Llama"), ("diff", "DiffLlama")])
def test_a_plain_llama_has_the_same_logits(attn, kind):
    model = save_ours(attn, rope_theta=500.0)
    hf.main(["to", "ckpt.pt", "folder", "--as_llama"])
    theirs = AutoModelForCausalLM.from_pretrained("folder")
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    assert json.loads(Path("folder/config.json").read_text())["rope_theta"] == 500  # transformers 4
    idx = torch.randint(257, (2, 64))
    expected, _ = model.double()(idx, idx)
    assert (theirs.double()(idx).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_tokenizer_gives_the_same_numbers():
    save_ours("linear")
    hf.main(["to", "ckpt.pt", "folder"])
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"in": 256, b" t": 257, b"ing": 258}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
    settings = dict(pat_str=pattern, mergeable_ranks=ranks, special_tokens={EOT: 259})
    small = tiktoken.Encoding("small", **settings)
    theirs = {BYTES: AutoTokenizer.from_pretrained("folder", **TRUST)}
    theirs[small] = convert_tokenizer(small)
    for enc, tokenizer in theirs.items():
        assert tokenizer.encode(ODD) == enc.encode(ODD, allowed_special="all")
        assert tokenizer.decode(tokenizer.encode(ODD)) == ODD
        assert tokenizer.eos_token_id == enc.eot_token


def test_gpt2s_tokenizer_gives_the_same_numbers():
    from pydoc_data.topics import topics

    enc = need_gpt2()
    theirs = convert_tokenizer(enc)
    for text in (ODD, *topics.values()):
        assert theirs.encode(text) == enc.encode(text, allowed_special="all")


def test_what_cannot_go_to_transformers_is_refused():
    assert "there is no checkpoint in none.pt" in refusal("to", "none.pt", "folder")
    save_ours("gate")
    assert "gate is not in model.py" in refusal("to", "ckpt.pt", "folder")
    save_ours("softmax").save("letters.pt", tokenizer="letters:abc")
    assert "single letters" in refusal("to", "letters.pt", "folder")
    assert not Path("folder").exists()
    hf.main(["to", "ckpt.pt", "folder"])
    assert "is there already" in refusal("to", "ckpt.pt", "folder")


@pytest.mark.parametrize("attn, settings", [
    ("linear", {}), ("softmax", dict(subln=1.0)), ("diff", dict(subln=0.0)),
    ("diff", dict(rope_theta=0.0)),
])
def test_what_is_no_llama_is_refused(attn, settings):
    save_ours(attn, **settings)
    assert "goes without --as_llama" in refusal("to", "ckpt.pt", "folder", "--as_llama")


def test_the_harness_gives_our_answers():
    pytest.importorskip("lm_eval", reason="needs lab/requirements.txt")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = save_ours("diff_linear")
    hf.main(["to", "ckpt.pt", "folder"])
    harness = HFLM(pretrained="folder", device="cpu", batch_size=3, **TRUST)

    def ask(kind, *arguments):
        requests = [Instance(kind, {}, arguments=one, idx=0) for one in arguments]
        return getattr(harness, kind)(requests, disable_tqdm=True)

    pairs = [("a b", " c"), ("x", "yz" * 6), ("", "fifteen letters")]  # a batch has padding
    for (context, end), (log_p, _) in zip(pairs, ask("loglikelihood", *pairs)):
        text = torch.tensor([(BYTES.encode(context) or [256]) + BYTES.encode(end)])
        logits, _ = model(text[:, :-1], text[:, 1:])
        loss = F.cross_entropy(logits[0, -len(end) :], text[0, -len(end) :], reduction="sum")
        assert log_p == pytest.approx(-loss.item(), rel=1e-5)
    contexts = ["Once", "Once upon a time"]
    options = dict(until=["\n\n"], max_gen_toks=8)
    made = ask("generate_until", *[(context, options) for context in contexts])
    for context, text in zip(contexts, made):
        idx = torch.tensor([BYTES.encode(context)])
        tokens = torch.cat(list(model.generate(idx, 8, temperature=0))).tolist()
        assert text == BYTES.decode(tokens)


def test_the_harness_runs_a_task_from_a_file():
    pytest.importorskip("lm_eval", reason="needs lab/requirements.txt")
    from lm_eval import simple_evaluate, tasks

    save_ours("diff")
    hf.main(["to", "ckpt.pt", "folder"])
    question = dict(text="A function begins with", choices=[" try", " def"], answer=1)
    Path("manual.jsonl").write_text(json.dumps(question))
    task = dict(
        task="manual", dataset_path="json", test_split="test",
        dataset_kwargs=dict(data_files=dict(test="manual.jsonl"), cache_dir="cache"),
        output_type="multiple_choice", doc_to_text="{{text}}",
        doc_to_choice="choices", doc_to_target="answer",
    )
    Path("manual.yaml").write_text(json.dumps(task))  # JSON is YAML
    # without the index of all the other tasks, which takes half a minute
    manager = tasks.TaskManager(include_path=".", include_defaults=False)
    settings = dict(pretrained="folder", trust_remote_code=True)
    found = simple_evaluate("hf", settings, ["manual"], device="cpu", task_manager=manager)
    assert found["results"]["manual"]["acc,none"] in (0, 1)
