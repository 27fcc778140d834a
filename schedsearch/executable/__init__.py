"""Executables: a network whose layouts are planned, as machine code, addresses and weights, and how it runs.

`build` makes one from a network, a plan and a database of records. `file` keeps it in a file, and `net` runs it. Loading and
running import none of Numba, ONNX, torch, XGBoost, SQLAlchemy and the templates.
"""
