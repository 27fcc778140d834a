"""Which kernel computes a call with tensors? The functions of users, and the operators `torch.ops.schedsearch` behind them.

A call finds its kernel by what its arguments look like. Graphs and modules do not enter.
"""
