"""lm_eval.py: our checkpoints in the evaluation harness."""
import json
from functools import partial

import pytest

pytest.importorskip("lm_eval", reason="needs lab/requirements.txt")

from lm_eval import tasks  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from data import get_tokenizer  # noqa: E402
from lab import hf  # noqa: E402
from lab.lm_eval import HarnessModel, main  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

# of different lengths, so that a batch has padding. The last context is too long for a block
PAIRS = [("a b", " c"), ("x", "yz" * 6), ("", "fifteen letters"), ("too long" * 3, "yes")]


def make_model(attn, block_size=16):
    """A model with weights so large that it is sure of its next tokens."""
    model = GPT(GPTConfig(attn, 2, 4, 32, block_size=block_size, vocab_size=257)).eval()
    model.wte.weight.data *= 4
    model.extra = dict(tokenizer="bytes")
    return model


def ask(asked, kind, *arguments):
    requests = [Instance(kind, {}, arguments=one, idx=0) for one in arguments]
    return getattr(asked, kind)(requests, disable_tqdm=True)


@pytest.mark.parametrize("attn", ["softmax", "diff"])
def test_the_answers_are_those_of_the_harness_for_the_exported_model(attn):
    model = make_model(attn)
    ours = HarnessModel(model, batch_size=3)
    tokenizer = hf.convert_tokenizer(get_tokenizer("bytes"))
    settings = dict(max_length=16, prefix_token_id=256, device="cpu", batch_size=2)
    theirs = HFLM(pretrained=hf.convert(model), tokenizer=tokenizer, **settings)
    for one, pair in enumerate(PAIRS):
        log_p, greedy = ask(ours, "loglikelihood", *PAIRS)[one]
        their_log_p, their_greedy = ask(theirs, "loglikelihood", pair)[0]
        assert log_p == pytest.approx(their_log_p, abs=1e-4) and greedy == their_greedy
    asked = ("loglikelihood_rolling", ("The quick brown fox jumps over the lazy dog. ",))
    assert ask(ours, *asked) == pytest.approx(ask(theirs, *asked), abs=1e-3)
    asked = ("Once", dict(until=["\n\n"], max_gen_toks=8))
    (made,) = ask(ours, "generate_until", asked)
    assert ask(theirs, "generate_until", asked) == [made]
    asked[1]["until"] = [made[3]]
    assert ask(ours, "generate_until", asked) == [made[: made.index(made[3])]]


def test_a_task_from_a_file_prints_the_table_of_the_harness(tmp_path, capsys, monkeypatch):
    data = tmp_path / "manual.jsonl"
    data.write_text('{"text": "A function begins with", "choices": [" try", " def"], "answer": 1}')
    task = dict(
        task="manual", dataset_path="json", test_split="test",
        dataset_kwargs=dict(data_files=dict(test=str(data)), cache_dir=str(tmp_path / "cache")),
        output_type="multiple_choice", doc_to_text="{{text}}",
        doc_to_choice="choices", doc_to_target="answer",
    )
    (tmp_path / "manual.yaml").write_text(json.dumps(task))  # JSON is YAML
    log = [dict(dtype="bfloat16")]
    make_model("diff", 256).save(tmp_path / "ckpt.pt", tokenizer="bytes", log=log)
    # without the index of all the other tasks, which takes half a minute
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    flags = [f"--ckpt={tmp_path}", f"--include_path={tmp_path}", "--device=cpu"]
    main([*flags, "--tasks=manual"])
    assert "|manual|" in capsys.readouterr().out
