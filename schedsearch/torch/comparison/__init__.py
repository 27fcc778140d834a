"""Is a candidate right, and is it faster than PyTorch here and now? Times, errors, and the benchmark that decides.

It runs functions without arguments and knows neither workloads nor graphs.
"""
