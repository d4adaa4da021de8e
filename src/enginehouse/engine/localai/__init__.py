"""Engines that speak LocalAI's gRPC protocol; the only door to protobuf."""
