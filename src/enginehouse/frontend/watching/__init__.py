"""Views, snapshots and events for people and programs."""
