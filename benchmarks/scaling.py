"""Time and cost of FSO and DDPP at sizes nobody here has: `python benchmarks/scaling.py`.

A simulation on paper. What it takes from measurements are flags, with where they come from; the
network, the failures and the checkpoints are flags, too. Prints docs/scaling.md's tables.

FSO: N experts, each alone on a device, update by update; nothing is exchanged. A failed device
costs its own expert what it did since its last checkpoint, and a restart.

DDPP: one expert, D devices, each with n_pert / D of the directions. An update ends with a ring
all-reduce: 2 (D - 1) / D messages' bytes over the slowest link, 2 log2(D) latencies. A failed
device stops all D, and all of them go back to the last checkpoint.
"""

import dataclasses
import math

import numpy as np
from absl import app, flags

F = flags.FLAGS
# One core of two, d = 32 (docs/performance.md, the first line); the paper's GPU: --rate=59e6.
flags.DEFINE_float("rate", 0.63e6, "byte-forwards/s of a device", 1.0)
flags.DEFINE_integer("coordinates", 32_928, "of an expert's body (d = 32)", 1)
flags.DEFINE_integer("sequences", 64, "B", 1)
flags.DEFINE_integer("window", 1024, "T, bytes", 1)
flags.DEFINE_integer("n_pert", 64, "directions of an expert, under FSO", 1)
flags.DEFINE_integer("updates", 10_000, "of an expert, under FSO", 1)
flags.DEFINE_integer("ddpp_updates", 1000, "of the expert, under DDPP", 1)
# One draw of a dense direction of d = 32 and its place in the sum, on one core.
flags.DEFINE_float("direction_seconds", 1e-4, "to make a direction and add it up", 0.0)
flags.DEFINE_float("gigabits", 10.0, "a link's bandwidth, Gbit/s", 1e-6)
flags.DEFINE_float("latency", 5e-5, "of a message, seconds", 0.0)
flags.DEFINE_float("failures", 1.0, "of a device in 1,000 hours", 0.0)
flags.DEFINE_float("restart", 300.0, "seconds from a failure to the next update", 0.0)
flags.DEFINE_float("checkpoint_every", 60.0, "seconds", 1e-3)
flags.DEFINE_float("checkpoint_takes", 0.01, "seconds of an expert's device", 0.0)
flags.DEFINE_float("price", 0.02, "of a device-hour, in any currency", 0.0)


@dataclasses.dataclass(frozen=True)
class Failures:
    """When devices fail and what it costs."""

    per_second: float  # of one device
    restart: float  # seconds
    every: float  # seconds of work between checkpoints
    takes: float  # seconds of a checkpoint

    def times(self, work: float, devices: int, runs: int, rng: np.random.Generator) -> np.ndarray:
        """Seconds that `runs` jobs of `devices` devices each take for `work` seconds of work.

        Failures come at rate devices * per_second, at any time; what was done since the last
        checkpoint is done again.
        """
        stretches = max(1, round(work / self.every))
        length = work / stretches + self.takes
        rate = devices * self.per_second
        if rate == 0:
            return np.full(runs, stretches * length)
        survives = math.exp(-rate * length)
        if stretches / max(survives, 1e-300) > 1e7:
            return np.full(runs, math.inf)  # hardly any stretch ever ends
        failed = rng.negative_binomial(stretches, survives, runs)
        # A failure comes within its stretch: an exponential time, given that it is below `length`.
        within = -np.log1p(-rng.random(failed.sum()) * -math.expm1(-rate * length)) / rate
        owner = np.repeat(np.arange(runs), failed)
        lost = np.bincount(owner, within, minlength=runs)
        return stretches * length + lost + failed * self.restart

    def expected(self, work: float, devices: int) -> float:
        """The mean of `times`, in closed form."""
        stretches = max(1, round(work / self.every))
        length = work / stretches + self.takes
        rate = devices * self.per_second
        if rate * length > 700:
            return math.inf
        return stretches * (
            math.expm1(rate * length) * (1 / rate + self.restart) if rate else length
        )


