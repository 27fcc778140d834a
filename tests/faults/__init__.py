"""The campaign of injected faults: scenarios, what must hold after each, and the runner that repeats them.

`python -m faults` (with `tests/` on PYTHONPATH, as `make faults` does) runs scenarios; `--help` lists its options. Every module
of this package that has a list `SCENARIOS` takes part.
"""
