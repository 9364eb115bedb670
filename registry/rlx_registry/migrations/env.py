"""How Alembic runs here: on the connection `rlx_registry.engine` hands over, in its transaction."""

from alembic import context

from rlx_registry.models import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
    transactional_ddl=True,
    include_name=lambda name, kind, _: kind != "table" or (name or "").startswith("rlx_"),
)
context.run_migrations()
