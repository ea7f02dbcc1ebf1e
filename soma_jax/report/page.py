"""The words and tables of a report, made from the numbers of report/summary.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rich.table import Table

Summary = dict[str, Any]

TEXTS = {"test": "test text", "wikitext103_test": "WikiText-103 test text"}  # what may be scored
_NGRAMS = ("unigram", "bigram", "trigram")
_IN_PROSE = {
    "seed": "the seed alone",
    "unigram": "a unigram model",
    "bigram": "a bigram model",
    "trigram": "a trigram model",
    "gzip_9": "gzip -9",
}
_VERDICTS = ("better than", "as good as", "not measurably different from", "worse than")
_MANY = 16  # the table of more experts is folded


class System(NamedTuple):
    """One of the things compared on a text."""

    key: str
    name: str
    nats: float  # nats/byte
    interval: Sequence[float] | None = None  # 95%, low and high

    @property
    def bits(self) -> float:
        """bits/byte."""
        return self.nats / math.log(2)


def systems(summary: Summary, text: str) -> list[System]:
    """What is compared on a text (a key of TEXTS), best first."""
    result = summary[text]
    interval = result["interval"]
    found = [
        System("ensemble", _ensemble(summary), result["ensemble"], interval["ensemble"]),
        System("seed", "seed alone", result["seed"], interval["seed"]),
        *(System(name, name, result[name]) for name in _NGRAMS),
        System("gzip_9", "gzip -9", result["gzip_9"]),
        System("uniform", "knowing nothing", math.log(256)),
    ]
    return sorted(found, key=lambda system: system.nats)


def terminal_table(summary: Summary) -> Table:
    """The comparison on every scored text, best first on the test text."""
    found = warnings(summary)
    table = Table(
        title="Loss on the same bytes (lower is better)",
        caption=f"{_count(len(found), 'warning')}: see the report" if found else None,
    )
    table.add_column(no_wrap=True)
    by_text = []
    for text in _texts(summary):
        table.add_column(f"{TEXTS[text]}\nnats/byte", justify="right")
        table.add_column("bits/byte", justify="right", vertical="bottom")
        by_text.append({s.key: s for s in systems(summary, text)})
    for key, system in by_text[0].items():
        cells = [f"{value:.3f}" for on in by_text for value in (on[key].nats, on[key].bits)]
        table.add_row(system.name, *cells, style="bold" if key == "ensemble" else None)
    return table


def markdown(summary: Summary, figures: Sequence[str]) -> str:
    """The page.

    Args:
      summary: of the run.
      figures: the names of those that lie beside the page.
    """
    sections = [
        "# Report of a run",
        _trained(summary),
        *(outcome(summary, text) for text in _texts(summary)),
        _warnings_section(summary),
        _loss_section(summary),
        _training_section(figures),
        _experts_section(summary, figures),
        _by_k_section(summary, figures),
        _compute_section(summary),
        _settings_section(summary),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def outcome(summary: Summary, text: str) -> str:
    """A paragraph on how the ensemble compares on a text: better than ..., worse than ..."""
    result = summary[text]
    compared: dict[str, list[str]] = {verdict: [] for verdict in _VERDICTS}
    for key, words in _IN_PROSE.items():
        facts = f"{result[key]:.3f}"
        if key == "seed":
            interval = result["interval"]["ensemble_minus_seed"]
            mean, low, high = map(_signed, (result["ensemble"] - result["seed"], *interval))
            facts += f"; difference {mean}, 95% interval {low} to {high}"
        compared[_verdict(result, key)].append(f"{words} ({facts})")
    verdicts = "; ".join(f"{verdict} {_listed(c)}" for verdict, c in compared.items() if c)
    low, high = (f"{bound:.3f}" for bound in result["interval"]["ensemble"])
    return (
        f"**On the {TEXTS[text]} the {_ensemble(summary)} has {result['ensemble']:.3f} nats/byte** "
        f"(95% interval {low} to {high}; lower is better): {verdicts}. {_learned(result)}"
    )


def _verdict(result: Summary, key: str) -> str:
    """How the ensemble compares with another system, as far as the printed digits show."""
    if key == "seed":
        low, high = (round(bound, 4) for bound in result["interval"]["ensemble_minus_seed"])
        if low <= 0 <= high:
            return "as good as" if low == high else "not measurably different from"
        return "better than" if high < 0 else "worse than"
    ours, theirs = round(result["ensemble"], 3), round(result[key], 3)
    return "better than" if ours < theirs else "worse than" if ours > theirs else "as good as"


def _learned(result: Summary) -> str:
    """What the place of the loss among the n-grams says."""
    beaten = takewhile(lambda name: _verdict(result, name) == "better than", _NGRAMS)
    return (
        "It has learned no more than how frequent each byte is, if that.",
        "It has learned more than how frequent each byte is, but predicts no better than a table "
        "of byte pairs.",
        "It predicts better than a table of byte pairs, but no better than one of byte triples.",
        "It predicts better than tables of byte pairs and triples.",
    )[len(list(beaten))]


def warnings(summary: Summary) -> list[str]:
    """What looks wrong in a run and what to do about it, in Markdown."""
    found = []
    for text in _texts(summary):
        verdict = _verdict(summary[text], "seed")
        if verdict != "better than":
            advice = (
                "Training the experts has not paid. While their validation loss still falls, raise "
                "`config.expert.updates`; where it is flat or rises, lower "
                "`config.expert.learning_rate` and `config.expert.eps`, or raise "
                "`config.expert.n_pert`. If only the interval is too wide, score more documents."
                if summary["config"]["expert"]["updates"]
                else "The experts were not trained: raise `config.expert.updates`."
            )
            found.append(
                f"**On the {TEXTS[text]} the {_ensemble(summary)} is {verdict} the seed alone.** "
                f"{advice}"
            )
        if _verdict(summary[text], "unigram") == "worse than":
            found.append(
                f"**On the {TEXTS[text]} the {_ensemble(summary)} is worse than a unigram model,** "
                "which knows only how frequent each byte is. Look at the seed's curve: while it "
                "falls, raise `config.seed.updates`; if it does not, change "
                "`config.seed.learning_rate` and `config.seed.eps`."
            )
    experts = summary["experts"]
    lost = [i for i, e in enumerate(experts) if e["own_shard"]["expert"] > e["own_shard"]["seed"]]
    if lost:
        names = [*map(str, lost[:8]), *([f"{len(lost) - 8} more"] if len(lost) > 8 else [])]
        found.append(
            "**Experts that are worse than the seed on their own shard: "
            f"{_listed(names)} ({len(lost)} of {len(experts)}).** Their updates are mostly noise: "
            "lower `config.expert.learning_rate` and `config.expert.eps`, raise "
            "`config.expert.n_pert`, or have fewer experts, so that small shards hold more text."
        )
    sizes = [expert["bytes"] for expert in experts]
    mean = sum(sizes) / len(sizes)
    if max(sizes) > 2 * mean:
        found.append(
            f"**The shards are very unequal: expert {sizes.index(max(sizes))} has {max(sizes):,} "
            f"bytes, {max(sizes) / mean:.1f} times an equal share.** Look at its words: near "
            "copies of one text are better removed from the corpus; if the text has fewer "
            "subjects than there are experts, have fewer experts."
        )
    if copies := summary["test"]["documents_also_in_training"]:
        found.append(
            f"**Test documents that are also in the training text: {copies:,}.** The test loss may "
            "be too low by what was memorised: remove them from the test corpus, and run again in "
            "another workdir."
        )
    return found


def _warnings_section(summary: Summary) -> str:
    found = [f"- {warning}" for warning in warnings(summary)] or [
        "None: the ensemble is better than the seed alone and no worse than a unigram model, no "
        "expert is worse than the seed on its own shard, no shard is more than twice an equal "
        "share, and no test document is in the training text."
    ]
    return "\n".join(["## Warnings", "", *found])


def _trained(summary: Summary) -> str:
    config, count = summary["config"], len(summary["experts"])
    copies = (
        f"{count} copies of it, each alone on its own part of the text (a shard, found by "
        "clustering)"
        if count > 1
        else "a copy of it, the expert,"
    )
    return (
        "A language model that predicts the next byte was trained with forward passes only (no "
        f"backpropagation) on <code>{_escape(config['data']['train'])}</code>: first one expert, "
        f"the seed, for {_count(config['seed']['updates'], 'update')}; then {copies} for "
        f"{_count(config['expert']['updates'], 'update')}. The result has "
        f"{summary['parameters']:,} parameters and took {_big(summary['byte_forwards'])} "
        "byte-forwards."
    )


_READING = """\
How to read it:

