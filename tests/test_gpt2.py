"""experiments/gpt2.py: its arms, its statistics by hand-made numbers, and the whole at toy size."""
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import report
import train
from experiments import gpt2, grid
from helpers import assert_value_error
from model import GPT

torch.set_num_threads(1)

SMALL = [
    "--preset=toy", "--device=cpu", "--n_layer=1", "--n_embd=32", "--block_size=32",
    "--batch_size=4", "--eval_tokens=256", "--eval_every=1000",
]


@pytest.fixture(autouse=True)
def registered():
    gpt2.register()


# the arms


def models(flags, vocab_size=257):
    """The model of each arm, without numbers in its weights."""
    rows = gpt2.arms(flags)
    found = {}
    for row, own in (rows["Q1"] | rows["Q2"]).items():
        config = train.parse([*flags, *own])[0]
        config.vocab_size = vocab_size
        found[row] = GPT(config.model_config(), seed=None)
    return found


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_the_arms_that_are_compared_have_the_same_parameters():
    found = models(["--device=cpu", "--preset=gpt2"], vocab_size=50257)
    count = {row: parameters(model) for row, model in found.items()}
    assert count["softmax half the heads"] == count["softmax"]
    lambdas = 12 * 4 * 64  # four vectors of d in each layer
    assert count["diff"] == count["softmax"] + lambdas + 12 * 128  # and the weight of the norm
    assert count["diff_linear + decay"] == count["linear half the heads + decay"] + lambdas
    assert abs(count["diff_v2 narrow"] / count["softmax"] - 1) < 1e-4


def test_half_the_heads_give_linear_attention_the_decay_and_the_state_of_diff_linear():
    rates = {}
    sizes = {}
    for row, model in models(SMALL).items():
        model = GPT(model.config, seed=1)
        _, state = model.prefill(torch.arange(8)[None])
        sizes[row] = sum(tensor.numel() for tensor in state["layers"][0].values())
        if model.config.decay:
            layer = model.blocks[0].attn
            by_query_head = layer.decay_rate("cpu", torch.float64).flatten().tolist()
            rates[row] = by_query_head[:: layer.branches]  # both branches of a head share it
    ours = "linear half the heads + decay"
    assert rates[ours] == rates["diff_linear + decay"]
    assert sizes[ours] == sizes["diff_linear + decay"]
    assert rates["linear + decay"] != rates[ours]
    assert sizes["linear + decay"] < sizes[ours]


@pytest.mark.parametrize("flag", ["--n_head=2", "--no-decay", "--mlp_width=8", "--lr=1e-3"])
def test_a_flag_that_the_arms_set_is_refused(flag):
    # also where only the arms of Q1 are trained, of which none sets --decay
    name = flag.split("=")[0].replace("no-", "")
    command = [*SMALL, "--only=Q1", flag]
    assert_value_error(f"{name} belongs to the experiment", gpt2.main, command)


def test_a_seed_that_chooses_a_rate_is_refused_before_anything_is_trained():
    command = [*SMALL, "--seed=1,2", "--choose_on=3,1"]
    assert_value_error("--seed and --choose_on share 1", gpt2.main, command)
    assert not Path("out").exists()


# statistics, with numbers that were computed by hand


@pytest.mark.parametrize("low, high, says", [
    (-0.020, -0.011, "gains"),
    (-0.020, -0.009, "undecided"),  # a gain, but perhaps one that does not matter
    (-0.009, -0.001, "no gain that matters"),
    (-0.009, 0.009, "no gain that matters"),
    (0.001, 0.009, "no gain that matters"),  # it costs, but not enough
    (0.001, 0.011, "costs"),
    (0.020, 0.030, "costs"),
    (-0.001, 0.011, "undecided"),
    (-0.020, 0.020, "undecided"),
    (math.nan, math.nan, "undecided"),
])
def test_verdict(low, high, says):
    assert gpt2.verdict(low, high) == says


