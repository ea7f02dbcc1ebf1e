"""Independent or summed losses (paper, Fig. 4, Appendix J).

Two arms start from the same trained experts with the same Adam states, and see the same windows and
directions. In one, expert e's directions are weighted by the difference of its own loss, as in
SOMA; in the other, by the difference of the sum of the experts' losses, as if the ensemble were one
model. Both estimates have the same mean; the other experts' differences are noise to expert e, and
the relative variance of the summed estimate is N times as large.
The independent arm is how the run whose experts these are would have gone on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from soma_jax import ensemble, expert, model, optimizers, probes, randomness, recipe, training
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Config, Stage, build, field
from soma_jax.config import resolve as resolve_run
from soma_jax.errors import SomaError
from soma_jax.experiments import output, pieces
from soma_jax.experiments.gradient_variance import ARMS, PROBES, activity_of, predicted
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.progress import StageProgress, console
from soma_jax.report import figures, page
from soma_jax.spsa import spsa
from soma_jax.stats import t_interval
from soma_jax.workdir import Workdir

_PAPER = (0.0362, 0.0339, 0.0353)  # summed - independent after 1,000 updates, three seeds


@dataclasses.dataclass(frozen=True)
class Settings:
    """The fields of configs/experiments/independent_loss.py."""

    random_seeds: tuple  # a run, and then both arms, for each
    run: Config  # of launch/main.py: the run whose experts, with their stage, both arms go on from
    updates: int = field(1000, at_least=1)  # of each arm
    observe_every: int = field(100, at_least=1)  # updates between looks at the validation losses
    variance_every: int = field(500, at_least=1)  # and at the variances; a multiple of the other
    variance_repeats: int = field(24, at_least=2)  # estimates that a variance is the mean of


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    settings: Settings = build(Settings, values, "config")
    output.check_seeds(settings.random_seeds)
    try:
        resolve_run(ml_collections.ConfigDict(values["run"]))
    except SomaError as error:
        raise SomaError(f"config.run: {error}") from error
    if settings.run.experts < 2:
        raise SomaError("config.run.experts must be at least 2: one has nothing to sum")
    needed = {"estimator": "spsa", "parameters": "body", "own_batch": False, "head_sequences": 0,
              "carry": False, "decay_to": 1.0}  # fmt: skip
    for name, value in needed.items():
        if (given := getattr(settings.run.expert, name)) != value:
            raise SomaError(
                f"config.run.expert.{name} must be {value!r}, not {given!r}: both arms "
                "train the body by SPSA on shared batches at a constant rate, E frozen"
            )
    if settings.run.expert.probe not in PROBES:
        raise SomaError(
            f"config.run.expert.probe must be one of {', '.join(PROBES)}, not "
            f"{settings.run.expert.probe!r}: the variance of others is not predicted here"
        )
    if settings.variance_every % settings.observe_every:
        raise SomaError(
            f"config.variance_every={settings.variance_every} must be a multiple of "
            f"config.observe_every={settings.observe_every}"
        )
    return settings


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains what is not trained yet, measures, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, a directory of other settings, or a loss that is not finite.
      Interrupted: on SIGTERM or Ctrl-C; called again, it goes on.
    """
    stage = settings.run.expert
    compiled = Compiled(
        *_over_devices(stage, partial(update, stage=stage), losses, partial(variances, stage=stage))
    )
    points = []
    with Interruptions():
        pieces.adopt(directory, dataclasses.asdict(settings))
        for seed in settings.random_seeds:
            console.print(f"random seed {seed}: the experts that both arms start from")
            workdir = Workdir(directory / "runs" / str(seed))
            config = dataclasses.replace(settings.run, random_seed=seed)
            if not workdir.summary.exists():
                recipe.run(config, workdir)
            before = start(recipe.load(workdir.path)[1], stage)
            trainees = _trainees(config, workdir, directory)
            console.print(f"random seed {seed}: both arms")
            home = directory / "arms" / str(seed)
            points.append(_train_arms(settings, home, compiled, before, trainees, seed))
    result = output.circumstances(command, settings.random_seeds) | {
        "experts": settings.run.experts,
        "parameters": settings.run.expert_shape.body_parameters,
        "stage": dataclasses.asdict(stage),
        "updates": settings.updates,
        "before": {"seed": settings.run.seed.updates, "experts": stage.updates},
        "byte_forwards": {
            "of both arms": len(ARMS) * settings.run.experts * settings.updates
            * stage.byte_forwards_per_update,
            "before": settings.run.seed.updates * settings.run.seed.byte_forwards_per_update
            + settings.run.experts * stage.updates * stage.byte_forwards_per_update,
        },
        "variance_repeats": settings.variance_repeats,
        "curve": [
            {"update": update, "distance": _by_arm(points, update, "distance")}
            | {
                arm: np.mean(values, axis=1).tolist()
                for arm, values in _by_arm(points, update, "losses").items()
            }
            for update in points[0]
        ],
        "own_shards": _by_arm(points, settings.updates, "losses"),
        "variances": [
            {
                "update": update,
                "measured": _by_arm(points, update, "measured"),
                "predicted": _by_arm(points, update, "predicted"),
            }
            for update, point in points[0].items()
            if "measured" in point
        ],
    }  # fmt: skip
    _write(directory, result)
    return result