- **nats/byte** is the mean of -ln p, where p is the probability that was given to the byte that
  came. Lower is better. Knowing nothing, every byte equally likely, is ln 256 = 5.545.
  **bits/byte** is nats / ln 2: 8 is knowing nothing, 4 would compress the text to half its size.
- All lines of a table are scored on the same bytes. A window is 1,025 bytes: the first 256 are
  only read, and choose the experts; the last 768 are scored.
- **95% interval**: how far a figure would move with another draw of as many documents. The
  difference from the seed is taken document by document, so its interval is narrower than those
  of the two suggest.
- **routed ensemble**: the mean of the probabilities of the experts nearest to a window's first
  256 bytes. **seed alone**: what every expert was copied from. The experts were trained on from
  there, so the difference is what that training bought; compute is not equal.
- **unigram, bigram, trigram**: smoothed tables of how often a byte follows none, one or two bytes,
  counted in the whole training text.
- **gzip -9** compresses the scored bytes as one file. It has not seen the training text, but
  unlike the others it learns from the scored bytes as it goes."""


def _loss_section(summary: Summary) -> str:
    parts = ["## Loss"]
    for text in _texts(summary):
        rows = []
        for system in systems(summary, text):
            interval = "{:.3f} to {:.3f}".format(*system.interval) if system.interval else ""
            cells = [system.name, f"{system.nats:.3f}", interval, f"{system.bits:.3f}"]
            rows.append([f"**{c}**" for c in cells] if system.key == "ensemble" else cells)
        scored = _count(summary[text]["scored_bytes"], "scored byte")
        windows = _count(summary[text]["windows"], "window")
        parts += [
            f"On the {TEXTS[text]}, {scored} in {windows}:",
            table(["", "nats/byte", "95% interval", "bits/byte"], rows),
        ]
    return "\n\n".join([*parts, _READING])


def _training_section(figures: Sequence[str]) -> str:
    if "loss.png" not in figures:
        return "## Training\n\nNothing was trained: no stage had an update."
    return """\
