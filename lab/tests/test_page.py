"""docs/index.html: it is what lab/page.py writes, and in a browser it shows the models' numbers."""
import html
import json
import os
import re
import shutil
import subprocess

import pytest
import torch

import model
from lab import lookup, page
from lab.lookup import Reader, weights_of_pairs, with_lambda

torch.set_num_threads(1)
PAGE = page.PAGE.read_text(encoding="utf-8")
B = 8  # texts for the shares of the small page

# a state of the page: what the address says, and the same for Python
STATES = [
    ("#m=0", dict(m=0, minus="nothing", lam=0.0, cap="2", text=0)),
    ("#m=16", dict(m=16, minus="nothing", lam=0.0, cap="2", text=0)),
    ("#m=16&lam=0.9", dict(m=16, minus="average", lam=0.9, cap="2", text=0)),
    ("#m=56&lam=1&minus=second&text=2", dict(m=56, minus="second", lam=1.0, cap="2", text=1)),
    ("#m=9&lam=0.5&minus=own&text=6", dict(m=9, minus="own", lam=0.5, cap="2", text=5)),
    ("#m=40&cap=none", dict(m=40, minus="nothing", lam=0.0, cap="none", text=0)),
    ("#m=30&lam=0.35&minus=second&cap=none&text=4",
     dict(m=30, minus="second", lam=0.35, cap="none", text=3)),
]


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def letters(runs):
    """ "2r1c" is "rrc"."""
    return "".join(letter * int(count) for count, letter in re.findall(r"(\d+)([rco])", runs))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A page of models that were hardly trained, and these models: (path, readers)."""
    out = tmp_path_factory.mktemp("page") / "index.html"
    return out, page.make_page(out, steps=100, B=B)


class MinusOwn(model.Softmax):
    """One map minus lambda times the token itself: the reference for the own value."""

    lam = None

    def subtract(self, y, lam):
        return y - self.lam * torch.eye(y.shape[-1])[-y.shape[-2] :]


def reader_of(readers, state, monkeypatch):
    """The model of a state, as model.py and lab/lookup.py compute it."""
    reader = readers[state["cap"]]["diff" if state["minus"] == "second" else "softmax"]
    if state["minus"] == "nothing":
        return reader
    if state["minus"] != "own":
        return with_lambda(reader, state["lam"])
    monkeypatch.setitem(lookup.ARMS, "minus own", MinusOwn)
    monkeypatch.setattr(MinusOwn, "lam", state["lam"])
    found = Reader("minus own", reader.task, seed=None)
    found.load_state_dict(reader.state_dict())
    return found


def votes(reader, m, text):
    """(right, crowd, the strongest other) of the first query, by the map of the model."""
    weights = weights_of_pairs(reader, page.texts_with(m, page.EXAMPLES))[text, 0, 0].tolist()
    others = [weights[i] for i in range(m, page.N) if i != page.RIGHT]
    return weights[page.RIGHT], sum(weights[:m]), max(others)


# ---- the file


def test_it_is_one_small_file_that_loads_nothing():
    assert len(PAGE.encode()) <= 300_000
    assert "://" not in PAGE
    loads = re.findall(r"<link|<img|<iframe|\ssrc=|@import|url\(|\bfetch\(|\bimport\b", PAGE)
    assert not loads


def test_its_links_lead_somewhere():
    links = re.findall(r'href="([^"#]+)', PAGE)
    assert len(links) >= 4
    for link in links:
        assert (page.PAGE.parent / link).exists(), link


def test_it_is_what_its_template_and_its_data_give():
    template = page.TEMPLATE.read_text(encoding="utf-8")
    assert page.fill(template, page.first_frame(data_of(PAGE))) == PAGE


def test_its_sentences_are_true():
    """What the page says of its own models, in every example."""
    data = data_of(PAGE)
    capped, uncapped = data["models"]["2"], data["models"]["none"]
    assert data["steps"] == page.STEPS and data["look_ups"] == page.TEXTS * lookup.QUERIES
    # 16 agree: one map is wrong, and after a minus it is right
    assert capped["answers"]["average"]["right"][0][16] <= 10
    for minus in ("average", "second"):
        assert capped["answers"][minus]["right"][-1][16] >= 990
    for text in range(page.EXAMPLES):
        row, curve = page.votes_of(capped["maps"]["one"], text)
        assert max(row) == row[page.RIGHT]
        right, crowd, _ = curve[16]
        assert crowd > right
        assert 4 < page.border_of(curve) < 9
        # the whole model begins with the right colour, and ends with the crowd's
        assert re.fullmatch(r"\d+r.*\d+c", capped["answers"]["average"]["says"][text][0])
        # "no crowd on this page outvotes such a layer"
        assert page.border_of(page.votes_of(uncapped["maps"]["one"], text)[1]) is None


def test_no_logit_is_beyond_the_cap():
    for maps in data_of(PAGE)["models"]["2"]["maps"].values():
        for plain in maps["plain"]:
            # of all tokens that the question sees, whose own logit is 0 here
            assert max(*plain, 0) - min(*plain, 0) <= 4.001


def test_its_numbers_are_those_of_the_models(small):
    """The logits and the tables, without a browser."""
    path, readers = small
    data = data_of(path.read_text(encoding="utf-8"))
    for cap, arms in readers.items():
        maps = data["models"][cap]["maps"]
        first = weights_of_pairs(with_lambda(arms["diff"], 0.0), page.texts_with(20, 3))
        both = weights_of_pairs(with_lambda(arms["diff"], 1.0), page.texts_with(20, 3))
        expected = {"one": weights_of_pairs(arms["softmax"], page.texts_with(20, 3))}
        expected |= {"first": first, "second": first - both}
        for name, weights in expected.items():
            logits = maps[name]["crowd"][2][:20] + maps[name]["plain"][2][20:]
            powers = torch.tensor(logits).exp()
            torch.testing.assert_close(powers / (powers.sum() + 1), weights[2, 0, 0],
                                       rtol=1e-3, atol=1e-6)


# ---- in a browser


def browser():
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        found = name and shutil.which(name)
        if found:
            return found
    return None


needs_browser = pytest.mark.skipif(
    browser() is None, reason="there is no chromium, chromium-browser or google-chrome, or CHROMIUM"
)


def shown(path, state, tmp_path):
    """The page after its script has run, as HTML."""
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--dump-dom",
        f"file://{path}{state}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def text_of(dom, name):
    """The text of the element with this id. It has no element inside it."""
    return html.unescape(re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)[1])


def number_of(dom, name):
    return float(text_of(dom, name).replace("−", "-"))


@needs_browser
@pytest.mark.parametrize("address, state", STATES)
def test_the_browser_shows_the_numbers_of_the_models(address, state, small, tmp_path, monkeypatch):
    path, readers = small
    dom = shown(path, address, tmp_path)
    reader = reader_of(readers, state, monkeypatch)
    m, text = state["m"], state["text"]
    # to three digits: half a unit of the last one, and what the logits on the page are rounded by
    expected = votes(reader, m, text)
    for name, vote in zip(("right", "crowd", "other"), expected):
        assert number_of(dom, f"vote-{name}") == pytest.approx(vote, abs=6e-4)

    border = page.border_of([votes(reader, size, text) for size in page.CROWDS])
    said = text_of(dom, "border-said")
    if border is None:
        assert said == "No crowd of up to 56 passes green."
    else:
        assert float(re.search(r"crowd of (.*)\.$", said)[1]) == pytest.approx(border, abs=0.07)

    texts = page.texts_with(m, B)
    _, right = lookup.test_on(reader, texts)
    share = re.search(r"settings ([\d.]+) %.*answers to (\d+)", text_of(dom, "share"))
    assert float(share[1]) == pytest.approx(100 * right, abs=0.06) and int(share[2]) == 8 * B
    texts = page.texts_with(m, page.EXAMPLES)
    said = reader(texts)[text, 0].argmax().item()
    colour = "another colour"
    if said == texts.value[text, page.RIGHT]:
        colour = "green"
    elif said == texts.value[text, 0] and m > 1:
        colour = "orange"
    voted = ("green", "orange", "another colour")[expected.index(max(expected))]
    rest = f"but the whole model says {colour}"
    if voted == colour:
        rest = "and so does the whole model"
    assert text_of(dom, "verdict") == f"The votes say {voted}, {rest}."


@needs_browser
def test_the_script_begins_with_the_static_frame(tmp_path):
    dom = shown(page.PAGE, "#m=0", tmp_path)
    for name in ("vote-right", "vote-crowd", "vote-other", "verdict", "share", "border-said",
                 "m-said", "lam-said", "minus-said", "asked"):
        assert text_of(dom, name) == text_of(PAGE, name), name
    for name in ("line-right", "line-crowd"):
        path = rf'id="{name}" d="([^"]*)"'
        assert re.search(path, dom)[1] == re.search(path, PAGE)[1]
    for pattern in (r'class="bar \w+" style="([^"]*)"', r'class="key">(\w+)'):
        before, after = re.findall(pattern, PAGE), re.findall(pattern, dom)
        assert len(before) >= 3 and [b.rstrip(";") for b in after] == before


@needs_browser
def test_the_game_can_be_played(tmp_path):
    """A reader finds the key and guesses, and the crowd grows to 16. Then a minus is one click."""
    play = """<script>
        document.querySelector('[data-pair="3"]').click();  // not the one
        const wrong = document.getElementById("inspected").textContent;
        document.querySelector('[data-pair="56"]').click();
        document.querySelector("#choices button").click();  // green
        setTimeout(() => {
          document.title = wrong + document.getElementById("question").textContent;
          document.querySelector("#choices button").click();
        }, 3000);
    </script></body>"""
    path = tmp_path / "game.html"
    path.write_text(PAGE.replace("</body>", play), encoding="utf-8")
    dom = shown(path, "", tmp_path)
    title = html.unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1])
    wrong = r"This is key \w\d, colour \d+. Look for \w\d."
    assert re.match(wrong + "It says orange. Your guess was green", title)
    assert text_of(dom, "m-said") == "16 of the 63 wrong squares are orange"
    assert text_of(dom, "lam-said") == "1.00"
    assert text_of(dom, "verdict") == "The votes say green, and so does the whole model."
