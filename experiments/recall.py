"""
Which attention finds what it needs among noise? Every arm learns it on texts made for it.

    python -m experiments.recall            # four arms, 44 runs: 60 to 90 minutes of one core
    python -m experiments.recall --decay    # the same with masks that forget

A finished run is a line of <out>/runs.jsonl, so both can be stopped, and the same command goes on.

A text holds N pairs of a key and a value at random places among fillers. At its end stand R of the
keys, and the model has to answer with their values. Tables 2 and 3 and Figures 5 and 7 of arXiv
2410.05258 ask the same of large models: by the number of pairs, by the length of the text, by the
depth at which the answer lies, and how much attention goes to it. crowd.py asks what a difference
of two maps is good for. Here the model has positions and two layers, and the texts get longer than
those of the training.

A pair is one token. If the key and the value were two tokens, a model would first have to move the
key to the token of its value. Softmax does that with one sharp head. Linear attention can't do it
without a convolution, so the task would measure that and not recall.

The answers are not written behind their queries. When they were, the token before a query was
nearly always the answer to the query before it, the one value that is never right for the new one.
The linear arms learned to exclude it, and failed where the right pair stood last, at depth 100 %.
"""
import argparse
import itertools
import json
import math
import os
import sys
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

import report
from experiments.grid import finished_lines, in_processes, refuse_shared_seeds
from flags import comma_list, int_from_0, positive_int, positive_number
from model import ATTENTION, GPT, GPTConfig, open_device

KEYS = 16
VALUES = 16
FILLERS = 32
# the numbers of the tokens: pairs first, then the keys that ask, the fillers, and the answers
FIRST_QUERY = KEYS * VALUES
FIRST_FILLER = FIRST_QUERY + KEYS
FIRST_VALUE = FIRST_FILLER + FILLERS
VOCAB = FIRST_VALUE + VALUES

T_TRAIN = 64  # tokens of the longest text in training
BATCH = 64
WARMUP = 50
PAIRS = (1, 2, 4, 8)  # in training, drawn anew for each step
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (32, 64, 128, 256, 512)


def make_texts(generator, B, T, N, R, depth=None):
    """B texts of T tokens, (B, T), the answers of their last R tokens, (B, R), and where their N
    pairs stand, (B, N).

    depth: where the pair that is asked for first stands, from 0 (the text's beginning) to 1 (just
    before the first query). None: anywhere."""
    end = T - R  # where the queries begin
    lot = torch.rand(B, end, generator=generator)
    if depth is not None:
        lot[:, round(depth * (end - 1))] = -1  # the smallest lot is drawn first
    place = lot.argsort(-1)[:, :N]
    key = torch.rand(B, KEYS, generator=generator).argsort(-1)[:, :N]
    value = torch.randint(VALUES, (B, N), generator=generator)
    text = FIRST_FILLER + torch.randint(FILLERS, (B, T), generator=generator)
    text.scatter_(1, place, key * VALUES + value)
    text[:, end:] = FIRST_QUERY + key[:, :R]
    return text, FIRST_VALUE + value[:, :R], place


