"""The worker: the program that runs on a node."""
