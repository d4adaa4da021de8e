"""The HTTP interface; the only door to starlette."""
