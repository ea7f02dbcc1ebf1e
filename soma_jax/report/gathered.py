"""One page of all experiments that were run, as Markdown and as one HTML file."""

from __future__ import annotations

import base64
import importlib
import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt

from soma_jax import experiments
from soma_jax.errors import SomaError
from soma_jax.files import read_json, write_bytes, write_text


class Layout(NamedTuple):
    """Where the files of an experiment lie in a directory; {0} is its name."""

    result: str
    figure: str


WORKDIR = Layout("{0}/result.json", "{0}/{0}.png")  # as launch/experiment.py leaves them
COMMITTED = Layout("{0}.json", "{0}.png")


def read(directory: Path, layout: Layout = WORKDIR) -> dict[str, dict[str, Any]]:
    """The results in a directory, by the experiment's name.

    Raises:
      SomaError: a result is damaged or has lost its figure.
    """
    results = {}
    for name in experiments.NAMES:
        path, figure = (directory / place.format(name) for place in layout)
        if not path.exists():
            continue
        results[name] = read_json(path)
        try:
            _section(name, results[name], "")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise SomaError(
                f"{path} is damaged or of another version ({error!r}): run {_command(name)} again"
            ) from error
        if not figure.exists():
            raise SomaError(f"{figure} is missing: run {_command(name)} again")
    return results


def write(workdir: Path, into: Path | None = None) -> list[Path]:
    """Writes WORKDIR/report.md and WORKDIR/report.html; returns the pages.

    Args:
      workdir: where the experiments' own workdirs lie.
      into: a directory for a page that is kept: results and figures are copied there, over those
        that it has, and the page of all that it then holds is written beside it, as INTO.md.

    Raises:
      SomaError: nothing was run, a file is damaged, or the disk is full.
    """
    results = read(workdir)
    if not results:
        raise SomaError(
            f"{workdir} holds no result of an experiment; run one first, such as "
            f"{_command(experiments.NAMES[0])}"
        )
    text = page(results)
    places = [WORKDIR.figure.format(name) for name in results]
    figures = {place: (workdir / place).read_bytes() for place in places}
    pages = {workdir / "report.md": text, workdir / "report.html": to_html(text, figures)}
    if into is not None:
        into = into.resolve()
        for name in results:
            for source, copy in zip(WORKDIR, COMMITTED, strict=True):
                write_bytes(into / copy.format(name), (workdir / source.format(name)).read_bytes())
        kept = page(read(into, COMMITTED), f"{into.name}/{COMMITTED.figure}")
        pages[into.with_name(f"{into.name}.md")] = kept
    for path, text in pages.items():
        write_text(path, text)
    return list(pages)


def page(results: Mapping[str, Mapping[str, Any]], figure: str = WORKDIR.figure) -> str:
    """The page as Markdown: every experiment in the order of `experiments.NAMES`.

    Args:
      results: by name, what result.json holds; those that are not here were not run.
      figure: where a figure lies, seen from the page; {0} is the experiment's name.
    """
    contents = [
        f"- [{name}](#{name}): {_about(name)}"
        if name in results
        else f"- {name}: {_about(name)} **Not run**, or not to its end: `{_command(name)}`"
        for name in experiments.NAMES
    ]
    sections = [
        _section(name, results[name], figure) for name in experiments.NAMES if name in results
    ]
    head = "# Results\n\n" + "\n".join(contents)
    return "\n\n".join([head, *sections]) + "\n"


def _section(name: str, result: Mapping[str, Any], figure: str) -> str:
    versions = ", ".join(f"{package} {result[package]}" for package in ("soma_jax", "jax"))
    seeds = ", ".join(map(str, result["random_seeds"]))
    spent = [  # where it is not one number, the experiment's own page says it
        f"{result[field]:.3g} {words}"
        for field, words in (("byte_forwards", "byte-forwards"), ("operations", "operations"))
        if isinstance(result.get(field), int | float)
    ]
    facts = [
        result["date"],
        f"random seeds {seeds}",
        f"{result['devices']} x {result['device']}",
        versions,
        *([f"compute: {', '.join(spent)}"] if spent else []),
    ]
    return "\n\n".join(
        [
            f"## {name}",
            _about(name),
            _module(name).markdown(result).strip(),
            f"![{name}]({figure.format(name)})",
            "; ".join(facts),
        ]
    )


def _module(name: str) -> Any:
    return importlib.import_module(f"soma_jax.experiments.{name}")


def _about(name: str) -> str:
    """The first paragraph of the experiment's own docstring, on one line."""
    return " ".join((inspect.getdoc(_module(name)) or "").partition("\n\n")[0].split())


def _command(name: str) -> str:
    return f"python launch/experiment.py --experiment={name}"


# Read on paper and on a phone: what is too wide for a phone scrolls by itself, and on paper wraps.
_STYLE = """
:root { color-scheme: light; }
body { background: #fff; color: #222; font: 16px/1.5 system-ui, sans-serif;
       max-width: 64rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h2 { border-top: 1px solid #ccc; margin-top: 3rem; padding-top: 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 0.875rem;
        font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.6rem; text-align: left; }
th { vertical-align: bottom; }
td:first-child { min-width: 8rem; }
td + td { white-space: nowrap; }
code { background: #f3f3f3; padding: 0.1em 0.3em; }
pre { overflow-x: auto; }
img { max-width: 100%; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  img, tr { break-inside: avoid; }
  table { display: table; font-size: 6.5pt; }
  th, td { padding: 0.1rem 0.25rem; }
  td:first-child { min-width: 0; }
  td + td { white-space: normal; }
}
"""
# Whatever a text says, the page loads nothing and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_html(markdown: str, figures: Mapping[str, bytes]) -> str:
    """A page as one HTML file. HTML in its texts is shown, not obeyed.

    Args:
      markdown: the page.
      figures: PNG files to embed, by the path that the page has for them.
    """
    parser = MarkdownIt("js-default")  # with tables, without HTML
    tokens = parser.parse(markdown)
    for token, inside in itertools.pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", inside.content)
    for child in itertools.chain.from_iterable(token.children or () for token in tokens):
        if child.type == "image" and (content := figures.get(str(child.attrs["src"]))):
            child.attrSet("src", f"data:image/png;base64,{base64.b64encode(content).decode()}")
    body = parser.renderer.render(tokens, parser.options, {})
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>soma_jax: results</title>
<style>{_STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
