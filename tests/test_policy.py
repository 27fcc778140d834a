"""How a record was measured, as a policy: from its mode and from what it says beside its time."""

from __future__ import annotations

import pytest

from schedsearch.measurement import (
    CHAIN_GRAPH,
    COLD_GRAPH,
    COLD_GRAPH_PREPARED,
    HOT_GRAPH,
    MODES,
    Measurement,
    Outcome,
    Policy,
)


@pytest.mark.parametrize(
    ("mode", "operands", "constants"),
    [
        (COLD_GRAPH, "cold", "plain"),
        (COLD_GRAPH_PREPARED, "cold", "prepared"),
        (HOT_GRAPH, "hot", "plain"),
        (CHAIN_GRAPH, "chain", "prepared"),
        (f"{COLD_GRAPH}/n=1..64", "cold", "plain"),
    ],
)
def test_the_mode_says_how_operands_and_constants_were(mode: str, operands: str, constants: str) -> None:
    policy = Measurement(Outcome.OK, mode, times_ns=(5.0,)).policy("cuda")
    assert (policy.operands, policy.constants, policy.launched, policy.load) == (operands, constants, "graph", "burst")


def test_every_mode_has_a_policy_of_its_own() -> None:
    policies = [str(Measurement(Outcome.OK, mode, times_ns=(5.0,)).policy("cuda")) for mode in MODES]
    assert len(set(policies)) == len(MODES)


def test_a_time_under_load_and_the_clocks_are_part_of_it() -> None:
    facts = {"sm_mhz": 1980, "throttle": "none", "sets": 12, "rotated_bytes": 10**8}
    measured = Measurement(Outcome.OK, times_ns=(5.0,), sustained_ns=6.0, clocks=facts)
    assert measured.policy("cuda") == Policy(
        "cold", "plain", "graph", "burst and sustained", {"sm_mhz": 1980, "throttle": "none"}
    )


def test_a_cpu_launches_calls_in_a_row() -> None:
    assert Measurement(Outcome.OK, times_ns=(5.0,)).policy("cpu").launched == "calls"
