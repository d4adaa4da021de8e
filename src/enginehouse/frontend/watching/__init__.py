"""What people and programs see: views, snapshots, events."""
