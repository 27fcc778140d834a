"""The constants of the predicted times, card by card: delays in clock cycles, rates in bytes per cycle.

Unless a name says otherwise, a rate is that of one multiprocessor. Each value is a quantity of the machine. Fitted values
are rounded, and `Machine.data` names their measurements in benchmarks/results. A predicted time orders configurations, and a
default needs no more.

To add a card: measure configurations of some layers on it, fit, and add an entry to `MACHINES` under `Target.key`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedsearch.target import Target


@dataclass(frozen=True)
class Im2colFit:
    """conv2d_wgmma.

    Attributes:
        fill_cycles: a block's start: barriers, the tensor maps, the first load's latency.
        load_latency_cycles: from issuing a load to its bytes being in shared memory, as far as rings wait for it.
        step_cycles: a k step besides its multiplications: waiting for barriers, issuing.
        tile_cycles: draining the tensor cores, barriers between warpgroups.
        store_bytes_per_cycle: from accumulators through shared memory to L2.
        l2_bytes_per_cycle: the width of a multiprocessor's port; the fit alone says 56.
        all_l2_bytes_per_cycle: times the multiprocessors; above the 27 of L2 alone, as neighbours ask for the same bytes.
        l2_sector_share, l2_line_cost: of a row's sectors in bytes, and of each line it touches; together 128 for one line.
        unlike_l2_exponent: exponent of split_k or of sharing by multicast, because neighbours then ask for different bytes.
        memory_bytes_per_cycle: times the multiprocessors; operands are read cold.
        memory_overlap: share of the shorter of memory's time and the multiprocessors' that the longer one hides.
        peer_cycles: delay of the last block among blocks that wait for each other.
        peer_step_cycles: delay per k step for each further block that waits.
        cluster_cycles: a barrier of the cluster, and the latency of sums that are sent.
        cluster_bytes_per_cycle: rate of the sums that a multiprocessor sends.
    """

    fill_cycles: float
    load_latency_cycles: float
    step_cycles: float
    tile_cycles: float
    store_bytes_per_cycle: float
    l2_bytes_per_cycle: float
    all_l2_bytes_per_cycle: float
    l2_sector_share: float
    l2_line_cost: float
    unlike_l2_exponent: float
    memory_bytes_per_cycle: float
    memory_overlap: float
    peer_cycles: float
    peer_step_cycles: float
    cluster_cycles: float
    cluster_bytes_per_cycle: float


@dataclass(frozen=True)
class HaloFit:
    """conv2d_halo.

    Attributes:
        l2_bytes_per_cycle: when all multiprocessors load at once, and at most.
        load_latency_cycles: from issuing a load to its bytes being in shared memory.
        tile_cycles: draining the tensor cores, barriers, first store.
    """

    l2_bytes_per_cycle: tuple[float, float]
    load_latency_cycles: float
    tile_cycles: float


@dataclass(frozen=True)
class StemFit:
    """conv2d_stem.

    Attributes:
        fill_cycles: a block's start.
        weight_cycles: a load of weights by each thread, once per block; two are in flight at a time.
        load_latency_cycles: from issuing a load to its bytes being in shared memory.
        round_cycles: from a round's first load from shared memory to its first multiplication.
        tile_cycles: draining the tensor cores, barriers, first store.
        store_bytes_per_cycle: from accumulators through shared memory to L2.
        memory_bytes_per_cycle: times the multiprocessors.
    """

    fill_cycles: float
    weight_cycles: float
    load_latency_cycles: float
    round_cycles: float
    tile_cycles: float
    store_bytes_per_cycle: float
    memory_bytes_per_cycle: float


@dataclass(frozen=True)
class Machine:
    """One card.

    Attributes:
        compute_capability: as in `Target`.
        sms: multiprocessors.
        data: the measurements, in benchmarks/results, that the values were fitted to or compared with.
        launch_cycles: from a kernel's end to the next one's first load in a chain of launches, and its last store.
        idle_sms: multiprocessors that clusters of 4 or 8 leave idle: a cluster must fit in a group (GPC) of 16 or 18.
        shared_bytes_per_cycle: rate of shared memory.
        requantised_per_cycle: 8-bit results that are requantised: 128 threads issue an instruction, and each takes seven.
        staged_again_cycles: until a group of a persistent block can stage its next tile of 8-bit results. 14x14x256 -> 1024
            took 2.84 µs in a chain where a group had two tiles, 7x7x512 -> 2048 with one 2.23; predicted were the same.
        stored_row_cycles: of a row of 8-bit results, of up to 128 bytes, that TMA stores: 32x56x56x64 -> 256 took 69, 38 and
            24 µs with rows of 16, 32 and 64 bytes.
        im2col, halo, stem: constants of one template's prediction. They were fitted one after the other, so quantities of
        the
            same name have different values.
    """

    compute_capability: tuple[int, int]
    sms: int
    data: str
    launch_cycles: int
    idle_sms: int
    shared_bytes_per_cycle: int
    requantised_per_cycle: float
    staged_again_cycles: int
    stored_row_cycles: float
    im2col: Im2colFit
    halo: HaloFit
    stem: StemFit


MACHINES: Mapping[str, Machine] = {
    "cuda:sm_90:132:NVIDIA H200": Machine(
        compute_capability=(9, 0),
        sms=132,
        data="conv2d_configurations_h200.json.gz",
        launch_cycles=4200,
        idle_sms=8,
        shared_bytes_per_cycle=128,
        requantised_per_cycle=18,
        staged_again_cycles=400,
        stored_row_cycles=10,
        # 4000 configurations of 75 layers from 7x7 to 300x300 pixels, and 1000 with split tiles of 13 layers. The
        # configuration that it would choose among the measured ones of a layer takes 1.04 to 1.05 times the fastest's time.
        im2col=Im2colFit(
            fill_cycles=900,
            load_latency_cycles=900,
            step_cycles=32,
            tile_cycles=350,
            store_bytes_per_cycle=24,
            l2_bytes_per_cycle=64,
            all_l2_bytes_per_cycle=46,
            l2_sector_share=0.64,
            l2_line_cost=46,
            unlike_l2_exponent=0.3,
            memory_bytes_per_cycle=14,
            memory_overlap=0.9,
            peer_cycles=900,
            peer_step_cycles=25,
            cluster_cycles=400,
            cluster_bytes_per_cycle=15,
        ),
        halo=HaloFit(l2_bytes_per_cycle=(32, 64), load_latency_cycles=1000, tile_cycles=700),
        # Not fitted: from the other two, and from single measurements.
        stem=StemFit(
            fill_cycles=900,
            weight_cycles=350,
            load_latency_cycles=630,
            round_cycles=60,
            tile_cycles=350,
            store_bytes_per_cycle=24,
            memory_bytes_per_cycle=14,
        ),
    ),
}


def machine(target: Target) -> Machine:
    """The values for a card.

    A card that is not in the table gets the values of the nearest one, by compute capability and then by the number of
    multiprocessors. The more similar the two cards are, the better its defaults; tuning measures anyway.
    """
    major, minor = target.compute_capability

    def distance(entry: Machine) -> tuple[int, int]:
        other_major, other_minor = entry.compute_capability
        return abs(10 * (major - other_major) + minor - other_minor), abs(target.sms - entry.sms)

    return MACHINES.get(target.key) or min(MACHINES.values(), key=distance)
