"""Which (N, n_pert, B) to train for a budget and a deadline, from runs that were timed and whose
curves are kept (paper, Fig. 14).

A run shows of its setting how long an update takes, and the ensemble's validation loss after u
updates of every expert, to which a saturating power law is fitted:

    L(u) = L_inf + A (u + u_0)^-b

Under FSO each expert is alone on a device: N experts take ceil(N / D) rounds on D devices. So the
time of an update gives the updates that a deadline and a budget leave room for, and the law their
loss. The seed comes before all this, and its cost is not counted.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from soma_jax import ensemble
from soma_jax.config import Config, Run
from soma_jax.errors import SomaError
from soma_jax.files import read_json, read_json_lines
from soma_jax.stats import Interval
from soma_jax.workdir import Workdir

FEWEST = 5  # points of a curve: a law has four parameters
# Limits of a law's parameters: L_inf; L(last) - L_inf; log(u_0 / last); b.
_LOW = np.array([0.0, 0.0, math.log(1e-3), 0.05])
_HIGH = np.array([math.inf, math.inf, math.log(10.0), 3.0])
# Shapes to start from: the last two on a grid, [K] each.
_LOG_OFFSETS, _POWERS = map(
    np.ravel,
    np.meshgrid(np.linspace(_LOW[2], _HIGH[2], 30), np.geomspace(_LOW[3], _HIGH[3], 30)),
)


def step_bound(parameters: int, n_pert: int) -> float:
    """The largest rate at which a step along SPSA's estimate is sure to descend in the mean, times
    the smoothness L: eta L <= 1 / (1 + (d - 1) / n_pert) (paper, section 6)."""
    return 1 / (1 + (parameters - 1) / n_pert)


@dataclasses.dataclass(frozen=True)
class Law:
    """L(u) = floor + gain (u + offset)^-power, fitted to a curve; losses in nats/byte."""

    theta: np.ndarray  # [4]: what _LOW and _HIGH limit
    updates: np.ndarray  # [n], of the curve
    losses: np.ndarray  # [n]

    @property
    def floor(self) -> float:
        return self.theta[0]

    @property
    def offset(self) -> float:
        return self.last * math.exp(self.theta[2])

    @property
    def power(self) -> float:
        return self.theta[3]

    @property
    def gain(self) -> float:
        return self.theta[1] * (self.last + self.offset) ** self.power

    @property
    def last(self) -> float:
        """The update of the last point."""
        return self.updates.max()

    @property
    def residual(self) -> float:
        """The standard deviation of the points about the law."""
        distance = _law(self.theta, self.updates / self.last)[0] - self.losses
        return math.sqrt(distance @ distance / (len(distance) - len(self.theta)))

    def predict(self, updates: npt.ArrayLike) -> Interval:
        """The losses after so many updates, and where 95% of measurements of them would lie.

        The interval is to first order in the parameters, with the scatter of a measurement; on
        curves made from known laws, it holds what it says to four times the last point.
        """
        at, points = np.asarray(updates, float) / self.last, self.updates / self.last
        mean, slopes = _law(self.theta, at)
        spread = np.linalg.norm(slopes @ np.linalg.pinv(_law(self.theta, points)[1]), axis=-1)
        t = stats.t.ppf(0.975, len(points) - len(self.theta))
        half = t * self.residual * np.hypot(spread, 1)
        high = mean + half
        if (at > 1).any():  # no law rises
            high = np.where(at > 1, np.minimum(high, self.predict(self.last).high), high)
        return Interval(mean, np.maximum(mean - half, 0), high)


def _shape(x: Any, log_offset: Any, power: Any) -> Any:
    """((x + x_0) / (1 + x_0))^-b: of the law, at updates x in units of the last, where it is 1."""
    offset = np.exp(log_offset)
    return ((x + offset) / (1 + offset)) ** -power


def _law(theta: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses [n] at updates x [n], in units of the last, and their derivatives [n, 4]."""
    floor, excess, log_offset, power = theta
    shape, offset = _shape(x, log_offset, power), math.exp(log_offset)
    by_offset = -power * excess * shape * offset * (1 / (x + offset) - 1 / (1 + offset))
    by_power = -excess * shape * np.log((x + offset) / (1 + offset))
    slopes = np.stack([np.ones_like(x), shape, by_offset, by_power], axis=-1)
    return floor + excess * shape, slopes


