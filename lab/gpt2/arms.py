"""
What the early comparison needs beside lab/arms.py, which is imported, too.

    python train.py --use=lab.gpt2.arms --attn=gated_average
"""
from torch import nn

from lab.arms import SoftmaxAverage
from model import ATTENTION, DiffV2


class GatedAverage(SoftmaxAverage):
    """A - sigmoid(w . x) U: diff_v2, with the average of all tokens in place of its second map."""

    def __init__(self, config, depth):
        super().__init__(config, depth)
        del self.lambda_average
        self.lambda_proj = nn.Linear(config.n_embd, self.h, bias=False)

    lam = DiffV2.lam


ATTENTION["gated_average"] = GatedAverage
