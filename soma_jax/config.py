"""What can be configured, with units, defaults (the paper's where it gives one) and limits.

A config file (configs/*.py) starts from `default_config()` and sets what differs; the command line
overrides any field (`--config.expert.updates=500`); `resolve` turns the result into frozen
dataclasses and refuses what is out of range before anything is read or compiled.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_collections
import numpy as np

from soma_jax import probes
from soma_jax.errors import SomaError
from soma_jax.estimators import ACTIVITY, ESTIMATORS
from soma_jax.model import ExpertConfig


def field(default: Any, **limits: float) -> Any:
    """A field with limits by name: at_least, above, below, at_most."""
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True)
class Model:
    """The expert's shape (paper, section 1)."""

    width: int = field(32, at_least=1)  # d
    blocks: int = field(2, at_least=1)  # D
    embedding: int = field(32, at_least=1)  # d_E, columns of the byte matrix E
    recurrence: str = "lstm"  # or "gru", the EGGROLL control's
    tied: bool = True  # E embeds and decodes; else it decodes, and the body holds an embedding


@dataclasses.dataclass(frozen=True)
class Data:
    """Corpora: a file, a directory, a glob, "embedded:train|valid|test" or "wikitext103:test"."""

    train: str = "embedded:train"
    valid: str = "embedded:valid"  # tracks the ensemble while it trains; never trained on
    test: str = "embedded:test"
    text_field: str = "text"  # field or column of .jsonl and .parquet files
    chunk_bytes: int = field(1024, at_least=1)  # the unit of clustering


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Text features and balanced spherical k-means (paper, section 3)."""

    shards: str = (
        "semantic"  # or, as controls: "random" parts, or "iid", all chunks for each expert
    )
    sample_chunks: int = field(400_000, at_least=1)  # the router is fitted on as many chunks
    max_features: int = field(50_000, at_least=1)  # TF-IDF vocabulary
    min_df: int = field(5, at_least=1)  # a term must occur in this many sampled chunks
    components: int = field(128, at_least=1)  # of the truncated SVD
    validation_share: float = field(0.01, above=0, below=1)  # of a shard, for the plateau rule


@dataclasses.dataclass(frozen=True)
class Stage:
    """How an expert is trained; the seed and the experts each have one."""

    updates: int = field(1000, at_least=0)  # optimizer steps
    estimator: str = "spsa"  # a name in soma_jax.estimators.ESTIMATORS
    parameters: str = "body"  # what it estimates the gradient of; "all" is E, too
    n_pert: int = field(64, at_least=1)  # directions an update; windows with noise in them
    probe: str = "sparse"  # law of SPSA's directions: a name in soma_jax.probes.LAWS
    rank: int = field(1, at_least=1)  # of EGGROLL's directions
    credit: int = field(1, at_least=1)  # bytes that noise in activities is credited with
    sequences: int = field(64, at_least=1)  # B: windows a direction sees
    own_batch: bool = False  # each direction sees B windows of its own; the paper's share them
    share: int = field(1, at_least=1)  # with own_batch: neighbouring directions that see the same
    window: int = field(1024, at_least=1)  # T: predicted bytes a window
    carry: bool = False  # windows are streams: each goes on, with its state, at the next update
    head_sequences: int = field(0, at_least=0)  # windows of E's delta rule; 0 freezes E
    whitening: float = field(0.0, at_least=0)  # damping, relative to the mean; 0: no whitening
    learning_rate: float = field(1e-3, at_least=0)  # 0 leaves the parameters as they are
    head_rate: float = field(1.0, at_least=0)  # E's learning rate as a multiple of the body's
    eps: float = field(1e-3, above=0)  # probe radius, of weights or activities
    decay_to: float = field(1.0, above=0, at_most=1)  # cosine: what is left of both at the end
    floor: float = field(1e-5, at_least=0)  # neither the rate nor eps is decayed below this
    patience: int = field(1000, at_least=1)  # updates without improvement before both are halved
    optimizer: str = "adam"  # or "sgd": the estimate times the rate
    weight_decay: float = field(1e-4, at_least=0)  # coupled: added to the estimate
    b1: float = field(0.9, at_least=0, below=1)  # Adam
    b2: float = field(0.999, at_least=0, below=1)
    adam_eps: float = field(1e-8, above=0)
    validate_every: int = field(50, at_least=1)  # updates between looks at the expert's validation
    validation_windows: int = field(64, at_least=1)  # at most, from the shard's validation part

    @property
    def windows_per_update(self) -> int:
        """Windows an update reads: B, or B for each `share` of the directions."""
        return self.sequences * (self.n_pert // self.share if self.own_batch else 1)

    @property
    def byte_forwards_per_update(self) -> int:
        """Of the estimator (SPSA: 2 n_pert B T), and the unperturbed forwards of the delta rule and
        of carried states. A backward pass counts as the two forwards whose operations it has."""
        windows = ESTIMATORS[self.estimator].forwards(self) + self.head_sequences
        return (windows + self.carry * self.windows_per_update) * self.window


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scoring protocol (paper, section 4)."""

    documents: int = field(4096, at_least=1)  # test documents, one window each
    seed: int = field(0, at_least=0, below=2**32)  # of the draw of windows; the same for all runs
    wikitext: bool = True  # also score the WikiText-103 test text
    bootstrap: int = field(10_000, at_least=1)  # draws for the 95% intervals


