#!/bin/sh
# SQLAlchemy 2.1.9, SQLite of Python
# The WHERE of `on_conflict_do_update` may hold a scalar subquery. One that names a column of the table that is written gets that table as a
# second FROM of its own, also with `.correlate(table)`: "SELECT limits.most FROM limits, stock WHERE limits.kind = stock.kind" instead of
# "... FROM limits WHERE limits.kind = stock.kind". So it does not look at the row in conflict but at all rows; SQLite takes the first value,
# another row's, in silence, and PostgreSQL raises CardinalityViolation once there are two. A literal column is compiled as meant.
# Seen on 2026-11-29: the update of "b" (2 -> 5, whose limit is 3) goes through because the first limit is 9; with a literal column it does not.
# Exits 0 while it behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q sqlalchemy==2.1.9
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

metadata = sa.MetaData()
limits = sa.Table("limits", metadata, sa.Column("kind", sa.Text, primary_key=True), sa.Column("most", sa.Integer))
stock = sa.Table("stock", metadata, sa.Column("kind", sa.Text, primary_key=True), sa.Column("pieces", sa.Integer))


def after_update(kind):
    """Pieces of "b" after an update to 5 that is allowed up to the limit of the row in conflict, which is 3."""
    engine = sa.create_engine("sqlite://")
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(limits), [{"kind": "a", "most": 9}, {"kind": "b", "most": 3}])
        connection.execute(sa.insert(stock), [{"kind": "a", "pieces": 1}, {"kind": "b", "pieces": 2}])
        most = sa.select(limits.c.most).where(limits.c.kind == kind).correlate(stock).scalar_subquery()
        statement = insert(stock).values(kind="b", pieces=5)
        new = statement.excluded
        statement = statement.on_conflict_do_update(
            index_elements=[stock.c.kind], set_={"pieces": new.pieces}, where=new.pieces <= most
        )
        connection.execute(statement)
        return connection.execute(sa.select(stock.c.pieces).where(stock.c.kind == "b")).scalar_one()


found = after_update(stock.c.kind), after_update(sa.literal_column("stock.kind"))
print(found)
sys.exit(found != (5, 2))
PYTHON
