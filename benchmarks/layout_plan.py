"""The layout planner beside an integer program, pairwise planning as TVM does it, and the baselines, on made-up times.

    python benchmarks/layout_plan.py --out benchmarks/results/layout_plan.json

Needs no device. Networks are ResNet-50, VGG-16 and Inception-v3 at batch 1 in int8. A convolution's time follows from its
work and is raised at random by up to `spread` for each pair of layouts; conversions, pools and concats take what their bytes
take. Each loss is a plan's time over that of the best plan, the mean over the seeds. Seconds are CPU time: the planner reads
the layouts of all implementations, the other two get them for free.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from layout_graphs import LAYOUTS, NETWORKS
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from schedsearch import Workload
from schedsearch.network.choices import Choices
from schedsearch.network.costs import Cost, Costs
from schedsearch.network.graph import Network, View
from schedsearch.network.layouts import canonical, conversion, uses
from schedsearch.network.plan import complete, fastest_kernels, priced, uniform_plan

LAUNCH_NS = 1500.0
BYTES_PER_NS = 3000.0  # of a large copy on an H200, read and written
OPERATIONS_PER_NS = 9e5  # of a good int8 convolution


def made_up(seed: int, spread: float) -> Costs:
    """Costs that depend on the workload and the seed only."""
    known: dict[Workload, Cost] = {}

    def costs(workload: Workload) -> Cost:
        if workload not in known:
            if workload.op == "conv2d":
                luck = random.Random(f"{seed} {workload.id}").random()
                time_ns = (2000.0 + workload.flops / OPERATIONS_PER_NS) * (1 + spread * luck)
            else:
                time_ns = LAUNCH_NS + workload.min_bytes / BYTES_PER_NS
            known[workload] = Cost(time_ns, "record", "made up")
        return known[workload]

    return costs


class Pairs:
    """What both other planners see: the time of each implementation, and each value's layout there."""

    def __init__(self, network: Network, costs: Costs) -> None:
        self.network, self.costs = network, costs
        self.times: list[list[float]] = []
        self.reads: list[list[list[tuple[str, str]]]] = []  # of each implementation of each node
        self.writes: list[list[list[tuple[str, str]]]] = []
        for node in network.nodes:
            assert not isinstance(node, View)
            every = uses(network, node)
            self.times.append([costs(choice).time_ns for choice in node.implementations])
            self.reads.append([[self._canonical(each) for each in use.reads] for use in every])
            self.writes.append([[self._canonical(each) for each in use.writes] for use in every])
        self.maker = {writes[0][0][0]: place for place, writes in enumerate(self.writes)}
        self._times: dict[tuple[str, str, str], float] = {}

    def _canonical(self, pair: tuple[str, str]) -> tuple[str, str]:
        return pair[0], canonical(self.network.values[pair[0]], pair[1])

    def conversion_ns(self, name: str, x: str, y: str) -> float:
        """Of a value's layouts; 0 if they are equal."""
        key = name, x, y
        if key not in self._times:
            workload = None if x == y else conversion(self.network.values[name], x, y)
            self._times[key] = 0.0 if workload is None else self.costs(workload).time_ns
        return self._times[key]

    def plan_ns(self, choices: list[int]) -> float:
        chosen = {node.name: choice for node, choice in zip(self.network.nodes, choices)}
        return priced(complete(self.network, chosen), self.costs).predicted_ns


