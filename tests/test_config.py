import dataclasses
import math
import re
import runpy
from pathlib import Path
from typing import Any

import ml_collections
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax.config import Config, Stage, default_config, resolve
from soma_jax.errors import SomaError
from soma_jax.model import ExpertConfig


def changed(path: str, value) -> ml_collections.ConfigDict:
    """The default config with one field changed, whatever its type."""
    values = default_config().to_dict()
    *groups, name = path.split(".")
    group = values
    for part in groups:
        group = group[part]
    group[name] = value
    return ml_collections.ConfigDict(values)


def fields(kinds: tuple[str, ...], cls=Config, prefix="") -> dict[str, dataclasses.Field]:
    """Every field of these types, by its dotted path."""
    found: dict[str, dataclasses.Field] = {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default):
            found |= fields(kinds, type(field.default), f"{prefix}{field.name}.")
        elif field.type in kinds:
            found[prefix + field.name] = field
    return found


FLOATS = st.sampled_from(sorted(fields(("float",))))
INTEGERS = st.sampled_from(sorted(fields(("int",))))


def test_the_default_config_resolves_to_the_defaults():
    assert resolve(default_config()) == Config()


def test_the_defaults_are_the_papers():
    config = resolve(default_config())
    assert config.expert_shape == ExpertConfig(width=32, blocks=2, embedding=32)
    for stage, rate in ((config.seed, 2.5e-3), (config.expert, 1e-3)):
        assert (stage.n_pert, stage.sequences, stage.window) == (64, 64, 1024)
        assert stage.learning_rate == stage.eps == rate
        assert (stage.probe, stage.own_batch) == ("sparse", False)
        assert (stage.weight_decay, stage.b1, stage.b2, stage.adam_eps) == (1e-4, 0.9, 0.999, 1e-8)
        assert (stage.patience, stage.floor, stage.decay_to) == (1000, 1e-5, 1.0)
    assert (config.seed.updates, config.expert.updates) == (1000, 10_000)
    assert (config.seed.head_sequences, config.expert.head_sequences) == (64, 0)
    assert (config.experts, config.active) == (4, 4)


def test_changed_fields_are_kept_and_the_result_is_frozen():
    config = default_config()
    config.experts = 7
    config.expert.learning_rate = 0.5
    resolved: Any = resolve(config)
    assert (resolved.experts, resolved.expert.learning_rate) == (7, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.experts = 8
    assert hash(resolved.expert) == hash(dataclasses.replace(resolved.expert))


def test_a_whole_number_is_a_float_where_a_float_is_meant():
    value = resolve(changed("run.checkpoint_seconds", 5)).run.checkpoint_seconds
    assert (type(value), value) == (float, 5.0)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("expert.eps", math.nan, "finite"),
        ("expert.learning_rate", math.inf, "finite"),
        ("expert.learning_rate", -1e-3, "at least 0"),
        ("seed.eps", 0.0, "above 0"),
        ("expert.b1", 1.0, "below 1"),
        ("cluster.validation_share", 1.0, "below 1"),
        ("experts", 0, "at least 1"),
        ("expert.n_pert", 0, "at least 1"),
        ("expert.n_pert", 64.0, "of type int"),
        ("expert.n_pert", True, "of type int"),
        ("expert.eps", True, "of type float"),
        ("expert.eps", "1e-3", "of type float"),
        ("expert.own_batch", 1, "of type bool"),
        ("data.train", None, "of type str"),
        ("data.train", 3, "of type str"),
        ("model", 3, "group of fields"),
        ("random_seed", 2**32, "below"),
        ("random_seed", -1, "at least 0"),
        ("expert.whitening", 0.1, "config.expert.head_sequences"),
        ("expert.probe", "cauchy", "one of sparse, dense"),
        ("expert.head_sequences", 65, "reads only 64 windows"),
        ("expert.estimator", "adjoint", "one of spsa, eggroll, backprop"),
        ("expert.estimator", "backprop", "config.expert.n_pert=1"),
        ("seed.parameters", "head", "one of body, all"),
        ("seed.parameters", "all", "config.seed.head_sequences=0"),
        ("expert.optimizer", "adamw", "one of adam, sgd"),
        ("expert.rank", 2, "config.expert.estimator=eggroll"),
        ("expert.share", 2, "config.expert.own_batch=True"),
        ("model.recurrence", "rnn", "one of lstm, gru"),
        ("cluster.shards", "all", "one of semantic, random, iid"),
        ("warm_start", False, "config.seed.updates=0"),
        ("expert.patience", 75, "multiple of config.expert.validate_every"),
        ("expert.eps", 9e-7, "float32"),
        ("seed.decay_to", 1.5, "at most 1"),
        ("expert.learning_rate", 1e300, "float32"),
        ("expert.adam_eps", 1e-50, "float32"),
        ("expert.eps", 10**400, "type float"),
    ],
)
def test_a_bad_value_is_refused_by_name(path, value, says):
    with pytest.raises(SomaError, match=f"^{re.escape(f'config.{path}')} .*{re.escape(says)}"):
        resolve(changed(path, value))