def losses(**means):
    """Runs of arms around these means: three of each, 0.002 apart, so their sd is 0.002."""
    names = dict(S="softmax", D="diff", V2="diff_v2 narrow", L6="linear half the heads + decay",
                 DL="diff_linear + decay")
    rows = []
    for short, mean in means.items():
        for seed, noise in [(2, -0.002), (3, 0.0), (4, 0.002)]:
            rows.append(dict(row=names[short], seed=seed, loss=mean + noise))
    return pd.DataFrame(rows)


def test_compare_by_hand():
    found = gpt2.compare(losses(S=3.300, D=3.270, V2=3.301, L6=3.400, DL=3.420))
    assert list(found["arm"]) == ["diff", "diff_v2 narrow", "diff_linear + decay"]
    assert [d.mean for d in found["difference"]] == pytest.approx([-0.030, 0.001, 0.020])
    # t at 1 - 0.05 / 6 and 10 degrees of freedom, times 0.002 sqrt(2 / 3)
    half = 2.8701 * 0.001633
    assert [d.error for d in found["difference"]] == pytest.approx([half] * 3, abs=2e-6)
    assert list(found["verdict"]) == ["gains", "no gain that matters", "costs"]


def test_compare_with_one_seed_is_undecided():
    runs = losses(S=3.300, D=3.000)
    found = gpt2.compare(runs[runs["seed"] == 2])
    assert list(found["verdict"]) == ["undecided"]
    assert gpt2.compare(losses(S=3.300, V2=3.0, L6=3.4))["arm"].tolist() == ["diff_v2 narrow"]


# the plan, with losses that nobody had to train for


@pytest.fixture
def pretend(monkeypatch):
    """pretend(loss, *rows) follows the plan, where a run's loss is loss(row, seed, rate)."""
    trained = []

    def read_runs(out):
        return pd.DataFrame(trained, columns=["row", "seed", "lr", "loss"])

    def follow(loss, *rows):
        def run_grid(rows, seeds, flags, out, rates, choose_on=()):
            while missing := grid.missing_runs(rows, seeds, read_runs(out), rates, choose_on):
                row, seed, rate = missing[0]
                trained.append(dict(row=row, seed=seed, lr=rate, loss=loss(row, seed, rate)))
            return grid.reported(rows, seeds, read_runs(out), rates, choose_on)

        monkeypatch.setattr(grid, "run_grid", run_grid)
        args, _ = gpt2.read_arguments([])
        gpt2.follow_the_plan({row: [] for row in rows}, [], args)
        runs = read_runs(None)
        return runs, gpt2.compared_runs(rows, args)

    monkeypatch.setattr(grid, "read_runs", read_runs)
    follow.trained = trained
    return follow


def seeds_of(runs, row, rate=None):
    mine = runs[runs["row"] == row]
    return mine["seed"][mine["lr"] == rate].tolist() if rate else mine["seed"].tolist()


NOISE = {1: 0.0, 2: -0.001, 3: 0.0, 4: 0.001, 5: 0.0, 6: 0.0}


def test_each_arm_is_compared_at_its_own_best_rate_and_on_other_seeds(pretend):
    best = {"softmax": 1.5e-3, "diff": 6e-3}  # the second is beyond the rates of the plan

    def loss(row, seed, rate):
        return 3 + 0.1 * math.log2(rate / best[row]) ** 2 + NOISE[seed]

    runs, compared = pretend(loss, "softmax", "diff")
    assert sorted(runs["lr"][(runs["row"] == "softmax") & (runs["seed"] == 1)]) == [
        0.75e-3, 1.5e-3, 3e-3]
    assert sorted(runs["lr"][(runs["row"] == "diff") & (runs["seed"] == 1)]) == [
        0.75e-3, 1.5e-3, 3e-3, 6e-3, 12e-3]
    for row, rate in best.items():
        assert seeds_of(compared, row) == [2, 3, 4]
        assert set(compared["lr"][compared["row"] == row]) == {rate}
    assert len(runs) == 3 + 5 + 2 * 3  # decided at once: nobody got more seeds