def _trainees(config: Config, workdir: Workdir, directory: Path) -> list[training.Trainee]:
    """A run's experts with their shards, streams and keys, as that run has trained them."""
    corpus = recipe.open_corpus(config.data, config.data.train, workdir.store("train"))
    assignment = np.load(workdir.assignment, allow_pickle=False)
    params = model.init(jax.random.key(0), config.expert_shape)  # not what they start from here
    return [
        training.trainee(
            directory, params, config.expert, corpus, np.flatnonzero(assignment == i),
            random_seed=config.random_seed, kind="expert", index=i,
            validation_share=config.cluster.validation_share,
        )
        for i in range(config.experts)
    ]  # fmt: skip


class Compiled(NamedTuple):
    """Functions of the arms [2, N, ...], which are split over devices."""

    update: Callable
    losses: Callable
    variances: Callable


def _over_devices(stage: Stage, *functions: Callable) -> list[Callable]:
    """Functions of an ensemble as compiled ones of both arms, each on a device if there are two."""
    mesh = ensemble.make_mesh(len(ARMS), stage)
    return [
        jax.jit(
            jax.shard_map(
                lambda *arms, function=function: lax.map(lambda one: function(*one), arms),
                mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False,
            )
        )
        for function in functions
    ]  # fmt: skip


def _train_arms(
    settings: Settings,
    home: Path,
    compiled: Compiled,
    before: expert.ExpertState,
    trainees: Sequence[training.Trainee],
    random_seed: int,
) -> dict[int, dict[str, Any]]:
    """Trains both arms from the same experts; what was seen, by updates done."""
    stage, summed = settings.run.expert, np.array([arm == "summed" for arm in ARMS])

    def both(x: Any) -> Any:
        """The same for both arms."""
        return jax.tree.map(lambda x: np.stack([x] * len(ARMS)), x)

    before = both(before)
    keys = jnp.stack([jnp.stack([t.key for t in trainees])] * len(ARMS))
    validation = both(np.stack([t.validation for t in trainees]))

    def windows(done: int) -> np.ndarray:
        """What each expert sees at the next update: the run that it is of has not seen it."""
        return both(np.stack([t.stream[stage.updates + done] for t in trainees]))

    def by_arm(x: Any) -> dict[str, Any]:
        return dict(zip(ARMS, np.asarray(x).tolist(), strict=True))

    def look(states: expert.ExpertState, done: int) -> dict[str, Any]:
        scored = compiled.losses(states, validation)
        if not np.isfinite(scored).all():
            raise SomaError(
                f"a validation loss after update {done} of the arms is not finite: try a lower "
                "config.run.expert.learning_rate and eps in a new --workdir"
            )
        point = {"losses": by_arm(scored), "distance": by_arm(_distances(states, before))}
        if done % settings.variance_every == 0 or done == settings.updates:
            # Both arms' estimates at the same experts, the independent arm's, along the same z.
            experts = both(jax.tree.map(lambda x: np.asarray(x)[0], states))
            repeats = [
                randomness.key(random_seed, "variance", done, repeat)
                for repeat in range(settings.variance_repeats)
            ]
            repeats_of_both = jnp.stack([jnp.stack(repeats)] * len(ARMS))
            found = compiled.variances(experts, windows(done), repeats_of_both, summed)
            for name, values in zip(("measured", "predicted"), found, strict=True):
                point[name] = by_arm(values)
        return point

    checkpoints = Checkpoints(home / "checkpoints")
    done, states = checkpoints.newest(before) or (0, before)
    points: dict[int, dict[str, Any]] = {}
    work = len(ARMS) * settings.run.experts * stage.byte_forwards_per_update
    with StageProgress("arms", settings.updates, done, work) as progress:
        for until in [*range(0, settings.updates, settings.observe_every), settings.updates]:
            if until > done:
                for already in range(done, until):
                    states = compiled.update(states, windows(already), keys, summed)
                checkpoints.save(until, states)
                done = until
            path = home / "points" / f"{until:08d}.json"
            if not path.exists():  # then `until` is `done`: a point is written before going on
                write_json(path, look(states, done))
                progress(done, float(np.mean(read_json(path)["losses"][ARMS[0]])))
            points[until] = read_json(path)
    return points


