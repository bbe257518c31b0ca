"""
Is an arm causal, and does its attend equal its map? train.py asks this before a run.

A layer must not see later tokens, or other texts of its batch. A text that comes in parts must be
read as one that comes at once. And attend must be make_map times V.
"""
from dataclasses import replace

import torch

from model import ATTENTION, Attention, ModelError, make_rope


def is_own(attn):
    """Whether an arm is your own, and not one of model.py."""
    return ATTENTION[attn].__module__ != "model"


@torch.no_grad()
def check_arm(config):
    """Remarks on the arm of this config, a list of sentences. ModelError if it has a fault.

    It looks at a first and a last layer, on the CPU and in float64. Their parameters get some
    noise, or a gate that starts at 0 would hide an error. It reads texts of at most 300 tokens, and
    of 1,024 if the arm is your own: what is longer, like a window of 2,000, it does not see.
    """
    attn = config.attn
    # a run with --kernel=map trains the map
    asked = config.kernel
    config = replace(config, kernel="map" if asked == "map" else "sdpa")
    T = max(8, min(1024 if is_own(attn) else 300, config.block_size))
    torch.manual_seed(0)
    for depth in (0, config.n_layer - 1):
        layer = ATTENTION[attn](config, depth).double().eval()
        for p in layer.parameters():
            p.add_(0.05 * torch.randn_like(p))
        has_map = "make_map" in getattr(layer, "forms", ())
        if asked == "map" and not has_map:
            raise ModelError(f"{attn} has no make_map of its own, which --kernel=map needs")
        check_names(layer, attn)
        x = torch.randn(2, T, config.n_embd, dtype=torch.float64)
        check_outputs(layer, attn, x, config, has_map)
        check_training(layer, attn, x, config)
    remarks = []  # on the last layer
    if not has_map:
        remarks.append(f"{attn} is compared with no equation, since it has no make_map")
    elif type(layer).forward is not Attention.forward:
        remarks.append(f"{attn} has a forward of its own: its map alone does not say what it is")
    if not reads_its_lam(layer, x[:, :8], config):
        remarks.append(f"{attn} has a lam that nothing reads: it is only logged")
    unused = parameters_without_gradient(layer, x, config)
    if unused:
        remarks.append(f"{attn} has parameters that get no gradient: {', '.join(unused)}")
    return remarks


def check_names(layer, attn):
    """A module hidden by a method of the same name: PyTorch would always find the method."""
    for name, _ in layer.named_children():
        if hasattr(type(layer), name):
            raise ModelError(f"{attn} has a module and a method {name}: rename the module")


def check_outputs(layer, attn, x, config, has_map):
    """The output for a whole text, against those for a shorter one, for one alone, and in parts.

    has_map: whether it is also compared with the output that the map gives.
    """
    T = x.shape[1]
    lambda_of(layer, x)  # a lam that fails should fail here, and not at the first evaluation
    whole, has_state = read(layer, config, x, T)
    # a leak within a chunk is invisible if the text is cut where a chunk ends. So it is cut twice,
    # at lengths without a common divisor
    others = [("sees later tokens", read(layer, config, x, n)[0]) for n in (T // 2, T // 2 - 1)]
    others.append(("mixes the texts of a batch", read(layer, config, x[:1], T)[0]))
    if has_state:  # many tokens, a few after them, and one at a time, as generate has them
        others.append(("reads a text in parts in another way: attend, project or its state forgets "
                       "earlier tokens", read(layer, config, x, T - 4, 2, 1, 1)[0]))
    if has_map:
        layer.config = replace(config, kernel="map")  # now forward takes make_map
        others.append(("has an attend that is not make_map times V (--kernel=map trains the map)",
                       read(layer, config, x, T)[0]))
        layer.config = config
    for problem, y in others:
        compare(attn, problem, y, whole[: y.shape[0], : y.shape[1]])


def check_training(layer, attn, x, config):
    """As it trains, too, an earlier output must not move if later tokens change."""
    half = x.shape[1] // 2 - 1  # mostly no place where a chunk ends
    changed = torch.cat((x[:, :half], torch.randn_like(x[:, half:])), dim=1)
    layer.train()
    outputs = []
    for text in (x, changed):
        torch.manual_seed(0)  # a dropout drops the same in both
        rope = make_rope(config, x.shape[1], x.device, x.dtype)
        outputs.append(layer(text, rope, None)[:, :half])  # without a state, as in training
    layer.eval()
    compare(attn, "sees later tokens while it trains", *outputs)


def compare(attn, problem, y, expected):
    if not (y.isfinite().all() and expected.isfinite().all()):
        raise ModelError(f"{attn} makes numbers that are not finite")
    # in float64 our arms agree to 1e-14, and an arm that computes in float32 to about 1e-7
    if (y - expected).abs().max() > 1e-6 * expected.abs().max():
        raise ModelError(f"{attn} {problem}")


def reads_its_lam(layer, x, config):
    """False if a layer has a method lam, and computes its output without it."""
    lam = getattr(layer, "lam", None)
    if not callable(lam) or isinstance(lam, torch.nn.Module):
        return True  # a module that nothing reads has parameters that get no gradient
    calls = []

    def counted(tokens):
        calls.append(tokens.shape)
        return lam(tokens)

    layer.lam = counted
    read(layer, config, x, x.shape[1])
    layer.lam = lam
    return len(calls) > 0


def parameters_without_gradient(layer, x, config):
    with torch.enable_grad():
        read(layer, config, x, x.shape[1])[0].sum().backward()
    return [name for name, p in layer.named_parameters() if p.requires_grad and p.grad is None]


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
