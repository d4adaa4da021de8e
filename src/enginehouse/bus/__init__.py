"""NATS: the client, the embedded server, credentials. The only package that imports nats."""
