"""SQL for SQLite and PostgreSQL. The only package that imports sqlalchemy, alembic and psycopg."""