def fit(updates: npt.ArrayLike, losses: npt.ArrayLike, name: str) -> Law:
    """Fits the law by bounded least squares, from the best of a grid of shapes on.

    Args:
      updates: [n], of every expert; a curve of several runs has some more than once.
      losses: [n], nats/byte.
      name: of the curve, for the error.

    Raises:
      SomaError: fewer than five points, or a loss that is not finite.
    """
    updates, losses = np.asarray(updates, float), np.asarray(losses, float)
    if (found := len(np.unique(updates))) < FEWEST:
        raise SomaError(
            f"{name}: its curve has {found} points, and a fit needs {FEWEST}: train it for at "
            "least as many updates"
        )
    if not np.isfinite(losses).all():
        raise SomaError(f"{name}: its curve has a loss that is not finite; leave this run out")
    x = updates / updates.max()
    # For each shape, the law is linear in the other two parameters.
    shape = _shape(x[:, None], _LOG_OFFSETS, _POWERS)
    centered = shape - shape.mean(0)
    excess = np.maximum(losses @ centered / np.square(centered).sum(0), 0)
    floor = np.maximum(losses.mean() - excess * shape.mean(0), 0)
    best = np.square(losses[:, None] - floor - excess * shape).sum(0).argmin()
    start = [floor[best], excess[best], _LOG_OFFSETS[best], _POWERS[best]]
    solved = optimize.least_squares(
        lambda theta: _law(theta, x)[0] - losses,
        np.clip(start, _LOW, _HIGH),
        jac=lambda theta: _law(theta, x)[1],
        bounds=(_LOW, _HIGH),
        x_scale="jac",
        xtol=1e-12,
        ftol=1e-12,
        gtol=1e-12,
    )
    return Law(solved.x, updates, losses)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What runs of one setting, which differ in their random seed alone, have shown."""

    name: str
    config: Config
    seconds: float  # of a device, for an update of one expert; compilation excluded
    updates: np.ndarray  # [n], of every expert, at each look at the ensemble
    losses: np.ndarray  # [n], its validation losses, nats/byte
    scored: Any  # the text these are of

    @property
    def operations(self) -> float:
        """Of an update of one expert: 2 T n_pert B F_N (paper, section 5), and the delta rule's."""
        per_byte = self.config.expert_shape.operations_per_byte
        return self.config.expert.byte_forwards_per_update * per_byte


def read(path: Path) -> Measured:
    """What a finished run of launch/main.py has shown.

    Raises:
      SomaError: this is no such run, or a file of it is damaged or holds too little.
    """
    workdir = Workdir(path)
    config = workdir.read_config()
    if not workdir.summary.exists():
        raise SomaError(f"{path} is not finished: run the command that started it again")
    curve = read_json_lines(workdir.curve) if workdir.curve.exists() else []
    # Experts train in step, so the first one's times are those of all; each device that they are
    # on, or that has a part of their directions, is busy all the time.
    lines = read_json_lines(workdir.expert(0) / "metrics.jsonl")
    try:
        devices = read_json(workdir.summary)["devices"]
        fingerprint = read_json(workdir.corpora)["valid"]
        points = [(p["update"], p["nats_per_byte"]) for p in curve if p["stage"] == "experts"]
        times = np.array([(line["update"], line["seconds"]) for line in lines]).reshape(-1, 2)
    except (KeyError, TypeError) as error:
        raise SomaError(f"{path}: its files lack {error}; they are not of this version") from error
    if len(times) < 2:
        raise SomaError(f"{path}: two lines of experts/000/metrics.jsonl are needed to time it")
    # The first line comes after the first update, and so after compilation.
    wall = float(np.median(np.diff(times[:, 1]) / np.diff(times[:, 0])))
    used = ensemble.make_mesh(config.experts, config.expert, list(range(devices))).size
    updates, losses = np.array(points, float).reshape(-1, 2).T
    return Measured(
        name=str(path),
        config=config,
        seconds=wall * used / config.experts,
        updates=updates,
        losses=losses,
        scored=(fingerprint, config.evaluation.documents, config.evaluation.seed),
    )


