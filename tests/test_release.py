"""Released checkpoints: that what is read is what was written, and that shipped ones keep their
cards' promises."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import soma_jax
from soma_jax import model, release, summary
from soma_jax.config import default_config, resolve
from soma_jax.errors import SomaError
from soma_jax.routing.router import Router

ROOT = Path(__file__).parents[1]
N = 3
TOPICS = [b"river water boat fish ", b"music violin song choir ", b"court law judge jury "]
ABOUT = {"updates": [1, 2, 3], "screened": []}


def config(width: int):
    settings = default_config()
    settings.experts = N
    settings.model.width, settings.model.embedding = width, 8
    return resolve(settings)


def experts(width: int) -> list[model.Params]:
    return [model.init(jax.random.key(i), config(width).expert_shape) for i in range(N)]


@pytest.fixture(scope="module")
def router():
    texts = [topic * 9 + bytes([97 + i]) * 3 for i, topic in enumerate(TOPICS * 4 + TOPICS[:1] * 3)]
    return Router.fit(texts, N, seed=0, min_df=1)


@pytest.fixture
def written(tmp_path, router):
    path = tmp_path / "some"
    release.write(path, config(8), experts(8), router, ABOUT, "# some\n")
    return path


def test_what_is_read_is_what_was_written(written, router):
    ens = soma_jax.load(written)
    assert ens.config == config(8)
    for found, expected in zip(list(ens.experts), experts(8), strict=True):
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x, y)
    texts = [b"fish law", b"choir jury judge", b"a boat, a song", b"", b"nothing known"]
    np.testing.assert_array_equal(ens.router.route(texts, N), router.route(texts, N))
    assert not list(written.parent.glob(".*"))


def test_a_compact_router_routes_alike_with_fewer_numbers():
    """Texts of random words, in all orders of the experts, against the whole router."""
    rng = np.random.default_rng(0)
    words = [f"word{i}" for i in range(60)]
    texts = [" ".join(rng.choice(words, 20)).encode() for _ in range(200)]
    whole = Router.fit(texts, 4, seed=0, min_df=1, n_components=30)
    compact = whole.compact()
    assert compact.text_features.components.shape == (60, 4)
    half = compact.text_features.components.astype(np.float16)
    np.testing.assert_array_equal(half, compact.text_features.components)
    assert compact.top_terms(5) == whole.top_terms(5)
    similarities = -np.sort(-whole.similarities(texts), axis=1)
    # No tie but for rounding to half precision, 2^-11 of each of two products; a text's direction
    # keeps more than a quarter of its length of 1.
    clear = np.diff(similarities, axis=1).max(1) < -4 * 2**-10
    assert clear.sum() > 150
    np.testing.assert_array_equal(compact.route(texts, 4)[clear], whole.route(texts, 4)[clear])
    assert len({tuple(row) for row in whole.route(texts, 4)}) > 10
    single = Router.fit([], 1, seed=0)
    assert single.compact() is single


def test_an_existing_directory_is_left_alone(written, router):
    before = (written / "release.json").read_bytes()
    with pytest.raises(SomaError, match="is there already"):
        release.write(written, config(8), experts(8), router, ABOUT, "# other\n")
    assert (written / "release.json").read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "experts" / "001.safetensors").unlink(), "cannot read"),
        (lambda p: flip(p / "experts" / "001.safetensors"), "damaged"),
        (lambda p: flip(p / "router" / "router.npz"), "damaged"),
        (lambda p: (p / "release.json").write_text('{"format": "another"}'), "does not describe"),
        (lambda p: (p / "release.json").write_text("{"), "cannot read"),
        (lambda p: (p / "config.json").unlink(), "config.json"),
    ],
    ids=["missing", "flipped", "router", "format", "not JSON", "no config"],
)
def test_damage_is_told(written, damage, message):
    damage(written)
    with pytest.raises(SomaError, match=message):
        list(soma_jax.load(written).experts)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_experts_of_another_shape_are_refused(written):
    text = (written / "config.json").read_text().replace('"width": 8', '"width": 9')
    (written / "config.json").write_text(text)
    with pytest.raises(SomaError, match="another model"):
        soma_jax.load(written).experts[0]


@pytest.mark.parametrize("width", [8, 12], ids=["tied width", "with projections"])
def test_torch_computes_the_same_logits(tmp_path, router, width):
    import torch

    spec = importlib.util.spec_from_file_location("reader", ROOT / "examples" / "torch_reader.py")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    release.write(tmp_path / "some", config(width), experts(width), router, ABOUT, "")
    ids = np.random.default_rng(0).integers(256, size=(3, 200))
    read = reader.read(tmp_path / "some")
    assert len(read) == N
    for params, expert in zip(experts(width), read, strict=True):
        expected = jax.jit(model.apply)(params, jnp.asarray(ids))[0]
        found = expert(torch.from_numpy(ids)).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


# Those that come with the package


def test_a_checkpoint_is_shipped():
    assert release.shipped()


@pytest.mark.parametrize("name", release.shipped())
def test_a_shipped_checkpoint_is_small_and_whole(name):
    files = [path for path in (release.SHIPPED / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2e6
    about = json.loads((release.SHIPPED / name / "release.json").read_text())
    named = {str(path.relative_to(release.SHIPPED / name)) for path in files}
    assert named == {*about["sha256"], "release.json"}
    card = (release.SHIPPED / name / "README.md").read_text()
    for heading in ("Data", "Compute", "Losses", "Licence"):
        assert f"\n## {heading}\n" in card
    assert "python launch/main.py" in card


@pytest.mark.slow
@pytest.mark.parametrize("name", release.shipped())
def test_a_shipped_cards_losses_are_reproduced(name):
    """From what is installed alone, on the texts that are packaged."""
    ens = soma_jax.load(name)
    losses = release.about(release.SHIPPED / name)["losses"]
    card = (release.SHIPPED / name / "README.md").read_text()
    texts = {"wikitext103_test": summary.wikitext_windows()}
    if ens.config.data.test.startswith("embedded:"):
        texts["test"] = ens.test_windows()[0]
    for text, loss in losses.items():
        assert f"| {loss['nats_per_byte']:.4f} |" in card
        if text in texts:
            scores = ens.score_windows(texts[text])
            # The forward is float32; other versions of XLA may round its products differently.
            assert scores.nats(ens.active) == pytest.approx(loss["nats_per_byte"], abs=1e-5)
            assert (len(texts[text]), scores.counts.sum()) == (
                loss["windows"],
                loss["scored_bytes"],
            )
    assert texts.keys() & losses.keys()
