"""The page in a real browser."""

import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from chromium import Chromium
from reported_runs import add_rounds, end_run, write_record, write_run

from clipline.plotting import PALETTE, PALETTE_DARK
from clipline.study import Figure, Point
from clipline.study.report import write_report
from clipline.study.report.content import content
from clipline.study.report.page import live_server, page
from clipline.study.report.reading import collect

CHARTS = ("chart-metric", "chart-clip", "chart-within", "chart-epsilon")
ATTACK = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
# How many pixels of a chart have about this colour.
PAINTED = """((id, rgb) => {
  const canvas = document.querySelector(`#${id} canvas`);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let n = 0;
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 128 && [0, 1, 2].every((k) => Math.abs(data[i + k] - rgb[k]) < 24)) n++;
  return n;
})"""
BLUE, ORANGE, SKY = (str(list(bytes.fromhex(one[1:]))) for one in (*PALETTE[:2], PALETTE_DARK[0]))
# Every word that is written on a chart from now on.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two runs, one of which has a hostile name and is not private."""
    folder = tmp_path_factory.mktemp("runs")
    end_run(write_run(folder / "a good run"))
    hostile = write_run(folder / ATTACK.replace("/", "∕"), rounds=0, seed=3, clip="0.4", task='"<b>rides</b>"')
    add_rounds(hostile, 0, 20, best=0.7, clip=0.4, fraction_within=None)
    return write_report([folder])


def test_charts_draw_a_legend_toggle_hides_a_curve_and_nothing_is_asked_for(browser, report):
    browser.open(report.as_uri())
    for chart in CHARTS:
        assert browser.run(f"{PAINTED}({chart!r}, {ORANGE})") > 20, chart
    assert browser.run(f"{PAINTED}('chart-epsilon', {BLUE})") == 0  # that run is not private
    assert browser.run(f"{PAINTED}('chart-metric', {BLUE})") > 50
    button = "[...document.querySelectorAll('.legend button')].find((b) => b.textContent.includes('good'))"
    assert browser.run(f"{button}.getAttribute('aria-pressed')") == "true"
    browser.run(f"{button}.focus()")
    browser.press(" ")
    assert browser.run(f"{button}.getAttribute('aria-pressed')") == "false"
    browser.wait(f"{PAINTED}('chart-metric', {ORANGE}) === 0")
    assert browser.run(f"{PAINTED}('chart-metric', {BLUE})") > 50
    browser.press(" ")
    browser.wait(f"{PAINTED}('chart-metric', {ORANGE}) > 50")
    assert browser.errors == []
    assert browser.requests == [report.as_uri()]


def test_a_red_banner_names_what_is_not_private_and_text_stays_text(browser, report):
    browser.open(report.as_uri())
    banner = browser.run("document.getElementById('not-private').innerText")
    assert "Not private: 1 of 2 runs" in banner
    assert "can subtract the noise" in banner
    assert ATTACK.replace("/", "∕") in banner
    red, green, blue = browser.run(
        "getComputedStyle(document.getElementById('not-private')).borderTopColor.match(/\\d+/g).map(Number)"
    )
    assert red > 2 * max(green, blue)
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelectorAll('main img, main script, main b').length") == 0


def test_an_epsilon_that_does_not_hold_is_struck_through_with_the_reason(browser, report, tmp_path):
    struck = "[...document.querySelectorAll('s')].map((node) => node.innerText)"
    browser.open(report.as_uri())
    row = browser.run("document.querySelector('#runs-table .bad').innerText")
    assert row.endswith(" not private")
    assert "can subtract the noise" in browser.run("document.querySelector('#runs-table .bad').title")
    assert row.split()[0] in browser.run(struck)
    known = end_run(write_run(tmp_path / "known", seed=3)) or write_report(tmp_path / "known")
    browser.open(known.as_uri())
    tile = browser.run(
        "[...document.querySelectorAll('.tile')].find((tile) => tile.innerText.startsWith('epsilon')).innerHTML"
    )
    assert "<s>" in tile
    assert "not private: the seed of its noise is known" in tile
    assert any(text.startswith("(epsilon ") for text in browser.run(struck))  # the statement
    browser.run("document.getElementById('statement-0').open = true")
    browser.wait(f"{struck}.length === 3")  # tile, statement, what it rests on
    assert browser.run("[...document.querySelectorAll('blockquote')].every((quote) => quote.querySelector('s'))")


