"""What computes a layer, a graph or a model: PyTorch as the user would have it, unless something is clearly faster.

The times are made up, so that the same candidates win on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from hypothesis import given
from hypothesis import strategies as st

from schedsearch.deadline import Deadline
from schedsearch.torch.comparison.benchmark import PYTORCH, SLOWER, benchmark
from schedsearch.torch.comparison.timing import Candidate, Sampler

pytestmark = pytest.mark.integrations


class Samples(Sampler):
    """Measures made-up times, turn by turn.

    Args:
        times_ns: name -> one time for each turn, again and again; an exception is raised.
    """

    def __init__(self, **times_ns: Any) -> None:
        self.times_ns, self.order = times_ns, list[str]()

    def sampler(self, runs: Candidate) -> Callable[[], float]:
        runs[0]()
        times = itertools.cycle(self.times_ns[runs.name])

        def sample() -> float:
            self.order.append(runs.name)
            time_ns = next(times)
            if isinstance(time_ns, Exception):
                raise time_ns
            return float(time_ns)

        return sample


def candidate(name: str, run: Callable[[], Any] = lambda: None) -> Candidate:
    return Candidate(name, run)


def won(*timers: Samples, names: tuple[str, ...] = ("layers", "network")) -> Any:
    return benchmark(timers, candidate(PYTORCH), [candidate(name) for name in names])


@given(
    st.dictionaries(st.sampled_from(["layers", "network", "parts"]), st.integers(1, 1000), min_size=1), st.integers(1, 1000)
)
def test_the_fastest_wins_and_a_tie_is_pytorchs(times_ns: dict[str, int], pytorch_ns: int) -> None:
    timer = Samples(**{name: [each] for name, each in times_ns.items()}, PyTorch=[pytorch_ns])
    result = won(timer, names=tuple(times_ns))
    least = min(times_ns.values())
    if least < 0.98 * pytorch_ns:
        assert times_ns[result.winner] == least
    else:
        assert result.winner == PYTORCH
        assert result.problems == dict.fromkeys(times_ns, SLOWER)
    assert result.times_ns == {**times_ns, PYTORCH: pytorch_ns}


def test_what_is_compared_is_the_graph_as_the_user_would_have_it() -> None:
    """A network that beats the graph with kernels for layers, and not the plain one: shufflenet_v2_x1_0 at batch 1."""
    result = won(Samples(layers=[403.0], network=[392.0], PyTorch=[357.0]))
    assert result.winner == PYTORCH and result.times_ns == {"layers": 403.0, "network": 392.0, PYTORCH: 357.0}


def test_candidates_are_measured_in_turns() -> None:
    timer = Samples(layers=[1.0], network=[2.0], PyTorch=[3.0])
    won(timer)
    assert timer.order[:6] == ["layers", "network", PYTORCH] * 2


def test_a_candidate_that_is_faster_by_noise_only_does_not_win() -> None:
    """Its median is the least, but it loses three of seven turns."""
    noisy = [50.0, 150.0, 50.0, 150.0, 50.0, 150.0, 50.0]
    assert won(Samples(network=noisy, PyTorch=[100.0]), names=("network",)).winner == PYTORCH
    assert won(Samples(network=[50.0], PyTorch=[100.0]), names=("network",)).winner == "network"


def test_a_winner_is_faster_in_every_way_in_which_callers_may_run_it() -> None:
    captured, called = Samples(network=[1.0], PyTorch=[2.0]), Samples(network=[3.0], PyTorch=[2.0])
    result = won(captured, called, names=("network",))
    assert result.winner == PYTORCH and result.times_ns == {"network": 1.0, PYTORCH: 2.0}


def fails() -> None:
    raise RuntimeError("it cannot be captured\nand more")


@pytest.mark.parametrize("when", ["it is prepared", "it is measured"])
def test_a_candidate_that_fails_is_data(when: str) -> None:
    times: list[Any] = [1.0, RuntimeError("it cannot be captured")] if when == "it is measured" else [1.0]
    broken = candidate("network", fails if when == "it is prepared" else lambda: None)
    timer = Samples(network=times, layers=[1.0], PyTorch=[2.0])
    result = benchmark([timer], candidate(PYTORCH), [broken, candidate("layers")])
    assert result.winner == "layers" and result.problems == {"network": "RuntimeError: it cannot be captured"}
    assert "network" not in result.times_ns


def test_nothing_is_compared_with_a_graph_that_cannot_be_measured() -> None:
    result = benchmark([Samples(network=[1.0])], candidate(PYTORCH, fails), [candidate("network")])
    assert result.winner == PYTORCH and not result.times_ns
    assert result.problems["network"] == "PyTorch could not be measured: RuntimeError: it cannot be captured"


def test_a_state_is_entered_outside_of_what_is_measured() -> None:
    inside, seen = [False], list[bool]()

    @contextmanager
    def around() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    pytorch = Candidate(PYTORCH, lambda: seen.append(inside[0]), around=around)
    benchmark([Samples(network=[1.0], PyTorch=[2.0])], pytorch, [candidate("network", lambda: seen.append(inside[0]))])
    assert seen == [False, True]


def test_there_are_fewer_turns_when_the_time_is_over() -> None:
    timer = Samples(network=[1.0], PyTorch=[2.0])
    assert benchmark([timer], candidate(PYTORCH), [candidate("network")], Deadline(0.0, lambda: 1.0)).winner == "network"
    assert len(timer.order) == 2 * 3
