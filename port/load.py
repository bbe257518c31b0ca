"""Run the file that makes a layer, on a CPU, with stand-ins for what can't be imported here."""
import ast
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from model import rotate
from port.problems import NOT_TORCH, USE_VECTORS, NoVerdict, say


def run(path, lines, known):
    """{name: value} of a Python file, with further lines run behind it.

    known: names that the lines may assign, whether or not the file has them.
    NoVerdict, a ValueError with a sentence, if that fails.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise NoVerdict(f"there is no file {path}")
    prepare()
    stand_in = make_stand_in()
    sys.modules |= {"flash_attn": stand_in, "triton": None}
    try:
        module = import_with_stand_ins(path, stand_in)
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
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Assign):
            assigned |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
    for name in sorted(assigned - used):
        raise NoVerdict(f"{name} is assigned and never used. You may say {', '.join(known)}")


def import_with_stand_ins(path, stand_in):
    folders = 0  # how many folders above the file belong to its name, as in package.module
    while True:
        try:
            return import_file(path, folders)
        except ModuleNotFoundError as problem:
            put_in_place(stand_in, problem, path)
        except ImportError as problem:
            if "relative import" not in str(problem) or folders == 3:
                raise
            folders += 1


def prepare():
    """A CPU does for a GPU, nothing is compiled or written, and our model.py is out of the way."""
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    sys.modules.pop("model", None)  # the port may have a model.py of its own
    sys.dont_write_bytecode = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile would take longer than the verdict


def import_file(path, folders):
    """The module of a file. Its folder is looked at first when it imports others."""
    parents = [folder.name for folder in reversed(list(path.parents)[:folders])]
    name = ".".join([*parents, path.stem])
    for place in (path.parent, path.parents[folders]):
        sys.path.insert(0, str(place))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def put_in_place(stand_in, problem, path):
    """Let a stand-in be imported, instead of the module that was not found."""
    name = problem.name
    where = inspect.trace()[-1].frame.f_globals["__name__"]
    if name and name.split(".")[0] == "triton" and where != path.stem:
        name = where  # a module of kernels: they need a GPU
    if name is None or sys.modules.get(name) is stand_in:
        raise problem
    if name.split(".")[0] in NOT_TORCH and not re.search("(import|from) torch", path.read_text()):
        raise NoVerdict(f"{path.name} imports {name}. {USE_VECTORS}") from None
    print(f"{name} can't be imported here, a stand-in is in its place", file=sys.stderr)
    sys.modules[name] = stand_in


def make_stand_in():
    """Anything can be taken out of it. What most ports import of flash-attn and apex does work."""
    stand_in = MagicMock(flash_attn_func=flash_attn_func)
    stand_in.apply_rotary_emb = lambda q, cos, sin, **_: rotate(q, (cos[:, None], sin[:, None]))
    stand_in.RMSNorm = stand_in.FusedRMSNorm = RMSNorm
    stand_in.__spec__ = torch.__spec__  # transformers asks for one
    return stand_in


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, dim, eps=1e-6, elementwise_affine=True, **others):
        super().__init__(dim, eps, elementwise_affine)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = [m.transpose(1, 2) for m in (q, k, v)]  # from (B, T, H, d)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True,
                                       scale=softmax_scale)
    return y.transpose(1, 2)
