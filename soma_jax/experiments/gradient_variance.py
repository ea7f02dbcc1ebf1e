"""How far an estimate of an ensemble's joint gradient is from its mean, against the number of
experts and of directions (paper, Figs. 10 and 11, Appendix G).

The joint loss is the sum of the experts' losses, each of an expert's own parameters and batch, so
that the gradient has a block g_e for each expert. An estimate weights expert e's directions by the
derivatives of its own loss (independent) or of the sum of all N (summed). With q_j the probability
that coordinate j of a direction is not 0, the mean of both is q_j g_j, and the variance around it
over |g|^2 is (paper, section 6)

    v = sum_j q_j (1 + s - 2 q_j) g_j^2 / (n_pert |g|^2),

where s sums the q of all parameters whose directions share a derivative: one expert's, or all. For
dense directions and M parameters in all that is (M/N - 1)/n_pert and (M - 1)/n_pert.

The derivative along a direction is exact here, by forward mode in float64: what the two forwards of
SPSA give for a small radius. Some repeats are done by `spsa` itself at the radius of training, to
show the difference. Reverse mode is used to measure here, and nowhere to train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from soma_jax import ensemble, model, probes, randomness, recipe, training
from soma_jax.config import Data, Model, Run, Stage, build, field, stage
from soma_jax.data import store
from soma_jax.errors import SomaError
from soma_jax.experiments import output, pieces
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.model import ExpertConfig
from soma_jax.progress import activity, console
from soma_jax.report import figures, page
from soma_jax.spsa import spsa
from soma_jax.stats import Interval, paired_bootstrap, t_interval

PROBES = ("dense", "sparse")
STATES = {"drawn": "as drawn", "trained": "after a short training"}
ARMS = ("independent", "summed")
_TOGETHER = 16  # directions whose derivatives are computed at once


@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of configs/experiments/gradient_variance.py."""

    experts: tuple  # N; the smaller ensembles are the first experts of the largest
    n_pert: tuple  # each divides the largest
    model: Model
    data: Data
    stage: Stage  # the short training, alone on a part of the corpus
    random_seed: int = field(0, at_least=0, below=2**32)
    sequences: int = field(4, at_least=1)  # of the batch whose gradient is estimated
    repeats: int = field(64, at_least=2)  # draws of as many directions as the largest n_pert
    checked: int = field(4, at_least=1)  # of them are done with finite differences, too

    @property
    def expert_shape(self) -> ExpertConfig:
        return ExpertConfig(**dataclasses.asdict(self.model))


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    settings: Settings = build(Settings, values, "config")
    stage(values["stage"], "config.stage")
    for name in ("experts", "n_pert"):
        some = getattr(settings, name)
        if not some or not all(isinstance(n, int) and n > 0 for n in some):
            raise SomaError(f"config.{name} must be positive whole numbers, not {some!r}")
        if list(some) != sorted(set(some)):
            raise SomaError(f"config.{name} must rise from number to number, not {some!r}")
    if uneven := [n for n in settings.n_pert if settings.n_pert[-1] % n]:
        raise SomaError(
            f"config.n_pert={settings.n_pert!r}: {uneven[0]} does not divide {settings.n_pert[-1]}"
        )
    if settings.sequences > settings.stage.windows_per_update:
        raise SomaError(
            f"config.sequences is {settings.sequences}, but a batch of config.stage has only "
            f"{settings.stage.windows_per_update} windows"
        )
    if settings.checked > settings.repeats:
        raise SomaError(
            f"config.checked must be at most config.repeats={settings.repeats}, not "
            f"{settings.checked}"
        )
    return settings


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains the experts, measures, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a directory of other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    with Interruptions() as interruptions:
        pieces.adopt(directory, dataclasses.asdict(settings))
        corpus = recipe.open_corpus(settings.data, settings.data.train, directory / "data")
        experts, windows = _experts(settings, directory, corpus, interruptions)
        measured = {}
        for state, words in STATES.items():
            for probe in PROBES:
                path = directory / "pieces" / f"{state}-{probe}.json"
                if not path.exists():
                    with activity(f"measuring {probe} directions, experts {words}"):
                        write_json(path, measure(experts[state], windows, probe, settings))
                measured[state, probe] = read_json(path)
    blocks = len(windows)
    result = output.circumstances(command, [settings.random_seed]) | {
        "parameters": settings.expert_shape.body_parameters,
        "experts": list(settings.experts),
        "n_pert": list(settings.n_pert),
        "repeats": settings.repeats,
        "checked": settings.checked,
        "batch": [settings.sequences, settings.stage.window],
        "stage": dataclasses.asdict(settings.stage),
        "derivatives": len(measured) * settings.repeats * blocks * settings.n_pert[-1],
        "rows": [
            row
            for (state, probe), found in measured.items()
            for row in _rows(state, probe, found, settings)
        ],
        "checks": [
            {"state": state, "probe": probe} | _check(found, settings)
            for (state, probe), found in measured.items()
        ],
    }
    _write(directory, result)
    return result


