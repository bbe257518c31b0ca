"""Which weight is what? By its name, and where that says little by its shape."""
import re

VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
OUTPUT = "o|out.*|.*proj.*|dense|fc.*|lin.*|final.*|merge.*|combine.*|concat.*|mix.*"
NORM = ".*norms?|.*ln|gain|gamma|scale|g"


class NoVerdict(ValueError):
    """A sentence that helps, where a layer can't be judged."""


def role_of(name, weight):
    """q, k, v, several such as qkv, o, lambda, lambda_q1, gate, norm, qk_norm, bias or unknown."""
    name = name.lower().replace("λ", "lam").replace("c_attn", "qkv").replace("in_proj", "qkv")
    words = [word.strip("w") for word in re.findall("[a-z]+", name)]  # wq and q are one
    is_vector = weight.numel() == max(weight.shape, default=1)
    vector = re.search("(?<![a-z])l(am.*)?_?([qk])_?([12])", name)  # lambda_q1, lq1, lam.k2
    if vector:
        return f"lambda_{vector[2]}{vector[3]}"
    if is_bias(name, words):
        return "bias"
    if re.search("(?<![a-z])lam|lambda", name) or weight.numel() == 1:
        is_linear = weight.ndim == 2 and name.endswith("weight")
        return "gate" if is_linear or not is_vector else "lambda"
    if re.search("(?<![a-z])([qk]+_?(norm|ln|scale)|temp)", name):
        return "qk_norm"
    if any(re.fullmatch(NORM, word) for word in words) or (is_vector and name.endswith("weight")):
        return "norm"
    if is_vector:  # one of lambda's, perhaps
        return "unknown"
    found = [re.fullmatch("([qkv]+)p?|que.*|keys?|val.*", word) for word in words]
    letters = "".join(match[1] or match[0][0] for match in found if match)
    if letters or "gate" in words:
        return letters or "gate"
    return "o" if any(re.fullmatch(OUTPUT, word) for word in words) else "unknown"


def is_bias(name, words):
    """Where the name says bias, beta, b_q, ... But q_b.weight is a matrix, and lambda_b or b1 may
    be a vector of lambda's."""
    if "bias" in words[-1:]:
        return True
    says_so = {"beta", "offset", "shift"} & set(words) or ("b" in words and set(words) != {"b"})
    return bool(says_so) and "lam" not in name and not name.endswith("weight")


def roles_of(weights, names):
    """{name: role} of {name: weight}. names: {role: name or list of names} that the user said."""
    roles = {name: role_of(name, weight) for name, weight in weights.items()}
    told = set()
    for role, some in (names or {}).items():
        for name in [some] if isinstance(some, str) else some:
            if name not in weights:
                raise NoVerdict(f"there is no weight {name!r}. There are {', '.join(weights)}")
            roles[name] = role
            told.add(name)
    if not set(VECTORS) & set(roles.values()):
        # lambda's vectors may lie in one weight (4, d), in two (2, d), or in a list
        some = [name for name, role in roles.items() if role in ("lambda", "gate", "unknown")
                and name not in told and not name.endswith("weight") and weights[name].numel() > 1]
        if sum(weights[name].numel() // weights[name].shape[-1] for name in some) == 4:
            roles |= dict.fromkeys(some, "lambdas")
    unknown = [name for name, role in roles.items() if role == "unknown"]
    if len(unknown) == 1 and "o" not in roles.values() and weights[unknown[0]].ndim > 1:
        return roles | {unknown[0]: "o"}
    if unknown:
        raise NoVerdict(f"what is {', '.join(unknown)}? Say names = {{role: name}}, a role being "
                        "q, k, v, several such as qkv, o, norm, lambda_q1, lambda, gate or bias")
    return roles


def in_short(names):
    """heads.*.q for heads.0.q, heads.1.q, ..."""
    return ", ".join(sorted({re.sub(r"\b\d+\b", "*", name) for name in names}))