ACTIVITY = {
    "expert.estimator": "feedback",
    "expert.weight_decay": 0.0,
    "expert.sequences": 8,
    "expert.n_pert": 4,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expert.weight_decay": 1e-4}, "set config.expert.weight_decay=0"),
        ({"expert.own_batch": True}, "set config.expert.own_batch=False"),
        ({"expert.n_pert": 3}, "must divide config.expert.sequences=8"),
        ({"expert.estimator": "node_perturbation"}, "must be config.expert.sequences=8"),
        ({"expert.window": 8, "expert.credit": 9}, "a window has 8 bytes"),
        ({"expert.estimator": "spsa", "expert.credit": 2}, "node_perturbation or feedback"),
        ({"model.recurrence": "gru"}, "needs config.model.recurrence=lstm"),
        ({"model.tied": False}, "config.model.tied=True"),
    ],
)
def test_what_perturbed_activities_do_not_go_with_is_refused(changes, says):
    def config(values):
        result = default_config()
        result.update_from_flattened_dict(values)
        return result

    assert resolve(config(ACTIVITY)).expert.n_pert == 4
    with pytest.raises(SomaError, match=re.escape(says)):
        resolve(config(ACTIVITY | changes))


@pytest.mark.parametrize("path", ["colour", "expert.momentum", "model.depth"])
def test_an_unknown_field_is_refused_by_name(path):
    with pytest.raises(SomaError, match=f"config.{path} is not a field"):
        resolve(changed(path, 1))


@pytest.mark.parametrize("path", ["experts", "data", "seed.eps"])
def test_a_missing_field_is_refused_by_name(path):
    values = default_config().to_dict()
    *groups, name = path.split(".")
    del (values[groups[0]] if groups else values)[name]
    with pytest.raises(SomaError, match=f"config.{path} is missing"):
        resolve(ml_collections.ConfigDict(values))


@settings(deadline=None, max_examples=60)
@given(FLOATS, st.sampled_from([math.nan, math.inf, -math.inf, -1.0, -1e-9]))
def test_no_float_field_takes_nan_infinity_or_a_negative_number(path, value):
    with pytest.raises(SomaError, match=f"^config.{path} must be .*{value!r}"):
        resolve(changed(path, value))


@settings(deadline=None, max_examples=60)
@given(FLOATS | INTEGERS, st.floats(-10, 10) | st.integers(-10, 10) | st.floats())
def test_a_number_is_kept_or_refused_by_name_as_its_limits_say(path, value):
    field = fields(("float", "int"))[path]
    limits = field.metadata
    allowed = (
        (field.type == "float" or type(value) is int)
        and math.isfinite(value)
        and (type(value) is int or value == 0 or 1e-45 <= abs(value) <= 3.4028234e38)  # float32
        and value >= limits.get("at_least", -math.inf)
        and value > limits.get("above", -math.inf)
        and value < limits.get("below", math.inf)
        and value <= limits.get("at_most", math.inf)
    )
    message = refusal(changed(path, value))
    if not allowed:
        assert message.startswith(f"config.{path} must be")
    elif message:  # a value that is allowed alone may not fit another field of its stage
        assert message.startswith(f"config.{path.rpartition('.')[0]}.")
    else:
        resolved: Any = resolve(changed(path, value))
        for part in path.split("."):
            resolved = getattr(resolved, part)
        assert resolved == value


def refusal(config: ml_collections.ConfigDict) -> str:
    try:
        resolve(config)
    except SomaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("", [0, 1, 2, 3]),
        ("2", [2]),
        ("3,0", [0, 3]),
        ("0-1, 3,1", [0, 1, 3]),
        ("0-3", [0, 1, 2, 3]),
    ],
)
def test_a_job_s_experts(only, chosen):
    config = default_config()
    config.run.only = only
    assert resolve(config).chosen == chosen


@pytest.mark.parametrize("only", ["4", "-1", "2-1", "0-4", "a", ",", "0,", "1.5", "0 1", "9" * 99])
def test_a_bad_list_of_experts_is_refused(only):
    config = default_config()
    config.run.only = only
    with pytest.raises(SomaError, match=r"config\.run\.only.*there are 4, from 0 on"):
        resolve(config)


def test_what_an_update_reads_and_costs():
    """2 n_pert B T byte-forwards, and one forward of the delta rule's windows."""
    stage = Stage(n_pert=8, sequences=4, window=16, head_sequences=3)
    assert stage.windows_per_update == 4
    assert stage.byte_forwards_per_update == 2 * 8 * 4 * 16 + 3 * 16
    own = dataclasses.replace(stage, own_batch=True)
    assert own.windows_per_update == 32
    assert own.byte_forwards_per_update == stage.byte_forwards_per_update
    shared = dataclasses.replace(own, share=4, carry=True)
    assert shared.windows_per_update == 8
    assert shared.byte_forwards_per_update == own.byte_forwards_per_update + 8 * 16
    # A forward and its outer products; of perturbed windows, both signs.
    whole = dataclasses.replace(stage, estimator="node_perturbation", head_sequences=0)
    assert whole.byte_forwards_per_update == 3 * 4 * 16
    feedback = dataclasses.replace(whole, estimator="feedback", n_pert=2)
    assert feedback.byte_forwards_per_update == (3 * 4 + 3 * 2) * 16


CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[1] / "configs").rglob("*.py")
    if path.parent.name != "experiments"  # each experiment has settings of its own
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_resolves_and_names_its_own_command(path):
    config = resolve(runpy.run_path(str(path))["get_config"]())
    relative = path.relative_to(path.parents[2 if path.parent.name == "paper" else 1])
    assert f"--config={relative}" in path.read_text(encoding="utf-8")
    if path.stem.startswith("soma_") and path.parent.name == "paper":
        stages = (config.seed, config.expert)
        assert {(s.n_pert, s.sequences, s.window, s.own_batch) for s in stages} == {
            (64, 64, 1024, False)
        }
        assert (config.seed.updates, config.seed.learning_rate, config.seed.eps) == (
            1000,
            0.0025,
            0.0025,
        )
        assert (config.expert.weight_decay, config.expert.patience, config.expert.floor) == (
            1e-4,
            1000,
            1e-5,
        )
