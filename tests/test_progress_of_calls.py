"""No call of the public API is silent for more than two seconds in a terminal, whatever takes long in it.

The clock is a fake: it stands still, except in the functions that are made slow here.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import schedsearch as cli
from numba import cuda
from session_support import World

import schedsearch
from schedsearch import progress

LONGEST_S = 2.0
SLOW_S = 7.0
CONVOLUTION = schedsearch.Workload.conv2d(n=1, h=6, w=6, c=4, k=4, r=1, s=1, dtype="float32")


class FakeClock(progress.Clock):
    """Time that only `pass_` moves. It goes on when all displays have done what is due."""

    def __init__(self) -> None:
        self._now, self._changed, self._until = 0.0, threading.Condition(), dict[int, float]()

    def now(self) -> float:
        return self._now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        me = threading.get_ident()
        with self._changed:
            self._until[me] = self._now + seconds
            self._changed.notify_all()
            while self._now < self._until[me] and not event.is_set():
                self._changed.wait(0.01)
            del self._until[me]
        return event.is_set()

    def pass_(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            with self._changed:
                self._now += 0.25
                self._changed.notify_all()
                assert self._changed.wait_for(self._idle, timeout=30)

    def _idle(self) -> bool:
        hearts = [thread.ident for thread in threading.enumerate() if thread.name == "progress"]
        return all(self._until.get(each or 0, 0.0) > self._now for each in hearts)


class Recorder:
    """A screen that keeps when something was drawn or said."""

    every_s, in_place = 0.2, True

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.shown: list[tuple[float, str]] = []

    def draw(self, lines: Callable[[int], Sequence[str]]) -> None:
        self.shown.append((self._clock.now(), "\n".join(lines(80))))

    def say(self, text: str) -> None:
        self.shown.append((self._clock.now(), text))

    def close(self) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    found = FakeClock()
    monkeypatch.setattr(progress, "CLOCK", found)
    return found


@pytest.fixture
def screen(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(clock)
    monkeypatch.setattr(progress, "screen_here", lambda: found)
    return found


@pytest.fixture
def slow(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a function, "module:name" or "module:class.name", take `SLOW_S` longer."""

    def make(place: str) -> None:
        module, _, path = place.partition(":")
        *classes, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in classes:
            owner = getattr(owner, each)
        real = getattr(owner, name)

        def slowly(*args: Any, **named: Any) -> Any:
            clock.pass_(SLOW_S)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, slowly)

    return make


def check(screen: Recorder, clock: FakeClock, *words: str) -> None:
    """That something was shown all the time, and these words among it."""
    times = [0.0, *(time_s for time_s, _ in screen.shown), clock.now()]
    assert clock.now() >= SLOW_S
    assert max(after - before for before, after in itertools.pairwise(times)) <= LONGEST_S
    text = "\n".join(shown for _, shown in screen.shown)
    assert [word for word in words if word not in text] == []


