"""
Write port/vectors.npz: numbers to compare a port with that is not written in PyTorch.

    python -m port.vectors

port/vectors.md says what is in it. The values are those of equations.py, which knows nothing of
model.py; the gradients are model.py's, in float64, where its output equals that of equations.py.
"""
import argparse
import copy
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import equations
from model import ATTENTION, GPTConfig
from port import paper, wrong

FILE = Path(__file__).parent / "vectors.npz"
B, T, C = 2, 4, 16
PREFIX = 2  # tokens
# numbers are rounded to multiples of 1 / STEPS: what is finer is noise, and makes the file larger
STEPS = 2**42
CASES = {  # <arm>_<depth>
    "diff_0": dict(attn="diff", n_head=4, depth=0),
    "diff_3": dict(attn="diff", n_head=4, depth=3),
    "diff_grouped_3": dict(attn="diff", n_head=8, depth=3, kv=2),
    "diff_v2_0": dict(attn="diff_v2", n_head=4, depth=0),
    "linear_0": dict(attn="linear", n_head=4, depth=0),
    "diff_linear_3": dict(attn="diff_linear", n_head=4, depth=3),
    "softmax_average_0": dict(attn="softmax_average", n_head=4, depth=0),
}
# outputs of diff_3 with one mistake each: who has such an output has this mistake. maps in blocks
# and rotary by halves are none, but another order of the weights
WRONG_STEPS = {
    "mask off by one": dict(maps=wrong.mask_off_by_one),
    "maps in blocks": dict(split=wrong.maps_in_blocks),
    "no rotary": dict(turn=wrong.no_turn),
    "rotary by halves": dict(turn=wrong.turn_by_halves),
    "values tiled": dict(group_values=wrong.tile_over_maps),
    "no norm": dict(norm=wrong.no_norm),
    "norm over time": dict(norm=wrong.norm_over_time),
    "norm over all heads": dict(norm=wrong.norm_over_heads),
}
WRONG_NUMBERS = {
    "no scale": dict(scale=1.0),
    "scale sqrt(2d)": dict(scale=math.sqrt(2 * C // 4)),
    "l counted from 1": dict(lambda_init=paper.lambda_init_of(4)),
    "no factor": dict(factor=1.0),
}


def numbers(name, *shape, size):
    """Between -size and size, in steps of 1/16: the same on every machine, and small in a file."""
    draw = random.Random(name)
    count = int(np.prod(shape))
    steps = [round(16 * size * (2 * draw.random() - 1)) for _ in range(count)]
    return np.array(steps).reshape(shape) / 16


def weights_of(case, attn, n_head, depth, kv=None):
    """{name: array} in float64. The lambda vectors and the norm's weight are nowhere equal."""
    layer = ATTENTION[attn](GPTConfig(attn=attn, n_head=n_head, n_embd=C), depth)
    weight = {}
    for name, p in layer.named_parameters():
        shape = list(p.shape)
        if kv and name in ("k_proj.weight", "v_proj.weight"):
            shape[0] = kv * 2 * C // n_head
        weight[name] = numbers(f"{case}/{name}", *shape, size=0.5)
        if name == "subln.weight":
            weight[name] += 1
    return weight


def values_of(weight, attn, n_head, depth):
    """{name: array}: all but the weights and gradients. Grouped k and v are already repeated."""
    text = numbers("text", B, T + 1, C, size=2)
    x = text[:, :T]
    found = equations.layer(attn, weight, x, n_head, depth)
    longer = equations.layer(attn, weight, text, n_head, depth)
    straight = equations.layer(attn, weight, x, n_head, depth, theta=0)
    found |= {
        "x": x,
        "y_without_rotary": straight["y"],
        "y_prefix": equations.layer(attn, weight, x[:, :PREFIX], n_head, depth)["y"],
        "x_next": text[:, T:],  # one more token
        "y_next": longer["y"][:, T:],
    }
    v = found["v"]
    if "linear" in attn:  # the state behind x, for each map: S, and Z, which is not rotated
        k = equations.elu_plus_1(equations.split(x @ weight["k_proj.weight"].T, C // n_head))
        v = v.repeat(k.shape[1] // v.shape[1], axis=1)
        found |= {"state_S": found["k"].swapaxes(2, 3) @ v, "state_Z": k.sum(2)}
    return found


def gradients_of(weight, x, y, attn, n_head, depth, kv=None):
    """{name: array} of the loss (y * dy).sum()."""
    layer = ATTENTION[attn](GPTConfig(attn=attn, n_head=n_head, n_embd=C), depth).double()
    leaves = {name: torch.tensor(w, requires_grad=True) for name, w in weight.items()}
    full = dict(leaves)
    if kv:  # model.py knows no groups: give each head its copy of the keys and values
        for name in ("k_proj.weight", "v_proj.weight"):
            rows = leaves[name].unflatten(0, (kv, -1))
            full[name] = rows.repeat_interleave(n_head // 2 // kv, dim=0).flatten(0, 1)
    x = torch.tensor(x, requires_grad=True)
    dy = numbers("dy", B, T, C, size=1)
    output = torch.func.functional_call(layer, full, (x,))
    assert np.abs(output.detach().numpy() - y).max() < 1e-11 * np.abs(y).max()
    inputs = [x, *leaves.values()]
    gradients = torch.autograd.grad((output * torch.tensor(dy)).sum(), inputs)
    names = ["grad_x", *[f"grad_{name}" for name in leaves]]
    return {"dy": dy} | {name: g.numpy() for name, g in zip(names, gradients)}


def outputs_with_mistakes(weight, x, n_head, depth):
    """{mistake: y} of the first version."""
    weight = {name: torch.tensor(w) for name, w in weight.items()}
    lambda_init = paper.lambda_init_of(depth)
    w = paper.Weights(
        version=1,
        h=n_head // 2,
        q=weight["q_proj.weight"],
        k=weight["k_proj.weight"],
        v=weight["v_proj.weight"],
        o=weight["out_proj.weight"],
        lambda_q1=weight["lambda_q1"],
        lambda_k1=weight["lambda_k1"],
        lambda_q2=weight["lambda_q2"],
        lambda_k2=weight["lambda_k2"],
        lambda_init=lambda_init,
        factor=1 - lambda_init,
    )
    w.norm = weight["subln.weight"].expand(w.h, 1, w.d_v)
    x = torch.tensor(x)
    found = {name: paper.layer(x, w, replace(paper.PAPER, **steps))
             for name, steps in WRONG_STEPS.items()}
    for name, settings in WRONG_NUMBERS.items():
        changed = copy.copy(w)
        for number, value in settings.items():
            setattr(changed, number, value)
        if "lambda_init" in settings:
            changed.factor = 1 - changed.lambda_init
        found[name] = paper.layer(x, changed, paper.PAPER)
    return {name: y.numpy() for name, y in found.items()}


def by_eye():
    """Two tokens and two channels, whose numbers are those on the page."""
    weight = {
        "q_proj.weight": np.array([[1.0, 1], [1, 1]]),
        "k_proj.weight": np.array([[0, math.log(3)], [0, 0]]),
        "v_proj.weight": np.array([[1.0, 1], [1, 7]]),
        "out_proj.weight": np.array([[0.0, 1], [1, 0]]),
        "lambda_q1": np.array([math.log(2)]),
        "lambda_k1": np.array([1.0]),
        "lambda_q2": np.array([math.log(1.7)]),
        "lambda_k2": np.array([1.0]),
        "subln.weight": np.array([1.0, 2]),
    }
    x = np.array([[[1.0, 0], [0, 1]]])
    return weight | {"x": x} | equations.layer("diff", weight, x, n_head=2, depth=0, theta=0)


def make():
    """{key: array} of the whole file."""
    arrays = {f"by_eye_0/{name}": value for name, value in by_eye().items()}
    for case, settings in CASES.items():
        weight = weights_of(case, **settings)
        sizes = {name: settings[name] for name in ("attn", "n_head", "depth")}
        found = weight | values_of(weight, **sizes)
        found |= gradients_of(weight, found["x"], found["y"], **settings)
        if case == "diff_3":
            outputs = outputs_with_mistakes(weight, found["x"], settings["n_head"], depth=3)
            found |= {f"wrong/{name}": y for name, y in outputs.items()}
        arrays |= {f"{case}/{name}": value for name, value in found.items()}
    return {key: np.round(value * STEPS) / STEPS for key, value in arrays.items()}


def main(argv):
    """Write the file, and print its size."""
    parser = argparse.ArgumentParser(prog="python -m port.vectors", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)  # it takes no arguments, and knows --help
    np.savez_compressed(FILE, **make())
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
