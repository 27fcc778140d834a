"""What computes a graph of torch.compile: the backend `schedsearch`, and PyTorch's own compiler.

The first call of a graph decides. Modules do not enter: torch.compile guards them.
"""
