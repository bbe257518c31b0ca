"""Run the file that makes a layer, on a CPU, with stand-ins for what can't be imported here."""
import ast
import contextlib
import importlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch

from port.problems import NOT_TORCH, USE_VECTORS, NoVerdict, say
from port.stand_ins import StandIn


def run(path, lines, known):
    """{name: value} of a Python file, with further lines run behind it, in the surroundings.

    known: names that the lines may assign, whether or not the file has them.
    NoVerdict, a ValueError with a sentence, if that fails.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise NoVerdict(f"there is no file {path}")
    try:
        module = import_with_stand_ins(path)
        refuse_what_is_never_used(lines, vars(module), known)
        exec("\n".join(lines), vars(module))  # in the file's own world, so that its flags change
    except NoVerdict:
        raise
    except Exception as problem:  # the file's own
        raise NoVerdict(say(problem)) from problem
    return vars(module)


def refuse_what_is_never_used(lines, world, known):
    """A misspelt n_heads=4 would be ignored, and the verdict be on something else.

    lines: those behind the file's name. world: what they change. known: what diagnose takes.
    """
    assigned = set()
    used = set(known) | world.keys()
    for node in ast.walk(ast.parse("\n".join(lines), filename="behind the file")):
        if isinstance(node, ast.Assign):
            assigned |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
    unused = sorted(assigned - used)
    if unused:
        raise NoVerdict(f"{unused[0]} is assigned and never used. You may say {', '.join(known)}")


def import_with_stand_ins(path):
    folders = 0  # how many folders above the file belong to its name, as in package.module
    while True:
        try:
            return import_file(path, folders)
        except ModuleNotFoundError as problem:
            put_a_stand_in(problem, path)
        except ImportError as problem:
            if "relative import" not in str(problem) or folders == 3:
                raise
            folders += 1


@contextlib.contextmanager
def surroundings(path):
    """What a port is run in: a CPU does for a GPU, and nothing is compiled or written.

    Behind the with-statement all is as before.
    """
    stand_in = StandIn("flash_attn", needs_gpu=True)
    with (
        mock.patch.object(torch.Tensor, "cuda", stay_on_the_cpu),
        mock.patch.object(torch.nn.Module, "cuda", stay_on_the_cpu),
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"),  # to compile takes longer
        mock.patch.dict(sys.modules, flash_attn=stand_in, triton=None),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.object(sys, "argv", [str(path)]),  # what we were given is nothing to the file
        mock.patch.object(sys, "dont_write_bytecode", True),
        warnings.catch_warnings(action="ignore"),  # the port's
    ):
        sys.modules.pop("model", None)  # the port may have a model.py of its own
        yield


def stay_on_the_cpu(self, *arguments, **others):
    return self


def import_file(path, folders):
    """The module of a file. Its folder is looked at first when it imports others."""
    names = [folder.name for folder in reversed(list(path.parents)[:folders])] + [path.stem]
    for name in names:
        if "." in name:  # it would be read as a package
            raise NoVerdict(f"Python can't import {name!r}: rename it, without a dot in its name")
    name = ".".join(names)
    for place in (path.parent, path.parents[folders]):
        sys.path.insert(0, str(place))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def put_a_stand_in(problem, path):
    """Let a stand-in be imported, instead of the module that was not found."""
    name = problem.name
    where = inspect.trace()[-1].frame.f_globals["__name__"]
    needs_gpu = name is not None and name.split(".")[0] in ("triton", "flash_attn")
    if needs_gpu and name.startswith("triton") and where != path.stem:
        name = where  # a module of kernels
    if name is None or isinstance(sys.modules.get(name), StandIn):
        raise problem
    if name.split(".")[0] in NOT_TORCH and not re.search("(import|from) torch", path.read_text()):
        raise NoVerdict(f"{path.name} imports {name}. {USE_VECTORS}") from None
    print(f"{name} can't be imported here, a stand-in is in its place", file=sys.stderr)
    sys.modules[name] = StandIn(name, needs_gpu)
