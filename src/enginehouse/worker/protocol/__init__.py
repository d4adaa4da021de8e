"""Messages become commands, and results become messages."""
