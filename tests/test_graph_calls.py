"""What a graph of kernels reads and writes in each call of a network: tests/graph_calls.py, on a driver that takes notes."""

from __future__ import annotations

import pytest
from c_export_support import fake_driver, run_script

pytest.importorskip("cuda.bindings")

UPDATE = "update"  # of the arguments of one of the two kernels
Steps = dict[str, list[str]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    folder = tmp_path_factory.mktemp("graph")
    found: Steps = run_script("graph_calls.py", fake_driver(folder / "driver"), folder, FAKE_LOG=str(folder / "log"))
    return found


def test_a_call_launches_one_graph_with_the_arrays_of_this_call(seen: Steps) -> None:
    assert seen["first"] == ["graph on 0: a y"]
    assert seen["twice to out"] == [UPDATE, *["graph on 0: a out"] * 2]
    assert seen["a new output"] == [UPDATE, "graph on 0: a y"]
    assert seen["another input"] == [UPDATE, UPDATE, "graph on 0: b y"]  # `kept` is left alone


def test_a_repeated_call_updates_nothing(seen: Steps) -> None:
    assert seen["the same addresses"] == ["graph on 0: a y"]


def test_an_array_that_is_not_aligned_is_copied(seen: Steps) -> None:
    assert seen["not aligned"] == [UPDATE, UPDATE, "graph on 0:"]
    assert seen["after that"] == [UPDATE, UPDATE, "graph on 0: b y"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("dtype", "x has dtype float64, the kernel takes float32"),
        ("shape", "x has shape (4, 16); allowed: shape (8, 16)"),
        ("strides", "x has strides (16, -1)"),
        ("kind", "x is a list"),
    ],
)
def test_a_wrong_input_is_refused_between_repeated_calls(seen: Steps, wrong: str, text: str) -> None:
    (message,) = seen[f"wrong {wrong}"]  # nothing was launched
    assert text in message
    assert seen["after wrong ones"][-1] == "graph on 0: b y"


def test_two_instances_on_two_streams_keep_their_arrays_apart(seen: Steps) -> None:
    launches = [each for each in seen["two streams"] if each != UPDATE]
    assert launches == ["graph on 1: a y", "graph on 2: b z"]
    launches = [each for each in seen["two streams, other inputs"] if each != UPDATE]
    assert launches == ["graph on 1: b y", "graph on 2: a z"]


def test_bound_steps_keep_their_arrays_whatever_else_is_called(seen: Steps) -> None:
    assert [each for each in seen["bound"] if each != UPDATE] == [
        "graph on 0: a y", "graph on 1: a y", "graph on 2: a other", "graph on 0: b z", "graph on 0: a y",
    ]  # fmt: skip


def test_the_default_stream_is_that_of_the_networks_context(seen: Steps) -> None:
    """The driver takes the default stream of the context that is current."""
    assert seen["another context"][-1] == "graph on 0: a y"
    assert seen["no context"] == ["graph on 0: a y"]


@pytest.mark.parametrize("function", ["cuGraphExecKernelNodeSetParams", "cuGraphLaunch"])
def test_a_call_after_one_that_failed_has_its_own_arrays(seen: Steps, function: str) -> None:
    message, *launched = seen[function]
    assert message.startswith(function)
    assert "failed: CUDA_ERROR (invalid argument)" in message
    assert set(launched) == {UPDATE}
    assert seen[f"after {function}"][-1] == "graph on 0: b y"
    assert seen[f"another after {function}"][-1] == "graph on 0: a y"


def test_a_closed_network_says_so(seen: Steps) -> None:
    assert seen["closed"] == ["the net was closed; load it again"]
