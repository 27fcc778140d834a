"""Kernels that users wrote: the decorator `tunable` (`decorator`), their calls, and their deployment (`deployed`)."""
