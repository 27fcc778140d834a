"""Processes: runs foreign code where a crash, a hang or a change of the process does no harm. Builders are such processes.

It drives no device, and does not decide what to build.
"""
