"""A released checkpoint of a finished run, with a model card computed from the run's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soma_jax import evaluate, model, pretrained, release, summary
from soma_jax.config import Config
from soma_jax.data import windows
from soma_jax.errors import SomaError
from soma_jax.files import read_json
from soma_jax.routing.router import Router
from soma_jax.workdir import Workdir

PACKAGED = (
    "texts packaged with soma_jax: novels, drama, speeches, code, manual pages, mathematics. Their "
    "sources and licences are in soma_jax/data/embedded/MANIFEST.json and NOTICE"
)


def export(path: Path, directory: Path, command: str, data: str | None, licence: str) -> None:
    """Writes the released checkpoint of a finished run.

    The losses on its card are those of the files that are written, on the run's test windows.

    Args:
      path: the workdir.
      directory: where; its name is the checkpoint's.
      command: that trains it.
      data: what it was trained on, and that text's licence; None is known of packaged texts.
      licence: of the weights.

    Raises:
      SomaError: the run is not finished, `data` is needed, or the directory exists.
    """
    workdir = Workdir(path)
    if not workdir.summary.exists():
        raise SomaError(f"{path} is not a finished run: run its launch/main.py command to the end")
    found, ens = read_json(workdir.summary), pretrained.load(path)
    packaged = ens.config.data.train.startswith("embedded:")
    if data is None and not packaged:
        raise SomaError(
            f"this run was trained on {ens.config.data.train}: say what that is, and under which "
            "licence, with --data"
        )
    experts, router, k = list(ens.experts), ens.router.compact(), ens.active
    losses = {"test": _losses(experts, router, ens.test_windows()[0], k)}
    if ens.config.evaluation.wikitext:
        losses["wikitext103_test"] = _losses(experts, router, summary.wikitext_windows(), k)
    about = {
        "updates": ens.updates(),
        "screened": read_json(workdir.screened),
        "losses": losses,
    }
    text = PACKAGED if data is None else data
    card = _card(directory.name, ens.config, found, losses, command, text, licence)
    release.write(directory, ens.config, experts, router, about, card)


def _losses(
    experts: Sequence[model.Params], router: Router, some: windows.Windows, k: int
) -> dict[str, Any]:
    scores = evaluate.score(experts, router, some, k)
    return {
        "nats_per_byte": scores.nats(k),
        "windows": len(some),
        "scored_bytes": int(scores.counts.sum()),
    }


def _card(
    name: str,
    config: Config,
    found: dict[str, Any],
    losses: dict[str, dict[str, Any]],
    command: str,
    data: str,
    licence: str,
) -> str:
    k = min(config.active, config.experts)
    texts = {"test": config.data.test, "wikitext103_test": "WikiText-103 test text"}
    peers = {"seed": "seed alone", "bigram": "bigram", "trigram": "trigram", "gzip_9": "gzip -9"}
    rows = [
        ["text", "windows", "this checkpoint", "bits/byte", *peers.values()],
        ["---", *["---:"] * (3 + len(peers))],
    ]
    for text, loss in losses.items():
        nats = loss["nats_per_byte"]
        figures = [f"{nats:.4f}", f"{nats / np.log(2):.4f}"]
        figures += [f"{found[text][peer]:.3f}" for peer in peers]
        rows.append([texts[text], f"{loss['windows']:,}", *figures])
    stages = {"the seed": config.seed, "each expert": config.expert}
    training = "; ".join(
        f"{stage.updates:,} updates of {who} by {stage.estimator} (n_pert = {stage.n_pert}, "
        f"B = {stage.sequences}, T = {stage.window})"
        for who, stage in stages.items()
        if stage.updates
    )
    paragraphs = [
        f"# {name}",
        f"An ensemble of {config.experts} byte-level language models of width "
        f"{config.model.width}, {k} of which answer for a text: {found['parameters']:,} "
        "parameters. Each was trained alone, on its own part of the text (SOMA, arXiv 2609.37899).",
        f'```\npython launch/generate.py --checkpoint={name} --prompt="The river"\n```',
        "## Losses",
        "Nats/byte where no other unit is named; lower is better. Windows of 1,025 bytes, routed "
        f"on the first 256; the last 768 are scored with the mean probability of {k} experts.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "## Data",
        f"Trained on `{config.data.train}`: {data}. Test documents that are also training "
        f"documents: {found['test']['documents_also_in_training']}, left out.",
        "## Compute",
        f"{training}. {found['byte_forwards']:,} byte-forwards, {found['operations']:.3g} "
        f"operations, {found['device_hours']:.2f} device-hours on {found['devices']} x "
        f"{found['device']}; "
        + ", ".join(f"{package} {number}" for package, number in found["versions"].items()),
        f"```\n{command}\n```",
        "## Limits",
        "A small model of bytes. It writes words and little sense; nothing it says can be relied "
        "on.",
        "## Licence",
        f"The weights: {licence}. The texts keep their own licences.",
    ]
    return "\n\n".join(paragraphs) + "\n"
