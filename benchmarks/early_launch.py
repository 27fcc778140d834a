"""Networks with and without kernels that begin before the one in front of them ends (programmatic dependent launch).

    python benchmarks/early_launch.py --cases resnet50:1:float16 mobilenet_v2:1:int8 --out early_launch_h200.json
    python benchmarks/early_launch.py --cases mobilenet_v2:1:float16 --before FOLDER --out before_after.json
    SCHEDSEARCH_SLOW_BLOCKS=3000 python benchmarks/early_launch.py --replays 10000 --out slowed.json

Each network NAME:BATCH:FORMAT of `onnx_models.py` is built once without tuning and loaded `--loads` times in two ways: as
it is, and with SCHEDSEARCH_EARLY_LAUNCH=0. CUDA graphs of both get the same inputs, `--replays` times with new numbers, and
must give the same bits. Then groups of replays of both take turns. The table has the median over the loads of the median
group: where weights lie in memory matters.

`--before` is a folder that holds an older installed schedsearch (`pip install --no-deps --target`). Its build of the same
file is loaded by this version and takes part. `--compile` adds the same weights in fp16 by torch.compile, in a CUDA graph.
With SCHEDSEARCH_SLOW_BLOCKS the blocks of all kernels wait for random times of up to so many nanoseconds: the times
then say nothing, but kernels meet in orders that are rare otherwise. It needs PyTorch and a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from replays import Captured, drawn, turns_us

PEER_S = 90.0  # that torch.compile may take longer than our build
BUILD = (
    "import sys, schedsearch; print(schedsearch.__file__); "
    "schedsearch.build(sys.argv[1], target='cuda', db=sys.argv[2], dtype='float16', io_layout='NHWC', out=sys.argv[3], "
    "check=False).close()"
)


def measured(ways: dict[str, tuple[Path, bool]], replays: int, loads: int) -> dict[str, Any]:
    """Microseconds of a replay of each way, load by load, and how many replays differ from those one after another.

    Args:
        ways: name -> file, and whether its kernels begin early. The first is one after another.
    """
    import torch

    times: dict[str, list[float]] = {name: [] for name in ways}
    differing = dict.fromkeys(list(ways)[1:], 0)
    for load in range(loads):
        loaded = {name: Captured(*way) for name, way in ways.items()}
        first, *others = loaded.values()
        torch.manual_seed(load)
        for _ in range(replays // loads):
            numbers = drawn(first.inputs)
            truth = first.results(numbers)
            for name, other in zip(differing, others):
                same = all(torch.equal(one, found) for one, found in zip(truth, other.results(numbers), strict=True))
                differing[name] += not same
        for name, us in turns_us({name: each.graph.replay for name, each in loaded.items()}).items():
            times[name].append(us)
            loaded[name].close()
    return {**{name: statistics.median(some) for name, some in times.items()}, "loads": times, "differing": differing}


def built(model: Path, folder: Path, before: str | None) -> dict[str, Path]:
    """Files of the network, by the version that builds them: "", and "before". Both use all cores at the same time."""
    trees = {"": None, **({"before": before} if before else {})}
    files = {name: folder / f"{model.stem}.{name or 'now'}.ssx" for name in trees}
    processes = []
    for name, tree in trees.items():
        paths = [tree] if tree else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-c", BUILD, str(model), str(folder / f"none{name}.db"), str(files[name])]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{model.name} was not built")
    return files


def main() -> None:
    import onnx_models
    from networks import Peer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["resnet50:1:float16", "mobilenet_v2:1:float16"], metavar="N:B:F")
    parser.add_argument("--networks", help="names with commas between them, at batch 1 in float16, instead of --cases")
    parser.add_argument("--before", metavar="FOLDER", help="an older installed version")
    parser.add_argument("--compile", action="store_true", help="torch.compile takes part")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=5, help="how often each network is loaded")
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        named = [f"{name}:1:float16" for name in options.networks.split(",")] if options.networks else options.cases
        for case in named:
            model = onnx_models.saved(case, folder)
            peer = Peer(model) if options.compile and not case.endswith(":int8") else None
            files = built(model, folder, options.before)
            ways = {"one after another": (files[""], False), "early": (files[""], True)}
            if options.before:
                ways["before, early"] = (files["before"], True)
            torch_us = peer.times(PEER_S) if peer else {}
            row = {"case": case, "replays": options.replays, **measured(ways, options.replays, options.loads), **torch_us}
            rows.append(row)
            common.write(options.out, {"slow_ns": os.environ.get("SCHEDSEARCH_SLOW_BLOCKS", ""), "rows": rows})
            print({key: value for key, value in row.items() if key != "loads"}, flush=True)
    names = [name for name in ("before, early", "early", "torch.compile hot_us") if any(name in row for row in rows)]
    cells = [
        (
            row["case"],
            *(f"{row[name]:.1f}" if name in row else "" for name in ("one after another", *names)),
            f"{row['one after another'] / row['early']:.3f}",
            f"{max(row['differing'].values())} of {row['replays']:,}",
        )
        for row in rows
    ]
    header = ("network, us", "one after another", *names, "ratio", "replays that differ")
    print(common.table(header, cells))


if __name__ == "__main__":
    main()
