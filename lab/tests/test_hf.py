"""hf.py: what transformers makes of our checkpoints."""
from pathlib import Path

import pytest
import torch

from common import UserError
from data import EOT, get_tokenizer
from lab import hf
from model import GPT, GPTConfig

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers", reason="needs lab/requirements.txt")


def trained(attn, **settings):
    """A model of three layers, each of whose parameters has moved away from its first value."""
    model = GPT(GPTConfig(attn, 3, 6, 48, block_size=64, vocab_size=257, **settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            moved = 0.3 if "lambda" in name or "norm" in name or "subln" in name else 0.1
            p += moved * torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_logits_and_greedy_texts_are_the_same_in_transformers(attn):
    model = trained(attn)
    model.save("ckpt.pt", tokenizer="bytes")
    hf.main(["ckpt.pt", "hub"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained("hub")
    assert type(theirs).__name__ == {"softmax": "Llama", "diff": "DiffLlama"}[attn] + "ForCausalLM"

    idx = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    made = torch.stack(list(model.generate(idx[:, :8], 40, temperature=0)), dim=1)
    greedy = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    their_text = theirs.generate(idx[:, :8], max_new_tokens=40, **greedy)
    assert torch.equal(their_text[:, 8:], made)

    expected, _ = model.double()(idx, idx)
    found = theirs.double()(idx).logits
    # their rotary table is float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_gives_the_same_numbers(name):
    try:
        enc = get_tokenizer(name)
    except UserError as e:  # no network
        pytest.skip(str(e))
    hf.convert_tokenizer(enc).save_pretrained("hub")
    theirs = transformers.AutoTokenizer.from_pretrained("hub")
    text = "Hello  world,\n\n\tthe naïve café costs 1234 €. It's 日本語 🙂\x00\x7f"
    text += Path(hf.__file__).with_name("maps.py").read_text()
    assert theirs.encode(text) == enc.encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.encode(EOT) == [enc.eot_token]


@pytest.mark.parametrize("settings", [
    dict(attn="linear"),
    dict(attn="softmax", decay=True),
    dict(attn="softmax", subln=True),
    dict(attn="diff", subln=False),
])
def test_what_transformers_does_not_have_is_refused(settings):
    with pytest.raises(UserError, match="transformers has no model with"):
        hf.convert(trained(**settings))
