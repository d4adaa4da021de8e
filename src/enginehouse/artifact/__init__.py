"""Artifacts: download of blobs, unpacking into a tree. The only package to import isal and zstandard."""
