"""hf.py: what transformers makes of our checkpoints."""
import json
from pathlib import Path

import pytest
import torch

from data import EOT, get_tokenizer
from model import GPT, GPTConfig

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from lab import hf  # noqa: E402


def moved(attn, **settings):
    """A model of three layers, each of whose parameters has moved away from its first value."""
    config = GPTConfig(attn, 3, 4, 32, block_size=64, vocab_size=257, rope_theta=500.0, **settings)
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_logits_are_the_same_in_transformers(attn, tmp_path):
    model = moved(attn)
    model.save(tmp_path / "ckpt.pt", tokenizer="bytes")
    hub = tmp_path / "hub"
    hf.main([str(tmp_path), str(hub)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub)
    assert type(theirs).__name__ == {"softmax": "Llama", "diff": "DiffLlama"}[attn] + "ForCausalLM"
    # where transformers 4 looks for it. Version 5 has it in rope_parameters
    assert json.loads((hub / "config.json").read_text())["rope_theta"] == 500

    idx = torch.randint(257, (2, 64), generator=torch.Generator().manual_seed(1))
    expected, _ = model.double()(idx, idx)
    found = theirs.double()(idx).logits
    # their rotary table is float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    with pytest.raises(SystemExit, match="is there already"):
        hf.main([str(tmp_path), str(hub)])


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_tokenizer_gives_the_same_numbers(name, tmp_path):
    try:
        enc = get_tokenizer(name)
    except OSError as e:  # no network
        pytest.skip(str(e))
    hf.convert_tokenizer(enc).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hello  world,\n\n\tthe naïve café costs 1234 €. It's 日本語 🙂\x00\x7f"
    text += Path(hf.__file__).read_text().replace(EOT, "")
    assert theirs.encode(text) == enc.encode(text)
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.encode(EOT) == [enc.eot_token]


@pytest.mark.parametrize("attn, subln", [("linear", 0), ("softmax", 1), ("diff", 0)])
def test_what_transformers_does_not_have_is_refused(attn, subln):
    with pytest.raises(SystemExit, match=f"transformers has no model with {attn}"):
        hf.convert(moved(attn, subln=subln))
