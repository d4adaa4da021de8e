"""A reference becomes a tree on disk."""
