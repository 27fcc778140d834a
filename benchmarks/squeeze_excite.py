"""Networks whose squeeze-excite is one kernel, and the same networks with four kernels in its place.

    python benchmarks/squeeze_excite.py --networks mobilenet_v3_large,efficientnet_b0 --out squeeze_excite_h200.json

Each network of `onnx_models.py` is built twice with default kernels. CUDA graphs of both get the same inputs, `--replays`
times with new numbers; the table has the largest difference of their results, which round in other places, over the largest
result. Then groups of replays of both take turns. It needs PyTorch and a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common
from replays import Captured, build_untuned, drawn, turns_us

FORMS = ("four kernels", "one kernel")


def built(name: str, batch: int, folder: Path) -> dict[str, Path]:
    """The files of both forms of a network."""
    import onnx_models

    from schedsearch.network import squeezes

    model = onnx_models.saved(f"{name}:{batch}:float16", folder)
    most_bytes, found = squeezes.MOST_BYTES, {}
    for form in FORMS:
        squeezes.MOST_BYTES = most_bytes if form == "one kernel" else 0
        found[form] = folder / f"{name} {form}.ssx"
        build_untuned(model, found[form])
    squeezes.MOST_BYTES = most_bytes
    return found


def measured(files: dict[str, Path], replays: int) -> dict[str, Any]:
    """Microseconds of a replay of both forms, and by how much their results differ."""
    nets = {form: Captured(path, early=True) for form, path in files.items()}
    differences = []
    for _ in range(replays):
        numbers = drawn(nets[FORMS[0]].inputs)
        (one,), (other,) = (net.results(numbers) for net in nets.values())
        differences.append(float((one.float() - other.float()).abs().max() / one.float().abs().max()))
    times = turns_us({form: net.graph.replay for form, net in nets.items()})
    for net in nets.values():
        net.close()
    return {**times, "difference": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="mobilenet_v3_large,efficientnet_b0,regnet_y_400mf")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks.split(","):
            files = built(name, options.batch, Path(folder))
            rows.append({"network": name, "batch": options.batch, **measured(files, options.replays)})
            common.write(options.out, {"rows": rows})
            one, other = (rows[-1][form] for form in FORMS)
            print(f"{name}: {one:.1f} -> {other:.1f} us, difference {rows[-1]['difference']:.2g}", flush=True)
    print(
        common.table(
            ("network", "batch", *(f"{form}, us" for form in FORMS), "ratio", "largest difference"),
            [
                (r["network"], str(r["batch"]), *(f"{r[form]:.1f}" for form in FORMS), f"{r[FORMS[0]] / r[FORMS[1]]:.3f}",
                 f"{r['difference']:.1e}")
                for r in rows
            ],
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
