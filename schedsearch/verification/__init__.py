"""Verification: does a kernel compute what its operator says? Inputs, references, and comparisons on the device.

A run asks this of every candidate, and deployment of a kernel that it builds. It knows no operator by name, times nothing,
and starts no process.
"""
