"""Executes commands: each once, in order per subject."""
