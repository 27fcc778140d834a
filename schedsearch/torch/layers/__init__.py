"""Which layers of a graph do kernels compute, and how is the graph rewritten for that?

It takes graphs of torch.export and of torch.compile. Modules, and networks of several layers, do not enter.
"""
