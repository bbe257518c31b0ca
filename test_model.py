"""All the tests, in under 3 minutes on two CPU cores: `pytest test_model.py`. With `-m slow` the long ones."""
import gzip
import importlib
import json
import math
import multiprocessing
import os
import random as stdlib_random
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from itertools import count, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiktoken
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import bench
import model as model_module
import prepare_fineweb
import sample
import train
from experiments import ablations, diff_v2, factors, ladder, recall
from model import ATTENTION, GPT, KERNELS, GPTConfig, Linear, next_token, phi, pick_kernel, rotate
from prepare_fineweb import EOT, Shards, get_tokenizer, load_manifest

HERE = Path(__file__).parent
torch.set_num_threads(1)  # on tensors this small, threads only wait for one another
ALL, DIFF, LINEAR = ["softmax", "diff", "linear", "diff_linear"], ["diff", "diff_linear"], ["linear", "diff_linear"]
TINY = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_embd=32)
TOY = ["--device=cpu", "--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=32", "--batch_size=4", "--steps=24",
       "--eval_every=8", "--log_every=1", "--save_every=2", "--eval_tokens=256"]  # fmt: skip
V2 = {name: ATTENTION.pop(name) for name in ("diff_v2", "diff_v2_narrow")}  # for their own tests only
each_arm = pytest.mark.parametrize("attn, decay", list(product(ALL, [False, True])))
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tiny(attn, seed=1337, **overrides):
    return GPT(GPTConfig(attn=attn, **TINY | overrides), seed)


def layer_of(attn, spread=3.0, **overrides):
    """The second attention layer, its q, k and norm scaled so that maps are far from flat and weights far from one."""
    layer = tiny(attn, **overrides).double().blocks[1].attn
    with torch.no_grad():
        layer.q_proj.weight.mul_(spread / 0.02 / 32**0.5)
        layer.k_proj.weight.mul_(1 / 0.02 / 32**0.5)
        if layer.subln is not None:
            layer.subln.weight.add_(0.3 * torch.randn(layer.subln.weight.shape, generator=seeded(5)))
    return layer


def seeded(n):
    return torch.Generator().manual_seed(n)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def tokens(B, T, seed=0):
    return torch.randint(97, (B, T), generator=seeded(seed))


