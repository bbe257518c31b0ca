"""What the oracle deletes is what its definition says, by a loop over rows, places and types."""
import torch

from lab import ceiling
from model import GPT, GPTConfig

# in the row of token 4, whose label is 7: the winner is 5, at the places 1 and 3, and 6 stands once
IDX = torch.tensor([[9, 5, 7, 5, 6]])
LABELS = torch.tensor([[5, 7, 5, 6, 7]])


def row_by_hand(A, idx, label):
    """r, c, whether votes decide, the winner's places and single places of one row, by loops."""
    weight, places = {}, {}
    for j in range(1, len(A)):
        weight[idx[j]] = weight.get(idx[j], 0) + A[j]
        places.setdefault(idx[j], []).append(j)
    r = weight.get(label, 0)
    wrong = [kind for kind in places if kind != label]
    several = [kind for kind in wrong if len(places[kind]) >= 2]
    winner = max(several, key=weight.get) if several else None
    c = weight[winner] if several else 0
    of_winner = places[winner] if several else []
    singles = [places[kind][0] for kind in wrong if len(places[kind]) == 1]
    largest = max((A[j] for j in of_winner), default=0)
    best_right = max((A[j] for j in places.get(label, [])), default=0)
    return r, c, c > r > 0 and largest < best_right, of_winner, singles


def take_heaviest(A, singles, total):
    gone = [0.0] * len(A)
    for j in sorted(singles, key=lambda j: -A[j]):
        gone[j] = min(A[j], total)
        total -= gone[j]
    return gone


def test_a_row_by_hand():
    A = torch.zeros(1, 1, 5, 5)
    A[0, 0, 4] = torch.tensor([0.3, 0.14, 0.2, 0.15, 0.21])
    types = ceiling.find_types(IDX, LABELS)
    found = ceiling.find_votes(A, types)
    assert abs(found.r[0, 0, 4] - 0.2) < 1e-6  # place 2, and never the first token
    assert abs(found.c[0, 0, 4] - 0.29) < 1e-6
    assert found.decide[0, 0, 4]
    expected = {
        "oracle": [0, 0.14, 0, 0.15, 0], "oracle control": [0, 0, 0, 0, 0.21],
        "votes": [0, 0.14, 0, 0.15, 0], "votes control": [0, 0, 0, 0, 0.21],
    }  # fmt: skip
    for condition, row in expected.items():
        gone, total = ceiling.deleted(A, types, condition)
        assert torch.allclose(gone[0, 0, 4], torch.tensor(row)), condition
        assert abs(total[0, 0, 4] - 0.29) < 1e-6  # the control misses 0.08
        assert gone[0, 0, :4].sum() == 0
    A[0, 0, 4, 3] = 0.2  # as much as the right place has alone
    assert not ceiling.find_votes(A, types).decide.any()
    A[0, 0, 4, 1:] = torch.tensor([0.05, 0.2, 0.05, 0.5])  # c < r
    assert not ceiling.find_votes(A, types).decide.any()
    gone, _ = ceiling.deleted(A, types, "oracle control")
    assert torch.allclose(gone[0, 0, 4], torch.tensor([0, 0, 0, 0, 0.1]))  # a part


def test_random_maps_by_loops():
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(12, (2, 41), generator=generator)
    idx, labels = sequence[:, :-1], sequence[:, 1:]
    A = torch.randn(2, 3, 40, 40, generator=generator)
    A = A.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
    types = ceiling.find_types(idx, labels)
    found = ceiling.find_votes(A, types)
    gone = {name: ceiling.deleted(A, types, name)[0] for name in ceiling.CONDITIONS}
    assert 5 < found.decide.sum() < found.decide.numel() / 2
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(40)):
        row = A[b, h, i, : i + 1].tolist()
        by_hand = row_by_hand(row, idx[b].tolist(), int(labels[b, i]))
        r, c, decide, of_winner, singles = by_hand
        assert abs(found.r[b, h, i] - r) < 1e-5 and abs(found.c[b, h, i] - c) < 1e-5
        assert found.decide[b, h, i] == decide
        oracle = [weight if j in of_winner else 0 for j, weight in enumerate(row)]
        control = take_heaviest(row, singles, c)
        for name, expected in {"oracle": oracle, "oracle control": control}.items():
            for condition in (name, name.replace("oracle", "votes")):
                mine = gone[condition][b, h, i]
                kept = 1.0 if condition == name else float(decide)
                assert torch.allclose(mine[: i + 1], kept * torch.tensor(expected), atol=1e-5)
                assert mine[i + 1 :].sum() == 0


def test_a_model_that_is_changed_nowhere_reads_as_ever():
    config = GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=64, vocab_size=50)
    model = GPT(config)
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(50, (49,), generator=generator)
    found = ceiling.read(model, sequence, {"lookup": [[0, 1], [1, 0], [1, 3]]})
    _, loss = model(sequence[None, :-1], sequence[None, 1:])
    assert abs(found["loss"] - loss.item()) < 1e-5
    for condition in ceiling.CONDITIONS:
        about = found["lookup"][condition]
        assert about["more"] != 0 and about["deleted"] > 0
        assert about["missing"] >= 0
    assert found["lookup"]["oracle"]["missing"] < 1e-5
    apart = ceiling.read(model, torch.arange(49), {"lookup": [[0, 1]]})  # no type stands twice
    for condition in ceiling.CONDITIONS:
        assert apart["lookup"][condition]["more"] == 0
    assert sum(found["lookup"]["n"]) == found["lookup"]["pairs"]


def test_the_loss_beside_pairs_of_equal_r():
    """Where votes decide the loss is higher by 1 in one bin of r, and by 3 in another one."""
    n = [[0] * ceiling.BINS for _ in range(3)]
    losses = [[0.0] * ceiling.BINS for _ in range(3)]
    for bin_of, here, there, more in ((2, 30, 10, 1), (5, 10, 500, 3), (7, 4, 0, 9)):
        n[2][bin_of], n[0][bin_of] = here, there
        losses[2][bin_of], losses[0][bin_of] = here * (2.0 + more), there * 2.0
    about = [dict(n=sum(n, []), losses=sum(losses, []))] * 5
    mean, low, high = ceiling.beside_equal_r(about, [0])
    assert abs(mean - (30 * 1 + 10 * 3) / 40) < 1e-6  # the bin without others is left out
    assert abs(low - mean) < 1e-6 and abs(high - mean) < 1e-6  # all sequences are the same
