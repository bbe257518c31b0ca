"""prepare_fineweb.py, with texts of every kind, and a stand-in for the hub."""
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_fineweb
from data import EOT, load_data

# more documents than are tokenized at once
TEXTS = ["Once upon a time", "", "Größe 🙂\u2028 and \r\n\n  more\n", f"{EOT} is text"] * 300


class Bytes:
    """In place of GPT-2's tokens, which need a network."""

    eot_token = 256

    def encode_ordinary_batch(self, texts, num_threads):
        return [list(text.encode()) for text in texts]


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    """Writes files of every kind. Returns the tokens that are expected of each."""
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", lambda name: Bytes())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("all/a").mkdir(parents=True)
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    Path("all/a/0.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), "all/b.parquet")
    Path("all/c [1].txt").write_text("one\n\ndocument\n")  # this is no pattern
    Path("all/train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}'))
    Path("all/README.md").write_text("It belongs to a folder.")
    tokens = [token for text in TEXTS for token in [256, *text.encode()]]
    document, packed = [256, *b"one\n\ndocument\n"], [256, *b"packed"]
    return {"all/a/0.jsonl": tokens, "all/b.parquet": tokens, "hub": tokens,
            "all/c [1].txt": document, "all": document + tokens + packed + tokens}


def prepare(*flags):
    prepare_fineweb.main(["--out=o", *flags])
    return [np.fromfile(f"o/{name}.bin", "<u2").tolist() for name in ("val", "train")]


SOURCES = ["all/a/0.jsonl", "all/b.parquet", "all/c [1].txt", "all", "hub"]


@pytest.mark.parametrize("source", SOURCES)
def test_texts_become_their_tokens(source, texts, monkeypatch, capsys):
    flags = [f"--source={source}"]
    if source == "hub":
        rows = [{"text": text, "score": 3.0} for text in TEXTS]
        monkeypatch.setattr(prepare_fineweb, "load_dataset", lambda *args, **kwargs: rows)
        flags = ["--no_ready"]
    val, rest = prepare("--val_tokens=6", *flags)
    assert val + rest == texts[source] and len(val) == 6
    assert [x.tolist() for x in load_data("o")[:2]] == [rest, val]
    assert ("not read: all/README.md" in capsys.readouterr().out) == (source == "all")


def test_shards_are_fetched_as_far_as_they_are_needed(monkeypatch):
    def hf_hub_download(repo, name, repo_type):
        number = int(name[-10:-4])
        tokens = np.arange(1000 * number, 1000 * number + 1000, dtype="<u2")
        Path(name).write_bytes(np.zeros(256, "<i4").tobytes() + tokens.tobytes())
        return name

    names = ["README.md", "fw_train_000002.bin", "fw_train_000001.bin", "fw_val_000000.bin"]
    monkeypatch.setattr(prepare_fineweb, "list_repo_files", lambda repo, repo_type: names)
    monkeypatch.setattr(prepare_fineweb, "hf_hub_download", hf_hub_download)
    tokens = prepare("--val_tokens=1000", "--tokens=1500")
    assert tokens == [list(range(1000)), list(range(1000, 1500))]


def test_what_was_stopped_is_no_data_and_begins_anew(monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", lambda *args: signal_interrupt())
        prepare("--source=all/b.parquet", "--val_tokens=100")
    assert not Path("o").exists()
    assert len(prepare("--source=all/b.parquet", "--val_tokens=200")[0]) == 200


def signal_interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("flags, says", [
    ("--source=nowhere", "--source=nowhere is not there"),
    ("--source=all --out=all", "all is there already: delete it, or choose another --out"),
    ("--tokens=9 --val_tokens=9", "val_tokens must be 1 or more, and below tokens"),
    ("--source=all", "and all of them would be val: choose a smaller --val_tokens"),
])
def test_what_cannot_be_prepared_is_one_sentence(flags, says):
    with pytest.raises(SystemExit, match=says):
        prepare(*flags.split())
    assert not Path("o").exists()
