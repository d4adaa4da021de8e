"""Bytes from outside: Python packages, galleries. The only door to YAML."""
