"""experiments/: the grid and its refusals, the rows, diff_v2, and the measurements by hand."""
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import TOY, assert_value_error

import bench
import model as model_module
import report
import train
from data import load_data
from experiments import ablations, checkpoints, diff_v2, grid, ladder, toy
from model import GPT, GPTConfig

torch.set_num_threads(1)  # on tensors this small, threads only wait for one another
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)


def tiny(attn, seed=1337, **overrides):
    return GPT(GPTConfig(attn=attn, **TINY | overrides), seed)


def published(name, folder="."):
    """The content of <name>.json. The table and the figure beside it are there."""
    folder = Path(folder)
    assert (folder / f"{name}.png").stat().st_size > 1000
    assert (folder / f"{name}.md").read_text().count("|") > 10
    return json.loads((folder / f"{name}.json").read_text())


def table_of(result, number=0):
    return list(result["tables"].values())[number]


# the grid, with a training that takes no time: its loss is a function of the rate and the seed


@pytest.fixture
def trained(monkeypatch):
    """A list of what train.main was asked to train. It writes a log and trains nothing.

    Above a rate of 0.01 every run diverges.
    """
    commands = []

    def fake_main(argv):
        (config,) = train.parse(argv)
        commands.append(argv)
        best = 4e-3 if config.attn == "softmax" else 1e-3
        loss = 2.0 + math.log2(config.lr / best) ** 2 + 0.01 * config.seed
        head = vars(config) | {"tokenizer": "bytes", "data": "some text", "data_sha256": "1"}
        head |= {"vocab_size": 257, "parameters": 1, "device_name": "cpu", "torch": "2"}
        last = {"step": config.steps, "tokens": 10, "val_loss": loss, "tok_per_s": 1.0}
        if config.lr > 0.01:
            last = {"step": 1, "not_finite": "train_loss nan"}
        lines = [json.dumps(head | {"date": "today"}, default=str), json.dumps(last)]
        (config.out / "log.jsonl").write_text("\n".join(lines) + "\n")
        return "finished"

    monkeypatch.setattr(train, "main", fake_main)
    return commands


ROWS = {
    "softmax": ["--attn=softmax", "--no-decay"],
    "linear": ["--attn=linear", "--no-decay"],
    "linear + decay": ["--attn=linear", "--decay"],
}


def test_a_grid_trains_each_row_with_each_seed_and_nothing_twice(trained):
    runs = grid.run_grid(ROWS, [3, 4], ["--preset=toy", "--steps=9"], Path("out"))
    assert list(zip(runs["row"], runs["seed"])) == [
        ("softmax", 3), ("softmax", 4), ("linear", 3), ("linear", 4),
        ("linear + decay", 3), ("linear + decay", 4),
    ]
    assert runs["decay"].tolist() == [False] * 4 + [True] * 2
    assert set(runs["steps"]) == {9}
    again = grid.run_grid(ROWS, [3, 4], ["--preset=toy", "--steps=9"], Path("out"))
    assert len(trained) == 6
    assert again.equals(runs)
    grid.run_grid(ROWS, [5, 4], ["--preset=toy", "--steps=9"], Path("out"))
    assert len(trained) == 9  # seed 4 is there already


def test_each_row_is_reported_at_its_own_best_rate_on_other_seeds(trained):
    runs = grid.run_grid(ROWS, [3, 4], ["--preset=toy"], Path("out"), [1e-3, 2e-3], [1, 2])
    # softmax is best at 4e-3: 2e-3 is at the edge, then 4e-3 is, and 8e-3 is worse
    softmax = grid.read_runs("out").query("row == 'softmax'")
    assert sorted(softmax["lr"][softmax["seed"] == 1]) == [1e-3, 2e-3, 4e-3, 8e-3]
    linear = grid.read_runs("out").query("row == 'linear'")
    assert sorted(linear["lr"][linear["seed"] == 1]) == [5e-4, 1e-3, 2e-3]
    assert runs.groupby("row")["lr"].unique().map(list).to_dict() == {
        "softmax": [4e-3], "linear": [1e-3], "linear + decay": [1e-3],
    }
    assert set(runs["seed"]) == {3, 4}
    assert not runs["at_edge"].any()
    assert len(trained) == 2 * (4 + 3 + 3) + 2 * 3  # two seeds choose, two others report


def test_a_rate_that_is_best_at_every_edge_is_marked(trained):
    rows = {"softmax": ROWS["softmax"]}
    runs = grid.run_grid(rows, [3], ["--preset=toy"], Path("out"), [1e-5, 2e-5], [1])
    assert runs["lr"].tolist() == [1.6e-4]  # three doublings, and still it should be larger
    assert runs["at_edge"].tolist() == [True]


