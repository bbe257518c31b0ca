"""
What every program here needs: flags, one line for a user's mistake, the device, a run's folder.

torch is imported where it is used, because prepare_fineweb.py does without.
"""
import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import field, fields
from pathlib import Path
from typing import get_args


class UserError(ValueError):
    """A mistake that a user can mend: cli prints it in one line. (model.py has ModelError.)"""


# ---- flags


def flag(default, help, **more):
    """A field of a dataclass of settings, which is also a flag of the command line.

    more: choices and type, as argparse knows them, many=True for a list like a,b,c, or what the
    program itself looks at, like identity in train.py.
    """
    return field(default=default, metadata=dict(help=help, **more))


def count(text):
    """A whole number from 0 on, which may be written like 1e9. A type for argparse."""
    # float() also reads "nan" and "1_0". It makes inf of "1e999", and inf % 1 is nan
    written_right = re.fullmatch(r"\d+(\.\d*)?(e\+?\d+)?", text, re.ASCII)
    if not written_right or float(text) % 1 != 0:
        right = "a whole number from 0 on, like 12 or 1e9"
        raise argparse.ArgumentTypeError(f"{text!r} is not {right}")
    if text.isdigit():
        return int(text)  # keeps all digits of a long seed. A float would round it
    return int(float(text))


def positive(text):
    if not 1 <= count(text) <= 1e13:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1e13, not {text}")
    return count(text)


def random_seed(text):
    """A seed of the random generators, which take 64 bits."""
    if count(text) >= 2**64:
        raise argparse.ArgumentTypeError("must be below 2^64")
    return count(text)


def number(text):
    """A finite number from 0 on."""
    # float() also reads "inf", "nan" and "1_0"
    value = float(text) if re.fullmatch(r"\d*\.?\d*(e[+-]?\d+)?", text, re.ASCII) else -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on, like 0.5 or 1e-3")
    return value


def above_0(text):
    if number(text) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number(text)


def path(text):
    """A path. A shell leaves the ~ of --out=~/runs as it is."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text).expanduser()


TYPES = {int: positive, float: number, str: str, Path: path}


def parse_flags(cls, argv=None, description=None, presets=None):
    """The flags that a command line gives, as a dict: cls(**parse_flags(cls)) has all settings.

    cls: a dataclass, whose fields made by flag() are the flags. presets: {name: the defaults that
    differ}, for --help.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--flag=value ...]    (--help lists the flags)",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # a flag that is not given is not in the result
        allow_abbrev=False,
    )
    for f in fields(cls):
        if "help" not in f.metadata:
            continue  # not a flag
        options = {"help": f.metadata["help"]}
        defaults = {}
        for name, preset in (presets or {}).items():
            defaults[name] = preset.get(f.name, f.default)
        if all(value == f.default for value in defaults.values()):
            defaults = {"default": f.default}
        shown = [f"{name}: {value}" for name, value in defaults.items() if value not in (None, "")]
        if shown:
            options["help"] += f" ({', '.join(shown)})"
        kind = (get_args(f.type) or [f.type])[0]  # int of "int | None"
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = f.metadata.get("type", TYPES.get(kind))
            options["choices"] = f.metadata.get("choices")
        if f.metadata.get("many"):
            options["type"] = comma_list(options["type"])
        parser.add_argument(f"--{f.name}", **options)
    given = vars(parser.parse_args(argv))
    for name, value in given.items():
        if value == []:  # what argparse makes of --name=--
            parser.error(f"argument --{name}: expected a value")
    return given


def comma_list(of):
    """A type for argparse: "a,b" is [of("a"), of("b")], and what is named twice counts once."""

    def parse_list(text):
        return list(dict.fromkeys(of(part) for part in text.split(",")))

    return parse_list


# ---- the last line of defence


def cli(main):
    """Runs the main function of a program, and ends the program if that fails.

    A user's mistake ends in one line and a status that is not 0. So does a full memory, and Ctrl-C.
    Any other exception is a mistake in the code, and keeps its traceback.
    """
    program = Path(sys.argv[0]).name
    for stream in (sys.stdout, sys.stderr):
        # a sample of a model may hold any character, and not every terminal or file can show it
        stream.reconfigure(errors="backslashreplace")
    mistakes = [UserError, OSError]
    if "model" in sys.modules:
        mistakes.append(sys.modules["model"].ModelError)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read our output, like `head`, has seen enough. What is left has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as e:
        reason = f", {e}" if str(e) else ""
        print(f"\n{program}: stopped{reason}", file=sys.stderr)
        sys.exit(130)  # what a shell expects after Ctrl-C
    except tuple(mistakes) as e:
        sys.exit(f"{program}: {' '.join(str(e).split())}")
    except (RuntimeError, MemoryError) as e:
        # torch.OutOfMemoryError of a GPU is a RuntimeError, too
        words = ("out of memory", "can't allocate memory")
        if isinstance(e, RuntimeError) and not any(word in str(e) for word in words):
            raise
        less = "a smaller --batch_size, --block_size or --num_samples takes less"
        sys.exit(f"{program}: out of memory: {less}")


