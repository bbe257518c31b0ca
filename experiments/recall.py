"""
Which attention finds what it needs among noise? Every arm learns it from scratch, on texts made for it.

    python -m experiments.recall            # four arms, three seeds, minutes on a few CPU cores
    python -m experiments.recall --decay

A text holds N needles, a key and its value each, at random places among fillers; at its end stand R of the keys, and
after each of them its value must come. The settings are the same for every arm and were chosen on softmax, before
another arm was run. Tables 2 and 3 and Figures 1 and 5 of arXiv 2410.05258 ask the same of large models.
"""
import argparse
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import bench
import train
from model import ATTENTION, GPT, GPTConfig

KEYS, VALUES, FILLERS = 16, 16, 32  # token numbers: the keys, then the values, then the fillers
T_MAX = 64  # tokens of a text in training, at most
MODEL = dict(n_layer=2, n_head=4, n_embd=64, block_size=T_MAX, vocab_size=KEYS + VALUES + FILLERS)
GAIN = 4.0  # the matrices start so much larger: 0.02 is made for 768 channels, and 1 / sqrt(64) is 0.125
BATCH, LR, WARMUP = 64, 1e-3, 50
DENSE = 300  # steps without fillers, 0.3 of fewer steps; then more and more of them until half-way
NEEDLES = (1, 2, 4, 8)  # N in training, drawn anew each step; all are asked for
DEPTHS, LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (32, 64, 128, 256, 512)


def make_texts(generator, B, T, N, R, depth=None):
    """B texts of T tokens, (B, T), and where their needles begin, (B, N).

    N needles at random places among T - 2 R - 2 N fillers; then R of the keys, each once and followed by its value.
    depth: where the first that is asked for lies, from 0 (the text's beginning) to 1 (just before the first query)."""
    end = T - 2 * R
    lot = torch.rand(B, end - N, generator=generator)  # of the places, a needle taking one
    if depth is not None:
        lot[:, round(depth * (end - N - 1))] = -1  # the first to be drawn
    place = lot.argsort(-1)[:, :N]
    place = place + place.argsort(-1).argsort(-1)  # those before it take two tokens
    key = torch.rand(B, KEYS, generator=generator).argsort(-1)[:, :N]
    value = KEYS + torch.randint(VALUES, (B, N), generator=generator)
    text = KEYS + VALUES + torch.randint(FILLERS, (B, T), generator=generator)
    text.scatter_(1, place, key).scatter_(1, place + 1, value)
    text[:, end:] = torch.stack((key[:, :R], value[:, :R]), -1).flatten(1)
    return text, place


