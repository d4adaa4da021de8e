"""NATS: the client, the embedded server, credentials. The only door to nats and nkeys."""