def loss_undecided(row, seed, rate):
    """diff - softmax is -0.020, and the seeds 2, 3 and 4 differ by too much to say that it gains.

    It is -0.020 +- 0.013 with these seeds, and +- 0.008 if diff has the seeds 5 and 6 too.
    """
    noise = {2: -0.004, 4: 0.004}.get(seed, 0.0)
    gain = {"diff": -0.020, "softmax half the heads": -0.5}.get(row, 0.0)
    return 3 + gain + noise + 0.1 * math.log2(rate / 1.5e-3) ** 2


def test_an_undecided_comparison_gets_two_more_seeds_once(pretend):
    names = ["softmax", "softmax half the heads", "diff"]
    runs, compared = pretend(loss_undecided, *names)
    assert sorted(seeds_of(compared, "softmax")) == [2, 3, 4, 5, 6]
    assert sorted(seeds_of(compared, "diff")) == [2, 3, 4, 5, 6]
    assert sorted(seeds_of(compared, "softmax half the heads")) == [2, 3, 4]
    assert gpt2.compare(compared)["verdict"].tolist() == ["gains"]
    again, _ = pretend(loss_undecided, *names)
    assert len(again) == len(runs)


def test_what_stays_undecided_is_not_asked_again(pretend):
    def loss(row, seed, rate):
        noise = 0.03 * (-1) ** seed * (row == "diff")
        return 3 + noise + 0.1 * math.log2(rate / 1.5e-3) ** 2

    for _ in range(2):
        runs, compared = pretend(loss, "softmax", "diff")
        assert len(compared) == 10
        assert gpt2.compare(compared)["verdict"].tolist() == ["undecided"]
    assert len(runs) == 2 * 3 + 10


def test_a_stop_between_the_two_more_seeds_does_not_change_what_is_trained(pretend):
    whole, _ = pretend(loss_undecided, "softmax", "diff")
    # as if it had been stopped before those of softmax: those of diff alone would decide
    for run in list(pretend.trained):
        if run["row"] == "softmax" and run["seed"] > 4:
            pretend.trained.remove(run)
    half, compared = pretend(loss_undecided, "softmax", "diff")
    assert len(half) == len(whole)
    assert len(compared) == 10


def test_nothing_is_compared_before_all_of_its_seeds_are_there(pretend):
    names = ["softmax", "diff"]
    _, whole = pretend(loss_undecided, *names)
    args, _ = gpt2.read_arguments([])

    def forget(row, seed):
        pretend.trained[:] = [r for r in pretend.trained if (r["row"], r["seed"]) != (row, seed)]
        return gpt2.compared_runs(names, args)

    assert len(whole) == 10
    assert seeds_of(forget("diff", 5), "diff") == [2, 3, 4]  # not with the seed 6 alone
    assert set(forget("diff", 3)["row"]) == {"softmax"}
    assert forget("softmax", 2).empty


def test_an_arm_that_diverges_on_a_compared_seed_takes_its_next_best_rate(pretend):
    def loss(row, seed, rate):
        # its best rate, and then the next best one
        if row == "diff" and (rate, seed) in [(3e-3, 3), (1.5e-3, 2)]:
            return math.nan
        best = 1.5e-3 if row == "softmax" else 3e-3
        return 3 + 0.01 * math.log2(rate / best) ** 2 + 0.001 * (rate > best) + NOISE[seed]

    runs, compared = pretend(loss, "softmax", "diff")
    assert seeds_of(runs, "diff", rate=3e-3) == [1, 2, 3, 4]
    assert seeds_of(runs, "diff", rate=1.5e-3) == [1, 2, 3, 4]
    assert seeds_of(compared, "diff", rate=6e-3) == [2, 3, 4]
    assert seeds_of(compared, "softmax", rate=1.5e-3) == [2, 3, 4]
    assert len(compared) == 6


