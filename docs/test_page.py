"""docs/index.html: it stands alone, and in a browser it shows the numbers of the models."""
import html
import json
import math
import re
import shutil
import subprocess

import pytest

from docs import page
from lab import lookup, pairs
from lab.stats import RESULTS, read_runs

PAGE = page.PAGE.read_text(encoding="utf-8")
DATA = json.loads(re.search(r'id="data">(.*?)</script>', PAGE, re.DOTALL)[1])
READERS = {}  # {cap: {arm: Reader}}: the models of a small page


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A page of models that were hardly trained."""
    out = tmp_path_factory.mktemp("page") / "index.html"

    def shown_models(tau, steps):
        return READERS.setdefault(str(tau), lookup.shown_models(tau, steps))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "shown_models", shown_models)
        patch.setattr(page, "LAMBDAS", [0.0, 0.3, 0.5, 1.0])
        out.write_text(page.fill(page.collect(steps=30, B=8)), encoding="utf-8")
    return out


def test_it_is_one_file_whose_links_stay_in_the_repository():
    assert len(PAGE.encode()) <= 300_000 and page.fill(DATA) == PAGE
    assert not re.search(r"<link|<img|<iframe|\ssrc=|@import|url\(|fetch\(|\bimport\b", PAGE)
    links = re.findall(r'<a href="([^"]*)"', PAGE)
    assert "../README.md" in links
    for link in links:
        assert (page.PAGE.parent / link).exists(), link


def test_what_it_says_is_true():
    """Of its own models, which are those of the pictures."""
    tables = DATA["models"]["2"]["answers"]
    rows = read_runs(RESULTS / "lookup-shown.json")
    for minus, row in zip(("own", "average", "second"), rows):
        step = DATA["models"]["2"]["lambdas"][minus].index(round(row["lambda"], 3))
        right = [share / 10 for share in tables[minus]["right"][step][:49]]
        assert right == pytest.approx(row["right"], abs=0.25)  # 2 answers: lambda is rounded
    for says in tables["own"]["says"]:
        assert re.fullmatch(r"\d+r.*\d+c", says[0])  # green at first, orange in the end
    assert tables["own"]["right"][10][16] < 100 and tables["average"]["right"][5][16] < 900
    for cap in ("2", "none"):
        logits = DATA["models"][cap]["maps"]["one"]
        for plain, crowd in zip(logits["plain"], logits["crowd"]):
            assert max(plain) == plain[lookup.RIGHT]
            is_outvoted = sum(map(math.exp, crowd)) > math.exp(plain[lookup.RIGHT])  # by all 56
            assert is_outvoted == (cap == "2")


# ---- in a browser

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(not BROWSER, reason="there is no chromium and no google-chrome")


def shown(path, tmp_path, address="", script="", size="1200,900"):
    """The page as HTML after its script and ours have run. size: of the window, in pixels."""
    text = path.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "shown.html").write_text(text, encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=8000", "--dump-dom",
        f"--window-size={size}", f"file://{tmp_path}/shown.html{address}",
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return html.unescape(run.stdout)


@needs_browser
@pytest.mark.parametrize("address, cap, minus, lam, m, text", [  # text counts from 0 here
    ("#m=1&text=3", "2.0", "nothing", 0.0, 1, 2),
    ("#m=56&minus=average", "2.0", "average", None, 56, 0),  # None: what was learned
    ("#m=56&lam=1&minus=second&text=2", "2.0", "second", 1.0, 56, 1),
    ("#m=9&lam=0.5&minus=own&text=6", "2.0", "own", 0.5, 9, 5),
    ("#m=30&lam=0.3&minus=second&cap=none&text=4", "None", "second", 0.3, 30, 3),
])
def test_the_browser_shows_the_models(address, cap, minus, lam, m, text, small, tmp_path):
    dom = shown(small, tmp_path, address)
    trained, arm = page.MINUS["own" if minus == "nothing" else minus]
    reader = READERS[cap][trained]
    reader = reader.read_as(arm, round(reader.own_lambda(), 3) if lam is None else lam)
    texts = page.first_texts(m, 8)
    weights = reader.weights(texts)[text, 0, 0].tolist()
    others = [weights[i] for i in range(m, 64) if i != lookup.RIGHT]
    votes = dict(right=weights[lookup.RIGHT], crowd=sum(weights[:m]), other=max(others))
    for name, vote in votes.items():  # to three digits
        said = re.search(rf'id="vote-{name}">([^<]*)<', dom)[1].replace("−", "-")
        assert float(said) == pytest.approx(vote, abs=6e-4)
    share = re.findall(r"([\d.]+) %", re.search(r'id="share">([^<]*)<', dom)[1])
    assert [float(x) for x in share] == pytest.approx(pairs.score(reader, texts, 1), abs=0.06)
    assert f"{m} of the 63 wrong squares {'is' if m == 1 else 'are'} orange" in dom


@needs_browser
def test_the_game_is_played_to_its_end(tmp_path):
    play = """
        const press = () => document.querySelector("#choices button").click();
        document.querySelector('[data-pair="56"]').click();  // the right square
        press();  // the guess is green, and the crowd grows
        setTimeout(press, 4000);  // minus the average
    """
    assert "Now it says green." in shown(page.PAGE, tmp_path, script=play)


@needs_browser
def test_on_a_phone_the_votes_stay_in_sight(tmp_path):
    scroll = """
        for (const control of ["board", "m", "lam"]) {
          document.getElementById(control).scrollIntoView({block: "center"});
          const votes = document.getElementById("bars").getBoundingClientRect();
          document.body.dataset[control] = votes.top >= 0 && votes.bottom <= window.innerHeight;
        }
    """
    dom = shown(page.PAGE, tmp_path, "#m=16", scroll, size="390,844")
    for control in ("board", "m", "lam"):
        assert f'data-{control}="true"' in dom

