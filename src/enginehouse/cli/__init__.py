"""Commands. Each is a thin client of the API or an entry into run.py."""
