"""How well conv2d's templates predict times, which choose the defaults: compared with all measured configurations.

    python benchmarks/conv2d_predictions.py

prints the table that `render_tables.py` writes to docs/kernels/conv2d.md, and the same figures for conv2d_halo. It covers
fp16 and bf16 layers without epilogue and groups. If several runs measured a configuration, its last time counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from conv2d_ideas import LATER_KNOBS, predicted_us, runs
from numpy.typing import NDArray

from schedsearch.session.ranking import RankAgreement
from schedsearch.template import load_template
from schedsearch.templates.conv2d import halo_sizes as conv2d_halo_sizes
from schedsearch.templates.conv2d import wgmma_sizes as conv2d_wgmma_sizes
from schedsearch.workload import Workload

FORMULAS: Mapping[str, Callable[..., Any]] = {
    "conv2d_wgmma": conv2d_wgmma_sizes.derived_quantities,
    "conv2d_halo": conv2d_halo_sizes.derived_quantities,
}
LEAST = 20  # layers with fewer configurations do not count
SHOWN = (
    "32x28x28x128 k128 3x3 p1", "32x14x14x256 k256 3x3 p1", "32x7x7x512 k512 3x3 p1", "32x56x56x64 k256 1x1",
    "32x28x28x512 k128 1x1", "32x7x7x2048 k512 1x1", "32x14x14x1024 k256 1x1", "6x70x70x136 k648 3x3 s2 p1",
    "14x88x88x528 k984 1x1", "12x100x100x488 k448 5x5 s2 p2", "1x28x28x512 k512 3x3 p1", "1x14x14x512 k512 3x3 p1",
    "1x56x56x64 k64 3x3 p1", "1x28x28x128 k128 3x3 p1", "1x14x14x256 k256 3x3 p1", "1x7x7x512 k512 3x3 p1",
    "1x56x56x64 k256 1x1", "1x28x28x512 k128 1x1",
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Measured and predicted microseconds of its configurations, in the same order."""

    label: str
    measured: NDArray[np.float64]
    predicted: NDArray[np.float64]

    @property
    def chosen_us(self) -> float:
        """The measured time of the configuration with the least predicted time; the mean if several share it."""
        return float(self.measured[self.predicted < self.predicted.min() + 1e-3].mean())

    @property
    def behind(self) -> float:
        return self.chosen_us / float(self.measured.min())

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation. Equal times share the mean of their ranks, because many predicted times are equal."""
        correlation = RankAgreement.of([list(zip(self.predicted, self.measured))]).correlation
        return math.nan if correlation is None else correlation


def layers(template: str) -> list[Layer]:
    times: dict[Workload, dict[tuple[Any, ...], float]] = {}
    names: dict[Workload, tuple[str, ...]] = {}
    current = load_template(template).current
    for run in runs():
        for workload, knobs, rows in run.get(template, ()):
            if workload.epilogue or workload.groups > 1:
                continue
            alone = [name for name in knobs if template == "conv2d_halo" and name.startswith("cluster")]  # of its version 3
            for row in rows:
                config = dict(current(LATER_KNOBS | dict(zip(knobs, row))))
                if all(config.pop(name) == 1 for name in alone):
                    names[workload] = tuple(sorted(config))
                    times.setdefault(workload, {})[tuple(config[name] for name in names[workload])] = row[-1]
    return [
        Layer(
            workload.label.removeprefix("conv2d ").removesuffix(" NHWC"),
            np.array(list(found.values())),
            np.array(predicted_us(workload, [dict(zip(names[workload], key)) for key in found], FORMULAS[template])),
        )
        for workload, found in times.items()
        if len(found) >= LEAST
    ]


def rows() -> list[tuple[str, ...]]:
    found = {layer.label: layer for layer in layers("conv2d_wgmma")}
    table = []
    for label in SHOWN:
        layer = found[f"{label} f16"]
        fastest = layer.measured.argmin()
        times = (layer.measured[fastest], layer.predicted[fastest], layer.chosen_us, layer.predicted.min())
        figures = (f"{time:.1f}" for time in times)
        table.append((label, str(len(layer.measured)), *figures, f"{layer.rank_correlation:.2f}"))
    return table


def summary(template: str) -> str:
    found = layers(template)
    behind, count = [layer.behind for layer in found], sum(len(layer.measured) for layer in found)
    return (
        f"Over {len(found)} layers with {LEAST} or more configurations, {count} in all, "
        f"the choice takes {np.mean(behind):.2f} times the fastest's time on average, {max(behind):.2f} at most; the rank "
        f"correlation is {np.mean([layer.rank_correlation for layer in found]):.2f} on average."
    )


if __name__ == "__main__":
    for row in rows():
        print(" | ".join(row))
    for template in FORMULAS:
        print(f"{template}: {summary(template)}")
