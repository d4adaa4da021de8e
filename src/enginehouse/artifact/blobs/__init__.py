"""The blob store, and downloads into it."""