def by_setting(runs: Sequence[Measured]) -> list[Measured]:
    """Runs that differ in their random seed alone, taken together.

    Raises:
      SomaError: the losses are not of the same text.
    """
    groups: dict[Config, list[Measured]] = {}
    for run in runs:
        if run.scored != runs[0].scored:
            raise SomaError(
                f"{runs[0].name} and {run.name} were not validated on the same text: their losses "
                "cannot be compared"
            )
        groups.setdefault(dataclasses.replace(run.config, random_seed=0, run=Run()), []).append(run)
    return [
        dataclasses.replace(
            group[0],
            name=os.path.commonpath([run.name for run in group]),
            seconds=float(np.median([run.seconds for run in group])),
            updates=np.concatenate([run.updates for run in group]),
            losses=np.concatenate([run.losses for run in group]),
        )
        for group in groups.values()
    ]


@dataclasses.dataclass(frozen=True)
class Limits:
    """A deadline on some devices, and budgets; infinite where there is none."""

    devices: int = 1
    seconds: float = math.inf  # wall-clock
    operations: float = math.inf  # arithmetic, in the products of training, all experts
    device_seconds: float = math.inf  # all devices


@dataclasses.dataclass(frozen=True)
class Option:
    """What a setting would reach within limits."""

    name: str
    experts: int
    n_pert: int
    sequences: int
    seconds_per_update: float  # of a device, for one expert
    updates: int  # of each expert; 0 where not one fits
    seconds: float  # wall-clock
    device_seconds: float
    operations: float
    bound: float  # of the rate times the smoothness (`step_bound`)
    residual: float  # of the law, nats/byte
    measured: Sequence[float]  # updates of the first and the last point of the curve
    loss: float  # predicted, nats/byte
    interval: Sequence[float]  # 95%