def train_model(attn, seed, lr, steps, decay, device):
    config = GPTConfig(
        attn=attn, n_layer=2, n_head=4, n_embd=64, block_size=T_TRAIN, vocab_size=VOCAB,
        decay=decay)
    model = GPT(config, seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / WARMUP) * (1 - step / steps)
        N = PAIRS[int(torch.randint(len(PAIRS), (), generator=generator))]
        T = int(torch.randint(2 * N, T_TRAIN + 1, (), generator=generator))
        text, answer, _ = make_texts(generator, BATCH, T, N, N)
        targets = torch.full_like(text, -100)  # cross_entropy passes over these
        targets[:, -N:] = answer
        _, loss = model(text.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def measure(model, texts, device, T, N, R, depth=None):
    """The share of the answers that get the highest logit, and the loss."""
    text, answer, _ = make_texts(torch.Generator().manual_seed(10**6), texts, T, N, R, depth)
    right = 0
    loss = 0
    for part, wanted in zip(text.split(64), answer.split(64)):
        part = part.to(device)
        logits, _ = model(part, part)  # the second makes it return the logits of all tokens
        logits = logits[:, -R:].cpu().flatten(0, 1)
        right += (logits.argmax(-1) == wanted.flatten()).sum().item()
        loss += F.cross_entropy(logits, wanted.flatten(), reduction="sum").item()
    return {"accuracy": right / answer.numel(), "loss": loss / answer.numel()}


@torch.no_grad()
def attention_shares(model, texts, device, T, N, depth):
    """The weights that the last token, a query, gives to the right pair and to all tokens before
    it but that.

    Signed: the sum of the weights, which can be negative. Share: of the absolute weights, made to
    sum to 1 over the whole row. Means over heads and texts, a dict for each layer."""
    text, _, place = make_texts(torch.Generator().manual_seed(10**6 + 1), texts, T, N, 1, depth)
    x = model.wte(text.to(device))
    rope = model.rope_from(0, T)
    found = []
    for block in model.blocks:
        row = block.attn.map(block.norm1(x))[:, :, -1].cpu()  # (B, heads, T)
        x = block(x, rope)
        right = place[:, None, :1].expand(-1, row.shape[1], -1)  # (B, heads, 1)
        kinds = {"signed": row, "share": row.abs() / row.abs().sum(-1, keepdim=True)}
        shares = {}
        for kind, weights in kinds.items():
            answer = weights.gather(-1, right)[..., 0]
            noise = weights[..., :-1].sum(-1) - answer  # the last one is the query's own
            shares[f"answer, {kind}"] = answer.mean().item()
            shares[f"noise, {kind}"] = noise.mean().item()
        found.append(shares)
    return found


def do_run(job):
    """Trains a model and measures it. Returns rows of accuracy, and rows of attention by layer."""
    attn, lr, seed, steps, decay, texts, device = job
    torch.set_num_threads(1)  # models this small have nothing to share
    model = train_model(attn, seed, lr, steps, decay, device)
    run = {"attn": attn, "lr": lr, "seed": seed}
    found = []
    for N in (*PAIRS, 12):  # 12: more than in training
        found.append(("pairs", N, measure(model, texts, device, T_TRAIN, N, min(N, 4))))
    for T in LENGTHS:
        by_depth = pd.DataFrame([measure(model, texts, device, T, 4, 1, depth) for depth in DEPTHS])
        found.append(("length", T, by_depth.mean().to_dict()))
    for depth in DEPTHS:
        found.append(("depth", depth, measure(model, texts, device, T_TRAIN, 4, 1, depth)))
    rows = [run | {"by": by, "x": x} | result for by, x, result in found]
    layers = attention_shares(model, texts, device, T_TRAIN, 4, 0.5)
    attention = [run | {"layer": number, **layer} for number, layer in enumerate(layers, 1)]
    return rows, attention


def run_all(runs, args):
    """Trains and measures `runs`, (attn, lr, seed). Returns accuracy and attention, two frames.

    A run that has a line in <out>/runs.jsonl is not trained again."""
    jobs = [(*run, args.steps, args.decay, args.texts, args.device) for run in runs]
    file = args.out / "runs.jsonl"
    done = {tuple(line["job"]): line["result"] for line in finished_lines(file)}
    missing = [job for job in jobs if job not in done]
    for job, result in zip(missing, in_processes(do_run, missing, args.procs)):
        done[job] = result
        with file.open("a") as f:
            f.write(json.dumps({"job": job, "result": result}) + "\n")
    results = [done[job] for job in jobs]
    accuracies = pd.DataFrame([row for rows, _ in results for row in rows])
    return accuracies, pd.DataFrame([row for _, rows in results for row in rows])


def choose_rates(args):
    """Each arm's rate: the one of --lr with the lowest mean loss by pairs on --choose_on.

    Returns {arm: rate}, the rows of the runs that chose, and a table of all rates. A single rate
    is not chosen but used."""
    if len(args.lr) == 1:
        return dict.fromkeys(ATTENTION, args.lr[0]), pd.DataFrame(), {}
    trials, _ = run_all(itertools.product(ATTENTION, args.lr, args.choose_on), args)
    by_pairs = trials[trials["by"] == "pairs"]
    tried = by_pairs.pivot_table("loss", "attn", "lr", sort=False)
    seeds = ", ".join(map(str, args.choose_on))
    title = f"Mean loss by pairs at each rate. The seeds that chose: {seeds}"
    return tried.idxmin(axis=1), trials, {title: tried.reset_index().rename(columns=str)}


def draw(df, decay):
    """Accuracy by the length of the text. What else was measured stands in the tables."""
    by_length = df[df["by"] == "length"]
    figure, (ax,) = report.new_figure(size=(9, 5))
    report.line_plot(ax, by_length, "x", "accuracy", by="attn", seed="seed")
    ax.axvline(T_TRAIN, color="#777777", linewidth=1)
    ax.text(T_TRAIN, 0.03, "  longest text\n  in training", color="#777777")
    ax.set(xscale="log", xlabel="tokens of the text, with 4 pairs (thin lines: single seeds)")
    ax.set(ylabel="how often the value is found", ylim=(0, 1.05))
    ax.set_xticks(LENGTHS, [str(T) for T in LENGTHS])
    ax.set_xticks([], minor=True)
    report.label_ends(ax)
    for (attn, _), run in by_length[by_length["x"] == T_TRAIN].groupby(["attn", "seed"]):
        right = run["accuracy"].item()
        if right < 0.9:  # such a seed pulls the mean of its arm down
            ax.text(T_TRAIN, right, f"  a seed of {attn} that has\n  learned the task only in part",
                    color=report.STYLE[attn]["color"])
    longest = by_length[by_length["x"] == max(LENGTHS)]
    means = longest.groupby("attn")["accuracy"].mean().sort_values(ascending=False)
    ranks = ", ".join(f"{attn} {mean:.2f}" for attn, mean in means.items())
    mask = " with decay" if decay else ""
    report.add_title(figure, f"Trained on texts of up to {T_TRAIN} tokens{mask}. "
                             f"In {max(LENGTHS)} tokens they find: {ranks}")
    return figure


def main(argv=None):
    p = argparse.ArgumentParser(
        "recall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    seeds = comma_list(int_from_0)
    p.add_argument("--seed", type=seeds, default=[3, 4, 5], help="seeds that are reported (3,4,5)")
    p.add_argument("--choose_on", type=seeds, default=[1, 2],
                   help="seeds on which rates are chosen (1,2)")
    p.add_argument("--lr", type=comma_list(positive_number), default=[1e-3, 3e-3, 1e-2, 3e-2],
                   help="peak rates. Each arm takes its best one (1e-3,3e-3,1e-2,3e-2)")
    p.add_argument("--steps", type=positive_int, default=1000, help="training steps of each (1000)")
    p.add_argument("--decay", action="store_true", help="masks that forget, in every arm")
    p.add_argument("--texts", type=positive_int, default=256, help="texts behind a figure (256)")
    p.add_argument("--procs", type=positive_int, default=os.cpu_count(),
                   help="runs at once (the cores)")
    p.add_argument("--device", default="cpu", help="cpu, cuda, ... (cpu: the models are tiny)")
    p.add_argument("--out", type=Path, default="out/recall",
                   help="folder of the result (%(default)s)")
    args = p.parse_args(argv)
    refuse_shared_seeds(args.seed, args.lr, args.choose_on)
    open_device(args.device)  # before the first run, if it can't be used
    report.check_can_publish(args.out)

    rates, trials, tried = choose_rates(args)
    df, attention = run_all(
        [(attn, rates[attn], seed) for attn in ATTENTION for seed in args.seed], args)
    tables = {}
    for by in ("pairs", "length", "depth"):
        part = df[df["by"] == by]
        table = part.pivot_table("accuracy", ["attn", "lr"], "x", sort=False).reset_index()
        tables[f"Accuracy by {by}, mean of {len(args.seed)} seeds"] = table.rename(columns=str)
    by_layer = attention.drop(columns="seed").groupby(["attn", "lr", "layer"], sort=False)
    shares = by_layer.mean().reset_index()
    tables["The attention of a query, the right pair in the middle of 64 tokens"] = shares
    about = report.conditions(
        torch.device(args.device), steps=args.steps, decay=args.decay, seeds=args.seed, batch=BATCH,
        texts=args.texts, guessing=1 / VALUES)
    name = "recall_decay" if args.decay else "recall"  # two commands, two pages
    runs = pd.concat([trials, df])
    report.publish(args.out, name, about, tables | tried, draw(df, args.decay), runs)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("recall: stopped. The same command goes on after the last finished run")
    except (ValueError, OSError, ImportError) as e:
        sys.exit(f"recall: {e}")
