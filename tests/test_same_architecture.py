"""Machine code that was tuned on another card of the same architecture: who is served it, in which order, and who is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records_support import artifact, conv, record

import schedsearch
from schedsearch.errors import NoRecordError
from schedsearch.launch import Artifact
from schedsearch.measurement import COLD_GRAPH
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.runtime.alternatives import Found
from schedsearch.runtime.fallback import Fallback
from schedsearch.target import PRESETS, Target

H200 = PRESETS["h200"]
H100, H20 = replace(H200, name="NVIDIA H100 PCIe", sms=114), replace(H200, name="NVIDIA H20", sms=78)
GH200 = replace(H200, name="NVIDIA GH200 480GB")  # has no record of its own
CODE = artifact()
LEVEL = ("same_architecture",)
LARGEST = max(step.dynamic_shared_bytes for step in CODE.plan.steps)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "records.db") as store:
        yield store


def best(store: Store, target: Target, time_ns: float, code: Artifact = CODE) -> int:
    number = store.append(record(time_ns, number=int(time_ns), target=target.key))
    assert store.promote(number, replace(code, code=target.name.encode()))
    return number


def level(store: Store, target: Target) -> tuple[str, str]:
    """Whether the fallback level same_architecture alone serves, and why."""
    (found,) = schedsearch.explain(conv(), store.path, target=target, allow=LEVEL).levels
    return found.verdict, found.reason


def serve(store: Store, target: Target) -> tuple[Found, list[bytes]]:
    """What serves on this level alone, and the code that the device was asked to load."""
    card: Any = OneCard()
    with Lookup(store.path) as lookup:
        found = Fallback(conv(), target, lookup, store.path, COLD_GRAPH, LEVEL).serve(lambda: card)
    return found, [artifact.code for artifact in card.loaded]


class OneCard:
    """A device that keeps what it is asked to load."""

    def __init__(self) -> None:
        self.loaded: list[Artifact] = []

    def load(self, artifact: Artifact) -> Any:
        self.loaded.append(artifact)
        return artifact


def test_code_of_other_cards_of_one_architecture_is_offered_fastest_first(store: Store) -> None:
    slow, fast = best(store, H100, 1000.0), best(store, H20, 700.0)  # by name the slow one comes first
    with Lookup(store.path) as lookup:
        alternatives = list(Fallback(conv(), GH200, lookup, store.path, COLD_GRAPH, LEVEL).alternatives())
    assert [alternative.reason for alternative in alternatives] == [
        f"record {fast} of {H20.key} by conv2d_wgmma: sm_90a code runs on NVIDIA GH200 480GB",
        f"record {slow} of {H100.key} by conv2d_wgmma: sm_90a code runs on NVIDIA GH200 480GB",
    ]
    assert level(store, GH200) == ("serves", alternatives[0].reason)


def test_the_fastest_code_is_loaded_and_counts_as_not_verified_here(store: Store) -> None:
    best(store, H100, 1000.0)
    fast = best(store, H20, 700.0)
    found, loaded = serve(store, GH200)
    assert loaded == [b"NVIDIA H20"] and not found.verified
    assert (found.provenance.level, found.provenance.record_id) == ("same_architecture", fast)
    assert found.provenance.time_ns is None, "the time is that of another card"


def test_the_cards_own_record_is_left_to_the_level_above(store: Store) -> None:
    best(store, GH200, 500.0)
    assert level(store, GH200) == ("no", "no machine code of another device for this workload runs on NVIDIA GH200 480GB")
    best(store, H100, 1000.0)
    assert serve(store, GH200)[1] == [b"NVIDIA H100 PCIe"]


def test_a_card_is_served_no_code_that_wants_more_shared_memory_than_it_has(store: Store) -> None:
    best(store, H100, 1000.0)
    assert level(store, replace(GH200, shared_bytes_per_block=LARGEST))[0] == "serves"
    small = replace(GH200, shared_bytes_per_block=LARGEST - 1)
    assert level(store, small) == ("no", "no machine code of another device for this workload runs on NVIDIA GH200 480GB")
    with pytest.raises(
        NoRecordError, match="same_architecture: no machine code of another device for this workload runs on"
    ):
        schedsearch.compile(conv(), store.path, target=small, allow=LEVEL)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
    ],
)
def test_a_card_is_served_code_of_its_architecture_only(
    store: Store, arch: str, capability: tuple[int, int], runs: bool
) -> None:
    best(store, H100, 1000.0, replace(CODE, plan=replace(CODE.plan, arch=arch)))
    assert level(store, replace(GH200, compute_capability=capability))[0] == ("serves" if runs else "no")


def test_code_that_this_machine_did_not_sign_is_passed_over(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best(store, H100, 1000.0)
    foreign = best(store, H20, 700.0)
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    verdict, reason = level(store, GH200)
    assert verdict == "no" and reason.endswith(f"; this machine did not sign record {foreign} of {H20.key}")
    own = best(store, replace(H200, name="NVIDIA H200 NVL"), 2000.0)
    found, loaded = serve(store, GH200)
    assert found.provenance.record_id == own and loaded == [b"NVIDIA H200 NVL"]
