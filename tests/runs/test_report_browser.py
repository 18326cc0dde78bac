"""The page about runs, in a browser: all charts draw, it fits a phone, and nothing leaves it."""

import json
import shutil
from pathlib import Path

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from browser import MISSING, open_browser, resize
from rabo.runs.experiment import Experiment, run
from rabo.runs.report import write_report

WHY = f"needs {' and '.join(MISSING)}: apt-get install chromium chromium-driver"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=WHY)]
EARLIER = Path(__file__).parent / "earlier"  # run folders of earlier versions
HOSTILE = "<img src=x onerror=window.hurt=1>"
DRAWN = """
const charts = [...document.querySelectorAll('.chart')];
return charts.length > 0 && charts.every((node) => node.querySelector('.main-svg'))
  && !document.querySelector('details[open] template');
"""
OPEN_ALL = "for (const run of document.querySelectorAll('details')) run.open = true"
# of each chart: its description, the smallest number of marks of a trace
MARKS = """
const marks = {
  scatter: '.scatterlayer .point, .scatterlayer .js-line',
  bar: '.barlayer .point path',
  heatmap: '.heatmaplayer image',
};
return [...document.querySelectorAll('.chart')].map((node) => {
  const figure = node.querySelector('.js-plotly-plot');
  const counts = figure.data.map((trace) => node.querySelectorAll(marks[trace.type]).length);
  return [node.getAttribute('aria-label'), Math.min(...counts)];
});
"""
# what sticks out: of the window, and of its chart, where it would be cut off
TOO_WIDE = """
const box = (node) => node.getBoundingClientRect();
const beyond = [...document.querySelectorAll('body *')]
  .filter((node) => box(node).right > innerWidth + 1 && !node.closest('.scroll'));
const cut = [...document.querySelectorAll('.chart')].flatMap((chart) => [
  ...(chart.scrollWidth > chart.clientWidth ? [chart] : []),
  ...[...chart.querySelectorAll('text, .legendtoggle, .plot, .cbfills')].filter(
    (node) => box(node).left < box(chart).left - 1 || box(node).right > box(chart).right + 1),
]);
return [...beyond, ...cut].map((node) => node.outerHTML.slice(0, 200));
"""
# charts that are not as high as what is drawn in them, and figures that lie over others
MISPLACED = """
const box = (node) => node.getBoundingClientRect();
const charts = [...document.querySelectorAll('.chart')].filter(
  (chart) => Math.abs(box(chart).height - box(chart.querySelector('svg')).height) > 1
    || box(chart).height < 180);
const figures = [...document.querySelectorAll('figure')];
const over = (a, b) => box(a).left < box(b).right - 1 && box(b).left < box(a).right - 1
  && box(a).top < box(b).bottom - 1 && box(b).top < box(a).bottom - 1;
const parts = figures.flatMap((figure, i) => figures.slice(i + 1).filter((b) => over(figure, b)));
const captions = figures.filter((figure) => figure.querySelector('svg')
  && box(figure.querySelector('svg')).bottom > box(figure.querySelector('figcaption')).top + 1);
return [...charts, ...parts, ...captions].map((node) => node.outerHTML.slice(0, 200));
"""
WIDTHS = "return [...document.querySelectorAll('.chart svg')].map((svg) => svg.clientWidth)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Runs of three tasks, one with a hostile name, absent clients and answers not used."""
    folder = tmp_path_factory.mktemp("runs")
    digits = Experiment(
        task="digits",
        task_options={"width": 16},
        clients=4,
        capacities="1,1/2,1/4,memory:1kB",
        rounds=3,
        algorithm_options={"num_inner_steps": 2},
    )
    run(digits, folder / HOSTILE)
    lines = [json.loads(s) for s in (folder / HOSTILE / "metrics.jsonl").read_text().splitlines()]
    fault = {"client": 1, "round": 0, "phase": "update_inner", "why": HOSTILE}
    lines[0]["faults"] = [fault]
    (folder / HOSTILE / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    loss = Experiment(
        task="loss-tuning",
        task_options={"width": 2},
        algorithm_options={"num_inner_steps": 1, "warm_up": 0},
        clients=2,
        rounds=2,
        evaluate_every=1,
    )
    run(loss, folder / "loss")
    few_shot = folder / "few-shot-of-which-the-name-is-longer-than-a-legend-is-wide"
    shutil.copytree(EARLIER / "few-shot" / "rabo-conv4-cpu-5w1s", few_shot)
    write_report([folder], folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as driver:
        yield driver


def show(browser, page, width=1200, dark=False):
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what was before
    resize(browser, width, 900, dark)
    browser.get(page.as_uri())
    browser.execute_script(OPEN_ALL)
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(DRAWN))


def test_every_chart_draws_and_nothing_is_complained_of(browser, page):
    show(browser, page)
    charts = browser.execute_script(MARKS)
    assert len(charts) >= 15
    for about, marks in charts:
        assert marks > 0, about
    assert browser.get_log("browser") == []
    [picture] = browser.execute_script(
        "return [...document.images].map((i) => [i.naturalWidth, i.alt])"
    )
    assert picture[0] > 100
    assert picture[1]


@pytest.mark.parametrize("before", [None, 1200], ids=["at once", "from a wide window"])
@pytest.mark.parametrize("width", [390, 420])
def test_the_page_fits_a_phone(browser, page, width, before):
    show(browser, page, width=before or width)
    if before:
        resize(browser, width, 900)
        WebDriverWait(browser, 30).until(lambda driver: not driver.execute_script(TOO_WIDE))
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(TOO_WIDE) == []


def test_charts_keep_their_height_when_the_window_changes(browser, page):
    show(browser, page)
    assert browser.execute_script(MISPLACED) == []
    assert browser.execute_script(TOO_WIDE) == []
    for width in (1000, 400, 1200):
        before = browser.execute_script(WIDTHS)
        resize(browser, width, 900)
        WebDriverWait(browser, 30).until(
            lambda driver, before=before: driver.execute_script(WIDTHS) != before
        )
        WebDriverWait(browser, 30).until(lambda driver: not driver.execute_script(TOO_WIDE))
        assert browser.execute_script(MISPLACED) == [], width


def test_nothing_leaves_the_page_and_nothing_of_a_file_runs(browser, page):
    show(browser, page)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert asked
    assert {address.partition(":")[0] for address in asked} <= {"file", "data", "blob"}
    assert browser.execute_script("return window.hurt") is None
    assert HOSTILE in browser.execute_script("return document.body.innerText")


def test_the_page_follows_the_preference_for_light_or_dark(browser, page):
    def colours():
        return browser.execute_script(
            "return [document.body, document.querySelector('.chart .xtick text')]"
            ".map((node, i) => getComputedStyle(node)[['backgroundColor', 'fill'][i]])"
        )

    show(browser, page)
    light = colours()
    resize(browser, 1200, 900, dark=True)
    WebDriverWait(browser, 30).until(lambda _: colours()[1] != light[1])
    dark = colours()
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] != light[0]
    assert browser.get_log("browser") == []


def test_many_runs_are_drawn_when_they_are_opened(browser, page, tmp_path):
    for i in range(4):
        shutil.copytree(page.parent / "loss", tmp_path / f"run-{i}")
    write_report([tmp_path], tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    inside = "return document.querySelectorAll('details.run .chart .main-svg').length"
    WebDriverWait(browser, 30).until(
        lambda driver: driver.execute_script("return document.querySelector('.main-svg')")
    )
    assert browser.execute_script(inside) == 0
    browser.execute_script("document.querySelector('details.run').open = true")
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(inside) > 3)