def one_line_for_ctrl_c(kind, error, traceback):
    """A sys.excepthook, for the seconds in which torch is imported and cli does not run yet."""
    if kind is KeyboardInterrupt:
        print(f"\n{Path(sys.argv[0]).name}: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = one_line_for_ctrl_c


# ---- the machine


def processes():
    """(number of this process, how many there are), as torchrun says it: else (0, 1)."""
    try:
        rank = int(os.environ.get("RANK") or 0)
        world = int(os.environ.get("WORLD_SIZE") or 1)
    except ValueError as e:
        raise UserError(f"torchrun sets RANK and WORLD_SIZE, and one of them is bad: {e}") from None
    if not 0 <= rank < world:
        raise UserError(f"RANK={rank}, but WORLD_SIZE={world}: torchrun sets both")
    return rank, world


def print0(*args, **kwargs):
    """Prints in the first process only, or eight GPUs would say everything eight times."""
    rank, _ = processes()
    if rank == 0:
        print(*args, **kwargs, flush=True)


def pick_device(name=None):
    """The torch.device of that name, by default a GPU where there is one.

    Raises UserError if it can't be used.
    """
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        one = torch.ones(1, device=name)
        one.item()  # "meta" is a device without values
        return one.device
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        first_line = str(e).split("\n")[0]
        raise UserError(f"can't use the device {name}: {first_line}") from None


def pick_dtype(device, name=None):
    """The precision of the matmuls: name, or else bfloat16 where the card has it, and float32."""
    import torch

    if name is not None:
        return name
    # cards older than Ampere only emulate bf16
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if bf16 else "float32"


def device_name(device):
    """The card's name, or the processor's and the number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():  # on Linux, where platform does not know the model
        name = re.search(r"(?:model name\s*: (.*)|$)", Path("/proc/cpuinfo").read_text())[1] or name
    return f"{device} ({name}), {torch.get_num_threads()} threads"


def find_checkpoint(path=None):
    """The file that --ckpt means: itself, the one in a folder, or the newest one under out/."""
    if path is None:
        checkpoints = sorted(Path("out").rglob("ckpt.pt"), key=os.path.getmtime)
        if not checkpoints:
            raise UserError("no checkpoint under out/: python train.py --attn=diff makes one")
        return checkpoints[-1]
    path = Path(path)
    if path.is_dir():
        path = path / "ckpt.pt"
    if not path.is_file():
        raise UserError(f"--ckpt={path}: no checkpoint there, python train.py makes some")
    return path


def commit():
    """The commit of this code, "-dirty" behind it where a file was changed. None without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(__file__).resolve().parent
    try:
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


# ---- the folder of a run: its lock and its log


@contextmanager
def locked(folder):
    """Keeps a second program out of the folder. Yields a function to call before one writes there.

    It raises UserError if somebody has moved or deleted the folder: another program may have made a
    new one in its place.
    """
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} can't be a folder: there is a file of that name") from None
    lock = folder / "lock"
    try:
        with FileLock(lock, timeout=0):
            number = os.stat(lock).st_ino

            def check_lock():
                if not lock.exists() or os.stat(lock).st_ino != number:
                    raise UserError(f"{folder} was moved or deleted: nothing more is written there")

            yield check_lock
    except Timeout:
        raise UserError(f"another program is writing to {folder}") from None


def write_json(path, *records):
    """A file with a record in each line, whole, in the place of whatever was there."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(temporary, path)


def add_to_log(path, record):
    """One line more. If a stop has cut the last line, that goes. Nothing else is ever changed."""
    with open(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record).encode() + b"\n")


def read_log(path):
    """(head, records) of a log.jsonl, with one record for each step.

    A step that was made again after a stop has more than one line, and of each field the last one
    counts. A line that is no record is left out, so another program's file gives ({}, []).
    """
    head = {}
    records = {}
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a stop may have cut it
        if not isinstance(record, dict):
            continue
        if not head:
            head = record
        elif isinstance(record.get("step"), int):
            step = record["step"]
            records[step] = records.get(step, {}) | record
            if "diverged" not in record:  # a run that was resumed may get over that step
                records[step].pop("diverged", None)
    return head, [records[step] for step in sorted(records)]
