"""Whether a network computes what the model that it was made from computes. Deployment imports nothing of it."""
