"""
Is an attention what it says? train.py asks this before a run, of each arm.

A layer must not see later tokens, or other texts of its batch. A text that comes in parts must be
read as one that comes at once. And attend must be make_map times V.
"""
from dataclasses import replace

import torch

from model import ATTENTION, ModelError, make_rope


@torch.no_grad()
def check_arm(config):
    """ModelError if the arm of this config is not what it says.

    It looks at a first and a last layer, on the CPU and in float64. Their parameters get some noise,
    so that none which starts at 0 hides a difference.
    """
    by_map = replace(config, kernel="map")
    fast = by_map if config.kernel == "map" else replace(config, kernel="sdpa")
    torch.manual_seed(0)
    for depth in {0, config.n_layer - 1}:
        layer = ATTENTION[config.attn](fast, depth).double().eval()
        for p in layer.parameters():
            p.add_(0.05 * torch.randn_like(p))
        has_map = "make_map" in getattr(layer, "forms", ())
        if config.kernel == "map" and not has_map:
            raise ModelError(f"{config.attn} has no make_map of its own, which --kernel=map needs")
        look_at_names(layer, config.attn)
        look_at_outputs(layer, config.attn, fast, by_map if has_map else None)
    if not has_map:
        print(f"{config.attn} is compared with no equation, since it has no make_map")


def look_at_outputs(layer, attn, config, by_map):
    """by_map: the config with which the layer computes by its map, or None if it has no map."""
    T = max(8, min(300, config.block_size))
    x = torch.randn(2, T, config.n_embd, dtype=torch.float64)
    lambda_of(layer, x)  # if that fails, it does so now and not after the first 250 steps
    whole, has_state = read(layer, config, x, T)
    # a leak inside of chunks ends where a chunk does. These two lengths have no common divisor
    others = [("sees later tokens", read(layer, config, x, n)[0]) for n in (T // 2, T // 2 - 1)]
    others.append(("mixes the texts of a batch", read(layer, config, x[:1], T)[0]))
    if has_state:
        others.append(("reads a text in parts in another way: attend, project or its state forgets "
                       "earlier tokens", read(layer, config, x, T - 4, 2, 1, 1)[0]))
    if by_map is not None:
        layer.config = by_map
        others.append(("has an attend that is not make_map times V (--kernel=map trains the map)",
                       read(layer, by_map, x, T)[0]))
    for problem, y in others:
        expected = whole[: y.shape[0], : y.shape[1]]
        if not (y.isfinite().all() and whole.isfinite().all()):
            raise ModelError(f"{attn} makes numbers that are not finite")
        if (y - expected).abs().max() > 1e-4 * whole.abs().max():
            raise ModelError(f"{attn} {problem}")


def look_at_names(layer, attn):
    """A module hidden by a method of the same name: PyTorch would always find the method."""
    for name, _ in layer.named_children():
        if hasattr(type(layer), name):
            raise ModelError(f"{attn} has a module and a method {name}: rename the module")


def read(layer, config, x, *lengths):
    """What a layer makes of x, given in parts of so many tokens, and whether it keeps a state."""
    state, outputs, start = {}, [], 0
    for part in x[:, : sum(lengths)].split(lengths, dim=1):
        rope = make_rope(config, part.shape[1], x.device, x.dtype, start)
        outputs.append(layer(part, rope, state))
        start += part.shape[1]
    return torch.cat(outputs, dim=1), bool(state)


def lambda_of(attn, x):
    """The mean lambda of a layer over its heads and the tokens of x (B, T, C), or None."""
    lam = getattr(attn, "lam", None)
    if callable(lam):  # an arm of your own may also have a number, or a parameter
        lam = lam(x)
    return None if lam is None else torch.as_tensor(lam).float().mean().item()