def _experts(
    settings: Settings, directory: Path, corpus: store.Store, interruptions: Interruptions
) -> tuple[dict[str, model.Params], np.ndarray]:
    """The largest ensemble's parameters [N, ...] in each state, and its batches [N, B, T + 1]."""
    seed, count = settings.random_seed, settings.experts[-1]
    shape = settings.expert_shape
    drawn = [model.init(randomness.key(seed, "init", i), shape) for i in range(count)]
    trainees = [
        training.trainee(
            directory / "experts" / f"{i:03d}", params, settings.stage, corpus, chunks,
            random_seed=seed, kind="expert", index=i, validation_share=0.01,
        )
        for i, (params, chunks) in enumerate(
            zip(drawn, np.array_split(np.arange(corpus.n_chunks), count), strict=True)
        )
    ]  # fmt: skip
    starts = ensemble.stack([t.start for t in trainees])
    console.print(f"training {count} experts")
    states = training.train("experts", trainees, settings.stage, Run(), interruptions)
    trained = ensemble.stack(states)
    # The batch of the next update: the same for both states, and new to both.
    batches = [t.stream[settings.stage.updates][: settings.sequences] for t in trainees]
    return {"drawn": starts.params, "trained": trained.params}, np.stack(batches)


def activity_of(probe: str, params: Any) -> jax.Array:
    """q [d]: the probability that a coordinate of a direction is not 0, parameters flattened."""
    q = jax.tree.map(
        lambda x: jnp.full(x.shape, 0.5 if probe == "sparse" and x.ndim > 1 else 1.0), params
    )
    return ravel_pytree(q)[0]


def predicted(gradient: Any, q: Any, n_pert: int, joined: Any = 1) -> Any:
    """Relative variance around its mean of an estimate by n_pert signs, dense or sparse, for a
    small radius (paper, section 6).

    Args:
      gradient: [N, d], a block for each expert.
      q: [d], of an expert's directions (`activity_of`).
      n_pert: directions of an estimate.
      joined: blocks whose directions share a derivative: 1 is independent, N is summed.
    """
    s = joined * q.sum()
    return (q * (1 + s - 2 * q) * gradient**2).sum() / (n_pert * (gradient**2).sum())


def squared_errors(
    weights: jax.Array, products: jax.Array, along_mean: jax.Array, square: jax.Array, size: int
) -> jax.Array:
    """|1/size sum_j w_j z_j - mean|^2 of the estimates by each `size` directions [..., n / size].

    Args:
      weights: [..., n], of the directions.
      products: [n, n], of the directions with each other.
      along_mean: [n], of the directions with the mean.
      square: [], of the mean.
      size: directions of an estimate.
    """
    w = weights.reshape(*weights.shape[:-1], -1, size)
    groups = w.shape[-2]
    within = jnp.einsum("gigj->gij", products.reshape(groups, size, groups, size))
    of_estimate = jnp.einsum("...gi,gij,...gj->...g", w, within, w) / size**2
    return of_estimate - 2 * (w * along_mean.reshape(groups, size)).mean(-1) + square


