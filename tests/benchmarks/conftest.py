"""The benchmarks are scripts with their own folder on the path; pytest must not import them to look for doctests."""

from pathlib import Path

collect_ignore = [file.name for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]
