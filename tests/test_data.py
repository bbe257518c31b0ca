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
import pandas as pd
import pytest
import tiktoken
from pydoc_data.topics import topics

import prepare_fineweb
from data import EOT, SHARDS, Shards, get_tokenizer, load_data, load_manifest, lock, read_shard
from helpers import TOP, complaint, contents

PROGRAM = str(TOP / "prepare_fineweb.py")
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


def prepare(source, out, *flags):
    command = [f"--source={source}", f"--out={out}", "--tokenizer=bytes", "--procs=2"]
    prepare_fineweb.main([*command, *flags])


def prepare_in_child(source, out, *flags, stop_with, before_rename):
    """Runs the program in another process, which sends itself a signal before a certain call of
    os.replace."""
    code = f"""
import os, runpy, signal, sys
# a job in the background would not notice it otherwise
signal.signal(signal.SIGINT, signal.default_int_handler)
replace = os.replace
calls = []
def interrupted_replace(old, new):
    calls.append(new)
    if len(calls) == {before_rename}:
        signal.raise_signal({int(stop_with)})
    replace(old, new)
os.replace = interrupted_replace
sys.path.insert(0, {str(TOP)!r})
runpy.run_path({PROGRAM!r}, run_name="__main__")
"""
    arguments = [f"--source={source}", f"--out={out}", "--tokenizer=bytes", "--procs=2", *flags]
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


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
    return contents(folder, "*.bin")


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


def test_a_fingerprint_tells_data_apart():
    tokens = np.arange(3_000_000, dtype="<u2")
    fingerprint = Shards([tokens]).fingerprint()
    assert fingerprint == Shards([tokens.copy()]).fingerprint()
    assert fingerprint != Shards([np.delete(tokens, 1_500_000)]).fingerprint()
    assert fingerprint != Shards([tokens[:10], tokens[10:]]).fingerprint()
    # it reads the ends alone: a change in the middle is seen by the length, if at all
    for changed in (0, 999_999, -1_000_000, -1):
        others = tokens.copy()
        others[changed] += 1
        assert fingerprint != Shards([others]).fingerprint()


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
    assert load_data(Path("made"))[3]["data_sha256"] != what["data_sha256"]


def test_what_is_no_whole_shard_is_refused():
    write_shard("made/x_train_1.bin", [1, 2, 3])
    whole = Path("made/x_train_1.bin").read_bytes()
    with pytest.raises(ValueError, match=r"no \*_val\*.bin in made: `python prepare_fineweb.py`"):
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
    Path("made/manifest.json").write_text('{"name": "a web page"}')
    with pytest.raises(ValueError, match="manifest.json was not written by prepare_fineweb"):
        load_data(Path("made"))


def test_a_shard_that_the_manifest_lists_must_be_there():
    write_source("x.jsonl", random_documents(100))
    prepare("x.jsonl", "o", "--shard_tokens=2e3")
    Path("o/finewebedu_train_000002.bin").unlink()
    with pytest.raises(OSError, match="train_000002.bin"):
        load_data(Path("o"))


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


def test_another_split_of_the_manual_is_other_data(monkeypatch):
    before = load_data(None)[3]["data_sha256"]
    assert load_data(None)[3]["data_sha256"] == before
    # one topic in front moves all others by one: nearly the same text, but another split
    monkeypatch.setitem(topics, "A", "")
    assert load_data(None)[3]["data_sha256"] != before


# writing


