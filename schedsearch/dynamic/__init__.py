"""Graphs of operators whose sizes are computed on the device, and the two ways to run them: exact and bounded."""
