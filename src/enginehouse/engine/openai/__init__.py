"""Engines that speak OpenAI's HTTP API: bytes are passed through."""
