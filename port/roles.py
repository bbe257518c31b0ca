"""Which weight is what, guessed from its name and its shape."""
import re

ROLES = re.compile("[qkv]+|o|lambda(_[qk][12])?|gate|(qk_)?norm|bias")
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
    """q, k, v, several such as qkv, o, lambda, lambda_q1, ..., gate, norm, qk_norm or bias."""
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
    if "norm" in words or is_vector:
        of_qk = re.search("(?<![a-z])([qk]+_?(norm|ln|scale)|temp)", name)
        return "qk_norm" if of_qk else "norm"
    found = [re.fullmatch("([qkv]+)p?|que.*|keys?|val.*", word) for word in words]
    letters = "".join(match[1] or match[0][0] for match in found if match)
    if letters:
        return letters
    return "gate" if "gate" in words else "o"


def in_short(names):
    """One name for all of a list of heads: heads.*.q for heads.0.q, heads.1.q, ..."""
    return list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))


def is_obvious(name, role):
    """Whether a reader of the name would say the same."""
    parts = name.lower().removesuffix(".weight").split(".")
    parts += [re.sub("^(w|to)_?", "", part) for part in parts]
    pattern = OBVIOUS.get(role, re.escape(role))
    return any(re.fullmatch(pattern, part) for part in parts)