def test_a_single_rate_is_used_and_not_chosen(trained):
    rows = {"softmax": ROWS["softmax"]}
    runs = grid.run_grid(rows, [3], ["--preset=toy"], Path("out"), [7e-3], [1, 2])
    assert runs["lr"].tolist() == [7e-3]
    assert len(trained) == 1


def test_a_rate_at_which_a_run_diverged_is_the_worst():
    runs = grid.read_runs("out")
    for seed, loss in ((1, 1.0), (2, math.nan)):
        for lr in (1e-3, 2e-3):
            row = dict(row="softmax", seed=seed, lr=lr, loss=2.0 if lr == 1e-3 else loss)
            runs = pd.concat([runs, pd.DataFrame([row])])
    rate, more = grid.choose_rate(runs, [1e-3, 2e-3], [1, 2])
    assert rate is None
    assert more == [5e-4]  # 2e-3 has the smallest loss of all on seed 1, but it diverged on seed 2


def test_a_run_that_diverged_is_not_trained_again(trained):
    rows = {"softmax": ROWS["softmax"]}
    job = rows, [3], ["--preset=toy"], Path("out"), [0.008, 0.016], [1, 2]
    runs = grid.run_grid(*job)
    assert runs["lr"].tolist() == [0.004]
    every_run = grid.read_runs("out")
    assert every_run["loss"][every_run["lr"] == 0.016].isna().tolist() == [True, True]
    assert len(trained) == 2 * 4 + 1
    grid.run_grid(*job)
    assert len(trained) == 2 * 4 + 1


def test_the_table_of_rates_shows_what_diverged_and_what_is_missing():
    runs = pd.DataFrame(
        [
            ("a", 1e-3, 1, 2.0), ("a", 1e-3, 2, 2.2),
            ("a", 2e-3, 1, 1.0), ("a", 2e-3, 2, math.nan),
            ("b", 1e-3, 1, 2.0),
            ("b", 4e-3, 1, math.nan), ("b", 4e-3, 2, math.nan),
            ("b", 1e-3, 3, 9.0),  # seed 3 chose nothing
        ],
        columns=["row", "lr", "seed", "loss"],
    )
    table = grid.rates_table(runs, ["b", "a"], [1, 2])
    assert report.to_markdown(table).splitlines() == [
        "| row | 0.001 | 0.002 | 0.004 |", "| --- | --- | --- | --- |",
        "| b | – | – | diverged |", "| a | 2.1 | diverged | – |",
    ]


def test_a_row_with_a_run_that_diverged_has_no_mean_and_no_difference():
    runs = pd.DataFrame(dict(
        row=list("aabbb"), loss=[1.0, 1.2, 0.1, math.nan, 0.1], lr=1e-3, at_edge=False,
        parameters=1, status=["finished"] * 3 + ["diverged: train_loss nan", "finished"],
    ))
    noise = report.Noise(grid.without_diverged(runs))
    a, b = grid.losses_table(runs, noise).to_dict("records")
    assert a["val loss"].mean == pytest.approx(1.1)
    assert b["val loss"] is None
    assert (b["seeds"], b["diverged"]) == (3, 1)
    assert noise.difference("a", "b") is None


@pytest.mark.parametrize("flag", [
    "--decay", "--no-decay", "--attn=diff", "--seed=1", "--out=elsewhere", "--restart", "--lr=1e-3",
])
def test_a_flag_that_belongs_to_the_grid_is_refused_by_name(flag, trained):
    name = flag.split("=")[0].replace("--no-", "--")
    flags = ["--preset=toy", flag]
    assert_value_error(f"^{name} belongs", grid.run_grid, ROWS, [3], flags, Path("out"), [1e-3])
    assert trained == []
    assert not Path("out").exists()


def test_a_list_of_rates_is_refused(trained):
    flags = ["--lr=1e-3,2e-3"]
    assert_value_error("a single value", grid.run_grid, ROWS, [3], flags, Path("out"))
    assert trained == []


def test_seeds_that_chose_a_rate_are_not_reported(trained):
    job = ROWS, [2, 3], [], Path("out"), [1e-3, 2e-3], [1, 2]
    assert_value_error("--seed and --choose_on share 2", grid.run_grid, *job)
    assert trained == []


