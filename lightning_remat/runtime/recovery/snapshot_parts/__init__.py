"""What a snapshot is made of, one kind of state in each file."""
