"""Checkpoints of train.py and of lab/hf.py, and their tokenizers. What fails is one sentence."""
from data import get_tokenizer
from lab import arms
from model import GPT
from sample import find_checkpoint


def load_checkpoint(path, device="cpu"):
    """(file, the GPT in it) of a file, a run's folder, or None: the newest below out/."""
    arms.register()
    try:
        file = find_checkpoint(path)
        return file, GPT.load(file, device)
    except (OSError, ValueError) as e:
        raise SystemExit(str(e)) from None


def load_tokenizer(file, model):
    """The tokenizer of a checkpoint: one of data.py, or one of transformers, kept beside it."""
    if "tokenizer" in model.extra:
        try:
            return get_tokenizer(model.extra["tokenizer"])
        except (OSError, ValueError) as e:
            raise SystemExit(str(e)) from None
    if not (file.parent / "tokenizer.json").exists():
        raise SystemExit(f"{file} does not name its tokenizer, and none lies beside it")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(file.parent)
    except Exception as e:  # a file can be damaged in many ways
        raise SystemExit(f"the tokenizer of {file} can't be read: {e!r:.300}") from e