def measure(
    params: model.Params, windows: np.ndarray, probe: str, settings: Settings
) -> dict[str, Any]:
    """Relative variances of estimates of the joint gradient of 1 to N experts, in float64.

    Args:
      params: of the experts, [N, ...].
      windows: a batch for each, [N, B, T + 1].
      probe: of the directions.
      settings: how many.

    Returns:
      errors: |g' - q g|^2 / |g|^2 for each repeat (a mean over the estimates that its directions
        make), arm, number of experts and n_pert.
      predicted: the same without repeats.
      finite: for each checked repeat, the last of `errors`, independent, by finite differences.
    """
    counts = settings.experts
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        experts = Experts(params["body"], params["head"], jnp.asarray(windows))
        gradient = _gradients(experts)
        q = activity_of(probe, jax.tree.map(lambda x: x[0], experts.body))
        known = experts, q * gradient, jnp.square(gradient).sum(1)
        keys = jnp.stack(
            [randomness.key(settings.random_seed, "directions", r) for r in range(settings.repeats)]
        )
        return {
            "errors": _each(_errors, probe, settings, keys, *known),
            "predicted": [
                [
                    [float(predicted(gradient[:count], q, n, joined)) for n in settings.n_pert]
                    for count, joined in zip(counts, of_arm, strict=True)
                ]
                for of_arm in ([1] * len(counts), counts)
            ],
            "finite": _each(_finite_errors, probe, settings, keys[: settings.checked], *known),
        }


class Experts(NamedTuple):
    """An ensemble and its batches."""

    body: Any  # [N, ...]
    head: jax.Array  # [N, V, d_E]
    windows: jax.Array  # uint8 [N, B, T + 1]


def _losses(body: Any, head: jax.Array, windows: jax.Array) -> jax.Array:
    return model.sequence_losses({"head": head, "body": body}, windows)


@jax.jit
def _gradients(experts: Experts) -> jax.Array:
    """The gradient of each expert's loss, [N, d]."""
    of_body = jax.grad(lambda *expert: _losses(*expert).mean())
    return lax.map(lambda expert: ravel_pytree(of_body(*expert))[0], experts)


def _errors(
    key: jax.Array,
    experts: Experts,
    mean: jax.Array,
    norm: jax.Array,
    probe: str,
    settings: Settings,
) -> jax.Array:
    """Relative errors of estimates from one draw of directions, [arms, numbers of experts, n_pert].

    Args:
      key: of the draw.
      experts: the largest ensemble.
      mean: of an estimate, [N, d].
      norm: squared, of each expert's gradient, [N].
      probe: law of the directions.
      settings: numbers of experts and of directions.
    """
    law, js = probes.LAWS[probe], jnp.arange(settings.n_pert[-1])
    counts, numbers = np.array(settings.experts), jnp.arange(len(mean))

    def derivatives(one: tuple[jax.Array, Experts]) -> jax.Array:
        """Of an expert's loss along each of its directions, [n]."""
        number, (body, head, windows) = one

        def along(j: jax.Array) -> jax.Array:
            z = law(jax.random.fold_in(key, number), j, body)
            return jax.jvp(lambda body: _losses(body, head, windows).mean(), (body,), (z,))[1]

        return lax.map(along, js, batch_size=min(_TOGETHER, len(js)))

    own = lax.map(derivatives, (numbers, experts))
    summed = jnp.cumsum(own, 0)[counts - 1]

    def errors(one: tuple[jax.Array, Any, jax.Array, jax.Array]) -> jax.Array:
        """Of an expert's part: independent, and summed over each number of experts; by n_pert."""
        number, body, own, mean = one
        of_expert = jax.random.fold_in(key, number)
        z = jax.vmap(lambda j: ravel_pytree(law(of_expert, j, body))[0])(js)
        weights = jnp.concatenate([own[None], summed])
        known = weights, z @ z.T, z @ mean, mean @ mean
        return jnp.stack([squared_errors(*known, size).mean(-1) for size in settings.n_pert], -1)

    each = lax.map(errors, (numbers, experts.body, own, mean))
    joint = [
        each[:count, jnp.array([0, i])].sum(0) / norm[:count].sum()
        for i, count in enumerate(counts, 1)
    ]
    return jnp.stack(joint, 1)


