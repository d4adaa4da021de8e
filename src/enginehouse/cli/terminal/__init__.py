"""Output on a terminal: tables, bars, progress lines."""
