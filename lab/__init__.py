"""
The experiments: findings.md says what came out, README.md how to do them again.

To read the code, begin with one experiment, whole: pairs.py has a task and a model, and lookup.py
trains it and draws it. Then

    arms.py      the controls: kinds of attention that are not in model.py
    toys.py      small models of a text, and which of them are trained. many.py trains them at once
    tables.py    the tables of both pages, from the runs of both
    stats.py     what all of them share: intervals, files of runs, figures

lists.py and pretrained.py look into a pretrained model, and tune it with a minus. losses.py and
maps.py read runs of train.py, and hf.py is a bridge to transformers. The lab imports
the programs above it, and they don't import the lab.
"""
