"""The command line: what did the user ask for, and how is the answer shown?

It parses, calls and prints. Anything that a Python user would need as well belongs in the package that it calls.
"""
