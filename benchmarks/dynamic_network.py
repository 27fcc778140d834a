"""A network for a range of batches in one executable, beside networks that were tuned for one batch each.

    python benchmarks/dynamic_network.py --limit 1500 --tune 600 --out benchmarks/results/dynamic_network_h200.json
    python benchmarks/dynamic_network.py --device cpu --smoke --cases resnet50:4 --count 2 --tune 20 --limit 120

A case NAME:MOST is a network of onnx_models.py for n = 1 to MOST. Stages, which run in this order:

build       the executable of all sizes, tuned for --tune seconds: its file, how many machine codes it has, how long it took
sizes       its time at --count sizes for which no kernel was tuned or chosen, and at the largest
alone       a network of each of these sizes, tuned for the same time in all, and the largest difference of their results

Each stage writes what it finds at once, and `sizes` and `alone` each size: a run that is stopped leaves all that was
measured. `alone` may take records of `build` to start from, so that what it finds is as fast as it can be. Times are medians
of launches that follow one another, on a GPU in fp16. Executables are in --folder. With the same folder and --db a later run
need not build: --stages sizes,alone. And build again to tune what was left.

Needs PyTorch, onnx, onnx-ir and onnxscript, and a CUDA device but for the second command, which shows that everything works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import onnx
import onnx_models
import stages
import torch
import torch_common

import schedsearch
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.sized import SizedNet, StoredBundle
from schedsearch.workload import between

STAGES = {"build": 5.0, "sizes": 1.0, "alone": 6.0}  # with their shares of a case's time
TUNED = 0.6  # of a stage's share that tuning may take: races, verification and compiling defaults come on top


def samples(most: int) -> list[int]:
    """The sizes at which a tuned range was searched or its kernels were compared."""
    of_range = schedsearch.dense(m=most, n=8, k=8).with_dynamic("m", 1, most)
    searched = of_range.samples()
    return sorted({*searched, *between(searched)})


def untried(most: int, count: int) -> list[int]:
    """Up to `count` sizes from 1 to `most` at which nothing was tuned, spread evenly."""
    known = samples(most)
    able = [n for n in range(1, most) if n not in known] or [most]
    step = max(1.0, len(able) / count)
    return sorted({able[int(place * step)] for place in range(min(count, len(able)))})


def with_open_batch(name: str, *, smoke: bool) -> onnx.ModelProto:
    model = onnx_models.build(name, size=(64, 64) if smoke else None, width=0.125 if smoke else 1.0)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]  # of one image
    return model


class Case:
    """A network for n = 1 to `most`, as an ONNX file and as an executable in the folder."""

    def __init__(self, case: str, options: argparse.Namespace) -> None:
        name, _, most = case.partition(":")
        self.options, self.most = options, int(most)
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model, self.file = folder / f"{name}.onnx", folder / f"{name}_{most}.ssx"
        onnx.save(with_open_batch(name, smoke=options.smoke), self.model)
        self.sizes = sorted({*untried(self.most, options.count), self.most})
        self.given: dict[str, Any] = {
            "db": options.db, "target": options.device, "say": stages.progress,
            "dtype": "float16" if options.device == "cuda" else None,
        }  # fmt: skip

    def stages(self) -> dict[str, stages.Stage]:
        return {"build": self.build, "sizes": self.at_sizes, "alone": self.alone}

    def build(self, turn: stages.Turn) -> dict[str, Any]:
        started, tune_s = time.perf_counter(), min(self.options.tune, TUNED * turn.share_s)
        given = {**self.given, "out": self.file}
        with schedsearch.build_dynamic(self.model, {"n": (1, self.most)}, tune_s=tune_s or None, **given) as net:
            assert isinstance(net, SizedNet)
            bundle, calls = net.bundle, len(net.kernels)
            untuned = sum(kernel.level != "exact" for kernel in net.kernels)
            codes = {call.artifact for n in net.sizes for call in bundle.table.at(n).calls}
            programs = len(bundle.table.json)
            found = {"build_s": time.perf_counter() - started, "tune_s": tune_s, "calls": calls, "untuned": untuned}
            weights = sum(_weights(net).values())
        nbytes = self.file.stat().st_size
        return {
            **found, "file_bytes": nbytes, "codes": len(codes), "program_bytes": programs,
            "table_bytes": nbytes - weights,
        }  # fmt: skip

    def at_sizes(self, turn: stages.Turn) -> dict[str, Any]:
        with self._table() as net:
            assert isinstance(net, SizedNet) and isinstance(net.bundle, StoredBundle)
            for n in self.sizes:
                turn.tell({f"table_{n}_us": self._time(net.at(n), self._input(n))})
        return {}

    def alone(self, turn: stages.Turn) -> dict[str, Any]:
        ends = time.monotonic() + turn.share_s
        with self._table() as table:
            for place, n in enumerate(self.sizes):
                share_s = (ends - time.monotonic()) / (len(self.sizes) - place)
                tune_s = min(self.options.tune / len(self.sizes), TUNED * share_s)
                x = self._input(n)
                shapes = {"x": [n, *x.shape[1:]]}
                with schedsearch.build(self.model, shapes=shapes, tune_s=tune_s or None, **self.given) as net:
                    found = {f"alone_{n}_us": self._time(net, x), f"table_again_{n}_us": self._time(table.at(n), x)}
                    ours, theirs = (each(x).float() for each in (table, net))
                    error = float((ours - theirs).abs().max() / theirs.abs().max())
                turn.tell({**found, f"difference_{n}": error})
        return {}

    def _table(self) -> Any:
        if not self.file.exists():
            raise RuntimeError(f"there is no {self.file.name}: the stage build did not end; give it more time by --limit")
        return schedsearch.load(self.file)

    def _input(self, n: int) -> torch.Tensor:
        side = 64 if self.options.smoke else 224
        x = torch.randn((n, 3, side, side), generator=torch.Generator().manual_seed(n))
        return x.to(self.options.device, torch.float16 if self.options.device == "cuda" else torch.float32)

    def _time(self, net: FixedNet, x: torch.Tensor) -> float:
        launch: Callable[[], Any] = net.bind(x)
        runs = {"groups": 3, "calls": 2} if self.options.smoke else {}
        return torch_common.hot_us(launch, self.options.device, **runs)


def _weights(net: SizedNet) -> dict[str, int]:
    """Digest of each weight of any size -> its bytes."""
    programs = [net.bundle.table.at(n) for n in net.sizes]
    return {
        sha256: program.arrays[number].nbytes
        for program in programs
        for number, sha256 in zip(program.constants, program.weights)
    }


def describe(case: str) -> dict[str, Any]:
    name, _, most = case.partition(":")
    return {"model": name, "most": int(most), "searched": samples(int(most))}


def ratios(row: dict[str, Any]) -> dict[int, float]:
    """Size -> the time of the executable for all sizes over that of the network for this size."""
    sizes = sorted(int(key.split("_")[1]) for key in row if key.startswith("alone_") and key.endswith("_us"))
    times = {n: row.get(f"table_again_{n}_us", row.get(f"table_{n}_us")) for n in sizes}
    return {n: time_us / row[f"alone_{n}_us"] for n, time_us in times.items() if time_us is not None}


def show(row: dict[str, Any]) -> None:
    lines = [
        [
            n,
            f"{row[f'table_again_{n}_us']:.1f}",
            f"{row[f'alone_{n}_us']:.1f}",
            f"{ratio:.3f}",
            f"{row[f'difference_{n}']:.1e}",
        ]
        for n, ratio in ratios(row).items()
    ]
    print(common.table(["n", "table, us", "alone, us", "ratio", "difference"], lines), flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Times over those of networks for one size: geometric mean and largest, at sizes that were not searched."""
    found = {}
    for row in rows:
        not_searched = [ratio for n, ratio in ratios(row).items() if n not in row["searched"]]
        if not_searched:
            found[row["case"]] = {
                "sizes": len(not_searched), "geometric_mean": common.geometric_mean(not_searched), "most": max(not_searched)
            }  # fmt: skip
    return found


def main() -> None:
    parser = torch_common.options(__doc__, ["resnet50:64"], list(STAGES), 1500.0)
    parser.add_argument("--tune", type=float, default=600.0, help="seconds for the range, and for all single sizes together")
    parser.add_argument("--count", type=int, default=16, help="how many sizes that nothing was tuned for are timed")
    parser.add_argument("--folder", default="dynamic_network", help="for models and executables")
    stages.run_cases(
        parser.parse_args(), lambda *case: Case(*case).stages(), STAGES, describe, show, summary,
        {"torch": torch.__version__},
    )  # fmt: skip


if __name__ == "__main__":
    main()
