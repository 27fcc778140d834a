"""Kernels that users wrote: the decorator `tunable` (`decorator`), their calls, and their deployment (`deployed`).

It answers how a function of a user becomes a workload and a kernel. Search and measuring know nothing of it.
"""
