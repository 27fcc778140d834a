#!/bin/sh
# distributed 2026.8.0
# `sync` (distributed/utils.py) catches Exception of the coroutine that it runs, and asyncio.CancelledError is none. When the coroutine is
# cancelled, e.g. a `Future.result()` whose connection to the scheduler is lost meanwhile, the caller gets UnboundLocalError ("cannot access
# local variable 'result'") instead of CancelledError. So a program that catches Dask's errors of lost calls ends with that one.
# Seen on 2026-11-28: UnboundLocalError.
# Exits 0 while it behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q distributed==2026.8.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys

from distributed import Client


async def cancelled() -> None:
    raise asyncio.CancelledError


with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=None) as client:
    try:
        client.sync(cancelled)
        found = "nothing"
    except BaseException as error:
        found = type(error).__name__
print(found)
sys.exit(found != "UnboundLocalError")
PYTHON
