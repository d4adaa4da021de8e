"""Layers and archives become files."""
