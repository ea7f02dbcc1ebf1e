"""The report says what the numbers of a run say, whatever their order and however many experts."""

import html
import json
import math
import os
import re
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from soma_jax import report
from soma_jax.errors import SomaError
from soma_jax.report import figures, page
from soma_jax.workdir import Workdir


def make_text(experts: int, **values) -> dict:
    return {
        "scored_bytes": 76_800,
        "windows": 100,
        "ensemble": 2.61,
        "seed": 2.75,
        "interval": {
            "ensemble": [2.55, 2.67],
            "seed": [2.69, 2.81],
            "ensemble_minus_seed": [-0.15, -0.13],
        },
        "by_k": [2.66 - 0.01 * k for k in range(min(experts, 8))],
        "routed_first": [1] * experts,
        "unigram": 3.43,
        "bigram": 2.79,
        "trigram": 2.19,
        "gzip_9": 2.27,
    } | values


def make_summary(experts: int = 4, *, seed_updates=100, expert_updates=200, **test) -> dict:
    """The summary of a run in which nothing is wrong."""
    spent = {"seed": 1000 * seed_updates, "experts": 1000 * expert_updates * experts}
    return {
        "test": make_text(experts, **{"documents_also_in_training": 0} | test),
        "experts": [
            {
                "chunks": 1000 + i,
                "bytes": 1_000_000 + 1000 * i,
                "top_terms": [f"word{i}", "and", "others"],
                "own_shard": {"seed": 2.8, "expert": 2.7 - i / 1000},
            }
            for i in range(experts)
        ],
        "byte_forwards": sum(spent.values()),
        "byte_forwards_by_stage": spent,
        "operations": 81_920 * sum(spent.values()),
        "parameters": 41_120 * experts,
        "devices": 4,
        "device": "cpu",
        "versions": {"soma_jax": "0.1.0", "jax": "0.10.2"},
        "peak_rss_bytes": 3 * 2**29,
        "config": {
            "random_seed": 17,
            "experts": experts,
            "active": 4,
            "data": {"train": "embedded:train"},
            "seed": {"updates": seed_updates},
            "expert": {"updates": expert_updates},
        },
        "seconds": 7500.0,
        "device_hours": 8.0,
        "stages": {"seed": 1800.0, "cluster": 100.0, "experts": 5400.0, "evaluate": 200.0},
    }


def make_lines(updates: int, start: float, end: float, noise: float = 0.0) -> list[dict]:
    rng = np.random.default_rng(updates)
    lines = []
    for update in sorted({1, *range(10, updates, 10), updates}) if updates else []:
        loss = end + (start - end) * math.exp(-5 * update / updates)
        line = {"update": update, "byte_forwards": 1000 * update, "seconds": 0.1 * update}
        line |= {"loss": loss + noise * rng.normal(), "eps": 1e-3, "learning_rate": 1e-3}
        validated = update % 50 == 0 or update == updates
        lines.append(line | ({"validation": loss} if validated else {}))
    return lines


