"""Continues a text: `python launch/generate.py --workdir=runs/soma_n4 --prompt="The river"`.

Prints what follows the prompt as it is drawn, byte by byte, from the mean of the routed experts'
probabilities. A text is routed on its first 256 bytes; while it has fewer, anew every --reroute
bytes. Bytes that are not UTF-8 or not printable are shown as escapes. The newest whole checkpoints
are used; the workdir is only read. --checkpoint names a shipped checkpoint, or the directory of a
released one, in place of a workdir.
"""

import codecs
import os
import signal
import sys

from absl import flags

from soma_jax import cli, inference, pretrained

_ENSEMBLE = cli.define_ensemble()
_PROMPT = flags.DEFINE_string("prompt", "", "what to continue; - reads it from standard input")
_BYTES = flags.DEFINE_integer("bytes", 256, "how many bytes to generate", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "draw from p^(1/T); 0: the most probable")
_TOP_K = flags.DEFINE_integer("top_k", 0, "draw from so many of the most probable; 0: all", 0)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the fewest bytes with this probability")
_SEED = flags.DEFINE_integer("seed", 0, "equal seeds give equal texts")
_ACTIVE = flags.DEFINE_integer(
    "active", None, "k, the experts that are averaged [as configured]", lower_bound=1
)
_REROUTE = flags.DEFINE_integer(
    "reroute", inference.REROUTE, "bytes between routings until 256 are there; 0: never", 0
)


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    prompt = sys.stdin.buffer.read() if _PROMPT.value == "-" else os.fsencode(_PROMPT.value)
    drawn = pretrained.load(_ENSEMBLE()).stream(
        [prompt],
        _BYTES.value,
        k=_ACTIVE.value,
        reroute=_REROUTE.value,
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
    )
    text = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for byte in drawn:
        print(_printable(text.decode(byte)), end="", flush=True)
    print(_printable(text.decode(b"", final=True)))


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


if __name__ == "__main__":
    cli.run(main)