def _finite_errors(
    key: jax.Array,
    experts: Experts,
    mean: jax.Array,
    norm: jax.Array,
    probe: str,
    settings: Settings,
) -> jax.Array:
    """The independent one of `_errors` with all experts and directions, by `spsa`; []."""
    n_pert = settings.n_pert[-1]
    law, chunk = probes.LAWS[probe], min(_TOGETHER, n_pert)
    tx = spsa(n_pert, settings.stage.eps, law=law, chunk=chunk)

    def error(one: tuple[jax.Array, Experts, jax.Array]) -> jax.Array:
        number, (body, head, windows), mean = one
        estimate, _ = tx.update(
            body,
            tx.init(body),
            body,
            value_fn=lambda body, windows: _losses(body, head, windows),
            key=jax.random.fold_in(key, number),
            batch=windows,
        )
        return jnp.square(ravel_pytree(estimate)[0] - mean).sum()

    return lax.map(error, (jnp.arange(len(mean)), experts, mean)).sum() / norm.sum()


def _each(
    function: Callable, probe: str, settings: Settings, keys: jax.Array, *known: Any
) -> list[Any]:
    """`function` with each key, the keys split over as many devices as divide them."""
    return np.asarray(_compiled(function, probe, settings, len(keys))(keys, *known)).tolist()


@cache
def _compiled(function: Callable, probe: str, settings: Settings, count: int) -> Callable:
    devices = jax.devices()
    split = max(n for n in range(1, len(devices) + 1) if count % n == 0)
    mesh = jax.make_mesh((split,), ("keys",), (AxisType.Auto,), devices=devices[:split])

    def mapped(keys: jax.Array, *known: Any) -> Any:
        return lax.map(lambda key: function(key, *known, probe, settings), keys)

    return jax.jit(
        jax.shard_map(
            mapped,
            mesh=mesh, in_specs=(P("keys"), P(), P(), P()), out_specs=P("keys"), check_vma=False,
        )
    )  # fmt: skip


def _rows(
    state: str, probe: str, found: Mapping[str, Any], settings: Settings
) -> list[dict[str, Any]]:
    """A row for each number of experts and n_pert."""
    errors, expected = np.array(found["errors"]), np.array(found["predicted"])
    rows = []
    for i, count in enumerate(settings.experts):
        for j, n_pert in enumerate(settings.n_pert):
            row: dict[str, Any] = {"state": state, "probe": probe, "experts": count}
            row["n_pert"] = n_pert
            for arm, of_repeats, value in zip(
                ARMS, errors[:, :, i, j].T, expected[:, i, j], strict=True
            ):
                row[arm] = _measured(t_interval(of_repeats), value)
            ratio = paired_bootstrap(*errors[:, :, i, j].T)
            rows.append(row | {"ratio": _measured(ratio, expected[0, i, j] / expected[1, i, j])})
    return rows


