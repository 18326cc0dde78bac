"""The site builds without a warning, shows what is in the source, and loads nothing else."""

import html
import inspect
import re
import subprocess
import sys

import pytest
from pages import KINDS, ROOT

import rabo
from rabo.algorithms import ALGORITHMS
from rabo.algorithms.inner import InnerSteps, UpdateInner
from rabo.algorithms.rabo import RABO, EstimateOuter

LOADED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]+?src=["']([^"']+)|<link[^>]+?href=["']([^"']+)|"""
    r"""@import\s+["']([^"']+)|url\(["']?([^"')]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page):
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_the_site_loads_nothing_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len([path for path in files if path.suffix == ".html"]) >= 15
    for path in files:
        for found in LOADED.findall(path.read_text()):
            target = "".join(found)
            assert not target.startswith(("http:", "https:", "//")), f"{path.name} loads {target}"


def test_every_public_name_is_in_the_reference(site):
    page = (site / "api.html").read_text()
    for name in rabo.__all__:
        assert re.search(rf'id="rabo\.(?:\w+\.)*{name}"', page), name


def test_algorithm_1_stands_beside_the_code_that_runs(site):
    shown = "".join(text_of(site / "how-it-works.html").split())
    for work in (RABO.round, UpdateInner, InnerSteps.take, EstimateOuter, RABO.move_outer):
        code = "".join(inspect.getsource(work).split())
        assert code in re.sub(r"\s", "", shown)
    lines = re.findall(
        r"^ ?(\d+)  +\S", (ROOT / "docs" / "how-it-works.md").read_text(), flags=re.M
    )
    assert [int(line) for line in lines] == list(range(1, 35))


def test_every_algorithm_is_listed_with_its_paper(site):
    page = " ".join(text_of(site / "algorithms.html").split())
    for name, kind in ALGORITHMS.items():
        assert name in page
        assert " ".join(kind.paper.split()) in page


def test_no_include_is_left_over(site):
    for path in site.rglob("*.html"):
        assert not re.search(rf">({'|'.join(KINDS)}): ", path.read_text()), path.name


def test_an_include_links_to_the_file_that_it_shows():
    link = re.compile(rf"^\[({'|'.join(KINDS)}): (.+?)\]\((.+)\)$", flags=re.M)
    found = [(p, *f) for p in (ROOT / "docs").glob("*.md") for f in link.findall(p.read_text())]
    assert {kind for _, kind, _, _ in found} == set(KINDS)
    for page, kind, what, target in found:
        file = (
            what.partition(":")[0].replace(".", "/") + ".py"
            if kind == "source"
            else what.split()[0]
        )
        where = (page.parent / target).resolve().relative_to(ROOT).as_posix()
        assert (ROOT / where).is_file()
        assert kind in ("algorithms", "papers") or where.endswith(file), what
