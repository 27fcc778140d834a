"""Networks whose parallel branches run side by side, and the same networks as a chain of kernels.

    python benchmarks/branches.py --networks inception_v3,resnet50 --out branches_h200.json

Each network of `onnx_models.py` is built once with default kernels, with memory for any branches, and loaded for each of
`--filled`: kernels run side by side if their blocks together are at most so many for each multiprocessor; 0: none do. All
get the same inputs, `--replays` times with new numbers, and must give the same bits. Then groups of runs of all take turns.
With `--joins` each is also loaded so that kernels begin early behind one other kernel only, not behind several. It needs
PyTorch and a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from replays import build_untuned, drawn, inputs_of, turns_us


def measured(path: Path, filled: list[float], replays: int) -> dict[str, Any]:
    """Microseconds of a run of each, how many kernels wait for another one than that before, and how many results differ."""
    import torch

    import schedsearch
    from schedsearch.executable import branches

    differing = 0
    with contextlib.ExitStack() as stack:
        runs, chains = {}, {}
        for share in filled:
            branches.FILLED = share
            net = stack.enter_context(schedsearch.load(path))
            arrays = inputs_of(net)
            runs[share] = stack.enter_context(contextlib.closing(net.bind(*arrays))), arrays
            after = net._weights.order.after
            chains[share] = sum(each != ((number - 1,) if number else ()) for number, each in enumerate(after))
        torch.manual_seed(0)
        for _ in range(replays):
            numbers = drawn(runs[filled[0]][1])
            results = []
            for launch, arrays in runs.values():
                for array, new in zip(arrays, numbers, strict=True):
                    array.copy_(new)
                torch.cuda.synchronize()
                found = launch()
                torch.cuda.synchronize()
                results.append([each.clone() for each in (found if isinstance(found, tuple) else (found,))])
            differing += any(not torch.equal(a, b) for some in results[1:] for a, b in zip(results[0], some, strict=True))
        times = turns_us({str(share): launch for share, (launch, _) in runs.items()})
    return {"us": times, "not_in_turn": {str(share): count for share, count in chains.items()}, "differing": differing}


@contextlib.contextmanager
def late_joins() -> Iterator[None]:
    """Networks that are loaded begin kernels early behind one other kernel only."""
    from schedsearch.device import cuda_graph

    may_begin = cuda_graph._may_begin_early
    cuda_graph._may_begin_early = lambda before, own: len(before) == 1 and may_begin(before, own)
    try:
        yield
    finally:
        cuda_graph._may_begin_early = may_begin


def main() -> None:
    import onnx_models

    from schedsearch.executable import branches

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="inception_v3,resnet50")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--filled", default="0,0.5,1,1.5,2,4")
    parser.add_argument("--joins", action="store_true", help="also with kernels that begin when several others have ended")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    filled, rows = [float(each) for each in options.filled.split(",")], []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks.split(","):
            built = Path(folder, f"{name}.ssx")
            branches.FILLED = max(filled)
            build_untuned(onnx_models.saved(f"{name}:{options.batch}:float16", Path(folder)), built)
            for joins in ("late", "early") if options.joins else ("early",):
                with late_joins() if joins == "late" else contextlib.nullcontext():
                    found = measured(built, filled, options.replays)
                rows.append({"network": name, "batch": options.batch, "joins": joins, **found})
                common.write(options.out, {"rows": rows})
                print(rows[-1], flush=True)
    titles = ("network", "batch", "joins", *(f"{share:g}, us" for share in filled), "replays that differ")
    cells = [
        (r["network"], str(r["batch"]), r["joins"], *(f"{time:.1f}" for time in r["us"].values()), str(r["differing"]))
        for r in rows
    ]
    print(common.table(titles, cells))


if __name__ == "__main__":
    main()