def test_a_folder_of_other_settings_is_refused_naming_them(trained):
    grid.run_grid(ROWS, [3], ["--preset=toy", "--steps=9"], Path("out"))
    job = ROWS, [3], ["--preset=toy", "--steps=8"], Path("out")
    assert_value_error("steps is 9 there and 8 here", grid.run_grid, *job)
    assert len(trained) == 3


def test_a_setting_whose_default_is_none_is_a_setting(trained):
    """An earlier command had --lambda_init=0.5, and this one has the paper's formula."""
    grid.run_grid(ROWS, [3], ["--preset=toy", "--lambda_init=0.5"], Path("out"))
    job = ROWS, [3, 4], ["--preset=toy"], Path("out")
    assert_value_error("lambda_init is 0.5 there and None here", grid.run_grid, *job)
    assert len(trained) == 3


def test_a_log_without_a_field_that_came_later_has_its_default(trained):
    grid.run_grid(ROWS, [3], ["--preset=toy"], Path("out"))
    for log in Path("out").glob("*/log.jsonl"):
        first, *rest = log.read_text().splitlines(keepends=True)
        head = json.loads(first)
        del head["subln_init"]
        log.write_text(json.dumps(head) + "\n" + "".join(rest))
    grid.run_grid(ROWS, [3], ["--preset=toy"], Path("out"))
    assert len(trained) == 3


def test_two_processes_don_t_train_the_same_run(trained):
    fcntl = pytest.importorskip("fcntl")
    folder = Path("out/softmax-seed3")
    folder.mkdir(parents=True)
    with open(folder / "row.json", "a") as held:  # as if another process trained it
        fcntl.flock(held, fcntl.LOCK_EX)
        job = ROWS["softmax"], "softmax", 3, None, ["--preset=toy"], Path("out")
        assert not grid.train_if_free(*job)
    assert trained == []
    assert grid.train_if_free(*job)
    assert len(trained) == 1


def test_ctrl_c_ends_in_a_sentence_and_the_same_command_goes_on(trained, monkeypatch):
    finish = train.main

    def stopped(argv):
        finish(argv)
        if len(trained) == 2:
            Path(train.parse(argv)[0].out, "log.jsonl").unlink()
            return "stopped"
        return "finished"

    monkeypatch.setattr(train, "main", stopped)
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # Ctrl-C must still stop the tests
    job = ROWS, [3], ["--preset=toy"], Path("out")
    with pytest.raises(SystemExit) as error:
        grid.command_line("experiments.x", lambda: grid.run_grid(*job))
    assert error.value.code.startswith("experiments.x: stopped. 1 runs are finished")
    assert len(grid.run_grid(*job)) == 3


def test_ctrl_c_ends_a_wait_for_other_processes(trained, monkeypatch):
    stop = []
    monkeypatch.setattr(grid, "STOP", stop)

    def busy(file, folder):
        raise ValueError(f"{folder} is in use")

    def sleep(seconds):
        assert not stop, "it waits on"
        stop.append(signal.SIGINT)

    monkeypatch.setattr(grid.data, "lock", busy)
    monkeypatch.setattr(grid.time, "sleep", sleep)
    with pytest.raises(grid.Stopped):
        grid.run_grid(ROWS, [3], ["--preset=toy"], Path("out"))


JOBS_THAT_DONT_END = """
import os, signal, time
from pathlib import Path
from experiments.grid import in_processes

def job(number):
    Path(f"{os.getpid()}.pid").touch()
    time.sleep(600)

if __name__ == "__main__":
    # a job in the background would not notice it otherwise
    signal.signal(signal.SIGINT, signal.default_int_handler)
    list(in_processes(job, range(8), procs=2))
"""


