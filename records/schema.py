"""The tables, and the ordered migrations that create them.

Queries use the `Table` objects, which describe the newest schema. The migrations are frozen strings, one list per dialect.
Nobody edits a released migration: a change appends one and raises `dbfile.SCHEMA_VERSION`. One test compares the result of
the migrations with the tables here. Another test opens a database of every released version.

`record` is append-only: triggers refuse every change except the later addition of an artifact's sha256. `best` has a small
row per (workload, target, mode) that names a record and the artifact to run; its signature covers what it says
(`trust.Claim`). `artifact` has the machine code. `profile` has the metrics of a hardware profiler and is also append-only.
`size_table` has the kernels of ranges of sizes. The text columns config, times_ns, clocks, info, summary, json and plan hold
JSON.
"""

from __future__ import annotations

from sqlalchemy import Column, Float, Integer, LargeBinary, MetaData, Table, Text

metadata = MetaData()

# key: schema_version, uuid, kind (store | deploy), machine, signature, created_at
meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

workload = Table(
    "workload",
    metadata,
    Column("id", Text, primary_key=True),  # sha256 of json
    Column("op", Text, nullable=False),
    Column("json", Text, nullable=False),
)

toolchain = Table(
    "toolchain",
    metadata,
    Column("id", Text, primary_key=True),  # sha256 of json
    Column("json", Text, nullable=False),
)

