"""A stand-in for Nsight Compute: an executable that checks how it is called and prints what `ncu` prints.

The text follows the manual and logs of real runs: ncu's own lines begin with ==. With `--csv --page raw` there are a
header, a row of units and one row per launch between them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# It runs once for every metric that the card lacks. To be fast, it looks for no packages and imports no request classes.
_PROGRAM = """#!{python} -IS
import json, pickle, sys
from pathlib import Path


class StandIn:
    def __init__(self, *values):
        pass


class Request(pickle.Unpickler):
    def find_class(self, module, name):
        return StandIn


KNOWN = json.loads({values!r})
LAUNCHES = json.loads({launches!r})
UNITS = json.loads({units!r})
arguments = sys.argv[1:]
Path({log!r}).open("a").write(json.dumps(arguments) + "\\n")
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Copyright (c) 2018-2025 NVIDIA Corporation")
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
request = Path(arguments[-1])
assert arguments[-4:-1] == ["-P", "-m", "schedsearch.profiling.process"], arguments
asked_for = Request(request.open("rb")).load()
metrics = arguments[arguments.index("--metrics") + 1].split(",")
print("==PROF== Connected to process 4242 (python)")
if {error!r}:
    print({error!r}, file=sys.stderr)
    sys.exit(1)
unknown = [name for name in metrics if name not in KNOWN]
if unknown and {refuses!r}:
    base = unknown[0].split(".")[0]
    if any(name.startswith(base + ".") for name in KNOWN):
        print("==ERROR== Failed to find metric " + unknown[0])
    else:
        print("==ERROR== Failed to find metric regex:^" + base + "(\\\\..*)?$")
    sys.exit(1)
if asked_for.artifact is None:
    LAUNCHES = ["cudnn::nhwc_wgmma<half, (int)128>(float*)"]
print('==PROF== Profiling "conv": 0%....50%....100% - 9 passes')
print("==PROF== Disconnected from process 4242")
columns = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
           "Device", "CC"]
metrics.sort()  # as ncu does

def line(cells):
    print(",".join('"' + str(cell) + '"' for cell in cells))

line(columns + metrics)
line([""] * len(columns) + [UNITS.get(name.split(".")[0], "%") for name in metrics])
for number, name in enumerate(LAUNCHES):
    cells = [number, 4242, "python", "127.0.0.1", name, 1, 7, "(384, 1, 1)", "(132, 1, 1)", 0, "9.0"]
    values = [KNOWN.get(metric, "n/a") for metric in metrics]
    line(cells + [value[number] if isinstance(value, list) else value for value in values])
"""

UNITS = {
    "gpu__time_duration": "ns",
    "lts__t_bytes": "byte",
    "dram__bytes_read": "byte",
    "dram__bytes_write": "byte",
    "sm__inst_executed_pipe_tensor_op_gmma": "inst",
}
# Counters of a Hopper card, as text with thousands separators.
HOPPER = {
    "gpu__time_duration.sum": "12,345",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "71.25",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "64.50",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active": "71.20",
    "sm__inst_executed_pipe_tensor_op_gmma.sum": "1,806,336",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "18.02",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "33.10",
    "lts__t_bytes.sum": "98,765,432",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "40.75",
    "dram__bytes_read.sum": "30,000,000",
    "dram__bytes_write.sum": "12,000,000",
}


def write(
    folder: Path,
    *,
    values: dict[str, str | list[str]] | None = None,
    launches: tuple[str, ...] = ("conv",),
    units: dict[str, str] | None = None,
    refuses: bool = True,
    error: str = "",
) -> Path:
    """Writes the program into a folder. Each run of it appends its arguments to the file `calls`, one JSON list per line.

    Args:
        values: metric -> its text for all launches, or a list with one per launch.
        refuses: whether asking for another metric is an error, as in most versions, or prints n/a.
        error: text to print instead of any result.
    """
    program = folder / "ncu"
    program.write_text(
        _PROGRAM.format(
            python=sys.executable,
            values=json.dumps(HOPPER if values is None else values),
            launches=json.dumps(launches),
            units=json.dumps(UNITS if units is None else units),
            log=str(folder / "calls"),
            refuses=refuses,
            error=error,
        )
    )
    program.chmod(0o755)
    return program


def calls(folder: Path) -> list[list[str]]:
    """The arguments of every run so far, except --version."""
    lines = (folder / "calls").read_text().splitlines()
    return [arguments for line in lines if (arguments := json.loads(line)) != ["--version"]]
