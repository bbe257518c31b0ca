"""
A checkpoint as a folder that Hugging Face's transformers loads, with its tokenizer.

$ python -m lab.hf out/gpt2/diff hub_folder

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("hub_folder")
    tokenizer = AutoTokenizer.from_pretrained("hub_folder")

softmax becomes a LlamaForCausalLM, and diff a DiffLlamaForCausalLM. The others have no counterpart.
"""
import argparse

from common import UserError, cli, find_checkpoint, path
from data import EOT, get_tokenizer
from lab import report
from model import GPT, NORM_EPS


def refuse(model):
    """UserError if transformers has no model that computes the same."""
    config = model.config
    diff = config.attn == "diff"
    reasons = {
        f"--attn={config.attn}": config.attn not in ("softmax", "diff"),
        "--decay": config.decay,
        "--rope_theta=0": config.rope_theta == 0,
        "--subln on softmax, or without it on diff": (model.blocks[0].attn.subln is None) == diff,
        "a --lambda_init of one's own": config.lambda_init is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"transformers has no model with {reason}, so this one can't go there")


def to_halves(weight, n_head):
    """Rows for their rotation, which pairs channels i and i + d/2. Ours pairs 2i and 2i + 1."""
    heads = weight.unflatten(0, (n_head, -1, 2))  # (H, d/2, 2, C)
    return heads.transpose(1, 2).flatten(0, 2)


def branches_apart(weight, n_head):
    """Rows with all first branches, or halves of values, first. Ours has each pair side by side."""
    heads = weight.unflatten(0, (n_head // 2, 2, -1))  # (h, 2, d, C)
    return heads.transpose(0, 1).flatten(0, 2)


def convert(model):
    """The transformers model that computes what this GPT computes. UserError if there is none."""
    import transformers

    refuse(model)
    config = model.config
    state = {name: p.float() for name, p in model.state_dict().items()}
    settings = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=len(state["blocks.0.mlp.gate_proj.weight"]),
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        max_position_embeddings=config.block_size,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=config.vocab_size - 1,
        eos_token_id=config.vocab_size - 1,  # <|endoftext|> is our last token
    )
    if config.attn == "diff":
        theirs = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**settings))
    else:
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))

    embedding = state["wte.weight"][: config.vocab_size]
    new = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    new["model.norm.weight"] = state["norm.weight"]
    for i in range(config.n_layer):
        ours = f"blocks.{i}."
        layer = f"model.layers.{i}."
        new[layer + "input_layernorm.weight"] = state[ours + "norm1.weight"]
        new[layer + "post_attention_layernorm.weight"] = state[ours + "norm2.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            new[f"{layer}mlp.{name}.weight"] = state[f"{ours}mlp.{name}.weight"]
        new |= convert_attention(state, ours + "attn.", layer + "self_attn.", config)
    theirs.load_state_dict(new)
    return theirs.eval()


def convert_attention(state, ours, theirs, config):
    """The parameters of one layer of attention, under their names."""
    new = {}
    for name in ("q_proj", "k_proj"):
        weight = to_halves(state[f"{ours}{name}.weight"], config.n_head)
        if config.attn == "diff":
            weight = branches_apart(weight, config.n_head)
        new[f"{theirs}{name}.weight"] = weight
    v = state[ours + "v_proj.weight"]
    out = state[ours + "out_proj.weight"]
    if config.attn == "diff":
        v = branches_apart(v, config.n_head)
        # their norm has no weight: ours goes into the projection behind it
        out = out * state[ours + "subln.weight"].repeat(config.n_head // 2)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            new[theirs + name] = state[ours + name]
    new[theirs + "v_proj.weight"] = v
    new[theirs + "o_proj.weight"] = out
    return new


def convert_tokenizer(enc):
    """A tiktoken encoding as a transformers tokenizer: byte-level BPE, with the same numbers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # GPT-2 writes each byte as a letter. The printable ones stand for themselves, and the letters
    # of the others follow in order, from 256 on
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(letter) for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    of_byte = dict(zip(printable + others, letters))

    def spell(token):
        return "".join(of_byte[byte] for byte in token)

    ranks = enc._mergeable_ranks
    vocab = {spell(token): rank for token, rank in ranks.items()} | {EOT: enc.eot_token}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = last_merge(token, rank, ranks)
            merges.append((spell(left), spell(right)))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(bos_token=EOT, eos_token=EOT, unk_token=EOT)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def last_merge(token, rank, ranks):
    """The two tokens that were merged into this one: what merges of lower rank leave of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], rank))
        parts[i : i + 2] = [pairs[i]]
    return parts


def main(argv=None):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m lab.hf", description=__doc__, formatter_class=style)
    parser.add_argument("ckpt", type=path, help="checkpoint, or the folder of a run")
    parser.add_argument("folder", type=path, help="a new folder for transformers")
    args = parser.parse_args(argv)
    report.need("transformers")
    if args.folder.exists():
        raise UserError(f"{args.folder} is there already: name a new folder")
    file = find_checkpoint(args.ckpt)
    model = GPT.load(file)
    if isinstance(model.extra.get("tokenizer"), dict):
        raise UserError(f"{file} has a tokenizer of its own, and only gpt2 and bytes can go there")
    theirs = convert(model)
    tokenizer = convert_tokenizer(get_tokenizer(model.extra.get("tokenizer")))
    tokenizer.model_max_length = model.config.block_size
    theirs.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{file} is now a {type(theirs).__name__} in {args.folder}")


if __name__ == "__main__":
    cli(main)
