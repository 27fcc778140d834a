"""The few configurations that together lose least over several tasks: what to try first on a task like them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SECOND = 1e-3  # weight of a configuration's own mean regret, which decides between equal ones


def portfolio(regrets: NDArray[np.float64], size: int) -> list[int]:
    """Chooses configurations greedily, each as the one that lowers the mean regret of the best chosen one most.

    The mean over the tasks of the least regret among the chosen is submodular in the chosen set, so the greedy choice
    reaches 1 - 1/e of the greatest possible reduction (Nemhauser, Wolsey and Fisher, 1978). Once every task has its best
    configuration, those with the least mean regret follow.

    Args:
        regrets: (tasks, configurations), log of the time over the best one of the task.
        size: how many to choose at most.

    Returns:
        Their positions, the first one best alone.
    """
    tasks, count = regrets.shape
    chosen: list[int] = []
    least = np.full(tasks, np.inf)
    own = _SECOND * regrets.mean(axis=0) if tasks else np.zeros(count)
    while tasks and len(chosen) < min(size, count):
        loss = np.minimum(least[:, None], regrets).mean(axis=0) + own
        loss[chosen] = np.inf
        chosen.append(int(np.argmin(loss)))
        least = np.minimum(least, regrets[:, chosen[-1]])
    return chosen
