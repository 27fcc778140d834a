"""Hardware counters of kernels, read by a profiler: why does a kernel take its time?

It measures on request, kernels of records only. No search reads its numbers.
"""
