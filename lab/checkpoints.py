"""Checkpoints of train.py and of lab/hf.py, and their tokenizers."""
from data import get_tokenizer
from lab import arms
from model import GPT
from sample import find_checkpoint


def load_checkpoint(path, device="cpu"):
    """(file, the GPT in it) of a file, a run's folder, or None: the newest below out/.

    OSError or ValueError if there is none, or if it is damaged.
    """
    arms.register()
    file = find_checkpoint(path)
    return file, GPT.load(file, device)


def load_tokenizer(file, model):
    """The tokenizer of a checkpoint: one of data.py, or one of transformers, kept beside it.

    OSError or ValueError if there is none, or if it is damaged.
    """
    if "tokenizer" in model.extra:
        return get_tokenizer(model.extra["tokenizer"])
    if not (file.parent / "tokenizer.json").exists():
        raise ValueError(f"{file} does not name its tokenizer, and none lies beside it")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(file.parent)
    except Exception as e:  # a file can be damaged in many ways
        raise ValueError(f"the tokenizer of {file} can't be read: {e!r:.300}") from e
