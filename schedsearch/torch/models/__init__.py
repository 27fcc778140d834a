"""How does a model that somebody has run in kernels, and when does it not? `optimize_` and `revert_`.

What reads or changes a module of a user is here (docs/decisions/137 and 178). Graphs and kernels come from the others.
"""
