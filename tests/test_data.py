"""Tests of data.py and prepare_fineweb.py: tokenizers, shards, splits, and interruptions."""
import argparse
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiktoken
from pydoc_data.topics import topics

import prepare_fineweb
from data import EOT, SHARDS, Shards, count, get_tokenizer, load_data, read_manifest

TOP = Path(__file__).parent.parent  # of the repository
BYTES_EOT = 256


# what the tests have in common


def random_documents(n, seed=0):
    """n documents of up to 60 words; some are empty, and one letter takes three bytes."""
    draw = random.Random(seed)
    words = ["to", "be", "or", "not", "雪"]
    return [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(n)]


def write_source(path, texts):
    """Writes texts to a file of the kind that its suffix names. Without a suffix: to a folder of
    two parquet files."""
    path = Path(path)
    table = pd.DataFrame({"other": texts, "text": texts})  # only one of the columns is wanted
    if path.suffix == ".txt":
        path.write_text("".join(texts), newline="")
    elif path.suffix == ".parquet":
        table.to_parquet(path, row_group_size=100)
    elif path.suffix in (".jsonl", ".gz"):
        table.to_json(path, orient="records", lines=True)
    else:
        path.mkdir()
        config = "configs: [{config_name: small, data_files: '*.parquet'}]"
        (path / "README.md").write_text(f"---\n{config}\n---\n")
        table[:150].to_parquet(path / "0.parquet")
        table[150:].to_parquet(path / "1.parquet", row_group_size=100)  # several row groups


@pytest.fixture(autouse=True)
def bytes_for_tokens(monkeypatch):
    """gpt2's vocabulary needs a network. What is tested here is the same with any tokenizer."""
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", lambda name: get_tokenizer("bytes"))


def prepare(source, out, *flags):
    prepare_fineweb.main([f"--source={source}", f"--out={out}", *flags])


def prepare_and_die(source, out, *flags, before_rename):
    """Runs the program in another process, which kills itself before a certain os.replace."""
    code = f"""
import os, signal, sys
replace = os.replace
calls = []
def deadly_replace(old, new):
    calls.append(new)
    if len(calls) == {before_rename}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
os.replace = deadly_replace
sys.path.insert(0, {str(TOP)!r})
import data, prepare_fineweb
prepare_fineweb.get_tokenizer = lambda name: data.get_tokenizer("bytes")
prepare_fineweb.main(sys.argv[1:])
"""
    arguments = [f"--source={source}", f"--out={out}", *flags]
    child = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()


def expected_tokens(texts):
    tokens = []
    for text in texts:
        tokens.append(BYTES_EOT)
        tokens.extend(text.encode())
    return tokens


