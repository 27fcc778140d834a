"""Whether a network computes what the model that it was made from computes.

Only what builds a network loads it. Deployment imports nothing of it. It changes nothing:
it answers yes, or names the first value that differs.
"""
