"""The survey of public ports: what port/ports.json says, counted and as tables."""
import json
from pathlib import Path

from port.mistakes import BROKEN, CHOICE, DIFFERS, SAME

FILE = Path(__file__).parent / "ports.json"
SURVEY = json.loads(FILE.read_text(encoding="utf-8"))
COUNTED = ("first", "second")  # the samples that README counts: all that could be had, and run


def layers_of(*samples):
    return [layer for layer in SURVEY["layers"] if layer["sample"] in samples]


def counts(layers):
    """{what: how many of the layers}."""
    causal = [layer for layer in layers if layer["causal"]]
    leaks = [layer for layer in causal if layer["sees_future"]]
    found = {kind: sum(layer["verdict"] == kind for layer in layers)
             for kind in (SAME, CHOICE, DIFFERS, BROKEN)}
    return found | {
        "layers": len(layers),
        "causal": len(causal),
        "leak in spite of a mask": sum(layer["mask"] for layer in leaks),
        "leak without any mask": sum(not layer["mask"] for layer in leaks),
        "NaN": sum("NaN" in layer["causes"] for layer in causal),
        "explained": sum(layer["explained"] for layer in layers),
    }


def in_one_sentence():
    """What README says of the samples that are counted."""
    n = counts(layers_of(*COUNTED))
    leaks = n["leak in spite of a mask"] + n["leak without any mask"]
    return (f"Of {n['layers']} public ports (reimplementations), a convenience sample, "
            f"{n[SAME]} are the paper's layer, {n[CHOICE]} more are the same but for a choice "
            f"such as a constant λ_init, and {leaks} see the future though they should not.")


def table_of_samples():
    rows = ["| sample | layers | SAME | CHOICE | DIFFERS | BROKEN | meant causal "
            "| leak in spite of a mask | leak, no mask |", "|" + "---|" * 9]
    for sample in SURVEY["samples"]:
        n = counts(layers_of(sample["sample"]))
        if n["layers"]:
            cells = [sample["what"], n["layers"], n[SAME], n[CHOICE], n[DIFFERS], n[BROKEN],
                     n["causal"], n["leak in spite of a mask"], n["leak without any mask"]]
        else:
            cells = [sample["what"], sample["layers"], *["?"] * 7]
        rows.append(row(cells))
    return "\n".join(rows)


def how_often_right():
    """What port/README.md says of all samples that were held out."""
    held_out = [sample for sample in SURVEY["samples"] if sample["frozen"]]
    n = {key: sum(sample[key] for sample in held_out)
         for key in ("layers", "right", "wrong", "error")}
    return (f"On {n['layers']} unseen layers, each time by the port of that day, "
            f"{n['right']} verdicts were right, {n['wrong']} wrong, and {n['error']} ended in an "
            "error")


def table_of_held_out():
    rows = ["| held out, frozen at | verdict right | wrong | error | all causes right "
            "| the paper's, called wrong |", "|" + "---|" * 6]
    for sample in SURVEY["samples"]:
        if sample["frozen"]:
            papers = "?" if sample["papers"] is None else sample["papers"]
            rows.append(row([f"{sample['layers']}, `{sample['frozen']}`", sample["right"],
                             sample["wrong"], sample["error"], sample["all_causes"],
                             f"{sample['papers_called_wrong']} of {papers}"]))
    return "\n".join(rows)


def table_of_layers(*samples):
    rows = ["| repository, file | commit, date | causal | mask | verdict | what explains it |",
            "|" + "---|" * 6]
    for layer in layers_of(*samples):
        name = ", ".join(part for part in (layer["repository"], layer["file"]) if part)
        when = ", ".join(part for part in (layer["commit"], layer["date"]) if part)
        causes = ", ".join(layer["causes"])
        if not layer["explained"] and layer["verdict"]:
            causes = f"{causes} (not explained)".strip()
        if layer["sees_future"]:
            causes = f"**leaks**: {causes}"
        text = "; ".join(part for part in (causes, layer["note"]) if part)
        rows.append(row([name, when or "?", yes(layer["causal"]), yes(layer["mask"]),
                         layer["verdict"] or "none", text]))
    return "\n".join(rows)


def list_of_others():
    return "\n".join(f"- {other['name']} ({other['commit']}): {other['text']}."
                     for other in SURVEY["others"])


def row(cells):
    return "| " + " | ".join(map(str, cells)) + " |"


def yes(value):
    return {True: "yes", False: "no", None: "?"}[value]


PARTS = {  # of ports.md, by the name in the comment before each
    "sentence": lambda: f"**{in_one_sentence()}**",
    "samples": table_of_samples,
    "held_out": table_of_held_out,
    "microsoft": lambda: table_of_layers("microsoft"),
    "first": lambda: table_of_layers("first"),
    "second": lambda: table_of_layers("second"),
    "port": lambda: table_of_layers("port"),
    "survey": lambda: table_of_layers("survey"),
    "others": list_of_others,
}


def fill(page):
    """The page with its parts written anew, each between its comment and the next `end`."""
    for name, part in PARTS.items():
        start = f"<!-- {name} -->\n"
        before, rest = page.split(start)
        _, after = rest.split("<!-- end -->", maxsplit=1)
        page = f"{before}{start}{part()}\n<!-- end -->{after}"
    return page