def integer_program(pairs: Pairs) -> list[int]:
    """The best implementation of each node, by HiGHS. One variable says whether a node takes an implementation, one whether
    a value is converted from one layout into another."""
    costs: list[float] = []
    rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least and largest sum

    def variable(cost: float) -> int:
        costs.append(cost)
        return len(costs) - 1

    takes = [[variable(time_ns) for time_ns in times] for times in pairs.times]
    whole = len(costs)
    rows += [(dict.fromkeys(choices, 1.0), 1.0, 1.0) for choices in takes]
    converted: dict[tuple[str, str, str], int] = {}

    def made_in(name: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        if name in pairs.maker:
            place = pairs.maker[name]
            for choice, writes in enumerate(pairs.writes[place]):
                found.setdefault(dict(writes)[name], []).append(takes[place][choice])
        return found

    def is_converted(name: str, x: str, y: str) -> int:
        key = name, x, y
        if key not in converted:
            converted[key] = variable(pairs.conversion_ns(name, x, y))
            if name in pairs.maker:  # only what is made in x is converted from x
                rows.append(({converted[key]: -1.0} | dict.fromkeys(made_in(name)[x], 1.0), 0.0, np.inf))
        return converted[key]

    def require(name: str, y: str, readers: list[int]) -> None:
        """Readers in layout y, or the caller if there are none, need the value made so or converted."""
        makers = made_in(name)
        there: dict[int, float] = dict.fromkeys(makers.get(y, []), 1.0)
        for x in makers:
            if x != y:
                there[is_converted(name, x, y)] = 1.0
        if name in pairs.network.inputs and y != (plain := pairs.network.values[name].axes):
            there[is_converted(name, plain, y)] = 1.0
        elif name in pairs.network.inputs:
            return
        rows.append((there | dict.fromkeys(readers, -1.0), 0.0 if readers else 1.0, np.inf))

    for place, every in enumerate(pairs.reads):
        for number, (name, _) in enumerate(every[0]):
            for y in dict.fromkeys(reads[number][1] for reads in every):
                require(name, y, [takes[place][choice] for choice, reads in enumerate(every) if reads[number][1] == y])
    for name in pairs.network.outputs:
        require(name, pairs.network.values[name].axes, [])
    entries = [(row, column, value) for row, (parts, _, _) in enumerate(rows) for column, value in parts.items()]
    row_of, column_of, values = zip(*entries)
    matrix = coo_array((values, (row_of, column_of)), shape=(len(rows), len(costs))).tocsr()
    limits = LinearConstraint(matrix, [least for _, least, _ in rows], [largest for _, _, largest in rows])
    integral = np.array([1] * whole + [0] * (len(costs) - whole))
    solution = milp(
        np.array(costs), constraints=limits, integrality=integral, bounds=Bounds(0, 1), options={"mip_rel_gap": 0}
    )
    return [max(range(len(choices)), key=lambda choice: solution.x[choices[choice]]) for choices in takes]


def pairwise(pairs: Pairs) -> list[int]:
    """A partitioned Boolean quadratic program as TVM plans layouts: a cost for each edge, so that each reader pays for its
    own conversion. Nodes with one or two neighbours are reduced exactly; of others, the one with the most is fixed."""
    own = [np.array(times) for times in pairs.times]
    edges: dict[tuple[int, int], np.ndarray] = {}

    def add(one: int, other: int, table: np.ndarray) -> None:
        if one > other:
            one, other, table = other, one, table.T
        edges[one, other] = edges.get((one, other), 0.0) + table

    def between(one: int, other: int) -> np.ndarray:
        return edges[one, other] if one < other else edges[other, one].T

    for place, every in enumerate(pairs.reads):
        for number, (name, _) in enumerate(every[0]):
            layouts = [reads[number][1] for reads in every]
            if name not in pairs.maker:
                plain = pairs.network.values[name].axes
                own[place] = own[place] + [pairs.conversion_ns(name, plain, layout) for layout in layouts]
                continue
            maker = pairs.maker[name]
            made = [dict(writes)[name] for writes in pairs.writes[maker]]
            add(maker, place, np.array([[pairs.conversion_ns(name, x, y) for y in layouts] for x in made]))
    for name in pairs.network.outputs:
        maker, plain = pairs.maker[name], pairs.network.values[name].axes
        own[maker] = own[maker] + [pairs.conversion_ns(name, dict(writes)[name], plain) for writes in pairs.writes[maker]]
    neighbours = {place: {sum(edge) - place for edge in edges if place in edge} for place in range(len(own))}
    fixed: dict[int, int] = {}
    stack: list[tuple[int, list[int]]] = []
    while neighbours:
        place = next((each for each in sorted(neighbours) if len(neighbours[each]) <= 2), None)
        if place is None:
            place = max(sorted(neighbours), key=lambda each: len(neighbours[each]))
            total = own[place] + sum((between(place, each) + own[each]).min(axis=1) for each in sorted(neighbours[place]))
            fixed[place] = int(total.argmin())
            for each in neighbours[place]:
                own[each] = own[each] + between(place, each)[fixed[place]]
        elif len(around := sorted(neighbours[place])) == 1:
            own[around[0]] = own[around[0]] + (between(around[0], place) + own[place]).min(axis=1)
        elif len(around) == 2:
            one, other = around
            add(one, other, (between(one, place)[:, None] + between(other, place)[None] + own[place]).min(axis=2))
            neighbours[one].add(other)
            neighbours[other].add(one)
        stack.append((place, sorted(neighbours[place])))
        for each in neighbours.pop(place):
            neighbours[each].discard(place)
    for place, around in reversed(stack):
        if place not in fixed:
            fixed[place] = int((own[place] + sum(between(place, each)[:, fixed[each]] for each in around)).argmin())
    return [fixed[place] for place in range(len(own))]


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    return run(), time.process_time() - started


def measure(name: str, layouts: tuple[str, ...], spread: float, seeds: int) -> dict[str, Any]:
    network = NETWORKS[name](layouts)
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        costs = made_up(seed, spread)
        Choices(network, costs)  # the costs are known from here on
        choices, planner_s = timed(lambda: Choices(network, costs))  # noqa: B023
        best_ns = priced(complete(network, choices.best()), costs).predicted_ns
        assert abs(best_ns - choices.solution.cost) < 1e-6 * best_ns
        pairs = Pairs(network, costs)
        (program, program_s), (pbqp, pairwise_s) = timed(lambda: integer_program(pairs)), timed(lambda: pairwise(pairs))  # noqa: B023
        row = {
            "best_us": best_ns / 1e3,
            "planner_s": planner_s,
            "integer_program_s": program_s,
            "pairwise_s": pairwise_s,
            "integer_program_loss": pairs.plan_ns(program) / best_ns,
            "pairwise_loss": pairs.plan_ns(pbqp) / best_ns,
            "fastest_kernels_loss": fastest_kernels(network, costs).predicted_ns / best_ns,
            "all_nhwc_loss": uniform_plan(network, costs, "NHWC").predicted_ns / best_ns,
            "conversions": len(complete(network, choices.best()).conversions),
            "largest_table": choices.solution.largest,
        }
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    return {
        "network": name,
        "nodes": len(network.nodes),
        "ways": sum(len(node.implementations) for node in network.nodes if not isinstance(node, View)),
        "layouts": len(layouts),
        "spread": spread,
        "seeds": seeds,
        **{key: round(statistics.mean(values), 5) for key, values in found.items()},
        "integer_program_least_loss": min(found["integer_program_loss"]),
        "pairwise_largest_loss": max(found["pairwise_loss"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", help="JSON file for the data")
    args = parser.parse_args()
    rows = []
    print("losses over the best plan; seconds of CPU")
    print(
        f"{'network':<14}layouts spread  nodes  ways   planner  program pairwise |"
        "  program pairwise  fastest     NHWC  conversions"
    )
    for name in NETWORKS:
        for layouts in (LAYOUTS[:2], LAYOUTS[:5], LAYOUTS):
            for spread in (0.3, 1.0):
                row = measure(name, layouts, spread, args.seeds)
                rows.append(row)
                seconds = "".join(f"{row[key]:9.3f}" for key in ("planner_s", "integer_program_s", "pairwise_s"))
                losses = "".join(
                    f"{row[f'{key}_loss']:9.4f}" for key in ("integer_program", "pairwise", "fastest_kernels", "all_nhwc")
                )
                print(
                    f"{name:<14}{len(layouts):>7}{spread:>7}{row['nodes']:>7}{row['ways']:>6}{seconds} |{losses}"
                    f"{row['conversions']:>6.1f}",
                    flush=True,
                )
    common.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
