"""The kernels: how is a workload computed on a target?

A template knows operators, spaces and parts of kernels. Records, devices and tuners do not belong here.
"""
