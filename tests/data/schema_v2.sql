BEGIN TRANSACTION;
CREATE TABLE artifact (
        sha256 TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL, arch TEXT NOT NULL, plan TEXT NOT NULL, machine TEXT NOT NULL,
        signature TEXT NOT NULL, created_at REAL NOT NULL, code BLOB NOT NULL
    ) STRICT;
INSERT INTO "artifact" VALUES('fc8680b5bd2c84084814d0d7918f2225383457789c2f53c48b1ac51bf360169e','cuda','sm_90a','{"alignments":{"x":16},"arch":"sm_90a","kind":"cuda","prepared":{},"steps":[{"block_threads":384,"cluster":2,"dynamic_shared_bytes":200000,"entry":"conv","grid":{"blocks_per_sm":1,"work_items":98},"params":[{"box":[64,8,8,1],"buffer":"x","channels_per_pixel":0,"dims":[64,14,14,1],"dtype":"float16","element_strides":[1,1,1,1],"kind":"tensor_map","l2_promotion_bytes":0,"lower":[],"pixels_per_column":0,"strides_bytes":[128,1792,25088],"swizzle_bytes":128,"upper":[]},{"buffer":"weight","kind":"pointer"},{"buffer":"y","kind":"pointer"},{"kind":"i32","value":3}]}],"workspaces":{"scratch":4096},"zeroed":[]}','4a30be238305b71b','4ff9704c53982613b5d0e16514b3b17e5bac95dfba4381d2964409c34e409c55',1.79524903266638684272e+09,X'7F454C4620636F6465');
CREATE TABLE best (
        workload_id TEXT NOT NULL REFERENCES workload (id), target_key TEXT NOT NULL, mode TEXT NOT NULL,
        record_id INTEGER NOT NULL, template TEXT NOT NULL, template_version INTEGER NOT NULL, config TEXT NOT NULL,
        time_ns REAL NOT NULL CHECK (time_ns > 0), verified INTEGER NOT NULL,
        artifact_sha256 TEXT REFERENCES artifact (sha256), promoted_at REAL NOT NULL,
        PRIMARY KEY (workload_id, target_key, mode)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "best" VALUES('9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','cold-graph-v1',1,'conv2d_wgmma',1,'{"bm":128,"bn":64,"number":0,"order":"row","swizzle":true}',1000.0,1,'fc8680b5bd2c84084814d0d7918f2225383457789c2f53c48b1ac51bf360169e',1.79524903267067313192e+09);
CREATE TABLE meta (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "meta" VALUES('created_at','1795249032.6389866');
INSERT INTO "meta" VALUES('kind','store');
INSERT INTO "meta" VALUES('machine','4a30be238305b71b');
INSERT INTO "meta" VALUES('schema_version','2');
INSERT INTO "meta" VALUES('signature','8742b0b0be7c7d7dca106c7f523054b5be3b58346c574fa5ebd78794adbed627');
INSERT INTO "meta" VALUES('uuid','14accfcb-8581-4563-abe3-f580c8e0837a');
CREATE TABLE profile (
        id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, record_id INTEGER NOT NULL REFERENCES record (id),
        subject TEXT NOT NULL, taken_at REAL NOT NULL, json TEXT NOT NULL, UNIQUE (record_id, subject, taken_at)
    ) STRICT;
INSERT INTO "profile" VALUES(1,1,'kernel',1750000000.0,'{"cache":"flushed","launches":[{"block":"(384, 1, 1)","grid":"(132, 1, 1)","kernel":"conv","metrics":{"gpu__time_duration.sum":9258.75,"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active":80.0}},{"block":"(384, 1, 1)","grid":"(132, 1, 1)","kernel":"reduce","metrics":{"gpu__time_duration.sum":3086.25,"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active":0.0}}],"missing":["lts__t_bytes.sum"],"subject":"kernel","taken_at":1750000000.0,"tool":"ncu 2025.3.1.0"}');
CREATE TABLE record (
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
    ) STRICT;
INSERT INTO "record" VALUES(1,'a42a66206d377135e62ac0d5ba1784f56662f51a46be5368930046de7a829ac6','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":0,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','ok',1000.0,'[1000.0,1100.0,900.0]',128,49152,8,0,9000,0.125,'',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.0,1700000000.5,0,'fc8680b5bd2c84084814d0d7918f2225383457789c2f53c48b1ac51bf360169e','');
INSERT INTO "record" VALUES(2,'5de81cefaac85c37d8e6fbcf49573230cbb0284552600734f419a3c13b75b85a','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":1,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','rejected',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.125,1700000000.625,0,NULL,'');
INSERT INTO "record" VALUES(3,'55ec39d003f5637c43270169588befddebba09f28382f36c3a540ad558a00ce2','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":2,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','compile_error',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.25,1700000000.75,0,NULL,'');
INSERT INTO "record" VALUES(4,'881ccbfb395f336212cef09ecefa87a2c4d88e35e1351e385218afabb02d6064','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":3,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','compile_timeout',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.375,1700000000.875,0,NULL,'');
INSERT INTO "record" VALUES(5,'4d6d6af5a42c1e6871e17e2bfca9df86df986190a1daebcbe73664be9905d2f0','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":4,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','launch_error',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.5,1700000001.0,0,NULL,'');
INSERT INTO "record" VALUES(6,'a14556c746eb563a72e6390848c0b9cf5c3657d4dbab8b11ffae90ac23a3cad8','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":5,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','run_timeout',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.625,1700000001.125,0,NULL,'');
INSERT INTO "record" VALUES(7,'a657dd2f3805b8c123ba9993255dd0c53b76da9f860a56dfa6e0568ff613c57d','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":6,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','wrong_answer',NULL,NULL,128,49152,8,0,9000,0.125,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.75,1700000001.25,0,NULL,'');
INSERT INTO "record" VALUES(8,'266f6ca4346a90dfb9413d3a609ea2258c12376bb40edf72f923f399cf6ed41c','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":7,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','worker_lost',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.875,1700000001.375,0,NULL,'');
CREATE TABLE run (
        id TEXT NOT NULL PRIMARY KEY, machine TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL, info TEXT NOT NULL,
        summary TEXT
    ) STRICT;
INSERT INTO "run" VALUES('20261121T081712-5de58a2b','4a30be238305b71b',1.79524903264228439334e+09,1.79524903267638564108e+09,'{"command":"tune"}','{"trials":7}');
CREATE TABLE toolchain (id TEXT NOT NULL PRIMARY KEY, json TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "toolchain" VALUES('bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','{"driver":"580.65","numba-cuda":"0.30.4","nvjitlink":"13.0.88"}');
CREATE TABLE workload (id TEXT NOT NULL PRIMARY KEY, op TEXT NOT NULL, json TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "workload" VALUES('9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','conv2d','{"op":"conv2d","params":{"c":64,"h":14,"k":64,"n":1,"padding":[1,1,1,1],"r":3,"s":3,"w":14},"v":1}');
CREATE INDEX workload_by_op ON workload (op);
CREATE INDEX record_by_task ON record (workload_id, target_key, mode, template);
CREATE INDEX record_by_run ON record (run);
CREATE TRIGGER record_is_never_deleted BEFORE DELETE ON record
        BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
CREATE TRIGGER record_is_never_changed BEFORE UPDATE OF id, content_id, workload_id, target_key, template,
        template_version, config, mode, toolchain_id, outcome, time_ns, times_ns, registers, shared_bytes, local_bytes,
        spill_bytes, code_bytes, max_error, message, build_s, run_s, clocks, run, batch, prediction, started_at, finished_at,
        final_race, source ON record BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
CREATE TRIGGER record_artifact_is_added_once BEFORE UPDATE OF artifact_sha256 ON record
        WHEN OLD.artifact_sha256 IS NOT NULL BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
CREATE TRIGGER profile_is_never_deleted BEFORE DELETE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END;
CREATE TRIGGER profile_is_never_changed BEFORE UPDATE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('record',8);
INSERT INTO "sqlite_sequence" VALUES('profile',1);
COMMIT;
