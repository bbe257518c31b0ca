"""
train.py with a val loss for each of two texts. Its flags are those of train.py:

$ python -m lab.gpt2.two_texts --attn=softmax,diff --preset=gpt2 --data=FOLDER

val.bin in FOLDER is textbooks up to the token that border.txt says, and then novels. The log gets
val_textbooks and val_novels, and val_loss is their mean. Beside it, val_losses.npy has the loss of
each val token at the last evaluation, in float16: textbooks, and then novels.
"""
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train
from data import load_sequences
from model import upcast

look_at = train.look_at
means = {}  # of the last evaluation


def evaluate(model, val, config):
    """In place of train.evaluate: the mean loss of the two texts."""
    model.eval()
    border = int(Path(config.data, "border.txt").read_text())
    texts = dict(val_textbooks=val[:border], val_novels=val[border:])
    losses = {name: token_losses(model, text, config) for name, text in texts.items()}
    np.save(Path(config.out, "val_losses.npy"), np.concatenate([*losses.values()]).astype("f2"))
    means.update({name: float(x.mean(dtype="f8")) for name, x in losses.items()})
    model.train()
    return sum(means.values()) / 2


@torch.no_grad()
def token_losses(model, text, config):
    """The losses of a text's tokens, in the order of the text."""
    T, B = config.block_size, config.batch_size
    n = min(config.eval_tokens // 2, len(text) - 1) // (T * B)
    found = []
    for i in range(n):  # whole batches only: a smaller last one would be compiled, too
        tokens = load_sequences(text, range(i * B, (i + 1) * B), T).to(config.device)
        with train.autocast(config):
            logits, _ = model(tokens[:, :-1], tokens[:, 1:])
        loss = F.cross_entropy(upcast(logits).flatten(0, 1), tokens[:, 1:].flatten(),
                               reduction="none")
        found.append(loss.cpu().numpy())
    return np.concatenate(found)


def main():
    train.evaluate = evaluate
    train.look_at = lambda *args: means | look_at(*args)  # it is called after evaluate
    return 1 if math.inf in train.main() else 0


if __name__ == "__main__":
    sys.exit(main())
