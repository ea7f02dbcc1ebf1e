"""The README's Python example runs as it is printed, and its figures are those of a summary."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_an_example():
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_runs_and_learns(example):
    names = {}
    exec(example, names)
    start = {"w": names["jnp"].ones((8, 4))}
    batch = names["jax"].random.normal(names["jax"].random.key(1), (64, 8))
    assert names["loss"](names["params"], batch).mean() < names["loss"](start, batch).mean()


def test_the_table_is_that_of_the_default_run():
    """Every row's figures are those of docs/default_run/summary.json."""
    summary = json.loads((README.parent / "docs" / "default_run" / "summary.json").read_text())
    rows = re.findall(r"│ (\S[^│]*?) +│ +([\d.]+) │[^│]*│ +([\d.]+) │", README.read_text("utf-8"))
    names = {"routed ensemble (2 of 4)": "ensemble", "seed alone": "seed", "gzip -9": "gzip_9"}
    known = {name: name for name in ("unigram", "bigram", "trigram")} | names
    assert known.keys() < {name for name, *_ in rows}
    for name, *figures in rows:
        if name in known:
            texts = (summary["test"], summary["wikitext103_test"])
            assert figures == [f"{text[known[name]]:.3f}" for text in texts]
    assert summary["seconds"] < 10 * 60  # "under ten minutes"
    assert f"{summary['peak_rss_bytes'] / 2**30:.1f} GiB" in README.read_text("utf-8")


def test_the_figure_of_perturbed_activities_is_that_of_its_run():
    summary = json.loads((README.parent / "docs" / "activity_run" / "summary.json").read_text())
    assert f"{summary['test']['ensemble']:.3f} nats/byte of the test text" in README.read_text(
        "utf-8"
    )
    assert summary["seconds"] < 10 * 60
