"""What is known only while training runs: memory of the device, and what follows from it."""
