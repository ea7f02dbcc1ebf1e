"""A page for one trained ensemble (extra "serve"): paste text, see who answers for it, what each
character costs, and how it goes on. Started by launch/serve.py.
"""

from __future__ import annotations

import codecs
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soma_jax.errors import SomaError
from soma_jax.pretrained import Pretrained

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise SomaError('the page needs: pip install "soma_jax[serve]"') from error

MOST_BYTES = 16_384  # of a text
MOST_DRAWN = 4096  # bytes of a continuation
SECONDS = 30.0  # that a request waits for the one before it, and that a continuation may take

_PAGE = Path(__file__).with_name("serve.html")


def application(ens: Pretrained, hosts: list[str]) -> Starlette:
    """The page and its two questions, /score and /generate; JSON in a POST request.

    Args:
      ens: the ensemble; it answers one request at a time.
      hosts: names under which the page is asked for. Others are refused, so that another site's
        page cannot reach this one by giving its own name this address.
    """
    turn = threading.Lock()
    terms = dict(zip(ens.numbers, ens.router.top_terms(8), strict=True))

    @contextmanager
    def alone() -> Iterator[None]:
        if not turn.acquire(timeout=SECONDS):
            raise SomaError("busy with other requests: try again later")
        try:
            yield
        finally:
            turn.release()

    def page(_: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"))

    def score(asked: dict[str, Any]) -> Response:
        text = _text(asked)
        with alone():
            (log_p,) = ens.log_probabilities([text])
            routed = ens.route(text)
        characters, nats, start = list(text), [], 0
        for character in characters:
            end = start + len(character.encode())
            nats.append(-float(log_p[start:end].sum(dtype="float64")))
            start = end
        experts = [{"expert": i, "words": terms[i]} for i in routed]
        return JSONResponse(
            {"experts": experts, "characters": characters, "nats": nats, "bytes": start}
        )

    def generate(asked: dict[str, Any]) -> Response:
        text = _text(asked, empty=True)
        length = _number(asked, "bytes", int, 256)
        if not 1 <= length <= MOST_DRAWN:
            raise SomaError(f"bytes is {length}: it must be in 1..{MOST_DRAWN}")
        drawn = ens.stream(
            [text],
            length,
            temperature=_number(asked, "temperature", float, 1.0),
            top_k=_number(asked, "top_k", int, 0),
            seed=_number(asked, "seed", int, 0),
        )

        def pieces() -> Iterator[str]:
            decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
            until = time.monotonic() + SECONDS
            try:
                while time.monotonic() < until:
                    with alone():  # for a byte at a time: a reader that stalls holds nobody up
                        byte = next(drawn, None)
                    if byte is None:
                        yield decoder.decode(b"", final=True)
                        return
                    yield decoder.decode(byte)
                yield f" [stopped after {SECONDS:g} seconds]"
            except SomaError as error:  # the answer has begun: its status cannot say so any more
                yield f"[{error}]"

        return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")

    def question(answer: Callable[[dict[str, Any]], Response]):
        async def endpoint(request: Request) -> Response:
            try:
                return await run_in_threadpool(answer, await _asked(request))
            except SomaError as error:
                return JSONResponse({"error": str(error)}, status_code=400)

        return endpoint

    return Starlette(
        routes=[
            Route("/", page),
            Route("/score", question(score), methods=["POST"]),
            Route("/generate", question(generate), methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


def run(ens: Pretrained, hosts: list[str], host: str, port: int) -> None:
    """Serves the page until Ctrl-C; prints its address once it can be opened.

    Raises:
      SomaError: the port is taken.
    """
    try:
        listening = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise SomaError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{listening.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(application(ens, hosts), log_level="warning", timeout_keep_alive=5)
    uvicorn.Server(config).run([listening])


async def _asked(request: Request) -> dict[str, Any]:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > 8 * MOST_BYTES:  # JSON may take six bytes for one
            raise SomaError(f"the request is too large: a text has at most {MOST_BYTES:,} bytes")
    try:
        asked = json.loads(body)
    except ValueError as error:
        raise SomaError(f"the request is not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise SomaError("the request must be a JSON object")
    return asked


def _text(asked: dict[str, Any], empty: bool = False) -> str:
    text = asked.get("text", "")
    if not isinstance(text, str) or (not text and not empty):
        raise SomaError("text must be a string, and not an empty one")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise SomaError("text holds half a surrogate pair, which is no character") from error
    if size > MOST_BYTES:
        raise SomaError(f"the text has {size:,} bytes: at most {MOST_BYTES:,} are taken")
    return text


def _number(asked: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = asked.get(name, default)
    if type(value) not in (int, kind) or abs(value) > 2**53:
        raise SomaError(f"{name} must be a number ({kind.__name__}), not {str(value)[:40]}")
    return kind(value)
