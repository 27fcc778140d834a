"""Connects schedsearch with other projects; each module needs the project that it is named after.

Nothing else imports it.
"""
