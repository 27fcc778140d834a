"""Which part of an image each block of a cluster has, and its shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.squeeze_excite import SqueezeExciteParams
from schedsearch.templates.parts.shared import SharedLayout

WORD = 16  # bytes of the widest access


def vector_of(p: SqueezeExciteParams) -> int:
    """Channels of an access."""
    return math.gcd(p.c, WORD // dtype_of(p.dtype).nbytes)


def shares_of(p: SqueezeExciteParams, k: Mapping[str, Any]) -> dict[str, Any]:
    """What a block has of an image: `vectors` of channels, `pixels` and `squeezed` channels; and the `lanes` of threads, of
    which each has a thread for every vector. The knobs may be arrays with one value for each configuration."""
    own = -(-(p.c // vector_of(p)) // k["channel_parts"])
    pixel_parts = np.maximum(k["cluster"] // k["channel_parts"], 1)
    return {
        "pixel_parts": pixel_parts,
        "vectors": own,
        "pixels": -(-(p.h * p.w) // pixel_parts),
        "squeezed": -(-p.squeezed // k["cluster"]),
        "lanes": np.maximum(k["threads"] // own, 1),
    }


def layout_of(p: SqueezeExciteParams, k: Mapping[str, Any]) -> SharedLayout:
    """The shared memory of a block."""
    own, vector = shares_of(p, k), vector_of(p)
    nbytes = vector * dtype_of(p.dtype).nbytes
    channels = own["vectors"] * vector
    return SharedLayout.of(
        held=_whole(own["pixels"] * own["vectors"] * nbytes * k["holds"]),
        reduce=_whole(own["squeezed"] * (p.c // vector * nbytes) * k["brings"]),
        expand=_whole(p.squeezed * own["vectors"] * nbytes * k["brings"]),
        sums=_whole(4 * own["lanes"] * channels),
        means=_whole(4 * own["pixel_parts"] * p.c),
        squeezed=_whole(4 * p.squeezed),
        gates=_whole(4 * channels),
        reduce_bias=_whole(4 * own["squeezed"]),
        expand_bias=_whole(4 * channels),
    )


def _whole(nbytes: Any) -> Any:
    return -(-nbytes // WORD) * WORD


@dataclass(frozen=True)
class Plan:
    """Sizes of a configuration.

    Attributes:
        cluster, channel_parts, threads, holds, brings: the knobs.
        own: see `shares_of`.
        regions: region of shared memory -> its offset in bytes.
    """

    p: SqueezeExciteParams
    cluster: int
    channel_parts: int
    threads: int
    holds: bool
    brings: bool
    own: Mapping[str, int]
    regions: Mapping[str, int]

    @classmethod
    def of(cls, p: SqueezeExciteParams, config: Mapping[str, Any]) -> Plan:
        knobs = {name: config[name] for name in ("cluster", "channel_parts", "threads", "holds", "brings")}
        own = {name: int(number) for name, number in shares_of(p, config).items()}
        layout = layout_of(p, config)
        return cls(p, **knobs, own=own, regions={name: layout.offset(name) for name in layout.offsets})

    @property
    def vector(self) -> int:
        return vector_of(self.p)

    @property
    def vector_bytes(self) -> int:
        return self.vector * dtype_of(self.p.dtype).nbytes

    @property
    def channels(self) -> int:
        """Of a block; the last ones may be beyond those of x."""
        return self.own["vectors"] * self.vector
