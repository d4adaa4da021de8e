"""Requests to a frontend, and the shapes of its answers."""
