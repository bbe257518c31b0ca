"""What went wrong where there is no verdict, in a sentence for the user."""
import inspect
import math
import sysconfig
import traceback
from pathlib import Path

NOT_TORCH = ("jax", "flax", "haiku", "equinox", "mlx", "tensorflow", "keras", "paddle", "numpy")
USE_VECTORS = ("port runs PyTorch layers only. For JAX, MLX, numpy, C++ and others there are "
               "numbers to compare with: port/vectors.md")
HERE = Path(__file__).parent
LIBRARY = sysconfig.get_path("stdlib")


class NoVerdict(ValueError):
    """A sentence that helps, where a layer can't be judged."""


def refuse_what_is_no_layer(layer):
    import torch  # here, so that this file can be read without it

    if layer is None or inspect.isclass(layer):
        raise NoVerdict("there is no layer: add layer = YourAttention(...) with its sizes")
    if isinstance(layer, torch.nn.Module):
        return
    packages = [kind.__module__.split(".")[0] for kind in type(layer).__mro__]
    foreign = [name for name in packages if name in NOT_TORCH]
    if foreign:
        raise NoVerdict(f"the layer is made with {foreign[0]}. {USE_VECTORS}")
    if not callable(layer):
        raise NoVerdict("layer is neither a torch.nn.Module nor a function layer(x, w)")
    arguments = inspect.signature(layer).parameters.values()
    places = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    takes_any = any(a.kind is a.VAR_POSITIONAL for a in arguments)
    if len(places) < 2 and not takes_any:
        raise NoVerdict(f"layer is a {type(layer).__name__}, and no torch.nn.Module. A function of "
                        f"tensors takes two arguments, layer(x, w). {USE_VECTORS}")


def say(problem):
    """An exception in one line, with the line of the user's code where it came up."""
    text = " ".join(f"{type(problem).__name__}: {problem}".split()).removesuffix(":")
    frames = their_frames(problem)
    if not frames:
        return text
    frame = frames[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"


def how_far(problem):
    """The line of the layer's forward that an exception came through: later ones tell more."""
    frames = their_frames(problem)
    return frames[0].lineno if frames else math.inf


def their_frames(problem):
    """The places in the user's own files through which an exception came."""
    found = []
    for frame in traceback.extract_tb(problem.__traceback__):
        is_library = "site-packages" in frame.filename or frame.filename.startswith(LIBRARY)
        is_ours = Path(frame.filename).parent == HERE
        if not is_library and not is_ours and "<" not in frame.filename:
            found.append(frame)
    return found
