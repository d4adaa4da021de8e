"""The outbound HTTP client, its address rules and its retry policy."""
