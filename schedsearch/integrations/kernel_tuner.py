"""Our tuners as a search strategy of Kernel Tuner, so that they can be compared in its own harness.

    from kernel_tuner import tune_kernel
    from schedsearch.integrations.kernel_tuner import Strategy

    results, env = tune_kernel(..., strategy=Strategy("xgb", seed=0), strategy_options={"max_fevals": 100})

It works with `simulation_mode=True` too. Only this module of schedsearch needs the package kernel_tuner (1.0 or later).
"""

from __future__ import annotations

import math
import sys
from typing import Any

from schedsearch.config import Config
from schedsearch.errors import UsageError, did_you_mean
from schedsearch.records.formats.recording import KnobTable, Place
from schedsearch.space import ConfigSpace
from schedsearch.space.listed import ListedSpace
from schedsearch.tuner import make_tuner, require_tuner
from schedsearch.typed import JsonObject

_OPTIONS = ("max_fevals", "time_limit", "searchspace_construction_options")  # of strategy_options; Kernel Tuner reads them


class Strategy:
    """A strategy for `tune_kernel(strategy=...)`. It keeps nothing from one search to the next.

    Budget (`max_fevals`, `time_limit`), restrictions and objective are Kernel Tuner's. An objective that is maximised is
    inverted and treated as a time.

    Args:
        tuner: a name in `schedsearch.tuner.TUNERS`.
        seed: of every random choice.

    Raises:
        UsageError: no tuner has this name, or the seed is not an integer of at least 0.
    """

    def __init__(self, tuner: str = "xgb", seed: int = 0) -> None:
        require_tuner(tuner)
        if not isinstance(seed, int) or seed < 0:
            raise UsageError(f"seed must be an integer of at least 0, got {seed!r}")
        self.tuner = tuner
        self.seed = seed

    def tune(self, searchspace: Any, runner: Any, tuning_options: Any) -> list[JsonObject]:
        """Kernel Tuner calls this. Returns its results in the order of evaluation.

        Raises:
            UsageError: a parameter has a value that is not a number, string or boolean, there are several objectives, or
                `strategy_options` has an unknown option.
        """
        from kernel_tuner.strategies.common import CostFunc
        from kernel_tuner.util import StopCriterionReached

        objective = tuning_options.objective
        if isinstance(objective, list | tuple) and len(objective) != 1:
            raise UsageError(f"objective is {objective!r}; our tuners search for one: give objective='time' or another one")
        if strangers := [name for name in tuning_options.strategy_options if name not in _OPTIONS]:
            near = did_you_mean(strangers[0], _OPTIONS)
            raise UsageError(f"unknown option {strangers[0]!r} in strategy_options{near}; allowed: {', '.join(_OPTIONS)}")
        names = list(searchspace.tune_params)
        params = {name: [_plain(value) for value in values] for name, values in searchspace.tune_params.items()}
        table = KnobTable(params, Place("tune_params"))
        theirs: dict[Config, tuple[Any, ...]] = {
            table.config(dict(zip(names, map(_plain, values))), Place("the search space")): tuple(values)
            for values in searchspace.list
        }
        space = ListedSpace(table.knobs, ConfigSpace(table.knobs).indices(theirs))
        tuner = make_tuner(self.tuner, space, seed=self.seed)
        cost_of = CostFunc(searchspace, tuning_options, runner, snap=False)
        try:
            while configs := tuner.ask(tuner.batch):
                tuner.tell([(config, _time(cost_of(theirs[config], check_restrictions=False))) for config in configs])
        except StopCriterionReached as reason:
            if tuning_options.verbose:
                print(reason)  # as Kernel Tuner's own strategies do
        results: list[JsonObject] = cost_of.results
        return results


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's."""
    return value.item() if hasattr(value, "item") else value


def _time(cost: float) -> float | None:
    """Kernel Tuner minimises a cost: a time, or the negative of a maximised objective. The greatest float is a failure."""
    if not math.isfinite(cost) or cost in (0, sys.float_info.max):
        return None
    return float(cost if cost > 0 else -1 / cost)