def make_workdir(path, summary: dict) -> Workdir:
    """A finished workdir, as far as the report reads it."""
    workdir = Workdir(path)
    updates = {stage: summary["config"][stage]["updates"] for stage in ("seed", "expert")}
    files = {
        workdir.summary: [summary],
        workdir.seed / "metrics.jsonl": make_lines(updates["seed"], 5.6, 2.8, 0.05),
    }
    for i, expert in enumerate(summary["experts"]):
        before, after = expert["own_shard"]["seed"], expert["own_shard"]["expert"]
        lines = make_lines(updates["expert"], before, after, 0.05)
        files[workdir.expert(i) / "metrics.jsonl"] = lines
    curve = []
    for stage, key, start, end in (("seed", "seed", 5.6, 2.75), ("experts", "expert", 2.75, 2.61)):
        every = max(1, updates[key] // 10)
        for update in range(every, updates[key] + 1, every):
            loss = end + (start - end) * math.exp(-5 * update / updates[key])
            curve.append({"stage": stage, "update": update, "nats_per_byte": loss})
    if curve:
        files[workdir.curve] = curve
    for file, lines in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return workdir


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of every table, as a reader of the rendered page sees them."""
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)

    def cells(row: str) -> list[str]:
        found = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)
        return [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in found]

    found = re.findall(r"<table>(.*?)</table>", rendered, re.DOTALL)
    return [[cells(row) for row in re.findall(r"<tr>.*?</tr>", t, re.DOTALL)] for t in found]


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG whose chunks are whole."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, at = [], 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kinds.append(data[at + 4 : at + 8])
        crc = int.from_bytes(data[at + 8 + length : at + 12 + length], "big")
        assert zlib.crc32(data[at + 4 : at + 8 + length]) == crc
        at += 12 + length
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def clause(text: str, name: str) -> str:
    """The verdict under which a paragraph names a baseline."""
    found = [
        verdict
        for part in re.split(r"lower is better\): |; (?!difference)", text)[1:]
        for verdict in page._VERDICTS
        if part.startswith(verdict) and f"{name} (" in part
    ]
    assert len(found) == 1, (name, text)
    return found[0]


# Words


@pytest.mark.parametrize("name", ["unigram", "bigram", "trigram", "gzip_9"])
@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (2.0, "worse than"),
        (2.7, "better than"),
        (2.61, "as good as"),
        (2.6103, "as good as"),  # the printed digits are the same
    ],
)
def test_wording_follows_the_order_of_the_losses(name, loss, verdict):
    text = page.outcome(make_summary(**{name: loss}), "test")
    words = "gzip -9" if name == "gzip_9" else f"a {name} model"
    assert clause(text, words) == verdict
    assert f"{words} ({loss:.3f})" in text


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ([-0.15, -0.13], "better than"),
        ([0.13, 0.15], "worse than"),
        ([-0.01, 0.02], "not measurably different from"),
        ([-0.02, 0.0], "not measurably different from"),
        ([0.0, 0.0], "as good as"),
        ([-2e-16, -1e-16], "as good as"),  # rounding of equal sums
    ],
)
def test_wording_against_the_seed_follows_the_interval(interval, verdict):
    text = page.outcome(make_summary(interval=against_seed(*interval)), "test")
    assert clause(text, "the seed alone") == verdict
    low, high = (f"{round(bound, 4) + 0.0:+.4f}" for bound in interval)
    assert f"(2.750; difference -0.1400, 95% interval {low} to {high})" in text
    assert "-0.0000" not in text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 6), min_size=5, max_size=5))
def test_paragraph_never_contradicts_the_numbers(losses):
    names = ("unigram", "bigram", "trigram", "gzip_9")
    text = page.outcome(
        make_summary(ensemble=losses[0], **dict(zip(names, losses[1:], strict=True))), "test"
    )
    ours = float(re.search(r"has ([\d.]+) nats/byte", text)[1])
    assert ours == pytest.approx(losses[0], abs=5.1e-4)
    for name, loss in zip(names, losses[1:], strict=True):
        words = "gzip -9" if name == "gzip_9" else f"a {name} model"
        theirs = float(re.search(rf"{words} \(([\d.]+)\)", text)[1])
        assert theirs == pytest.approx(loss, abs=5.1e-4)
        order = {-1: "better than", 0: "as good as", 1: "worse than"}
        assert clause(text, words) == order[int(np.sign(ours - theirs))]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (3.5, "no more than how frequent each byte is"),
        (3.0, "predicts no better than a table of byte pairs"),
        (2.79, "predicts no better than a table of byte pairs"),
        (2.5, "better than a table of byte pairs, but no better than one of byte triples"),
        (2.0, "better than tables of byte pairs and triples"),
    ],
)
def test_paragraph_says_what_was_learned(loss, words):
    assert words in page.outcome(make_summary(ensemble=loss), "test")


def test_page_opens_with_what_was_trained_and_how_it_went():
    summary = make_summary(4)
    summary["config"]["data"]["train"] = "/texts/<b>*.jsonl"
    opening = page.markdown(summary, []).split("## ")[0]
    assert "the seed, for 100 updates; then 4 copies of it" in opening
    assert "for 200 updates" in opening
    assert "the routed ensemble (4 of 4) has 2.610 nats/byte** (95% interval 2.550 to 2.670" in (
        opening
    )
    rendered = MarkdownIt("commonmark").render(opening)
    assert "<code>/texts/&lt;b&gt;*.jsonl</code>" in rendered


def test_one_expert_is_not_called_an_ensemble():
    text = page.markdown(make_summary(1), ["loss.png"])
    assert "On the test text the expert has 2.610 nats/byte" in text
    assert "then a copy of it, the expert, for 200 updates" in text
    assert "of 1)" not in text
    assert "Loss by the number" not in text


# Numbers


def test_loss_table_holds_the_summary_best_first():
    summary = make_summary(4)
    header, *rows = tables(page.markdown(summary, []))[0]
    assert header == ["", "nats/byte", "95% interval", "bits/byte"]
    assert [row[0] for row in rows] == [
        *("trigram", "gzip -9", "routed ensemble (4 of 4)", "seed alone"),
        *("bigram", "unigram", "knowing nothing"),
    ]
    by_name = {row[0]: row for row in rows}
    expected = {
        "routed ensemble (4 of 4)": (2.61, "2.550 to 2.670"),
        "seed alone": (2.75, "2.690 to 2.810"),
        **{name: (summary["test"][name], "") for name in ("unigram", "bigram", "trigram")},
        "gzip -9": (2.27, ""),
        "knowing nothing": (math.log(256), ""),
    }
    for name, (nats, interval) in expected.items():
        assert by_name[name][1:] == [f"{nats:.3f}", interval, f"{nats / math.log(2):.3f}"]
    assert by_name["knowing nothing"][3] == "8.000"


def test_loss_section_says_how_much_was_scored():
    text = page.markdown(make_summary(scored_bytes=1_234_567, windows=1), [])
    assert "On the test text, 1,234,567 scored bytes in 1 window:" in text


def test_wikitext_is_told_where_it_was_scored():
    summary = make_summary()
    assert "WikiText" not in page.markdown(summary, ["loss_by_k.png"])
    summary["wikitext103_test"] = make_text(4, ensemble=2.1, by_k=[2.4, 2.3, 2.2, 2.1])
    text = page.markdown(summary, ["loss_by_k.png"])
    assert "**On the WikiText-103 test text the routed ensemble (4 of 4) has 2.100" in text
    _, wikitext, _, by_k, _ = tables(text)
    assert wikitext[1][:2] == ["routed ensemble (4 of 4)", "2.100"]
    assert by_k[0] == ["k", "nats/byte, test text", "nats/byte, WikiText-103 test text"]
    assert by_k[1:] == [
        ["1", "2.660", "2.400"],
        ["2", "2.650", "2.300"],
        ["3", "2.640", "2.200"],
        ["4", "2.630", "2.100"],
    ]


@pytest.mark.parametrize("count", [1, 4, 256])
def test_expert_table_has_a_row_for_each(count):
    summary = make_summary(count, routed_first=list(range(count)))
    text = page.markdown(summary, [])
    _, *rows = tables(text)[1]
    assert len(rows) == count
    last = count - 1
    after = 2.7 - last / 1000
    words, gain = f"word{last}, and, others", f"{2.8 - after:+.4f}"
    sizes = [f"{1000 + last:,}", f"{1_000_000 + 1000 * last:,}"]
    assert rows[-1] == [str(last), words, *sizes, "2.800", f"{after:.3f}", gain, str(last)]
    assert ("<summary>All 256 experts</summary>" in text) == (count == 256)


HOSTILE = ["a|b", "`c`", "*d*", "<e>", "_f_", "[g](h)", "&amp;", "$i$", "\\", "#1", "~~j~~", "é中"]


def test_marks_in_words_do_not_break_the_table():
    summary = make_summary(2)
    summary["experts"][0]["top_terms"] = HOSTILE
    summary["experts"][1]["top_terms"] = []
    _, first, second = tables(page.markdown(summary, []))[1]
    assert first[1] == ", ".join(HOSTILE)
    assert second[1] == "(none)"
    assert len(first) == len(second) == 8


def test_compute_is_counted_from_the_summary():
    summary = make_summary(4)
    text = page.markdown(summary, [])
    assert "- 8.000 device-hours: " in text
    assert "x 4 devices (cpu) / 3600" in text
    assert "7.37 × 10¹⁰ arithmetic operations" in text  # 81,920 x 900,000
    assert "- 1.50 GiB of host memory" in text
    assert tables(text)[-1] == [
        ["stage", "seconds", "training byte-forwards"],
        ["seed", "1,800.0", "100,000"],
        ["cluster", "100.0", "0"],
        ["experts", "5,400.0", "800,000"],
        ["evaluate", "200.0", "0"],
        ["all", "7,500.0", "900,000"],
    ]


def test_settings_are_folded_and_whole():
    summary = make_summary()
    text = page.markdown(summary, [])
    assert "Random seed 17." in text
    (folded,) = re.findall(r"<details>.*?```json\n(.*?)\n```.*?</details>", text, re.DOTALL)
    assert json.loads(folded) == summary["config"]


def test_terminal_table_fits_a_terminal():
    summary = make_summary(256)
    summary["wikitext103_test"] = make_text(256, ensemble=2.1)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.terminal_table(summary))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    (ours,) = [line for line in lines if "routed ensemble (4 of 256)" in line]
    assert re.findall(r"\d\.\d{3}", ours) == ["2.610", "3.765", "2.100", "3.030"]
    assert "warning" not in capture.get()


def test_terminal_table_counts_the_warnings():
    table = report.terminal_table(make_summary(documents_also_in_training=2))
    assert table.caption == "1 warning: see the report"


# Warnings


OURS = "On the test text the routed ensemble (4 of 4)"


def against_seed(low: float, high: float) -> dict:
    return {"ensemble": [2.5, 2.7], "seed": [2.5, 2.7], "ensemble_minus_seed": [low, high]}


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({}, None),
        ({"interval": against_seed(0.1, 0.2)}, f"{OURS} is worse than the seed alone."),
        ({"interval": against_seed(-0.1, 0.2)}, f"{OURS} is not measurably different from the"),
        ({"interval": against_seed(0.0, 0.0)}, f"{OURS} is as good as the seed alone."),
        ({"unigram": 2.6}, f"{OURS} is worse than a unigram model,"),
        ({"unigram": 2.61}, None),
        ({"documents_also_in_training": 3}, "Test documents that are also in the training text: 3"),
    ],
)
def test_warnings_of_a_text_come_exactly_when_they_should(values, start):
    summary = make_summary()
    summary["test"] |= values
    found = page.warnings(summary)
    assert len(found) == (start is not None)
    if found:
        assert found[0].startswith(f"**{start}")
    else:
        assert "None: the ensemble is better than the seed" in page.markdown(summary, [])


def test_untrained_experts_are_told_to_be_trained():
    values = {"interval": against_seed(0.0, 0.0), "expert_updates": 0}
    (found,) = page.warnings(make_summary(**values))
    assert found.endswith("The experts were not trained: raise `config.expert.updates`.")


def test_each_text_is_warned_about():
    summary = make_summary()
    summary["wikitext103_test"] = make_text(4, unigram=2.6)
    (found,) = page.warnings(summary)
    assert found.startswith("**On the WikiText-103 test text")


@pytest.mark.parametrize(
    ("worse", "words"),
    [
        ([], None),
        ([2], "2 (1 of 12)"),
        ([0, 3], "0 and 3 (2 of 12)"),
        (range(12), "0, 1, 2, 3, 4, 5, 6, 7 and 4 more (12 of 12)"),
    ],
)
def test_experts_worse_than_the_seed_are_named(worse, words):
    summary = make_summary(12)
    summary["experts"][5]["own_shard"] = {"seed": 2.8, "expert": 2.8}  # equal is not worse
    for i in worse:
        summary["experts"][i]["own_shard"] = {"seed": 2.8, "expert": 2.8001}
    found = page.warnings(summary)
    assert len(found) == bool(words)
    if words:
        expected = f"**Experts that are worse than the seed on their own shard: {words}.**"
        assert found[0].startswith(expected)


@pytest.mark.parametrize(("size", "warned"), [(3_000_000, False), (3_000_001, True)])
def test_unequal_shards_are_warned_about_above_twice_the_mean(size, warned):
    summary = make_summary(3)
    for expert, bytes_ in zip(summary["experts"], (750_000, size, 750_000), strict=True):
        expert["bytes"] = bytes_
    found = page.warnings(summary)
    assert len(found) == warned
    if warned:
        assert "expert 1 has 3,000,001 bytes, 2.0 times an equal share" in found[0]


# Figures and files


@pytest.mark.parametrize(
    ("count", "wikitext"), [(1, True), (2, False), (8, True), (9, False), (256, True)]
)
def test_report_is_whole_for_any_number_of_experts(tmp_path, count, wikitext):
    summary = make_summary(count)
    if wikitext:
        summary["wikitext103_test"] = make_text(count)
    workdir = make_workdir(tmp_path, summary)
    text = report.write(workdir)
    assert (workdir.report / "report.md").read_text() == text
    embedded = re.findall(r"!\[.+?\]\((.+?)\)", text)
    expected = ["loss.png", "clusters.png", "loss_by_k.png"] if count > 1 else ["loss.png"]
    assert embedded == expected
    on_disk = {path.name for path in workdir.report.iterdir()}
    assert on_disk == {*embedded, "report.md", "summary.json"}
    for name in embedded:
        width, height = png_size((workdir.report / name).read_bytes())
        assert 600 <= width <= 1300
        assert 300 <= height <= 2400


@pytest.mark.parametrize(("seed_updates", "expert_updates"), [(0, 0), (5, 0), (0, 5), (1, 1)])
def test_stages_without_updates_are_reported(tmp_path, seed_updates, expert_updates):
    summary = make_summary(seed_updates=seed_updates, expert_updates=expert_updates)
    text = report.write(make_workdir(tmp_path, summary))
    assert ("Nothing was trained" in text) == (seed_updates + expert_updates == 0)
    assert ("loss.png" in text) == (seed_updates + expert_updates > 0)


def drawn(tmp_path, summary: dict) -> tuple:
    """The loss figure of a workdir, and its curves by their label."""
    workdir = make_workdir(tmp_path, summary)
    read = report.read_json_lines
    experts = [
        read(workdir.expert(i) / "metrics.jsonl") for i in range(summary["config"]["experts"])
    ]
    seed = read(workdir.seed / "metrics.jsonl")
    figure = figures.loss(summary, seed, experts, read(workdir.curve))
    return figure, {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}


def test_an_experts_curve_starts_where_the_seeds_ended(tmp_path):
    _, curves = drawn(tmp_path, make_summary(3))
    assert curves["seed"][:, 0].tolist() == [50_000, 100_000]
    assert curves["expert 2"][:, 0].tolist() == [150_000, 200_000, 250_000, 300_000]
    assert curves["expert 2"][-1, 1] == pytest.approx(2.698, abs=0.01)
    ensemble = curves["ensemble (validation corpus)"]
    of_seed, of_experts = range(10_000, 100_001, 10_000), range(120_000, 300_001, 20_000)
    assert ensemble[:, 0].tolist() == [*of_seed, *of_experts]
    assert ensemble[-1, 1] == pytest.approx(2.61, abs=0.01)
    assert set(curves["bigram (test text)"][:, 1]) == {2.79}
    assert set(curves["trigram (test text)"][:, 1]) == {2.19}


def test_many_experts_are_drawn_as_median_and_band(tmp_path):
    figure, curves = drawn(tmp_path, make_summary(101))
    assert not any(label.startswith("expert ") for label in curves)
    median = curves["101 experts, median"]
    assert median[-1, 1] == pytest.approx(2.65, abs=0.01)  # of 2.7, 2.699, ... 2.6
    (band,) = figure.axes[0].collections
    edge = band.get_paths()[0].vertices
    last = edge[edge[:, 0] == 300_000, 1]
    assert (last.min(), last.max()) == pytest.approx((2.61, 2.69), abs=0.002)


def all_figures(tmp_path) -> list:
    summary = make_summary(4)
    summary["wikitext103_test"] = make_text(4)
    few, many = (figures.clusters(make_summary(n)["experts"]) for n in (4, 64))
    return [drawn(tmp_path, summary)[0], few, many, figures.loss_by_k(summary)]


def test_every_axis_has_a_label_with_its_unit(tmp_path):
    for figure in all_figures(tmp_path):
        for axes in figure.axes:
            assert re.search("byte-forwards|bytes|experts k", axes.get_xlabel())
            named = [label.get_text() for label in axes.get_yticklabels()]
            assert axes.get_ylabel() in ("nats/byte", "number of shards") or "expert 0" in named


def test_figures_show_words_without_reading_them_as_marks(tmp_path):
    experts = make_summary(2)["experts"]
    experts[0]["top_terms"] = [*HOSTILE, "$\\frac$"]
    experts[1]["top_terms"] = ["中文", "привет"]
    figure = figures.clusters(experts)
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words[1] == "??, привет"  # the font has no such letters: no box, no warning
    figures.save(figure, tmp_path / "clusters.png")  # draws it; a formula would fail
    png_size((tmp_path / "clusters.png").read_bytes())


def test_loss_by_k_marks_the_k_of_the_run():
    summary = make_summary(8)
    lines = {
        line.get_label(): line.get_xydata() for line in figures.loss_by_k(summary).axes[0].lines
    }
    assert lines["routed ensemble"][:, 1].tolist() == summary["test"]["by_k"]
    assert lines["this run, k = 4"].tolist() == [[4, summary["test"]["by_k"][3]]]
    assert set(lines["seed alone"][:, 1]) == {2.75}


def test_report_is_made_again_when_missing_or_old(tmp_path, capsys):
    workdir = make_workdir(tmp_path, make_summary(1))
    where = workdir.report / "report.md"
    report.show(workdir)
    first = where.read_text()
    assert "trigram" in capsys.readouterr().out

    where.write_text("kept")
    report.show(workdir)
    assert where.read_text() == "kept"  # up to date: left alone

    os.utime(where, (1, 1))
    report.show(workdir)
    assert where.read_text() == first
    where.unlink()
    report.show(workdir)
    assert where.read_text() == first


def test_unfinished_run_has_no_report(tmp_path):
    with pytest.raises(SomaError, match=r"no summary\.json yet: finish the run first"):
        report.write(Workdir(tmp_path))


def test_damaged_metrics_are_named(tmp_path):
    workdir = make_workdir(tmp_path, make_summary())
    path = workdir.expert(2) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(SomaError, match=r"002/metrics\.jsonl:2 is not JSON"):
        report.write(workdir)
    path.unlink()
    with pytest.raises(SomaError, match=r"cannot read .*002/metrics\.jsonl"):
        report.write(workdir)
    assert not (workdir.report / "report.md").exists()


def test_figure_that_cannot_be_written_is_an_error(tmp_path):
    workdir = make_workdir(tmp_path, make_summary())
    (workdir.report / "loss.png").mkdir()
    with pytest.raises(SomaError, match=r"cannot write .*loss\.png"):
        report.write(workdir)
    assert not (workdir.report / "report.md").exists()
