"""
A checkpoint as a folder of transformers: the verb `to` of lab/hf.py.

It also has what both directions share: the names of the two libraries, and the order of the rows in
their weights.
"""
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import tiktoken
import torch

import model as model_py
from data import EOT
from lab.checkpoints import load_checkpoint, load_tokenizer
from model import ATTENTION, NORM_EPS, ModelError

OUR_ARMS = {"llama": "softmax", "diffllama": "diff"}  # by the model_type of transformers

# settings: their names in model.py and in transformers
THEIR_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
# parts of a parameter's name, to be replaced in this order
PARTS = {
    "wte.": "embed_tokens.",
    "blocks.": "layers.",
    "norm1.": "input_layernorm.",
    "norm2.": "post_attention_layernorm.",
    "attn.": "self_attn.",
    "out_proj.": "o_proj.",
}


def their_name(name):
    """What transformers calls our parameter of this name."""
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return f"model.{name}"


def their_rows(name, config):
    """Which rows of their parameter are ours, in our order: ours = theirs[rows].

    Their rotation turns channel i of a head with i + d/2, and ours 2i with 2i + 1. DiffLlama has
    the first maps of all heads and then the second ones, and the halves of the values in the same
    way. In ours the two are neighbours.
    """
    kind = name.split(".")[-2]  # like "q_proj"
    if kind not in ("q_proj", "k_proj", "v_proj"):
        return slice(None)
    rows = torch.arange(config.n_embd).unflatten(0, (config.n_head, -1))  # (H, d)
    if kind != "v_proj":
        rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    if config.attn == "diff":
        rows = rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
    return rows.flatten()


# ---- the model

def write_with_code(model, ids, folder):
    """Writes the model as it is, with its code. ids: those of the special tokens."""
    from safetensors.torch import save_file

    if ATTENTION[model.config.attn].__module__ != "model":
        raise ModelError(f"{model.config.attn} is not in model.py, which is all that the folder "
                         "would have of our code: put its class there")
    config = dict(
        model_type="diffattn",
        architectures=["DiffAttnForCausalLM"],
        auto_map=dict(
            AutoConfig="modeling_diffattn.DiffAttnConfig",
            AutoModelForCausalLM="modeling_diffattn.DiffAttnForCausalLM",
        ),
        gpt=asdict(model.config),
        dtype="float32",
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | ids, indent=2))
    weights = {f"gpt.{name}": w.contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))
    shutil.copy(model_py.__file__, folder)
    shutil.copy(Path(__file__).with_name("modeling_diffattn.py"), folder)


def make_llama(model, ids):
    """The Llama or DiffLlama that computes what this GPT computes. ModelError if there is none."""
    import transformers

    config = model.config
    arm = (config.attn, model.blocks[0].attn.subln is not None)
    if arm not in (("softmax", False), ("diff", True)) or config.rope_theta == 0:
        raise ModelError("only softmax without a norm is a Llama, and diff with its norm a "
                         "DiffLlama, both with a rotation: this one goes without --as_llama")
    family = "DiffLlama" if config.attn == "diff" else "Llama"
    their_config = getattr(transformers, f"{family}Config")(
        **{theirs: getattr(config, ours) for ours, theirs in THEIR_NAMES.items()},
        intermediate_size=model.blocks[0].mlp.gate_proj.out_features,
        rms_norm_eps=NORM_EPS,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
        tie_word_embeddings=True,
        **ids,
    )
    their_config.rope_theta = config.rope_theta  # where transformers 4 looks for it
    theirs = getattr(transformers, f"{family}ForCausalLM")(their_config)
    ours = model.state_dict()
    weights = theirs.state_dict()  # writing into these changes the model
    for name, w in ours.items():
        if "subln" in name:
            continue
        if "out_proj" in name and config.attn == "diff":  # their norm has no weight
            w = w * ours[name.replace("out_proj", "subln")].repeat(config.n_head // 2)
        their = weights[their_name(name)]
        their[their_rows(name, config)] = w[: len(their)]  # our embedding has some more rows
    return theirs


# ---- the tokenizer

def their_tokenizer(file, model):
    """The tokenizer of a checkpoint as one of transformers, with the same numbers."""
    tokenizer = load_tokenizer(file, model)
    if "tokenizer" not in model.extra:  # it is one of transformers
        return tokenizer
    if not isinstance(tokenizer, tiktoken.Encoding):
        raise ValueError("its tokenizer has single letters alone: transformers has no such one")
    return convert_tokenizer(tokenizer)


def convert_tokenizer(tokenizer):
    """A tiktoken encoding as a tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # "bytes" merges nothing, so it does not matter how it cuts a text
    pattern = r"\s+|\S+" if tokenizer.name == "bytes" else tokenizer._pat_str
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[EOT])
    converter.load_tiktoken_bpe = lambda path: tokenizer._mergeable_ranks  # there is no file
    special = dict.fromkeys(["bos_token", "eos_token", "unk_token", "pad_token"], EOT)
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), **special)


# ---- the folder

def to_transformers(ckpt, folder, as_llama=False):
    """Writes a folder for transformers. as_llama: as a Llama or DiffLlama, without our code.

    ValueError if it can't, or if the folder is there.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a new folder")
    file, model = load_checkpoint(ckpt)
    tokenizer = their_tokenizer(file, model)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    if as_llama:
        make_llama(model, ids).save_pretrained(folder)
    else:
        write_with_code(model, ids, folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    text = path.read_text("utf-8")
    # the old name of this class is the one that transformers 4 knows, too
    path.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    print(f"{file} -> {folder}")
