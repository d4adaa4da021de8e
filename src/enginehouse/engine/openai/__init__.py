"""Engines that speak OpenAI's HTTP: bytes are passed through."""
