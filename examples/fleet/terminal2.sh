#!/bin/sh
# The second terminal: looks at the workers, and tunes two small convolutions on them.
#
#     sh examples/fleet/terminal2.sh
#
# Tuner and records are here; the worker compiles and measures. Options go to the run, e.g. --trials 20.
set -eu
HERE="$(dirname "$0")"
ADDRESS="tcp://127.0.0.1:${PORT:-8786}"
until schedsearch doctor --scheduler "$ADDRESS"; do sleep 2; done
schedsearch tune "$HERE/../cpu.yaml" --scheduler "$ADDRESS" --target cpu "$@"
