"""Tests of data.py, of prepare_fineweb.py and its interruptions, and of how flags are read."""
import argparse
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydoc_data.topics import topics

import common
import prepare_fineweb
from common import UserError
from data import EOT, SHARDS, Shards, get_tokenizer, load_data, read_manifest

TOP = Path(__file__).parent.parent  # of the repository
BYTES_EOT = 256


def random_documents(n, seed=0):
    """n documents of up to 60 words; some are empty, and one letter takes three bytes."""
    draw = random.Random(seed)
    words = ["to", "be", "or", "not", "雪"]
    return [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(n)]


def jsonl(texts):
    return "".join(json.dumps({"other": 1, "text": text}) + "\n" for text in texts).encode()


def write_folder(path, texts):
    """Files of every kind, which hold the texts: one lies deeper than the others, one is empty."""
    Path(path, "a").mkdir(parents=True)
    table = pa.table({"other": texts[:25], "text": texts[:25]})
    pq.write_table(table, f"{path}/a/0.parquet", row_group_size=10)
    Path(path, "b.jsonl").touch()
    Path(path, "c.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[25:50])))
    Path(path, "d.jsonl").write_bytes(jsonl(texts[50:]))
    Path(path, "README.md").write_text("It belongs to a folder.")


@pytest.fixture(autouse=True)
def bytes_for_tokens(monkeypatch):
    """gpt2's vocabulary needs a network. What is tested here is the same with any tokenizer."""
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", lambda name: get_tokenizer("bytes"))


def prepare(source, out, *flags):
    prepare_fineweb.main([f"--source={source}", f"--out={out}", *flags])


def prepare_and_die(source, out, *flags):
    """Prepares in a process that kills itself before its second rename. False if there is none."""
    code = f"""
import os, signal, sys
replace = os.replace
def replace_once(old, new):
    replace(old, new)
    os.replace = lambda old, new: os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_once
sys.path.insert(0, {str(TOP)!r})
import data, prepare_fineweb
prepare_fineweb.get_tokenizer = lambda name: data.get_tokenizer("bytes")
prepare_fineweb.main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, f"--source={source}", f"--out={out}", *flags]
    child = subprocess.run(command, capture_output=True, text=True)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    return child.returncode != 0


def expected_tokens(texts):
    tokens = []
    for text in texts:
        tokens += [BYTES_EOT, *text.encode()]
    return tokens


def shards_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.bin")}


def tokens_of(folder):
    """The tokens of all shards of a folder, val first. It does not use the code that it tests."""
    tokens = []
    for _, content in sorted(shards_of(folder).items(), key=lambda item: item[0][-10:]):
        header = np.frombuffer(content[:1024], "<i4")
        assert header.tolist() == [20240520, 1, (len(content) - 1024) // 2] + [0] * 253
        tokens.extend(np.frombuffer(content[1024:], "<u2").tolist())
    return tokens


def write_shard(path, tokens):
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4")
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


def test_numbers_are_read_as_people_write_them():
    for text, value in [("0", 0), ("12", 12), ("1e9", 10**9), ("2.5e3", 2500)]:
        assert common.count(text) == value
    assert common.count(str(2**60 + 1)) == 2**60 + 1  # not by way of a float
    for text, value in [("0.5", 0.5), ("1e-3", 0.001), ("3", 3.0)]:
        assert common.number(text) == value
    for text in ("-1", "1.5", "nan", "inf", "1e-3", "", "ten", "1_0"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            common.count(text)
    for text in ("nan", "inf", "-1", "1_0"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
            common.number(text)
    with pytest.raises(argparse.ArgumentTypeError, match="below 2\\^64"):
        common.random_seed(str(2**64))
    assert common.path("~/x") == Path.home() / "x"  # a shell leaves the ~ of --out=~/x


def test_prepared_text_has_the_tokens_of_tiktoken(monkeypatch):
    """The regular expression is rearranged: here it meets what might tell the two apart."""
    try:
        reference = get_tokenizer("gpt2")
    except UserError as e:
        pytest.skip(str(e))
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", get_tokenizer)
    prepare_fineweb.start_worker()
    draw = random.Random(0)
    characters = " \n\t\r\x1c\x85\u00a0\u3000\u2028'aAzé雪ก5½²_-.😀\u0301\u200d\0"
    parts = [*characters, "  ", "\n\n", "'ll", EOT]
    texts = ["".join(draw.choices(parts, k=60)) for _ in range(3000)]
    texts += ["half \ud83d a pair", "a" + " " * 5000 + "b"]
    for text in texts:
        expected = reference.encode_ordinary(text)
        [(_, tokens)] = prepare_fineweb.encode([(None, text)])
        assert tokens.tolist() == [50256, *expected], repr(text)
        assert np.concatenate(prepare_fineweb.encode_odd(text)).tolist() == expected, repr(text)


def test_a_sequence_may_lie_across_shards():
    shards = Shards([np.arange(7), np.arange(7, 8), np.arange(8, 8), np.arange(8, 20)])
    assert shards.sequences(5) == 3  # the last one needs a token that follows it
    for i in range(3):
        assert shards.sequence(i, 5).tolist() == list(range(5 * i, 5 * i + 6))


def test_shards_without_a_manifest_are_gpt2():
    write_shard("made/val_x_train_000001.bin", [50256, 1, 2, 3])  # the last of two words counts
    write_shard("made/x_train_000002.bin", [4, 5])
    write_shard("made/x_val.bin", [50256, 6])
    train, val, tokenizer, what = load_data(Path("made"))
    assert tokenizer == "gpt2"
    assert (train.tokens, val.tokens) == (6, 2)
    assert train.sequence(0, 5).tolist() == [50256, 1, 2, 3, 4, 5]
    # the same tokens in the same order, but split in another way
    Path("made/x_train_000002.bin").rename("made/a_val.bin")
    assert load_data(Path("made"))[3]["data_sha256"] != what["data_sha256"]


def test_what_is_no_whole_shard_is_refused():
    write_shard("made/x_train_1.bin", [1, 2, 3])
    whole = Path("made/x_train_1.bin").read_bytes()
    with pytest.raises(UserError, match=r"no \*_val_\*.bin in made: `python prepare_fineweb.py`"):
        load_data(Path("made"))
    Path("made/x_train_1.bin").write_bytes(whole[:-1])
    with pytest.raises(UserError, match="x_train_1.bin is cut or damaged: its header says 3"):
        load_data(Path("made"))
    Path("made/x_train_1.bin").write_bytes(b"\1" + whole[1:])
    with pytest.raises(UserError, match="x_train_1.bin is not a token shard"):
        load_data(Path("made"))
    with pytest.raises(UserError, match="no .* in data/fineweb_edu: `python prepare_fineweb.py`"):
        load_data(SHARDS)


def test_a_text_files_last_tenth_is_val(monkeypatch):
    monkeypatch.setattr("data.PIECE", 8)  # letters lie across two of the pieces that are read
    text = "雪 or not\r\n" * 10
    Path("snow.txt").write_text(text, newline="")
    tokens = expected_tokens([text])
    train, val, tokenizer, what = load_data(Path("snow.txt"))
    assert tokenizer == "bytes"
    assert train.arrays[0].tolist() == tokens[:-12]  # a tenth of 121 tokens
    assert val.arrays[0].tolist() == tokens[-12:]
    # a run that was begun knows its data by this
    assert what["data_sha256"].startswith("dde43d978aa136cc")
    for content in (b"\xff", "雪".encode()[:-1]):
        Path("snow.txt").write_bytes(content)
        with pytest.raises(UserError, match="snow.txt is not UTF-8 text: .* near byte"):
            load_data(Path("snow.txt"))
    os.mkfifo("pipe.txt")
    with pytest.raises(UserError, match="pipe.txt: no such file, or not a regular one"):
        load_data(Path("pipe.txt"))


def test_the_manual_without_the_lines_that_val_shares_with_train():
    train, val, _, _ = load_data(None)
    names = sorted(topics)
    val_names = names[6::10]
    train_texts = [topics[name] for name in names if name not in val_names]
    assert train.arrays[0].tolist() == expected_tokens(train_texts)
    train_lines = set("\n".join(train_texts).split("\n"))
    val_texts = []
    for name in val_names:
        lines = topics[name].split("\n")
        own = [line for line in lines if len(line.encode()) < 32 or line not in train_lines]
        val_texts.append("\n".join(own))
    assert val.arrays[0].tolist() == expected_tokens(val_texts)


def test_every_shard_ends_with_a_whole_document():
    texts = random_documents(400) + [f"{EOT} is text, too \u2028", "", "a long one " * 2000]
    texts += ["x" + " " * 1_000_000 + "y"]  # too many blanks for tiktoken's engine
    texts += random_documents(300, seed=1)
    write_folder("x", texts)
    prepare("x", "o", "--shard_tokens=2e4", "--val_tokens=3e3")
    assert tokens_of("o") == expected_tokens(texts)
    train, val, _, _ = load_data(Path("o"))
    assert len(train.arrays) > 3
    for array in (*train.arrays, *val.arrays):
        assert array[0] == BYTES_EOT
    before_the_last = np.flatnonzero(val.arrays[0] == BYTES_EOT)[-1]
    assert before_the_last < 3000 <= val.tokens


def test_killed_at_every_rename_it_ends_in_the_same_bytes():
    # a shard has fewer documents than a thread takes at a time
    write_folder("x", random_documents(70))
    prepare("x", "whole", "--shard_tokens=1e3")
    deaths = 0
    while prepare_and_die("x", "o", "--shard_tokens=1e3"):
        deaths += 1
        if not read_manifest("o")["finished"]:
            with pytest.raises(UserError, match="o is only half prepared"):
                load_data(Path("o"))
    assert deaths > len(shards_of("whole")) >= 5
    assert shards_of("o") == shards_of("whole")


def test_a_folder_belongs_to_its_flags_and_its_source():
    Path("x.jsonl").write_bytes(jsonl(random_documents(300)))
    flags = ["--shard_tokens=4e3", "--tokens=9e3"]
    prepare("x.jsonl", "o", *flags)
    before = shards_of("o")
    assert 9000 <= len(tokens_of("o")) < 9000 + 60 * 6
    prepare("x.jsonl", "o", *flags)
    assert shards_of("o") == before
    with pytest.raises(UserError, match="o was begun with --tokens=9000"):
        prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=2e4")
    Path("x.jsonl").write_bytes(jsonl(random_documents(300)[::-1]))  # of the same size
    with pytest.raises(UserError, match="x.jsonl has changed since o was begun"):
        prepare("x.jsonl", "o", *flags)
    write_shard("o/finewebedu_train_000002.bin", [1, 2, 3])
    with pytest.raises(UserError, match="finewebedu_train_000002.bin has 3 tokens, but"):
        load_data(Path("o"))
    Path("o/finewebedu_train_000002.bin").unlink()
    missing = "o/finewebedu_train_000002.bin: no such file"
    with pytest.raises(UserError, match=missing):
        load_data(Path("o"))
    with pytest.raises(UserError, match=missing):
        prepare("x.jsonl", "o", *flags)
    Path("o/manifest.json").unlink()
    with pytest.raises(UserError, match="o has shards from elsewhere"):
        prepare("x.jsonl", "o", *flags)


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize("name, content, message", [
    ("x.txt", b"text", "x.txt: we read only .* `python train.py --data=x.txt` as it is. Or make"),
    ("d/x.jsonl.tmp", GOOD, "d/x.jsonl.tmp: we read only .parquet, .jsonl, .jsonl.gz"),
    ("nowhere.jsonl", None, "nowhere.jsonl: no such file"),
    ("x.jsonl", GOOD, "x.jsonl: 4 tokens are all val"),
    ("x.jsonl", GOOD + b"\n" + b'{"text": null}', "x.jsonl, row 3: its text is not a .*None"),
    ("x.jsonl", GOOD + b'{"text": 7}', "x.jsonl, row 2: its text is not a string but 7"),
    ("x.jsonl", GOOD + b'{"text": "tw', "x.jsonl, row 2 is not like .*Unterminated string"),
    ("x.jsonl", GOOD + b'{"txt": "two"}', "x.jsonl, row 2 is not like .*'text'"),
    ("x.jsonl.gz", gzip.compress(GOOD * 100)[:-9], "x.jsonl.gz: Compressed file ended"),
    ("x.parquet", {"text": [b"one"]}, "x.parquet, row 1: its text is not a string but b'one"),
    ("x.parquet", {"other": ["one"]}, "x.parquet: there is no column text"),
])
def test_what_cannot_be_prepared_is_refused_in_one_line(name, content, message):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif content is not None:
        path.write_bytes(content)
    if name.startswith("d/"):
        Path("d/a.jsonl").write_bytes(GOOD + GOOD)
        path = path.parent
    with pytest.raises(UserError, match=message) as error:
        prepare(path, "o")
    assert "\n" not in str(error.value)


def test_a_dataset_has_a_name_for_some_of_its_files(monkeypatch):
    """A folder with such a README is to the library what a dataset of the hub is."""
    monkeypatch.setenv("USE_TORCH", "0")  # set by the program, and taken back for other tests
    for name in ("small", "other"):
        Path("d", name).mkdir(parents=True)
        Path("d", name, "0.jsonl").write_bytes(GOOD)
    config = "configs: [{config_name: small, data_files: 'small/*'}]"
    Path("d/README.md").write_text(f"---\n{config}\n---\n")
    (path,) = prepare_fineweb.find_dataset(prepare_fineweb.Config(source="d", name="small"))
    assert path.endswith("d/small/0.jsonl")


def test_ready_shards_are_fetched_up_to_the_tokens(monkeypatch):
    def download(repo, name, repo_type, local_dir):
        write_shard(Path(local_dir) / name, range(100))
        return Path(local_dir) / name

    names = ["README.md", "fw_val_000000.bin", "fw_train_000002.bin", "fw_train_000001.bin"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    prepare_fineweb.main(["--pretokenized", "--tokens=150", "--out=o"])
    train, val, _, _ = load_data(Path("o"))
    assert (train.tokens, val.tokens) == (100, 100)
    assert sorted(shards_of("o")) == ["fw_train_000001.bin", "fw_val_000000.bin"]


@pytest.mark.parametrize("content", ["", "[]", "3", '{"finished": true}', '{"shards": 3}', "{cut"])
def test_a_foreign_manifest_is_named(content):
    Path("made").mkdir()
    Path("made/manifest.json").write_text(content)
    with pytest.raises(UserError, match="manifest.json is damaged, or not of prepare"):
        load_data(Path("made"))


def test_a_text_file_takes_twice_its_size_of_memory():
    size = 16_000_000
    Path("big.txt").write_bytes(b"word " * (size // 5))
    tracemalloc.start()
    load_data(Path("big.txt"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * size


def test_a_folder_that_was_moved_gets_no_more_shards(monkeypatch):
    Path("x.jsonl").write_bytes(GOOD * 9)
    tokenize = prepare_fineweb.tokenize

    def move_and_tokenize(documents):
        os.rename("o", "old")
        os.mkdir("o")
        yield from tokenize(documents)

    monkeypatch.setattr(prepare_fineweb, "tokenize", move_and_tokenize)
    with pytest.raises(UserError, match="o was moved or deleted"):
        prepare("x.jsonl", "o", "--val_tokens=2")
    assert not Path("o/manifest.json").exists()
