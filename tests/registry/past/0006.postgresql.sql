CREATE TABLE public.rlx_alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.rlx_artifact (
    seq integer NOT NULL,
    run_id integer NOT NULL,
    path text NOT NULL,
    kind text NOT NULL,
    at double precision NOT NULL
);
CREATE SEQUENCE public.rlx_artifact_seq_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rlx_artifact_seq_seq OWNED BY public.rlx_artifact.seq;
CREATE TABLE public.rlx_checkpoint (
    run_id integer NOT NULL,
    step integer NOT NULL,
    path text NOT NULL,
    bytes bigint NOT NULL,
    sha256 text NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.rlx_device (
    host text NOT NULL,
    name text NOT NULL,
    run_id integer NOT NULL,
    attempt integer NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.rlx_evaluation (
    run_id integer NOT NULL,
    step integer NOT NULL,
    label text NOT NULL,
    suite text NOT NULL,
    n integer NOT NULL,
    metrics json NOT NULL,
    payload json,
    at double precision NOT NULL,
    CONSTRAINT ck_rlx_evaluation_label CHECK ((label = ANY (ARRAY['before'::text, 'after'::text, 'step'::text])))
);
CREATE TABLE public.rlx_event (
    id integer NOT NULL,
    run_id integer NOT NULL,
    at double precision NOT NULL,
    kind text NOT NULL,
    level text NOT NULL,
    message text NOT NULL,
    payload json
);
CREATE SEQUENCE public.rlx_event_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rlx_event_id_seq OWNED BY public.rlx_event.id;
CREATE TABLE public.rlx_group (
    run_id integer NOT NULL,
    name text NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.rlx_metric (
    run_id integer NOT NULL,
    key_id integer NOT NULL,
    step integer NOT NULL,
    value double precision NOT NULL,
    at double precision NOT NULL,
    seq bigint NOT NULL
);
CREATE TABLE public.rlx_metric_key (
    id integer NOT NULL,
    name text NOT NULL
);
CREATE SEQUENCE public.rlx_metric_key_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rlx_metric_key_id_seq OWNED BY public.rlx_metric_key.id;
CREATE TABLE public.rlx_mirror (
    run_id integer NOT NULL,
    target text NOT NULL,
    seq bigint NOT NULL
);
CREATE TABLE public.rlx_note (
    run_id integer NOT NULL,
    note text NOT NULL,
    tags json NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.rlx_plugin (
    host text NOT NULL,
    kind text NOT NULL,
    distribution text NOT NULL,
    name text NOT NULL,
    version text NOT NULL,
    entry_point text NOT NULL,
    state text NOT NULL,
    message text NOT NULL,
    at double precision NOT NULL,
    CONSTRAINT ck_rlx_plugin_state CHECK ((state = ANY (ARRAY['ok'::text, 'broken'::text, 'clash'::text])))
);
CREATE TABLE public.rlx_rollout (
    run_id integer NOT NULL,
    step integer NOT NULL,
    "row" integer NOT NULL,
    parent_row integer,
    tree integer NOT NULL,
    "group" integer NOT NULL,
    turn text NOT NULL,
    problem_id text NOT NULL,
    reward double precision,
    rewards json NOT NULL,
    advantage double precision NOT NULL,
    n_tokens integer NOT NULL,
    finish_reason text NOT NULL,
    preview text NOT NULL,
    failed text,
    scores json
);
CREATE TABLE public.rlx_rollout_step (
    run_id integer NOT NULL,
    step integer NOT NULL,
    path text NOT NULL,
    sha256 text NOT NULL,
    bytes bigint NOT NULL,
    statistics json NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.rlx_run (
    id integer NOT NULL,
    name text NOT NULL,
    digest text NOT NULL,
    seed bigint NOT NULL,
    status text NOT NULL,
    step integer NOT NULL,
    steps_total integer,
    created double precision NOT NULL,
    started double precision,
    ended double precision,
    reason text,
    directory text,
    mlflow_run_id text,
    mlflow_experiment_id text,
    attempt integer NOT NULL,
    heartbeat double precision,
    pid integer,
    phase text,
    yaml text NOT NULL,
    spec json NOT NULL,
    plugins json NOT NULL,
    code json NOT NULL,
    environment json NOT NULL,
    host text,
    request text,
    origins json,
    CONSTRAINT ck_rlx_run_request CHECK ((request = ANY (ARRAY['stop'::text, 'kill'::text]))),
    CONSTRAINT ck_rlx_run_status CHECK ((status = ANY (ARRAY['queued'::text, 'submitted'::text, 'running'::text, 'finished'::text, 'failed'::text, 'stopped'::text, 'lost'::text])))
);
CREATE SEQUENCE public.rlx_run_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rlx_run_id_seq OWNED BY public.rlx_run.id;
CREATE TABLE public.rlx_status_change (
    id integer NOT NULL,
    run_id integer NOT NULL,
    at double precision NOT NULL,
    before text,
    after text NOT NULL,
    reason text,
    attempt integer NOT NULL,
    CONSTRAINT ck_rlx_status_change_after CHECK ((after = ANY (ARRAY['queued'::text, 'submitted'::text, 'running'::text, 'finished'::text, 'failed'::text, 'stopped'::text, 'lost'::text]))),
    CONSTRAINT ck_rlx_status_change_before CHECK ((before = ANY (ARRAY['queued'::text, 'submitted'::text, 'running'::text, 'finished'::text, 'failed'::text, 'stopped'::text, 'lost'::text])))
);
CREATE SEQUENCE public.rlx_status_change_id_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rlx_status_change_id_seq OWNED BY public.rlx_status_change.id;
ALTER TABLE ONLY public.rlx_artifact ALTER COLUMN seq SET DEFAULT nextval('public.rlx_artifact_seq_seq'::regclass);
ALTER TABLE ONLY public.rlx_event ALTER COLUMN id SET DEFAULT nextval('public.rlx_event_id_seq'::regclass);
ALTER TABLE ONLY public.rlx_metric_key ALTER COLUMN id SET DEFAULT nextval('public.rlx_metric_key_id_seq'::regclass);
ALTER TABLE ONLY public.rlx_run ALTER COLUMN id SET DEFAULT nextval('public.rlx_run_id_seq'::regclass);
ALTER TABLE ONLY public.rlx_status_change ALTER COLUMN id SET DEFAULT nextval('public.rlx_status_change_id_seq'::regclass);
INSERT INTO public.rlx_alembic_version VALUES ('0006');
INSERT INTO public.rlx_artifact VALUES (2, 1, 'calibration_1.png', 'picture', 1795575510.986602);
INSERT INTO public.rlx_artifact VALUES (3, 1, 'spec.yaml', 'spec', 1795575511.1611626);
INSERT INTO public.rlx_artifact VALUES (4, 1, 'calibration_2.png', 'picture', 1795575511.1676052);
INSERT INTO public.rlx_checkpoint VALUES (1, 1, 'checkpoints/1', 1099511627776, '0000000000000000000000000000000000000000000000000000000000000001', 1795575510.9344838);
INSERT INTO public.rlx_checkpoint VALUES (1, 2, 'checkpoints/2', 1099511627776, '0000000000000000000000000000000000000000000000000000000000000002', 1795575511.145483);
INSERT INTO public.rlx_device VALUES ('one', 'gpu:0', 4, 1, 1795575511.4499102);
INSERT INTO public.rlx_evaluation VALUES (1, 1, 'step', 'test', 60, '{"accuracy":0.5,"auroc":null}', NULL, 1795575511.0155609);
INSERT INTO public.rlx_evaluation VALUES (1, 2, 'step', 'test', 60, '{"accuracy":0.5,"auroc":null}', NULL, 1795575511.194968);
INSERT INTO public.rlx_evaluation VALUES (1, 2, 'after', 'test', 600, '{"accuracy":0.6}', '{"bins":[1,2]}', 1795575511.2346926);
INSERT INTO public.rlx_event VALUES (1, 1, 1795575510.999927, 'note', 'info', '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', '{"step":1,"figures":[1.5,null]}');
INSERT INTO public.rlx_event VALUES (2, 1, 1795575511.1850548, 'note', 'info', '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', '{"step":2,"figures":[1.5,null]}');
INSERT INTO public.rlx_event VALUES (3, 2, 1795575511.3427134, 'nonfinite', 'warning', 'step 1: not finite: train/kl', NULL);
INSERT INTO public.rlx_group VALUES (2, 'rlcr-seeds', 1795575510.737972);
INSERT INTO public.rlx_group VALUES (1, 'rlcr-seeds', 1795575510.7505994);
INSERT INTO public.rlx_group VALUES (1, '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', 1795575510.7728438);
INSERT INTO public.rlx_metric VALUES (1, 2, 1, 0.5, 1795575510.8682115, 1);
INSERT INTO public.rlx_metric VALUES (1, 1, 1, 1.1, 1795575510.8682115, 2);
INSERT INTO public.rlx_metric VALUES (1, 2, 2, 0.25, 1795575511.115253, 3);
INSERT INTO public.rlx_metric VALUES (1, 1, 2, 2.1, 1795575511.115253, 4);
INSERT INTO public.rlx_metric VALUES (2, 2, 1, 3.25, 1795575511.3427134, 1);
INSERT INTO public.rlx_metric VALUES (2, 3, 1, 1, 1795575511.3427134, 2);
INSERT INTO public.rlx_metric_key VALUES (1, 'reward/mean');
INSERT INTO public.rlx_metric_key VALUES (2, 'train/loss');
INSERT INTO public.rlx_metric_key VALUES (3, 'health/nonfinite');
INSERT INTO public.rlx_metric_key VALUES (4, 'train/kl');
INSERT INTO public.rlx_mirror VALUES (1, 'mlflow', 4);
INSERT INTO public.rlx_mirror VALUES (1, 'mlflow-files', 2);
INSERT INTO public.rlx_mirror VALUES (1, 'mlflow-end', 5);
INSERT INTO public.rlx_note VALUES (1, 'as expected', '["paper","baseline"]', 1795575511.2910814);
INSERT INTO public.rlx_plugin VALUES ('one', 'reward', 'guest', 'odd', '0.1', 'guest:odd', 'broken', '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', 1700000000);
INSERT INTO public.rlx_rollout VALUES (1, 1, 0, NULL, 0, 0, 'answer', 'p7', 1.1, '{"accuracy":1.0,"brier":null}', 0.5, 12, 'stop', '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', NULL, '{}');
INSERT INTO public.rlx_rollout VALUES (1, 1, 1, 0, 0, 0, 'confidence', 'p7', NULL, '{}', -0.1, 3, 'length', '0.9', 'timeout', '{}');
INSERT INTO public.rlx_rollout VALUES (1, 2, 0, NULL, 0, 0, 'answer', 'p7', 1.1, '{"accuracy":1.0,"brier":null}', 0.5, 12, 'stop', '3 + 4 é ‮''; DROP TABLE rlx_run;--
[31m', NULL, '{}');
INSERT INTO public.rlx_rollout VALUES (1, 2, 1, 0, 0, 0, 'confidence', 'p7', NULL, '{}', -0.1, 3, 'length', '0.9', 'timeout', '{}');
INSERT INTO public.rlx_rollout_step VALUES (1, 1, 'rollouts/step_000001.parquet', '0000000000000000000000000000000000000000000000000000000000000001', 10, '{"rows":2,"std":null}', 1795575510.8361835);
INSERT INTO public.rlx_rollout_step VALUES (1, 2, 'rollouts/step_000002.parquet', '0000000000000000000000000000000000000000000000000000000000000002', 10, '{"rows":2,"std":null}', 1795575511.0995924);
INSERT INTO public.rlx_run VALUES (3, 'kg', '0000000000000000000000000000000000000000000000000000000000000002', 2, 'submitted', 0, NULL, 1795575510.5849528, NULL, NULL, NULL, '/srv/rlx/runs/r-0003', NULL, NULL, 0, NULL, NULL, NULL, 'name: kg
', '{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}', '[{"name":"countdown","version":"0.1.0"}]', '{"commit":"abc","dirty":false}', '{"torch":"2.13","devices":1}', NULL, NULL, NULL);
INSERT INTO public.rlx_run VALUES (1, 'rlcr', '0000000000000000000000000000000000000000000000000000000000000000', 0, 'finished', 2, 2, 1795575510.4320226, 1795575510.8099978, 1795575511.3207834, NULL, '/srv/rlx/runs/r-0001', 'm1', '1', 2, 1795575511.2173245, 7, NULL, 'name: rlcr
', '{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}', '[{"name":"countdown","version":"0.1.0"}]', '{"commit":"abc","dirty":false}', '{"torch":"2.13","devices":1}', NULL, NULL, '{"model.kind":"rlcr.yaml:3","said":"default"}');
INSERT INTO public.rlx_run VALUES (5, 'kg', '0000000000000000000000000000000000000000000000000000000000000004', 4, 'queued', 0, NULL, 1795575510.6836207, NULL, NULL, NULL, '/srv/rlx/runs/r-0005', NULL, NULL, 0, NULL, NULL, NULL, 'name: kg
', '{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}', '[{"name":"countdown","version":"0.1.0"}]', '{"commit":"abc","dirty":false}', '{"torch":"2.13","devices":1}', NULL, NULL, NULL);
INSERT INTO public.rlx_run VALUES (2, 'rlcr', '0000000000000000000000000000000000000000000000000000000000000001', 1, 'stopped', 0, NULL, 1795575510.5236418, 1795575511.3334954, 1795575511.3903673, 'asked to', '/srv/rlx/runs/r-0002', NULL, NULL, 1, 1795575511.3334954, NULL, NULL, 'name: rlcr
', '{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}', '[{"name":"countdown","version":"0.1.0"}]', '{"commit":"abc","dirty":false}', '{"torch":"2.13","devices":1}', NULL, NULL, NULL);
INSERT INTO public.rlx_run VALUES (4, 'kg', '0000000000000000000000000000000000000000000000000000000000000003', 3, 'running', 0, NULL, 1795575510.63865, 1795575511.4328694, NULL, NULL, '/srv/rlx/runs/r-0004', NULL, NULL, 1, 1795575511.4328694, 8, NULL, 'name: kg
', '{"model":{"kind":"tiny"},"loss":{"clip":[0.2,0.28]},"said":"3 + 4 \u00e9 \u202e''; DROP TABLE rlx_run;--\n\u001b[31m"}', '[{"name":"countdown","version":"0.1.0"}]', '{"commit":"abc","dirty":false}', '{"torch":"2.13","devices":1}', 'one', 'stop', NULL);
INSERT INTO public.rlx_status_change VALUES (1, 1, 1795575510.4320226, NULL, 'submitted', NULL, 0);
INSERT INTO public.rlx_status_change VALUES (2, 2, 1795575510.5236418, NULL, 'submitted', NULL, 0);
INSERT INTO public.rlx_status_change VALUES (3, 3, 1795575510.5849528, NULL, 'submitted', NULL, 0);
INSERT INTO public.rlx_status_change VALUES (4, 4, 1795575510.63865, NULL, 'submitted', NULL, 0);
INSERT INTO public.rlx_status_change VALUES (5, 5, 1795575510.6836207, NULL, 'queued', NULL, 0);
INSERT INTO public.rlx_status_change VALUES (6, 1, 1795575510.8099978, 'submitted', 'running', NULL, 1);
INSERT INTO public.rlx_status_change VALUES (7, 1, 1795575511.0647576, 'running', 'failed', 'killed by signal 9', 1);
INSERT INTO public.rlx_status_change VALUES (8, 1, 1795575511.0874424, 'failed', 'running', 'resumed', 2);
INSERT INTO public.rlx_status_change VALUES (9, 1, 1795575511.3207834, 'running', 'finished', NULL, 2);
INSERT INTO public.rlx_status_change VALUES (10, 2, 1795575511.3334954, 'submitted', 'running', NULL, 1);
INSERT INTO public.rlx_status_change VALUES (11, 2, 1795575511.3903673, 'running', 'stopped', 'asked to', 1);
INSERT INTO public.rlx_status_change VALUES (12, 4, 1795575511.4328694, 'submitted', 'running', NULL, 1);
SELECT pg_catalog.setval('public.rlx_artifact_seq_seq', 4, true);
SELECT pg_catalog.setval('public.rlx_event_id_seq', 3, true);
SELECT pg_catalog.setval('public.rlx_metric_key_id_seq', 4, true);
SELECT pg_catalog.setval('public.rlx_run_id_seq', 5, true);
SELECT pg_catalog.setval('public.rlx_status_change_id_seq', 12, true);
ALTER TABLE ONLY public.rlx_artifact
    ADD CONSTRAINT pk_rlx_artifact PRIMARY KEY (seq);
ALTER TABLE ONLY public.rlx_checkpoint
    ADD CONSTRAINT pk_rlx_checkpoint PRIMARY KEY (run_id, step);
ALTER TABLE ONLY public.rlx_device
    ADD CONSTRAINT pk_rlx_device PRIMARY KEY (host, name);
ALTER TABLE ONLY public.rlx_evaluation
    ADD CONSTRAINT pk_rlx_evaluation PRIMARY KEY (run_id, step, label, suite);
ALTER TABLE ONLY public.rlx_event
    ADD CONSTRAINT pk_rlx_event PRIMARY KEY (id);
ALTER TABLE ONLY public.rlx_group
    ADD CONSTRAINT pk_rlx_group PRIMARY KEY (run_id, name);
ALTER TABLE ONLY public.rlx_metric
    ADD CONSTRAINT pk_rlx_metric PRIMARY KEY (run_id, key_id, step);
ALTER TABLE ONLY public.rlx_metric_key
    ADD CONSTRAINT pk_rlx_metric_key PRIMARY KEY (id);
ALTER TABLE ONLY public.rlx_mirror
    ADD CONSTRAINT pk_rlx_mirror PRIMARY KEY (run_id, target);
ALTER TABLE ONLY public.rlx_note
    ADD CONSTRAINT pk_rlx_note PRIMARY KEY (run_id);
ALTER TABLE ONLY public.rlx_plugin
    ADD CONSTRAINT pk_rlx_plugin PRIMARY KEY (host, kind, distribution, name);
ALTER TABLE ONLY public.rlx_rollout
    ADD CONSTRAINT pk_rlx_rollout PRIMARY KEY (run_id, step, "row");
ALTER TABLE ONLY public.rlx_rollout_step
    ADD CONSTRAINT pk_rlx_rollout_step PRIMARY KEY (run_id, step);
ALTER TABLE ONLY public.rlx_run
    ADD CONSTRAINT pk_rlx_run PRIMARY KEY (id);
ALTER TABLE ONLY public.rlx_status_change
    ADD CONSTRAINT pk_rlx_status_change PRIMARY KEY (id);
ALTER TABLE ONLY public.rlx_alembic_version
    ADD CONSTRAINT rlx_alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.rlx_metric_key
    ADD CONSTRAINT uq_rlx_metric_key_name UNIQUE (name);
CREATE UNIQUE INDEX ix_rlx_artifact_run_id_path ON public.rlx_artifact USING btree (run_id, path);
CREATE INDEX ix_rlx_event_run_id_id ON public.rlx_event USING btree (run_id, id);
CREATE INDEX ix_rlx_group_name ON public.rlx_group USING btree (name);
CREATE UNIQUE INDEX ix_rlx_metric_run_id_seq ON public.rlx_metric USING btree (run_id, seq);
CREATE INDEX ix_rlx_rollout_run_id_problem_id ON public.rlx_rollout USING btree (run_id, problem_id);
CREATE INDEX ix_rlx_run_digest_seed ON public.rlx_run USING btree (digest, seed);
CREATE INDEX ix_rlx_run_name ON public.rlx_run USING btree (name);
CREATE INDEX ix_rlx_status_change_run_id ON public.rlx_status_change USING btree (run_id);
ALTER TABLE ONLY public.rlx_artifact
    ADD CONSTRAINT fk_rlx_artifact_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_checkpoint
    ADD CONSTRAINT fk_rlx_checkpoint_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_device
    ADD CONSTRAINT fk_rlx_device_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_evaluation
    ADD CONSTRAINT fk_rlx_evaluation_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_event
    ADD CONSTRAINT fk_rlx_event_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_group
    ADD CONSTRAINT fk_rlx_group_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_metric
    ADD CONSTRAINT fk_rlx_metric_key_id_rlx_metric_key FOREIGN KEY (key_id) REFERENCES public.rlx_metric_key(id);
ALTER TABLE ONLY public.rlx_metric
    ADD CONSTRAINT fk_rlx_metric_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_mirror
    ADD CONSTRAINT fk_rlx_mirror_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_note
    ADD CONSTRAINT fk_rlx_note_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_rollout
    ADD CONSTRAINT fk_rlx_rollout_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_rollout_step
    ADD CONSTRAINT fk_rlx_rollout_step_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
ALTER TABLE ONLY public.rlx_status_change
    ADD CONSTRAINT fk_rlx_status_change_run_id_rlx_run FOREIGN KEY (run_id) REFERENCES public.rlx_run(id);