def test_an_arm_that_diverges_everywhere_is_compared_with_nothing(pretend):
    def loss(row, seed, rate):
        worse = 0.1 * math.log2(rate / 1.5e-3) ** 2
        return math.nan if row == "diff" else 3 + worse + NOISE[seed]

    runs, compared = pretend(loss, "softmax", "diff")
    assert set(compared["row"]) == {"softmax"}
    assert gpt2.compare(compared).empty
    args, _ = gpt2.read_arguments([])
    runs = runs.assign(parameters=1, tokens=1, tok_per_s=1.0)
    compared = compared.assign(parameters=1, tokens=1, tok_per_s=1.0)
    rows = {"softmax": ["--attn=softmax"], "diff": ["--attn=diff"]}
    table = gpt2.arms_table(rows, compared, runs, 4.0, args)
    assert table["arm"].tolist() == ["softmax", "diff"]
    assert table["diverged"].tolist() == [0, (runs["row"] == "diff").sum()]
    assert table["nats per token"][0].mean == pytest.approx(3)
    assert table["nats per byte"][0].mean == pytest.approx(3 / 4)


# the whole program at toy size


def published(name):
    return json.loads((name.parent / f"{name.name}.json").read_text())


def test_the_whole_plan_stopped_and_gone_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpt2, "MATTERS", 1e9)  # every comparison says "no gain that matters"
    # the larger rate diverges. the best one is then at the edge, and a much smaller one is tried
    rates = [4e-34, 2e-2, 1e30]
    command = [*SMALL, "--steps=8", "--only=Q1", "--rates=2e-2,1e30", "--seed=2,3", "--out=out"]
    train_main = train.main
    trained = []

    def stopped_behind_some(flags):
        if len(trained) == 7:
            return "stopped"
        trained.append(flags)
        return train_main(flags)

    monkeypatch.setattr(train, "main", stopped_behind_some)
    with pytest.raises(grid.Stopped):
        gpt2.main(command)
    assert_value_error("far enough to be published", gpt2.main, [*command, "--publish"])
    said = capsys.readouterr().out
    assert "4 arms, 16 runs are left" in said  # (2 rates + 2 seeds) x 4
    hours = [line for line in said.splitlines() if line.endswith("evaluations") and "about" in line]
    assert len(hours) == 1

    monkeypatch.setattr(train, "main", lambda flags: trained.append(flags) or train_main(flags))
    gpt2.main(command)
    folders = [flag for flags in trained for flag in flags if flag.startswith("--out=")]
    assert len(folders) == len(set(folders)) == 4 + 4 * (3 + 2)  # 4 for the speeds. none twice
    gpt2.main(command)
    assert len(trained) == len(folders)  # nothing is left to train

    result = published(tmp_path / "out/gpt2")
    runs = pd.DataFrame(result["runs"])
    assert len(runs) == 20
    for row, mine in runs.groupby("row"):
        assert sorted(mine["lr"][mine["seed"] == 1]) == rates
        assert mine["status"][mine["lr"] == 1e30].item().startswith("diverged: ")
        assert mine["lr"][mine["seed"] > 1].tolist() == [2e-2, 2e-2]
    primary, secondary, arms, by_rate = result["tables"].values()
    assert [row["verdict"] for row in primary] == ["no gain that matters"] * 2
    assert [row["comparison"] for row in secondary] == ["diff − softmax half the heads"]
    assert [row["diverged"] for row in arms] == [1] * 4
    means = runs[runs["seed"] > 1].groupby("row")["loss"].mean()
    for row in arms:
        assert row["nats per token"]["mean"] == pytest.approx(means[row["arm"]])
        assert row["seeds"] == "2, 3"
    difference = means["diff"] - means["softmax"]
    assert primary[0]["nats per token"]["mean"] == pytest.approx(difference)


def test_arms_without_a_partner_are_published_without_a_comparison(tmp_path):
    # there is a single rate, so none has to be chosen on seed 1
    command = [*SMALL, "--rows=linear*", "--rates=1e-2", "--seed=2,3", "--steps=2", "--out=out"]
    gpt2.main(command)
    gpt2.main([*command, "--publish", "--data=nowhere"])  # what is there needs no data
    (table,) = published(tmp_path / "out/gpt2")["tables"].values()
    assert [row["arm"] for row in table] == ["linear half the heads + decay", "linear + decay"]
    assert {row["rate"] for row in table} == {"0.01"}


