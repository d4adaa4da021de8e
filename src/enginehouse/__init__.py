"""Enginehouse: a set of unlike machines as one OpenAI-compatible inference service."""

__version__ = "0.1.0"
