"""The README's Python example runs as it is printed."""

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