run = Table(
    "run",
    metadata,
    Column("id", Text, primary_key=True),
    Column("machine", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("info", Text, nullable=False),
    Column("summary", Text),
)

record = Table(
    "record",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("content_id", Text, nullable=False),  # sha256 of the whole content; the same record twice is one
    Column("workload_id", Text, nullable=False),
    Column("target_key", Text, nullable=False),
    Column("template", Text, nullable=False),
    Column("template_version", Integer, nullable=False),
    Column("config", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("toolchain_id", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("time_ns", Float),  # median; NULL unless ok
    Column("times_ns", Text),  # NULL unless ok
    Column("registers", Integer, nullable=False),
    Column("shared_bytes", Integer, nullable=False),
    Column("local_bytes", Integer, nullable=False),
    Column("spill_bytes", Integer, nullable=False),
    Column("code_bytes", Integer, nullable=False),
    Column("max_error", Float),
    Column("message", Text, nullable=False),
    Column("build_s", Float, nullable=False),
    Column("run_s", Float, nullable=False),
    Column("clocks", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("batch", Integer, nullable=False),
    Column("prediction", Float),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float, nullable=False),
    Column("final_race", Integer, nullable=False),
    Column("artifact_sha256", Text),  # the code that was measured, even if it is no longer stored
    Column("source", Text, nullable=False),
    Column("model", Integer),  # state of the cost model that made the prediction
    Column("anchor_code", Text),  # hash of the default's machine code in the same race; both or none
    Column("anchor_ns", Float),
    Column("host", Text, nullable=False, default=""),
    Column("device_uuid", Text, nullable=False, default=""),
    Column("signature", Text, nullable=False, default=""),  # by this machine if it measured the record; see `trust`
)

artifact = Table(
    "artifact",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("arch", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("machine", Text, nullable=False),  # the machine that wrote the row, for information
    Column("signature", Text, nullable=False),  # by that machine's key; see `trust`
    Column("created_at", Float, nullable=False),
    Column("code", LargeBinary, nullable=False),
)

best = Table(
    "best",
    metadata,
    Column("workload_id", Text, primary_key=True),
    Column("target_key", Text, primary_key=True),
    Column("mode", Text, primary_key=True),
    Column("record_id", Integer, nullable=False),
    Column("template", Text, nullable=False),
    Column("template_version", Integer, nullable=False),
    Column("config", Text, nullable=False),
    Column("time_ns", Float, nullable=False),
    Column("verified", Integer, nullable=False),
    Column("artifact_sha256", Text),
    Column("promoted_at", Float, nullable=False),
    Column("signature", Text, nullable=False, default=""),  # of its `trust.Claim`
)

profile = Table(
    "profile",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("record_id", Integer, nullable=False),
    Column("subject", Text, nullable=False),
    Column("taken_at", Float, nullable=False),
    Column("json", Text, nullable=False),  # `schedsearch.profiling.profile.Profile`
)

size_table = Table(
    "size_table",
    metadata,
    Column("family", Text, primary_key=True),  # `WorkloadRange.family`
    Column("target_key", Text, primary_key=True),
    Column("mode", Text, primary_key=True),
    Column("low", Integer, primary_key=True),
    Column("high", Integer, primary_key=True),
    Column("label", Text, nullable=False),
    Column("size_table", Text, nullable=False),  # `schedsearch.size_table.SizeTable`
    Column("signature", Text, nullable=False),  # of its `trust.RangeClaim`
    Column("made_at", Float, nullable=False),
    Column("code", LargeBinary, nullable=False),
)

# The tables of a deployment file (`records export --deploy`).
_SQLITE_DEPLOY_1 = (
    "CREATE TABLE meta (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE workload (id TEXT NOT NULL PRIMARY KEY, op TEXT NOT NULL, json TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE INDEX workload_by_op ON workload (op)",
    # A rowid table with the code last, so that reading the other columns does not touch the pages of the code.
    """CREATE TABLE artifact (
        sha256 TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL, arch TEXT NOT NULL, plan TEXT NOT NULL, machine TEXT NOT NULL,
        signature TEXT NOT NULL, created_at REAL NOT NULL, code BLOB NOT NULL
    ) STRICT""",
    """CREATE TABLE best (
        workload_id TEXT NOT NULL REFERENCES workload (id), target_key TEXT NOT NULL, mode TEXT NOT NULL,
        record_id INTEGER NOT NULL, template TEXT NOT NULL, template_version INTEGER NOT NULL, config TEXT NOT NULL,
        time_ns REAL NOT NULL CHECK (time_ns > 0), verified INTEGER NOT NULL,
        artifact_sha256 TEXT REFERENCES artifact (sha256), promoted_at REAL NOT NULL,
        PRIMARY KEY (workload_id, target_key, mode)
    ) STRICT, WITHOUT ROWID""",
)

_SQLITE_STORE_1 = (
    "CREATE TABLE toolchain (id TEXT NOT NULL PRIMARY KEY, json TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE run (
        id TEXT NOT NULL PRIMARY KEY, machine TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL, info TEXT NOT NULL,
        summary TEXT
    ) STRICT""",
    """CREATE TABLE record (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, content_id TEXT NOT NULL UNIQUE,
        workload_id TEXT NOT NULL REFERENCES workload (id), target_key TEXT NOT NULL, template TEXT NOT NULL,
        template_version INTEGER NOT NULL, config TEXT NOT NULL, mode TEXT NOT NULL,
        toolchain_id TEXT NOT NULL REFERENCES toolchain (id), outcome TEXT NOT NULL, time_ns REAL, times_ns TEXT,
        registers INTEGER NOT NULL, shared_bytes INTEGER NOT NULL, local_bytes INTEGER NOT NULL,
        spill_bytes INTEGER NOT NULL, code_bytes INTEGER NOT NULL, max_error REAL, message TEXT NOT NULL,
        build_s REAL NOT NULL, run_s REAL NOT NULL, clocks TEXT NOT NULL, run TEXT NOT NULL, batch INTEGER NOT NULL,
        prediction REAL, started_at REAL NOT NULL, finished_at REAL NOT NULL, final_race INTEGER NOT NULL,
        artifact_sha256 TEXT, source TEXT NOT NULL,
        CHECK ((outcome = 'ok') = (time_ns IS NOT NULL) AND (outcome = 'ok') = (times_ns IS NOT NULL)),
        CHECK (time_ns > 0)
    ) STRICT""",
    "CREATE INDEX record_by_task ON record (workload_id, target_key, mode, template)",
    "CREATE INDEX record_by_run ON record (run)",
    """CREATE TRIGGER record_is_never_deleted BEFORE DELETE ON record
        BEGIN SELECT RAISE(ABORT, 'records are append-only'); END""",
    """CREATE TRIGGER record_is_never_changed BEFORE UPDATE OF id, content_id, workload_id, target_key, template,
        template_version, config, mode, toolchain_id, outcome, time_ns, times_ns, registers, shared_bytes, local_bytes,
        spill_bytes, code_bytes, max_error, message, build_s, run_s, clocks, run, batch, prediction, started_at, finished_at,
        final_race, source ON record BEGIN SELECT RAISE(ABORT, 'records are append-only'); END""",
    """CREATE TRIGGER record_artifact_is_added_once BEFORE UPDATE OF artifact_sha256 ON record
        WHEN OLD.artifact_sha256 IS NOT NULL BEGIN SELECT RAISE(ABORT, 'records are append-only'); END""",
)

_SQLITE_STORE_2 = (
    """CREATE TABLE profile (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, record_id INTEGER NOT NULL REFERENCES record (id),
        subject TEXT NOT NULL, taken_at REAL NOT NULL, json TEXT NOT NULL, UNIQUE (record_id, subject, taken_at)
    ) STRICT""",
    """CREATE TRIGGER profile_is_never_deleted BEFORE DELETE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END""",
    """CREATE TRIGGER profile_is_never_changed BEFORE UPDATE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END""",
)

_SQLITE_STORE_3 = (
    "ALTER TABLE record ADD COLUMN model INTEGER",
    "ALTER TABLE record ADD COLUMN anchor_code TEXT",
    """ALTER TABLE record ADD COLUMN anchor_ns REAL
        CHECK (anchor_ns > 0 AND (anchor_ns IS NULL) = (anchor_code IS NULL))""",
    "ALTER TABLE record ADD COLUMN host TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE record ADD COLUMN device_uuid TEXT NOT NULL DEFAULT ''",
    "DROP TRIGGER record_is_never_changed",
    """CREATE TRIGGER record_is_never_changed BEFORE UPDATE OF id, content_id, workload_id, target_key, template,
        template_version, config, mode, toolchain_id, outcome, time_ns, times_ns, registers, shared_bytes, local_bytes,
        spill_bytes, code_bytes, max_error, message, build_s, run_s, clocks, run, batch, prediction, started_at, finished_at,
        final_race, source, model, anchor_code, anchor_ns, host, device_uuid ON record
        BEGIN SELECT RAISE(ABORT, 'records are append-only'); END""",
)

_SQLITE_DEPLOY_4 = ("ALTER TABLE best ADD COLUMN signature TEXT NOT NULL DEFAULT ''",)
_SQLITE_STORE_4 = ("ALTER TABLE record ADD COLUMN signature TEXT NOT NULL DEFAULT ''",)

_SQLITE_DEPLOY_5 = (
    """CREATE TABLE size_table (
        family TEXT NOT NULL, target_key TEXT NOT NULL, mode TEXT NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL,
        label TEXT NOT NULL, size_table TEXT NOT NULL, signature TEXT NOT NULL, made_at REAL NOT NULL, code BLOB NOT NULL,
        PRIMARY KEY (family, target_key, mode, low, high)
    ) STRICT""",
)

# dialect -> the statements that migrate from version i to version i + 1
MIGRATIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sqlite": (
        (*_SQLITE_DEPLOY_1, *_SQLITE_STORE_1),
        _SQLITE_STORE_2,
        _SQLITE_STORE_3,
        (*_SQLITE_DEPLOY_4, *_SQLITE_STORE_4),
        _SQLITE_DEPLOY_5,
    ),
}

_PROFILE_IN_NONE = "CREATE TEMP TABLE profile (id INTEGER, record_id INTEGER, subject TEXT, taken_at REAL, json TEXT) STRICT"
_RECORD_BEFORE_3 = """CREATE TEMP VIEW record AS SELECT *, NULL AS model, NULL AS anchor_code, NULL AS anchor_ns, '' AS host,
    '' AS device_uuid, '' AS signature FROM main.record"""
_RECORD_BEFORE_4 = "CREATE TEMP VIEW record AS SELECT *, '' AS signature FROM main.record"
_BEST_BEFORE_4 = "CREATE TEMP VIEW best AS SELECT *, '' AS signature FROM main.best"

_SIZE_TABLE_BEFORE_5 = """CREATE TEMP TABLE size_table (family TEXT, target_key TEXT, mode TEXT, low INTEGER, high INTEGER,
    label TEXT, size_table TEXT, signature TEXT, made_at REAL, code BLOB) STRICT"""

# dialect -> version -> the statements that make a database of this older version look like the newest to one connection.
# Read-only connections use them; they write nothing to the file.
SEEN_AS_NEWEST: dict[str, dict[int, tuple[str, ...]]] = {
    "sqlite": {
        1: (_PROFILE_IN_NONE, _RECORD_BEFORE_3, _BEST_BEFORE_4, _SIZE_TABLE_BEFORE_5),
        2: (_RECORD_BEFORE_3, _BEST_BEFORE_4, _SIZE_TABLE_BEFORE_5),
        3: (_RECORD_BEFORE_4, _BEST_BEFORE_4, _SIZE_TABLE_BEFORE_5),
        4: (_SIZE_TABLE_BEFORE_5,),
    },
}
# dialect -> the statements that create a deployment file of the newest version
DEPLOY_SCHEMA: dict[str, tuple[str, ...]] = {"sqlite": (*_SQLITE_DEPLOY_1, *_SQLITE_DEPLOY_4, *_SQLITE_DEPLOY_5)}
