#!/bin/sh
# The first terminal: a scheduler, and a worker that lends this machine to it. Ctrl-C ends both.
#
#     sh examples/fleet/terminal1.sh
#
# Nobody outside of this machine can reach them. PORT and the options of the worker may be given: PORT=8800 sh ... --builds 2
set -eu
PORT="${PORT:-8786}"
dask scheduler --host 127.0.0.1 --port "$PORT" --no-dashboard &
trap 'kill $! 2>/dev/null' EXIT
until schedsearch worker "tcp://127.0.0.1:$PORT" "$@"; do sleep 1; done
