"""Intents become messages, and messages of workers become rows."""
