"""The bus protocol: decodes messages to commands, and encodes progress and replies."""
