"""The page in a real browser: opened, searched, looked into, watched, fed with hostile names."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import weighlock
from process.browser import browser, needs_chromium

pytestmark = needs_chromium

BF16 = weighlock.DType.BF16.numpy
RNG = np.random.default_rng(5)
MODEL = {
    "embed.weight": RNG.standard_normal((100, 64)).astype(np.float32),
    **{
        f"model.layers.{n}.{part}.weight": RNG.standard_normal((64, 32)).astype(BF16)
        for n in range(12)
        for part in ("attn", "mlp")
    },
}
BROKEN = {"broken": np.array([np.nan, np.inf, 0, 1, 2, 2], np.float32)}
TAB, ENTER = "\ue004", "\ue007"


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """One window for all: each test begins on an empty page, and complaints belong to it."""
    with browser(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture
def page(window):
    window.open("about:blank")
    window.resize(1280, 900)
    window.prefer("light")
    yield window
    # A load refused by the policy or an error in a script is written to the console.
    assert [line for line in window.complaints() if "401 (Unauthorized)" not in line] == []


@pytest.fixture
def server():
    with weighlock.Server(page=True) as server:
        yield server


def test_page_opens_shows_the_model_and_hides_its_token(page, server):
    server.share(MODEL, title="model.safetensors")
    page.open(server.page_url)
    page.wait_for("model.safetensors", "#shares")
    page.wait_for("embed.weight", "#tree")
    assert "live" in page.text("#status")
    assert "25 tensors" in page.text("#share-facts")
    assert "F32 1 tensor · 6,400 elements · 25.6 kB" in page.text("#totals")
    assert "BF16 24 tensors · 49,152 elements · 98.3 kB" in page.text("#totals")
    token = server.page_url.partition("#token=")[2]
    assert token not in page.run("return location.href + document.documentElement.outerHTML")
    page.run("location.reload()")  # the tab remembers it
    page.wait_for("embed.weight", "#tree")


def test_page_without_or_with_a_wrong_token_shows_nothing_and_takes_the_right_one(page, server):
    server.share(MODEL, title="model.safetensors")
    page.open(f"{server.url}/")
    page.wait_for("A token opens this page", "#gate")
    page.type("#token", "wrong" + ENTER)
    page.wait_for("not the token of this server", "#gate")
    assert page.text("#main") == ""
    page.type("#token", server.page_url + ENTER)
    page.wait_for("embed.weight", "#tree")
    assert page.text("#gate") == ""


def test_tree_opens_group_by_group_with_the_keyboard_alone(page, server):
    server.share({**MODEL, **{f"other.{n}": np.ones(1) for n in range(2)}})
    page.open(server.page_url)
    page.wait_for("model.layers", "#tree")
    assert page.run("return document.querySelectorAll('#tree li li').length") == 0
    page.run("document.querySelector('#search').focus()")
    for _ in range(2):  # over the embedding to the first group
        page.press(TAB)
    page.press(ENTER)
    opened = page.run(
        "return [...document.querySelectorAll('#tree li li > .row .name')].map(e => e.textContent)"
    )
    assert opened == [str(n) for n in range(12)]  # 2 before 10
    page.press(ENTER)
    assert page.run("return document.querySelectorAll('#tree li li').length") == 0


def test_search_finds_by_name_dtype_and_shape(page, server):
    server.share(MODEL)
    page.open(server.page_url)
    page.wait_for("embed.weight", "#tree")
    page.type("#search", "LAYERS.1 bf16 mlp")
    page.wait_for("3 tensors found", "#found")  # 1, 10 and 11
    assert "model.layers.11.mlp.weight" in page.text("#tree")
    assert "attn" not in page.text("#tree")
    page.type("#search", " nowhere")
    page.wait_for("No tensor is called like that", "#tree")


def test_long_lists_are_shown_piece_by_piece(page, server):
    server.share({f"t{n}": np.full(1, n, np.int16) for n in range(450)})
    page.open(server.page_url)
    page.wait_for("t199", "#tree")
    shown = "return document.querySelectorAll('#tree .row').length"
    assert page.run(shown) == 200
    page.click("#tree .more")
    assert page.run(shown) == 400
    page.click("#tree .more")
    assert page.run(shown) == 450
    assert "t449" in page.text("#tree")


def test_histogram_and_statistics_of_a_tensor(page, server):
    server.share({**MODEL, **BROKEN})
    page.open(server.page_url)
    page.wait_for("embed.weight", "#tree")
    page.type("#search", "embed")
    page.wait_for("1 tensor found", "#found")
    page.click("#tree .row")
    page.wait_for("zeros", "#tree .panel")
    facts = page.run(
        "return Object.fromEntries([...document.querySelectorAll('.panel dt')]"
        ".map(e => [e.textContent, e.nextSibling.textContent]))"
    )
    values = MODEL["embed.weight"].astype(np.float64)
    assert facts["elements"] == "6,400"
    assert float(facts["mean"]) == pytest.approx(values.mean(), rel=1e-4)
    assert float(facts["max"]) == pytest.approx(values.max(), rel=1e-4)
    assert facts["NaN"] == "0"
    heights = (
        "return [...document.querySelectorAll('.panel rect')].map(e => e.height.baseVal.value)"
    )
    linear = page.run(heights)
    assert 50 < len(linear) <= 100
    assert max(linear) == 100
    page.click(".panel .scale input")
    assert sum(page.run(heights)) > sum(linear)
    assert "Histogram of values" in page.run(
        "return document.querySelector('.panel svg').getAttribute('aria-label')"
    )


def test_what_is_no_number_stands_out(page, server):
    server.share(BROKEN)
    page.open(server.page_url)
    page.wait_for("broken", "#tree")
    page.click("#tree .row")
    page.wait_for("zeros", "#tree .panel")
    odd = "return [...document.querySelectorAll('.panel dd.odd')].map(e => e.textContent)"
    assert page.run(odd) == ["1", "1"]


def test_transfer_is_watched_until_it_lands(page, server, tmp_path):
    arrays = {"w": np.arange(1_000_000, dtype=np.float32)}
    share = server.share(arrays, receivers=("site-1", "site-2"), title="model")
    page.open(server.page_url)
    page.wait_for("waiting", "#receivers")
    script = (
        "import sys, weighlock\n"
        "weighlock.fetch(sys.argv[1], into=sys.argv[2], limit_rate=1_600_000, connections=1)"
    )
    receiver = subprocess.Popen(
        [sys.executable, "-c", script, share.url_for("site-1"), tmp_path / "a"]
    )
    first = "#receivers li[data-key='site-1']"
    page.wait_for("started", first)
    page.wait_for("/s", first)
    page.wait_for("landed", first)
    assert "4 MB" in page.text(first)
    assert page.run(f'return document.querySelector("{first} progress").position') == 1
    assert receiver.wait(20) == 0
    assert "waiting" in page.text("#receivers li[data-key='site-2']")
    share.revoke()
    page.wait_for("ended: revoked", "#share-facts")
    page.wait_for("lost", "#receivers li[data-key='site-2']")
    assert page.text("#copy") == ""


def test_url_of_a_share_is_shown_when_asked_for(page, server):
    share = server.share(MODEL)
    page.open(server.page_url)
    page.wait_for("embed.weight", "#tree")
    share_id = share.url.split("/")[4]
    assert share_id not in page.run("return document.documentElement.outerHTML")
    # As on a page of another machine without TLS, where there is no clipboard.
    page.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.click("#copy")
    page.wait_for("Who has this URL can read the weights", "#copied")
    assert page.run("return document.querySelector('#ticket').value") == share.url


HOSTILE = [
    '<img src=x onerror="window.hurt=1">',
    "<script>window.hurt=1</script>",
    "a.<svg onload=window.hurt=1>.b",
    "\x1b[31mred\x1b[0m\x07",
    "\u202egnihtemos",
    "javascript:window.hurt=1",
    "__proto__.polluted",
    "constructor.prototype.x",
    "toString",
    "...",
    "." * 3000,
    "x" * 4000,
    "%3Cb%3E&amp;\"'`${window.hurt=1}",
    "emoji 🚢 日本語",
]


def test_hostile_names_are_text_and_nothing_else(page, server):
    """E11."""
    arrays = {name: np.full(2, n, np.float32) for n, name in enumerate(HOSTILE)}
    server.share(arrays, title=HOSTILE[0])
    page.open(server.page_url)
    page.wait_for("toString", "#tree")
    assert page.text("#share-title") == HOSTILE[0]
    page.type("#search", "f32")
    page.wait_for(f"{len(HOSTILE)} tensors found", "#found")
    page.run("for (const row of document.querySelectorAll('#tree .row')) row.click()")
    page.wait_for("zeros", "#tree li:last-child .panel")
    text = page.text("#tree")
    assert text.count("zeros") == len(HOSTILE)  # each name found its way there and back
    assert HOSTILE[0] in text
    assert "\\u{1b}[31mred" in text
    assert "\\u{202e}gnihtemos" in text
    assert not {"\x1b", "\u202e", "\x07"} & set(text)
    assert (
        page.run("return document.querySelectorAll('#tree img, #tree script, h2 img').length") == 0
    )
    assert page.run("return [window.hurt, ({}).polluted, ({}).x]") == [None, None, None]
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [320, 375])
def test_phone_needs_no_scrolling_sideways(page, server, width):
    server.share({**MODEL, "a" * 300: np.ones(3)}, receivers=("site-" + "1" * 59,), title="m" * 200)
    page.resize(width, 700)
    page.open(server.page_url)
    page.wait_for("embed.weight", "#tree")
    page.type("#search", "embed")
    page.wait_for("1 tensor found", "#found")
    page.click("#tree .row")
    page.wait_for("zeros", "#tree .panel")
    assert page.run("return [document.documentElement.scrollWidth <= innerWidth, innerWidth]") == [
        True,
        width,
    ]


COLOURS = """
const parse = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = ([r, g, b]) => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [x, y, z] = [r, g, b].map((v) => linear(v / 255));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const paper = light(parse(getComputedStyle(document.body).backgroundColor));
const contrast = (selector) => {
  const ink = light(parse(getComputedStyle(document.querySelector(selector)).color));
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
};
const read = ["h1", "#share-facts", ".row .name", ".row .shape", ".state"];
return [paper, Math.min(...read.map(contrast))];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_followed_and_readable(page, server, scheme):
    server.share(MODEL, receivers=("site-1",))
    page.prefer(scheme)
    page.open(server.page_url)
    page.wait_for("embed.weight", "#tree")
    page.wait_for("waiting", "#receivers")
    paper, contrast = page.run(COLOURS)
    assert (paper > 0.5) == (scheme == "light")
    assert contrast >= 4.5  # what WCAG AA asks for


def test_server_that_goes_is_noticed(page):
    with weighlock.Server(page=True) as server:
        server.share(MODEL)
        page.open(server.page_url)
        page.wait_for("live", "#status")
        closing = threading.Thread(target=server.close)
        closing.start()
        page.wait_for("no answer", "#status")
        closing.join()
    assert "embed.weight" in page.text("#tree")  # what was known stays
    assert all("ERR_CONNECTION_REFUSED" in line for line in page.complaints())


def test_nothing_shared_is_said(page, server):
    page.open(server.page_url)
    page.wait_for("Nothing is on offer", "nav")
    server.share(MODEL, title="late")
    page.wait_for("late", "#shares")
    page.wait_for("embed.weight", "#tree")
