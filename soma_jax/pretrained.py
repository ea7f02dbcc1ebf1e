"""A trained ensemble, to be used: a run's workdir, a released checkpoint or one that is shipped.

    import soma_jax

    ens = soma_jax.load("runs/soma_n4")
    ens.score(["The people of the United States"])  # nats/byte
    ens.generate("The people of the United States")
    ens.route("The people of the United States")  # the experts, nearest first

Experts are read from disk when a text is first routed to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np

from soma_jax import evaluate, inference, model, recipe, release, summary
from soma_jax.config import Config
from soma_jax.data import corpus, store, windows
from soma_jax.data.windows import CONTEXT
from soma_jax.errors import SomaError
from soma_jax.files import read_json
from soma_jax.generate import Sampling, generate
from soma_jax.routing.router import Router
from soma_jax.workdir import Workdir

_GROUP = 1024  # windows scored at once: bounds memory

Text = str | bytes  # a str is read as its UTF-8 bytes


class Experts(Sequence[model.Params]):
    """Parameters of N experts, each read when it is first asked for."""

    def __init__(self, count: int, read: Callable[[int], tuple[model.Params, int]]):
        self._count, self._read = count, read
        self._loaded: dict[int, tuple[model.Params, int]] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # never a slice
        return self._expert(index)[0]

    def updates(self, index: int) -> int:
        """Updates that an expert has been trained for."""
        return self._expert(index)[1]

    def _expert(self, index: int) -> tuple[model.Params, int]:
        index = range(self._count)[index]
        if index not in self._loaded:
            self._loaded[index] = self._read(index)
        return self._loaded[index]


class Pretrained:
    """A trained ensemble; `load` makes one.

    Attributes:
      config: of the run that trained it.
      numbers: of its experts there; those that are not trained yet are left out.
      experts: their parameters, by their place in `numbers`.
      router: says which experts a text goes to.
    """

    def __init__(
        self,
        path: Path,
        config: Config,
        numbers: Sequence[int],
        experts: Experts,
        router: Router,
        test_text: Callable[[], Sequence[windows.Text]],
        screened: Sequence[int],
    ):
        self.path, self.config, self.numbers = path, config, list(numbers)
        self.experts, self.router = experts, router
        self._test_text, self._screened = test_text, screened

    @property
    def active(self) -> int:
        """k, as the run was configured; every method takes another."""
        return min(self.config.active, len(self.experts))

    def route(self, text: Text, k: int | None = None) -> list[int]:
        """The experts of a text, by its first 256 bytes, nearest first."""
        routed = self.router.route([_bytes(text)], self._k(k), CONTEXT)[0]
        return [self.numbers[place] for place in routed]

    def score(self, texts: Sequence[Text], k: int | None = None) -> np.ndarray:
        """Mean loss of each text over all its bytes, nats/byte, float64 [n]; nan for an empty one.

        See `log_probabilities`. launch/evaluate.py leaves out the first 257 bytes.
        """
        return np.array(
            [
                -log_p.sum(dtype=np.float64) / len(log_p) if len(log_p) else np.nan
                for log_p in self.log_probabilities(texts, k)
            ]
        )

    def log_probabilities(
        self, texts: Sequence[Text], k: int | None = None, reroute: int = inference.REROUTE
    ) -> list[np.ndarray]:
        """Log-probability of each byte given those before it, float32, as long as its text.

        The first 257 bytes by the cold-start rule (`inference.beginnings`), later ones in windows
        of the test protocol: each 768 bytes with the 256 before them, which also route.
        """
        _check_texts(texts)
        some, k = [_bytes(text) for text in texts], self._k(k)
        parts: list[list[np.ndarray]] = [[] for _ in some]
        for start in range(0, len(some), _GROUP):
            group = some[start : start + _GROUP]
            first = inference.beginnings(self.experts, self.router, group, k, reroute)
            for row, text in enumerate(group):
                parts[start + row].append(first[row, : len(text)])
        cut = windows.strided(some, drop_incomplete=False)
        for start in range(0, len(cut), _GROUP):
            rows = slice(start, start + _GROUP)
            prefixes = [ids[:CONTEXT].tobytes() for ids in cut.ids[rows]]
            routes = self.router.route(prefixes, k, CONTEXT)
            log_p = inference.mixture(
                inference.log_probabilities(self.experts, cut.ids[rows], routes, CONTEXT)
            )
            mask = windows.scored_mask(cut.lengths[rows])
            for document, values, scored in zip(cut.document[rows], log_p, mask, strict=True):
                parts[document].append(values[scored])
        return [np.concatenate(part) for part in parts]

    def test_windows(self) -> tuple[windows.Windows, int]:
        """The run's own test text by the test protocol, and how many documents have no window."""
        documents = self._test_text()
        drawn = summary.windows_of(documents, self.config.evaluation, self._screened)
        return drawn, len(documents) - len(drawn)

    def score_windows(self, some: windows.Windows, k: int | None = None) -> evaluate.Scores:
        """Scores windows by the test protocol, with 1, 2, ... k experts."""
        return evaluate.score(self.experts, self.router, some, self._k(k))

    @overload
    def generate(self, prompt: Text, length: int = ..., **settings) -> str: ...
    @overload
    def generate(self, prompt: Sequence[Text], length: int = ..., **settings) -> list[str]: ...
    def generate(self, prompt, length=256, **settings):
        """What follows a prompt (or, in a list, each of several), as text; `settings` and errors
        are those of `stream`. Bytes that are not UTF-8 are shown as escapes."""
        single = isinstance(prompt, Text)
        prompts = [prompt] if single else prompt
        drawn = b"".join(self.stream(prompts, length, **settings))
        texts = [
            drawn[row :: len(prompts)].decode("utf-8", "backslashreplace")
            for row in range(len(prompts))
        ]
        return texts[0] if single else texts

    def stream(
        self,
        prompts: Sequence[Text],
        length: int,
        *,
        k: int | None = None,
        reroute: int = inference.REROUTE,
        **sampling,
    ) -> Iterator[bytes]:
        """Yields the next byte of every text, `length` times, each as it is drawn.

        Args:
          prompts: texts to continue.
          length: bytes.
          k: how many experts are averaged [as configured].
          reroute: see `generate.generate`.
          sampling: fields of `generate.Sampling`: temperature, top_k, top_p, seed.

        Raises:
          SomaError: a value out of range, no prompts.
        """
        _check_texts(prompts)
        some = [_bytes(prompt) for prompt in prompts]
        settings = Sampling(**sampling)
        return generate(self.experts, self.router, some, length, self._k(k), settings, reroute)

    def updates(self) -> list[int]:
        """Updates that each expert has been trained for; reads all of them."""
        return [self.experts.updates(index) for index in range(len(self.experts))]

    def _k(self, k: int | None) -> int:
        return self.active if k is None else k