@pytest.mark.parametrize("source", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet", "folder"])
def test_goes_on_after_every_shard(source):
    texts = random_documents(400)
    # what is between the two: a document over three shards, one that looks like two, an empty one
    texts += ["longer than a shard " * 2500, f"{EOT} is text, too\r\n\x00 \u2028", ""]
    texts += random_documents(300, seed=1)
    flags = ["--shard_tokens=2e4", "--val_tokens=3e3", "--name=small"]
    write_source(source, texts)
    prepare(source, "o", *flags)
    expected = expected_tokens(["".join(texts)] if source == "x.txt" else texts)
    assert tokens_of("o") == expected
    train, val, tokenizer, _ = load_data(Path("o"))
    assert tokenizer == "bytes"
    assert val.tokens == 3000
    assert train.sequence(20, 999).tolist() == expected[22_980:23_980]

    whole = shards_of("o")
    manifest = load_manifest("o")
    shards = manifest["shards"]
    assert sum(shard["documents"] for shard in shards) == expected.count(BYTES_EOT)
    for n in range(len(shards)):
        # as if it had been killed when shard n had its name, and not yet its line in the manifest
        for shard in shards[n + 1 :]:
            Path("o", shard["file"]).unlink()
        stopped = manifest | {"source_ended": False, "shards": shards[:n]}
        Path("o/manifest.json").write_text(json.dumps(stopped))
        Path("o/shard.tmp").write_bytes(b"half of it")
        prepare(source, "o", *flags)
        assert shards_of("o") == whole, f"killed after shard {n}"
        assert load_manifest("o") == manifest


def test_killed_before_any_rename_it_ends_in_the_same_bytes():
    write_source("x.jsonl", random_documents(100))
    run = ["x.jsonl", "o", "--shard_tokens=4e3"]
    prepare("x.jsonl", "whole", "--shard_tokens=4e3")
    # the first manifest, and then each shard and the manifest after it
    renames = 1 + 2 * len(shards_of("whole"))
    for n in range(1, renames + 1):
        shutil.rmtree("o", ignore_errors=True)
        child = prepare_in_child(*run, stop_with=signal.SIGKILL, before_rename=n)
        assert child.returncode == -signal.SIGKILL
        assert shards_of("o") != shards_of("whole") or load_manifest("o") != load_manifest("whole")
        prepare(*run)
        assert shards_of("o") == shards_of("whole"), f"killed before rename {n}"
        assert load_manifest("o") == load_manifest("whole")


def test_ctrl_c_ends_in_one_line():
    write_source("x.jsonl", random_documents(150))
    run = ["x.jsonl", "o", "--shard_tokens=4e3"]
    child = prepare_in_child(*run, stop_with=signal.SIGINT, before_rename=4)
    assert child.returncode == 1
    assert child.stderr == "prepare_fineweb.py: stopped, the same command resumes\n"
    assert len(load_manifest("o")["shards"]) == 1
    prepare(*run)
    prepare("x.jsonl", "whole", "--shard_tokens=4e3")
    assert shards_of("o") == shards_of("whole")


def test_a_full_disk_loses_nothing():
    write_source("x.jsonl", random_documents(150))
    run = ["x.jsonl", "o", "--shard_tokens=4e3"]
    prepare(*run, "--tokens=4e3")
    Path("o/shard.tmp").symlink_to("/dev/full")  # where every write fails
    with pytest.raises(ValueError, match=r"x.jsonl -> o: \[Errno 28\] No space left on device"):
        prepare(*run)
    assert len(load_manifest("o")["shards"]) == 1
    Path("o/shard.tmp").unlink()
    prepare(*run)
    prepare("x.jsonl", "whole", "--shard_tokens=4e3")
    assert shards_of("o") == shards_of("whole")


def test_exactly_so_many_tokens_and_more_of_them_later(capsys):
    texts = random_documents(400)
    write_source("x.jsonl", texts)
    run = ["x.jsonl", "o", "--shard_tokens=4e3"]
    for tokens in (2500, 9000, 12000):
        prepare(*run, f"--tokens={tokens}")
        assert tokens_of("o") == expected_tokens(texts)[:tokens]
        # with only the first shard there is nothing to train on
        assert ("choose a smaller --val_tokens" in capsys.readouterr().out) == (tokens == 2500)
    with pytest.raises(ValueError, match="the folder has 12,000 tokens, not 10,000"):
        prepare(*run, "--tokens=1e4")
    prepare(*run)
    prepare("x.jsonl", "whole", "--shard_tokens=4e3")
    assert shards_of("o") == shards_of("whole")


def test_a_source_may_end_with_a_shard():
    write_source("x.jsonl", ["1234", "", "12345678", "1"])  # 17 tokens
    prepare("x.jsonl", "o", "--shard_tokens=6", "--val_tokens=5")
    assert [shard["tokens"] for shard in load_manifest("o")["shards"]] == [5, 6, 6]
    assert len(shards_of("o")) == 3
    assert load_manifest("o")["source_ended"]


def test_a_finished_folder_is_left_as_it_is(capsys):
    write_source("x.jsonl", random_documents(100))
    prepare("x.jsonl", "o", "--shard_tokens=2e3")
    before = shards_of("o")
    printed = capsys.readouterr().out.splitlines()
    os.remove("x.jsonl")  # nobody needs it any more
    prepare("x.jsonl", "o", "--shard_tokens=2e3")
    assert capsys.readouterr().out.splitlines() == printed[-1:]
    assert shards_of("o") == before


def test_folders_of_something_else_are_refused():
    texts = random_documents(400)
    write_source("x.jsonl", texts)
    run = ["x.jsonl", "o", "--shard_tokens=4e3"]
    prepare(*run, "--tokens=9e3")
    with pytest.raises(ValueError, match="the folder has shard_tokens 4000, not 3000"):
        prepare(*run, "--shard_tokens=3e3")
    with open("o/.lock") as file:
        lock(file, "o")
        with pytest.raises(ValueError, match="another run is writing to o"):
            prepare(*run)
    # another document in front, so that the one to go on in is another one; and too few documents
    write_source("x.jsonl", ["changed"] + texts)
    with pytest.raises(ValueError, match="the source has changed"):
        prepare(*run)
    write_source("x.jsonl", texts[:20])
    with pytest.raises(ValueError, match="the source has changed"):
        prepare(*run)
    assert tokens_of("o") == expected_tokens(texts)[:9000]
    write_shard("o/finewebedu_train_000001.bin", [1, 2, 3])
    problem = "train_000001.bin is not the one that manifest.json lists"
    with pytest.raises(ValueError, match=problem):
        prepare(*run)
    Path("o/finewebedu_train_000001.bin").unlink()
    with pytest.raises(ValueError, match="No such file .*train_000001.bin"):
        prepare(*run)
    Path("o/manifest.json").unlink()
    with pytest.raises(ValueError, match="the folder has shards from elsewhere"):
        prepare(*run)


def test_pretokenized_shards_are_fetched_whole_and_in_order(monkeypatch):
    write_source("x.jsonl", random_documents(200))
    prepare("x.jsonl", "hub", "--shard_tokens=2e3")
    fetched = []

    def list_files(source, repo_type):
        assert source == "kjj0/finewebedu10B-gpt2"
        return ["README.md", *sorted(os.listdir("hub"))]

    def download(source, name, repo_type, local_dir):
        fetched.append(name)
        return shutil.copy(f"hub/{name}", local_dir)

    monkeypatch.setattr("huggingface_hub.list_repo_files", list_files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    # 2,000 tokens are too few, so two shards; val comes first, although its name does not
    prepare_fineweb.main(["--pretokenized", "--out=o", "--tokens=3e3"])
    assert fetched == ["finewebedu_val_000000.bin", "finewebedu_train_000001.bin"]
    prepare_fineweb.main(["--pretokenized", "--out=o"])
    assert shards_of("o") == shards_of("hub")
    assert load_data(Path("o"))[2] == "gpt2"
    with pytest.raises(ValueError, match="shards that were made here"):
        prepare_fineweb.main(["--pretokenized", "--out=hub"])


@pytest.mark.parametrize("flags, says", [
    ("--shard_tokens=0", "--shard_tokens: '0' is not a whole number from 1 on, like 12 or 1e9"),
    ("--shard_tokens=1e10", "a shard has fewer than 2^31 tokens"),
    ("--tokens=1.9", "--tokens: '1.9' is not a whole number"),
    ("--tokens=inf", "--tokens: 'inf' is not a whole number"),
    ("--val_tokens=many", "--val_tokens: 'many' is not a whole number"),
    ("--procs=-2", "--procs: '-2' is not a whole number"),
    ("--source=nothing.txt", "No such file or directory: 'nothing.txt'"),
    ("--source=latin.txt", "latin.txt -> o: 'utf-8' codec can't decode byte 0xff"),
    ("--source=empty.txt", "empty.txt -> o: there is no text in it"),
    ("--source=empty.parquet", "empty.parquet -> o: there is no text in it"),
    ("--source=empty.jsonl", "empty.jsonl -> o: "),
    ("--source=column.jsonl", "column.jsonl -> o: there is no column text"),
    ("--source=column.parquet", "column.parquet -> o: there is no column text"),
    ("--source=cut.jsonl.gz", "cut.jsonl.gz -> o: Compressed file ended"),
    ("--source=cut.parquet", "cut.parquet -> o: "),
    ("--source=nobody/nothing", "nobody/nothing -> o: "),
])  # fmt: skip
def test_bad_input_ends_in_one_line_and_no_shard(flags, says, monkeypatch, capsys):
    Path("latin.txt").write_bytes(b"a caf\xff")
    Path("empty.txt").write_bytes(b"")
    Path("empty.jsonl").write_bytes(b"")
    Path("column.jsonl").write_text('{"body": "x"}\n')
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n')[:-9])
    pd.DataFrame({"text": pd.Series([], dtype=str)}).to_parquet("empty.parquet")
    pd.DataFrame({"body": ["x"]}).to_parquet("column.parquet")
    pd.DataFrame({"text": ["x"]}).to_parquet("cut.parquet")
    Path("cut.parquet").write_bytes(Path("cut.parquet").read_bytes()[:-100])
    before = set(os.listdir())
    # otherwise it would try for long
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "1000")  # for the usage in one line
    command = f"prepare_fineweb.py --tokenizer=bytes --out=o {flags}"
    assert says in complaint(command, monkeypatch, capsys)
    assert set(os.listdir()) - {"o"} == before
    assert shards_of("o") == {}


@pytest.mark.slow
def test_preparing_takes_less_than_600_MB():
    """Of two shards of the default size. Most of it is libraries, and what arrow reads ahead."""
    words = np.array(random.Random(0).sample([f"{i:x} " for i in range(100_000)], 1000))
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(words, size=1000)) for _ in range(50_000)]  # some 5 kB each
    pd.DataFrame({"text": texts}).to_parquet("a.parquet", row_group_size=1000)
    # the system counts what its parent had when it was forked, so the parent is a small process
    code = f"""
import resource, subprocess
flags = ["--source=a.parquet", "--tokenizer=bytes", "--tokens=2e8"]
subprocess.run([{sys.executable!r}, {PROGRAM!r}, *flags], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    *_, kilobytes = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert len(read_shard(SHARDS / "finewebedu_train_000001.bin")) == 100_000_000
    assert int(kilobytes) < 600e3


# the lock


def test_without_fcntl_nothing_is_locked_and_data_can_be_read(monkeypatch):
    """As on Windows."""
    code = f"import sys; sys.modules['fcntl'] = None; sys.path.insert(0, {str(TOP)!r}); import data"
    subprocess.run([sys.executable, "-c", code], check=True)
    # two open files stand for two processes
    with open("a", "w") as first, open("a") as second:
        lock(first, "here")
        with pytest.raises(ValueError, match="another run is writing to here"):
            lock(second, "here")
        monkeypatch.setitem(sys.modules, "fcntl", None)
        lock(second, "here")
