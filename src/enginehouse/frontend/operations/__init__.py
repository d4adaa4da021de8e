"""Requests become operations and intents; cancel, retry and upgrades."""
