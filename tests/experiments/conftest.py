"""A corpus so small that a whole run takes seconds, and settings to go with it."""

import numpy as np
import pytest

WORDS = {
    "sea": b"ship sail wave captain storm harbour anchor mast ",
    "field": b"wheat plough harvest farmer barn orchard sheep soil ",
    "stars": b"orbit planet comet telescope galaxy gravity moon eclipse ",
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Paths of three splits: documents of 1.2 kB, each of one topic's words in a random order."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for split, count in (("train", 30), ("valid", 3), ("test", 9)):
        (folder / split).mkdir()
        for i in range(count):
            words = list(WORDS.values())[i % 3].split()
            text = b" ".join(words[j] for j in rng.integers(len(words), size=250))[:1200]
            (folder / split / f"{i}.txt").write_bytes(text)
    return {split: str(folder / split) for split in ("train", "valid", "test")}


@pytest.fixture(scope="session")
def base(corpus):
    """What every row of a tiny experiment sets."""
    stage = {
        "n_pert": 4, "sequences": 2, "window": 16, "learning_rate": 1e-2, "eps": 5e-3,
        "validate_every": 1000, "validation_windows": 2, "head_sequences": 2,
    }  # fmt: skip
    return {
        "experts": 2,
        "active": 2,
        "model": {"width": 4, "embedding": 4, "blocks": 1},
        "data": corpus,
        "cluster": {"min_df": 1, "components": 4},
        "evaluation": {"wikitext": False, "bootstrap": 100},
        "seed": stage,
        "expert": dict(stage),
    }