def test_the_tiles_of_an_interrupted_run_say_so_and_when_it_was_last_evaluated(browser, tmp_path):
    tiles = "[...document.querySelectorAll('.tile')].slice(0, 3).map((tile) => tile.innerText).join(' ')"
    run = write_run(tmp_path / "run", rounds=13, planned=20)  # accuracy every fifth round
    end_run(run)
    (run / "checkpoint.safetensors").touch()
    browser.open(write_report(run).as_uri())
    shown = browser.run(tiles)
    assert "Unfinished: last evaluated after 10 of 20 rounds." in shown
    assert "unfinished: interrupted, can be resumed" in shown
    ended = write_run(tmp_path / "ended")
    end_run(ended)
    browser.open(write_report(ended).as_uri())
    assert "evaluated" not in browser.run(tiles)
    assert "nfinished" not in browser.run(tiles)


def test_values_are_read_with_the_keyboard_and_stand_in_a_table(browser, report):
    browser.open(report.as_uri())
    browser.run("document.querySelector('#chart-clip .plot').focus()")
    for _ in range(3):
        browser.press("ArrowRight")
    assert "round 3: " in browser.run("document.querySelector('#chart-clip .readout').textContent")
    assert "0.121" in browser.run("document.querySelector('#chart-clip .readout').textContent")  # 0.1 * 1.1^2
    browser.run("document.querySelector('#chart-clip summary').focus()")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('#chart-clip tbody tr').length === 20")
    assert browser.run("document.querySelector('#chart-clip tbody tr:nth-child(3)').innerText").split()[:2] == [
        "3", "0.4",
    ]  # fmt: skip
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_a_study_has_a_row_and_a_curve_for_each_configuration_the_best_first(browser, tmp_path):
    for number, (quantile, seed, end) in enumerate([(0.1, 0, 0.5), (0.1, 1, 0.7), (0.5, 0, 0.8), (0.5, 1, 0.9)]):
        write_record(tmp_path, number, quantile=quantile, seed=seed, rounds=2, accuracy=[0.95 if seed else 0.1, end])
    browser.open(write_report(tmp_path).as_uri())
    rows = browser.run(
        "[...document.querySelectorAll('#runs-table tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    head = browser.run("[...document.querySelectorAll('#runs-table th')].map((cell) => cell.innerText)")
    shown = [
        [row[head.index(name)].strip() for name in ("run", "seeds", "best accuracy", "last accuracy")] for row in rows
    ]
    # Means over two seeds by hand: (0.8 + 0.95) / 2 and (0.8 + 0.9) / 2; (0.5 + 0.95) / 2 and (0.5 + 0.7) / 2.
    assert shown == [["clip quantile 0.5", "2", "0.875", "0.85"], ["clip quantile 0.1", "2", "0.725", "0.6"]]
    assert browser.run("getComputedStyle(document.querySelector('#runs-table tbody td')).fontWeight") == "700"
    browser.run("document.getElementById('each-seed').click()")
    assert browser.run("document.querySelectorAll('#runs-table tbody tr').length") == 4
    browser.run(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return 'data:,'; }"
    )
    browser.run("document.querySelector('#chart-metric .saves button').click()")
    browser.wait("window.saved")
    first, second, third = (line.split(",") for line in browser.run("window.saved").splitlines())
    assert first[1:4] == [f"clip quantile 0.1 {which}" for which in ("mean", "highest", "lowest")]
    assert (second[0], third[0]) == ("1", "2")
    assert [float(one) for one in third[1:]] == pytest.approx([0.6, 0.7, 0.5, 0.85, 0.9, 0.8])
    browser.run("window.saved = ''; document.querySelectorAll('#chart-metric .saves button')[1].click()")
    browser.wait("window.saved")
    drawn = ElementTree.fromstring(browser.run("window.saved"))
    assert [len([node for node in drawn if node.tag.endswith(tag)]) for tag in ("polyline", "polygon")] == [2, 2]
    assert browser.errors == []


