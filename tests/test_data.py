"""Tests of data.py and prepare_fineweb.py: tokenizers, shards, splits, and interruptions."""
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydoc_data.topics import topics

import prepare_fineweb
from common import UserError
from data import EOT, SHARDS, Shards, get_tokenizer, load_data, read_manifest

TOP = Path(__file__).parent.parent  # of the repository
BYTES_EOT = 256


# what the tests have in common


def random_documents(n, seed=0):
    """n documents of up to 60 words; some are empty, and one letter takes three bytes."""
    draw = random.Random(seed)
    words = ["to", "be", "or", "not", "雪"]
    return [" ".join(draw.choices(words, k=draw.randrange(60))) for _ in range(n)]


def write_source(path, texts):
    """Writes texts to a file of the kind that its suffix names. Without a suffix, to a folder of
    parquet files: one lies deeper than the others, and one has no rows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"other": 1, "text": text}) + "\n" for text in texts)
    if path.suffix == "":
        write_source(path / "a/0.parquet", texts[:15])
        write_source(path / "b.PARQUET", [])
        write_source(path / "c.parquet", texts[15:])
        (path / "README.md").write_text("It belongs to a folder.")
    elif path.suffix.lower() == ".parquet":
        table = pa.table({"other": texts, "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=10)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


@pytest.fixture(autouse=True)
def bytes_for_tokens(monkeypatch):
    """gpt2's vocabulary needs a network. What is tested here is the same with any tokenizer."""
    monkeypatch.setattr(prepare_fineweb, "get_tokenizer", lambda name: get_tokenizer("bytes"))


def prepare(source, out, *flags):
    prepare_fineweb.main([f"--source={source}", f"--out={out}", *flags])


def prepare_and_die(source, out, *flags, when):
    """Runs the program in another process, which kills itself about a rename.

    when: "after the first" or "before the second". Returns whether it came to its end alive.
    """
    code = f"""
import os, signal, sys
replace = os.replace
calls = []
def deadly_replace(old, new):
    calls.append(new)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(old, new)
    if {when!r} == "after the first":
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = deadly_replace
sys.path.insert(0, {str(TOP)!r})
import data, prepare_fineweb
prepare_fineweb.get_tokenizer = lambda name: data.get_tokenizer("bytes")
prepare_fineweb.main(sys.argv[1:])
"""
    arguments = [f"--source={source}", f"--out={out}", *flags]
    child = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert child.returncode in (0, -signal.SIGKILL), child.stderr.decode()
    return child.returncode == 0


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


