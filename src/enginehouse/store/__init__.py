"""SQL for SQLite and PostgreSQL; the only door to sqlalchemy."""
