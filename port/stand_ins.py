"""Stand-ins for what a port imports and this machine has not: packages, and kernels for a GPU."""
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from model import rotate


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, dim, eps=1e-6, elementwise_affine=True, **others):
        super().__init__(dim, eps, elementwise_affine)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = [m.transpose(1, 2) for m in (q, k, v)]  # from (B, T, H, d)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True,
                                       scale=softmax_scale)
    return y.transpose(1, 2)


def apply_rotary_emb(x, cos, sin, interleaved=False, **others):
    """x (B, T, H, d) whose first r channels are turned by tables (T, r/2), as flash-attn does.

    interleaved: channels 2i and 2i + 1 turn together. Else i and i + r/2 do, which is its default.
    """
    rope = cos[:, None], sin[:, None]
    turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
    if interleaved:
        turned = rotate(turned, rope)
    else:  # put the channels that turn together side by side, and back again
        turned = rotate(turned.unflatten(-1, (2, -1)).mT.flatten(-2), rope)
        turned = turned.unflatten(-1, (-1, 2)).mT.flatten(-2)
    return torch.cat((turned, rest), dim=-1)


# what most ports import of flash-attn and apex does work
WORKING = {
    "flash_attn_func": flash_attn_func,
    "apply_rotary_emb": apply_rotary_emb,
    "RMSNorm": RMSNorm,
    "FusedRMSNorm": RMSNorm,
}


class StandIn(ModuleType):
    """A module of which anything can be taken. What does not work is a MagicMock."""

    def __init__(self, name, needs_gpu=False):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, loader=None)  # transformers asks for one
        self.needs_gpu = needs_gpu
        self.taken = []

    def __getattr__(self, name):
        full_name = f"{self.__name__}.{name}"
        if name.startswith("__"):  # Python asks what kind of a module it is
            raise AttributeError(f"{full_name} is not there")
        thing = sys.modules.get(full_name) or WORKING.get(name) or MagicMock(name=full_name)
        self.taken.append(thing)
        setattr(self, name, thing)
        return thing

    @property
    def mocks(self):
        return [thing for thing in self.taken if isinstance(thing, MagicMock)]

    @property
    def package(self):
        return self.__name__.split(".")[0]

    @property
    def advice(self):
        if self.needs_gpu:
            return f"do without {self.package}, which needs a GPU"
        return f"install {self.package}"


def in_use():
    """The stand-ins of which something was taken."""
    modules = list(sys.modules.values())
    return [module for module in modules if isinstance(module, StandIn) and module.taken]


def packages(stand_ins):
    """Their names, each once."""
    return list(dict.fromkeys(stand_in.package for stand_in in stand_ins))


def explain(failure):
    """The text of a failure, with what stand-ins have to do with it."""
    with_mocks = [stand_in for stand_in in in_use() if stand_in.mocks]
    if not with_mocks:
        return failure
    if "MagicMock" not in failure:
        return f"{failure} (a stand-in was used for {', '.join(packages(with_mocks))})"
    called = []
    for stand_in in with_mocks:
        if any(mock.mock_calls for mock in stand_in.mocks):
            called.append(stand_in)
    advice = dict.fromkeys(stand_in.advice for stand_in in called or with_mocks)
    ending = "its stand-in was called" if len(advice) == 1 else "their stand-ins were called"
    return f"{', '.join(advice)}: {ending}. {failure}"
