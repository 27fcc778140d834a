"""The tests that every tuner must pass. A test class for a tuner subclasses `TunerContract` and names the tuner."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.errors import ConfigError
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.tuner import make_tuner
from schedsearch.tuner.base import Tuner

TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def billion_space() -> ConfigSpace:
    """1.29e9 points under joint constraints, with a bool, a string and derived quantities."""
    return ConfigSpace(
        [
            *(Knob(f"t{i}", TILES) for i in range(8)),
            Knob("flag", (True, False)),
            Knob("order", ("x", "y", "z")),
            Knob("stages", (1, 2, 3, 4, 5)),
        ],
        [
            Constraint("threads <= 1024", lambda k: (k["threads"] >= 32) & (k["threads"] <= 1024)),
            Constraint("t3 divides t2", lambda k: k["t2"] % k["t3"] == 0),
            Constraint("shared memory <= 232448 bytes", lambda k: k["shared_bytes"] <= 232448),
        ],
        derived={
            "threads": lambda k: k["t0"] * k["t1"],
            "shared_bytes": lambda k: 2 * k["stages"] * (k["t2"] * k["t3"] + k["t4"] * k["t5"]),
        },
    )


def small_space() -> ConfigSpace:
    """500 legal configurations of 1,000 (a + b is even)."""
    digits = tuple(range(10))
    return ConfigSpace(
        [Knob("a", digits), Knob("b", digits), Knob("c", ("p", "q", "r", "s", "t")), Knob("d", (True, False))],
        [Constraint("a + b is even", lambda k: (k["a"] + k["b"]) % 2 == 0)],
    )


def single_space() -> ConfigSpace:
    return ConfigSpace([Knob("a", (1, 2, 3)), Knob("b", ("x",))], [Constraint("a = 2", lambda k: k["a"] == 2)])


def time_ns(config: Config) -> float:
    """A smooth landscape over `billion_space` with interactions; 1000 at best."""
    log = {name: math.log2(int(value)) for name, value in config.items() if name.startswith("t")}
    slow = (log["t0"] + log["t1"] - 8) ** 2 + 0.3 * (log["t4"] - log["t5"]) ** 2
    slow += 0.5 * (log["t2"] - 6) ** 2 + 0.5 * (log["t3"] - 5) ** 2
    slow += 0.2 * abs(log["t6"] - 3) + 0.2 * abs(log["t7"] - 4) + (0 if config["flag"] else 1)
    slow += {"x": 0.0, "y": 0.5, "z": 2.0}[str(config["order"])] + 0.3 * abs(int(config["stages"]) - 3)
    return 1000 * (1 + 0.2 * slow)


def outcome(config: Config) -> float | None:
    """Like `time_ns`, but deep pipelines of big tiles fail."""
    return None if int(config["stages"]) * int(config["t2"]) >= 512 else time_ns(config)


def drive(tuner: Tuner, trials: int) -> list[Config]:
    """The loop of a session: asks, measures, tells."""
    asked: list[Config] = []
    while len(asked) < trials and not tuner.finished:
        configs = tuner.ask(min(tuner.batch, trials - len(asked)))
        asked += configs
        tuner.tell([(config, outcome(config)) for config in configs])
    return asked


class TunerContract:
    name: str

    def make(
        self,
        space: ConfigSpace,
        seed: int = 0,
        default: Config | None = None,
        exclude: Sequence[Config] = (),
        hints: Sequence[Config] = (),
    ) -> Tuner:
        return make_tuner(self.name, space, seed=seed, default=default, exclude=exclude, hints=hints)

    def test_proposals_are_legal_and_distinct(self) -> None:
        space = billion_space()
        asked = drive(self.make(space), 120)
        assert len(asked) == len(set(asked)) == 120
        assert all(space.check(config) == [] for config in asked)

    def test_the_default_comes_first(self) -> None:
        space = billion_space()
        default = space.sample(1, np.random.default_rng(9))[0]
        assert self.make(space, default=default).ask(4)[0] == default
        assert self.make(space, default=default).ask(1) == [default]
        assert default not in self.make(space, default=default, exclude=[default]).ask(4)

    def test_hints_come_after_the_default_before_anything_else(self) -> None:
        space = billion_space()
        default, *hints = space.sample(5, np.random.default_rng(9))
        assert self.make(space, default=default, hints=hints).ask(8)[:5] == [default, *hints]
        assert self.make(space, hints=hints).ask(8)[:4] == hints
        tuner = self.make(space, default=default, hints=hints)
        few = [tuner.ask(2), tuner.ask(1), tuner.ask(2)]
        assert few == [[default, hints[0]], hints[1:2], hints[2:]], "however few are asked for at a time"

    def test_hints_that_cannot_be_used_are_ignored(self) -> None:
        space = small_space()
        legal = Config(a=2, b=4, c="q", d=False)
        default, known, told = (Config(a=a, b=0, c="p", d=True) for a in (0, 2, 4))
        outside = [Config(a=0, b=1, c="p", d=True), Config(a=99, b=0, c="p", d=True), Config(other=1)]
        tuner = self.make(space, default=default, exclude=[known], hints=[*outside, default, known, legal, legal, told])
        tuner.tell([(told, 5.0)])
        asked = tuner.ask(1000)
        assert asked[:2] == [default, legal]
        assert len(asked) == len(set(asked)) == 498 and {known, told}.isdisjoint(asked)

    def test_results_of_other_tasks_are_evidence_and_no_results(self) -> None:
        """Every configuration is still proposed, in the same order every time; values outside the space are ignored."""
        space = small_space()
        everything = space.sample(1000, np.random.default_rng(3))
        sources: list[list[tuple[Config, float | None]]] = [
            [(config, 100.0 + int(config["a"])) for config in everything],
            [(Config(a=99, b=0, c="p", d=True), 1.0), (Config(a=0, b=1, c="p", d=True), None)],
            [(config, None) for config in everything[:5]],
        ]
        orders = []
        for _ in range(2):
            tuner = self.make(space)
            tuner.transfer(sources)
            asked: list[Config] = []
            while configs := tuner.ask(16):
                tuner.tell([(config, 100.0 + int(config["b"])) for config in configs])
                asked += configs
            assert len(asked) == len(set(asked)) == 500
            orders.append(asked)
        assert orders[0] == orders[1]

    def test_an_illegal_default_is_the_callers_mistake(self) -> None:
        with pytest.raises(ConfigError, match="a \\+ b is even"):
            self.make(small_space(), default=Config(a=0, b=1, c="p", d=True))

    def test_what_is_excluded_or_told_is_never_proposed(self) -> None:
        space = small_space()
        known = space.sample(200, np.random.default_rng(3))
        tuner = self.make(space, default=known[0], exclude=known[:100])
        tuner.tell([(config, 1000.0 + i) for i, config in enumerate(known[100:])])
        asked = tuner.ask(1000)
        assert set(asked) == set(space.sample(1000, np.random.default_rng(0))) - set(known)

    def test_the_seed_decides_in_every_process(self) -> None:
        """The same with another hash seed: the order of sets or hashes must not change the proposals."""
        script = (
            "import sys, hashlib, schedsearch.testing.tuner_contract as c\n"
            "from schedsearch.tuner import make_tuner\n"
            "asked = c.drive(make_tuner(sys.argv[1], c.billion_space(), seed=5), 60)\n"
            "print('\\n'.join(config.json for config in asked))"
        )
        here = [config.json for config in drive(self.make(billion_space(), seed=5), 60)]
        for hash_seed in ("1", "2"):
            there = subprocess.run(
                [sys.executable, "-c", script, self.name],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            )
            assert there.stdout.split() == here

    def test_survives_failures_only_and_exhausts_the_space(self) -> None:
        tuner = self.make(small_space())
        asked: list[Config] = []
        while not tuner.finished:
            configs = tuner.ask(tuner.batch)
            tuner.tell([(config, None) for config in configs])
            asked += configs
        assert len(asked) == len(set(asked)) == 500
        assert tuner.ask(1) == []

    def test_exhausts_the_space_with_times_too(self) -> None:
        tuner = self.make(small_space())
        asked: list[Config] = []
        while configs := tuner.ask(16):
            tuner.tell([(config, 100.0 + int(config["a"]) + 7 * bool(config["d"])) for config in configs])
            asked += configs
        assert tuner.finished
        assert len(asked) == len(set(asked)) == 500

    def test_equal_times_are_no_problem(self) -> None:
        tuner = self.make(small_space())
        for _ in range(10):
            tuner.tell([(config, 5.0) for config in tuner.ask(8)])

    def test_a_space_of_one_configuration(self) -> None:
        only = Config(a=2, b="x")
        for default in (None, only):
            tuner = self.make(single_space(), default=default)
            assert tuner.ask(8) == [only]
            tuner.tell([(only, 5.0)])
            assert tuner.ask(8) == []
            assert tuner.finished

    def test_may_be_asked_while_earlier_proposals_are_unmeasured(self) -> None:
        tuner = self.make(billion_space())
        waiting: list[Config] = []
        seen: set[Config] = set()
        for _ in range(40):
            configs = tuner.ask(3)
            assert len(configs) == 3
            assert seen.isdisjoint(configs)
            seen.update(configs)
            waiting += configs
            if len(waiting) >= 24:  # results arrive late and out of order
                tuner.tell([(config, outcome(config)) for config in reversed(waiting[:5])])
                del waiting[:5]

    def test_ignores_results_from_outside_the_space(self) -> None:
        tuner = self.make(small_space())
        tuner.tell(
            [(Config(a=99, b=0, c="p", d=True), 1.0), (Config(other=1), None), (Config(a=0, b=1, c="p", d=True), 1.0)]
        )
        assert len(tuner.ask(8)) == 8

    @pytest.mark.parametrize("time", [0.0, -1.0, math.inf, math.nan])
    def test_a_time_is_positive_and_finite(self, time: float) -> None:
        tuner = self.make(small_space())
        with pytest.raises(ValueError, match="positive"):
            tuner.tell([(tuner.ask(1)[0], time)])

    def test_scores_have_one_entry_per_configuration(self) -> None:
        space = billion_space()
        tuner = self.make(space)
        drive(tuner, 64)
        scores = tuner.predict(space.sample(10, np.random.default_rng(1)))
        assert scores is None or scores.shape == (10,)

    def test_tunes_a_billion_points_within_200_mb(self) -> None:
        script = (
            "import sys, schedsearch.testing.tuner_contract as c\n"
            "from schedsearch.tuner import make_tuner\n"
            "space = c.billion_space()\n"
            "assert space.cardinality > 1e9 and space.size.count > 1e8\n"
            "tuner = make_tuner(sys.argv[1], space, seed=0)\n"
            "asked = c.drive(tuner, 160)\n"
            "assert len(space.neighbours(space.indices(asked[:1])[0])) > 10\n"
            "space.encode(space.sample_indices(4096, tuner.rng))\n"
            # Not ru_maxrss: it starts with the parent's value at the time when this process was made.
            "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
            "print(int(status['VmHWM'].split()[0]) / 1024)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, self.name],
            capture_output=True,
            text=True,
            check=True,
        )
        assert float(done.stdout) < 200
