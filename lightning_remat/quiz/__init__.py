"""The quiz: its bank of questions, grading, certificates that anyone can grade again, and the quiz in a terminal.

The questions themselves are TOML files in ``quiz/`` of the repository (``lightning_remat/_quiz`` in a wheel).
"""
