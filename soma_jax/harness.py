"""A trained ensemble in lm-evaluation-harness (extra "harness"), as its model `soma`:

python -m soma_jax.harness run --model soma --model_args path=runs/soma_n4 --tasks wikitext

takes the arguments of its own command `lm_eval`. A log-likelihood is over all UTF-8 bytes of a text
(`Pretrained.log_probabilities`), so that its byte perplexity and bits/byte are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import soma_jax
from soma_jax import cli
from soma_jax.errors import SomaError

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    missing = SomaError('soma_jax.harness needs: pip install "soma_jax[harness]"')
    if __name__ == "__main__":
        cli.fail(missing)
    raise missing from error

_BATCH = 64  # continuations that are generated at once


@register_model("soma")
class Soma(LM):
    """The model that `--model soma` names.

    Args:
      path: a workdir, a released checkpoint, or the name of a shipped one.
      k: experts that are averaged [as configured].
      others: batch_size, device and their like, which the harness hands to every model.
    """

    def __init__(self, path: str, k: int | None = None, **others: Any):
        super().__init__()
        self._ens, self._k = soma_jax.load(path), k

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Nats (negative) of continuations, and whether greedy decoding writes them."""
        pairs = [tuple(part.encode() for part in request.args) for request in requests]
        if not pairs:
            return []
        log_p = self._ens.log_probabilities([a + b for a, b in pairs], self._k)
        nats = [
            float(row[len(context) :].sum(dtype="float64"))
            for row, (context, _) in zip(log_p, pairs, strict=True)
        ]
        return list(zip(nats, self._greedy(pairs), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Nats (negative) of whole texts."""
        texts = [request.args[0] for request in requests]
        if not texts:
            return []
        log_p = self._ens.log_probabilities(texts, self._k)
        return [float(row.sum(dtype="float64")) for row in log_p]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuations up to the first of their stop sequences."""
        return [self._until(*request.args) for request in requests]

    def _greedy(self, pairs: Sequence[tuple[bytes, ...]]) -> Iterator[bool]:
        for start in range(0, len(pairs), _BATCH):
            some = pairs[start : start + _BATCH]
            longest = max(len(continuation) for _, continuation in some)
            drawn = self._ens.stream([a for a, _ in some], longest, k=self._k, temperature=0.0)
            bytes_ = b"".join(drawn)
            for row, (_, continuation) in enumerate(some):
                yield bytes_[row :: len(some)].startswith(continuation)

    def _until(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [s.encode() for s in ([until] if isinstance(until, str) else until) if s]
        sampled = settings.get("do_sample", False)
        sampling: dict[str, Any] = {
            "temperature": float(settings.get("temperature", 1.0)) if sampled else 0.0,
            "top_k": int(settings.get("top_k", 0)),
            "top_p": float(settings.get("top_p", 1.0)),
        }
        length, text = int(settings.get("max_gen_toks", 256)), b""
        for byte in self._ens.stream([context], length, k=self._k, **sampling):
            text += byte
            if ends := [text.find(stop) for stop in stops if stop in text]:
                text = text[: min(ends)]
                break
        return text.decode("utf-8", "backslashreplace")


def main() -> None:
    cli.use_host_devices(0)
    try:
        cli_evaluate()
    except SomaError as error:
        cli.fail(error)


if __name__ == "__main__":
    main()
