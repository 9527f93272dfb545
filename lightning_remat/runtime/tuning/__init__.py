"""Which tape a step gets: tracing, planning, following a plan, and what is learned from it."""
