"""prepare_fineweb.py, with corpora of every kind, and a stand-in for the hub."""
import gzip
import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import prepare_fineweb
import train
from data import EOT, load_data
from helpers import TOY, need_gpt2, refusal

# more documents than are tokenized at once
TEXTS = ["Once upon a time", "", "Größe 🙂\u2028 and \r\n\n  more\n", f"{EOT} is text"] * 300


def write_shard(path, tokens):
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4")
    Path(path).write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


@pytest.fixture
def corpora():
    """Writes files of every kind. Returns the tokens of each, by tiktoken."""
    enc = need_gpt2()
    Path("all/a").mkdir(parents=True)
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    Path("all/a/0.jsonl").write_bytes("\r\n".join(["", *lines]).encode())  # as on Windows
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    pq.write_table(table, "all/b.parquet", row_group_size=100)
    Path("all/c [1].txt").write_text("one\ndocument\n")  # this is no pattern
    write_shard("all/d.bin", range(250))
    Path("all/README.md").write_text("It belongs to a folder.")
    Path("packed").mkdir()
    content = Path("all/a/0.jsonl").read_bytes()
    Path("packed/a.jsonl.gz").write_bytes(gzip.compress(content))
    Path("packed/b.jsonl.zst").write_bytes(zstandard.compress(content))
    Path("packed/c.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    tokens = [token for text in TEXTS for token in [50256, *enc.encode_ordinary(text)]]
    shard = list(range(250))
    whole = tokens + tokens + [50256, *enc.encode_ordinary("one\ndocument\n")] + shard
    return {"all/d.bin": shard, "all": whole, "packed": 3 * tokens} | dict.fromkeys(
        ["all/a/0.jsonl", "all/b.parquet", "hub"], tokens)


def prepare(*flags):
    prepare_fineweb.main(["--out=o", *flags])
    return np.fromfile("o/val.bin", "<u2").tolist(), np.fromfile("o/train.bin", "<u2").tolist()


SOURCES = ["all/a/0.jsonl", "all/b.parquet", "all/d.bin", "all", "packed", "hub"]


@pytest.mark.parametrize("source", SOURCES)
def test_a_corpus_becomes_the_tokens_of_tiktoken(source, corpora, monkeypatch):
    rows = [{"text": text, "score": 3.0} for text in TEXTS]
    if source == "hub":
        monkeypatch.setattr(prepare_fineweb, "load_dataset", lambda *args, **kwargs: rows)
    val, rest = prepare("--val_tokens=6", *[f"--source={source}"] * (source != "hub"))
    assert val + rest == corpora[source]
    assert len(val) == 6
    assert [x.tolist() for x in load_data("o")[:2]] == [rest, val]


def test_what_was_stopped_cannot_be_trained_on_and_begins_anew(monkeypatch):
    write_shard("x.bin", range(1000))
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="stopped"):
        # stopped when all is written, and was about to get its name
        patch.setattr(os, "rename", lambda *args: signal.raise_signal(signal.SIGINT))
        prepare("--source=x.bin", "--val_tokens=100")
    with pytest.raises(SystemExit, match="--data=o is not there"):
        train.main([*TOY, "--data=o"])
    whole = list(range(1000))
    assert prepare("--source=x.bin", "--val_tokens=200") == (whole[:200], whole[200:])


@pytest.mark.parametrize("flags, says", [
    ("--source=all --tokens=9 --val_tokens=9", "val_tokens must be 1 or more and below tokens"),
    ("--source=all --ready", "--ready fetches FineWeb-Edu, and --source is your own text"),
    ("--source=all --out=all", "all is there already: delete it, or choose another --out"),
    ("--source=", "--source= is not there"),
    ("--source=all", "tokens, which is not more than --val_tokens=100,000,000"),
    ("--source=all/README.md", "README.md has 0 tokens"),
    ("--source=no_text.jsonl", "no_text.jsonl can't be read: KeyError: 'text'"),
    ("--source=cut.parquet", "cut.parquet can't be read"),
    ("--source=cut.bin --val_tokens=1", "cut.bin can't be read"),
])
def test_what_cannot_be_prepared_is_one_sentence(flags, says, corpora, monkeypatch, capsys):
    Path("no_text.jsonl").write_text('{"words": "one"}')
    Path("cut.parquet").write_bytes(Path("all/b.parquet").read_bytes()[:-100])
    Path("cut.bin").write_bytes(Path("all/d.bin").read_bytes()[:-100])
    assert says in refusal(f"prepare_fineweb.py --out=o {flags}", monkeypatch, capsys)
    assert not Path("o").exists()


def test_what_is_not_read_is_named(corpora, capsys):
    os.symlink("../packed", "all/link")
    Path("all/empty.jsonl").touch()
    prepare("--source=all", "--val_tokens=6")
    assert "not read: all/link, all/README.md, all/empty.jsonl" in capsys.readouterr().out


def test_a_folder_may_hold_what_is_made_of_it(corpora):
    os.makedirs("texts")
    write_shard("texts/d.bin", range(250))
    prepare_fineweb.main(["--source=texts", "--out=texts/tokens", "--val_tokens=9"])
    assert np.fromfile("texts/tokens/train.bin", "<u2").tolist() == list(range(9, 250))


def test_one_text_file_is_enough(corpora):
    need_gpt2()
    Path("novel.txt").write_text("Once upon a time " * 100)
    val, rest = prepare("--source=novel.txt", "--val_tokens=50")
    assert len(val) == 50 and len(rest) > 300


def test_without_a_network_it_says_so_in_one_sentence(monkeypatch):
    def list_repo_files(*args, **kwargs):
        raise ConnectionError("there is no network")

    monkeypatch.setattr(prepare_fineweb, "list_repo_files", list_repo_files)
    with pytest.raises(SystemExit, match="FineWeb-Edu can't be read: ConnectionError"):
        prepare("--ready")


def test_ready_shards_are_fetched_as_far_as_they_are_needed(monkeypatch):
    def hf_hub_download(repo, name, repo_type):
        number = int(name[-10:-4])
        write_shard(name, range(1000 * number, 1000 * number + 1000))
        return name

    names = ["README.md", "fw_train_000002.bin", "fw_train_000001.bin", "fw_val_000000.bin"]
    monkeypatch.setattr(prepare_fineweb, "list_repo_files", lambda repo, repo_type: names)
    monkeypatch.setattr(prepare_fineweb, "hf_hub_download", hf_hub_download)
    tokens = prepare("--ready", "--val_tokens=1000", "--tokens=1500")
    assert tokens == (list(range(1000)), list(range(1000, 1500)))
