"""Models, loads, routes and replicas."""