def _by_arm(
    points: Sequence[Mapping[int, Mapping[str, Any]]], update: int, name: str
) -> dict[str, list[Any]]:
    """A list over the random seeds for each arm."""
    return {arm: [of_seed[update][name][arm] for of_seed in points] for arm in ARMS}


def start(states: Sequence[expert.ExpertState], stage: Stage) -> expert.ExpertState:
    """A run's experts, stacked [N, ...], with their Adam states under the stage's own rate.

    An arm makes its estimate before it descends, and `optimizers.head` is the body's chain without
    an estimator.
    """
    chain = optimizers.head(stage)
    return ensemble.stack(
        [
            state.replace(
                body_optimizer=chain.init(state.params["body"])._replace(
                    inner_state=state.body_optimizer.inner_state[1:]
                )
            )
            for state in states
        ]
    )


def estimates(
    params: model.Params, windows: jax.Array, keys: jax.Array, summed: jax.Array, stage: Stage
) -> Any:
    """Estimates of the gradients of an ensemble's bodies [N, ...], by the same directions in both
    arms. Independent: `spsa` of each expert's loss. Summed: `spsa` of one model, all experts.

    Args:
      params: of the experts [N, ...].
      windows: a batch for each, uint8 [N, B, T + 1].
      keys: of each expert's directions [N].
      summed: bool [], which of the two.
      stage: settings.
    """
    law = probes.LAWS[stage.probe]
    chunk, block = expert.chunk_and_block(stage)

    def losses_of(body: Any, head: jax.Array, some: jax.Array) -> jax.Array:
        return model.sequence_losses({"head": head, "body": body}, some, block)

    def estimate(law: probes.ProbeLaw, body: Any, key: jax.Array, value_fn: Callable) -> Any:
        tx = spsa(stage.n_pert, stage.eps, law=law, chunk=chunk)
        return tx.update(body, tx.init(body), body, value_fn=value_fn, key=key)[0]

    def independent(body: Any, head: jax.Array, windows: jax.Array, keys: jax.Array) -> Any:
        return lax.map(
            lambda one: estimate(
                law, one[0], one[3], lambda body, _: losses_of(body, one[1], one[2])
            ),
            (body, head, windows, keys),
        )

    def joint(body: Any, head: jax.Array, windows: jax.Array, keys: jax.Array) -> Any:
        # The experts one after the other, as in `independent`: vmapped they are far slower.
        return estimate(
            jax.vmap(law, in_axes=(0, None, 0)), body, keys,
            lambda body, _: lax.map(lambda one: losses_of(*one), (body, head, windows)).sum(0),
        )  # fmt: skip

    return lax.cond(summed, joint, independent, params["body"], params["head"], windows, keys)