@pytest.fixture
def pretended(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a simulated world, with a device that is in use, in which each measurement takes long."""

    def run(plans: Any, *args: Any, on_wait: Any, observers: Any, **named: Any) -> Any:
        on_wait("waiting for a CPU: in use by process 7 (python)")
        clock.pass_(SLOW_S)
        world = World(before=lambda *_: clock.pass_(0.5))
        return world.tune(trials=20, observers=observers)

    monkeypatch.setattr(importlib.import_module("schedsearch.session.tune"), "_run", run)


def double(x, y):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < x.size:
        y[i] = 2 * x[i]


def own(tmp_path: Path) -> Any:
    return schedsearch.tunable(
        knobs={"threads": (64, 128)}, grid=lambda x, k: -(-x.size // k.threads), block=lambda k: k.threads,
        outputs=["y"], reference=lambda x: 2 * x, db=tmp_path / "own.db",
    )(double)  # fmt: skip


RUN = ("waiting for a CPU: in use by process 7 (python)", "of 20 trials", "left", "best")


@pytest.mark.usefixtures("pretended")
class TestTuning:
    def test_tune(self, slow: Any, screen: Recorder, clock: FakeClock) -> None:
        for place in ("places:detect_all", "tune:plan_tasks"):
            slow(f"schedsearch.session.{place}")
        schedsearch.tune([CONVOLUTION], "none.db", target="cpu", trials=20)
        check(screen, clock, *RUN, "x as fast as the default; 20 trials in")

    def test_a_kernel_of_ones_own(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        slow("schedsearch.session.tune:plan_tasks")
        own(tmp_path).tune(np.ones(99, np.float32), np.ones(99, np.float32), trials=20)
        check(screen, clock, *RUN, "kept in records.db")

    def test_progress_false_is_silent(self, screen: Recorder, capfd: pytest.CaptureFixture[str]) -> None:
        schedsearch.tune([CONVOLUTION], "none.db", target="cpu", trials=20, progress=False)
        assert screen.shown == [] and capfd.readouterr() == ("", "")


class TestWithoutTuning:
    def test_compile_from_no_record(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        slow("schedsearch.runtime.loading:Build.load")
        with contextlib.closing(schedsearch.compile(CONVOLUTION, tmp_path / "none.db", target="cpu")):
            pass
        check(screen, clock, "rule-based configuration of conv2d_cpu, built now")

    @pytest.mark.filterwarnings("ignore::schedsearch.errors.UntunedWarning")
    def test_the_first_call_of_a_kernel(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        slow("schedsearch.runtime.loading:Build.load")
        own(tmp_path)(np.ones(99, np.float32), np.ones(99, np.float32))
        check(screen, clock, "built now: double x=99")


def small_model(tmp_path: Path, open_size: str | int = 1) -> Path:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnx_ir")
    helper, float_ = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    ends = [helper.make_tensor_value_info(name, float_, [open_size, 4, 6, 6]) for name in ("x", "y")]
    path = tmp_path / "small.onnx"
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


class TestBuild:
    def test_a_network(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        path = small_model(tmp_path)
        for place in ("build_options:detect", "build:read", "build:lowered", "planned:find_kernels", "build:assemble"):
            slow(f"schedsearch.executable.{place}")
        slow("schedsearch.network_check.check:check")
        slow("schedsearch.executable.fixed:FixedNet.save")
        schedsearch.build(path, db=tmp_path / "none.db", target="cpu", out=tmp_path / "small.ssx").close()
        check(
            screen,
            clock,
            "looking for 1 kernel",
            "comparing the network with small.onnx",
            "writing ",
            "; 1 of 1 kernel without a record; built in ",
        )

    def test_running_it_by_the_command(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        path, built = small_model(tmp_path), tmp_path / "small.ssx"
        schedsearch.build(path, db=tmp_path / "none.db", target="cpu", out=built, progress=False).close()
        for place in ("file:load", "compare:layer_errors", "compare:onnxruntime_time", "fixed:FixedNet.measure"):
            slow(f"schedsearch.executable.{place}")
        ran = cli("run", str(built), "--target", "cpu", "--compare", str(path), "--repeat", "2")
        assert ran.exit_code == 0, ran.output
        check(screen, clock, "loading small.ssx", "comparing every layer with small.onnx", "timing the network")

    def test_tuning_within(
        self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(until: Any, tasks: Any, db: Any, *, on_wait: Any, observers: Any, **named: Any) -> Any:
            on_wait("waiting for a CPU: in use by process 7 (python)")
            clock.pass_(SLOW_S)
            return World(before=lambda *_: clock.pass_(0.5)).tune(trials=20, observers=observers)

        monkeypatch.setattr(importlib.import_module("schedsearch.session.tune"), "tune_until", run)
        path = small_model(tmp_path)
        schedsearch.build(path, db=tmp_path / "none.db", target="cpu", check=False, tune_s=60).close()
        check(screen, clock, *RUN, "tuning 1 of 1 kernel")

    def test_a_table_of_sizes(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        path = small_model(tmp_path, "n")
        for place in (
            "dynamic.build:read_file",
            "dynamic.build:read_sized",
            "executable.sized_build:SizedBuild._shared_code",
        ):
            slow(f"schedsearch.{place}")
        schedsearch.build_dynamic(path, {"n": (1, 2)}, db=tmp_path / "none.db", target="cpu", check=False).close()
        check(screen, clock, "reading small.onnx", "compiling and verifying conv2d", "a table of kernels; ")

    @pytest.mark.long
    def test_a_graph(self, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path) -> None:
        path = small_model(tmp_path, "n")
        for place in ("read_file", "_read", "machine_code"):
            slow(f"schedsearch.dynamic.build:{place}")
        options: dict[str, Any] = {"run_mode": "exact", "db": tmp_path / "none.db", "target": "cpu", "check": False}
        schedsearch.build_dynamic(path, {"n": (1, 2)}, **options).close()
        check(screen, clock, "planning the graph of small.onnx", "compiling and verifying the kernels", "runs exact; ")

    def test_lines_go_to_who_asks_for_them(self, screen: Recorder, tmp_path: Path) -> None:
        said: list[str] = []
        options: dict[str, Any] = {"db": tmp_path / "none.db", "target": "cpu", "check": False}
        schedsearch.build(small_model(tmp_path), say=said.append, **options).close()
        assert screen.shown == [] and any("1 different kernel" in line for line in said)


class TestPyTorch:
    @pytest.fixture
    def model(self) -> Iterator[tuple[Any, Any]]:
        torch = pytest.importorskip("torch")
        layers = [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU()]
        model = torch.nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)
        yield model, torch.ones(1, 8, 6, 6).to(memory_format=torch.channels_last)

    def test_optimize(
        self, model: Any, slow: Any, screen: Recorder, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(deadline: Any, tasks: Any, db: Any, *, on_wait: Any, observers: Any, **named: Any) -> Any:
            on_wait("waiting for a CPU: in use by process 7 (python)")
            return World(before=lambda *_: clock.pass_(0.5)).tune(trials=20, observers=observers)

        monkeypatch.setattr(importlib.import_module("schedsearch.session.tune"), "tune_until", run)
        slow("schedsearch.torch.models.optimize:kernels_of")
        slow("schedsearch.torch.models.optimize:_places")
        slow("schedsearch.torch.layers.selection:LayerSelector.select")
        schedsearch.torch.optimize_(*model, db=tmp_path / "t.db", tune=True, tune_s=60)
        check(
            screen, clock, *RUN, "exporting the model", "measuring layer 0", "the model remains as it was: none of 1 layer"
        )