def load(path: str | os.PathLike[str]) -> Pretrained:
    """A trained ensemble by its directory, a workdir or a released checkpoint, or a shipped one by
    its name. Nothing is written or locked; a run that still goes on can be loaded.

    Raises:
      SomaError: there is no such thing, or a part of it is missing or damaged.
    """
    directory = Path(path)
    if release.is_release(directory):
        return _released(directory)
    if Workdir(directory).config.exists():
        return _workdir(Workdir(directory))
    if str(path) in release.shipped():
        return _released(release.SHIPPED / str(path))
    raise SomaError(
        f"{str(path)!r} is not a workdir, a released checkpoint or the name of a shipped one "
        f"({', '.join(release.shipped()) or 'none are shipped'})"
    )


def _workdir(workdir: Workdir) -> Pretrained:
    config = workdir.read_config()
    router, numbers = recipe.load_router(workdir, config), recipe.present(workdir, config)

    def read(index: int) -> tuple[model.Params, int]:
        state = recipe.newest_state(workdir.expert(numbers[index]), config)
        return state.params, int(state.update)

    def test_text() -> list[np.ndarray]:
        return list(store.open_store(workdir.store("test")).documents())

    screened = read_json(workdir.screened) if workdir.screened.exists() else []
    experts = Experts(len(numbers), read)
    return Pretrained(workdir.path, config, numbers, experts, router, test_text, screened)


def _released(directory: Path) -> Pretrained:
    about, config = release.about(directory), Workdir(directory).read_config()

    def read(index: int) -> tuple[model.Params, int]:
        return release.read_expert(directory, index, config), about["updates"][index]

    def test_text() -> list[bytes]:
        documents = corpus.read_documents(config.data.test, config.data.text_field)
        return [document.read() for document in documents]

    experts, router = Experts(config.experts, read), Router.load(directory / "router")
    numbers = range(config.experts)
    return Pretrained(directory, config, numbers, experts, router, test_text, about["screened"])


def _bytes(text: Text) -> bytes:
    return text.encode(errors="surrogateescape") if isinstance(text, str) else bytes(text)


def _check_texts(texts: Sequence[Text]) -> None:
    if isinstance(texts, Text) or not len(texts):
        raise SomaError("give a list of one or more texts")