def update(
    states: expert.ExpertState,
    windows: jax.Array,
    keys: jax.Array,
    summed: jax.Array,
    *,
    stage: Stage,
) -> expert.ExpertState:
    """One optimizer step of each expert of an ensemble; E is frozen.

    Args:
      states: of the experts (`start`).
      windows: a batch for each, uint8 [N, B, T + 1].
      keys: of each [N]; the update's own is folded in here.
      summed: bool [], whether an expert's directions are weighted by all experts' losses.
      stage: settings.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, states.update)
    estimate = estimates(states.params, windows, keys, summed, stage)

    def descend(state: expert.ExpertState, estimate: Any) -> expert.ExpertState:
        head, body = state.params["head"], state.params["body"]
        step, optimizer = optimizers.head(stage).update(estimate, state.body_optimizer, body)
        return state.replace(
            params={"head": head, "body": optax.apply_updates(body, step)},
            body_optimizer=optimizer,
            update=state.update + 1,
        )

    return jax.vmap(descend)(states, estimate)


def losses(states: expert.ExpertState, windows: jax.Array) -> jax.Array:
    """Mean loss [N] of each expert on windows of its own [N, W, T + 1], nats/byte."""
    return jax.vmap(lambda state, some: model.sequence_losses(state.params, some).mean())(
        states, windows
    )


def variances(
    states: expert.ExpertState,
    windows: jax.Array,
    keys: jax.Array,
    summed: jax.Array,
    *,
    stage: Stage,
) -> tuple[jax.Array, jax.Array]:
    """Relative variance of an ensemble's estimate around its mean, on one batch of each expert:
    measured with each key [R], and as predicted for a small radius []. Arguments as `update`'s."""

    def gradient_of(one: tuple[model.Params, jax.Array]) -> jax.Array:
        params, some = one

        def loss(body: Any) -> jax.Array:
            return model.sequence_losses(params | {"body": body}, some).mean()

        return ravel_pytree(jax.grad(loss)(params["body"]))[0]

    gradient = lax.map(gradient_of, (states.params, windows))
    q = activity_of(stage.probe, jax.tree.map(lambda x: x[0], states.params["body"]))

    def squared_error(key: jax.Array) -> jax.Array:
        of_experts = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(gradient)))
        estimate = estimates(states.params, windows, of_experts, summed, stage)
        flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])(estimate)
        return jnp.square(flat - q * gradient).sum()

    measured = lax.map(squared_error, keys) / jnp.square(gradient).sum()
    joined = jnp.where(summed, len(gradient), 1)
    return measured, predicted(gradient, q, stage.n_pert, joined)


def _distances(states: expert.ExpertState, starts: expert.ExpertState) -> np.ndarray:
    """|theta - start| [A] over all bodies of each ensemble."""
    moved = jax.tree.map(
        lambda x, y: np.square(np.asarray(x) - y).reshape(len(y), -1).sum(1),
        states.params["body"], starts.params["body"],
    )  # fmt: skip
    return np.sqrt(sum(jax.tree.leaves(moved)))


def differences(result: Mapping[str, Any]) -> np.ndarray:
    """Loss of the summed arm less the independent one's, mean over experts: [points, seeds]."""
    return np.array([np.subtract(p["summed"], p["independent"]) for p in result["curve"]])


def ratios(result: Mapping[str, Any], which: str = "measured") -> np.ndarray:
    """Relative variance of the summed estimate over the independent one's: [points, seeds]."""
    of = {
        arm: np.array([point[which][arm] for point in result["variances"]], float) for arm in ARMS
    }
    if which == "measured":
        of = {arm: values.mean(-1) for arm, values in of.items()}
    return of["summed"] / of["independent"]