def steps(layer, x, first=1):
    """layer(x), one token at a time after a prefill of the first ones."""
    state, R = {}, layer.rotation(x)
    y = [layer.prefill(x[:, :first], R[:first], state)]
    return torch.cat(y + [layer.step(x[:, t : t + 1], R[t : t + 1], state) for t in range(first, x.shape[1])], 1)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def weights(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def refused(says, f, *args, **how):
    with pytest.raises(ValueError, match=says):
        f(*args, **how)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("attn", [*ALL, "diff_v2"])
def test_three_forms_agree(attn, T, decay, monkeypatch):
    monkeypatch.setattr(model_module, "ATTENTION", ATTENTION | V2)
    layer, x, weight = layer_of(attn, block_size=256, decay=decay), random(2, T, 32), random(2, T, 32, seed=1)
    inputs, found = [x.requires_grad_(), *layer.parameters()], []
    for layer.flash in (True, False):
        y = layer(x)
        found.append([y, *torch.autograd.grad((y * weight).sum(), inputs)])
    for fast, by_map in zip(*found):
        assert (fast - by_map).abs().max() < 1e-10 * max(1, by_map.abs().max())
    with torch.no_grad():
        for layer.flash, first in ((True, 1), (True, T - T // 3), (False, T - T // 3)):
            assert (steps(layer, x, first) - y).abs().max() < 1e-10


def equations(layer, x, spans):
    """layer(x) and its map, one entry at a time from the papers' equations, with none of model.py's code."""
    (B, T, C), d, H = x.shape, layer.d, layer.n_head
    diff, linear = hasattr(layer, "lambda_q1"), isinstance(layer, Linear)
    q, k, v = ((x @ p.weight.T).numpy(force=True) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    theta, maps = 10000 ** (-2 * np.arange(d // 2) / d), np.zeros((B, H, T, T))
    for b, h, i in product(range(B), range(H), range(T)):
        qi, kh, distance = q[b, i, h * d : (h + 1) * d], k[b, : i + 1, h * d : (h + 1) * d], i - np.arange(i + 1)
        D = math.exp(-1 / spans[h // 2 if diff else h]) ** distance
        if linear:
            qi, kh = (np.where(u > 0, u + 1, np.exp(np.minimum(u, 0))) for u in (qi, kh))
        turn = np.exp(1j * distance[:, None] * theta)  # RoFormer, Eq. 12: a pair is a complex number
        rotated = ((qi[0::2] + 1j * qi[1::2]) * (kh[:, 0::2] - 1j * kh[:, 1::2]) * turn).sum(-1).real
        w = rotated if linear else np.exp(rotated / math.sqrt(d))
        maps[b, h, i, : i + 1] = w * D / (kh @ qi @ D if linear else w @ D)
    if diff:
        dot1, dot2 = (layer.lambda_q1 @ layer.lambda_k1).item(), (layer.lambda_q2 @ layer.lambda_k2).item()
        maps = maps[:, 0::2] - (math.exp(dot1) - math.exp(dot2) + layer.lambda_init) * maps[:, 1::2]
    y = maps @ v.reshape(B, T, maps.shape[1], -1).transpose(0, 2, 1, 3)
    if layer.subln is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * layer.subln.weight.numpy(force=True)
        y = y * (1 - layer.lambda_init) if diff else y
    return y.transpose(0, 2, 1, 3).reshape(B, T, C) @ layer.out_proj.weight.numpy(force=True).T, maps


@pytest.mark.parametrize("subln", [True, False])
@each_arm
def test_the_papers_equations(attn, decay, subln):
    layer, x = layer_of(attn, subln=subln, decay=decay), random(2, 13, 32)
    spans = [4, 64] if attn in DIFF else [4, 4 * 16 ** (1 / 3), 4 * 16 ** (2 / 3), 64]  # to twice the block of 32
    y, A = equations(layer, x, spans if decay else [math.inf] * 4)
    assert abs(layer.map(x).numpy(force=True) - A).max() < 1e-12
    assert abs(layer(x).numpy(force=True) - y).max() < 1e-12
    layer.flash, layer.scores = False, lambda q, k, R: torch.zeros(2, 4, 13, 13)  # what a measurement puts there
    assert abs(layer.map(x).numpy(force=True) - A).max() > 1e-2
    assert abs(layer(x).numpy(force=True) - y).max() > 1e-3


def test_lambda_init_counts_layers_from_0():
    assert [round(b.attn.lambda_init, 4) for b in tiny("diff", n_layer=4).blocks] == [0.2, 0.3555, 0.4707, 0.5561]
    assert [b.attn.lambda_init for b in tiny("diff", lambda_init=0.5).blocks] == [0.5, 0.5]


def test_rotation_is_exact_far_away():
    x, q, k = torch.zeros(1, 1, 256), random(1, 1, 1, 64).float(), random(1, 1, 1, 64, seed=1).float()
    turn = lambda y, m, **theta: rotate(y, tiny("linear", n_embd=256, **theta).blocks[0].attn.rotation(x, m))
    near, far = (turn(q, 19) * turn(k, 0)).sum(), (turn(q, 10_000_019) * turn(k, 10_000_000)).sum()
    assert abs(near - far) < 1e-4 and torch.equal(turn(q, 1000, rope_theta=0.0), q)


def test_phi_keeps_its_tail_in_bf16():
    x = torch.tensor([-20.0, -7.5, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(x).sum(), x)
    assert phi(x).tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 3], rel=1e-2)
    assert slope.tolist() == pytest.approx([math.exp(-20), math.exp(-7.5), 1, 1], rel=1e-2)


def errors(attn, kernel="sdpa", T=200, dtype=torch.bfloat16, device="cpu", **how):
    """How far from the map in float64, relatively, are the outputs of steps, map and fast form, and the fast form's
    gradients of x and of all parameters. bfloat16 is float32 under autocast, as in training."""
    layer, stored = layer_of(attn, block_size=256, **how), torch.promote_types(dtype, torch.float32)
    layer.to(device, stored).kernel = kernel
    x, weight = (random(2, T, layer.config.n_embd, seed=s).to(device, stored) for s in (0, 1))

    def output_and_gradients(x):
        y = layer(x.requires_grad_())
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])]

    layer.double().flash = False
    exact = output_and_gradients(x.double())
    layer.to(stored)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        with torch.no_grad():
            by_map, layer.flash = layer(x), True
            by_steps = steps(layer, x)
        found = [by_steps, by_map, *output_and_gradients(x)]
    return [relative(a, b) for a, b in zip(found, [exact[0], exact[0], *exact])]


@pytest.mark.parametrize("device, kernel", [("cpu", "sdpa"), *(pytest.param("cuda", k, marks=cuda) for k in KERNELS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_arm
def test_precision_of_every_form(attn, decay, dtype, device, kernel):
    """bf16 under 2e-2 (3e-2 with decay) and float32 under 1e-3. The subtraction costs digits: diff in bf16 is at most
    2 sqrt(1 + lambda^2) / (1 - lambda) times as far off as softmax."""
    torch.set_float32_matmul_precision("highest")
    try:
        pick_kernel(tiny(attn, n_embd=256, decay=decay).to(device), "auto" if attn in LINEAR else kernel, dtype)
    except ValueError as e:
        pytest.skip(str(e))
    how = dict(dtype=dtype, device=device, spread=0.3, n_embd=256, decay=decay)  # heads of 64
    worst = max(errors(attn, kernel, **how))
    assert worst < {torch.bfloat16: 3e-2 if decay else 2e-2, torch.float32: 1e-3}[dtype]
    if attn == "diff" and dtype == torch.bfloat16:  # lambda is 0.36
        assert worst < 3.3 * max(errors("softmax", kernel, **how))


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_a_steps_scores_are_not_rounded_to_bf16(attn):
    by_steps, _, fast, *_ = errors(attn, spread=8.0)  # scores are large
    assert by_steps < 1.15 * fast


def test_long_sums_stay_in_float32():
    k = phi(torch.randn(8192, generator=seeded(0))).bfloat16()
    assert abs(sum(k) - k.double().sum()) > 1000  # a plain bf16 sum
    layer, x, state, exact = layer_of("linear").float(), random(1, 8192, 32), {}, {}
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.prefill(x.float(), layer.rotation(x.float()), state)
        expected = layer.double().prefill(x, layer.rotation(x), exact)
    assert relative(y[:, -64:], expected[:, -64:]) < 2e-2
    for name in ("S", "Z"):
        assert state[name].dtype == torch.float32 and relative(state[name], exact[name]) < 5e-3


def test_impossible_models_are_refused():
    for name, value in (("attn", "cosine"), ("n_embd", 30), ("n_embd", 36), ("n_head", 1), ("n_layer", 0)):
        refused(name, GPTConfig, **TINY | dict(attn="diff") | {name: value})


def test_parameters_are_equal_but_for_lambda_and_norm():
    sizes, d, layers = [sum(p.numel() for p in tiny(attn).parameters()) for attn in ALL], 8, 2
    assert sizes == [sizes[0], sizes[0] + layers * (4 * d + 2 * d)] * 2
    assert set(weights(tiny("diff").blocks[0].attn)) == {
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "subln.weight",
        "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}  # fmt: skip


def test_shared_parameters_are_the_same_bits():
    softmax, diff, other = weights(tiny("softmax")), weights(tiny("diff")), weights(tiny("softmax", seed=2))
    torch.manual_seed(3)  # whatever the global generator is doing
    assert softmax == weights(tiny("linear")) and diff == weights(tiny("diff_linear"))
    assert all(softmax[name] == diff[name] for name in softmax)
    assert all((other[name] == softmax[name]) == ("norm" in name) for name in softmax)


def test_init_has_the_stated_spread_and_guesses():
    model = GPT(GPTConfig(attn="diff", n_layer=3, n_head=8, n_embd=256, vocab_size=512, subln_init=0.2))
    for name, p in model.named_parameters():
        end = "out_proj" in name or "down_proj" in name
        std = 0.1 if "lambda" in name else 0.02 / 6**0.5 if end else 0.02
        if "norm" in name or "subln" in name:
            assert torch.equal(p, torch.full_like(p, 0.2 if "subln" in name else 1.0))
        else:
            assert p.std().item() == pytest.approx(std, rel=0.3 if p.numel() < 100 else 0.03)
    for attn, decay in product(ALL, [False, True]):
        model, idx = tiny(attn, decay=decay), tokens(4, 257)
        logits, loss = model(idx[:, :-1], idx[:, 1:])
        assert logits.shape == (4, 256, 97) and not logits.requires_grad
        assert loss.item() == pytest.approx(math.log(97), rel=0.03)
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in model.parameters())  # everything learns
        last, nothing = model(idx[:, :-1])
        assert nothing is None and torch.allclose(last, logits[:, -1:], atol=1e-5)
        near = model.bfloat16()(idx[:, :-1], idx[:, 1:])[1]  # without autocast
        assert abs(near - loss) < 2e-2 and len(list(model.generate(idx[:, :5], 8))) == 8


@pytest.mark.parametrize("attn", DIFF)
def test_compiles_to_one_graph_for_any_length(attn):
    torch._dynamo.reset()
    model = tiny(attn, n_layer=1, decay=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (65, 64):
        loss = compiled(tokens(3, T), tokens(3, T))[1]
        loss.backward()
        assert loss.item() == pytest.approx(model(tokens(3, T), tokens(3, T))[1].item(), abs=1e-5)


@pytest.mark.parametrize("prompt", [1, 40])
@each_arm
def test_greedy_steps_equal_recomputation(attn, decay, prompt):
    model = tiny(attn, block_size=16, decay=decay).double()
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(8)  # so that the context speaks louder than the last token
        idx = tokens(2, prompt, seed=1)
        made = torch.stack(list(model.generate(idx, 60, temperature=0)), 1)
        kept = idx if attn in LINEAR else idx[:, -16:]
        for t in range(60):
            if attn not in LINEAR and kept.shape[1] > 16:
                kept = kept[:, -8:]
            assert torch.equal(model(kept)[0][:, -1].argmax(-1), made[:, t])
            kept = torch.cat((kept, made[:, t : t + 1]), 1)
    assert made.dtype == torch.int64 and len(set(made[0].tolist())) > 5  # not one token for ever


@pytest.mark.parametrize("attn", ALL)
def test_a_step_is_one_graph_of_static_shapes(attn):
    """Compiled once, it says over refills and for another text what it says without. A full cache is full."""
    torch._dynamo.reset()
    model, counter = tiny(attn, block_size=16, n_layer=1, decay=True).double(), CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.step, backend=counter, fullgraph=True)
    for prompt in (7, 3):
        idx = tokens(2, prompt, seed=prompt)
        eager, compiled = (torch.stack(list(model.generate(idx, 40, temperature=0, step=s))) for s in (None, step))
        assert torch.equal(eager, compiled)
    assert counter.frame_count == 1
    with torch.no_grad(), nullcontext() if attn in LINEAR else pytest.raises((IndexError, RuntimeError)):
        model.step(tokens(1, 1), model.prefill(tokens(1, 16))[1])


def test_choices_follow_temperature_top_k_and_top_p():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits, g = p.log()[[2, 0, 3, 1]].expand(20_000, -1), seeded(0)  # token 1 is likeliest, then 3, 0, 2
    top_2, top_3 = [0.625, 0.375, 0, 0], [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]
    cases = [(1, None, None, p.tolist()), (0, None, None, [1, 0, 0, 0]), (1e-50, None, None, [1, 0, 0, 0]),
             (1, 2, None, top_2), (1, 99, None, p.tolist()), (1, None, 0.79, top_2), (1, None, 0.81, top_3),
             (1, 2, 0.6, [1, 0, 0, 0]), (1, None, 1.0, p.tolist()), (1, None, 1e-50, [1, 0, 0, 0]),
             (0.5, None, None, (p**2 / (p**2).sum()).tolist())]  # fmt: skip
    for temperature, top_k, top_p, expected in cases:
        chosen = torch.bincount(next_token(logits, temperature, top_k, top_p, g)[:, 0], minlength=4)[[1, 3, 0, 2]]
        assert (chosen / 20_000).tolist() == pytest.approx(expected, abs=0.02)
    model, idx = tiny("diff"), torch.zeros(3, 4, dtype=torch.int64)
    once, again = (torch.stack(list(model.generate(idx, 20, generator=seeded(4)))) for _ in range(2))
    assert torch.equal(once, again) and len({tuple(row) for row in once.T.tolist()}) == 3 and once.max() < 97
    for wrong in (dict(temperature=-1), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5)):
        refused("need temperature", next, model.generate(idx, 1, **wrong))


def test_load_refuses_what_is_not_ours():
    class Bomb:
        def __reduce__(self):
            return os.mkdir, ("boom",)

    model = tiny("diff")
    model.save("good.pt")
    whole = Path("good.pt").read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(model.wte.weight.detach().numpy().tobytes()) + 1000] ^= 16  # one bit of one weight
    for name, content in dict(empty=b"", cut=whole[:-100], flipped=flipped).items():
        Path(name).write_bytes(content)
    for name, config in dict(foreign=None, bomb=Bomb(), misfit=TINY, unknown=dict(attn="quadratic")).items():
        torch.save({"config": config, "model": {"wte.weight": torch.zeros(3)}}, name)
    model.blocks[0].attn.lambda_q1.data[3] = math.nan
    model.save("infinite")
    for name in ("empty", "cut", "flipped", "foreign", "bomb", "misfit", "unknown", "infinite"):
        with pytest.raises(ValueError, match=name) as e:
            GPT.load(name)
        assert "\n" not in str(e.value)
    assert not Path("boom").exists()


def test_rearranged_expression_has_the_same_tokens():
    try:
        fast, plain, draw = get_tokenizer("gpt2"), tiktoken.get_encoding("gpt2"), stdlib_random.Random(0)
    except OSError as e:
        pytest.skip(str(e))
    parts = [*" \n\t\r\x1c\x85\u00a0\u3000\u2028'aAzé雪ก5½²_-.😀\u0301\u200d\0", "  ", "\n\n", "'ll", EOT]
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=60))
        assert fast.encode_ordinary(text) == plain.encode_ordinary(text), repr(text)


def documents(n, seed=0):
    draw = stdlib_random.Random(seed)
    return [" ".join(draw.choices(["to", "be", "or", "not", "雪"], k=draw.randrange(60))) for _ in range(n)]


def write_source(path, texts):
    """texts as a file of the kind that path's suffix names, or as a folder of parquet files with a config "small"."""
    df = pd.DataFrame({"other": texts, "text": texts})
    if path.suffix == ".txt":
        path.write_text("".join(texts), newline="")
    elif path.suffix == ".parquet":
        df.to_parquet(path, row_group_size=100)
    elif path.suffix:
        df.to_json(path, orient="records", lines=True)
    else:
        path.mkdir()
        (path / "README.md").write_text("---\nconfigs: [{config_name: small, data_files: '*.parquet'}]\n---\n")
        df[:150].to_parquet(path / "0.parquet")
        df[150:].to_parquet(path / "1.parquet", row_group_size=100)


def prepare(source, out, *flags):
    prepare_fineweb.main([f"--source={source}", f"--out={out}", "--tokenizer=bytes", "--procs=2", *flags])


def as_bytes(texts):
    return [token for text in texts for token in (256, *text.encode())]


def tokens_of(folder):
    """An independent reader of the format."""
    tokens = []
    for path in sorted(Path(folder).glob("*.bin"), key=lambda path: path.stem[-6:]):
        data = path.read_bytes()
        assert np.frombuffer(data[:1024], "<i4").tolist() == [20240520, 1, len(data) // 2 - 512] + [0] * 253
        tokens += np.frombuffer(data[1024:], "<u2").tolist()
    return tokens


def contents(folder, pattern="*"):
    return {path.name: path.read_bytes() for path in Path(folder).glob(pattern)}


@pytest.mark.parametrize("source", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet", "folder"])
def test_goes_on_after_every_shard(source):
    texts = documents(400) + ["long " * 5000, f"a {EOT} b\r\n\x00 \u2028", ""] + documents(300, seed=1)
    flags = "--shard_tokens=2e4", "--val_tokens=3e3", "--name=small"
    write_source(Path(source), texts)
    prepare(source, "o", *flags)
    whole, tokens = contents("o", "*.bin"), as_bytes(["".join(texts)] if source == "x.txt" else texts)
    assert tokens_of("o") == tokens
    train, val, name, _ = prepare_fineweb.load_data(Path("o"))
    assert name == "bytes" and train.sequence(20, 999).tolist() == tokens[22_980:23_980]  # across a seam
    manifest = load_manifest("o")
    shards = manifest["shards"]
    assert val.tokens == 3000 and sum(shard["documents"] for shard in shards) == tokens.count(256)
    for n in range(len(shards)):  # killed after shard n had got its name and before it was in the manifest
        for shard in shards[n + 1 :]:
            Path("o", shard["file"]).unlink()
        Path("o/manifest.json").write_text(json.dumps(manifest | {"source_ended": False, "shards": shards[:n]}))
        Path("o/shard.tmp").write_bytes(b"half")
        prepare(source, "o", *flags)
        assert contents("o", "*.bin") == whole, n


def test_exact_number_of_tokens_and_nothing_but_more_of_them_later(capsys):
    texts, source, run = documents(400), Path("x.jsonl"), ["x.jsonl", "o", "--shard_tokens=4e3"]
    write_source(source, texts)
    for tokens in (2500, 9000, 12000):
        prepare(*run, f"--tokens={tokens}")
        assert tokens_of("o") == as_bytes(texts)[:tokens]
    refused("not 10,000", prepare, *run, "--tokens=1e4")
    refused("shard_tokens 4000, not 3000", prepare, *run, "--shard_tokens=3e3")
    with open("o/.lock") as f:
        train.lock(f, "here")
        refused("another run", prepare, *run)
    write_source(source, texts + [""])
    refused("has changed", prepare, *run)
    write_source(source, texts)
    prepare(*run)
    prepare(*run)
    assert "finished before" in capsys.readouterr().out
    prepare("x.jsonl", "whole", "--shard_tokens=4e3")
    assert contents("o", "*.bin") == contents("whole", "*.bin")
    Path("o/finewebedu_train_000001.bin").write_bytes(bytes(2024))
    refused("is not a token shard", prepare, *run)
    Path("o/manifest.json").unlink()
    refused("not made here", prepare, *run)


def test_pretokenized(monkeypatch):
    write_source(Path("x.jsonl"), documents(200))
    prepare("x.jsonl", "made", "--shard_tokens=2e3")
    get = lambda repo, name, local_dir, **_: shutil.copy(f"made/{name}", local_dir)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, repo_type: ["README.md", *os.listdir("made")])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", get)
    prepare_fineweb.main(["--pretokenized", "--out=o", "--tokens=3e3"])
    assert tokens_of("o") == tokens_of("made")[:4000]
    prepare_fineweb.main(["--pretokenized", "--out=o"])
    assert contents("o", "*.bin") == contents("made", "*.bin") and prepare_fineweb.load_data(Path("o"))[2] == "gpt2"


@pytest.mark.slow
def test_preparing_takes_less_than_600_MB():
    pd.DataFrame({"text": ["all work and no play " * 250] * 50_000}).to_parquet("a.parquet", row_group_size=1000)
    call = [sys.executable, f"{HERE}/prepare_fineweb.py", "--source=a.parquet", "--tokenizer=bytes", "--tokens=2e8"]
    code = f"import resource as r, subprocess as s; s.run({call}); print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"
    *_, done, peak = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert "200,000,000 tokens in 2 shards" in done and int(peak) < 600e3  # kB


def test_every_sequence_is_seen_once_per_epoch_in_an_order_of_its_own():
    data, orders = Shards([np.arange(1001, dtype="<u2") % 500]), []  # 100 sequences of 10
    (args,) = train.parse(["--device=cpu", "--block_size=10", "--batch_size=4", "--total_batch=40", "--steps=50"])
    for args.seed, epoch in product((1, 2), (0, 1)):
        batches = [train.batch(data, args, step, 0, 500) for step in range(25 * epoch, 25 * epoch + 25)]
        orders.append(torch.cat(batches)[:, 0].tolist())
        assert sorted(orders[-1]) == sorted([10 * i % 500 for i in range(100)])
    assert len(set(map(tuple, orders))) == 4


def test_rate_presets_names_and_processes(monkeypatch):
    arguments = lambda *flags: train.parse(["--device=cpu", *flags])[0]
    args = arguments("--steps=100", "--warmup=10", "--lr=1")
    rates = [train.learning_rate(s, args) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1 and np.allclose(np.diff(rates[10:]), -1 / 90)
    assert arguments("--preset=gpt2").steps == 5341 and arguments("--tokens=1e6").steps == math.ceil(1e6 / 2048)
    out = lambda *flags: str(arguments(*flags).out)
    assert out("--attn=diff") == out("--attn=diff", "--lr=2e-3", "--seed=1337", "--steps=9") == "out/diff"
    assert out("--attn=diff", "--no-subln", "--lr=3e-3", "--seed=2") == "out/diff-nosubln-lr3e-3-seed2"
    assert out("--lambda_init=0.5", "--n_layer=2", "--no-flash") == "out/softmax-n_layer2-noflash-lambda_init0.5"
    assert out("--seed=9007199254740993") == "out/softmax-seed9007199254740993"  # a float would end in 2
    assert out("--lr=0.00123456789") != out("--lr=0.00123456788") and out("--out=here") == "here"
    assert [str(run.out) for run in train.parse(["--seed=1,2,1", "--out=x"])] == ["x/softmax-seed1", "x/softmax-seed2"]
    monkeypatch.setenv("RANK", "2")  # torchrun sets both
    refused("RANK=2 does not fit WORLD_SIZE=1", arguments)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert arguments("--total_batch=7680").batch_size == 5  # the next below 8 that divides


def test_train_writes_a_run_and_sample_reads_it(monkeypatch, capsys):
    Path("any.txt").write_text("Once upon a time there was a Größe 🙂. " * 200, encoding="utf-8")
    flags = [*TOY, "--steps=6", "--eval_every=4", "--log_every=2", "--attn=diff", "--data=any.txt", "--out=out/x"]
    monkeypatch.setitem(train.PEAK, "cpu", 1e9)
    assert train.main(flags) and "step     6/6" in capsys.readouterr().out
    head, lines = train.read_log("out/x/log.jsonl")
    flops = 6 * head["parameters"] + 12 * 32 * 32  # a token; one layer, 32 channels, 32 tokens
    assert lines[1]["mfu"] == pytest.approx(lines[1]["tok_per_s"] * flops / 1e9)
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    assert (head["attn"], head["tokenizer"], head["torch"]) == ("diff", "bytes", torch.__version__)
    assert [(line["step"], line["tokens"]) for line in lines] == [(0, 0), (2, 2 * 128), (4, 4 * 128), (6, 6 * 128)]
    assert {"train_loss", "lr", "grad_norm", "tok_per_s", "mfu"} <= lines[1].keys() and "val_loss" not in lines[1]
    assert all(line["val_loss"] > 0 and len(line["lambda"]) == 1 and line["sample"] for line in lines[::2])
    # the newest checkpoint under out/; the same seed says the same; the prompt may be empty or longer than the block
    for prompt, dtype in ("Once upon a time", "float32"), ("", "bfloat16"), ("Größe 🙂" * 20, "float32"):
        flags = [f"--prompt={prompt}", "--max_new_tokens=9", "--num_samples=2", "--device=cpu", f"--dtype={dtype}"]
        sample.main(flags)
        out, err = capsys.readouterr()
        sample.main(flags)
        assert out == capsys.readouterr().out and out.startswith(prompt) and "tokens/s" in err and "sample 2\n" in out
    # whole characters, and nothing after the end of a text
    rows, written = [[*"é🙂".encode(), 256, 65, 65], [*b"ab", 256, 65, 65, 65, 65, 65, 65]], []
    monkeypatch.setattr(GPT, "generate", lambda *args, **how: iter(torch.tensor(rows).T))
    monkeypatch.setattr(sys.stdout, "write", written.append, raising=False)
    sample.main(["--ckpt=out/x", "--num_samples=2", "--device=cpu"])
    assert "".join(written) == "é🙂\n\n--- sample 2\nab\n" and "🙂" in written


def forked(*flags, nth=0, owner=train, name="learning_rate", do=lambda: signal.raise_signal(signal.SIGKILL)):
    """The exit code of train.py in a child process, which does something before its nth call of owner.name."""
    inner, calls = getattr(owner, name), count(1)

    def replacement(*args):
        if next(calls) == nth:
            do()
        return inner(*args)

    def child():
        setattr(owner, name, replacement)
        sys.exit(train.main(flags) is False)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def trace(folder):
    """A run's log without what a clock says, and its weights."""
    records, model = train.read_log(f"{folder}/log.jsonl")[1], GPT.load(f"{folder}/ckpt.pt")
    assert model.extra["step"] == records[-1]["step"]
    for record in records:
        del record["tok_per_s"], record["mfu"]
    return records, weights(model)


@pytest.mark.parametrize("more", ["--attn=softmax", "--attn=diff_linear --decay --subln_init=0.2 --total_batch=256"])
def test_stopped_anywhere_it_ends_in_the_same_bits(more, capfd):
    undisturbed = [*TOY, *more.split()]
    flags = [*undisturbed, "--out=cut"]
    # a save is fsync of the log, fsync of the checkpoint, replace; the first is that of step 0
    for n, name in ((1, "fsync"), (1, "replace"), (2, "fsync"), (3, "fsync"), (2, "replace"), (6, "fsync")):
        assert forked(*flags, nth=n, owner=os, name=name) == -signal.SIGKILL
    for n in (2, 5, 3):
        assert forked(*flags, nth=n) == -signal.SIGKILL
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # torch.save raises a RuntimeError
    done = GPT.load("cut/ckpt.pt").extra["step"]
    assert forked(*flags, nth=1, do=limit) == 1 and GPT.load("cut/ckpt.pt").extra["step"] == done
    assert capfd.readouterr().err.splitlines()[-1].startswith("OSError: ")  # of which the program says the message
    assert "ckpt.pt.tmp" not in os.listdir("cut")
    for number in (signal.SIGINT, signal.SIGTERM):  # the step is finished and saved
        done = GPT.load("cut/ckpt.pt").extra["step"]
        stop = lambda: (signal.signal(number, train.on_signal), signal.raise_signal(number))  # noqa: B023
        assert forked(*flags, nth=3, do=stop) == 0 and f"stopped after step {done + 3} of 24" in capfd.readouterr().out
        saved, last = GPT.load("cut/ckpt.pt").extra, train.read_log("cut/log.jsonl")[1][-1]
        assert saved["step"] == done + 3 and saved["optimizer"]["param_groups"][0]["lr"] == last["lr"]
    assert forked(*flags) == forked(*undisturbed, "--out=whole") == 0 and trace("cut") == trace("whole")


def test_a_loss_that_is_not_finite_stops_the_run(capsys):
    assert train.main([*TOY, "--lr=1e30", "--out=wild"]) is False and "stops at step 2" in capsys.readouterr().err
    assert "NaN" not in Path("wild/log.jsonl").read_text() and GPT.load("wild/ckpt.pt").extra["step"] == 0


def test_another_run_is_refused_and_another_pace_is_not(monkeypatch):
    Path("any.txt").write_text("Once upon a time there was another text. " * 900)
    flags = [*TOY, "--attn=diff", "--steps=4", "--out=run"]
    assert forked(*flags, nth=3) == -signal.SIGKILL
    before = contents("run")
    for flag, says in (("--attn=softmax", "attn is 'diff' there and 'softmax' here"), ("--n_embd=64", "n_embd"),
                       ("--lr=1", "lr is 0.002 there and 1.0 here"), ("--seed=2", "seed"), ("--steps=5", "steps"),
                       ("--data=any.txt", "data_sha256"), ("--eval_tokens=512", "eval_tokens")):  # fmt: skip
        refused(says, train.main, [*flags, flag])
        assert contents("run") == before
    with open("run/log.jsonl", "ab") as f:
        train.lock(f, "here")
        refused("another run is writing", train.main, [*flags, "--restart"])
    assert train.main([*flags, "--save_every=1", "--log_every=2", "--eval_every=2", "--dtype=bfloat16", "--no-flash"])
    assert train.main([*flags, "--lr=1e-3", "--restart"]) and train.read_log("run/log.jsonl")[0]["lr"] == 1e-3
    # another run's checkpoint comes into the folder after the first look, before the lock is taken
    tiny("diff", vocab_size=257).save("other.pt", tokenizer="bytes", step=2)
    lock = train.lock
    monkeypatch.setattr(train, "lock", lambda *args: (lock(*args), os.replace("other.pt", "run/ckpt.pt")))
    refused("n_layer is 2 there and 1 here", train.main, [*flags, "--lr=1e-3"])


def test_a_comparison_goes_on_where_it_stopped(monkeypatch, capfd):
    monkeypatch.setitem(ATTENTION, "mine", type("Mine", (ATTENTION["linear"],), {}))  # an arm from another file
    toy = [*TOY, "--steps=8"]
    flags = [*toy, "--attn=softmax,mine", "--seed=1,2", "--lr=1e-3,3e-3", "--out=."]
    assert forked(*flags, nth=4 * 8 + 4) == -signal.SIGKILL
    assert forked(*flags, "--kernel=sdpa") == 0  # the linear arm goes without
    out = capfd.readouterr().out
    assert out.count(": finished, 8 steps") == 4 and out.count("goes on after step 2") == 1
    assert "python bench.py loss ." in out
    assert forked(*toy, "--attn=mine", "--seed=2", "--lr=3e-3", "--out=alone") == 0
    assert trace(*Path().glob("mine-*lr3e-3-seed2")) == trace("alone")


def test_two_processes_give_the_losses_of_one():
    flags = [*TOY, "--total_batch=512", "--eval_tokens=1600", "--attn=diff_linear"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    out = subprocess.check_output([*torchrun, HERE / "train.py", *flags, "--out=two"], text=True)
    assert out.count("step    24") == 1 and "processes: 2" in out and forked(*flags, "--out=one") == 0
    for a, b in zip(trace("one")[0], trace("two")[0], strict=True):
        for key in ("train_loss", "val_loss", "lr", "tokens"):
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-5)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_routes_equal_the_map(attn, kernel, decay, monkeypatch):
    """What each route does to q, k, v and the mask, in float64. On a CPU cudnn and efficient are PyTorch's plain path,
    which takes their shapes too, and flash_attn is this one, as far as model.py uses it."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale, causal, alibi_slopes):  # (B, T, H, d), d_v = d
        assert causal and q.shape == k.shape == v.shape and softmax_scale == q.shape[-1] ** -0.5
        calls.append("flash_attn")
        i = torch.arange(q.shape[1])
        slopes = torch.zeros(q.shape[2]) if alibi_slopes is None else alibi_slopes
        S = torch.einsum("bihd,bjhd->bhij", q, k) * softmax_scale - slopes[:, None, None] * (i[:, None] - i)
        S = S.masked_fill(i > i[:, None], -math.inf)
        return torch.einsum("bhij,bjhd->bihd", S.softmax(-1), v)

    def sdpa_kernel(backends):
        calls.append(backends[0].name)
        return nullcontext()

    monkeypatch.setattr(model_module, "sdpa_kernel", sdpa_kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", Namespace(flash_attn_func=flash_attn_func))
    for T in (2, 70):
        bound = 1e-6 if kernel == "flash_attn" and decay else 1e-10  # its slopes are float32
        assert max(errors(attn, kernel, T, torch.float64, decay=decay)) < bound
    expected = dict(sdpa=["FLASH_ATTENTION"] * 2, efficient=["EFFICIENT_ATTENTION"] * 2,
                    cudnn=["FLASH_ATTENTION", "CUDNN_ATTENTION"],  # a single key, then all
                    flash_attn=["flash_attn"] * (4 if attn == "diff" else 2))  # of a value's two halves  # fmt: skip
    assert calls == 2 * expected[kernel]


def test_a_kernel_that_cannot_run_or_is_wrong_is_an_error(monkeypatch):
    model = tiny("diff", decay=True)
    assert pick_kernel(model) == ("sdpa", "") and pick_kernel(model, "sdpa", torch.bfloat16) == ("sdpa", "")
    for name in ("cudnn", "efficient", "flash_attn"):
        refused(f"{name} can't run on cpu", pick_kernel, model, name)
    for other in (tiny("linear"), tiny("diff", flash=False)):
        assert pick_kernel(other) == (None, "")
        refused("sdpa would not be used", pick_kernel, other, "sdpa")
    right = model_module.sdpa
    monkeypatch.setattr(model_module, "sdpa", lambda q, k, v, rate, kernel: right(q, k, v, None, kernel))  # no decay
    refused("its result differs from the map's", pick_kernel, model)


@cuda
@pytest.mark.parametrize("attn", ALL)
def test_cuda_compiled_equals_eager(attn):
    torch._dynamo.reset()
    model, idx = tiny(attn, n_embd=256, block_size=16, decay=True).cuda(), tokens(2, 129).cuda()
    step = torch.compile(model.step, mode="reduce-overhead", fullgraph=True)
    eager, compiled = (torch.stack(list(model.generate(idx[:, :7], 40, temperature=0, step=s))) for s in (None, step))
    assert (eager == compiled).float().mean() > 0.9  # another order of sums may turn a near tie
    pick_kernel(model, "auto", torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        plain = model(idx[:, :-1], idx[:, 1:])[1].item()
        loss = torch.compile(model, fullgraph=True)(idx[:, :-1], idx[:, 1:])[1]
    assert loss.item() == pytest.approx(plain, abs=2e-2)
    loss.backward()
    assert all(0 < p.grad.abs().max() < math.inf for p in model.parameters())


def test_the_readme_quotes_the_code_and_its_flags_exist(capsys):
    readme, code = (HERE / "README.md").read_text(), (HERE / "model.py").read_text()
    *quoted, fifth = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    code += re.sub("^    ", "", code, flags=re.MULTILINE)  # methods are quoted without their indentation
    for part in "\n\n".join(quoted).split("\n\n"):
        assert part.rstrip() in code
    exec(fifth.replace('"--steps=20"', '"--steps=2", "--eval_tokens=256"'), {})
    assert ATTENTION.pop("qknorm") and Path("out/qknorm/ckpt.pt").exists()
    names = r"train|sample|bench|prepare_fineweb|experiments\.\w+"
    for name, flags in re.findall(rf"^    .*?\b({names})\b([^#&\n]*)", readme, re.MULTILINE):
        verb = ["loss"] if name == "bench" else []
        with pytest.raises(SystemExit):
            importlib.import_module(name).main([*verb, "--help"])
        assert set(re.findall(r"--\w+", flags)) <= set(re.findall(r"--\w+", capsys.readouterr().out))


@pytest.mark.slow
def test_the_commands_of_the_readme_run_at_toy_size():
    """One after the other in a copy of the repository, but for those that need a network, a GPU or prepared data."""
    shutil.copytree(HERE, "copy", ignore=shutil.ignore_patterns(".git", "out", "data"))
    few, readme = ["--steps=2", "--eval_tokens=256"], (HERE / "README.md").read_text()
    small = {"train.py": [*few, "--restart"], "sample.py": ["--max_new_tokens=9"], "loss": [], "recall": few[:1],
             "ablations": [*few, "--seed=1"], "factors": [*few, "--seed=1"], "diff_v2": [*few, "--seed=1"]}  # fmt: skip
    for name, flags in small.items():
        commands = re.findall(rf"^    ((?:python|torchrun) [^#\n]*\b{name}\b[^#\n]*)", readme, re.MULTILINE)
        for command in [command for command in commands if "gpt2" not in command]:
            subprocess.run([*shlex.split(command), *flags], cwd="copy", check=True)
        assert commands


def measured(verb, *flags):
    """The rows of the tables that a verb wrote. The other two forms are there."""
    bench.main([verb, "--out=.", *flags])
    assert Path(f"{verb}.png").stat().st_size > 1000 and Path(f"{verb}.md").read_text().count("|") > 10
    return list(json.loads(Path(f"{verb}.json").read_text())["tables"].values())


def fake_run(name, attn, seed, loss, reached=100, **more):
    rows = [dict(attn=attn, seed=seed, steps=100, n_head=4, lr=1e-3) | more]
    rows.append(dict(step=reached // 2, tokens=500 * reached, val_loss=loss + 1))
    rows.append(dict(step=reached, tokens=1000 * reached, val_loss=loss, tok_per_s=100.0))
    Path(name).mkdir()
    Path(name, "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_bench_loss_by_hand(monkeypatch, capsys):
    for seed, softmax, diff, reached in ((1, 2.0, 2.5, 100), (2, 3.0, 3.3, 60)):
        fake_run(f"a{seed}", "softmax", seed, softmax)
        fake_run(f"b{seed}", "diff", seed, diff)
        fake_run(f"c{seed}", "linear", seed, 2.5, reached)
        fake_run(f"decay{seed}", "softmax", seed, 1.0, decay=True)
    fake_run("half", "softmax", 1, 9.0, n_head=2)
    fake_run("e2", "diff", 2, 0.1, lr=0.00400000001)  # best of all, but one seed of two
    table, best, others = measured("loss", ".")
    rows = {row["attn"]: row for row in table}
    # softmax: 2 and 3; diff - softmax: 0.5 and 0.3, not compared with half the heads or another mask
    plain, linear = rows["softmax n_head4 nodecay lr1e-3"], rows["linear n_head4 nodecay lr1e-3"]
    assert plain["runs"] == "2 of 2" and plain["val loss"] == [2.5, pytest.approx(0.5**0.5)]
    assert plain["− softmax"] == [None, None] and plain["tokens"] == 100_000 and plain["tok/s"] == 100
    assert rows["diff n_head4 nodecay lr1e-3"]["− softmax"] == pytest.approx([0.4, 0.1])
    assert linear["runs"] == "1 of 2" and linear["− softmax"] == [0.5, None]
    assert len(rows) == 6 and {"softmax n_head4 decay lr1e-3", "diff n_head4 nodecay lr4.00000001e-3"} < rows.keys()
    (mine,) = (row for row in best if row["attn"] == "diff n_head4 nodecay")
    assert mine["rate"] == "0.001 (at the edge)" and mine["− softmax"] == pytest.approx([0.4, 0.1])
    assert others == [dict(run="c2", status="stopped at step 60 of 100")]
    axes = bench.loss_curves(bench.read_runs([Path("a1"), Path("b1")])[1]).axes[0]
    assert axes.get_ylim() == pytest.approx((1.95, 3.05)) and axes.get_xscale() == "log"  # 0.5 apart after a tenth
    before = contents(".", "loss.*")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **how: open("nowhere/x"))
    with pytest.raises(OSError):
        measured("loss", "a1")
    assert "| softmax | 1 of 1 | 2.000 |" in capsys.readouterr().out and contents(".", "loss.*") == before


def test_bench_speed_and_decode(monkeypatch):
    monkeypatch.setitem(train.PRESETS, "toy", dict(n_layer=1, n_head=2, n_embd=32, block_size=16, batch_size=2))
    flags = ["--device=cpu", "--repeats=1", "--T=16"]
    (rows,) = measured("speed", *flags, "--kernel=auto,cudnn")
    assert [row["kernel"] for row in rows] == ["sdpa", "cudnn", "sdpa", "cudnn", "chunks", "chunks"] * 2
    for row in rows:
        assert (row["kernel"] == "cudnn") == (row["failed"] is not None) == (row["fwd + bwd, tokens/s"] is None)
        assert row["failed"] or row["fwd + bwd, tokens/s"] > 0 and row["fwd, × row 1"][0] > 0
    before = contents(".")
    refused("timed: .*can't run on cpu", measured, "speed", *flags, "--arms=softmax", "--kernel=cudnn")
    assert contents(".") == before
    state = {"linear": 32 * 16 + 32, "diff_linear": 2 * 32 * 16 + 32}  # S, twice as many features each; and Z
    for row in measured("decode", *flags, "--num_samples=1,3")[0]:
        assert row["bytes of state a sequence"] == 4 * state.get(row["attn"], 2 * 16 * 32)
        assert row["tokens/s"] > 0 and (row["× recomputing"] is None) == (row["sequences"] == 3)


def unigram(attn, by=3.0, block_size=29):
    """A model of bytes that says the same after every text: f is exp(by) times as likely as any other byte."""
    model = tiny(attn, vocab_size=257, block_size=block_size)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(p.ndim < 2)
        model.wte.weight[:, 0] = 10.0
        model.wte.weight[ord("f"), 0] += by
        model.norm.weight.fill_(model.config.n_embd**-0.5)
    return model


def checkpoint(model, val="abcdefghijabcdefghij0123456789", path="c.pt", **run):
    """A checkpoint, with a data set x.txt whose last tenth is val."""
    Path("x.txt").write_text("z" * (9 * len(val) - 1) + val)
    model.save(path, tokenizer="bytes", step=1, run=prepare_fineweb.load_data(Path("x.txt"))[3] | dict(seed=1) | run)


def test_slices_and_position_by_hand():
    other = math.log(256 + math.exp(3.0))  # the loss of a byte but f in a unigram(); that of f is 3 less
    checkpoint(unigram("softmax"), path="a.pt")
    checkpoint(unigram("softmax", by=1.0), path="b.pt", seed=2)
    checkpoint(unigram("diff"), path="c.pt", subln_init=0.2)
    means, each = measured("slices", "--ckpt", "a.pt", "b.pt", "c.pt")
    a, b, c = (row["all"] for row in each)
    assert a == pytest.approx(other - 2 * 3 / 29, abs=1e-4)
    assert each[0]["AR-hits"] == pytest.approx(other - 3 / 6, abs=1e-4)  # the second e f g h i j
    assert [row["attn"] for row in means] == ["softmax subln_init1", "diff subln_init0.2"]
    assert means[0]["all"] == pytest.approx([(a + b) / 2, (b - a) / 2**0.5]) and means[1]["all"] == [c, None]
    checkpoint(unigram("diff", block_size=16), "a" * 33 + "f" * 17)
    between, upto = measured("position", "--ckpt=c.pt", "--length=48")
    assert [row["attn"] for row in upto] == ["diff", "diff, window"]
    assert [upto[0]["32"], upto[1]["48"]] == pytest.approx([other, other - 1], abs=1e-4)
    assert [row["33 to 48"] for row in between] == pytest.approx([other - 3, other - 3], abs=1e-4)
    model, text = tiny("softmax", block_size=8), tokens(1, 14)  # the second window begins at the last half of the first
    second = bench.token_losses(model, text[:, 5:])[:, 3:]
    assert torch.allclose(bench.windowed_losses(model, text)[:, 8:], second)


def test_residual_maps_and_hellaswag_by_hand():
    checkpoint(unigram("diff", by=1.0))
    ((init, end),) = measured("residual", "--ckpt=c.pt")
    assert [end["embedding"], end["block 1"]] == pytest.approx([10, 10], rel=0.01)  # blocks that add nothing
    assert init["embedding"] == pytest.approx(0.02 * 32**0.5, rel=0.2) and init["block 1"] > init["embedding"]
    (rows,) = measured("maps", "--ckpt=c.pt", "--text=cat mat", "--layer=1")
    assert rows[0]["sum of a row"] == pytest.approx(1 - tiny("diff").blocks[0].attn.lambda_full().item(), abs=1e-4)
    endings = ["qqqqq", "ffff", "q", "qqqqqqq"]  # of f the smallest mean loss; of the q, being short, the smallest sum
    df = pd.DataFrame(dict(ctx="x", endings=[endings] * 3, label=["1", "1", "2"]))
    Path("stories").mkdir()
    df.to_json("stories/validation.jsonl", orient="records", lines=True)
    ((row,),) = measured("hellaswag", "--ckpt=c.pt", "--source=stories")
    assert [row["accuracy, normalised"], row["accuracy"]] == pytest.approx([2 / 3, 1 / 3])
    assert row["standard error"] == pytest.approx((2 / 9 / 3) ** 0.5) and row["contexts cut"] == 0 and row["rows"] == 3


def test_outliers_and_quant_of_planted_scores(monkeypatch):
    checkpoint(unigram("diff"), "abcdefghijabcdeXghij0123456789")
    planted = torch.full((1, 4, 29, 29), 0.5).tril() + torch.full((29, 29), 1e6).triu(1)
    planted[:, 1, 5, 3] = -9
    monkeypatch.setattr(model_module.Softmax, "scores", lambda layer, q, k, R: planted)  # what it is by then
    rows = {row.pop("of"): row for row in measured("outliers", "--ckpt=c.pt")[0]}
    assert rows["scores, branch 1"]["top-1"] == 0.5
    assert rows["scores, branch 2"]["median"] == pytest.approx(0.5, rel=0.01)
    assert [rows["scores, branch 2"][f"top-{k}"] for k in (1, 2, 3, 10)] == [9, 9, 0.5, 0.5]  # two layers
    assert [rows["residual stream"][f"top-{k}"] for k in (1, 2, 3, 10)] == [13, 13, 10, 10]
    checkpoint(tiny("softmax", vocab_size=257, block_size=29))
    heads = torch.arange(-7.0, 8).repeat(2)[:29] * torch.tensor([1, 2, 3, 5]).view(4, 1, 1)
    planted = heads.expand(1, 4, 29, 29).tril() + torch.full((29, 29), 99.0).triu(1)  # which nobody looks at
    for per, held in (("head", True), ("layer", False)):  # four bits, 7 steps either side, hold one head exactly
        (row,), (above,) = measured("quant", "--ckpt=c.pt", f"--per={per}")
        assert (abs(above["4 bits"]) < 1e-7) == held and abs(above["8 bits"]) > 1e-7
        assert above["8 bits"] == pytest.approx(row["8 bits"] - row["exact"])


def test_ablations_are_the_rows_of_table_6():
    flags = [*TOY, "--n_head=4", "--steps=2", "--seed=1"]
    assert ablations.main([*flags, "--out=six"])
    rows = json.loads(Path("six/ablations.json").read_text())["tables"].popitem()[1]
    shapes = ["4 8 no", "2 16 no", "2 16 yes", "2 8 yes", "2 8 no", "2 8 yes", "2 8 yes"]
    assert [f"{row['heads']} {row['d']} {row['norm']}" for row in rows] == shapes
    assert len({row["val loss"][0] for row in rows}) == 7 and rows[0]["− row 1"] == [None, None]
    for flag in ("--lambda_init=0.1", "--subln", "--subln_init=0.2", "--lr=1e-3,2e-3"):
        refused("leave it out", ablations.main, [*flags, flag])
    assert ablations.main([*flags, "--lr=1e30", "--grad_clip=1e30", "--out=wild"]) is False


def test_factors():
    axes = [("softmax", "linear"), (False, True), (False, True), factors.NORMS, (1, 2)]
    df = pd.DataFrame(product(*axes), columns=["family", "difference", "decay", "norm", "seed"])
    # decay gains 0.2 in one seed and 0.4 in the other, but 0.3 less with a difference of two maps
    df["loss"] = 2.0 - 0.2 * df["seed"] * df["decay"] + 0.3 * df["difference"] * df["decay"]
    found = {name: (nats, error) for name, nats, error in pd.DataFrame(factors.effects(df)).values}
    assert found["decay"] == pytest.approx((-0.15, 0.1)) and found["norm from 1"] == pytest.approx((0, 0))
    assert found["difference of two maps x decay"] == pytest.approx((0.3, 0)) and len(found) == 5 + 9
    cells = product(["linear"], (False, True), [False], factors.NORMS)
    flags = [factors.command(cell, 3, 2e-3, [])[3:] for cell in cells]
    assert flags == [[], ["--subln", "--subln_init=0.2"], ["--subln"], ["--no-subln"], ["--subln_init=0.2"], []]
    factors.main([*TOY, "--n_head=4", "--steps=1", "--seed=1", "--out=factors"])
    table, change = json.loads(Path("factors/factors.json").read_text())["tables"].values()
    assert len(table) == 16 and len(change) == 14


def test_ladder(monkeypatch, capsys):
    monkeypatch.setattr(ladder, "BYTES", 4)
    monkeypatch.setattr(train, "speak", lambda *args, **how: "")  # most of the time of runs this short
    monkeypatch.setattr(ladder, "SEEDS", {8: (1, 2), 12: (1,)})
    Path("text.txt").write_text("all work and no play makes jack a dull boy\n" * 100)
    for _ in range(2):
        ladder.main([*TOY, "--n_head=2", "--data=text.txt", "--n_embd=8,12", "--out=ladder"])
    assert capsys.readouterr().out.count("finished") == 2 * 6 + 3 * 7  # the second time
    rows, rates = json.loads(Path("ladder/ladder.json").read_text())["tables"].values()
    assert [row["seeds"] for row in rows] == [2] * 7 + [1] * 7 and len(rates) == 4
    assert {row["parameters"] for row in rows} == {4 * (4 * C * C + 3 * C * w) for C, w in ((8, 16), (12, 32))}
    assert rows[3]["− softmax"][0] == pytest.approx(rows[3]["val loss"][0] - rows[2]["val loss"][0])
    assert rows[0]["lr"] == float(min(("0.001", "0.002", "0.004"), key=lambda lr: rates[0][lr] + rates[1][lr]))


@pytest.mark.parametrize("decay", [False, True])
def test_diff_v2_is_the_released_layer(decay, monkeypatch):
    monkeypatch.setattr(model_module, "ATTENTION", V2)
    layer, x, m, heads = layer_of("diff_v2", decay=decay), random(2, 20, 32), torch.arange(20).double(), []
    layer.lam_proj.weight.data.mul_(20)
    q, k, v = ((x @ p.weight.T).unflatten(-1, (-1, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    turn = torch.exp(1j * m[:, None] * 10000 ** (-m[:4] / 4))  # pairs of neighbours as complex numbers
    q, k = (torch.complex(u[..., 0::2], u[..., 1::2]) * turn[:, None] for u in (q, k))
    for h in range(8):
        w = torch.exp(torch.einsum("bid, bjd -> bij", q[:, :, h], k[:, :, h // 2].conj()).real / 8**0.5)
        w = (w * math.exp(-decay / (4 * 16 ** (h // 2 / 3))) ** (m[:, None] - m)).tril()
        heads.append(w / w.sum(-1, keepdim=True) @ v[:, :, h // 2])
    lam = 1 / (1 + torch.exp(-x @ layer.lam_proj.weight.T))
    y = torch.cat([heads[2 * j] - lam[:, :, j, None] * heads[2 * j + 1] for j in range(4)], -1)
    assert (layer(x) - y @ layer.out_proj.weight.T).abs().max() < 1e-10 < y.abs().max()


def test_diff_v2(monkeypatch, capsys):
    for name, arm in V2.items():
        monkeypatch.setitem(ATTENTION, name, arm)
    for _ in range(2):
        diff_v2.main([*TOY, "--n_head=4", "--steps=2", "--seed=1", "--out=v2"])
    assert capsys.readouterr().out.count("finished, 2 steps") == 10  # the second time
    (rows,) = json.loads(Path("v2/diff_v2.json").read_text())["tables"].values()
    more = [row["parameters"] - rows[0]["parameters"] for row in rows]
    assert more == [0, 48, 32, 32 * 32 + 32 * 4, 0] * 2  # lambdas and norm; lambdas; queries and lambda; all paid
    assert len({row["val loss"][0] for row in rows}) == 10 and rows[5]["− softmax"] == [None, None]
    assert rows[8]["− softmax"][0] == pytest.approx(rows[8]["val loss"][0] - rows[5]["val loss"][0])


def test_recall():
    text, place = recall.make_texts(seeded(0), 50, 40, 4, 3, None)
    for row, begins in zip(text.tolist(), place.tolist()):
        held, asked = {row[p]: row[p + 1] for p in begins}, row[34::2]
        assert len(held) == 4 and len(set(asked)) == 3 and max(held) < recall.KEYS  # different keys
        assert [held[key] for key in asked] == row[35::2] and asked[0] == row[begins[0]]
    model = tiny("diff", vocab_size=64)
    for block in model.blocks:  # attend evenly to the 31 tokens before the answer: 2 are the answer's, 28 noise
        torch.nn.init.zeros_(block.attn.q_proj.weight)
    assert recall.attention_shares(model, 20, "cpu", 32, 4, 0.5) == pytest.approx((2 / 31, 28 / 31), abs=1e-5)
    recall.main(["--seeds=1", "--steps=4", "--texts=2", "--procs=1", "--decay", "--out=."])
    (rows,) = json.loads(Path("recall.json").read_text())["tables"].values()
    assert [row["attn"] for row in rows] == ALL
    assert rows[1]["on the noise"][0] == pytest.approx(recall.run(("diff", 0, 4, True, 2, "cpu"))["on the noise"])


@pytest.mark.parametrize("command, says", [
    ("train.py --attn=softmax,cosine", "cosine"),
    ("train.py --lr=-1", "learning rate"),
    ("train.py --total_batch=3000", "multiple of 256"),
    ("train.py --data=short.txt", "too short"),
    ("train.py --data=cut", "is cut"),
    ("train.py --data=far", "token 300"),
    ("train.py --preset=gpt2", "prepare_fineweb.py"),
    ("train.py --kernel=sdpa --no-flash", "would not be used"),
    ("train.py --device=tpu9", "tpu9"),
    ("sample.py", "train.py"),
    ("sample.py --ckpt=nameless.pt", "tokenizer"),
    ("bench.py slices --ckpt=nameless.pt", "does not say what it was trained on"),
    ("bench.py loss", "no runs there"),
    ("prepare_fineweb.py --shard_tokens=0", "a shard has 1 to"),
    ("prepare_fineweb.py --tokenizer=bytes --source=latin.txt", "latin.txt: 'utf-8' codec can't decode byte 0xff"),
    ("prepare_fineweb.py --tokenizer=bytes --source=cut.jsonl.gz", "cut.jsonl.gz: Compressed file ended"),
    ("prepare_fineweb.py --tokenizer=bytes --source=field.jsonl", "has no column text"),
    ("prepare_fineweb.py --tokenizer=bytes --source=broken.parquet", "broken.parquet: "),
    ("prepare_fineweb.py --tokenizer=bytes --source=nobody/nothing", "nobody/nothing: "),
    ("prepare_fineweb.py --tokenizer=bytes --source=short.txt --out=full", "short.txt: [Errno "),
])  # fmt: skip
def test_bad_input_is_said_clearly(command, says, monkeypatch, capsys):
    beyond = np.array([20240520, 1, 9000] + [0] * 253, "<i4").tobytes() + np.full(9000, 300, "<u2").tobytes()
    files = {"short.txt": b"too short", "latin.txt": b"\xff", "field.jsonl": b'{"body": "x"}\n', "full/.lock": b"",
             "cut.jsonl.gz": gzip.compress(b'{"text": "one"}\n')[:-9], "broken.parquet": b"PAR1" * 30,
             "cut/x_train_0.bin": beyond[:-1], "far/x_train_0.bin": beyond, "far/x_val_0.bin": beyond,
             "far/manifest.json": b'{"tokenizer": "bytes", "shards": []}'}  # fmt: skip
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    tiny("softmax").save("nameless.pt")
    Path("full/shard.tmp").symlink_to("/dev/full")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    there, program = set(os.listdir()), command.split()[0]
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # or Ctrl-C would not stop the tests
    with pytest.raises(SystemExit) as e:
        runpy.run_path(HERE / program, run_name="__main__")
    err = capsys.readouterr().err + str(e.value)
    assert err.startswith("usage: ") or (err.startswith(f"{program}: ") and err.count("\n") < 2)
    assert says in err and str(e.value) != "0" and set(os.listdir()) - {"out", "data"} == there