def test_one_crosshair_goes_through_all_charts_with_the_values_at_the_pointer(browser, report):
    browser.open(report.as_uri())
    x, y = browser.run("(({ left, top, width }) => [left + width * 0.6, top + 40])"
                       "(document.querySelector('#chart-clip .u-over').getBoundingClientRect())")  # fmt: skip
    for step in (0, 1):
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
    browser.wait("document.querySelector('#chart-within .readout').innerText.startsWith('round 12: ')")  # 0.6 * 20
    tips = browser.run(
        "[...document.querySelectorAll('.tip')].filter((tip) => !tip.hidden).map((tip) => tip.innerText)"
    )
    assert [tip.splitlines()[0] for tip in tips] == ["round 12"]
    assert "a good run 0.2853" in tips[0]  # 0.1 * 1.1^11


def test_a_phone_a_dark_room_and_paper(browser, report, tmp_path):
    browser.open(report.as_uri(), width=375, height=800)
    tile = "<div class=tiles><div class=tile><span>error_of_saying_the_middle</span></div><div class=tile></div></div>"
    browser.run(f"document.querySelector('main').insertAdjacentHTML('afterbegin', '{tile}')")
    assert browser.run(
        "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.tile'))"
    )
    assert browser.run("document.documentElement.scrollWidth") <= 375
    browser.open(report.as_uri(), dark=True)
    light = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
    assert browser.run(light) < 150
    assert browser.run(f"{PAINTED}('chart-metric', {SKY})") > 50  # a lighter blue
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    browser.wait(f"{PAINTED}('chart-metric', {SKY}) > 50")  # and back on the screen
    assert browser.errors == []


def figure(name, values):
    """A chart with a line of two points for each of these values."""
    lines = tuple((label, tuple(Point(x, value) for x, value in enumerate(ys))) for label, ys in values.items())
    looks = tuple((place, len(values)) for place in range(len(values)))
    return Figure(name, "emnist_cr", name, "accuracy", "noise", ("0", "0.1"), lines, looks)


def report_of(folder, *figures):
    """The report of a study whose experiments have these charts."""
    (folder / "page.html").write_text(page(content(replace(collect([folder]), figures=figures))))
    return folder / "page.html"


def test_two_hundred_runs_open_in_two_seconds_and_are_a_few_megabytes(browser, tmp_path):
    for number in range(200):
        quantile, z = (0.1, 0.3, 0.5, 0.7, 0.9)[number % 5], (0, 0.01, 0.03, 0.1)[number // 5 % 4]
        write_record(tmp_path, number, quantile=quantile, z=z, rounds=600, server_lr=1 + number // 20)
    figures = [figure(name, {"quantile 0.1": [0.9, 0.8], "quantile 0.5": [0.9, 0.8]}) for name in ("fig5", "fig6", "x")]
    made = report_of(tmp_path, *figures)
    assert made.stat().st_size < 4e6
    browser.open(made.as_uri())
    seconds = browser.run("performance.getEntriesByType('measure').find((m) => m.name === 'drawn').duration / 1000")
    assert seconds < 2
    assert browser.run("document.querySelectorAll('.chart canvas').length") == 6  # no epsilon: made up
    assert browser.run("document.getElementById('chart-metric').innerText").startswith("accuracy")
    assert "240 evenly spaced rounds" in browser.run("document.querySelector('main').innerText")
    assert browser.errors == []


def test_the_live_page_follows_a_run(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("clipline.study.report.page.POLL_SECONDS", 0.1)
    run = write_run(tmp_path / "r", rounds=0)
    server = live_server(run)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        browser.open(url)
        live = "document.getElementById('live').textContent"
        assert browser.run(live) == "Waiting for the first round."
        add_rounds(run, 0, 5)
        browser.run("document.getElementById('shared-settings').open = false")
        browser.wait(f"{live} === 'Following: 5 of 20 rounds.'")
        assert browser.run(f"{PAINTED}('chart-clip', {BLUE})") > 20
        assert browser.run("document.getElementById('shared-settings').open") is False  # as the reader left it
        add_rounds(run, 5, 20)
        end_run(run)
        browser.wait(f"{live} === 'The run has ended after 20 of 20 rounds.'")
        assert browser.errors == []
        assert set(browser.requests) == {url, f"{url}data.json"}
    finally:
        server.shutdown()
        server.server_close()
