BEGIN TRANSACTION;
CREATE TABLE rlx_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT rlx_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "rlx_alembic_version" VALUES('0006');
CREATE TABLE rlx_artifact (
	seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT fk_rlx_artifact_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_artifact" VALUES(2,1,'calibration_1.png','picture',1.79557550509783244137e+09);
INSERT INTO "rlx_artifact" VALUES(3,1,'spec.yaml','spec',1.79557550517036128038e+09);
INSERT INTO "rlx_artifact" VALUES(4,1,'calibration_2.png','picture',1.79557550518676209451e+09);
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
INSERT INTO "rlx_checkpoint" VALUES(1,1,'checkpoints/1',1099511627776,'0000000000000000000000000000000000000000000000000000000000000001',1.79557550509556198116e+09);
INSERT INTO "rlx_checkpoint" VALUES(1,2,'checkpoints/2',1099511627776,'0000000000000000000000000000000000000000000000000000000000000002',1.79557550516981291773e+09);
CREATE TABLE rlx_device (
	host TEXT NOT NULL, 
	name TEXT NOT NULL, 
	run_id INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_device PRIMARY KEY (host, name), 
	CONSTRAINT fk_rlx_device_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_device" VALUES('one','gpu:0',4,1,1.79557550528394126894e+09);
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
INSERT INTO "rlx_evaluation" VALUES(1,1,'step','test',60,'{"accuracy":0.5,"auroc":null}',NULL,1.79557550511300849913e+09);
INSERT INTO "rlx_evaluation" VALUES(1,2,'step','test',60,'{"accuracy":0.5,"auroc":null}',NULL,1.79557550518798828128e+09);
INSERT INTO "rlx_evaluation" VALUES(1,2,'after','test',600,'{"accuracy":0.6}','{"bins":[1,2]}',1.79557550518920683866e+09);
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
INSERT INTO "rlx_event" VALUES(1,1,1.79557550511197137835e+09,'note','info','3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m','{"step":1,"figures":[1.5,null]}');
INSERT INTO "rlx_event" VALUES(2,1,1.79557550518757200238e+09,'note','info','3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m','{"step":2,"figures":[1.5,null]}');
INSERT INTO "rlx_event" VALUES(3,2,1.79557550522845745088e+09,'nonfinite','warning','step 1: not finite: train/kl',NULL);
CREATE TABLE rlx_group (
	run_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_group PRIMARY KEY (run_id, name), 
	CONSTRAINT fk_rlx_group_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_group" VALUES(2,'rlcr-seeds',1.795575504953925848e+09);
INSERT INTO "rlx_group" VALUES(1,'rlcr-seeds',1.79557550497788119322e+09);
INSERT INTO "rlx_group" VALUES(1,'3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m',1.79557550497841715815e+09);
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
INSERT INTO "rlx_metric" VALUES(1,1,1,1.1,1.79557550505781984328e+09,2);
INSERT INTO "rlx_metric" VALUES(1,1,2,2.1,1.79557550515599560736e+09,4);
INSERT INTO "rlx_metric" VALUES(1,2,1,0.5,1.79557550505781984328e+09,1);
INSERT INTO "rlx_metric" VALUES(1,2,2,0.25,1.79557550515599560736e+09,3);
INSERT INTO "rlx_metric" VALUES(2,2,1,3.25,1.79557550522845745088e+09,1);
INSERT INTO "rlx_metric" VALUES(2,3,1,1.0,1.79557550522845745088e+09,2);
CREATE TABLE rlx_metric_key (
	id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	CONSTRAINT pk_rlx_metric_key PRIMARY KEY (id), 
	CONSTRAINT uq_rlx_metric_key_name UNIQUE (name)
);
INSERT INTO "rlx_metric_key" VALUES(1,'reward/mean');
INSERT INTO "rlx_metric_key" VALUES(2,'train/loss');
INSERT INTO "rlx_metric_key" VALUES(3,'health/nonfinite');
INSERT INTO "rlx_metric_key" VALUES(4,'train/kl');
CREATE TABLE rlx_mirror (
	run_id INTEGER NOT NULL, 
	target TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	CONSTRAINT pk_rlx_mirror PRIMARY KEY (run_id, target), 
	CONSTRAINT fk_rlx_mirror_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_mirror" VALUES(1,'mlflow',4);
INSERT INTO "rlx_mirror" VALUES(1,'mlflow-files',2);
INSERT INTO "rlx_mirror" VALUES(1,'mlflow-end',5);
CREATE TABLE rlx_note (
	run_id INTEGER NOT NULL, 
	note TEXT NOT NULL, 
	tags JSON NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_note PRIMARY KEY (run_id), 
	CONSTRAINT fk_rlx_note_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
);
INSERT INTO "rlx_note" VALUES(1,'as expected','["paper","baseline"]',1.79557550521760869027e+09);
CREATE TABLE rlx_plugin (
	host TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	distribution TEXT NOT NULL, 
	name TEXT NOT NULL, 
	version TEXT NOT NULL, 
	entry_point TEXT NOT NULL, 
	state TEXT NOT NULL, 
	message TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	CONSTRAINT pk_rlx_plugin PRIMARY KEY (host, kind, distribution, name), 
	CONSTRAINT ck_rlx_plugin_state CHECK (state IN ('ok', 'broken', 'clash'))
);
INSERT INTO "rlx_plugin" VALUES('one','reward','guest','odd','0.1','guest:odd','broken','3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m',1700000000.0);
CREATE TABLE "rlx_rollout" (
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
	scores JSON, 
	CONSTRAINT pk_rlx_rollout PRIMARY KEY (run_id, step, "row"), 
	CONSTRAINT fk_rlx_rollout_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id)
)
 WITHOUT ROWID

;
INSERT INTO "rlx_rollout" VALUES(1,1,0,NULL,0,0,'answer','p7',1.1,'{"accuracy":1.0,"brier":null}',0.5,12,'stop','3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m',NULL,'{}');
INSERT INTO "rlx_rollout" VALUES(1,1,1,0,0,0,'confidence','p7',NULL,'{}',-0.1,3,'length','0.9','timeout','{}');
INSERT INTO "rlx_rollout" VALUES(1,2,0,NULL,0,0,'answer','p7',1.1,'{"accuracy":1.0,"brier":null}',0.5,12,'stop','3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m',NULL,'{}');
INSERT INTO "rlx_rollout" VALUES(1,2,1,0,0,0,'confidence','p7',NULL,'{}',-0.1,3,'length','0.9','timeout','{}');
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
INSERT INTO "rlx_rollout_step" VALUES(1,1,'rollouts/step_000001.parquet','0000000000000000000000000000000000000000000000000000000000000001',10,'{"rows":2,"std":null}',1.79557550505540418619e+09);
INSERT INTO "rlx_rollout_step" VALUES(1,2,'rollouts/step_000002.parquet','0000000000000000000000000000000000000000000000000000000000000002',10,'{"rows":2,"std":null}',1.79557550514239120482e+09);
CREATE TABLE "rlx_run" (
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
	host TEXT, 
	request TEXT, 
	origins JSON, 
	CONSTRAINT ck_rlx_run_status CHECK (status IN ('queued', 'submitted', 'running', 'finished', 'failed', 'stopped', 'lost')), 
	CONSTRAINT ck_rlx_run_request CHECK (request IN ('stop', 'kill'))
);
INSERT INTO "rlx_run" VALUES(1,'rlcr','0000000000000000000000000000000000000000000000000000000000000000',0,'finished',2,2,1.79557550474565219881e+09,1.79557550501624679567e+09,1.79557550522747969628e+09,NULL,'/srv/rlx/runs/r-0001','m1','1',2,1795575505.18883,7,NULL,'name: rlcr
','{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}','[{"name":"countdown","version":"0.1.0"}]','{"commit":"abc","dirty":false}','{"torch":"2.13","devices":1}',NULL,NULL,'{"model.kind":"rlcr.yaml:3","said":"default"}');
INSERT INTO "rlx_run" VALUES(2,'rlcr','0000000000000000000000000000000000000000000000000000000000000001',1,'stopped',0,NULL,1.79557550482009530066e+09,1.79557550522809529309e+09,1.7955755052303051948e+09,'asked to','/srv/rlx/runs/r-0002',NULL,NULL,1,1.79557550522809529309e+09,NULL,NULL,'name: rlcr
','{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}','[{"name":"countdown","version":"0.1.0"}]','{"commit":"abc","dirty":false}','{"torch":"2.13","devices":1}',NULL,NULL,NULL);
INSERT INTO "rlx_run" VALUES(3,'kg','0000000000000000000000000000000000000000000000000000000000000002',2,'submitted',0,NULL,1.7955755048524813652e+09,NULL,NULL,NULL,'/srv/rlx/runs/r-0003',NULL,NULL,0,NULL,NULL,NULL,'name: kg
','{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}','[{"name":"countdown","version":"0.1.0"}]','{"commit":"abc","dirty":false}','{"torch":"2.13","devices":1}',NULL,NULL,NULL);
INSERT INTO "rlx_run" VALUES(4,'kg','0000000000000000000000000000000000000000000000000000000000000003',3,'running',0,NULL,1.79557550488702249522e+09,1.79557550526521706585e+09,NULL,NULL,'/srv/rlx/runs/r-0004',NULL,NULL,1,1.79557550526521706585e+09,8,NULL,'name: kg
','{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}','[{"name":"countdown","version":"0.1.0"}]','{"commit":"abc","dirty":false}','{"torch":"2.13","devices":1}','one','stop',NULL);
INSERT INTO "rlx_run" VALUES(5,'kg','0000000000000000000000000000000000000000000000000000000000000004',4,'queued',0,NULL,1.79557550491451311117e+09,NULL,NULL,NULL,'/srv/rlx/runs/r-0005',NULL,NULL,0,NULL,NULL,NULL,'name: kg
','{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}','[{"name":"countdown","version":"0.1.0"}]','{"commit":"abc","dirty":false}','{"torch":"2.13","devices":1}',NULL,NULL,NULL);
CREATE TABLE "rlx_status_change" (
	id INTEGER NOT NULL, 
	run_id INTEGER NOT NULL, 
	at DOUBLE NOT NULL, 
	"before" TEXT, 
	"after" TEXT NOT NULL, 
	reason TEXT, 
	attempt INTEGER NOT NULL, 
	CONSTRAINT pk_rlx_status_change PRIMARY KEY (id), 
	CONSTRAINT ck_rlx_status_change_before CHECK (before IN ('queued', 'submitted', 'running', 'finished', 'failed', 'stopped', 'lost')), 
	CONSTRAINT fk_rlx_status_change_run_id_rlx_run FOREIGN KEY(run_id) REFERENCES rlx_run (id), 
	CONSTRAINT ck_rlx_status_change_after CHECK (after IN ('queued', 'submitted', 'running', 'finished', 'failed', 'stopped', 'lost'))
);
INSERT INTO "rlx_status_change" VALUES(1,1,1.79557550474565219881e+09,NULL,'submitted',NULL,0);
INSERT INTO "rlx_status_change" VALUES(2,2,1.79557550482009530066e+09,NULL,'submitted',NULL,0);
INSERT INTO "rlx_status_change" VALUES(3,3,1.7955755048524813652e+09,NULL,'submitted',NULL,0);
INSERT INTO "rlx_status_change" VALUES(4,4,1.79557550488702249522e+09,NULL,'submitted',NULL,0);
INSERT INTO "rlx_status_change" VALUES(5,5,1.79557550491451311117e+09,NULL,'queued',NULL,0);
INSERT INTO "rlx_status_change" VALUES(6,1,1.79557550501624679567e+09,'submitted','running',NULL,1);
INSERT INTO "rlx_status_change" VALUES(7,1,1.79557550514034128187e+09,'running','failed','killed by signal 9',1);
INSERT INTO "rlx_status_change" VALUES(8,1,1.795575505141712904e+09,'failed','running','resumed',2);
INSERT INTO "rlx_status_change" VALUES(9,1,1.79557550522747969628e+09,'running','finished',NULL,2);
INSERT INTO "rlx_status_change" VALUES(10,2,1.79557550522809529309e+09,'submitted','running',NULL,1);
INSERT INTO "rlx_status_change" VALUES(11,2,1.7955755052303051948e+09,'running','stopped','asked to',1);
INSERT INTO "rlx_status_change" VALUES(12,4,1.79557550526521706585e+09,'submitted','running',NULL,1);
CREATE UNIQUE INDEX ix_rlx_artifact_run_id_path ON rlx_artifact (run_id, path);
CREATE INDEX ix_rlx_event_run_id_id ON rlx_event (run_id, id);
CREATE UNIQUE INDEX ix_rlx_metric_run_id_seq ON rlx_metric (run_id, seq);
CREATE INDEX ix_rlx_status_change_run_id ON rlx_status_change (run_id);
CREATE INDEX ix_rlx_group_name ON rlx_group (name);
CREATE INDEX ix_rlx_run_digest_seed ON rlx_run (digest, seed);
CREATE INDEX ix_rlx_run_name ON rlx_run (name);
CREATE INDEX ix_rlx_rollout_run_id_problem_id ON rlx_rollout (run_id, problem_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('rlx_run',5);
INSERT INTO "sqlite_sequence" VALUES('rlx_artifact',4);
INSERT INTO "sqlite_sequence" VALUES('rlx_event',3);
COMMIT;