def seconds_of_round(setting: Measured, devices: int) -> float:
    """Wall-clock seconds for an update of all N experts, each alone on one of some devices."""
    return -(-setting.config.experts // devices) * setting.seconds


def updates_within(setting: Measured, limits: Limits) -> int:
    """Updates of each of N experts that there is room for."""
    experts = setting.config.experts
    return math.floor(
        min(
            limits.seconds / seconds_of_round(setting, limits.devices),
            limits.device_seconds / (experts * setting.seconds),
            limits.operations / (experts * setting.operations),
        )
    )


def option(setting: Measured, law: Law, limits: Limits) -> Option:
    """What a setting would reach within limits."""
    config, updates = setting.config, updates_within(setting, limits)
    loss, *interval = map(float, law.predict(updates))
    return Option(
        name=setting.name,
        experts=config.experts,
        n_pert=config.expert.n_pert,
        sequences=config.expert.sequences,
        seconds_per_update=setting.seconds,
        updates=updates,
        seconds=updates * seconds_of_round(setting, limits.devices),
        device_seconds=config.experts * updates * setting.seconds,
        operations=config.experts * updates * setting.operations,
        bound=step_bound(config.expert_shape.body_parameters, config.expert.n_pert),
        residual=law.residual,
        measured=[float(law.updates.min()), float(law.last)],
        loss=loss,
        interval=interval,
    )


def chosen(options: Sequence[Option]) -> Option:
    """The option with the lowest predicted loss.

    Raises:
      SomaError: no option has an update within the limits.
    """
    possible = [o for o in options if o.updates]
    if not possible:
        raise SomaError(
            "not one update of any of the settings is within the limits: an update of an expert "
            f"takes {min(o.seconds_per_update for o in options):.3g} device-seconds or more. Raise "
            "the deadline or the budget"
        )
    return min(possible, key=lambda o: o.loss)


HEADER = ("", "N", "n_pert", "B", "s an update", "eta L at most", "updates", "measured to",
          "seconds", "device-seconds", "operations", "residual", "nats/byte", "95% interval",
          "extrapolates")  # fmt: skip


def cells(option: Option) -> list[str]:
    """An option's line of a table with HEADER."""
    predicted = ["no update fits", "", ""]
    if option.updates:
        low, high = option.interval
        predicted = [f"{option.loss:.3f}", f"{low:.3f} to {high:.3f}", _beyond(option)]
    return [
        *(option.name, str(option.experts), str(option.n_pert), str(option.sequences)),
        *(f"{option.seconds_per_update:.3g}", f"{option.bound:.2g}", f"{option.updates:,}"),
        *(f"{option.measured[1]:,.0f}", f"{option.seconds:,.1f}"),
        *(f"{option.device_seconds:,.1f}", f"{option.operations:.3g}", f"{option.residual:.4f}"),
        *predicted,
    ]


def _beyond(option: Option) -> str:
    """How far a prediction is from what was measured, if it is not of that."""
    first, last = option.measured
    if option.updates > last:
        return f"x {option.updates / last:.2f}"
    return "before the first look" if option.updates < first else ""


def verdict(options: Sequence[Option]) -> str:
    """The choice in words: how sure it is, and what it rests on."""
    best = chosen(options)
    low, high = best.interval
    words = [
        f"Choose {best.name} (N = {best.experts}, n_pert = {best.n_pert}, B = {best.sequences}): "
        f"{best.updates:,} updates of each expert in {best.seconds:,.1f} s, predicted "
        f"{best.loss:.3f} nats/byte (95% interval {low:.3f} to {high:.3f})."
    ]
    close = [o.name for o in options if o is not best and o.updates and o.interval[0] <= high]
    if close:
        words.append(f"Not told apart from it, since the intervals meet: {'; '.join(close)}.")
    if beyond := _beyond(best):
        first, last = best.measured
        words.append(
            f"This extrapolates ({beyond}; measured: {first:,.0f} to {last:,.0f} updates)."
        )
    return " ".join(words)


def caveats(settings: Sequence[Measured]) -> list[str]:
    """What a plan does not say."""
    words = []
    if any(s.config.seed.updates for s in settings):
        words.append("The seed is taken as given: its cost is not counted.")
    if falling := [s.name for s in settings if s.config.expert.decay_to < 1]:
        words.append(
            f"The rate falls along a cosine to the end of a run ({'; '.join(falling)}): a run of "
            "another length has another curve; config.expert.decay_to=1 keeps the rate."
        )
    return words


def first_part(setting: Measured, share: float) -> Measured:
    """The setting as a run that was stopped early shows it: a share of the looks at the curve."""
    looks = np.unique(setting.updates)
    seen = setting.updates <= looks[math.ceil(share * len(looks)) - 1]
    return dataclasses.replace(setting, updates=setting.updates[seen], losses=setting.losses[seen])


def hold_out(setting: Measured, share: float) -> dict[str, Any]:
    """How well the first part of a curve predicts the rest, which the fit does not see.

    Returns:
      `updates` [m] and `losses` [m] held out, as measured; `predicted` [m] and `interval` [m, 2];
      `last`, the newest measured loss before them: what is known without a law.
    """
    start = first_part(setting, share)
    law = fit(start.updates, start.losses, setting.name)
    rest = setting.updates > law.last
    predicted, *interval = law.predict(setting.updates[rest])
    return {
        "updates": setting.updates[rest].tolist(),
        "losses": setting.losses[rest].tolist(),
        "predicted": predicted.tolist(),
        "interval": np.stack(interval, 1).tolist(),
        "last": float(setting.losses[setting.updates == law.last].mean()),
    }
