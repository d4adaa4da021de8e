"""Requests to a frontend: connecting, following an operation, chatting."""
