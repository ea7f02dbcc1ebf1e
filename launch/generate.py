"""Continues a text: `python launch/generate.py --workdir=runs/soma_n4 --prompt="The river"`.

Prints what follows the prompt as it is drawn, byte by byte, from the mean of the routed experts'
probabilities. A prompt is routed on its first 256 bytes, a shorter one on the bytes it has, and its
experts then stay the same; an empty prompt starts after a newline. Bytes that are not UTF-8 or not
printable are shown as escapes. The newest whole checkpoints are used; the workdir is only read.
"""

import codecs
import os
import signal
import sys
from pathlib import Path

from absl import flags

from soma_jax import cli, recipe
from soma_jax.generate import Sampling, generate

_WORKDIR = flags.DEFINE_string("workdir", None, "the run to generate with", required=True)
_PROMPT = flags.DEFINE_string("prompt", "", "what to continue; - reads it from standard input")
_BYTES = flags.DEFINE_integer("bytes", 256, "how many bytes to generate", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "draw from p^(1/T); 0: the most probable")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the fewest bytes with this probability")
_SEED = flags.DEFINE_integer("seed", 0, "equal seeds give equal texts")
_ACTIVE = flags.DEFINE_integer(
    "active", None, "k, the experts that are averaged [as configured]", lower_bound=1
)


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    sampling = Sampling(_TEMPERATURE.value, _TOP_P.value, _SEED.value)
    config, experts, router = recipe.load(Path(_WORKDIR.value))
    prompt = sys.stdin.buffer.read() if _PROMPT.value == "-" else os.fsencode(_PROMPT.value)

    text = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    drawn = generate(
        [state.params for state in experts],
        router,
        prompt,
        _BYTES.value,
        _ACTIVE.value or config.active,
        sampling,
    )
    for byte in drawn:
        print(_printable(text.decode(bytes([byte]))), end="", flush=True)
    print(_printable(text.decode(b"", final=True)))


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


if __name__ == "__main__":
    cli.run(main)
