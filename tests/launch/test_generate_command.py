import os

import pytest


@pytest.fixture(scope="module")
def workdir(make_workdir, tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("generate") / "run")


def test_equal_seeds_print_equal_texts_that_any_terminal_can_show(launch, workdir):
    """Also from standard input, and for a terminal that knows ASCII alone."""
    arguments = (f"--workdir={workdir.path}", "--bytes=200", "--seed=3")
    prompt = "caf\udcff \u00e9"  # \udcff is how Python shows the byte 0xff of a command line
    first = launch("generate", *arguments, f"--prompt={prompt}")
    assert first.returncode == 0, first.stderr
    shown = first.stdout.decode()
    assert len(shown) >= 50
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert "\\x" in shown

    piped = launch(
        "generate",
        *arguments,
        "--prompt=-",
        input=prompt.encode(errors="surrogateescape"),
        env={
            "PATH": "",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "JAX_PLATFORMS": "cpu",
            "PYTHONIOENCODING": "ascii",
        },
    )
    assert piped.returncode == 0, piped.stderr
    escaped = shown.encode("ascii", "backslashreplace")
    assert piped.stdout == escaped


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--workdir=nothing", "is not a workdir"),
        ("--bytes=0", "--bytes"),
        ("--temperature=nan", "temperature"),
    ],
)
def test_bad_input_is_one_line_and_status_2(launch, workdir, flag, message):
    done = launch("generate", f"--workdir={workdir.path}", flag, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
