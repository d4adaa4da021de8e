"""The agent on a node."""
