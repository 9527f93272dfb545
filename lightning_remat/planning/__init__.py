"""From a step that was seen to a plan: trace, simulator, planner, plan files. Runs no model."""