def _check(found: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The law of 1/n_pert, and the finite differences."""
    errors, most = np.array(found["errors"])[:, :, -1], settings.n_pert[-1]
    first = settings.n_pert[0]
    laws = {
        arm: _measured(paired_bootstrap(first * e[:, 0], most * e[:, -1]), 1.0)
        for arm, e in zip(ARMS, errors.swapaxes(0, 1), strict=True)
    }
    exact = errors[: settings.checked, 0, -1].mean()
    return {"law": laws, "exact": float(exact), "finite": float(np.mean(found["finite"]))}


def _measured(interval: Interval, expected: float) -> dict[str, Any]:
    mean, low, high = map(float, interval)
    return {"mean": mean, "interval": [low, high], "predicted": float(expected)}


def _write(directory: Path, result: dict[str, Any]) -> None:
    columns = ["state", "probe", "experts", "n_pert"]
    columns += [
        f"{of}_{what}" for of in (*ARMS, "ratio") for what in ("mean", "low", "high", "predicted")
    ]
    rows = [
        [
            *(row["state"], row["probe"], row["experts"], row["n_pert"]),
            *(x for of in (*ARMS, "ratio") for x in _flat(row[of])),
        ]
        for row in result["rows"]
    ]
    output.write(
        directory, "gradient_variance", result, markdown(result), (columns, rows), _figure(result)
    )


def _flat(measured: Mapping[str, Any]) -> list[float]:
    return [measured["mean"], *measured["interval"], measured["predicted"]]


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: tables against N and n_pert, the checks, and what of the paper's
    claims came out."""
    rows, most = result["rows"], result["n_pert"][-1]
    by_experts = [row for row in rows if row["n_pert"] == most]
    largest = result["experts"][-1]
    by_n_pert = [r for r in rows if (r["state"], r["experts"]) == ("trained", largest)]
    stage, (sequences, window) = result["stage"], result["batch"]
    trained = f"{stage['updates']} updates of `{stage['probe']}` directions"
    return "\n\n".join(
        [
            f"`{result['command']}`",
            f"Experts of {result['parameters']:,} parameters (not counting E), as drawn and after "
            f"{trained}; each has a batch of {sequences} windows of {window} bytes of its own part "
            f"of the corpus. {result['repeats']} repeats of {most} directions an expert; random "
            f"seed {result['random_seeds'][0]}. {result['derivatives']:,} derivatives along a "
            f"direction in float64 on {result['devices']} x {result['device']}, {result['date']}. "
            "Variances are those of the estimate of the joint gradient around its mean, over the "
            "squared norm of the joint gradient; intervals are over repeats, of a ratio by the "
            "bootstrap over pairs of the same directions.",
            f"**Against the number of experts**, n_pert = {most}. At a fixed width the experts' "
            "parameters add up, so independent losses keep the variance where it is, and a summed "
            "one lets it grow with N.",
            _table("N", "experts", by_experts),
            f"**Against the number of directions**, N = {largest}",
            _table("n_pert", "n_pert", by_n_pert),
            f"**Finite differences** at the radius of training, {stage['eps']:g}, against exact "
            f"derivatives: relative variance (independent, N = {largest}, n_pert = "
            f"{most}) of {result['checked']} of the repeats, the same directions",
            page.table(["experts", "directions", "finite differences", "exact", "ratio"],
                       map(_finite, result["checks"]), left=2),
            "**The paper's claims, here.** The paper measures 1/4.02 for N = 4.",
            "\n".join(_claims(result)),
        ]
    ) + "\n"  # fmt: skip


def _table(name: str, field: str, rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["experts", "directions", name, "independent", "95%", "predicted",
              "summed", "95%", "predicted", "independent / summed", "95%", "predicted"]  # fmt: skip
    lines = [[STATES[row["state"]], row["probe"], str(row[field]), *_cells(row)] for row in rows]
    return page.table(header, lines, left=2)


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for of in (*ARMS, "ratio"):
        mean, low, high, expected = map(_number, _flat(row[of]))
        cells += [mean, f"{low} to {high}", expected]
    return cells


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 1000 else f"{x:#.4g}"


def _finite(check: Mapping[str, Any]) -> list[str]:
    exact, finite = check["exact"], check["finite"]
    return [STATES[check["state"]], check["probe"], f"{finite:#.5g}", f"{exact:#.5g}",
            f"{finite / exact:.4f}"]  # fmt: skip


def _claims(result: Mapping[str, Any]) -> list[str]:
    rows, most = result["rows"], result["n_pert"][-1]
    at_most = [row for row in rows if row["n_pert"] == most]
    first = result["n_pert"][0]
    several = [row["ratio"] for row in at_most if row["experts"] > 1]
    return [
        *([_agreement("independent / summed is 1/N", several)] if several else []),
        _agreement(
            f"the variance falls as 1/n_pert (n_pert v at {first} over that at {most})",
            [check["law"][arm] for check in result["checks"] for arm in ARMS],
        ),
        *(
            _agreement(
                f"the variance of {probe} directions is the predicted one",
                [
                    row[arm]
                    for row in at_most
                    for arm in ARMS[: 2 if row["experts"] > 1 else 1]  # one expert is its own sum
                    if row["probe"] == probe
                ],
            )
            for probe in PROBES
        ),
    ]


def _agreement(words: str, found: Sequence[Mapping[str, Any]]) -> str:
    """What measurements say of the claim that each is its prediction."""
    halves = [np.ptp(one["interval"]) / 2 for one in found]
    away = [abs(one["mean"] - one["predicted"]) for one in found]
    inside = sum(a <= h for a, h in zip(away, halves, strict=True))
    wide = max(h / one["predicted"] for h, one in zip(halves, found, strict=True))
    # Several intervals of 95% do not all hold what they should: 1.5 times as wide, each has 99.7%.
    if any(a > 1.5 * h for a, h in zip(away, halves, strict=True)):
        verdict = "**not reproduced**"
    elif wide > 0.2:
        verdict = "**undecided**, the intervals are too wide"
    else:
        verdict = "reproduced"
    largest = max(a / one["predicted"] for a, one in zip(away, found, strict=True))
    return (
        f"- {words}: {verdict} ({inside} of {len(found)} predictions within the 95% interval; "
        f"measurements are up to {100 * largest:.1f}% from the predictions, and intervals reach "
        f"up to {100 * wide:.1f}% to each side)."
    )


def _figure(result: Mapping[str, Any]) -> Any:
    figure, (by_n_pert, by_experts, ratios) = figures.panels(13, 4.6, columns=3)
    rows = [row for row in result["rows"] if row["state"] == "trained"]
    most, largest = result["n_pert"][-1], result["experts"][-1]
    for axes, x, some in (
        (by_n_pert, "n_pert", [row for row in rows if row["experts"] == largest]),
        (by_experts, "experts", [row for row in rows if row["n_pert"] == most]),
    ):
        for (probe, arm), color in zip(
            [(probe, arm) for probe in PROBES for arm in ARMS], figures.COLORS, strict=False
        ):
            points = [row for row in some if row["probe"] == probe]
            places = [row[x] for row in points]
            style = {"color": color, "label": f"{probe}, {arm}"}
            _draw(axes, places, [row[arm] for row in points], style)
        axes.set_ylabel("relative variance")
    by_n_pert.set_title(f"Trained experts, N = {largest} (lines: predicted)")
    by_n_pert.set_xlabel("n_pert, directions of an estimate")
    by_experts.set_title(f"Trained experts, n_pert = {most}")
    for i, (state, probe) in enumerate((state, probe) for state in STATES for probe in PROBES):
        points = [
            row
            for row in result["rows"]
            if (row["state"], row["probe"], row["n_pert"]) == (state, probe, most)
        ]
        count = np.array([row["experts"] for row in points])
        mean, low, high, _ = count * np.array([_flat(row["ratio"]) for row in points]).T
        ratios.errorbar(
            count * 1.06 ** (i - 1.5), mean, _bars(mean, low, high), fmt="o", ms=4, capsize=3,
            color=figures.COLORS[4 + i], label=f"{probe}, experts {STATES[state]}",
        )  # fmt: skip
    ratios.axhline(1, color="black", lw=1)
    ratios.set_xscale("log", base=2)
    ratios.xaxis.set_major_formatter("{x:g}")
    ratios.set_title(f"n_pert = {most} (1: as predicted)")
    ratios.set_ylabel("N x independent / summed")
    for axes in (by_experts, ratios):
        axes.set_xlabel("N, experts")
    figures.legend(figure, [by_n_pert, ratios])
    return figure


def _draw(axes: Any, x: Sequence[int], found: Sequence[Mapping[str, Any]], style: Any) -> None:
    """Measured points with their intervals, and the predicted line."""
    mean, low, high, expected = np.array([_flat(one) for one in found]).T
    bars = _bars(mean, low, high)
    axes.errorbar(x, mean, bars, fmt="o", ms=4, capsize=3, **style)
    axes.plot(x, expected, color=style["color"], lw=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")


def _bars(mean: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    # One expert's ratio is 1 and so is its interval, but for rounding.
    return np.maximum([mean - low, high - mean], 0)
