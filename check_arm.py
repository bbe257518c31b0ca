"""Is an attention causal, and does its attend equal its map? train.py asks this before a run."""
import copy
from dataclasses import replace
from itertools import product

import torch

from model import Block, Refused


@torch.no_grad()
def check_arm(config):
    """Refuses the attention of this config if it finds a token that sees later ones, or other texts
    of its batch, or an attend that is not make_map times V.

    It looks at a first and a last layer, in eval mode and as they train, on the CPU, in float64,
    with 300 tokens at most, and not at gradients. The text is cut behind its first token, and
    before its last and its last two. The layers are copies, whose parameters get some
    noise: a gate that starts at 0 would hide an error.
    """
    attn = config.attn
    config = replace(config, kernel="map" if config.kernel == "map" else "sdpa")
    T = max(8, min(300, config.block_size))
    for depth, mode in product((0, config.n_layer - 1), ("", " while it trains")):
        torch.manual_seed(0)
        layer = copy.deepcopy(Block(config, depth).attn).double().train(mode != "")
        for p in layer.parameters():
            p.add_(0.05 * torch.randn_like(p))
        x = torch.randn(2, T, config.n_embd, dtype=torch.float64)
        torch.manual_seed(1)
        y = layer(x)
        if not y.isfinite().all():
            raise Refused(f"{attn} makes numbers that are not finite{mode}")
        # a leak within a chunk is invisible if the text is cut where a chunk ends. The two last
        # cuts are neighbours, so no chunk ends at both
        for n in (1, T - 2, T - 1):
            later = torch.cat((x[:, :n], torch.randn_like(x[:, n:])), dim=1)
            compare(layer, later, y[:, :n], f"{attn} sees later tokens{mode}")
            if not layer.training:  # a dropout would drop something else in a shorter text
                compare(layer, x[:, :n], y[:, :n], f"{attn} sees later tokens")
        other = torch.cat((x[:1], torch.randn_like(x[1:])))
        compare(layer, other, y[:1], f"{attn} mixes the texts of a batch{mode}")
        layer.config = replace(config, kernel="map")
        compare(layer, x, y, f"{attn} has an attend that is not make_map times V{mode} (attend = "
                             "Attention.attend_by_map trains the map)")


def compare(layer, x, expected, problem):
    """Refuses if the layer's output begins with other numbers. Rounding is 1e-14 in float64."""
    torch.manual_seed(1)  # a dropout drops the same each time
    found = layer(x)[: expected.shape[0], : expected.shape[1]]
    if (found - expected).abs().max() > 1e-6 * expected.abs().max():
        raise Refused(problem)
