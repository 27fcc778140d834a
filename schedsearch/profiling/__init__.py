"""Hardware counters of kernels, read by a profiler."""
