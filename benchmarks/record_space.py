"""Records large spaces for replay: random configurations of a template, each of them built, verified and timed.

    python benchmarks/record_space.py 32,56,56,256,256,3 --template conv2d_wgmma --configurations 2500 --time 10m \\
        --db '{space}.db' --export 'benchmarks/spaces/{space}.json.gz'

A space is n,h,w,c,k,r[,stride]: a square kernel of size r with padding r // 2. The rule-based default comes first. Random
legal configurations follow, each equally likely and none twice. All pass through the builders, the verification and the
timing of `schedsearch tune`. The final race of each run also measures the plain configuration. A database for each space
keeps every result as soon as it is measured: the same command continues where the last one stopped, and measures nothing
twice outside of races. `--export` writes a Kernel Tuner cache (or T4 results) that says how it was made.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

import schedsearch
from schedsearch.backend import toolchain
from schedsearch.device.detect import detect
from schedsearch.errors import Interrupted, SchedsearchError
from schedsearch.records.formats.exchange import export_file
from schedsearch.records.store import Store
from schedsearch.session.observer import Observer, Trial
from schedsearch.session.summary import RunSummary
from schedsearch.target import Target
from schedsearch.workload_file.schema import parse_duration_s

_LINE_EVERY_S = 10.0


class Progress(Observer):
    """A line on standard error every ten seconds."""

    _next_at = 0.0

    def on_trial(self, event: Trial) -> None:
        if event.elapsed_s >= self._next_at:
            self._next_at = event.elapsed_s + _LINE_EVERY_S
            rate = event.done / max(event.elapsed_s, 1e-9)
            best = "-" if event.best_ns is None else f"{event.best_ns / 1e3:.2f} us"
            print(f"  {event.done} new trials, {rate:.1f}/s, best {best}", file=sys.stderr, flush=True)


def convolution(text: str, dtype: str) -> schedsearch.Workload:
    """The workload of n,h,w,c,k,r[,stride]. Raises ValueError if the text has another form."""
    numbers = [int(word) for word in text.split(",")]
    if len(numbers) not in (6, 7):
        raise ValueError(f"a space is n,h,w,c,k,r[,stride], got {text!r}")
    n, h, w, c, k, r = numbers[:6]
    stride = numbers[6] if len(numbers) == 7 else 1
    return schedsearch.Workload.conv2d(n=n, h=h, w=w, c=c, k=k, r=r, s=r, stride=stride, padding=r // 2, dtype=dtype)


def space_name(text: str, template: str) -> str:
    n, h, w, c, k, r, *stride = text.split(",")
    return f"{n}x{h}x{w}x{c}_k{k}_{r}x{r}{f'_s{stride[0]}' if stride else ''}_{template}"


def rounds(
    workload: schedsearch.Workload, template: str, wanted: int, db: str, target: Target, deadline: float, **options: Any
) -> Iterator[RunSummary]:
    """Runs random searches until `wanted` configurations are verified. A further run makes up for failures."""
    trials, verified = wanted, -1
    while True:
        time_s = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.001)
        summary = schedsearch.tune(
            [workload], db, target=target, templates=[template], tuner="random", trials=trials, time_s=time_s, **options
        )
        yield summary
        if summary.stopped != "trials" or summary.verified_trials >= wanted or summary.verified_trials == verified:
            return
        verified = summary.verified_trials
        trials += wanted - verified


def record(text: str, args: argparse.Namespace, target: Target, deadline: float) -> None:
    """Records one space and exports it if `--export` is given. It prints the outcome to standard output."""
    workload = convolution(text, args.dtype or ("float16" if target.kind == "cuda" else "float32"))
    name = space_name(text, args.template)
    db = args.db.format(space=name)
    print(f"{name}: {workload.label} on {target.name}, in {db}", file=sys.stderr, flush=True)
    for summary in rounds(
        workload, args.template, args.configurations, db, target, deadline,
        seed=args.seed, workers=args.workers, observers=[Progress()],
    ):  # fmt: skip
        (task,) = summary.tasks
        best = "-" if task.best_ns is None else f"{task.best_ns / 1e3:.2f} us"
        print(
            f"{name}: {summary.verified_trials} verified, {summary.new_trials} new trials in {summary.wall_s:.0f} s,",
            end=" ",
        )
        print(f"best {best}, ended by {summary.stopped}; {summary.shares}", flush=True)
    if args.export is None or not task.trials:
        return
    made = {
        **common.facts(),
        "target": {"key": target.key, "l2_bytes": target.l2_bytes, "memory_bytes": target.memory_bytes},
        "toolchain": toolchain(target.kind),
        "workload": workload.label,
        "template": args.template,
        "sampling": "the rule-based default, then legal configurations uniformly at random without replacement; "
        "and the plain configuration",
        "seed": args.seed,
        "stopped": summary.stopped,
        "outcomes": dict(task.outcomes),
    }
    path = Path(args.export.format(space=name))
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(db, readonly=True) as store:
        chosen = {"workload": workload.id, "template": args.template, "target": target.key}
        counts = export_file(store, path, args.format, **chosen, made=made)
    print(f"{name}: {counts['configurations']} configurations in {path}, {path.stat().st_size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spaces", nargs="+", metavar="n,h,w,c,k,r[,stride]")
    parser.add_argument("--template", required=True)
    parser.add_argument(
        "--configurations", type=int, default=2000, help="verified configurations for each space (%(default)s)"
    )
    parser.add_argument("--dtype", help="default: float16 on a GPU, float32 on a CPU")
    parser.add_argument("--target", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="builder processes")
    parser.add_argument("--time", help="stop everything after this time, e.g. 10m; the results so far are kept and exported")
    parser.add_argument(
        "--db", default="{space}.db", help="record store of a space; {space} stands for its name (%(default)s)"
    )
    parser.add_argument("--export", help="file to write, e.g. {space}.json.gz")
    parser.add_argument(
        "--format", choices=["kernel-tuner", "t4"], default="kernel-tuner", help="format of --export (%(default)s)"
    )
    args = parser.parse_args()
    try:
        for text in args.spaces:
            convolution(text, args.dtype or "float32")
        deadline = time.monotonic() + parse_duration_s(args.time) if args.time else float("inf")
        if args.configurations < 1:
            raise ValueError(f"--configurations {args.configurations} is too small; allowed: 1 or more")
    except ValueError as error:
        parser.error(str(error))
    if len(args.spaces) > 1 and not all("{space}" in name for name in (args.db, args.export) if name):
        parser.error(
            "several spaces need {space} in --db and --export: with a database of its own, none gets hints from another"
        )
    try:
        target = detect(args.target)
        for text in args.spaces:
            record(text, args, target, deadline)
    except Interrupted as error:
        print(f"{error}; run the same command again to continue", file=sys.stderr)
        sys.exit(error.exit_code)
    except SchedsearchError as error:
        sys.exit(f"record_space: {error}")


if __name__ == "__main__":
    main()
