"""Graphs of operators whose sizes are computed on the device, and the two modes to run them: exact and bounded.

It answers which extents follow from which numbers, and when each is known. Layouts and kernels of networks of fixed sizes
do not belong here.
"""
