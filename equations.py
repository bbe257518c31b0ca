"""
The papers' equations in numpy, with none of model.py's code: an oracle to compare with.

test_model.py holds every arm to it, and port/vectors.npz is written from it.
"""
import math

import numpy as np


def layer(attn, weight, x, n_head, depth=0, theta=10000.0):
    """All that a layer makes of x (B, T, C): {stage: array}. theta: 0 for no rotation.

    weight: {name as in model.py, which are Microsoft's: array}. diff may have grouped keys: then
    k_proj and v_proj have fewer rows.

        q, k      rotated. In linear arms phi of them, rotated: (B, H, T, d)
        v         (B, h, T, d_v)
        A1, A2    the maps of a difference, (B, h, T, T)
        lambda    a number, or (B, h, T, 1) in diff_v2
        A         the map
        heads     A V, (B, h, T, d_v)
        normed    behind the norm and its factor, if there is one
        y         (B, T, C)
    """
    B, T, C = x.shape
    d = C // n_head
    is_linear = "linear" in attn
    is_difference = "diff" in attn
    maps = 2 if is_difference else 1  # of a head
    heads = n_head // 2 if attn in ("diff", "diff_linear") else n_head

    q = split(x @ weight["q_proj.weight"].T, d)  # (B, H, T, d)
    k = split(x @ weight["k_proj.weight"].T, d)
    v = split(x @ weight["v_proj.weight"].T, C // heads)
    if attn == "diff_v2":  # the queries 2n and 2n + 1 have the key n
        k = k.repeat(2, axis=1)
    if v.shape[1] < heads:  # grouped: the keys of one head stay together
        times = heads // v.shape[1]
        k = k.reshape(B, -1, maps, T, d).repeat(times, axis=1).reshape(B, -1, T, d)
        v = v.repeat(times, axis=1)
    if is_linear:
        q, k = elu_plus_1(q), elu_plus_1(k)
        z = np.tril(q @ k.swapaxes(2, 3)).sum(-1, keepdims=True)  # without the rotation
    if theta:
        q, k = turn(q, theta), turn(k, theta)
    products = q @ k.swapaxes(2, 3)  # (B, H, T, T)
    if is_linear:
        A = np.tril(products) / z
    else:
        weights = np.tril(np.exp(products / math.sqrt(d)))
        A = weights / weights.sum(-1, keepdims=True)
    found = dict(q=q, k=k, v=v)

    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth) if attn in ("diff", "diff_linear") else 0.0
    if attn == "diff_v2":
        lam = 1 / (1 + np.exp(-x @ weight["lambda_proj.weight"].T))  # (B, T, h)
        lam = lam.swapaxes(1, 2)[..., None]
    elif is_difference:  # Eq. 2
        lambda_1 = math.exp(weight["lambda_q1"] @ weight["lambda_k1"])
        lambda_2 = math.exp(weight["lambda_q2"] @ weight["lambda_k2"])
        lam = np.array(lambda_1 - lambda_2 + lambda_init)
    if is_difference:  # Eq. 1
        found |= {"A1": A[:, 0::2], "A2": A[:, 1::2], "lambda": lam}
        A = A[:, 0::2] - lam * A[:, 1::2]
    if "average" in attn:
        lam = weight["lambda_average"]
        found |= {"A1": A, "lambda": lam}
        A = A - lam * np.tri(T) / np.arange(1, T + 1)[:, None]

    y = A @ v  # (B, h, T, d_v)
    found |= dict(A=A, heads=y)
    if "subln.weight" in weight:  # Eq. 3
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * weight["subln.weight"]
        y = y * (1 - lambda_init)
        found["normed"] = y
    found["y"] = y.swapaxes(1, 2).reshape(B, T, C) @ weight["out_proj.weight"].T
    return found


def split(y, d):
    """(B, T, heads * d) to (B, heads, T, d)."""
    B, T, _ = y.shape
    return y.reshape(B, T, -1, d).swapaxes(1, 2)


def elu_plus_1(a):
    """phi of Transformers are RNNs, Eq. 7."""
    return np.where(a > 0, a + 1, np.exp(np.minimum(a, 0)))


def turn(a, theta):
    """RoFormer, Eq. 12: two neighbouring channels are a complex number, which is turned."""
    T, d = a.shape[-2:]
    angle = np.outer(np.arange(T), theta ** (-2 * np.arange(d // 2) / d))  # (T, d/2)
    turned = (a[..., 0::2] + 1j * a[..., 1::2]) * np.exp(1j * angle)
    return np.stack((turned.real, turned.imag), axis=-1).reshape(a.shape)
