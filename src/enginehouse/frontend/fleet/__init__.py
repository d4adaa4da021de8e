"""Nodes, their registration and credentials, and tokens."""