## Training

![Loss against compute](loss.png)

Thick lines are validation losses: of the seed on its part of the text, of each expert on its own
shard. Thin lines are training losses, a running mean over a twentieth of the stage. The ensemble
(before the branch: the seed) is scored on the validation corpus. These are different texts, so
compare a curve with itself; the n-grams on the test text are there for scale."""


def _experts_section(summary: Summary, figures: Sequence[str]) -> str:
    first = summary["test"]["routed_first"]
    rows = []
    for i, expert in enumerate(summary["experts"]):
        before, after = expert["own_shard"]["seed"], expert["own_shard"]["expert"]
        words = _escape(", ".join(expert["top_terms"])) or "(none)"
        sizes = (f"{expert['chunks']:,}", f"{expert['bytes']:,}")
        losses = (f"{before:.3f}", f"{after:.3f}", _signed(before - after))
        rows.append([str(i), words, *sizes, *losses, f"{first[i]:,}"])
    header = ["expert", "words", "chunks", "bytes", "seed", "expert", "gain", "test windows"]
    listed = table(header, rows, left=2)
    if len(rows) > _MANY:
        listed = _folded(f"All {len(rows)} experts", listed)
    figure = "![What the text was split into](clusters.png)\n\n"
    return f"""\
## Experts

{figure if "clusters.png" in figures else ""}{listed}

