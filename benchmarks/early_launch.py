"""Networks with and without kernels that begin before the one in front of them ends (programmatic dependent launch).

    python benchmarks/early_launch.py --cases resnet50:1:float16 mobilenet_v2:1:int8 --out early_launch_h200.json
    python benchmarks/early_launch.py --cases mobilenet_v2:1:float16 --before FOLDER --out before_after.json
    python benchmarks/early_launch.py --cases unet:1:float16 --compile --tune 30 --add --out network_times_h200.json
    SCHEDSEARCH_SLOW_BLOCKS=3000 python benchmarks/early_launch.py --replays 10000 --out slowed.json

Each network NAME:BATCH:FORMAT of `network_cases.py` is built once without tuning and loaded `--loads` times in two ways: as
it is, and with SCHEDSEARCH_EARLY_LAUNCH=0 and SCHEDSEARCH_BRANCHES=0, so that its kernels run one after another. CUDA graphs
of both get the same inputs, `--replays` times with new numbers, and must give the same bits. Then groups of replays of both
take turns. The table has the median over the loads of the median group: where weights lie in memory matters.

`--before` is a folder that holds an older installed schedsearch (`pip install --no-deps --target`). Its build of the same
file is loaded by this version and takes part; its kernels may round otherwise, so that all its replays may differ.
`--tune` adds the network after its longest `--layers` layers were tuned in a chain for so many seconds. `--compile` and
`--autotune` add networks in fp16 by torch.compile in its default mode, and by max-autotune, in a CUDA graph. First all
networks are built, `--at-once` at a time, while PyTorch compiles; what is not built or compiled after `--limit` seconds
does not take part. Then all are timed, while nothing else runs.

`--add` keeps the rows of other networks that the file has, so that several runs fill it. With SCHEDSEARCH_SLOW_BLOCKS the
blocks of all kernels wait for random times of up to so many nanoseconds: the times then say nothing, but kernels meet in
orders that are rare otherwise. It needs PyTorch and a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import queue
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from network_cases import Case, network_of
from replays import Captured, drawn, turns_us

ONE, EARLY, BEFORE, TUNED = "one after another", "early", "before, early", "tuned"
CALLS_RUNS = 40  # in which each call is timed alone
AUTOTUNE = "max-autotune"
PEERS = {"torch.compile": "default", AUTOTUNE: "max-autotune-no-cudagraphs"}


def measured(ways: dict[str, tuple[Path, bool]], replays: int, loads: int, with_calls: bool = False) -> dict[str, Any]:
    """Microseconds of a replay of each way, load by load, and how many replays differ from those one after another.

    Args:
        ways: name -> file, and whether its kernels begin early. The first is one after another. The file of `TUNED` has
            other kernels, whose results are not compared.
        with_calls: also what each call of `EARLY` takes alone, as (label, microseconds).
    """
    import torch

    times: dict[str, list[float]] = {name: [] for name in ways}
    calls: list[tuple[str, float]] = []
    first_name, *others = ways
    differing = {name: 0 for name in others if name != TUNED}
    for load in range(loads):
        loaded = {name: Captured(*way) for name, way in ways.items()}
        first = loaded[first_name]
        torch.manual_seed(load)
        for _ in range(replays // loads):
            numbers = drawn(first.inputs)
            truth = first.results(numbers)
            for name in differing:
                same = all(torch.equal(one, found) for one, found in zip(truth, loaded[name].results(numbers), strict=True))
                differing[name] += not same
        for name, us in turns_us({name: each.graph.replay for name, each in loaded.items()}).items():
            times[name].append(us)
        if with_calls and not load:
            net = loaded[EARLY].net
            alone_ns = net.measure(CALLS_RUNS).calls_ns
            calls = [(call.label, time_ns / 1e3) for call, time_ns in zip(net.program.calls, alone_ns, strict=True)]
        for each in loaded.values():
            each.close()
    medians = {name: statistics.median(some) for name, some in times.items()}
    return {**medians, "loads": times, "differing": differing, **({"calls": calls} if calls else {})}


# ---- builds and peers, each in a process of its own


def build(case: Case, out: Path, tune_s: float, layers: int) -> None:
    """Builds a network; with `tune_s` its longest layers are tuned before, and their records lie beside the file."""
    import schedsearch

    given = case.given(out.parent)
    db = out.with_suffix(".db")
    if tune_s:  # an older version may know no chains
        from tuning_modes import longest

        from schedsearch.measurement import CHAIN_GRAPH

        tasks = longest(network_of(given), db, layers)
        schedsearch.tune(tasks, db, target="cuda", mode=CHAIN_GRAPH, time_s=tune_s, trials=None)
    options: dict[str, Any] = {"target": "cuda", "db": db, "dtype": "float16", "out": out}
    schedsearch.build(*given, **options, io_layout="NHWC", check=False).close()


def serve_peer(case: Case, mode: str) -> None:
    """Compiles the network by PyTorch in fp16, waits for a line, times it, and prints microseconds."""
    import torch
    from torch_common import captured

    module, x = case.module
    module, x = module.half().cuda().to(memory_format=torch.channels_last), x.half().cuda()
    x = x.contiguous(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True
    with torch.no_grad():
        compiled = torch.compile(module, mode=mode)
        compiled(x)
        torch.cuda.synchronize()
        print("ready", flush=True)
        sys.stdin.readline()
        (us,) = turns_us({"": captured(lambda: compiled(x), "cuda")}).values()
    print(json.dumps(us), flush=True)


class Peer:
    """The process of `serve_peer`."""

    def __init__(self, case: Case, name: str, folder: Path) -> None:
        self.name, self._errors = name, folder / f"{case}-{name}.txt"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors.open("w")}
        command = [sys.executable, __file__, "--peer", str(case), PEERS[name]]
        self._process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self._is_late = False

    def wait(self, ends: float) -> None:
        """Until it has compiled; at `ends`, by `time.monotonic`, it is ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, ends - time.monotonic()))
        self._is_late = not ready
        if self._is_late:
            self.close()

    def us(self) -> dict[str, Any]:
        """Its time, as {name: us}; or why there is none."""
        if self._is_late:
            return {f"{self.name} failed": "it was not compiled in time"}
        out, _ = self._process.communicate("go\n")
        if self._process.returncode:
            return {f"{self.name} failed": self._errors.read_text()[-300:]}
        return {self.name: json.loads(out.strip().splitlines()[-1])}

    def close(self) -> None:
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process, with those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def built(
    case: str,
    folder: Path,
    before: str | None,
    tune_s: float = 0.0,
    layers: int = 0,
    cores: Sequence[int] = (),
    ends: float = math.inf,
) -> dict[str, Path]:
    """Files of the network, by the version that builds them: "", and "before". Both use all `cores` at the same time; none
    given: all that there are. Raises RuntimeError if one is not built, or not until `ends`, by `time.monotonic`."""
    trees = {"": None, **({"before": before} if before else {})}
    files = {}
    processes = []
    for name, tree in trees.items():
        own = folder / f"{case}-{name or 'now'}{'-tuned' if tune_s else ''}".replace(":", "-")
        own.mkdir(exist_ok=True)
        files[name] = own / "network.ssx"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*([tree] if tree else []), os.environ.get("PYTHONPATH", "")]),
        }
        if tree:  # machine code of this version must not serve for that one
            environment["SCHEDSEARCH_BUILD_CACHE"] = str(own / "cache")
        command = [sys.executable, __file__, "--build", case, str(files[name]), str(tune_s), str(layers)]
        processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if cores:  # before it starts compilers
            os.sched_setaffinity(processes[-1].pid, cores)
    try:
        left_s = None if ends == math.inf else max(0.1, ends - time.monotonic())
        codes = [process.wait(left_s) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            end(process)
        raise RuntimeError(f"{case} was not built in time") from None
    if any(codes):
        raise RuntimeError(f"{case} was not built")
    return files


# ---- the program


def is_asked(case: Case, cases: Sequence[str] | None) -> bool:
    return cases is None or str(case) in cases


def prepared(cases: Sequence[Case], folder: Path, options: argparse.Namespace, ends: float) -> tuple[dict[str, Any], ...]:
    """The ways of each case, or why there are none, and the peers of each case in float16."""
    wanted = [name for name, asked in zip(PEERS, (options.compile, options.autotune)) if asked]
    peers = {
        case: [Peer(case, name, folder) for name in wanted if name != AUTOTUNE or is_asked(case, options.autotune_cases)]
        for case in cases
        if case.format == "float16"
    }
    builds = {}
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        shares = queue.SimpleQueue[list[int]]()
        for number in range(options.at_once):
            shares.put(sorted(os.sched_getaffinity(0))[number :: options.at_once])

        def build_on_a_share(case: Case) -> dict[str, Path]:
            cores = shares.get()
            try:
                before = options.before if is_asked(case, options.before_cases) else None
                return built(str(case), folder, before, cores=cores, ends=ends)
            finally:
                shares.put(cores)

        for case in cases:
            builds[case] = pool.submit(build_on_a_share, case)
    ways: dict[str, Any] = {}
    for case, build_of in builds.items():
        if error := build_of.exception():
            ways[str(case)] = str(error)
            continue
        files = build_of.result()
        ways[str(case)] = {ONE: (files[""], False), EARLY: (files[""], True)}
        if "before" in files:
            ways[str(case)][BEFORE] = files["before"], True
    for each in (peer for several in peers.values() for peer in several):
        each.wait(ends)
    if options.tune:
        for case in (each for each in cases if not isinstance(ways[str(each)], str)):
            with contextlib.suppress(RuntimeError):  # the network before tuning is timed all the same
                ways[str(case)][TUNED] = built(str(case), folder, None, options.tune, options.layers)[""], True
    return ways, {str(case): several for case, several in peers.items()}


def kept_rows(file: Path | None, cases: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """The commands of a file and of this run, each in a line, and the rows of the file of other cases than these."""
    command = str(common.facts()["command"])
    if file is None or not file.exists():
        return command, []
    data = json.loads(file.read_text())
    rows = [row for row in data["rows"] if row["case"] not in cases]
    return f"{data['command']}\n{command}", rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    ends = time.monotonic() + options.limit
    cases = [Case.of(text) for text in options.cases]
    command, rows = kept_rows(Path(options.out) if options.add and options.out else None, options.cases)
    with tempfile.TemporaryDirectory() as name_of_folder:
        ways, peers = prepared(cases, Path(name_of_folder), options, ends)
        for case in options.cases:
            row: dict[str, Any] = {"case": case, "replays": options.replays}
            rows.append(row)
            for peer in peers.get(case, []):
                row |= peer.us()
            if isinstance(ways[case], str):
                row["failed"] = ways[case]
            else:
                try:
                    row |= measured(ways[case], options.replays, options.loads, options.calls)
                except Exception:  # other networks go on
                    row["failed"] = traceback.format_exc()[-600:]
                    if ways[case].pop(BEFORE, None):  # the older file may be what this version cannot run
                        row |= measured(ways[case], options.replays, options.loads, options.calls)
            slowed = os.environ.get("SCHEDSEARCH_SLOW_BLOCKS", "")
            common.write(options.out, {"command": command, "slow_ns": slowed, "rows": rows})
            print({key: value for key, value in row.items() if key not in ("loads", "calls")}, flush=True)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    names = [name for name in (BEFORE, EARLY, TUNED, *PEERS) if any(name in row for row in rows)]
    cells = [
        (
            row["case"],
            *(f"{row[name]:.1f}" if name in row else "" for name in (ONE, *names)),
            f"{row[ONE] / row[EARLY]:.3f}",
            f"{row['differing'][EARLY]} of {row['replays']:,}",
        )
        for row in rows
        if EARLY in row
    ]
    print(common.table(("network, us", ONE, *names, "ratio", "replays that differ"), cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["resnet50:1:float16", "mobilenet_v2:1:float16"], metavar="N:B:F")
    parser.add_argument("--networks", help="names with commas between them, at batch 1 in float16, instead of --cases")
    parser.add_argument("--before", metavar="FOLDER", help="an older installed version")
    parser.add_argument(
        "--before-cases", nargs="+", metavar="N:B:F", help="that the older version builds, too; default: all"
    )
    parser.add_argument("--tune", type=float, default=0.0, help="seconds for each network; default: no tuned one takes part")
    parser.add_argument("--layers", type=int, default=8, help="that are tuned")
    parser.add_argument("--compile", action="store_true", help="torch.compile takes part")
    parser.add_argument("--autotune", action="store_true", help="torch.compile's max-autotune takes part")
    parser.add_argument("--autotune-cases", nargs="+", metavar="N:B:F", help="that max-autotune compiles; default: all")
    parser.add_argument("--at-once", type=int, default=1, help="networks that are built at the same time, each on its cores")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds until all must be built and compiled")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=5, help="how often each network is loaded")
    parser.add_argument("--calls", action="store_true", help="keep what each kernel call takes alone, too")
    parser.add_argument("--add", action="store_true", help="keep the other networks that the file of --out has")
    parser.add_argument("--out")
    parser.add_argument("--build", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        case, out, tune_s, layers = options.build
        build(Case.of(case), Path(out), float(tune_s), int(layers))
    elif options.peer:
        serve_peer(Case.of(options.peer[0]), options.peer[1])
    else:
        if options.networks:
            options.cases = [f"{name}:1:float16" for name in options.networks.split(",")]
        show(run(options))


if __name__ == "__main__":
    main()
