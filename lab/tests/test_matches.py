"""lab/matches.py: its matches by brute force, and that minus.md says what its data say."""
import json

import numpy as np
import pytest
import torch

from lab import matches, stats
from lab.tests.pages import has_table, words_of
from model import GPT, GPTConfig

torch.set_num_threads(1)


def longest(tokens, i):
    """By definition: the longest end of tokens[: i + 1] that also ends earlier."""
    for length in range(i, 0, -1):
        ends = [j for j in range(length - 1, i)
                if tokens[j - length + 1 : j + 1] == tokens[i - length + 1 : i + 1]]
        if ends:
            return length, tokens[ends[-1] + 1]
    return 0, -1


def test_matches_by_brute_force():
    random = np.random.default_rng(0)
    tokens = random.integers(3, size=60).tolist()
    tokens[40:55] = tokens[5:20]
    found = [matches.match_of(tokens, i) for i in range(len(tokens))]
    assert found == [longest(tokens, i) for i in range(len(tokens))]
    assert max(length for length, _ in found) >= 15


def test_each_byte_has_a_class_and_all_shares_sum_to_1():
    text = torch.tensor([list(b"abcabcabcabx the function the functions")])
    names = matches.classes_of(text)
    assert names[0, 10] == "8 and more, wrong" and names[0, 7] == "4 to 7, right"
    lead = [[[-3.0, 0.0], [0.0, -1.0]], [[-1.0, 0.0], [0.0, -1.0]]]  # two seeds
    found = dict(names=["a", "b"], counts=[[3, 1], [1, 3]], leads=dict(diff_v2=lead, longer=lead))
    table = matches.table_of_matches(found, resamples=50)
    assert [line["of all bytes, %"] for line in table] == ["50.0", "50.0"]
    for title in matches.COLUMNS.values():
        assert [line[title].split()[0] for line in table] == ["67", "33"]


def test_a_folder_without_runs_changes_nothing(tmp_path):
    before = (stats.RESULTS / "matches.json").read_bytes()
    with pytest.raises(SystemExit, match="there is no"):
        matches.main(["measure", str(tmp_path)])
    assert (stats.RESULTS / "matches.json").read_bytes() == before


def test_losses_of_bytes_have_the_mean_of_the_model():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32, vocab_size=257))
    sequences = torch.randint(257, (20, 33))
    losses = matches.byte_losses(model, sequences)
    mean = model(sequences[:, :-1], sequences[:, 1:])[1].item()
    assert losses.shape == (20, 32) and abs(losses.mean() - mean) < 1e-5


MATCHES = json.loads(matches.MATCHES_JSON.read_text())


def test_the_page_has_the_table_of_the_data():
    assert has_table("minus.md", matches.table_of_matches(MATCHES))


def test_the_longer_softmax_beside_diff_v2():
    n_bytes = np.sum(MATCHES["counts"])
    gains = {name: np.sum(lead, axis=(1, 2)) / n_bytes for name, lead in MATCHES["leads"].items()}
    less = stats.mean_interval(list(gains["diff_v2"] - gains["longer"]))
    assert f"lower by {stats.plus_minus(*less)}" in words_of("minus.md")
