"""HTTP; the only door to starlette."""
