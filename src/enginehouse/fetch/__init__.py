"""Bytes from outside: one client, registries, archives, packages, galleries. The only door to aiohttp and YAML."""
