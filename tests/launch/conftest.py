"""A small workdir for the commands that read one, and how a command is run."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from soma_jax import expert, model
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import default_config, resolve
from soma_jax.data.store import build_store
from soma_jax.routing.router import Router
from soma_jax.workdir import Workdir

ROOT = Path(__file__).parents[2]
TOPICS = [
    b"government states war people ",
    b"species water animals plants ",
    b"music film album song ",
]


@pytest.fixture(scope="session")
def make_workdir():
    """make_workdir(path): an unfinished run of three experts, at updates 1, 2 and 3."""

    def make(path: Path) -> Workdir:
        settings = default_config()
        settings.experts = 3
        settings.active = 2
        settings.model.width = settings.model.embedding = 8
        settings.model.blocks = 1
        settings.evaluation.documents = 20
        config = resolve(settings)
        workdir = Workdir(path)
        path.mkdir()
        workdir.adopt(config, {})
        Router.fit([topic * 9 for topic in TOPICS] * 3, 3, seed=0, min_df=1).save(workdir.router)
        build_store("embedded:test", workdir.store("test"))
        for index in range(3):
            params = model.init(jax.random.key(index), config.expert_shape)
            start = expert.init_state(params, config.expert)
            for update in range(1, index + 2):
                state = start.replace(update=start.update + update)
                Checkpoints(workdir.expert(index) / "checkpoints").save(update, state)
        return workdir

    return make


@pytest.fixture(scope="session")
def launch():
    """launch("evaluate", "--workdir=...") runs launch/evaluate.py to its end."""

    def run(command: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
        line = [sys.executable, str(ROOT / "launch" / f"{command}.py"), *arguments]
        return subprocess.run(line, cwd=ROOT, capture_output=True, timeout=300, **kwargs)

    return run
