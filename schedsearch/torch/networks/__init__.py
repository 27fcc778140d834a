"""Which parts of a graph can a network of ours compute, and with which copies of the weights?

It cuts graphs, builds networks and compares them. Who calls the graph does not enter.
"""
