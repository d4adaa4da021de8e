"""Calls to backend processes."""
