"""What the CPU templates of conv2d share: the space of a register tile, and the choice of a default tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.templates.conv2d.cpu_kernels import Shape
from schedsearch.workload import Workload

BLOCKS = (1, 2, 4, 8, 16, 32)
OW_TILES = (*range(1, 17), 20, 24, 28)
OC_VECTORS = (1, 2, 3, 4, 6)
OH_TILES = (1, 2, 4, 7, 8, 14, 16, 28, 32)
UNROLLS = (1, 2, 4, 8)
_X_LAYOUT = "packed: copy x to NCHW[x]c with its padding; direct: read x in place; padded: copy x with its padding"


def up_to(values: Sequence[int], limit: int) -> tuple[int, ...]:
    return tuple(value for value in values if value <= limit)


def blocks(shape: Shape) -> tuple[int, ...]:
    """Lanes of a vector of output channels: the four largest that are not much wider than a group has channels."""
    power = 1 << max(shape.outputs - 1, 0).bit_length()
    allowed = BLOCKS[: max(BLOCKS.index(power), 0) + 1] if shape.outputs < BLOCKS[-1] else BLOCKS
    return allowed[-4:]


def thread_counts(cores: int) -> tuple[int, ...]:
    return tuple(range(1, cores + 1)) if cores <= 8 else tuple({*(2**i for i in range(cores.bit_length())), cores})


def vector_registers(target: Target) -> int:
    return 32 if target.simd_bits >= 512 else 16


def lanes_of(target: Target) -> int:
    """32-bit numbers in a vector register."""
    return max(target.simd_bits // 32, 1)


def updates_in_place(workload: Workload[Conv2dParams]) -> bool:
    """Whether y may be the memory of an argument, such as a residual."""
    return any(spec.aliases for spec in workload.signature)


def useful_share(shape: Shape, ow_tile: Any, channels: Any) -> Any:
    """Share of the multiply-adds that is not wasted on overlapping pixels or padded channels."""
    pixels = shape.ow / (np.ceil(shape.ow / ow_tile) * ow_tile)
    return pixels * shape.outputs / (np.ceil(shape.outputs / channels) * channels)


def tile_space(
    target: Target,
    shape: Shape,
    x_layouts: tuple[str, ...],
    lanes_doc: str,
    step_doc: str,
    weight_bytes: int,
    rules: Sequence[Constraint],
    *,
    further: Sequence[Knob] = (),
    sums: int = 0,
    in_place: bool = False,
) -> ConfigSpace:
    """The space of a register tile of `ow_tile` pixels x `oc_vectors` vectors of `block` output channels.

    Args:
        x_layouts: "packed", and "direct" if x may be read in place, or "padded" if padding is all that it lacks.
        lanes_doc, step_doc: of the knobs `block` and `unroll`.
        weight_bytes: of an element of packed weights.
        rules: the template's own.
        further: knobs of its own.
        sums: vectors of one more column of the tile.
        in_place: y may be the memory of an argument, so that no pixel may be stored twice: tiles do not overlap.
    """
    registers, lanes = vector_registers(target), lanes_of(target)
    if in_place:
        reason = f"ow_tile divides the {shape.ow} pixels of a row: y may be the residual's memory, which is added once"
        rules = (*rules, Constraint(reason, lambda k: shape.ow % k["ow_tile"] == 0))

    def vectors(k: Any) -> Any:  # machine registers per vector of `block` lanes
        return np.maximum(k["block"] // lanes, 1)

    def channels(k: Any) -> Any:  # of a tile
        return k["oc_vectors"] * k["block"]

    return ConfigSpace(
        [
            Knob("block", blocks(shape), lanes_doc),
            *further,
            Knob(
                "ow_tile",
                up_to(OW_TILES, shape.ow),
                "output pixels of a row in the register tile; of an image of a few columns, along the height",
            ),
            Knob("oc_vectors", OC_VECTORS, "vectors of output channels in the register tile"),
            Knob("unroll", (1,) if shape.depthwise else UNROLLS, step_doc),
            Knob("oh_tile", up_to(OH_TILES, shape.oh), "output rows per work item"),
            Knob("x_layout", x_layouts, _X_LAYOUT),
            Knob("order", ("channels", "rows"), "whether neighbouring work items differ in output channels or in rows"),
            Knob("threads", thread_counts(target.sms), "threads that share the work items of every step"),
        ],
        [
            Constraint(
                f"accumulators, weights and one operand fit in {registers} vector registers",
                lambda k: k["accumulators"] + (k["oc_vectors"] + sums) * vectors(k) + 1 <= registers,
            ),
            Constraint(
                f"padding of the {shape.outputs} output channels is less than a whole vector",
                lambda k: (k["oc_vectors"] - 1) * k["block"] < shape.outputs,
            ),
            *rules,
        ],
        {
            "accumulators": lambda k: k["ow_tile"] * (k["oc_vectors"] + sums) * vectors(k),
            "work_items": lambda k: shape.n * shape.groups * -(-shape.oh // k["oh_tile"]) * -(-shape.outputs // channels(k)),
            "items_per_thread": lambda k: k["work_items"] / k["threads"],
            "weight_tile_bytes": lambda k: weight_bytes * shape.reduced * shape.r * shape.s * channels(k),
            "useful_share": lambda k: useful_share(shape, k["ow_tile"], channels(k)),
        },
    )


def cheapest_tile(
    shape: Shape,
    space: ConfigSpace,
    base: Mapping[str, int | str],
    x_layouts: Sequence[str],
    cycles: Callable[[int, int], float],
) -> Config:
    """The tile of the space with the fewest modelled cycles per useful multiply-add.

    Args:
        base: values of all knobs except ow_tile, oc_vectors, oh_tile and x_layout.
        x_layouts: layouts to try, the preferred one first.
        cycles: `cycles(ow_tile, oc_vectors)` per useful multiply-add.
    """
    allowed = {knob.name: [int(value) for value in knob.values] for knob in space.knobs if knob.ordered}
    threads, block = int(base["threads"]), int(base["block"])
    candidates: list[tuple[float, int, Config]] = []
    for ow_tile in allowed["ow_tile"]:
        for oc_vectors in allowed["oc_vectors"]:
            # The most rows, up to eight, that leave every thread four work items.
            tiles = shape.n * shape.groups * math.ceil(shape.outputs / (oc_vectors * block))
            rows = max(min(tiles * shape.oh // (4 * threads), 8), 1)
            oh_tile = max(value for value in allowed["oh_tile"] if value <= rows)
            for x_layout in dict.fromkeys(x_layouts):
                config = Config(
                    {**base, "ow_tile": ow_tile, "oc_vectors": oc_vectors, "oh_tile": oh_tile, "x_layout": x_layout}
                )
                if not space.check(config):
                    candidates.append((cycles(ow_tile, oc_vectors), len(candidates), config))
    return min(candidates)[2]


def plain_tile(space: ConfigSpace, target: Target, further: Mapping[str, int | str]) -> Config | None:
    """One vector of output channels of one pixel at a time, over packed data, on all cores, without a register tile.

    `further` has the values of knobs that are not common to the CPU templates. None if the space has no such configuration.
    """
    values = space.values
    lanes = lanes_of(target)
    config = Config(
        {
            **{name: values[name][0] for name in ("ow_tile", "oc_vectors", "unroll", "oh_tile", "order")},
            "block": max((int(block) for block in values["block"] if int(block) <= lanes), default=values["block"][0]),
            "x_layout": "packed",
            "threads": values["threads"][-1],
            **further,
        }
    )
    return None if space.check(config) else config
