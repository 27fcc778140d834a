"""The dashboard: what databases hold as plain views, a server for a browser, and reports as files.

source    one database, opened read-only, that may be missing, damaged, newer, or replaced at any moment
views     the values that the pages draw, and their JSON
answers   fills views from sources; one path for each answer
server    serves the answers and tells pages what changed
report    the same answers as one HTML file, as Markdown or as CSV
"""
