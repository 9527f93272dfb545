"""What happens when memory runs out in a step: undo it, need less, run it again."""