@dataclasses.dataclass(frozen=True)
class Run:
    """How a run is carried out; may differ when it is resumed, and from job to job."""

    only: str = ""  # the experts that this job trains, such as "0,3" or "0-63,70"; "" is all
    host_devices: int = field(0, at_least=0)  # CPU devices; 0: one for each core
    chunk: int = field(0, at_least=0)  # directions evaluated at once; 0: what suits the device
    log_every: int = field(10, at_least=1)  # updates between metric lines
    checkpoint_seconds: float = field(60.0, above=0)  # between checkpoints
    tensorboard: bool = False  # also write TensorBoard event files (extra "tensorboard")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    random_seed: int = field(0, at_least=0, below=2**32)
    experts: int = field(4, at_least=1)  # N
    active: int = field(4, at_least=1)  # k experts score a window; at most N
    warm_start: bool = True  # experts start from the seed; else each is drawn, and there is no seed
    model: Model = Model()
    data: Data = Data()
    cluster: Cluster = Cluster()
    seed: Stage = Stage(learning_rate=2.5e-3, eps=2.5e-3, head_sequences=64)
    expert: Stage = Stage(updates=10_000)
    evaluation: Evaluation = Evaluation()
    run: Run = Run()

    @property
    def expert_shape(self) -> ExpertConfig:
        return ExpertConfig(**dataclasses.asdict(self.model))

    @property
    def chosen(self) -> list[int]:
        """The experts that this job trains, in order.

        Raises:
          SomaError: config.run.only is no list of experts.
        """
        if not self.run.only:
            return list(range(self.experts))
        result: set[int] = set()
        for part in self.run.only.split(","):
            numbers = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
            first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
            if not first <= last < self.experts:
                raise SomaError(
                    f"config.run.only={self.run.only!r}: {part!r} is no expert and no range of "
                    f"experts such as 2 or 0-3; there are {self.experts}, from 0 on"
                )
            result.update(range(first, last + 1))
        return sorted(result)


def default_config() -> ml_collections.ConfigDict:
    """The paper's settings, as a ConfigDict that a config file changes and flags override."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def resolve(config: ml_collections.ConfigDict) -> Config:
    """Checks every field and freezes the config.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    resolved = build(Config, config.to_dict(), "config")
    _one_of("config.model.recurrence", resolved.model.recurrence, ("lstm", "gru"))
    _one_of("config.cluster.shards", resolved.cluster.shards, ("semantic", "random", "iid"))
    for name in ("seed", "expert"):
        stage = getattr(resolved, name)
        _check_stage(f"config.{name}", stage)
        if stage.estimator in ACTIVITY and (resolved.model.recurrence, resolved.model.tied) != (
            "lstm",
            True,
        ):
            raise SomaError(
                f"config.{name}.estimator={stage.estimator} needs config.model.recurrence=lstm and "
                "config.model.tied=True"
            )
        if stage.whitening and resolved.model.recurrence != "lstm":
            raise SomaError(f"config.{name}.whitening needs config.model.recurrence=lstm")
    if not resolved.warm_start and resolved.seed.updates:
        raise SomaError("config.warm_start is False, so no seed is used: set config.seed.updates=0")
    if resolved.run.tensorboard and not importlib.util.find_spec("tensorboardX"):
        raise SomaError('config.run.tensorboard needs: pip install "soma_jax[tensorboard]"')
    _ = resolved.chosen  # a bad list is told now
    return resolved


def stage(values: dict[str, Any], path: str) -> Stage:
    """A checked Stage from its fields; `path` names it in errors."""
    result = build(Stage, values, path)
    _check_stage(path, result)
    return result


