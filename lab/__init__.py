"""
The experiments. See lab/README.md.

To read the code, begin with one experiment, whole: pairs.py has a task and a model, and lookup.py
trains it and makes its pages. Then

    arms.py        further arms: controls, decay, a gate
    toys.py        small models of a text, and their runs. many.py trains them at once
    train_toys.py  which of them are trained
    start.py       a page of their runs, as text.py and minus.py are. compare.py: which runs are
                   compared. stats.py: intervals, tables, figures
    matches.py     where in a text an arm is ahead. stream.py: what attention adds to the stream

The tools: losses.py, maps.py and checkpoints.py read your own runs, page.py writes the page to play
with, and hf.py with to_hf.py and from_hf.py is a bridge to transformers.
"""