def tokens_of(folder):
    """The tokens of all shards of a folder, val first. It does not use the code that it tests."""
    tokens = []
    for path in sorted(Path(folder).glob("*.bin"), key=lambda path: path.stem[-6:]):
        content = path.read_bytes()
        header = np.frombuffer(content[:1024], "<i4")
        assert header.tolist() == [20240520, 1, (len(content) - 1024) // 2] + [0] * 253
        tokens.extend(np.frombuffer(content[1024:], "<u2").tolist())
    return tokens


def shards_of(folder):
    """The content of every shard, by its name."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.bin")}


def write_shard(path, tokens):
    header = np.array([20240520, 1, len(tokens)] + [0] * 253, "<i4")
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


# tokenizers


def test_gpt2_gives_the_tokens_of_tiktoken():
    """Its regular expression is rearranged: here it meets what might tell the two apart."""
    try:
        reference = tiktoken.get_encoding("gpt2")
    except OSError as e:
        pytest.skip(f"no gpt2 vocabulary: {e}")
    ours = get_tokenizer("gpt2")
    assert ours.n_vocab == reference.n_vocab
    assert ours.eot_token == reference.eot_token
    draw = random.Random(0)
    characters = " \n\t\r\x1c\x85\u00a0\u3000\u2028'aAzé雪ก5½²_-.😀\u0301\u200d\0"
    parts = [*characters, "  ", "\n\n", "'ll", EOT]
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=60))
        assert ours.encode_ordinary(text) == reference.encode_ordinary(text), repr(text)


def test_bytes_are_their_own_tokens():
    tokenizer = get_tokenizer("bytes")
    text = "a\r\n雪\0"
    assert tokenizer.encode_ordinary(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eot_token == BYTES_EOT
    with pytest.raises(ValueError, match="gpt2 or bytes, not 'words'"):
        get_tokenizer("words")


# reading


def test_a_sequence_may_lie_across_shards():
    shards = Shards([np.arange(7), np.arange(7, 8), np.arange(8, 8), np.arange(8, 20)])
    assert shards.tokens == 20
    assert shards.sequences(5) == 3  # the last one needs a token that follows it
    assert shards.sequence(0, 5).tolist() == list(range(6))
    assert shards.sequence(1, 5).tolist() == list(range(5, 11))
    assert shards.sequence(2, 5).tolist() == list(range(10, 16))
    for i in (-1, 3):
        with pytest.raises(IndexError, match="there are 3"):
            shards.sequence(i, 5)
    assert Shards([]).sequences(5) == 0


def test_shards_without_a_manifest_are_gpt2():
    write_shard("made/x_train_000001.bin", [50256, 1, 2, 3])
    write_shard("made/x_train_000002.bin", [4, 5])
    write_shard("made/x_val_000000.bin", [50256, 6])
    train, val, tokenizer, what = load_data(Path("made"))
    assert tokenizer == "gpt2"
    assert train.sequence(0, 5).tolist() == [50256, 1, 2, 3, 4, 5]
    assert val.sequence(0, 1).tolist() == [50256, 6]
    assert what["data"] == "made"
    write_shard("made/x_val_000000.bin", [50256, 7])
    changed = load_data(Path("made"))[3]["data_sha256"]
    assert changed != what["data_sha256"]
    # the same arrays in the same order, but split in another way
    Path("made/x_train_000001.bin").rename("made/x_val_000001.bin")
    assert load_data(Path("made"))[3]["data_sha256"] not in (changed, what["data_sha256"])


def test_a_name_with_both_words_is_in_one_split_only():
    write_shard("made/train_x_val_000000.bin", [50256, 6])
    write_shard("made/val_x_train_000001.bin", [50256, 1, 2])
    write_shard("made/tiny_train.bin", [50256, 3])
    train, val, _, _ = load_data(Path("made"))
    assert (train.tokens, val.tokens) == (5, 2)


def test_what_is_no_whole_shard_is_refused():
    write_shard("made/x_train_1.bin", [1, 2, 3])
    whole = Path("made/x_train_1.bin").read_bytes()
    with pytest.raises(ValueError, match=r"no \*_val_\*.bin in made: `python prepare_fineweb.py`"):
        load_data(Path("made"))
    for content in (whole[:-1], whole + b"\0\0"):
        Path("made/x_train_1.bin").write_bytes(content)
        problem = "x_train_1.bin is cut or damaged: its header says 3 tokens"
        with pytest.raises(ValueError, match=problem):
            load_data(Path("made"))
    # nothing, half a header, zeros, another magic number
    for content in (b"", whole[:1000], bytes(2000), b"\1" + whole[1:]):
        Path("made/x_train_1.bin").write_bytes(content)
        with pytest.raises(ValueError, match="x_train_1.bin is not a token shard"):
            load_data(Path("made"))
    with pytest.raises(ValueError, match="no .* in data/fineweb_edu: `python prepare_fineweb.py`"):
        load_data(SHARDS)
    Path("made/manifest.json").write_text('{"tokenizer": "by')
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        load_data(Path("made"))


def test_a_text_files_last_tenth_is_val():
    text = "雪 or not\r\n" * 10
    Path("snow.txt").write_text(text, newline="")
    tokens = expected_tokens([text])
    train, val, tokenizer, what = load_data(Path("snow.txt"))
    assert tokenizer == "bytes"
    assert train.arrays[0].tolist() == tokens[:-12]  # a tenth of 121 tokens
    assert val.arrays[0].tolist() == tokens[-12:]
    assert what["data"] == "snow.txt"
    assert what["val"] == "the last tenth"
    Path("snow.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="snow.txt is not UTF-8 text"):
        load_data(Path("snow.txt"))


# the manual that ships with Python


def documents_of(split):
    """The documents of a split, as bytes."""
    (tokens,) = split.arrays
    starts = np.flatnonzero(tokens == BYTES_EOT)
    assert starts[0] == 0
    return [bytes(document[1:].tolist()) for document in np.split(tokens, starts[1:])]


def test_val_of_the_manual_is_every_tenth_topic():
    train, val, tokenizer, what = load_data(None)
    names = sorted(topics)
    val_names = [names[i] for i in range(6, len(names), 10)]
    train_names = [name for name in names if name not in val_names]
    assert documents_of(train) == [topics[name].encode() for name in train_names]
    assert len(documents_of(val)) == len(val_names)
    assert 0.08 < val.tokens / (train.tokens + val.tokens) < 0.14
    assert tokenizer == "bytes"
    assert what["data"] == "pydoc_data.topics"
    assert "every tenth topic" in what["val"]


def test_val_of_the_manual_loses_the_lines_that_it_shares_with_train_and_no_others():
    train, val, _, _ = load_data(None)
    train_lines = set(b"\n".join(documents_of(train)).split(b"\n"))
    names = sorted(topics)
    lost = 0
    for name, document in zip(names[6::10], documents_of(val), strict=True):
        kept = document.split(b"\n")
        for line in topics[name].encode().split(b"\n"):
            if len(line) >= 32 and line in train_lines:
                lost += 1
            else:
                assert kept.pop(0) == line  # all others are there, in their order
        assert kept == []
    assert lost > 0


# writing


@pytest.mark.parametrize("source", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet", "folder"])
def test_every_shard_ends_with_a_whole_document(source):
    texts = random_documents(400) + [f"{EOT} is text, too \u2028", "", "a long one " * 2000]
    texts += random_documents(300, seed=1)
    write_source(source, texts)
    prepare(source, "o", "--shard_tokens=2e4", "--val_tokens=3e3", "--name=small")
    expected = expected_tokens(["".join(texts)] if source == "x.txt" else texts)
    assert tokens_of("o") == expected
    if source == "x.txt":
        return  # one document, so one shard
    assert len(shards_of("o")) > 3
    train, val, tokenizer, _ = load_data(Path("o"))
    assert tokenizer == "gpt2"
    for array in (*train.arrays, *val.arrays):
        assert array[0] == BYTES_EOT
    before_the_last = val.tokens - np.flatnonzero(val.arrays[0] == BYTES_EOT)[-1]
    assert 3000 <= val.tokens < 3000 + before_the_last


@pytest.mark.parametrize("source", ["x.jsonl", "folder"])
def test_killed_before_any_rename_it_ends_in_the_same_bytes(source):
    write_source(source, random_documents(400))
    run = [source, "o", "--shard_tokens=9e3", "--name=small"]
    prepare(source, "whole", "--shard_tokens=9e3", "--name=small")
    # the first manifest, and then each shard and the manifest after it
    renames = 1 + 2 * len(shards_of("whole"))
    assert renames >= 7
    for n in (1, 4, 5, renames):
        shutil.rmtree("o", ignore_errors=True)
        prepare_and_die(*run, before_rename=n)
        if n > 1:
            with pytest.raises(ValueError, match="o is only half prepared"):
                load_data(Path("o"))
        prepare(*run)
        assert shards_of("o") == shards_of("whole"), f"killed before rename {n}"
        assert read_manifest("o")["shards"] == read_manifest("whole")["shards"]


def test_tokens_end_the_work_and_a_finished_folder_is_left_alone(capsys):
    write_source("x.jsonl", random_documents(300))
    prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=9e3")
    tokens = tokens_of("o")
    assert 9000 <= len(tokens) < 9000 + 60 * 6
    before = shards_of("o")
    prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=9e3")
    assert "o is finished" in capsys.readouterr().out
    assert shards_of("o") == before
    with pytest.raises(ValueError, match="has tokens 9000, not 20000"):
        prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=2e4")


def test_a_source_that_changed_in_between_is_refused():
    texts = random_documents(300)
    write_source("x.jsonl", texts)
    prepare_and_die("x.jsonl", "o", "--shard_tokens=4e3", before_rename=4)
    write_source("x.jsonl", texts[::-1])  # of the same size
    with pytest.raises(ValueError, match="the source has changed since it was begun"):
        prepare("x.jsonl", "o", "--shard_tokens=4e3")


def test_what_cannot_be_prepared_is_refused_in_one_line():
    Path("empty.txt").write_text("")
    Path("mixed").mkdir()
    write_source("mixed/a.jsonl", ["one", "two"])
    Path("mixed/b.txt").write_text("three")
    write_shard("made/x_train_1.bin", [1, 2, 3])
    write_source("x.jsonl", ["one"])
    for source, out, message in [
        ("nowhere.jsonl", "o", "nowhere.jsonl -> o: "),
        ("empty.txt", "o2", "there is no text in it"),
        ("mixed", "o3", "would be left out"),
        ("x.jsonl", "made", "the folder has shards from elsewhere"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            prepare(source, out)
        assert "\n" not in str(error.value)


def test_ready_shards_are_fetched_up_to_the_tokens(monkeypatch):
    def download(repo, name, repo_type, local_dir):
        write_shard(Path(local_dir) / name, range(100))
        return Path(local_dir) / name

    names = ["README.md", "fw_val_000000.bin", "fw_train_000002.bin", "fw_train_000001.bin"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda *_, **__: names)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    prepare_fineweb.main(["--pretokenized", "--tokens=150", "--out=o"])
    assert sorted(shards_of("o")) == ["fw_train_000001.bin", "fw_val_000000.bin"]
    train, val, tokenizer, _ = load_data(Path("o"))
    assert (train.tokens, val.tokens, tokenizer) == (100, 100, "gpt2")


def test_counts_may_be_written_in_powers_of_ten():
    assert [count(text) for text in ("0", "12", "1e9", "2.5e3", str(2**60 + 1))] == [
        0, 12, 10**9, 2500, 2**60 + 1,
    ]
    for wrong in ("-1", "1.5", "nan", "inf", "1e-3", "", "ten", "1_0"):
        with pytest.raises(argparse.ArgumentTypeError, match="not a whole number from 0 on"):
            count(wrong)
