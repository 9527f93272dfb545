"""The benchmarks are scripts with their own folder on the path; pytest must not import them to look for doctests."""

collect_ignore = ["models.py", "optimality.py", "peak_memory.py", "step_time.py"]
