"""Which weight is what, guessed from its name and its shape."""
import re

ROLES = re.compile("[qkv]+|o|lambda(_[qk][12])?|gate|(qk_)?norm|bias")
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
OF_OUTPUT = "o|out.*|.*proj.*|dense|fc.*|lin.*|final.*|merge.*|combine.*|concat.*|mix.*"
OF_NORM = ".*norms?|.*ln|gain|gamma|scale|g"
BIAS = {"b", "bias", "beta", "offset", "shift"}
OBVIOUS = {  # parts of names from which a reader would say the same, behind a w or to
    "q": "q_?[12]?(p|_?proj|_?linear)?|quer(y|ies)_?[12]?",
    "k": "k_?[12]?(p|_?proj|_?linear)?|keys?_?[12]?",
    "v": "v_?[12]?(p|_?proj|_?linear)?|values?_?[12]?",
    "o": "o|o_?proj|o_?linear|out|out_?proj|output|c_proj",
    "norm": ".*norm.*|.*ln.*",
    "bias": "b|b_.*|bias|beta",
    "lambda": "lam.*",
    "gate": ".*lam.*|.*gate.*",
}


def role_of(name, weight):
    """q, k, v, several such as qkv, o, lambda, lambda_q1, ..., gate, norm, qk_norm or bias.

    unknown, if neither the name nor the shape tells.
    """
    name = name.lower().replace("λ", "lam").replace("c_attn", "qkv").replace("in_proj", "qkv")
    words = [word.strip("w") for word in re.findall("[a-z]+", name)]  # wq and q are one
    is_vector = weight.numel() == max(weight.shape, default=1)
    lambda_vector = re.search("(?<![a-z])l(am.*)?([qk])_?([12])", name)  # lambda_q1, lq1, lam.k2
    if lambda_vector:
        return f"lambda_{lambda_vector[2]}{lambda_vector[3]}"
    if BIAS & set(words):
        return "bias"
    if re.search("(?<![a-z])lam|lambda", name) or weight.numel() == 1:
        is_linear = weight.ndim == 2 and name.endswith("weight")
        return "gate" if is_linear or not is_vector else "lambda"
    if is_vector or any(re.fullmatch(OF_NORM, word) for word in words):
        of_qk = re.search("(?<![a-z])([qk]+_?(norm|ln|scale)|temp)", name)
        return "qk_norm" if of_qk else "norm"
    found = [re.fullmatch("([qkv]+)p?|que.*|keys?|val.*", word) for word in words]
    letters = "".join(match[1] or match[0][0] for match in found if match)
    if letters:
        return letters
    if "gate" in words:
        return "gate"
    return "o" if any(re.fullmatch(OF_OUTPUT, word) for word in words) else "unknown"


def stacked_vectors(weights, roles, C):
    """{name: number of vectors} of weights that hold lambda's four vectors together. Else {}.

    They are (4, d), twice (2, d), or four times (d), or have a number for each head in between.
    Such a weight is called lambda something, or has a name that tells nothing.
    """
    found = {}
    widths = set()
    for name, weight in weights.items():
        width = weight.shape[-1] if weight.ndim else 1
        if roles[name] in ("lambda", "gate", "unknown") and 1 < width < C:
            found[name] = len(weight) if weight.ndim > 1 else 1
            widths.add(width)
    is_one_set = sum(found.values()) == 4 and len(widths) == 1
    return found if is_one_set else {}


def in_short(names):
    """One name for all of a list of heads: heads.*.q for heads.0.q, heads.1.q, ..."""
    return list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))


def is_obvious(name, role):
    """Whether the name alone shows the role, so the guess need not be reported."""
    parts = name.lower().removesuffix(".weight").split(".")
    parts += [re.sub("^(w|to)_?", "", part) for part in parts]
    pattern = OBVIOUS.get(role, re.escape(role))
    return any(re.fullmatch(pattern, part) for part in parts)
