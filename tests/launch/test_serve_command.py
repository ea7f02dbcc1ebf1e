"""launch/serve.py as a person and a browser use it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

import soma_jax

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def workdir(make_workdir, tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("serve") / "run")


@pytest.fixture(scope="module")
def ens(workdir):
    return soma_jax.load(workdir.path)


@pytest.fixture(scope="module")
def url(workdir):
    line = [sys.executable, str(ROOT / "launch" / "serve.py"), "--port=0"]
    line.append(f"--workdir={workdir.path}")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        said = child.stdout.readline()
        assert said.startswith("http://127.0.0.1:"), said + child.stderr.read()
        yield said.split()[0]
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert "Traceback" not in errors


def ask(url: str, question, headers=None) -> tuple[int, str]:
    data = question if isinstance(question, bytes) else json.dumps(question).encode()
    request = urllib.request.Request(url, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_text_is_scored_character_by_character(url, ens):
    text = "The café of the people, \u4f60\u597d " * 20
    status, body = ask(f"{url}/score", {"text": text})
    assert status == 200, body
    scored = json.loads(body)
    (log_p,) = ens.log_probabilities([text])
    assert "".join(scored["characters"]) == text
    assert scored["bytes"] == len(text.encode()) == len(log_p)
    assert sum(scored["nats"]) == pytest.approx(-log_p.sum(dtype="float64"), rel=1e-6)
    assert scored["nats"][7] == pytest.approx(-log_p[7:9].sum(), rel=1e-5)  # é
    assert [e["expert"] for e in scored["experts"]] == ens.route(text)


def test_a_continuation_is_that_of_the_ensemble(url, ens):
    settings = {"temperature": 0.5, "top_k": 9, "seed": 4}
    status, text = ask(f"{url}/generate", {"text": "The river", "bytes": 40, **settings})
    assert (status, text) == (200, ens.generate("The river", 40, **settings))
    assert ask(f"{url}/generate", {"text": "", "bytes": 1})[0] == 200


@pytest.mark.parametrize(
    ("path", "question", "message"),
    [
        ("score", {}, "not an empty one"),
        ("score", {"text": 3}, "must be a string"),
        ("score", {"text": "a" * 16_385}, "16,385 bytes"),
        ("score", {"text": "\ud800"}, "surrogate"),
        ("score", b"{", "not JSON"),
        ("score", [1], "JSON object"),
        ("score", b" " * 200_000, "too large"),
        ("generate", {"text": "a", "bytes": 0}, "1..4096"),
        ("generate", {"text": "a", "bytes": 1e3}, "bytes must be a number"),
        ("generate", {"text": "a", "bytes": True}, "bytes must be a number"),
        ("generate", {"text": "a", "temperature": float("nan")}, "temperature"),
        ("generate", {"text": "a", "temperature": 10**400}, "temperature must be"),
        ("generate", {"text": "a", "top_k": -1}, "top_k"),
        ("generate", {"text": "a", "seed": "x" * 99}, "seed must be a number"),
    ],
)
def test_bad_input_gets_an_answer(url, path, question, message):
    status, body = ask(f"{url}/{path}", question)
    assert status == 400
    assert message in json.loads(body)["error"]


def test_another_name_for_this_machine_is_refused(url):
    status, _ = ask(f"{url}/score", {"text": "a"}, {"Host": "elsewhere.example"})
    assert status == 400


def test_bad_flags_are_one_line_and_status_2(launch, url, workdir):
    port = urllib.parse.urlsplit(url).port
    for flag, message in ((f"--port={port}", "cannot listen"), ("--host=there", "no IP address")):
        done = launch("serve", f"--workdir={workdir.path}", flag, text=True)
        assert done.returncode == 2
        assert message.replace("no IP", "not an IP") in done.stderr
        assert done.stderr.count("\n") == 1


class Browser:
    """Headless Chromium with one page, by the DevTools protocol: JSON between zero bytes."""

    def __init__(self, profile: Path):
        (read, self._to), (answers, write) = os.pipe(), os.pipe()
        # The shell puts the pipes where Chromium looks for them.
        script = f'exec "$@" 3<&{read} 4>&{write}'
        line = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        line = ["bash", "-c", script, "bash", *line, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(line, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._answers = os.fdopen(answers, "rb")
        self._count, self._session = 0, {}

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url=url)["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._answers.close()
        os.close(self._to)

    def call(self, method: str, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = b""
            while not answer.endswith(b"\0"):
                answer += (byte := self._answers.read(1))
                assert byte, "Chromium has ended"
            answer = json.loads(answer[:-1])
            if answer.get("id") == self._count:
                return answer["result"]

    def evaluate(self, expression: str):
        """The value of a JavaScript expression; None for undefined."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path)
    yield browser
    browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.slow
def test_a_person_sees_colours_and_a_continuation(url, ens, browser):
    text = "<b>The</b> river & café"
    browser.open(f"{url}/?{urllib.parse.urlencode({'text': text})}")
    lengths, until = set(), time.monotonic() + 120
    while time.monotonic() < until:
        lengths.add(browser.evaluate("document.getElementById('continued')?.innerText.length"))
        if browser.evaluate("document.getElementById('loss')?.innerText && !at('go').disabled"):
            break
        time.sleep(0.01)
    shown = browser.evaluate(
        """[...document.querySelectorAll("#scored span")].map(
            span => [span.textContent, span.style.background, parseFloat(span.title)])"""
    )
    (log_p,) = ens.log_probabilities([text])
    assert "".join(character for character, _, _ in shown) == text
    assert len({colour for _, colour, _ in shown}) > 3
    assert sum(nats for *_, nats in shown) == pytest.approx(-log_p.sum(), abs=0.01 * len(text))
    assert f"{-log_p.mean():.3f} nats/byte" in browser.evaluate("document.body.innerText")
    continued = browser.evaluate("document.getElementById('continued').textContent")
    assert continued == ens.generate(text, 256, temperature=0.7, seed=0)
    assert len(lengths) > 3  # it grew before one's eyes
    assert not browser.evaluate("document.getElementById('failed').innerText")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.slow
def test_a_person_is_told_what_was_wrong(url, browser):
    browser.open(f"{url}/?text=")
    until = time.monotonic() + 60
    failed = ""
    while not failed and time.monotonic() < until:
        failed = browser.evaluate("document.getElementById('failed')?.innerText ?? ''")
        time.sleep(0.05)
    assert "not an empty one" in failed