def train_model(attn, seed, steps, decay, device):
    """A trained model, and the first step whose loss with the most needles is below 0.1 (NaN: none)."""
    model, learnt = GPT(GPTConfig(attn=attn, decay=decay, **MODEL), seed), math.nan
    with torch.no_grad():
        for w in model.parameters():
            w.mul_(GAIN if w.ndim == 2 else 1)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator, dense = torch.Generator().manual_seed(seed), min(DENSE, 0.3 * steps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (step + 1) / WARMUP, 2 - 2 * step / steps)
        N = NEEDLES[int(torch.randint(len(NEEDLES), (), generator=generator))]
        fillers = (T_MAX - 4 * N) * min(1, max(0, (step - dense) / (steps / 2 - dense)))
        T = 4 * N + int(torch.randint(int(fillers) + 1, (), generator=generator))
        text, _ = make_texts(generator, BATCH, T, N, N)
        targets = torch.full_like(text[:, 1:], -100)  # cross_entropy passes over these
        targets[:, T - 2 * N :: 2] = text[:, T - 2 * N + 1 :: 2]
        _, loss = model(text[:, :-1].to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if N == NEEDLES[-1] and loss < 0.1 and math.isnan(learnt):
            learnt = float(step + 1)
    return model, learnt


@torch.no_grad()
def accuracy(model, B, device, T, N, R, depth=None):
    """The share of the answers in B texts that get the highest logit, given the right answers before them."""
    text, right = make_texts(torch.Generator().manual_seed(0), B, T, N, R, depth)[0].to(device), 0
    for part in text.split(max(1, 8192 // T)):
        logits, _ = model(part[:, :-1], part[:, 1:])
        right += (logits[:, T - 2 * R :: 2].argmax(-1) == part[:, T - 2 * R + 1 :: 2]).sum().item()
    return right / (B * R)


@torch.no_grad()
def attention_shares(model, B, device, T, N, depth):
    """The shares of the last token's attention, the query, on the answer's span (its key and value) and on the noise
    (all else before the query): absolute values, each row's made to sum to 1, the mean over layers, heads and texts."""
    text, place = make_texts(torch.Generator().manual_seed(1), B, T, N, 1, depth)
    rows = [A[:, :, -1].abs() for A in bench.attention_maps(model, text[:, :-1].to(device))]  # (B, h, T - 1) each
    share = torch.stack([(row / row.sum(-1, keepdim=True)).mean(1) for row in rows]).mean(0).cpu()  # (B, T - 1)
    answer = (share.gather(1, place[:, :1]) + share.gather(1, place[:, :1] + 1)).mean().item()
    return answer, share[:, : T - 2].sum(-1).mean().item() - answer


def run(job):
    """Trains one model and measures it: its row of the table."""
    attn, seed, steps, decay, B, device = job
    torch.set_num_threads(1)  # models this small have nothing to share
    model, learnt = train_model(attn, seed, steps, decay, device)
    row = {"attn": attn, "seed": str(seed), "learnt": learnt}
    for N in (*NEEDLES, 12):  # 12: beyond training
        row[f"N={N}"] = accuracy(model, B, device, T_MAX, N, min(N, 4))
    by_depth = {T: [accuracy(model, B, device, T, 4, 1, depth) for depth in DEPTHS] for T in LENGTHS}
    row |= {f"T={T}": sum(found) / len(found) for T, found in by_depth.items()}
    row |= {f"at {depth:.0%}": found for depth, found in zip(DEPTHS, by_depth[T_MAX])}
    answers, noises = zip(*(attention_shares(model, B, device, T_MAX, 4, depth) for depth in DEPTHS))
    return row | {"on the answer": sum(answers) / len(answers), "on the noise": sum(noises) / len(noises)}


def main(argv=None):
    import pandas as pd

    p = argparse.ArgumentParser("recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=train.count, default=3, help="models of every arm (3)")
    p.add_argument("--steps", type=train.count, default=1000, help="training steps of each (1000)")
    p.add_argument("--decay", action="store_true", help="masks that forget, in every arm")
    p.add_argument("--texts", type=train.count, default=256, help="texts behind a figure (256)")
    p.add_argument("--procs", type=train.count, default=os.cpu_count(), help="models trained at once (the cores)")
    p.add_argument("--device", default="cpu", help="cuda, cuda:1, cpu, … (cpu: the models are tiny)")
    p.add_argument("--out", type=Path, default="out/bench", help="folder of what is written (%(default)s)")
    args = p.parse_args(argv)
    how = args.steps, args.decay, args.texts, args.device
    jobs = [(attn, seed, *how) for seed in range(args.seeds) for attn in ATTENTION]
    with ProcessPoolExecutor(args.procs, multiprocessing.get_context("spawn")) as pool:
        df = pd.DataFrame((map if args.procs == 1 else pool.map)(run, jobs))

    kinds = {"N=": "accuracy by needles", "T=": "by length", "at": "by depth", "on": "the last query's attention"}
    curves = df.melt(["attn", "seed", "learnt"])
    curves["kind"] = curves["variable"].str[:2].map(kinds)
    figure = bench.plot(curves, "variable", "value", panel="kind", xlabel="", ylabel="", ylim=(0, 1.05))
    about = bench.conditions(torch.device(args.device), steps=args.steps, decay=args.decay, seeds=args.seeds,
                             batch=BATCH, trained_T=f"up to {T_MAX}", texts=args.texts, **MODEL)  # fmt: skip
    caption = (f"Learnt: the first step whose loss with {NEEDLES[-1]} needles is below 0.1. Accuracy by needles (R: 4 "
               f"or fewer), length (N=4, R=1, mean over depths), depth. Else T={T_MAX}. Guessing: {1 / VALUES:.3f}")
    bench.publish(args.out, "recall", about, {caption: bench.over_seeds(df)}, figure)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"recall: {e}")
