"""From a step that was seen to a plan: trace, simulator, planner, plan files. Knows the engine's rules, runs no model."""
