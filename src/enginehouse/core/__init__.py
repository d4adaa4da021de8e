"""Nouns and decisions. Pure: no I/O, no asyncio, no clock, no randomness."""
