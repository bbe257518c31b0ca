"""What the programs share before their work begins: an unusable setting is one sentence."""
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from model import Refused


@contextmanager
def one_sentence():
    """Around what a program does before its work: what its user has to change needs no traceback.

    Any other error, like one in a class of yours, keeps its traceback.
    """
    try:
        yield
    except Refused as e:
        sys.exit(f"{Path(sys.argv[0]).name}: {e}")  # with the exit code 1


def check_settings(config):
    """Refuses numbers that can't be meant, and a device that PyTorch does not find."""
    for name, value in vars(config).items():
        may_be_0 = type(value) is float or name in ("seed", "warmup")
        if type(value) in (int, float) and not (0 < value < 2**63 or value == 0 and may_be_0):
            raise Refused(f"{name} can't be {value}")
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as e:
        raise Refused(f"device can't be {config.device}: {str(e).splitlines()[0]}") from e


def use_module(name):
    """Import the module that --use names. It adds its classes to model.ATTENTION."""
    try:
        import_module(name)
    except ModuleNotFoundError as e:
        if not f"{name}.".startswith(f"{e.name}."):
            raise  # the module is there, and imports something that is not
        raise Refused(f"--use={name}: Python finds no module of this name (myarm is myarm.py "
                      "beside model.py)") from e
