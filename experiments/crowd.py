"""
When does the difference of two attention maps help? A task of seconds that answers it, with a law.

    python -m experiments.crowd law       # the law on an untrained layer: seconds
    python -m experiments.crowd train     # every arm on the task: about an hour on two cores
    python -m experiments.crowd phase     # capped softmax, accuracy by sharpness and length: about an hour
    python -m experiments.crowd figure    # tables and figures of all runs that are there

`train` and `phase` append one JSON line for each finished run to <out>/runs.jsonl. A run that is
in the file is not trained again, so they can be stopped anywhere and go on with the same command.

The task. A text is N pairs and then 8 queries. A pair is one token: the embedding of its key plus
that of its value. A query is a key's embedding plus one that says "query", and its value must come.
m of the pairs, the crowd, share one value. The queries ask for pairs outside the crowd, whose values
all differ. There are 4 N keys and 2 N values. The model is one block of model.py without positions:
64 channels, 4 heads, or 2 heads of two branches in the differential arms. Each training step takes
32 new texts of the same m, drawn evenly from 0 to 3 N / 4.

The law. Let a map put the weight c on every wrong pair and c + D on the right one. Then the crowd
gets m c and the answer c + D: one positive map counts votes and fails at m0 = 1 + D / c. Each branch
of a differential head is divided by its own sum, so A_1 - lambda A_2 has (1 - lambda) c in the place
of c: it fails at m0 / (1 - lambda). A softmax map whose largest logit is tau fails at e^tau.

What we predicted, written and committed before the first run, and what came:

1.  The law, N = 64, untrained: the crowd at which half of the answers are wrong is 2.2 without a
    difference and within a third of 2.2 / (1 - lambda) for lambda = 0.25, 0.5, 0.75, 0.9; for
    lambda = 1 it is never reached. Softmax capped at tau = 1, 2, 3: within a third of e^tau = 2.7,
    7.4, 20; minus the uniform map: never.
2.  Trained, N = 32, accuracy at m = 0, 8, 24: softmax and diff 0.99 or more at every m.
3.  linear 0.88 to 0.96. With two heads (the heads and the state of diff_linear) 0.75 to 0.88 at
    m = 0 and lower at m = 24. With one head, which can't subtract one head from another behind
    the values, below 0.6 at m = 24.
4.  diff_linear 0.99 or more with the norm and 0.97 or more without it. lambda rises from 0.2 to
    above 0.8 in every seed.
5.  A plus in the place of the minus, with a lambda of free sign: lambda ends below -0.7, and
    the accuracy is that of diff_linear, within 0.03. A plus that must stay one,
    (A_1 + |lambda| A_2) / (1 + |lambda|): no better than linear with two heads, within 0.03.
6.  lambda held at 0, 0.25, 0.5, 0.75, 0.9: accuracy rises at every step (with the norm, m = 0) from
    that of linear with two heads, within 0.05, to 0.97 or more. 1.0 is not below 0.75.
7.  The norm changes linear's accuracy by less than 0.05: it doesn't subtract.
8.  Signed features without a difference (no phi, no row sums, a norm): 0.95 or more with four heads,
    0.98 or more with two. So what counts is the sign, not that there are two maps.
9.  The delta rule, keys of length one: 0.9 or more with four heads, 0.97 or more with two.
10. Decay doesn't help against a crowd: linear with decay is more than 0.1 below linear, diff_linear
    with decay is below diff_linear.
11. N = 64: linear below 0.8 at m = 0 and below 0.5 at the largest crowd, diff_linear above 0.9.
12. Capped softmax with a norm: one map is right in half of its answers (mean over the crowds) at
    e^tau = 1 + N / 16, that is at tau = 1.1, 1.6, 2.2, 2.8, 3.5 for N = 32, 64, 128, 256, 512. (The
    line is drawn through two points of a prototype, N = 32 and 128; the others are unseen.) The
    difference is at 0.95 or more for tau >= 1 up to N = 128. Its border depends on N and hardly on
    tau: where it is right at tau = 2, it is right at tau = 0.5 too.
"""
