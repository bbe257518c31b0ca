"""
What is wrong with my port of differential attention? See port/README.md.

To read the code, follow a layer through it:

    load.py     runs the file that makes it. stand_ins.py: for what can't be imported here
    theirs.py   calls it. roles.py: which weight is what. given.py: what it is given besides x
    outside.py  what is seen without our layer: later tokens, the order, the texts of a batch
    paper.py    the paper's layer, in steps. wrong.py: mistakes as steps. mistakes.py: their list
    search.py   which mistakes make the paper's layer into it. compare.py: how far they are apart
    verdict.py  all together. misread.py: what the user may have said wrongly of it

further.py and lambdas.py look at what one text does not show. vectors.py, survey.py and pages.py
write what stands beside the code.
"""

__all__ = ["Verdict", "diagnose"]


def __getattr__(name):
    """`from port import diagnose` imports torch only here, so that --help works without torch."""
    if name in __all__:
        from port import verdict
        return getattr(verdict, name)
    raise AttributeError(f"module 'port' has no attribute {name!r}")
