"""Sends intents to workers, and stores what workers reply and report."""
