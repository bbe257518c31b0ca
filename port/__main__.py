"""
What is wrong with my port of differential attention (arXiv 2410.05258)? This says it, on a CPU.

    python -m port myport.py

myport.py makes the layer in its smallest form, (B, T, C) to (B, T, C), and says its sizes:

    from attention import MultiheadDiffAttn  # your code, in PyTorch
    layer = MultiheadDiffAttn(embed_dim=64, depth=3, num_heads=4)
    n_head = 8  # maps: two for each head. In version 2 it counts heads
    depth = 3   # counted from 0. If this is not said, 0 is tried

It may also say version = 2 (DIFF V2), causal = False (an encoder), and which weight is what, if the
guess is wrong: names = {"q": "W_q.weight", "v": ["v1.weight", "v2.weight"]}. A role is q, k, v,
a fused one such as qkv in your order, o, norm, lambda_q1 and so on, lambda, or version 2's gate.
All this may also follow the file's name:

    python -m port attention.py "layer = MultiheadDiffAttn(64, 3, 4)" n_head=8 depth=3

layer may be a function layer(x, w) of weights with Microsoft's names, w["q_proj.weight"].

    BROKEN    sees the future, gives NaN, does not learn, ...
    DIFFERS   computes something else than the paper
    CHOICE    the paper's layer, but for something that one may choose
    SAME      the paper's layer, with its weights in any usual order

The exit code is 0 for SAME and CHOICE, 1 for DIFFERS and BROKEN, and 2 without a verdict.

The weights are drawn anew in float32: biases are 0, and all heads have the same lambda, so what is
wrong with one head's lambda alone does not show, nor does the eps of the norm. Frozen weights
(requires_grad=False) count as tables, so unfreeze them first.
"""
import contextlib
import inspect
import io
import sys
import traceback

from port.problems import USE_VECTORS, NoVerdict, say, their_frames


def main(argv):
    """Print the verdict on the layer of a file, and return the exit code."""
    if not argv or "-h" in argv or "--help" in argv:
        print(__doc__.strip())
        return 0 if argv else 2
    flags = [word for word in argv if word.startswith("-")]
    if flags:
        return no_verdict(f"{flags[0]}: port takes no flags. Write depth=3, as in Python")
    try:
        import torch
    except ImportError as problem:
        return no_verdict(f"PyTorch can't be imported here ({problem}). {USE_VECTORS}")
    torch.set_num_threads(1)  # for tensors as small as these, more are slower
    path, *lines = argv
    return judge(path, lines)


def judge(path, lines):
    """Print the verdict on the layer of a file and of further lines, and return the exit code."""
    from port import load, stand_ins  # here, since these import torch
    from port.mistakes import BROKEN, DIFFERS
    from port.verdict import diagnose

    with load.surroundings(path):
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # its prints are no part of the verdict
                known = inspect.signature(diagnose).parameters
                world = load.run(path, lines, known)
                verdict = diagnose(**{name: world[name] for name in known if name in world})
        except NoVerdict as problem:
            return no_verdict(stand_ins.explain(str(problem)))
        except SystemExit:
            return no_verdict(f"{path} ends the program (sys.exit) before it is judged. Put that "
                              "under if __name__ == '__main__':")
        except Exception as problem:
            if their_frames(problem):  # a mistake of ours would keep its traceback
                return no_verdict(stand_ins.explain(say(problem)))
            traceback.print_exc()
            return 2
    print(verdict)
    return 1 if verdict.kind in (BROKEN, DIFFERS) else 0


def no_verdict(why):
    print(f"no verdict: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
