-- A database as revision 0001 left it, with `sqlite3 moetune.db .dump`.
BEGIN TRANSACTION;
CREATE TABLE fits (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	document JSON NOT NULL, 
	last_sample_id INTEGER NOT NULL, 
	created_at TEXT NOT NULL, 
	CONSTRAINT fk_fits_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "fits" VALUES(1,1,'old','{"citation":"","collective":[],"copy":[],"fingerprint":{"hardware":{"cpu":"two cores"},"software":{"torch":"2.13.0"}},"gemm":[{"alpha_seconds":1e-05,"beta_seconds_per_mac":1e-12,"dtype":"float32","error":null}],"interference":{"comm":{"all":1.0,"comp":1.0,"mem":1.0},"comp":{"all":1.0,"comm":1.0,"mem":1.0},"mem":{"all":1.0,"comm":1.0,"comp":1.0}},"machine":{"device":"two cores","devices_per_node":2,"kind":"cpu","memory_bytes":8589934592,"num_devices":2},"name":"old","provenance":"measured","schema":1}',2,'2026-11-20T19:51:31.660767+00:00');
CREATE TABLE machines (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	fingerprint VARCHAR(64) NOT NULL, 
	hardware_id VARCHAR(16) NOT NULL, 
	facts JSON NOT NULL, 
	kind TEXT NOT NULL, 
	device TEXT NOT NULL, 
	num_devices BIGINT NOT NULL, 
	devices_per_node BIGINT NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	created_at TEXT NOT NULL, 
	CONSTRAINT uq_machines_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "machines" VALUES(1,'c8ddc58039afad4a036714f1fa0c2ad2bb7f186e293c895f308726dfc2afb6aa','8226d44d9ccd767a','{"cpu":"two cores"}','cpu','two cores',2,2,8589934592,'2026-11-20T19:51:31.618855+00:00');
CREATE TABLE moetune_revision (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT moetune_revision_pkc PRIMARY KEY (version_num)
);
INSERT INTO "moetune_revision" VALUES('0001');
CREATE TABLE runs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	machine_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	provenance TEXT NOT NULL, 
	preset TEXT NOT NULL, 
	software JSON NOT NULL, 
	status TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	CONSTRAINT fk_runs_machine_id_machines FOREIGN KEY(machine_id) REFERENCES machines (id), 
	CONSTRAINT ck_runs_status CHECK (status IN ('running', 'complete', 'partial'))
);
INSERT INTO "runs" VALUES(1,1,'old','measured','quick','{"torch":"2.13.0"}','complete','2026-11-20T19:51:31.621525+00:00');
INSERT INTO "runs" VALUES(2,1,'open','measured','full','{"torch":"2.13.0"}','running','2026-11-20T19:51:31.684065+00:00');
CREATE TABLE samples (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	point JSON NOT NULL, 
	seconds JSON NOT NULL, 
	num_iterations BIGINT NOT NULL, 
	marks JSON NOT NULL, 
	error TEXT NOT NULL, 
	CONSTRAINT fk_samples_run_id_runs FOREIGN KEY(run_id) REFERENCES runs (id) ON DELETE CASCADE
);
INSERT INTO "samples" VALUES(1,1,'copy','{"both_ways":false,"direction":"h2d","kind":"copy","num_bytes":1024,"pinned":false}','[0.30000000000000004,1e-06]',3,'[]','');
INSERT INTO "samples" VALUES(2,1,'collective','{"group_size":2,"in_flight":1,"kind":"collective","num_bytes":4096,"op":"all_to_all"}','[0.002]',1,'["drift"]','');
CREATE INDEX ix_machines_hardware_id ON machines (hardware_id);
CREATE INDEX ix_runs_machine_id ON runs (machine_id);
CREATE INDEX ix_runs_name ON runs (name);
CREATE INDEX ix_samples_run_id ON samples (run_id);
CREATE INDEX ix_fits_run_id ON fits (run_id);
CREATE INDEX ix_fits_name ON fits (name);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('machines',2);
INSERT INTO "sqlite_sequence" VALUES('runs',2);
INSERT INTO "sqlite_sequence" VALUES('samples',2);
INSERT INTO "sqlite_sequence" VALUES('fits',1);
COMMIT;