def message_bytes(n_pert: int, coordinates: int) -> int:
    """What processes exchange: 2 n_pert losses, or these and the estimate (float32)."""
    return 4 * 2 * n_pert if 2 * n_pert < coordinates else 4 * (2 * n_pert + coordinates)


def update_seconds(n_pert: int, devices: int) -> float:
    """One update of one expert by DDPP (alone with devices=1); failures apart."""
    mine = math.ceil(n_pert / devices)
    forwards = 2 * mine * F.sequences * F.window / F.rate
    losses = devices > 1 and 2 * n_pert < F.coordinates  # then every direction is made again
    made = mine + (n_pert if losses else 0)
    exchange = 0.0
    if devices > 1:
        size = message_bytes(n_pert, F.coordinates)
        exchange = 2 * (devices - 1) / devices * size * 8 / (F.gigabits * 1e9)
        exchange += 2 * math.log2(devices) * F.latency
    return forwards + made * F.direction_seconds + exchange


def fso(experts: int, devices: int, failures: Failures, rng: np.random.Generator) -> tuple:
    """Seconds until the last expert is trained, and device-seconds that were paid for."""
    work = F.updates * update_seconds(F.n_pert, 1)
    each = failures.times(work, 1, experts, rng)
    # A device takes the next expert when it has ended one; they differ little, so in rounds.
    rounds = np.pad(each, (0, -experts % devices)).reshape(-1, devices)
    return rounds.sum(0).max(), each.sum()


def useful(n_pert: int, devices: int, failures: Failures) -> float:
    """What DDPP's device-seconds are worth beside those of one device that never fails."""
    work = F.ddpp_updates * update_seconds(n_pert, devices)
    alone = F.ddpp_updates * update_seconds(n_pert, 1)
    return alone / (devices * failures.expected(work, devices))


def most_devices(n_pert: int, share: float, failures: Failures) -> int:
    """The most devices, a power of two, of whose time this share is useful."""
    devices = 1
    while devices < n_pert and useful(n_pert, 2 * devices, failures) >= share:
        devices *= 2
    return devices


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _hours(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    return f"{seconds / 3600:,.1f}" if seconds > 36_000 else f"{seconds / 3600:.2g}"


def main(_: list[str]) -> None:
    rng = np.random.default_rng(0)
    failures = Failures(F.failures / 1000 / 3600, F.restart, F.checkpoint_every, F.checkpoint_takes)
    alone = F.updates * update_seconds(F.n_pert, 1)
    rows = []
    for experts in (256, 1024, 4096, 16_384, 65_536):
        for devices in (256, experts) if experts > 256 else (256,):
            seconds, paid = fso(experts, devices, failures, rng)
            rows.append(
                [
                    f"{experts:,}",
                    f"{devices:,}",
                    _hours(seconds),
                    f"{paid / 3600:,.0f}",
                    f"{paid / 3600 * F.price:,.0f}",
                    f"{experts * alone / (devices * seconds):.0%}",
                ]
            )
    print("FSO, an expert alone on a device\n")
    print(table(["N", "devices", "hours", "device-hours", "price", "useful"], rows))

    rows = []
    for power in range(6, 21, 2):
        n_pert = 2**power
        for devices in dict.fromkeys(most_devices(n_pert, x, failures) for x in (0.9, 0.5)):
            one = update_seconds(n_pert, devices)
            seconds = failures.times(F.ddpp_updates * one, devices, 64, rng).mean()
            rows.append(
                [
                    f"2^{power}",
                    f"{devices:,}",
                    f"{message_bytes(n_pert, F.coordinates) if devices > 1 else 0:,}",
                    f"{one:.3g}",
                    _hours(seconds),
                    _hours(devices * seconds),
                    f"{F.ddpp_updates * update_seconds(n_pert, 1) / (devices * seconds):.0%}",
                ]
            )
    print("\nDDPP, one expert: the most devices of whose time 90% is useful, and 50%\n")
    head = ["n_pert", "devices", "bytes", "s an update", "hours", "device-hours", "useful"]
    print(table(head, rows))


if __name__ == "__main__":
    app.run(main)