def test_bytes_are_their_own_tokens():
    tokenizer = get_tokenizer("bytes")
    text = "a\r\n雪\0"
    assert tokenizer.encode_ordinary(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.eot_token == BYTES_EOT
    with pytest.raises(UserError, match="gpt2 or bytes, not 'words'"):
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
    with pytest.raises(UserError, match=r"no \*_val_\*.bin in made: `python prepare_fineweb.py`"):
        load_data(Path("made"))
    for content in (whole[:-1], whole + b"\0\0"):
        Path("made/x_train_1.bin").write_bytes(content)
        problem = "x_train_1.bin is cut or damaged: its header says 3 tokens"
        with pytest.raises(UserError, match=problem):
            load_data(Path("made"))
    # nothing, half a header, zeros, another magic number
    for content in (b"", whole[:1000], bytes(2000), b"\1" + whole[1:]):
        Path("made/x_train_1.bin").write_bytes(content)
        with pytest.raises(UserError, match="x_train_1.bin is not a token shard"):
            load_data(Path("made"))
    with pytest.raises(UserError, match="no .* in data/fineweb_edu: `python prepare_fineweb.py`"):
        load_data(SHARDS)
    for content in ("{", "[]", "3", '{"version": 1, "shards": []}'):
        Path("made/manifest.json").write_text(content)
        with pytest.raises(UserError, match="made/manifest.json is (damaged|not by prepare)"):
            load_data(Path("made"))


def test_a_finished_folder_that_lost_a_shard_is_refused():
    write_source("x.jsonl", random_documents(60))
    prepare("x.jsonl", "o", "--shard_tokens=2e3")
    assert len(load_data(Path("o"))[0].arrays) > 1
    shutil.copy("o/finewebedu_train_000001.bin", "o/finewebedu_train_000002.bin")
    with pytest.raises(UserError, match="finewebedu_train_000002.bin has .* tokens, not"):
        load_data(Path("o"))
    Path("o/finewebedu_train_000002.bin").unlink()
    missing = "o/finewebedu_train_000002.bin is missing: manifest.json lists it"
    with pytest.raises(UserError, match=missing):
        load_data(Path("o"))
    with pytest.raises(UserError, match=missing):
        prepare("x.jsonl", "o", "--shard_tokens=2e3")


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
    # a run that was begun knows its data by this
    assert what["data_sha256"].startswith("dde43d978aa136cc")


def test_a_text_file_is_utf8_and_has_an_end():
    text = "a" * (2**20 - 1) + "雪"  # it lies across two of the pieces that are read
    Path("snow.txt").write_text(text)
    train, val, _, _ = load_data(Path("snow.txt"))
    assert [*train.arrays[0], *val.arrays[0]] == expected_tokens([text])
    for content in (b"\xff", text.encode()[:-1], text.encode() + b"\xff"):
        Path("snow.txt").write_bytes(content)
        with pytest.raises(UserError, match="snow.txt is not UTF-8 text: .* near byte"):
            load_data(Path("snow.txt"))
    os.mkfifo("pipe.txt")
    for path in ("pipe.txt", "/dev/zero", "nowhere.txt"):
        with pytest.raises(UserError, match=f"{path}: no such file, or not a regular one"):
            load_data(Path(path))


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


@pytest.mark.parametrize("source", ["x.jsonl", "x.JSONL.gz", "x.parquet", "folder"])
def test_every_shard_ends_with_a_whole_document(source):
    texts = random_documents(400) + [f"{EOT} is text, too \u2028", "", "a long one " * 2000]
    texts += ["x" + " " * 1_000_000 + "y"]  # too many blanks for tiktoken's engine
    texts += random_documents(300, seed=1)
    write_source(source, texts)
    prepare(source, "o", "--shard_tokens=2e4", "--val_tokens=3e3")
    assert tokens_of("o") == expected_tokens(texts)
    assert len(shards_of("o")) > 3
    train, val, tokenizer, _ = load_data(Path("o"))
    assert tokenizer == "gpt2"
    for array in (*train.arrays, *val.arrays):
        assert array[0] == BYTES_EOT
    before_the_last = np.flatnonzero(val.arrays[0] == BYTES_EOT)[-1]
    assert before_the_last < 3000 <= val.tokens


@pytest.mark.parametrize("when", ["after the first", "before the second"])
@pytest.mark.parametrize("source", ["x.jsonl", "folder"])
def test_killed_at_every_rename_it_ends_in_the_same_bytes(source, when):
    # a shard has fewer documents than a thread takes at a time
    write_source(source, random_documents(70))
    prepare(source, "whole", "--shard_tokens=1e3")
    deaths = 0
    while not prepare_and_die(source, "o", "--shard_tokens=1e3", when=when):
        deaths += 1
        if not read_manifest("o")["finished"]:
            with pytest.raises(UserError, match="o is only half prepared"):
                load_data(Path("o"))
    assert deaths > len(shards_of("whole")) >= 5
    assert shards_of("o") == shards_of("whole")
    assert read_manifest("o")["shards"] == read_manifest("whole")["shards"]


@pytest.mark.parametrize("source", ["x.jsonl", "x.jsonl.gz", "folder"])
def test_reading_goes_on_at_any_document(source):
    documents = random_documents(50)
    write_source(source, documents)
    files = prepare_fineweb.find_files(prepare_fineweb.parse([f"--source={source}"]))
    whole = list(prepare_fineweb.read_documents(files, 0, 0))
    assert [text for _, text in whole] == documents
    for n, (place, _) in enumerate(whole):
        assert list(prepare_fineweb.read_documents(files, *place)) == whole[n + 1 :]


def test_tokens_end_the_work_and_a_finished_folder_is_left_alone(capsys):
    write_source("x.jsonl", random_documents(300))
    prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=9e3")
    tokens = tokens_of("o")
    assert 9000 <= len(tokens) < 9000 + 60 * 6
    before = shards_of("o")
    prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=9e3")
    assert "o is finished" in capsys.readouterr().out
    assert shards_of("o") == before
    with pytest.raises(UserError, match="begun with --tokens=9000, not 20000"):
        prepare("x.jsonl", "o", "--shard_tokens=4e3", "--tokens=2e4")


@pytest.mark.parametrize("finished", [False, True])
def test_a_source_that_changed_is_refused(finished):
    texts = random_documents(50)
    write_source("x.jsonl", texts)
    if finished:
        prepare("x.jsonl", "o", "--shard_tokens=1e3")
    else:
        for _ in range(3):
            prepare_and_die("x.jsonl", "o", "--shard_tokens=1e3", when="after the first")
    assert read_manifest("o")["finished"] == finished
    write_source("x.jsonl", texts[::-1])  # of the same size
    with pytest.raises(UserError, match="x.jsonl has changed since o was begun"):
        prepare("x.jsonl", "o", "--shard_tokens=1e3")


def test_a_dataset_has_a_name_for_some_of_its_files(monkeypatch):
    monkeypatch.setenv("USE_TORCH", "0")  # set by the program, and taken back for other tests
    documents = random_documents(30)
    write_source("d/small/0.parquet", documents)
    write_source("d/other/0.parquet", ["other"])
    config = "configs: [{config_name: small, data_files: 'small/*'}]"
    Path("d/README.md").write_text(f"---\n{config}\n---\n")
    prepare("d", "o", "--name=small", "--val_tokens=100")
    assert tokens_of("o") == expected_tokens(documents)
    with pytest.raises(UserError, match="d: .*'large' not found"):
        prepare("d", "o2", "--name=large")


GOOD = b'{"text": "one"}\n'


@pytest.mark.parametrize("name, content, message", [
    ("x.txt", b"text", "x.txt: a .txt does not say where its.*train.py --data=x.txt"),
    ("x.TXT", b"text", "x.TXT: a .txt does not say where its"),
    ("x.md", b"text", "x.md: we read only .parquet, .jsonl, .jsonl.gz"),
    ("x.json", b'[{"text": "one"}]', "x.json: we read only"),
    ("x", b"text", "x: we read only"),
    ("d/x.txt", b"text", "d/x.txt: a .txt does not say where its"),
    ("d/x.jsonl.tmp", GOOD, "d/x.jsonl.tmp: we read only"),
    ("nowhere.jsonl", None, "nowhere.jsonl: no such file"),
    ("x.jsonl", b"", "x.jsonl: there are no documents in it"),
    ("x.jsonl", GOOD, "all of it is val"),
    ("x.jsonl", GOOD + b"\n" + b'{"text": null}', "x.jsonl, row 3: its text is not a .*None"),
    ("x.jsonl", GOOD + b'{"text": "tw', "x.jsonl, row 2 is not like .*Unterminated string"),
    ("x.jsonl", GOOD + b'{"txt": "two"}', "x.jsonl, row 2 is not like .*'text'"),
    ("x.jsonl", b'[{"text": "one"}]', "x.jsonl, row 1 is not like"),
    ("x.jsonl", GOOD + b"\0\0", "x.jsonl, row 2 is not like"),
    ("x.jsonl", GOOD.decode().encode("utf-16"), "x.jsonl, row 1 is not like .*utf-8"),
    ("x.jsonl.gz", gzip.compress(GOOD * 100)[:-9], "x.jsonl.gz: Compressed file ended"),
    ("x.jsonl.gz", GOOD, "x.jsonl.gz: Not a gzipped file"),
    ("x.parquet", b"text", "x.parquet: Parquet"),
])
def test_what_cannot_be_prepared_is_refused_in_one_line(name, content, message):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    if name.startswith("d/"):
        write_source("d/a.jsonl", ["one", "two"])
        path = path.parent
    with pytest.raises(UserError, match=message) as error:
        prepare(path, "o")
    assert "\n" not in str(error.value)


def test_a_column_that_is_no_text_is_refused():
    pq.write_table(pa.table({"text": [b"one"]}), "bytes.parquet")
    with pytest.raises(UserError, match="bytes.parquet, row 1: its text is not a string but b'one"):
        prepare("bytes.parquet", "o")
    pq.write_table(pa.table({"other": ["one"]}), "other.parquet")
    with pytest.raises(UserError, match="other.parquet: there is no column text"):
        prepare("other.parquet", "o")


def test_wrong_flags_and_folders_are_refused():
    write_shard("made/x_train_1.bin", [1, 2, 3])
    write_source("x.jsonl", ["one", "two"])
    with pytest.raises(UserError, match="made has shards from elsewhere"):
        prepare("x.jsonl", "made")
    with pytest.raises(UserError, match="--val_tokens: 2e9 at most"):
        prepare("x.jsonl", "o", "--val_tokens=3e9")
    with pytest.raises(UserError, match="--source: must not be empty"):
        prepare("", "o")
    Path("made/manifest.json").write_text("[1]")
    with pytest.raises(UserError, match="made/manifest.json is not by prepare_fineweb.py"):
        prepare("x.jsonl", "made")


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
