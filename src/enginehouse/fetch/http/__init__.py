"""The one outbound HTTP client and its rules."""
