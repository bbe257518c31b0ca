"""What went wrong where there is no verdict, in a sentence for the user."""
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
