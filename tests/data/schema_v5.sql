BEGIN TRANSACTION;
CREATE TABLE artifact (
        sha256 TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL, arch TEXT NOT NULL, plan TEXT NOT NULL, machine TEXT NOT NULL,
        signature TEXT NOT NULL, created_at REAL NOT NULL, code BLOB NOT NULL
    ) STRICT;
INSERT INTO "artifact" VALUES('6bd99a1c18d4c5b070cdb7058d6c2fefe2bbeaa2b61949623836bbbd1481df4c','cuda','sm_90a','{"alignments":{"x":16},"arch":"sm_90a","kind":"cuda","steps":[{"block_threads":384,"cluster":2,"dynamic_shared_bytes":200000,"entry":"conv","grid":{"blocks_per_sm":1,"work_items":98},"params":[{"box":[64,8,8,1],"buffer":"x","channels_per_pixel":0,"dims":[64,14,14,1],"dtype":"float16","element_strides":[1,1,1,1],"kind":"tensor_map","l2_promotion_bytes":0,"lower":[],"pixels_per_column":0,"strides_bytes":[128,1792,25088],"swizzle_bytes":128,"upper":[]},{"buffer":"weight","kind":"pointer"},{"buffer":"y","kind":"pointer"},{"kind":"i32","value":3}]}],"workspaces":{"scratch":4096}}','4a30be238305b71b','c35e39a0ae8b490346845d1a5c709f904cc6182bcfe323b952a5c7d260dddf71',1.79535353411296200749e+09,X'7F454C4620636F6465');
CREATE TABLE best (
        workload_id TEXT NOT NULL REFERENCES workload (id), target_key TEXT NOT NULL, mode TEXT NOT NULL,
        record_id INTEGER NOT NULL, template TEXT NOT NULL, template_version INTEGER NOT NULL, config TEXT NOT NULL,
        time_ns REAL NOT NULL CHECK (time_ns > 0), verified INTEGER NOT NULL,
        artifact_sha256 TEXT REFERENCES artifact (sha256), promoted_at REAL NOT NULL, signature TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (workload_id, target_key, mode)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "best" VALUES('9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','cold-graph-v1',1,'conv2d_wgmma',1,'{"bm":128,"bn":64,"number":0,"order":"row","swizzle":true}',1000.0,1,'6bd99a1c18d4c5b070cdb7058d6c2fefe2bbeaa2b61949623836bbbd1481df4c',1.79535353411590957646e+09,'d3858e01a9acafca62252d9af24fdddec1816c4325c929ad2f99a83ca01801d7');
CREATE TABLE meta (key TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "meta" VALUES('created_at','1795353533.9926286');
INSERT INTO "meta" VALUES('kind','store');
INSERT INTO "meta" VALUES('machine','4a30be238305b71b');
INSERT INTO "meta" VALUES('schema_version','5');
INSERT INTO "meta" VALUES('signature','5c4c60cb96bfa4def2c96f7566ef27ff963d6e0a28abac5d9dfc74e4653e21e8');
INSERT INTO "meta" VALUES('uuid','547a0354-a7a0-47a2-b27b-9633c8e746d5');
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
        artifact_sha256 TEXT, source TEXT NOT NULL, model INTEGER, anchor_code TEXT, anchor_ns REAL
        CHECK (anchor_ns > 0 AND (anchor_ns IS NULL) = (anchor_code IS NULL)), host TEXT NOT NULL DEFAULT '', device_uuid TEXT NOT NULL DEFAULT '', signature TEXT NOT NULL DEFAULT '',
        CHECK ((outcome = 'ok') = (time_ns IS NOT NULL) AND (outcome = 'ok') = (times_ns IS NOT NULL)),
        CHECK (time_ns > 0)
    ) STRICT;
INSERT INTO "record" VALUES(1,'c29865b3a5fcf0bdd75a78d750f8b4104bd8b511ca14fc8145fe680fa3bc9f93','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":0,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','ok',1000.0,'[1000.0,1100.0,900.0]',128,49152,8,0,9000,0.125,'',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.0,1700000000.5,0,'6bd99a1c18d4c5b070cdb7058d6c2fefe2bbeaa2b61949623836bbbd1481df4c','',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','7a8e0d99c4e7cd751828a5d64aa2507684b3cd04bc32a79c81f7cdfc3b0b9d1f');
INSERT INTO "record" VALUES(2,'13920b7a63907edc0743cb74d5112ecc295fac715e172db0e623a18e00b08ee7','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":1,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','rejected',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.125,1700000000.625,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','bbc3bf454aefadeb01252d567d91e7a43686f38b0b30c531df276bce4877d2ec');
INSERT INTO "record" VALUES(3,'52b0838fb8bd852d6d9597f4eb5dcc7d51346d9bcd7e4a51402fd9b99b820cc3','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":2,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','compile_error',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.25,1700000000.75,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','e392058a0c8d7bb271cf663f8d85ba5d669da2a18ff33c8a53fd3bd68a29002d');
INSERT INTO "record" VALUES(4,'3b53008ca91c57f007b3facb3a848b3716337d9db3ae554bcfc2cd25cae6a16d','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":3,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','compile_timeout',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.375,1700000000.875,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','08434769e9977f74f1b80ce58067759a79fb1e7f66b166a3b7175a8692cf8087');
INSERT INTO "record" VALUES(5,'6bc3481a5ab34ce158e5790de5e726cf74b1e7c03ccf3f96518a06a0a4f6343a','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":4,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','launch_error',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.5,1700000001.0,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','900084a0c15a4ff253d816330b36c3865aad52807770d4f296b941acaeab8013');
INSERT INTO "record" VALUES(6,'d5e43453a612edfadbfc2077bc9ad7ab85146d8adb18706d127eb1b5b75ab498','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":5,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','run_timeout',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.625,1700000001.125,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','199aa4055b1734aeea3d0ceb8e0586aaee746bdd6d44c02b9e6ebdfec4f9c29f');
INSERT INTO "record" VALUES(7,'6dca65ee86dfaa4b91797190efd994697c070c0578fed14fa0cc8d58c4fccbe9','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":6,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','wrong_answer',NULL,NULL,128,49152,8,0,9000,0.125,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.75,1700000001.25,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','f7a6c07b727cb32f14d762129ca286d99a0fe78aa44a4e1dfebae4ffc2346bcb');
INSERT INTO "record" VALUES(8,'84ec54e92f75c7c7fae138b9ad528462f8c06e9cd71b5553657146d2905ccdc1','9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','cuda:sm_90:132:NVIDIA H200','conv2d_wgmma',1,'{"bm":128,"bn":64,"number":7,"order":"row","swizzle":true}','cold-graph-v1','bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','worker_lost',NULL,NULL,128,49152,8,0,9000,NULL,'ptxas: something is wrong
  with “this” kernel',0.75,0.1,'{"sm_mhz":1980,"throttle":"none"}','20250101T000000-00000000',3,0.1,1700000000.875,1700000001.375,0,NULL,'',2,'c0ffee',4000.0,'node7','GPU-6e1c8a3d-0000-0000-0000-000000000001','1e889284b663dc01eb2bb5a23fcc4318e30f1ecef49080cfaab70e3297638851');
CREATE TABLE run (
        id TEXT NOT NULL PRIMARY KEY, machine TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL, info TEXT NOT NULL,
        summary TEXT
    ) STRICT;
INSERT INTO "run" VALUES('20261122T131854-fb5d554e','4a30be238305b71b',1.79535353401639676093e+09,1.79535353415249800679e+09,'{"command":"tune"}','{"trials":7}');
CREATE TABLE size_table (
        family TEXT NOT NULL, target_key TEXT NOT NULL, mode TEXT NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL,
        label TEXT NOT NULL, size_table TEXT NOT NULL, signature TEXT NOT NULL, made_at REAL NOT NULL, code BLOB NOT NULL,
        PRIMARY KEY (family, target_key, mode, low, high)
    ) STRICT;
CREATE TABLE toolchain (id TEXT NOT NULL PRIMARY KEY, json TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "toolchain" VALUES('bcd02301e2aa54f918289491e62940b414ec67c5a9e632adc956db4357775063','{"driver":"580.65","numba-cuda":"0.30.4","nvjitlink":"13.0.88"}');
CREATE TABLE workload (id TEXT NOT NULL PRIMARY KEY, op TEXT NOT NULL, json TEXT NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "workload" VALUES('9f3e89b17a5ae4dda7c6b93f85c2776a7319b62b7bbccc09d14902b9a120d9dc','conv2d','{"op":"conv2d","params":{"c":64,"h":14,"k":64,"n":1,"padding":[1,1,1,1],"r":3,"s":3,"w":14},"v":1}');
CREATE INDEX workload_by_op ON workload (op);
CREATE INDEX record_by_task ON record (workload_id, target_key, mode, template);
CREATE INDEX record_by_run ON record (run);
CREATE TRIGGER record_is_never_deleted BEFORE DELETE ON record
        BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
CREATE TRIGGER record_artifact_is_added_once BEFORE UPDATE OF artifact_sha256 ON record
        WHEN OLD.artifact_sha256 IS NOT NULL BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
CREATE TRIGGER profile_is_never_deleted BEFORE DELETE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END;
CREATE TRIGGER profile_is_never_changed BEFORE UPDATE ON profile
        BEGIN SELECT RAISE(ABORT, 'profiles are append-only'); END;
CREATE TRIGGER record_is_never_changed BEFORE UPDATE OF id, content_id, workload_id, target_key, template,
        template_version, config, mode, toolchain_id, outcome, time_ns, times_ns, registers, shared_bytes, local_bytes,
        spill_bytes, code_bytes, max_error, message, build_s, run_s, clocks, run, batch, prediction, started_at, finished_at,
        final_race, source, model, anchor_code, anchor_ns, host, device_uuid ON record
        BEGIN SELECT RAISE(ABORT, 'records are append-only'); END;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('record',8);
INSERT INTO "sqlite_sequence" VALUES('profile',1);
COMMIT;
