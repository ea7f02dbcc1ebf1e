"""The page of all experiments: what was run, what was not, and nothing a text could slip in."""

import base64
import html.parser
import json
import sys
import types
from pathlib import Path

import pytest

from soma_jax.errors import SomaError
from soma_jax.experiments import NAMES
from soma_jax.report import gathered

ROOT = Path(__file__).parents[2]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(autouse=True)
def three_experiments(monkeypatch):
    """first, second and third, whose pages show one number."""
    for name in ("third", "first", "second"):
        module = types.ModuleType(f"soma_jax.experiments.{name}", f"What {name}\nshows.\n\nMore.")
        module.markdown = lambda result: (
            f"`{result['command']}`\n\n| | loss |\n| --- | ---: |\n| a | {result['loss']:.2f} |\n"
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gathered.experiments, "NAMES", ("third", "first", "second"))


def make_result(**values):
    return {
        "command": "python launch/experiment.py --experiment=first",
        "date": "2026-11-30",
        "random_seeds": [3, 4],
        "device": "cpu",
        "devices": 2,
        "jax": "0.10.2",
        "soma_jax": "0.1.0",
        "operations": 1e12,
        "loss": 2.5,
    } | values


def make_workdir(path, *names, **values):
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "result.json").write_text(json.dumps(make_result(**values)))
        (path / name / f"{name}.png").write_bytes(PNG + name.encode())
    return path


class Reader(html.parser.HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def values(self, tag, attribute):
        return [a[attribute] for t, a in self.tags if t == tag and attribute in a]


def test_what_was_run_is_shown_in_order_and_what_was_not_is_named(tmp_path):
    workdir = make_workdir(tmp_path, "first", "third")
    assert gathered.write(workdir) == [workdir / "report.md", workdir / "report.html"]
    page = (workdir / "report.md").read_text()
    assert page.index("## third") < page.index("## first")
    assert "## second" not in page
    assert "- second: What second shows. **Not run**" in page
    assert "`python launch/experiment.py --experiment=second`" in page
    assert page.count("2026-11-30; random seeds 3, 4; 2 x cpu; soma_jax 0.1.0, jax 0.10.2") == 2
    assert page.count("compute: 1e+12 operations") == 2
    for name in ("first", "third"):
        assert f"![{name}]({name}/{name}.png)" in page


def test_compute_that_is_not_one_number_is_left_to_the_experiments_page(tmp_path):
    workdir = make_workdir(tmp_path, "first", operations={"seed": 1, "experts": 2})
    gathered.write(workdir)
    assert "compute" not in (workdir / "report.md").read_text()


def test_the_html_says_the_same_and_holds_its_figures(tmp_path):
    workdir = make_workdir(tmp_path, "first", "third")
    gathered.write(workdir)
    page = (workdir / "report.html").read_text()
    read = Reader(page)
    assert [
        base64.b64decode(source.removeprefix("data:image/png;base64,"))
        for source in read.values("img", "src")
    ] == [PNG + b"third", PNG + b"first"]
    assert set(read.values("a", "href")) <= {f"#{i}" for i in read.values("h2", "id")}
    assert read.values("a", "href") == ["#third", "#first"]
    assert len([tag for tag, _ in read.tags if tag == "table"]) == 2
    assert "2.50" in read.text
    assert not [tag for tag, _ in read.tags if tag in ("script", "link", "iframe")]
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "`<script>alert(1)</script>",
        "x\n\n<img src=x onerror=alert(1)>\n\ny",
        "x\n\n<div onclick=alert(1)>\n\ny",
        "`[y](javascript:alert(1))`",
        "`x` [y](javascript:alert(1)) `z",
        "` ![y](/etc/passwd) `",
    ],
)
def test_a_text_cannot_put_html_into_the_page(tmp_path, text):
    workdir = make_workdir(tmp_path, "first", command=text, device=text, date=text)
    gathered.write(workdir)
    read = Reader((workdir / "report.html").read_text())
    assert not [tag for tag, _ in read.tags if tag in ("script", "div")]
    assert not [a for _, attributes in read.tags for a in attributes if a.startswith("on")]
    assert not [link for link in read.values("a", "href") if not link.startswith("#")]
    assert "alert" in read.text or "passwd" in text
    assert "root:" not in read.text
    (policy,) = [a["content"] for t, a in read.tags if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


def test_nothing_run_says_what_to_run(tmp_path):
    with pytest.raises(SomaError, match=r"launch/experiment\.py --experiment=third"):
        gathered.write(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("content", ["{", "[]", "null", "{}", '{"date": "2026"}'])
def test_a_damaged_result_is_named(tmp_path, content):
    workdir = make_workdir(tmp_path, "third", "first")
    path = workdir / "first" / "result.json"
    path.write_text(content)
    with pytest.raises(SomaError, match=str(path)):
        gathered.write(workdir)
    assert not (workdir / "report.md").exists()


def test_a_lost_figure_is_named(tmp_path):
    workdir = make_workdir(tmp_path, "first")
    (workdir / "first" / "first.png").unlink()
    with pytest.raises(SomaError, match=r"first\.png is missing"):
        gathered.write(workdir)


def test_a_page_that_is_kept_shows_all_that_lies_beside_it(tmp_path):
    into = tmp_path / "docs" / "results"
    gathered.write(make_workdir(tmp_path / "a", "first", "second"), into)
    gathered.write(make_workdir(tmp_path / "b", "second", loss=1.25), into)
    page = (tmp_path / "docs" / "results.md").read_text()
    results = gathered.read(into, gathered.COMMITTED)
    assert list(results) == ["first", "second"]
    assert results["second"]["loss"] == 1.25
    assert page == gathered.page(results, "results/{0}.png")
    for name in results:
        assert f"![{name}](results/{name}.png)" in page
        assert (into.parent / "results" / f"{name}.png").read_bytes() == PNG + name.encode()
    assert "third: What third shows. **Not run**" in page


def test_every_experiment_says_what_it_shows(monkeypatch):
    monkeypatch.setattr(gathered.experiments, "NAMES", NAMES)
    page = gathered.page({})
    for name in NAMES:
        assert f"- {name}: " in page
        assert len(gathered._about(name)) > 20
        assert callable(gathered._module(name).markdown)


def test_the_committed_page_is_what_the_committed_results_give(monkeypatch):
    monkeypatch.setattr(gathered.experiments, "NAMES", NAMES)
    results = gathered.read(ROOT / "docs" / "results", gathered.COMMITTED)
    page = (ROOT / "docs" / "results.md").read_text()
    assert page == gathered.page(results, "results/{0}.png")
