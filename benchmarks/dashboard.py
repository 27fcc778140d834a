"""How quick the dashboard is on large databases, and what it costs a run beside it.

    python benchmarks/dashboard.py [--trials 100000] [--task 20000] [--repeats 5] [--out FILE.json]

Makes a database of `--trials` trials in three tasks and one with a task of `--task` trials (the generator of the tests), and
measures over HTTP, with the server in a process of its own:

- the first look at the database, which reads all of it once,
- the overview after a new trial, and unchanged,
- the page of the large task when it is first opened, and after a new trial,
- the same in Chromium, from an empty page until its first chart is drawn, if Playwright and Chromium are there
  (`make test-browser` installs them),
- the memory of the server after all of that,
- a report of 5,000 trials: its size and the time to write it,
- how many records a second a writer appends without a dashboard, and with one that a page listens to.

Prints a table and writes the data.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))

from browser_support import Watched, chromium_path, running_chromium
from common import write
from dashboard_support import add_trials, sample_database

COMMAND = "from schedsearch.cli.main import main; import sys; main(sys.argv[1:])"
LIMITS = {
    "overview, ms": 300.0,
    "a large task in Chromium, ms": 1500.0,
    "memory of the server, MB": 300.0,
    "report of 5,000 trials, MB": 3.0,
}


@contextmanager
def served(*files: Path) -> Iterator[tuple[int, int]]:
    """A dashboard in a process of its own: its port and its process id."""
    command = [sys.executable, "-c", COMMAND, "dashboard", "--no-browser", "--port", "0", *map(str, files)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stderr.readline())
        assert found is not None
        port = int(found[1])
        while True:
            try:
                http.client.HTTPConnection("127.0.0.1", port).connect()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> tuple[float, bytes]:
    """Seconds until the whole answer is here, and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.perf_counter()
    connection.request("GET", f"/api/{path}")
    body = connection.getresponse().read()
    return time.perf_counter() - start, body


def megabytes(pid: int) -> float:
    """The largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1e3


def drawing_ms(root: str, address: str, repeats: int) -> list[float]:
    """Milliseconds from an empty page until the page at `address` says that it is drawn."""
    times = []
    with running_chromium() as browser:
        watched = Watched(browser.new_page(), root)
        for _ in range(repeats):
            watched.page.goto("about:blank")
            start = time.perf_counter()
            watched.go(address).wait_for_selector("main canvas")
            times.append((time.perf_counter() - start) * 1e3)
    return times


def append_rate(path: Path, count: int) -> float:
    start = time.perf_counter()
    add_trials(path, count, seed=int(time.time() * 1e3) % 2**31)
    return count / (time.perf_counter() - start)


def measure(folder: Path, trials: int, task_trials: int, repeats: int) -> dict[str, float]:
    large = sample_database(folder / "large.db", trials=trials // 3, live=True)
    task = sample_database(folder / "task.db", trials=task_trials, live=True)
    found: dict[str, float] = {}
    with served(large) as (port, pid):
        found["first look at the database, ms"] = get(port, "overview")[0] * 1e3
        times = []
        for _ in range(repeats):
            add_trials(large, 1, seed=len(times) + 1000)
            time.sleep(0.5)
            times.append(get(port, "overview")[0] * 1e3)
        found["overview, ms"] = statistics.median(times)
        found["memory after the overview, MB"] = megabytes(pid)
    with served(task) as (port, pid):
        view = json.loads(get(port, "overview")[1])
        key = view["tasks"][-1]["key"]
        seconds, body = get(port, f"task/{key}")
        found["a large task, first opened, ms"] = seconds * 1e3
        found["its answer, MB"] = len(body) / 1e6
        add_trials(task, 1)
        time.sleep(0.5)
        found["a large task after a new trial, ms"] = get(port, f"task/{key}")[0] * 1e3
        found["memory of the server, MB"] = megabytes(pid)
        if importlib.util.find_spec("playwright") and chromium_path():
            times = drawing_ms(f"http://127.0.0.1:{port}/", f"#/task/{quote(key, safe='')}", repeats)
            found["a large task in Chromium, ms"] = statistics.median(times)
    small = sample_database(folder / "report.db", trials=5000 // 3)
    output = folder / "report.html"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", COMMAND, "report", str(small), "-o", str(output)], check=True)
    found["writing a report of 5,000 trials, s"] = time.perf_counter() - start
    found["report of 5,000 trials, MB"] = output.stat().st_size / 1e6
    live = sample_database(folder / "live.db", trials=100, live=True)
    alone, beside = [], []
    for _ in range(repeats):
        alone.append(append_rate(live, 200))
        with served(live) as (port, _):
            page = http.client.HTTPConnection("127.0.0.1", port)
            page.request("GET", "/api/events")
            page.getresponse().readline()
            beside.append(append_rate(live, 200))
    found["records appended per second, alone"] = statistics.median(alone)
    found["records appended per second, beside a dashboard"] = statistics.median(beside)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--task", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SCHEDSEARCH_STATE_DIR", folder)
        found = measure(Path(folder), options.trials, options.task, options.repeats)
    width = max(map(len, found))
    for name, value in found.items():
        limit = f"  (at most {LIMITS[name]:g})" if name in LIMITS else ""
        print(f"{name.ljust(width)}  {value:10.4g}{limit}")
    write(options.out, {"trials": options.trials, "task": options.task, "repeats": options.repeats, "results": found})


if __name__ == "__main__":
    main()
