"""Costs of workloads for plans of networks, from records and from estimates."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from records_support import A100, H200, conv, record

from schedsearch import Workload, transpose
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH
from schedsearch.network.costs import NOT_FIRST, OVER_ROOFLINE, UNTUNED, RecordCosts
from schedsearch.network.graph import Network, Node
from schedsearch.network.residency import MOST_SAVED, NEIGHBOURS, SAVINGS
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.roofline import least_time_ns, suspect_time_ns
from schedsearch.target import PRESETS, Target
from schedsearch.workload import distance

TARGET = PRESETS["h200"]
HEAVY = dict(n=1, h=1, w=1, c=8192, k=4096, r=1, s=1)  # weights of 64 MiB


@pytest.fixture
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record(1000.0, number=1)))
        store.promote(store.append(record(50.0, number=2, target=A100, workload=conv(k=1024))))
        store.promote(store.append(record(7000.0, number=3, workload=conv(k=512))))
    with Lookup(tmp_path / "records.db") as lookup:
        yield RecordCosts(lookup, TARGET, check=lambda workload: "")


def test_a_recorded_workload_costs_its_best_time(costs: RecordCosts) -> None:
    cost = costs(conv())
    assert (cost.time_ns, cost.origin, cost.record_id, cost.least_ns) == (1000.0, "record", 1, 1000.0)
    assert cost.reason == "record 1 by conv2d_wgmma" and cost.measured


def test_in_a_network_a_call_finds_its_arrays_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    small, large = conv(k=512), conv(n=2048, k=512)
    with Store.open(tmp_path / "records.db") as store:
        for number, (workload, time_ns) in enumerate({small: 7000.0, large: 90000.0, conv(): 600.0}.items()):
            store.promote(store.append(record(time_ns, number=number, workload=workload)))
    x = small.signature[0]
    assert large.signature[0].nbytes > TARGET.l2_bytes / 2 > x.nbytes
    node = Node("n", ("n",), {"x": "x", "weight": "w"}, {"y": "y"}, (small,))
    heavy = Node("h", ("h",), {"x": "x", "weight": "v"}, {"y": "y"}, (Workload.conv2d(**HEAVY),))
    saved = SAVINGS["NVIDIA H200"]
    with Lookup(tmp_path / "records.db") as lookup:
        for nodes in ((node,), (node, heavy)):  # weights are read ahead, whether they stay in the cache or not
            costs = RecordCosts(lookup, TARGET, network=Network((), (), {}, {}, nodes), check=lambda workload: "")
            expected = 7000.0 - saved.call_ns - saved.ns_per_byte * x.nbytes
            assert costs(small).time_ns == pytest.approx(expected) and "us less than cold" in costs(small).reason
            assert costs(large).time_ns == pytest.approx(90000.0 - saved.call_ns)  # too large to stay
            assert costs(conv()).time_ns >= MOST_SAVED * 600.0


def test_a_time_in_a_chain_is_nearly_that_in_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind another kernel a call takes longer."""
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    small = conv(k=512)
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record(7000.0, workload=small, mode=CHAIN_GRAPH)))
    node = Node("n", ("n",), {"x": "x", "weight": "w"}, {"y": "y"}, (small,))
    heavy = Node("h", ("h",), {"x": "x", "weight": "v"}, {"y": "y"}, (Workload.conv2d(**HEAVY),))
    known = NEIGHBOURS["NVIDIA H200"]
    with Lookup(tmp_path / "records.db") as lookup:
        for nodes in ((node,), (node, heavy)):
            costs = RecordCosts(lookup, TARGET, CHAIN_GRAPH, Network((), (), {}, {}, nodes), check=lambda workload: "")
            assert costs(small).time_ns == pytest.approx(7000.0 + known.behind_ns)
            assert "us beside other kernels" in costs(small).reason
        assert RecordCosts(lookup, TARGET, CHAIN_GRAPH, check=lambda workload: "")(small).time_ns == 7000.0


def test_a_record_in_another_mode_costs_what_it_says_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold times count where there are none of a chain, and the other way round; each less what its own mode leaves out."""
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
    cold, chained = conv(k=512), conv(k=256)
    with Store.open(tmp_path / "records.db") as store:
        store.promote(store.append(record(7000.0, workload=cold)))
        store.promote(store.append(record(5000.0, number=2, workload=chained, mode=CHAIN_GRAPH)))
    nodes = tuple(Node(str(each), (str(each),), {"x": "x", "weight": "w"}, {"y": "y"}, (each,)) for each in (cold, chained))
    network = Network((), (), {}, {}, nodes)
    with Lookup(tmp_path / "records.db") as lookup:
        of_cold, of_chain = (
            RecordCosts(lookup, TARGET, mode, network, lambda workload: "") for mode in (COLD_GRAPH, CHAIN_GRAPH)
        )
        assert of_cold(cold).time_ns == of_chain(cold).time_ns < 7000.0
        assert of_cold(chained).time_ns == of_chain(chained).time_ns
        assert "in mode cold-graph-v1" in of_chain(cold).reason and "in mode" not in of_cold(cold).reason


def test_any_other_costs_the_time_of_the_most_similar_one_by_the_ratio_of_their_rooflines(costs: RecordCosts) -> None:
    """Records of this kind of device come first: that of the A100 has the very shape, but is not used."""
    asked, similar = conv(k=1024), conv(k=512)
    assert distance(asked, similar) < distance(asked, conv())
    cost = costs(asked)
    expected = UNTUNED * 7000.0 * suspect_time_ns(asked, H200) / suspect_time_ns(similar, H200)
    assert cost.time_ns == pytest.approx(expected)
    assert (cost.origin, cost.measured, cost.least_ns) == ("scaled", False, least_time_ns(asked, H200))
    assert similar.label in cost.reason


def test_an_operator_without_records_costs_a_multiple_of_its_roofline(costs: RecordCosts) -> None:
    workload = transpose(x=(1024, 1024), permutation=(1, 0))
    cost = costs(workload)
    assert cost.time_ns == OVER_ROOFLINE * suspect_time_ns(workload, H200)
    assert (cost.origin, cost.reason) == ("roofline", "4 times its roofline; there is no record of another transpose")


def test_an_estimated_way_costs_more_if_it_is_not_the_first_of_its_node() -> None:
    workloads = (conv(), conv(layout="NCHW"))
    node = Node("n", ("n",), {"x": "x", "weight": "w"}, {"y": "y"}, workloads)
    costs = RecordCosts(None, TARGET, network=Network((), (), {}, {}, (node,)), check=lambda workload: "")
    assert costs(workloads[1]).time_ns == NOT_FIRST * costs(workloads[0]).time_ns


def test_what_no_template_runs_costs_inf() -> None:
    cost = RecordCosts(None, Target("cpu", "EPYC", simd_bits=512))(conv(dtype="float16"))
    assert math.isinf(cost.time_ns) and cost.origin == "none"
    assert "conv2d_cpu: " in cost.reason


def test_neighbours_have_the_distance_of_workloads(costs: RecordCosts) -> None:
    """The search in groups finds the same one as a look at every record."""
    records = [conv(), conv(k=512)]
    for asked in (conv(n=64), conv(k=300), conv(c=128, k=512), conv(epilogue=["relu"]), conv(layout="NCHW", n=2)):
        nearest = min(records, key=lambda each: distance(asked, each))
        assert nearest.label in costs(asked).reason
