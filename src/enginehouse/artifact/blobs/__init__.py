"""Blobs on disk, and their download."""
