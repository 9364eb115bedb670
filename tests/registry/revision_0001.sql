-- A registry as revision 0001 left it, with one run; `sqlite3 FILE < THIS` makes it.
BEGIN TRANSACTION;
CREATE TABLE rlx_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT rlx_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "rlx_alembic_version" VALUES('0001');
CREATE TABLE rlx_artifact (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT fk_rlx_artifact_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
CREATE TABLE rlx_checkpoint (
	run_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	sha256 TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_checkpoint PRIMARY KEY (run_id, step), 
	CONSTRAINT fk_rlx_checkpoint_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
CREATE TABLE rlx_evaluation (
	run_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	label TEXT NOT NULL, 
	suite TEXT NOT NULL, 
	n INTEGER NOT NULL, 
	metrics JSON NOT NULL, 
	payload JSON, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_evaluation PRIMARY KEY (run_id, step, label, suite), 
	CONSTRAINT ck_rlx_evaluation_label CHECK (label IN ('before', 'after', 'step')), 
	CONSTRAINT fk_rlx_evaluation_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
CREATE TABLE rlx_event (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	level TEXT NOT NULL, 
	message TEXT NOT NULL, 
	payload JSON, 
	CONSTRAINT fk_rlx_event_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_event" VALUES(1,1,1700000000.0,'note','info','hello',NULL);
CREATE TABLE rlx_metric (
	run_id INTEGER NOT NULL, 
	key_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	value DOUBLE NOT NULL, 
	at DOUBLE NOT NULL, 
	seq BIGINT NOT NULL, 
	CONSTRAINT pk_rlx_metric PRIMARY KEY (run_id, key_id, step), 
	CONSTRAINT fk_rlx_metric_key_id_rlx_metric_key FOREIGN KEY(key_id) REFERENCES rlx_metric_key (id), 
	CONSTRAINT fk_rlx_metric_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
)
 WITHOUT ROWID

;
INSERT INTO "rlx_metric" VALUES(1,1,1,0.5,1700000000.0,1);
CREATE TABLE rlx_metric_key (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	CONSTRAINT pk_rlx_metric_key PRIMARY KEY (id), 
	CONSTRAINT uq_rlx_metric_key_name UNIQUE (name)
);
INSERT INTO "rlx_metric_key" VALUES(1,'train/loss');
CREATE TABLE rlx_mirror (
	run_id INTEGER NOT NULL, 
	target TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	CONSTRAINT pk_rlx_mirror PRIMARY KEY (run_id, target), 
	CONSTRAINT fk_rlx_mirror_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
CREATE TABLE rlx_rollout (
	run_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	"row" INTEGER NOT NULL, 
	parent_row INTEGER, 
	tree INTEGER NOT NULL, 
	"group" INTEGER NOT NULL, 
	turn TEXT NOT NULL, 
	problem_id TEXT NOT NULL, 
	reward DOUBLE, 
	rewards JSON NOT NULL, 
	advantage DOUBLE NOT NULL, 
	n_tokens INTEGER NOT NULL, 
	finish_reason TEXT NOT NULL, 
	preview TEXT NOT NULL, 
	failed TEXT, 
	CONSTRAINT pk_rlx_rollout PRIMARY KEY (run_id, step, "row"), 
	CONSTRAINT fk_rlx_rollout_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
)
 WITHOUT ROWID

;
INSERT INTO "rlx_rollout" VALUES(1,1,0,NULL,0,0,'answer','p',1.0,'{"accuracy":1.0}',0.5,3,'stop','text',NULL);
CREATE TABLE rlx_rollout_step (
	run_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	sha256 TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	statistics JSON NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_rollout_step PRIMARY KEY (run_id, step), 
	CONSTRAINT fk_rlx_rollout_step_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_rollout_step" VALUES(1,1,'rollouts/step_000001.parquet','ab',10,'{"phase":"main","rows":1,"tokens":5}',1700000000.0);
CREATE TABLE rlx_run (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	status TEXT NOT NULL, 
	step INTEGER NOT NULL, 
	steps_total INTEGER, 
	created DOUBLE NOT NULL, 
	started DOUBLE, 
	ended DOUBLE, 
	reason TEXT, 
	directory TEXT, 
	mlflow_run_id TEXT, 
	mlflow_experiment_id TEXT, 
	attempt INTEGER NOT NULL, 
	heartbeat DOUBLE, 
	pid INTEGER, 
	phase TEXT, 
	yaml TEXT NOT NULL, 
	spec JSON NOT NULL, 
	plugins JSON NOT NULL, 
	code JSON NOT NULL, 
	environment JSON NOT NULL, 
	CONSTRAINT ck_rlx_run_status CHECK (status IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost'))
);
INSERT INTO "rlx_run" VALUES(1,'old','0123456789abcdef',7,'finished',0,1,1700000000.0,1700000000.0,1700000000.0,NULL,'/srv/rlx/runs/r-0001',NULL,NULL,1,1700000000.0,NULL,NULL,'name: old
','{"name":"old"}','[]','{"version":"0.1.0"}','{}');
CREATE TABLE rlx_status_change (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	"before" TEXT, 
	"after" TEXT NOT NULL, 
	reason TEXT, 
	attempt INTEGER NOT NULL, 
	CONSTRAINT pk_rlx_status_change PRIMARY KEY (id), 
	CONSTRAINT ck_rlx_status_change_after CHECK (after IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost')), 
	CONSTRAINT ck_rlx_status_change_before CHECK (before IN ('submitted', 'running', 'finished', 'failed', 'stopped', 'lost')), 
	CONSTRAINT fk_rlx_status_change_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_status_change" VALUES(1,1,1700000000.0,NULL,'submitted',NULL,0);
INSERT INTO "rlx_status_change" VALUES(2,1,1700000000.0,'submitted','running',NULL,1);
INSERT INTO "rlx_status_change" VALUES(3,1,1700000000.0,'running','finished',NULL,1);
CREATE INDEX ix_rlx_run_digest_seed ON rlx_run (digest, seed);
CREATE INDEX ix_rlx_run_name ON rlx_run (name);
CREATE UNIQUE INDEX ix_rlx_artifact_run_id_path ON rlx_artifact (run_id, path);
CREATE INDEX ix_rlx_event_run_id_id ON rlx_event (run_id, id);
CREATE UNIQUE INDEX ix_rlx_metric_run_id_seq ON rlx_metric (run_id, seq);
CREATE INDEX ix_rlx_status_change_run_id ON rlx_status_change (run_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('rlx_run',1);
INSERT INTO "sqlite_sequence" VALUES('rlx_event',1);
COMMIT;