def build(cls: type, values: dict[str, Any], path: str) -> Any:
    """A dataclass of settings from its fields, each checked against its type and limits; `path`
    names it in errors."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - set(fields)):
        raise SomaError(f"{path}.{unknown[0]} is not a field; {path} has {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name not in values:
            raise SomaError(f"{path}.{name} is missing")
        where, value = f"{path}.{name}", values[name]
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise SomaError(f"{where} is a group of fields, not {value!r}")
            arguments[name] = build(typing.cast(type, hints[name]), value, where)
        else:
            arguments[name] = _check_value(where, value, hints[name], field.metadata)
    return cls(**arguments)


_LIMITS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "at_most": ("at most", operator.le),
}


def _check_value(where: str, value: Any, kind: type, limits: Mapping[str, float]) -> Any:
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind:
        raise SomaError(f"{where} must be of type {kind.__name__}, not {value!r}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SomaError(f"{where} must be a finite number, not {value!r}")
        with np.errstate(over="ignore", under="ignore"):
            lost = not np.isfinite(np.float32(value)) or (value != 0 and np.float32(value) == 0)
        if lost:
            raise SomaError(f"{where} must be a number that float32 holds, not {value!r}")
    for name, limit in limits.items():
        words, holds = _LIMITS[name]
        if not holds(value, limit):
            raise SomaError(f"{where} must be {words} {limit}, not {value!r}")
    return value


def _one_of(where: str, value: str, names: Iterable[str]) -> None:
    if value not in names:
        raise SomaError(f"{where} must be one of {', '.join(names)}, not {value!r}")


def _check_activity(path: str, stage: Stage) -> None:
    if stage.estimator not in ACTIVITY:
        if stage.credit > 1:
            raise SomaError(f"{path}.credit is of {path}.estimator={' or '.join(ACTIVITY)}")
        return
    if stage.own_batch:
        raise SomaError(
            f"{path}.estimator={stage.estimator} perturbs every window by itself: set "
            f"{path}.own_batch=False"
        )
    if stage.weight_decay:
        raise SomaError(
            f"{path}.estimator={stage.estimator} leaves the LayerNorms' gains before the readout "
            f"alone, and decay would take them to zero: set {path}.weight_decay=0"
        )
    if stage.credit > stage.window:
        raise SomaError(f"{path}.credit is {stage.credit}, and a window has {stage.window} bytes")
    whole = stage.estimator == "node_perturbation"
    if (stage.n_pert != stage.sequences) if whole else (stage.sequences % stage.n_pert):
        raise SomaError(
            f"{path}.n_pert is {stage.n_pert}, the windows with noise in them: with "
            f"{path}.estimator={stage.estimator} it must {'be' if whole else 'divide'} "
            f"{path}.sequences={stage.sequences}"
        )


def _check_stage(path: str, stage: Stage) -> None:
    _one_of(f"{path}.estimator", stage.estimator, ESTIMATORS)
    _one_of(f"{path}.parameters", stage.parameters, ("body", "all"))
    _one_of(f"{path}.probe", stage.probe, probes.LAWS)
    _one_of(f"{path}.optimizer", stage.optimizer, ("adam", "sgd"))
    if stage.rank > 1 and stage.estimator != "eggroll":
        raise SomaError(f"{path}.rank is of {path}.estimator=eggroll")
    if stage.estimator == "backprop" and (stage.n_pert > 1 or stage.own_batch):
        raise SomaError(
            f"{path}.estimator is backprop, which has no directions: set {path}.n_pert=1 and "
            f"{path}.own_batch=False"
        )
    _check_activity(path, stage)
    if stage.share > 1 and (not stage.own_batch or stage.n_pert % stage.share):
        raise SomaError(
            f"{path}.share is {stage.share}, the size of groups of directions: it needs "
            f"{path}.own_batch=True and must divide {path}.n_pert={stage.n_pert}"
        )
    if stage.parameters == "all" and stage.head_sequences:
        raise SomaError(
            f"{path}.parameters is all, so the estimator trains E: set {path}.head_sequences=0, "
            "which leaves out the delta rule"
        )
    if stage.head_sequences > stage.windows_per_update:
        raise SomaError(
            f"{path}.head_sequences is {stage.head_sequences}, but an update reads only "
            f"{stage.windows_per_update} windows"
        )
    if stage.whitening and not stage.head_sequences:
        raise SomaError(
            f"{path}.whitening looks at the unperturbed forward of the delta rule: set "
            f"{path}.head_sequences (with {path}.head_rate=0 to freeze E)"
        )
    if 0 < stage.whitening < 1e-3:
        raise SomaError(
            f"{path}.whitening={stage.whitening:g} is too small for float32: 1e-3 or more, or 0 "
            "for none"
        )
    if stage.whitening and (stage.probe == "flipout" or stage.estimator != "spsa"):
        raise SomaError(
            f"{path}.whitening is of {path}.estimator=spsa, and of any {path}.probe but flipout"
        )
    if stage.patience % stage.validate_every:
        raise SomaError(
            f"{path}.patience ({stage.patience}) must be a multiple of {path}.validate_every "
            f"({stage.validate_every}): the rule looks when the expert is validated"
        )
    tiny = 2.0**-20  # smaller steps round away on float32 weights of order 1
    if min(stage.eps, stage.floor) < tiny:
        raise SomaError(
            f"{path}.eps can fall to {min(stage.eps, stage.floor):g} ({path}.floor); float32 "
            f"weights need {tiny:.2g}"
        )
