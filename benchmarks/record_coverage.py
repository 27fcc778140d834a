"""How many layers of networks have shipped records: exactly, by a similar layer's, or not at all. Needs no GPU.

    python benchmarks/record_coverage.py --out benchmarks/results/coverage_h200.json
    python benchmarks/record_coverage.py --networks resnet50 vgg16 --batch 32 --target h200

The networks are torchvision's, in float16 for one image, as `schedsearch.build` plans them without a database. Layers are
counted once for each network that has them; shares are of the predicted time. The last line is about all but ResNet-50 and
MobileNetV2, for which the records were made first. Needs PyTorch and torchvision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
from tuned_layers import NETWORKS, torchvision_model

import schedsearch
from schedsearch.target import PRESETS, Target

FIRST = ("resnet50", "mobilenet_v2")
SOURCES = ("shipped", "near", "none")


def of_network(name: str, batch: int, target: Target) -> dict[str, Any]:
    model, example = torchvision_model(name, batch)
    found = schedsearch.coverage(model, example, db=Path("none.db"), target=target, dtype="float16")
    told = found.to_json()
    return {"network": name, "counts": told["counts"], "shares": told["shares"], "shipped": told["shipped"]}


def line(name: str, rows: list[dict[str, Any]]) -> list[str]:
    counts = [sum(row["counts"][source] for row in rows) for source in SOURCES]
    shares = [sum(row["shares"][source] for row in rows) / len(rows) for source in SOURCES]
    total = sum(counts)
    return [name, str(total), *map(str, counts), f"{counts[0] / total:.0%}", *(f"{share:.0%}" for share in shares[:2])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--target", choices=PRESETS, default="h200")
    parser.add_argument("--out", help="also write the data here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.networks:
        rows.append(of_network(name, options.batch, PRESETS[options.target]))
        common.write(options.out, {"batch": options.batch, "target": options.target, "rows": rows})
    others = [row for row in rows if row["network"] not in FIRST]
    lines = [line(row["network"], [row]) for row in rows]
    lines += [line(f"{len(others)} others", others)] if others and len(rows) > 1 else []
    header = ["network", "layers", "exactly", "near", "no record", "exactly", "of the time", "near, of the time"]
    print(common.table(header, lines))
    print(rows[-1]["shipped"])


if __name__ == "__main__":
    main()