def _write(directory: Path, result: dict[str, Any]) -> None:
    columns = ["random_seed", "update", *ARMS, "difference"]
    rows = [
        [seed, point["update"], *(point[arm][i] for arm in ARMS), difference[i]]
        for i, seed in enumerate(result["random_seeds"])
        for point, difference in zip(result["curve"], differences(result).tolist(), strict=True)
    ]
    output.write(
        directory, "independent_loss", result, markdown(result), (columns, rows), _figure(result)
    )


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: losses of both arms, variances, and what of the paper came out."""
    stage, count, updates = result["stage"], result["experts"], result["updates"]
    before, spent = result["before"], result["byte_forwards"]
    last, ratio = result["curve"][-1], ratios(result)
    ends = differences(result)[-1]
    difference, ratio_interval = t_interval(ends), t_interval(ratio.ravel())
    soon, end = (
        np.mean(point["distance"]["summed"]) / np.mean(point["distance"]["independent"])
        for point in (result["curve"][1], last)
    )
    rows = [
        [
            str(seed),
            f"{np.mean(result['curve'][0]['independent'][i]):.4f}",
            *(f"{last[arm][i]:.4f}" for arm in ARMS),
            f"{ends[i]:+.4f}",
        ]
        for i, seed in enumerate(result["random_seeds"])
    ]
    measured = [
        [
            f"{point['update']:,}",
            *(
                f"{np.mean(point[which][arm]):.0f}"
                for arm in ARMS
                for which in ("measured", "predicted")
            ),
            ", ".join(f"{x:.2f}" for x in of_seeds),
            f"{expected.mean():.2f}",
        ]
        for point, of_seeds, expected in zip(
            result["variances"], ratio, ratios(result, "predicted"), strict=True
        )
    ]
    low, high = ratio_interval.low, ratio_interval.high
    verdict = "reproduced" if low <= count <= high else "**not reproduced**"
    return "\n\n".join(
        [
            f"`{result['command']}`",
            f"N = {count} experts of {result['parameters']:,} parameters, E frozen, of a run of "
            f"{before['seed']:,} updates of the seed and {before['experts']:,} of each; then "
            f"{updates:,} updates of both arms: n_pert = {stage['n_pert']}, B = "
            f"{stage['sequences']}, T = {stage['window']}, rate {stage['learning_rate']:g}, eps "
            f"{stage['eps']:g}, {stage['probe']} directions. Each random seed: "
            f"{spent['before'] / 1e6:.1f}M byte-forwards, then {spent['of both arms'] / 1e6:.1f}M "
            f"in both arms; {result['devices']} x {result['device']}, {result['date']}.",
            "**Validation loss of each expert on its own shard**, nats/byte, mean over experts; "
            "independent is better where the difference is positive",
            page.table(
                ["random seed", "at the start", *ARMS, "summed - independent"], rows
            ),
            f"Mean difference {difference.mean:+.4f} nats/byte, 95% {difference.low:+.4f} to "
            f"{difference.high:+.4f} over seeds. The paper's, at n_pert = B = 64 and T = 1,024: "
            f"{', '.join(f'{x:+.4f}' for x in _PAPER)}.",
            "**Relative variance of the estimate** around its mean, mean over seeds, at the "
            "independent arm's experts",
            page.table(
                ["update", "independent", "predicted", "summed", "predicted",
                 "summed / independent, each seed", "predicted"],
                measured,
            ),
            f"Ratio {ratio_interval.mean:.2f}, 95% {low:.2f} to {high:.2f} over the seeds and "
            f"updates ({ratio.size} ratios, {ratio.min():.2f} to {ratio.max():.2f}; "
            f"{result['variance_repeats']} repeats each). The paper's: 4.02, and 3.19 to 4.64 over "
            "training.",
            "Adam divides an estimate by the root mean square of those before, which is nearly all "
            "noise. At first that is of independent losses alone, and the summed arm's steps are "
            f"longer: after {result['curve'][1]['update']:,} updates it is {soon:.2f} times as far "
            "from the start as the independent arm. As its second moments grow the steps shorten "
            f"(at the end {end:.2f} times as far); what is left of a variance N times as large is "
            "that the part of a step along the gradient is smaller by the square root of N.",
            "**The paper's claims, here**",
            "\n".join(
                [
                    output.claim(
                        f"independent losses end lower ({(ends > 0).sum()} of {ends.size} seeds; "
                        "summed - independent)",
                        difference,
                    ),
                    f"- the summed estimate has N = {count} times the relative variance: "
                    f"{verdict} ({ratio_interval.mean:.2f}, "
                    f"95% {low:.2f} to {high:.2f}).",
                ]
            ),
        ]
    ) + "\n"  # fmt: skip


def _figure(result: Mapping[str, Any]) -> Any:
    figure, (curves, difference, ratio) = figures.panels(13, 4.6, columns=3)
    updates = [point["update"] for point in result["curve"]]
    for arm, color in zip(ARMS, figures.COLORS, strict=False):
        y = np.array([point[arm] for point in result["curve"]])
        curves.plot(updates, y.mean(1), color=color, marker=".", label=arm)
        curves.fill_between(updates, y.min(1), y.max(1), color=color, alpha=0.2, lw=0)
    curves.set_ylabel("validation nats/byte, mean over experts")
    curves.set_title("Both arms (band: random seeds)")
    at = [point["update"] for point in result["variances"]]
    for seed, color, of_seed, its_ratio in zip(
        result["random_seeds"], figures.COLORS[2:], differences(result).T, ratios(result).T,
        strict=False,
    ):  # fmt: skip
        style: Any = {"color": color, "marker": ".", "label": f"random seed {seed}"}
        difference.plot(updates, of_seed, **style)
        ratio.plot(at, its_ratio, **style)
    difference.axhline(0, color="black", lw=0.8)
    difference.set_ylabel("summed - independent, nats/byte")
    difference.set_title("Above 0: independent is better")
    count = result["experts"]
    ratio.axhline(count, color="black", ls="--", lw=1.2, label=f"predicted: N = {count}")
    ratio.set_ylim(bottom=0)
    ratio.set_ylabel("summed / independent")
    ratio.set_title("Relative variance of the estimate")
    for axes in (curves, difference, ratio):
        axes.set_xlabel("updates of the arms")
    figures.legend(figure, [curves, ratio])
    return figure
