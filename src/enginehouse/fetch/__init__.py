"""Downloads: HTTP client, registries, archives, packages, galleries. The only package to import aiohttp and YAML."""
