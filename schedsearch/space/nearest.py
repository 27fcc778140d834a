"""A legal configuration near one that is not."""

from __future__ import annotations

import numpy as np

from schedsearch.config import Config
from schedsearch.space.space import ConfigSpace


def closest_legal(space: ConfigSpace, config: Config) -> Config:
    """`config`, or if it is not legal, a legal configuration that shares as many of its values as can be found."""
    if not space.check(config):
        return config
    drawn = space.sample(512, np.random.default_rng(0))
    return max(drawn, key=lambda other: (sum(other[name] == config[name] for name in space.names), other.json))
