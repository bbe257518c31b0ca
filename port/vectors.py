"""
Write vectors.npz: numbers to compare a port with that is not written in PyTorch. See vectors.md.

    python -m port.vectors

They come from tests/equations.py, the papers' equations in numpy, which knows nothing of model.py.
"""
from pathlib import Path

import numpy as np

from model import ATTENTION, GPTConfig
from tests import equations

FILE = Path(__file__).parent / "vectors.npz"
C = 16
CASES = {  # name: arm, n_head, depth, heads that have keys and values (None: all)
    "diff_0": ("diff", 4, 0, None),
    "diff_3": ("diff", 4, 3, None),
    "diff_grouped_3": ("diff", 8, 3, 2),
    "diff_v2_0": ("diff_v2", 4, 0, None),
}


def make():
    """{key: array} of the whole file."""
    random = np.random.RandomState(0)  # whose numbers are the same in every version of numpy
    found = {}
    for case, (attn, n_head, depth, kv) in CASES.items():
        weight = {}
        layer = ATTENTION[attn](GPTConfig(attn, n_head=n_head, n_embd=C), depth)
        for name, p in layer.named_parameters():
            shape = list(p.shape)
            if kv and name in ("k_proj.weight", "v_proj.weight"):
                shape[0] = kv * 2 * C // n_head
            weight[name] = random.normal(size=shape) / 4
            if name == "subln.weight":
                weight[name] += 1
        x = random.normal(size=(2, 4, C))
        stages = equations.layer(attn, weight, x, n_head, depth)
        prefix = equations.layer(attn, weight, x[:, :2], n_head, depth)["y"]
        for name, array in (weight | stages | dict(x=x, y_prefix=prefix)).items():
            found[f"{case}/{name}"] = array
    return found


if __name__ == "__main__":
    np.savez_compressed(FILE, **make())