def test_minutes_gives_every_arm_the_same_time(tmp_path):
    # one sequence to evaluate: even on a very busy machine an arm trains on more
    command = [*SMALL, "--minutes=0.01", "--eval_tokens=32", "--out=out"]
    gpt2.main(command)
    speeds = grid.read_runs(tmp_path / "out/speed").set_index("row")["tok_per_s"]
    runs = grid.read_runs(tmp_path / "out").set_index("row")
    assert len(runs) == 8  # the arms of both questions
    for row, run in runs.iterrows():
        assert run["seed"] == 1
        seconds = run["tokens"] / speeds[row]
        assert 0.6 - 128 / speeds[row] <= seconds <= 0.6001  # whole steps of 128 tokens
        assert run["head"]["warmup"] == min(50, run["steps"] // 10)
    text = (tmp_path / "out/gpt2_minutes.md").read_text()
    assert "Every arm has trained for 0.01 minutes" in text
    assert "verdict" not in text

    # the same command trains nothing, because it remembers the speeds
    logs = list(tmp_path.glob("out/**/log.jsonl"))
    before = [log.read_bytes() for log in logs]
    gpt2.main(command)
    assert len(logs) == 16
    assert [log.read_bytes() for log in logs] == before


def test_arms_of_other_settings_are_not_published_beside_those_that_are_picked():
    short = [*SMALL, "--rates=1e-2", "--seed=2", "--steps=2", "--out=out"]
    gpt2.main([*short, "--rows=softmax"])
    says = "eval_tokens is 256 there and 64 here"
    job = [*short, "--rows=diff", "--eval_tokens=64"]
    assert_value_error(says, gpt2.main, job)
    timed = [*SMALL, "--out=timed"]
    gpt2.main([*timed, "--rows=softmax", "--minutes=0.01"])
    job = [*timed, "--rows=diff", "--minutes=0.02"]
    assert_value_error("steps is .* there and .* here", gpt2.main, job)


def test_minutes_refuses_what_would_not_be_fair():
    short = [*SMALL, "--rows=softmax", "--minutes=0.000001"]
    assert_value_error("less than --eval_tokens=256", gpt2.main, short)
    for flag in ("--steps=8", "--tokens=1000", "--warmup=3"):
        name = flag.split("=")[0]
        assert_value_error(f"{name} belongs to the experiment", gpt2.main, [*short, flag])


def test_hours_are_those_of_the_runs_that_are_left(monkeypatch, capsys):
    rows = {"softmax": [], "diff": []}
    finished = pd.DataFrame(dict(row=["softmax"] * 5 + ["other"] * 3))
    monkeypatch.setattr(grid, "read_runs", lambda out: finished)
    monkeypatch.setattr(gpt2, "measure_speeds", lambda *args: {"softmax": 1000.0, "diff": 500.0})
    monkeypatch.setattr(gpt2, "follow_the_plan", lambda *args: None)
    args, flags = gpt2.read_arguments([*SMALL, "--tokens=3600000"])
    gpt2.train_all(rows, flags, args)
    # 3 rates and 3 seeds each. softmax: 1 run of an hour, diff: 6 runs of two hours
    tokens = train.parse(flags)[0].tokens
    said = capsys.readouterr().out
    assert "7 runs are left" in said
    assert f"about {13 * tokens / 3_600_000:,.2f} hours" in said


def test_bytes_per_token_of_what_an_evaluation_predicts(tmp_path):
    def shard(name, tokens):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())

    shard("x_train_000001.bin", [256] + [97] * 999)
    # 256 is <|endoftext|>. of the targets of the first two sequences of 4 tokens, 3 are text twice
    # and 1 is not. the third sequence is beyond --eval_tokens
    shard("x_val_000000.bin", [256, 97, 97, 97, 256, 97, 256, 97, 97, 256, 256, 256, 256])
    (tmp_path / "data/manifest.json").write_text('{"tokenizer": "bytes", "shards": []}')
    flags = ["--preset=toy", "--device=cpu", "--block_size=4", "--data=data", "--eval_tokens=8"]
    assert gpt2.bytes_per_token(flags) == 6 / 8
    assert gpt2.bytes_per_token([*flags[:-1], "--eval_tokens=12"]) == 6 / 12
