"""Networks whose squeeze-excite is one kernel, and the same networks with four kernels in its place.

    python benchmarks/squeeze_excite.py --networks mobilenet_v3_large,efficientnet_b0 --out squeeze_excite_h200.json

Each network of `onnx_models.py` is built twice with default kernels. CUDA graphs of both get the same inputs, `--replays`
times with new numbers; the table has the largest difference of their results, which round in other places, over the largest
result. Then groups of replays of both take turns. It needs PyTorch and a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common
from early_launch import TURNS, Captured, replay_us

FORMS = ("four kernels", "one kernel")


def built(name: str, batch: int, folder: Path) -> dict[str, Path]:
    """The files of both forms of a network."""
    import onnx
    import onnx_models

    import schedsearch
    from schedsearch.network import squeezes

    model = folder / f"{name}.onnx"
    onnx.save(onnx_models.build(name, batch=batch), model)
    most_bytes, found = squeezes.MOST_BYTES, {}
    for form in FORMS:
        squeezes.MOST_BYTES = most_bytes if form == "one kernel" else 0
        found[form] = folder / f"{name} {form}.ssx"
        options = {"target": "cuda", "db": folder / "empty.db", "dtype": "float16", "out": found[form]}
        schedsearch.build(model, **options, io_layout="NHWC", check=False).close()
    squeezes.MOST_BYTES = most_bytes
    return found


def measured(files: dict[str, Path], replays: int) -> dict[str, Any]:
    """Microseconds of a replay of both forms, and by how much their results differ."""
    import torch

    nets = {form: Captured(path, early=True) for form, path in files.items()}
    differences = []
    for _ in range(replays):
        numbers = [torch.randn(array.shape, device="cuda").to(array.dtype) for array in nets[FORMS[0]].inputs]
        (one,), (other,) = (net.results(numbers) for net in nets.values())
        differences.append(float((one.float() - other.float()).abs().max() / one.float().abs().max()))
    groups: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(TURNS):
        for form, net in nets.items():
            groups[form].append(replay_us(net.graph.replay))
    for net in nets.values():
        net.graph.reset()
        net.net.close()
    return {**{form: statistics.median(some) for form, some in groups.items()}, "difference": max(differences)}


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
