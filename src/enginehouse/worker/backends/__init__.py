"""Installed backends: install, swap, list, remove."""
