"""Commands are carried out once, in order."""