def is_running(pid):
    """Whether a process is there and not a zombie, which only waits to be collected."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(number):
    Path("program.py").write_text(JOBS_THAT_DONT_END)
    top = str(Path(grid.__file__).parents[1])
    program = subprocess.Popen([sys.executable, "program.py"], env=os.environ | {"PYTHONPATH": top})
    while len(list(Path().glob("*.pid"))) < 2:
        assert program.poll() is None
        time.sleep(0.1)
    program.send_signal(number)
    program.wait(timeout=100)
    deadline = time.monotonic() + 100
    while running := [file.stem for file in Path().glob("*.pid") if is_running(file.stem)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def test_rows_are_picked_by_patterns():
    assert list(grid.pick(ROWS, "linear*")) == ["linear", "linear + decay"]
    assert list(grid.pick(ROWS, "*decay,softmax")) == ["softmax", "linear + decay"]
    assert_value_error("--rows=cosine is not a row. There are: softmax", grid.pick, ROWS, "cosine")


# the experiments, at a size that takes a second


SMALL = ["--n_layer=1", "--n_embd=32", "--block_size=16", "--batch_size=2", "--eval_tokens=64",
         "--device=cpu", "--eval_every=9"]


def test_toy_publishes_the_rows_that_are_there():
    flags = [*SMALL, "--steps=1", "--rates=1e-3", "--out=."]
    # the second command publishes what the first one has trained, too
    toy.main([*flags, "--seed=3", "--rows=diff,diff_v2*"])
    toy.main([*flags, "--seed=3,4", "--rows=softmax*"])
    result = published("toy")
    rows = {row["row"]: row for row in table_of(result)}
    assert len(rows) == 3 + 6
    assert rows["diff"]["seeds"] == 1
    assert rows["softmax 2 heads + decay"]["seeds"] == 2
    assert rows["diff_v2 narrow"]["parameters"] == rows["softmax"]["parameters"]
    of = {row["of"]: row for row in table_of(result, 1)}
    expected = rows["diff"]["val loss"]["mean"] - rows["softmax"]["val loss"]["mean"]
    assert of["diff − softmax"]["without decay"]["mean"] == pytest.approx(expected)
    assert len(result["runs"]) == 3 + 2 * 6


def test_rows_of_other_settings_are_not_published_beside_those_that_are_picked(trained):
    command = ["--rates=1e-3", "--seed=3", "--out=."]
    toy.main([*command, "--rows=softmax"])
    job = [*command, "--rows=diff", "--steps=100"]
    assert_value_error("steps is 500 there and 100 here", toy.main, job)
    assert len(trained) == 1


def test_every_row_of_the_toy_is_another_model():
    toy.register()
    rows = toy.rows_of_arms([]) | toy.rows_of_controls([])
    configs = {}
    for name, own in rows.items():
        (config,) = train.parse(own)
        config.vocab_size = 257
        configs[name] = config.model_config()
    assert len({repr(config) for config in configs.values()}) == len(rows) == 22 + 16
    for name, config in configs.items():
        assert config.decay == ("+ decay" in name or "short head" in name)
    # softmax has an MLP of width 336 here, and what second queries cost is 44 of it
    narrow = [config.mlp_width for config in configs.values() if config.mlp_width is not None]
    assert narrow == [292] * 4
    compared = [arm for _, *pair in toy.COMPARISONS for arm in pair]
    assert set(compared) == set(toy.ARMS)
    controls = [row for _, *pair in toy.CONTROL_COMPARISONS for row in pair]
    assert set(controls) == set(toy.rows_of_controls([]))


def test_rows_with_decay_are_a_pool_of_their_own():
    runs = pd.DataFrame(dict(decay=[False, True, False]))
    pools = ["rows without decay", "rows with decay", "rows without decay"]
    assert list(bench.noise_pools(runs)) == pools
    assert list(bench.noise_pools(runs[runs["decay"]])) == ["all rows"]


@pytest.mark.parametrize("experiment, flag", [
    (toy, "--decay"), (toy, "--n_head=2"), (toy, "--subln"), (toy, "--mlp_width=64"),
    (toy, "--preset=gpt2"), (ablations, "--lambda_init=0.1"), (ablations, "--subln"),
    (ladder, "--steps=3"), (ladder, "--tokens=3e6"),
])
def test_no_flag_falsifies_a_row_of_an_experiment(experiment, flag):
    name = flag.split("=")[0]
    command = [flag, "--out=new"]
    assert_value_error(f"^{name} belongs to the experiment", experiment.main, command)
    assert list(Path("new").iterdir()) == []


def test_the_controls_of_the_toy_are_what_they_say():
    toy.register()
    x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0)).double()
    layers = {}
    arms = ["linear", "linear_one_short_head", "linear_shift"]
    arms += ["diff_v2", "diff_v2_plus_matched", "diff_v2_minus_matched"]
    for attn in arms:
        decay = attn == "linear_one_short_head"
        layers[attn] = tiny(attn, decay=decay, rope_theta=0.0).double().blocks[0].attn
    rate = layers["linear_one_short_head"].decay_rate("cpu", torch.float64).flatten()
    assert rate.tolist() == [0.25, 0, 0, 0]

    # a token shift is the layer on tokens, half of whose channels have moved by one
    moved = x.clone()
    moved[:, 1:, 16:] = x[:, :-1, 16:]
    moved[:, 0, 16:] = 0
    torch.testing.assert_close(layers["linear_shift"](x), layers["linear"](moved))

    # without rotation a row of either matched version sums to 1, as with one map
    for attn in ("diff_v2_plus_matched", "diff_v2_minus_matched"):
        sums = layers[attn].map(x).sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    assert layers["diff_v2_plus_matched"].map(x).min() >= 0
    assert layers["diff_v2"].map(x).sum(-1).max() < 1


def test_ablations_are_the_rows_of_table_6():
    ablations.main([*SMALL, "--steps=2", "--rates=1e-3", "--seed=3", "--out=."])
    rows = table_of(published("ablations"))
    shapes = [(row["heads"], row["d"], row["norm"]) for row in rows]
    assert shapes == [
        (4, 8, False), (2, 16, False), (2, 16, True),
        (2, 8, True), (2, 8, False), (2, 8, True), (2, 8, True),
    ]
    losses = [row["val loss"]["mean"] for row in rows]
    assert len(set(losses)) == 7  # no two rows are the same model
    assert rows[0]["− Transformer"] is None
    assert rows[3]["− Transformer"]["mean"] == pytest.approx(losses[3] - losses[0])


def test_table_6_says_what_the_runs_were_and_they_are_the_toy_by_default(trained):
    command = ["--rates=1e-3", "--seed=3", "--out=."]
    ablations.main(command)
    assert all("--preset=toy" in flags for flags in trained)
    # the flags of a command that only publishes are not those of the runs
    ablations.main([*command, "--publish", "--n_embd=64"])
    first, *_ = table_of(published("ablations"))
    assert (first["heads"], first["d"]) == (4, 32)


def test_the_steps_of_the_ladder_are_those_of_its_bytes(monkeypatch):
    monkeypatch.setattr(ladder, "SIZES", [16, 32])
    rows = ladder.rows_of_sizes(["--batch_size=2", "--block_size=16"])
    assert len(rows) == 2 * len(ladder.ARMS)
    # a block of 16 channels: four projections, an MLP of width 40, two norms
    parameters = 4 * (4 * 16 * 16 + 3 * 16 * 40 + 2 * 16)
    assert f"--steps={10 * parameters // 32}" in rows["16 channels: diff"]


def test_the_ladder_says_what_changes_between_the_sizes():
    loss = {"64 channels: softmax": 2.0, "64 channels: diff": 2.5,
            "128 channels: softmax": 1.0, "128 channels: diff": 1.2}
    runs = [dict(row=row, loss=mean + d) for row, mean in loss.items() for d in (-0.1, 0.1)]
    table = ladder.differences_table(report.Noise(pd.DataFrame(runs)))
    first = table.iloc[0]
    assert first["of"] == "diff − softmax"
    assert first["change"].mean == pytest.approx(-0.3)
    assert first["change"].error == pytest.approx(first["64 channels"].error * math.sqrt(2))


# the second version


@pytest.mark.parametrize("decay", [False, True])
def test_diff_v2_is_the_released_layer(decay):
    diff_v2.register()
    layer = tiny("diff_v2", decay=decay).double().blocks[1].attn
    layer.q_proj.weight.data.mul_(5)  # maps far from flat, or a wrong one would look right
    layer.lambda_proj.weight.data.mul_(5)
    x = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0)).double()
    m = torch.arange(20).double()
    q = (x @ layer.q_proj.weight.T).unflatten(-1, (8, 8))
    k = (x @ layer.k_proj.weight.T).unflatten(-1, (4, 8))
    v = (x @ layer.v_proj.weight.T).unflatten(-1, (4, 8))
    # pairs of neighbours as complex numbers, turned by their angles
    turn = torch.exp(1j * m[:, None] * 10000 ** (-m[:4] / 4))[:, None]
    q = torch.complex(q[..., 0::2], q[..., 1::2]) * turn
    k = torch.complex(k[..., 0::2], k[..., 1::2]) * turn
    lam = 1 / (1 + torch.exp(-x @ layer.lambda_proj.weight.T))
    heads = []
    for h in range(4):
        span = 4 * 16 ** (h / 3)  # from 4 to two blocks of 32
        outputs = []
        for query in (2 * h, 2 * h + 1):
            scores = torch.einsum("bid, bjd -> bij", q[:, :, query], k[:, :, h].conj()).real
            weights = torch.exp(scores / 8**0.5)
            if decay:
                weights = weights * torch.exp(-(m[:, None] - m).clamp(min=0) / span)
            weights = weights.tril()
            outputs.append(weights / weights.sum(-1, keepdim=True) @ v[:, :, h])
        heads.append(outputs[0] - lam[:, :, h, None] * outputs[1])
    expected = torch.cat(heads, dim=-1) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [False, True])
def test_the_three_forms_of_diff_v2_agree(decay):
    diff_v2.register()
    model = tiny("diff_v2", decay=decay).double()
    idx = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(0))
    fast, _ = model(idx)
    logits, state = model.prefill(idx[:, :3])
    for t in range(3, 30):
        logits = model.step(idx[:, t : t + 1], state)
    torch.testing.assert_close(logits, fast)
    for block in model.blocks:
        block.attn.flash = False
    torch.testing.assert_close(model(idx)[0], fast)


def test_diff_v2_costs_what_softmax_costs_beside_a_narrower_mlp():
    diff_v2.register()

    def parameters(**config):
        return sum(p.numel() for p in tiny(n_embd=96, **config).parameters())

    width = diff_v2.matched_width(96, 4)
    wide = parameters(attn="diff_v2") - parameters(attn="softmax")
    narrow = parameters(attn="diff_v2", mlp_width=width) - parameters(attn="softmax")
    assert wide == 2 * (96 * 96 + 96 * 4)  # the second queries and lambda, in two layers
    assert abs(narrow) <= 2 * 3 * 96 / 2


def test_importing_an_arm_registers_nothing():
    assert "diff_v2" not in model_module.ATTENTION
    assert "linear_shift" not in model_module.ATTENTION


def test_a_program_runs_with_the_second_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    flags = [*TOY, "--n_head=4", "--steps=2", "--attn=diff_v2", "--out=run"]
    with pytest.raises(SystemExit) as end:
        diff_v2.main(["train", *flags])
    assert end.value.code == 0
    assert train.read_log("run/log.jsonl")[0]["attn"] == "diff_v2"
    with pytest.raises(SystemExit, match="name a program first: train"):
        diff_v2.main(["cook"])


# the measurements, on models whose losses are known


def unigram(attn, by=3.0, block_size=29):
    """A model that says the same after every text: f is exp(by) times as likely as others."""
    model = tiny(attn, vocab_size=257, block_size=block_size)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(p.ndim < 2)
        model.wte.weight[:, 0] = 10.0
        model.wte.weight[ord("f"), 0] += by
        model.norm.weight.fill_(model.config.n_embd**-0.5)
    return model


def save(model, path="c.pt", val="abcdefghijabcdefghij0123456789", **run):
    """A checkpoint of a model trained on x.txt, whose last tenth is val."""
    Path("x.txt").write_text("z" * (9 * len(val) - 1) + val)
    _, _, _, what = load_data(Path("x.txt"))
    model.save(path, tokenizer="bytes", step=1, run=what | dict(seed=1) | run)


def measure(verb, *flags):
    """What a measurement publishes."""
    checkpoints.main([verb, "--out=.", "--device=cpu", *flags])
    return published(verb)


# the loss of a byte that is not f in a unigram(). That of f is 3 less
OTHER = math.log(256 + math.exp(3.0))


def test_slices_by_hand():
    # the first two differ in their seed alone, so they are one arm
    save(unigram("softmax"), "a.pt")
    save(unigram("softmax", by=1.0), "b.pt", seed=2)
    save(unigram("diff"), "c.pt", subln_init=0.2)
    result = measure("slices", "--ckpt", "a.pt", "b.pt", "c.pt")
    a, b, c = result["runs"]
    assert a["all"] == pytest.approx(OTHER - 2 * 3 / 29, abs=1e-4)
    assert a["AR-hits"] == pytest.approx(OTHER - 3 / 6, abs=1e-4)  # the second e f g h i j
    first, second = table_of(result)
    assert first["arm"] == "softmax subln_init1"
    assert first["n"] == 2
    assert first["all"]["mean"] == pytest.approx((a["all"] + b["all"]) / 2)
    assert first["all"]["error"] == pytest.approx((b["all"] - a["all"]) / 2**0.5)
    assert second["arm"] == "diff subln_init0.2"
    assert second["all"] == {"mean": c["all"], "error": None}
    assert result["about"]["tokens"] == 29


def test_position_by_hand():
    # target 33 is the first f, because val's first byte is not predicted
    save(unigram("diff", block_size=16), val="a" * 33 + "f" * 17)
    result = measure("position", "--ckpt=c.pt", "--length=48")
    between = table_of(result, 0)
    up_to = table_of(result, 1)
    assert [row["arm"] for row in between] == ["diff", "diff, window"]
    for row in between:
        assert row["33 to 48"]["mean"] == pytest.approx(OTHER - 3, abs=1e-4)
    for row in up_to:
        assert row["32"]["mean"] == pytest.approx(OTHER, abs=1e-4)
        assert row["48"]["mean"] == pytest.approx(OTHER - 1, abs=1e-4)


def test_a_second_window_begins_at_the_last_half_of_the_first():
    model = tiny("softmax", block_size=8)
    text = torch.randint(97, (1, 14), generator=torch.Generator().manual_seed(0))
    windowed = checkpoints.windowed_losses(model, text)
    torch.testing.assert_close(windowed[:, :8], checkpoints.token_losses(model, text[:, :9]))
    # the second cache begins at token 5. Its first three targets had the first cache
    second = checkpoints.token_losses(model, text[:, 5:])
    torch.testing.assert_close(windowed[:, 8:], second[:, 3:])


def test_context_cuts_what_a_target_sees():
    text = "all work and no play makes jack a dull boy. " * 2
    save(tiny("softmax", vocab_size=257, block_size=16), val=text)
    model = GPT.load("c.pt")
    result = measure("context", "--ckpt=c.pt", "--contexts=1,8", "--tokens=16")
    (row,) = result["runs"]
    _, val, _, _ = load_data(Path("x.txt"))
    losses = {1: [], 8: [], "all": []}  # one window after the other, as slow as it is plain
    for i in range(2):  # two sequences of 16, the targets are the last 8 of each
        tokens = torch.from_numpy(val.sequence(i, 16))[None]
        for target in range(9, 17):
            for context, start in ((1, target - 1), (8, target - 8), ("all", 0)):
                loss = checkpoints.token_losses(model, tokens[:, start : target + 1])[0, -1]
                losses[context].append(loss.item())
    assert result["about"]["targets"] == 16
    assert row["1"] == pytest.approx(np.mean(losses[1]), abs=1e-5)
    assert row["8"] == pytest.approx(np.mean(losses[8]), abs=1e-5)
    assert row["all (9 to 16)"] == pytest.approx(np.mean(losses["all"]), abs=1e-5)
    (cost,) = table_of(result, 1)
    assert cost["1"]["mean"] == pytest.approx(row["1"] - row["all (9 to 16)"])
    assert_value_error("at most 8", measure, "context", "--ckpt=c.pt", "--contexts=9")


def test_residual_by_hand():
    save(unigram("diff", by=1.0))
    start, end = measure("residual", "--ckpt=c.pt")["runs"]
    assert end["embedding"] == pytest.approx(10, rel=0.01)
    assert end["block 1"] == pytest.approx(10, rel=0.01)  # its blocks add nothing
    assert start["embedding"] == pytest.approx(3**-0.5, rel=0.1)  # 32 numbers of 1 / sqrt(3 x 32)
    assert start["block 1"] > start["embedding"]


def test_outliers_of_planted_scores(monkeypatch):
    save(unigram("diff"), val="abcdefghijabcdeXghij0123456789")
    planted = torch.full((1, 4, 29, 29), 0.5).tril() + torch.full((29, 29), 1e6).triu(1)
    planted[:, 1, 5, 3] = -9  # query head 1 is the second branch of head 0

    def scores(layer, q, k, rope):
        return layer.score_hook(planted)

    monkeypatch.setattr(model_module.Softmax, "scores", scores)
    result = measure("outliers", "--ckpt=c.pt")
    rows = {row["of"]: row for row in result["runs"]}
    assert rows["scores, branch 1"]["top-1"] == 0.5
    second = rows["scores, branch 2"]
    assert [second["top-1"], second["top-2"], second["top-3"]] == [9, 9, 0.5]  # in both layers
    assert second["median"] == 0.5
    stream = rows["residual stream"]
    assert [stream["top-1"], stream["top-2"], stream["top-3"]] == [13, 13, 10]
    assert result["about"]["tokens"] == 29


def test_extremes_of_a_large_tensor():
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
    extremes = checkpoints.Extremes()
    for part in x.split(700_000):
        extremes.add(part)
    row = extremes.row()
    exact = x.abs().sort(descending=True).values
    assert row["top-1"] == exact[0].item()
    assert row["top-100"] == exact[99].item()
    assert row["median"] == pytest.approx(exact.median().item(), rel=0.02)


@pytest.mark.parametrize("per, held", [("head", True), ("layer", False)])
def test_four_bits_hold_seven_steps_either_side(per, held, monkeypatch):
    save(tiny("softmax", vocab_size=257, block_size=29))
    # each head has whole numbers from -7 to 7 times its own scale: four bits hold one head exactly
    scale = torch.tensor([1, 2, 3, 5]).view(4, 1, 1)
    heads = torch.arange(-7.0, 8).repeat(2)[:29] * scale
    planted = heads.expand(1, 4, 29, 29).tril() + torch.full((29, 29), 99.0).triu(1)

    def scores(layer, q, k, rope):
        return planted if layer.score_hook is None else layer.score_hook(planted)

    monkeypatch.setattr(model_module.Softmax, "scores", scores)
    result = measure("quant", "--ckpt=c.pt", f"--per={per}")
    (row,) = result["runs"]
    (above,) = table_of(result, 1)
    assert (abs(above["4 bits"]["mean"]) < 1e-7) == held
    assert abs(above["8 bits"]["mean"]) > 1e-7
    assert above["8 bits"]["mean"] == pytest.approx(row["8 bits"] - row["exact"])


def test_a_score_hook_is_taken_off_again():
    model = tiny("diff")
    idx = torch.randint(97, (1, 20))
    before, _ = model(idx)
    with pytest.raises(RuntimeError):
        with checkpoints.score_hook(model, lambda scores: 0 * scores):
            assert (model(idx)[0] - before).abs().max() > 0.01
            raise RuntimeError
    assert all(block.attn.flash and block.attn.score_hook is None for block in model.blocks)
    assert torch.equal(model(idx)[0], before)


def test_maps_show_both_branches_of_a_difference():
    save(unigram("diff", by=1.0))
    rows = measure("maps", "--ckpt=c.pt", "--text=cat mat", "--layer=1")["runs"]
    sums = {row["map"]: row["sum of a row"] for row in rows if row["layer"] == 1}
    lam = unigram("diff").blocks[0].attn.lambda_full().item()
    assert sums["A_1"] == pytest.approx(1, abs=1e-4)
    assert sums["A_2"] == pytest.approx(1, abs=1e-4)
    assert sums["A_1 − λA_2"] == pytest.approx(1 - lam, abs=1e-4)

    model = tiny("diff")
    idx = torch.randint(97, (1, 9))
    layer = model.blocks[0].attn
    with torch.no_grad():
        maps = checkpoints.attention_maps(model, idx)[0]
        x = model.blocks[0].norm1(model.wte(idx))
        torch.testing.assert_close(maps["A_1 − λA_2"], layer.map(x))
        difference = maps["A_1"] - layer.lambda_full() * maps["A_2"]
        torch.testing.assert_close(maps["A_1 − λA_2"], difference)


def test_maps_of_two_tokenizers_are_refused(monkeypatch):
    # that of gpt2 would be downloaded
    monkeypatch.setattr(checkpoints, "get_tokenizer", lambda name: SimpleNamespace(name=name))
    for tokenizer in ("bytes", "gpt2"):
        run = dict(data="some text", data_sha256=tokenizer, seed=1)
        tiny("diff").save(f"{tokenizer}.pt", tokenizer=tokenizer, step=1, run=run)
    assert_value_error("one tokenizer", measure, "maps", "--ckpt", "bytes.pt", "gpt2.pt")


def test_hellaswag_by_hand():
    pytest.importorskip("datasets")
    save(unigram("diff", by=1.0))
    # of f the smallest mean loss; of the single q, being short, the smallest sum
    endings = ["qqqqq", "ffff", "q", "qqqqqqq"]
    df = pd.DataFrame(dict(ctx="x", endings=[endings] * 3, label=["1", "1", "2"]))
    Path("stories").mkdir()
    df.to_json("stories/validation.jsonl", orient="records", lines=True)
    (row,) = measure("hellaswag", "--ckpt=c.pt", "--source=stories")["runs"]
    assert row["accuracy, normalised"] == pytest.approx(2 / 3)
    assert row["accuracy, by sum"] == pytest.approx(1 / 3)
    assert row["standard error"] == pytest.approx((2 / 9 / 3) ** 0.5)
    assert row["contexts cut"] == 0


def test_checkpoints_that_don_t_fit_are_refused_in_a_sentence():
    assert_value_error("there is no checkpoint nope", measure, "slices", "--ckpt=nope")
    tiny("softmax").save("nameless.pt")
    refused = "nameless.pt does not say what it was trained on"
    assert_value_error(refused, measure, "slices", "--ckpt=nameless.pt")
    save(unigram("softmax"))
    assert_value_error("names a checkpoint twice", measure, "quant", "--ckpt", "c.pt", "c.pt")
    shutil.copy("x.txt", "y.txt")
    Path("x.txt").write_text("another text " * 100)
    assert_value_error("trained on other data", measure, "quant", "--ckpt=c.pt")
    assert measure("slices", "--ckpt=c.pt", "--data=y.txt")["about"]["data"] == "y.txt"
