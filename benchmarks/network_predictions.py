"""Fits how much sooner kernel calls are in a network than cold, from networks whose times were measured.

    python benchmarks/network_predictions.py benchmarks/results/network_predictions_h200.json

A row of the file is a network: the sum of its calls' cold times, the measured time, how many waits for a first tile are
shorter because an array or the weights stay in the L2 cache, and how many megabytes come from there. The two numbers of
`network.residency.SAVINGS` are those with the least squares of relative errors. The last column is the error of each network
when it is left out of the fit.

To add a row, run `networks.py` on a tuned network with `SAVINGS` empty, and take the terms of `Residency.terms` over its
plan.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def fitted(rows: list[dict[str, Any]]) -> Numbers:
    """Latency in us, and us per MB."""
    terms, cold, measured = columns(rows)
    scaled = terms / measured[:, None]
    solution: Numbers = np.linalg.lstsq(scaled, (cold - measured) / measured, rcond=None)[0]
    return solution


def columns(rows: list[dict[str, Any]]) -> tuple[Numbers, Numbers, Numbers]:
    terms = np.array([[row["waits"], row["cached_mb"]] for row in rows], float)
    return terms, np.array([row["cold_us"] for row in rows]), np.array([row["measured_us"] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    rows = json.loads(parser.parse_args().file.read_text(encoding="utf-8"))["rows"]
    found = fitted(rows)
    print(f"latency {1e3 * found[0]:.0f} ns, {found[1]:.4f} us per MB")
    terms, cold, measured = columns(rows)
    table = []
    for place, row in enumerate(rows):
        others = fitted([each for each in rows if each is not row])
        predicted, unseen = cold[place] - terms[place] @ found, cold[place] - terms[place] @ others
        errors = [f"{100 * (time / measured[place] - 1):+.1f} %" for time in (cold[place], predicted, unseen)]
        table.append([row["network"], f"{measured[place]:.1f}", f"{predicted:.1f}", *errors])
    print(common.table(["network", "measured us", "predicted us", "cold", "predicted", "left out"], table))


if __name__ == "__main__":
    main()
