"""Turns requests into operations and intents; cancels, retries, plans, and finds upgrades."""
