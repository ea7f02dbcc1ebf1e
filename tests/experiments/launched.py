"""An experiment with the settings of a test, started as a person starts it."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Launched:
    """The experiment `name` in `folder`, with `text` as its config file."""

    def __init__(self, name, text, folder):
        self.name, self.file, self.workdir = name, folder / "toy.py", folder / "run"
        self.file.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}")

    def config(self):
        return runpy.run_path(str(self.file))["get_config"]()

    def start(self, *arguments):
        line = [sys.executable, "launch/experiment.py", f"--experiment={self.name}"]
        return subprocess.Popen(
            [*line, f"--config={self.file}", f"--workdir={self.workdir}", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip

    def run(self, *arguments):
        """Exit status and what was printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def stop(self, signum, pattern, count):
        """Starts it, sends a signal once `count` files of a pattern are there; as `run`."""
        process = self.start()
        while process.poll() is None and len(list(self.workdir.glob(pattern))) < count:
            time.sleep(0.002)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def result(self):
        return json.loads((self.workdir / "result.json").read_text())

    def page(self):
        return (self.workdir / f"{self.name}.md").read_text()
