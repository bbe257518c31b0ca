"""
A checkpoint as a folder that Hugging Face's transformers loads, with its tokenizer.

$ python -m lab.hf out/gpt2/diff hub_folder

AutoModelForCausalLM.from_pretrained("hub_folder") makes a LlamaForCausalLM of softmax, and of diff
a DiffLlamaForCausalLM. The other arms have no counterpart. AutoTokenizer reads the folder, too.
"""
import json
from pathlib import Path

from data import EOT, get_tokenizer
from lab.real import bytes_of_letters
from lab.stats import load_checkpoint, parser
from model import NORM_EPS

# parts of a parameter's name in model.py and there, to be replaced in this order
NAMES = {
    "wte.": "model.embed_tokens.", "blocks.": "model.layers.",
    "norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm.",
    "attn.": "self_attn.", "out_proj.": "o_proj.",
}


def convert(model):
    """The transformers model that computes what this GPT computes. SystemExit if there is none."""
    import transformers

    config = model.config
    attn = config.attn
    has_norm = {"softmax": False, "diff": True}.get(attn)  # an output norm
    if has_norm != (config.subln > 0) or config.rope_theta == 0:
        settings = f"{attn}, subln={config.subln:g} and rope_theta={config.rope_theta:g}"
        raise SystemExit(f"transformers has no model with {settings}")
    family = "DiffLlama" if attn == "diff" else "Llama"
    their_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.block_size,
        rms_norm_eps=NORM_EPS,
        rope_theta=config.rope_theta,  # which transformers 5 makes rope_parameters of
        tie_word_embeddings=True,
        bos_token_id=config.vocab_size - 1,
        eos_token_id=config.vocab_size - 1,  # <|endoftext|> is our last token
    )
    theirs = getattr(transformers, f"{family}ForCausalLM")(their_config)
    state = {name: p.float() for name, p in model.state_dict().items()}
    state["wte.weight"] = state["wte.weight"][: config.vocab_size]
    new = {"lm_head.weight": state["wte.weight"], "model.norm.weight": state.pop("norm.weight")}
    for name, w in state.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj"):
            # their rotation turns the channels i and i + d/2, and ours 2i and 2i + 1
            w = w.unflatten(0, (config.n_head, -1, 2)).transpose(1, 2).flatten(0, 2)  # (C, C)
        if attn == "diff":
            if kind in ("q_proj", "k_proj", "v_proj"):
                # theirs has all first maps, or halves of values, and then all second ones
                w = w.unflatten(0, (config.n_head // 2, 2, -1)).transpose(0, 1).flatten(0, 2)
            if kind == "out_proj":  # their norm has no weight: ours goes into this projection
                w = w * state[name.replace("out_proj", "subln")].repeat(config.n_head // 2)
        for ours, part in NAMES.items():
            name = name.replace(ours, part)
        if kind != "subln":
            new[name] = w
    theirs.load_state_dict(new)
    return theirs.eval()


def convert_tokenizer(enc):
    """A tiktoken encoding as a transformers tokenizer: byte-level BPE, with the same numbers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letter_of = {byte: letter for letter, byte in bytes_of_letters().items()}
    ranks = enc._mergeable_ranks
    spelled = {token: "".join(letter_of[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | {EOT: enc.eot_token}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            merges.append(tuple(spelled[part] for part in last_merge(token, ranks)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(bos_token=EOT, eos_token=EOT, unk_token=EOT)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def last_merge(token, ranks):
    """The two tokens that were merged into this one: what merges of lower rank leave of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], ranks[token]))
        parts[i : i + 2] = [pairs[i]]
    return parts


def add(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings, indent=2))


def main(argv=None):
    p = parser("lab.hf", __doc__)
    p.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    p.add_argument("folder", type=Path, help="a new folder for transformers")
    args = p.parse_args(argv)
    if args.folder.exists():
        raise SystemExit(f"{args.folder} is there already: name a new folder")
    file, model = load_checkpoint(args.ckpt)
    name = model.extra["tokenizer"]
    if name not in ("gpt2", "bytes"):
        raise SystemExit(f"{file} has a tokenizer of its own: only gpt2 and bytes can go there")
    theirs = convert(model)
    tokenizer = convert_tokenizer(get_tokenizer(name))
    theirs.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    # transformers 4 reads what version 5 does not write any more
    add(args.folder / "config.json", rope_theta=model.config.rope_theta)
    add(args.folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    print(f"{file} is now a {type(theirs).__name__} in {args.folder}")


if __name__ == "__main__":
    main()
