"""Nodes with graphs inside of them (If, Loop, Scan, SequenceMap) and sequences, as nodes of the graph around them.

`branches`: an `If` of a constant condition is the branch that it takes; of another condition, where both branches are
small, both are computed and one is chosen. `loops`: a `Loop` or `Scan` of a known number of turns is so many copies of its
body. `sequences`: a sequence whose arrays are known is these arrays. `bodies` has what all of them need.

See docs/decisions/205-conditions-and-loops.md.
"""
