"""What a profiler counts while a kernel runs."""
