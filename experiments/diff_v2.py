"""
The authors' second version of differential attention, an arm that experiments.toy compares.

    python -m experiments.diff_v2 train --attn=diff_v2        # train.py, which then knows the arm
    python -m experiments.diff_v2 sample --ckpt out/diff_v2   # also bench, experiments.checkpoints

V2 is a blog post of January 2026, https://huggingface.co/blog/microsoft/diff-attn-v2, and a layer,
https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2. We know of no
paper. It differs from the first version in this:

- Keys and values are softmax's, H heads of d channels. Each head gets a second query, so q_proj
  is C x 2C.
- lambda is a sigmoid of a projection of the token: one for each token and head. There is no
  lambda_init.
- There is no norm on the heads' output (--subln adds one), and no factor 1 - lambda_init.

So a block has C^2 + C H parameters more than softmax's. With an MLP of the width `matched_width` it
has as many. The released layer has PyTorch's default init. Here the weights of lambda are drawn
like every matrix, so lambda starts near 1/2.
"""
import runpy
import sys

import torch.nn as nn

from model import ATTENTION, NORM_EPS, Softmax, upcast


class DiffV2(Softmax):
    """A = A_1 - lambda A_2, with A_n = softmax(Q_n K^T / sqrt(d) + log D), lambda = sigmoid(x w).

    The queries 2h and 2h+1 are the branches of head h. They share its key and its value.
    """

    branches = 2

    def __init__(self, config, depth):
        super().__init__(config, depth)
        C = config.n_embd
        self.n_head = 2 * config.n_head  # queries
        self.n_value_head = config.n_head
        self.q_proj = nn.Linear(C, 2 * C, bias=False)
        # the norm is off unless it is asked for, and it is that of a value of size d
        self.subln = None
        if config.subln:
            self.subln = nn.RMSNorm(self.head_dim, eps=NORM_EPS)

    def make_lambda(self, depth):
        """Each token has a lambda of its own, from a projection in place of the four vectors."""
        self.lambda_proj = nn.Linear(self.config.n_embd, self.config.n_head, bias=False)

    def project(self, x):
        """Queries and keys (B, 2H, T, d), values (B, H, T, d), and lambda (B, H, T, 1).

        Each key is there twice, once for each of its queries. That is simple, and it makes the
        cache of the keys twice as large as it has to be.
        """
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.n_value_head, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.n_value_head, self.head_dim).transpose(1, 2)
        lam = upcast(self.lambda_proj(x)).sigmoid().mT[..., None]
        return q, k.repeat_interleave(2, dim=1), v, lam


def matched_width(n_embd, n_head):
    """The width of an MLP beside which DiffV2 has softmax's parameters, within 3/2 n_embd."""
    width = int(8 * n_embd / 3) // 8 * 8  # what model.MLP takes by itself
    more = n_embd * n_embd + n_embd * n_head  # the second queries, and lambda
    return width - round(more / (3 * n_embd))  # each unit of width has a row in three matrices


def register():
    """Makes --attn=diff_v2 known in this process."""
    ATTENTION["diff_v2"] = DiffV2


def main(argv):
    programs = ["train", "sample", "bench", "experiments.checkpoints"]
    if not argv or argv[0] not in programs:
        print(__doc__.strip())
        sys.exit(f"experiments.diff_v2: name a program first: {', '.join(programs)}")
    register()
    sys.argv = argv  # the program's own name, and its flags
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
