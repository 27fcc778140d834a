"""Search algorithms behind one interface: ask for configurations, tell what they took. See `base.Tuner`.

A tuner sees a `ConfigSpace` and times; never a workload, a device, a clock or the store. The loop belongs to the caller.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from schedsearch.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from schedsearch.config import Config
    from schedsearch.space import ConfigSpace
    from schedsearch.tuner.base import Tuner

# The module of each tuner, imported at the first request.
TUNERS = {
    "xgb": "schedsearch.tuner.xgb:XgbTuner",
    "ga": "schedsearch.tuner.ga:GaTuner",
    "annealing": "schedsearch.tuner.annealing:AnnealingTuner",
    "random": "schedsearch.tuner.random_search:RandomTuner",
    "grid": "schedsearch.tuner.grid:GridTuner",
}

__all__ = ["TUNERS", "load_tuner", "make_tuner", "require_tuner"]


def make_tuner(
    name: str,
    space: ConfigSpace,
    *,
    seed: int,
    default: Config | None = None,
    exclude: Collection[Config] = (),
    hints: Sequence[Config] = (),
) -> Tuner:
    """The tuner with this name. The other arguments are those of `base.Tuner`.

    Raises:
        UsageError: no tuner has this name.
        ConfigError: the default is illegal in the space.
    """
    return _class_of(name)(space, seed=seed, default=default, exclude=exclude, hints=hints)


def load_tuner(name: str) -> None:
    """Imports all that the tuner with this name ever uses, which may take a second. Otherwise it does so when it needs it.

    Raises:
        UsageError: no tuner has this name.
    """
    _class_of(name).load()


def _class_of(name: str) -> type[Tuner]:
    require_tuner(name)
    module, _, cls = TUNERS[name].partition(":")
    found: type[Tuner] = getattr(importlib.import_module(module), cls)
    return found


def require_tuner(name: str) -> None:
    """Raises UsageError when no tuner has this name."""
    if name not in TUNERS:
        raise UsageError(f"unknown tuner {name!r}{did_you_mean(name, TUNERS)}; allowed: {', '.join(TUNERS)}")