**words**: those the shard has most above the average. **seed**, **expert**: nats/byte on the part
of the shard kept for validation, where every byte of a training-length window is scored: not to be
compared with the test text. **gain**: seed - expert; positive is better. The seed was trained on
nearly all of the text, most of that part included; the expert was not trained on it. **test
windows**: those of the test text whose nearest expert this is."""


def _by_k_section(summary: Summary, figures: Sequence[str]) -> str:
    if "loss_by_k.png" not in figures:
        return ""
    texts = _texts(summary)
    losses = zip(*(summary[text]["by_k"] for text in texts), strict=True)
    rows = [[str(k), *(f"{loss:.3f}" for loss in row)] for k, row in enumerate(losses, 1)]
    return f"""\
## Loss by the number of active experts

![Loss by the number of active experts](loss_by_k.png)

{table(["k", *(f"nats/byte, {TEXTS[text]}" for text in texts)], rows)}

The probabilities of the k experts nearest to a window are averaged. This run is scored with
k = {active(summary)} (`config.active`)."""


def _compute_section(summary: Summary) -> str:
    spent, stages = summary["byte_forwards_by_stage"], summary["stages"]
    rows = [
        *([name, f"{stages[name]:,.1f}", _big(spent.get(name, 0))] for name in stages),
        ["all", f"{sum(stages.values()):,.1f}", _big(summary["byte_forwards"])],
    ]
    return f"""\
## Compute

{table(["stage", "seconds", "training byte-forwards"], rows)}

- A byte-forward is one byte through one perturbed expert. Validation and scoring are not counted.
- {_big(summary["operations"])} arithmetic operations in the matrix products of training (a
  multiply-add is two).
- {summary["device_hours"]:,.3f} device-hours: the seconds of the seed and the experts, with
  compilation and validation, x {_count(summary["devices"], "device")} ({summary["device"]}) / 3600.
- {summary["peak_rss_bytes"] / 2**30:.2f} GiB of host memory at the peak.
- Seconds are of the wall clock, over all the starts it took but those that were killed; memory is
  of the last start.
- Versions: {", ".join(f"{name} {version}" for name, version in summary["versions"].items())}."""


def _settings_section(summary: Summary) -> str:
    config = summary["config"]
    values = f"```json\n{json.dumps(config, indent=1)}\n```"
    return f"""\
## Settings

Random seed {config["random_seed"]}.

{_folded("The resolved config", values)}"""


def active(summary: Summary) -> int:
    """k, the number of experts that score a window."""
    return min(summary["config"]["active"], len(summary["experts"]))


def _ensemble(summary: Summary) -> str:
    count = len(summary["experts"])
    return "expert" if count == 1 else f"routed ensemble ({active(summary)} of {count})"


def _texts(summary: Summary) -> list[str]:
    return [text for text in TEXTS if text in summary]


def _folded(title: str, body: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _escape(words: str) -> str:
    """Words of a corpus or a path, with all that Markdown or HTML could read as a mark encoded."""
    plain = " ,.-/:"
    return "".join(
        c if c.isalnum() or c in plain or not c.isascii() else f"&#{ord(c)};" for c in words
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _listed(items: Sequence[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def _signed(difference: float) -> str:
    return f"{round(difference, 4) + 0.0:+.4f}"  # + 0.0: no negative zero


def _big(number: float) -> str:
    """A large count to three digits: 27,200 or 2.72 × 10¹⁰."""
    if number < 1e7:
        return f"{number:,}"
    digits, power = f"{number:.2e}".split("e")
    return f"{digits} × 10" + str(int(power)).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
