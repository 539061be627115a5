CREATE TABLE calls_in_flight (
    namespace character varying(64) NOT NULL,
    service character varying(64) NOT NULL,
    calls integer NOT NULL,
    told_at double precision NOT NULL
);
CREATE TABLE events (
    job_id character varying(64) NOT NULL,
    sequence bigint NOT NULL,
    at double precision NOT NULL,
    state character varying(16) NOT NULL,
    phase character varying(64) NOT NULL,
    message text NOT NULL,
    progress double precision NOT NULL
);
CREATE TABLE fxlib_about (
    schema_version integer DEFAULT 5 NOT NULL,
    swept_at double precision DEFAULT '0'::double precision NOT NULL
);
CREATE TABLE fxlib_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE holdings (
    namespace character varying(64) NOT NULL,
    sha256 character varying(64) NOT NULL,
    size bigint NOT NULL
);
CREATE TABLE jobs (
    number bigint NOT NULL,
    id character varying(64) NOT NULL,
    request_id character varying(128) NOT NULL,
    request_digest character varying(64) NOT NULL,
    namespace character varying(64) NOT NULL,
    name character varying(256) NOT NULL,
    labels json NOT NULL,
    torch_version character varying(64) NOT NULL,
    cache_key character varying(64) NOT NULL,
    fresh boolean NOT NULL,
    created_at double precision NOT NULL,
    state character varying(16) NOT NULL,
    phase character varying(64) NOT NULL,
    attempts integer NOT NULL,
    worker_id character varying(256) NOT NULL,
    token character varying(64) NOT NULL,
    hardware text NOT NULL,
    started_at double precision,
    finished_at double precision,
    failure_code character varying(64),
    failure_message text,
    cached boolean NOT NULL,
    reusable boolean NOT NULL,
    last_sequence bigint NOT NULL,
    asked_by character varying(64) DEFAULT ''::character varying NOT NULL,
    asked_from character varying(256) DEFAULT ''::character varying NOT NULL,
    measured_by character varying(64) DEFAULT ''::character varying NOT NULL,
    labels_asked text DEFAULT ''::text NOT NULL,
    leased_until double precision DEFAULT '0'::double precision NOT NULL
);
CREATE SEQUENCE jobs_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE jobs_number_seq OWNED BY jobs.number;
CREATE TABLE labels (
    key character varying(256) NOT NULL,
    value character varying(256) NOT NULL,
    job_id character varying(64) NOT NULL
);
CREATE TABLE live_reports (
    tenant character varying(256) NOT NULL,
    due_at double precision NOT NULL
);
CREATE TABLE payloads (
    job_id character varying(64) NOT NULL,
    kind character varying(16) NOT NULL,
    body bytea NOT NULL
);
CREATE TABLE workers (
    id character varying(256) NOT NULL,
    torch_version character varying(64) NOT NULL,
    hardware text NOT NULL,
    fxlib_version character varying(64) NOT NULL,
    allowed_modules json NOT NULL,
    containment character varying(64) DEFAULT ''::character varying NOT NULL,
    labels text DEFAULT ''::text NOT NULL,
    seen_at double precision NOT NULL
);
ALTER TABLE ONLY jobs ALTER COLUMN number SET DEFAULT nextval('jobs_number_seq'::regclass);
INSERT INTO events VALUES
	('job-00', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-00', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-00', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-01', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-02', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-02', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-02', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-03', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-03', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-03', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-04', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-04', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-05', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-05', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-06', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-06', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-06', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-07', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-08', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-08', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-08', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-09', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-09', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-09', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-10', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-10', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-11', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-11', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-12', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-12', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-12', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-13', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-14', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-14', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-14', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-15', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-15', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-15', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-16', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-16', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-17', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-17', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-18', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-18', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-18', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-19', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-20', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-20', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-20', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-21', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-21', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-21', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-22', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-22', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-23', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-23', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-24', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-24', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-24', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-25', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-26', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-26', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-26', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-27', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-27', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-27', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-28', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-28', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-29', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-29', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-30', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-30', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-30', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-31', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-32', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-32', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-32', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-33', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-33', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-33', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-34', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-34', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-35', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-35', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-36', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-36', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-36', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-37', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-38', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-38', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-38', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-39', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-39', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-39', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-40', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-40', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-41', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-41', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-42', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-42', 2, 1790000200, 'running', 'running', 'it is running
now', -1);
INSERT INTO events VALUES
	('job-42', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-43', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-44', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-44', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-44', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-45', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-45', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-45', 3, 1790000300, 'failed', 'failed', 'it is failed
now', -1),
	('job-46', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-46', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-47', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-47', 2, 1790000200, 'cancelled', 'cancelled', 'it is cancelled
now', -1),
	('job-48', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1),
	('job-48', 2, 1790000200, 'running', 'running', 'it is running
now', -1),
	('job-48', 3, 1790000300, 'succeeded', 'succeeded', 'it is succeeded
now', -1),
	('job-49', 1, 1790000100, 'queued', 'queued', 'it is queued
now', -1);
INSERT INTO fxlib_about VALUES
	(5, 0);
INSERT INTO fxlib_version VALUES
	('0007');
INSERT INTO holdings VALUES
	('team-0', '0000000000000000000000000000000000000000000000000000000000000000', 1000),
	('team-1', '0000000000000000000000000000000000000000000000000000000000000001', 1001),
	('team-2', '0000000000000000000000000000000000000000000000000000000000000002', 1002),
	('team-0', '0000000000000000000000000000000000000000000000000000000000000003', 1003),
	('team-1', '0000000000000000000000000000000000000000000000000000000000000004', 1004),
	('team-2', '0000000000000000000000000000000000000000000000000000000000000005', 1005),
	('team-0', '0000000000000000000000000000000000000000000000000000000000000006', 1006),
	('team-1', '0000000000000000000000000000000000000000000000000000000000000007', 1007),
	('team-2', '0000000000000000000000000000000000000000000000000000000000000008', 1008),
	('team-0', '0000000000000000000000000000000000000000000000000000000000000009', 1009),
	('team-1', '000000000000000000000000000000000000000000000000000000000000000a', 1010),
	('team-2', '000000000000000000000000000000000000000000000000000000000000000b', 1011),
	('team-0', '000000000000000000000000000000000000000000000000000000000000000c', 1012),
	('team-1', '000000000000000000000000000000000000000000000000000000000000000d', 1013),
	('team-2', '000000000000000000000000000000000000000000000000000000000000000e', 1014),
	('team-0', '000000000000000000000000000000000000000000000000000000000000000f', 1015),
	('team-1', '0000000000000000000000000000000000000000000000000000000000000010', 1016),
	('team-2', '0000000000000000000000000000000000000000000000000000000000000011', 1017),
	('team-0', '0000000000000000000000000000000000000000000000000000000000000012', 1018),
	('team-1', '0000000000000000000000000000000000000000000000000000000000000013', 1019);
INSERT INTO jobs VALUES
	(1, 'job-00', 'request-0', '0000000000000000000000000000000000000000000000000000000000000000', 'team-0', 'model-0', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000000', false, 1790000000, 'succeeded', 'done', 1, 'worker-1', 'token-0', 'cpu-1', 1790000100, 1790000200, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(2, 'job-01', 'request-1', '0000000000000000000000000000000000000000000000000000000000000001', 'team-1', 'model-1', '{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000001', true, 1790000001, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(3, 'job-02', 'request-2', '0000000000000000000000000000000000000000000000000000000000000002', 'team-2', 'model-2', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000002', false, 1790000002, 'succeeded', 'done', 1, 'worker-1', 'token-2', 'cpu-1', 1790000102, 1790000202, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(4, 'job-03', 'request-3', '0000000000000000000000000000000000000000000000000000000000000003', 'team-0', 'model-3', '{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000003', false, 1790000003, 'failed', 'done', 1, 'worker-1', 'token-3', 'cpu-1', 1790000103, 1790000203, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(5, 'job-04', 'request-4', '0000000000000000000000000000000000000000000000000000000000000004', 'team-1', 'model-4', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000004', false, 1790000004, 'running', 'running', 1, 'worker-1', 'token-4', 'cpu-1', 1790000104, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(6, 'job-05', 'request-5', '0000000000000000000000000000000000000000000000000000000000000005', 'team-2', 'model-5', '{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000005', true, 1790000005, 'cancelled', 'done', 0, '', '', '', NULL, 1790000205, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '{"rack": "3"}', 0),
	(7, 'job-06', 'request-6', '0000000000000000000000000000000000000000000000000000000000000006', 'team-0', 'model-6', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000006', false, 1790000006, 'succeeded', 'done', 1, 'worker-1', 'token-6', 'cpu-1', 1790000106, 1790000206, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(8, 'job-07', 'request-7', '0000000000000000000000000000000000000000000000000000000000000007', 'team-1', 'model-0', '{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000007', false, 1790000007, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(9, 'job-08', 'request-8', '0000000000000000000000000000000000000000000000000000000000000008', 'team-2', 'model-1', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000008', false, 1790000008, 'succeeded', 'done', 1, 'worker-1', 'token-8', 'cpu-1', 1790000108, 1790000208, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(10, 'job-09', 'request-9', '0000000000000000000000000000000000000000000000000000000000000009', 'team-0', 'model-2', '{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000009', true, 1790000009, 'failed', 'done', 1, 'worker-1', 'token-9', 'cpu-1', 1790000109, 1790000209, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(11, 'job-10', 'request-10', '000000000000000000000000000000000000000000000000000000000000000a', 'team-1', 'model-3', '{}', '2.13.0', '000000000000000000000000000000000000000000000000000000000000000a', false, 1790000010, 'running', 'running', 1, 'worker-1', 'token-10', 'cpu-1', 1790000110, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(12, 'job-11', 'request-11', '000000000000000000000000000000000000000000000000000000000000000b', 'team-2', 'model-4', '{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000000', false, 1790000011, 'cancelled', 'done', 0, '', '', '', NULL, 1790000211, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(13, 'job-12', 'request-12', '000000000000000000000000000000000000000000000000000000000000000c', 'team-0', 'model-5', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000001', false, 1790000012, 'succeeded', 'done', 1, 'worker-1', 'token-12', 'cpu-1', 1790000112, 1790000212, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(14, 'job-13', 'request-13', '000000000000000000000000000000000000000000000000000000000000000d', 'team-1', 'model-6', '{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000002', true, 1790000013, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(15, 'job-14', 'request-14', '000000000000000000000000000000000000000000000000000000000000000e', 'team-2', 'model-0', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000003', false, 1790000014, 'succeeded', 'done', 1, 'worker-1', 'token-14', 'cpu-1', 1790000114, 1790000214, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(16, 'job-15', 'request-15', '000000000000000000000000000000000000000000000000000000000000000f', 'team-0', 'model-1', '{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000004', false, 1790000015, 'failed', 'done', 1, 'worker-1', 'token-15', 'cpu-1', 1790000115, 1790000215, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(17, 'job-16', 'request-16', '0000000000000000000000000000000000000000000000000000000000000010', 'team-1', 'model-2', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000005', false, 1790000016, 'running', 'running', 1, 'worker-1', 'token-16', 'cpu-1', 1790000116, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(18, 'job-17', 'request-17', '0000000000000000000000000000000000000000000000000000000000000011', 'team-2', 'model-3', '{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000006', true, 1790000017, 'cancelled', 'done', 0, '', '', '', NULL, 1790000217, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(19, 'job-18', 'request-18', '0000000000000000000000000000000000000000000000000000000000000012', 'team-0', 'model-4', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000007', false, 1790000018, 'succeeded', 'done', 1, 'worker-1', 'token-18', 'cpu-1', 1790000118, 1790000218, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(20, 'job-19', 'request-19', '0000000000000000000000000000000000000000000000000000000000000013', 'team-1', 'model-5', '{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000008', false, 1790000019, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(21, 'job-20', 'request-20', '0000000000000000000000000000000000000000000000000000000000000014', 'team-2', 'model-6', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000009', false, 1790000020, 'succeeded', 'done', 1, 'worker-1', 'token-20', 'cpu-1', 1790000120, 1790000220, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(43, 'job-42', 'request-42', '000000000000000000000000000000000000000000000000000000000000002a', 'team-0', 'model-0', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000009', false, 1790000042, 'succeeded', 'done', 1, 'worker-1', 'token-42', 'cpu-1', 1790000142, 1790000242, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(22, 'job-21', 'request-21', '0000000000000000000000000000000000000000000000000000000000000015', 'team-0', 'model-0', '{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '000000000000000000000000000000000000000000000000000000000000000a', true, 1790000021, 'failed', 'done', 1, 'worker-1', 'token-21', 'cpu-1', 1790000121, 1790000221, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(23, 'job-22', 'request-22', '0000000000000000000000000000000000000000000000000000000000000016', 'team-1', 'model-1', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000000', false, 1790000022, 'running', 'running', 1, 'worker-1', 'token-22', 'cpu-1', 1790000122, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(24, 'job-23', 'request-23', '0000000000000000000000000000000000000000000000000000000000000017', 'team-2', 'model-2', '{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000001', false, 1790000023, 'cancelled', 'done', 0, '', '', '', NULL, 1790000223, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(25, 'job-24', 'request-24', '0000000000000000000000000000000000000000000000000000000000000018', 'team-0', 'model-3', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000002', false, 1790000024, 'succeeded', 'done', 1, 'worker-1', 'token-24', 'cpu-1', 1790000124, 1790000224, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(26, 'job-25', 'request-25', '0000000000000000000000000000000000000000000000000000000000000019', 'team-1', 'model-4', '{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000003', true, 1790000025, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '{"rack": "3"}', 0),
	(27, 'job-26', 'request-26', '000000000000000000000000000000000000000000000000000000000000001a', 'team-2', 'model-5', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000004', false, 1790000026, 'succeeded', 'done', 1, 'worker-1', 'token-26', 'cpu-1', 1790000126, 1790000226, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(28, 'job-27', 'request-27', '000000000000000000000000000000000000000000000000000000000000001b', 'team-0', 'model-6', '{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000005', false, 1790000027, 'failed', 'done', 1, 'worker-1', 'token-27', 'cpu-1', 1790000127, 1790000227, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(29, 'job-28', 'request-28', '000000000000000000000000000000000000000000000000000000000000001c', 'team-1', 'model-0', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000006', false, 1790000028, 'running', 'running', 1, 'worker-1', 'token-28', 'cpu-1', 1790000128, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(30, 'job-29', 'request-29', '000000000000000000000000000000000000000000000000000000000000001d', 'team-2', 'model-1', '{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000007', true, 1790000029, 'cancelled', 'done', 0, '', '', '', NULL, 1790000229, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(31, 'job-30', 'request-30', '000000000000000000000000000000000000000000000000000000000000001e', 'team-0', 'model-2', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000008', false, 1790000030, 'succeeded', 'done', 1, 'worker-1', 'token-30', 'cpu-1', 1790000130, 1790000230, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(32, 'job-31', 'request-31', '000000000000000000000000000000000000000000000000000000000000001f', 'team-1', 'model-3', '{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000009', false, 1790000031, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(33, 'job-32', 'request-32', '0000000000000000000000000000000000000000000000000000000000000020', 'team-2', 'model-4', '{}', '2.13.0', '000000000000000000000000000000000000000000000000000000000000000a', false, 1790000032, 'succeeded', 'done', 1, 'worker-1', 'token-32', 'cpu-1', 1790000132, 1790000232, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(34, 'job-33', 'request-33', '0000000000000000000000000000000000000000000000000000000000000021', 'team-0', 'model-5', '{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000000', true, 1790000033, 'failed', 'done', 1, 'worker-1', 'token-33', 'cpu-1', 1790000133, 1790000233, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(35, 'job-34', 'request-34', '0000000000000000000000000000000000000000000000000000000000000022', 'team-1', 'model-6', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000001', false, 1790000034, 'running', 'running', 1, 'worker-1', 'token-34', 'cpu-1', 1790000134, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(36, 'job-35', 'request-35', '0000000000000000000000000000000000000000000000000000000000000023', 'team-2', 'model-0', '{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000002', false, 1790000035, 'cancelled', 'done', 0, '', '', '', NULL, 1790000235, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '{"rack": "3"}', 0),
	(37, 'job-36', 'request-36', '0000000000000000000000000000000000000000000000000000000000000024', 'team-0', 'model-1', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000003', false, 1790000036, 'succeeded', 'done', 1, 'worker-1', 'token-36', 'cpu-1', 1790000136, 1790000236, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(38, 'job-37', 'request-37', '0000000000000000000000000000000000000000000000000000000000000025', 'team-1', 'model-2', '{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000004', true, 1790000037, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(39, 'job-38', 'request-38', '0000000000000000000000000000000000000000000000000000000000000026', 'team-2', 'model-3', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000005', false, 1790000038, 'succeeded', 'done', 1, 'worker-1', 'token-38', 'cpu-1', 1790000138, 1790000238, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(40, 'job-39', 'request-39', '0000000000000000000000000000000000000000000000000000000000000027', 'team-0', 'model-4', '{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000006', false, 1790000039, 'failed', 'done', 1, 'worker-1', 'token-39', 'cpu-1', 1790000139, 1790000239, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(41, 'job-40', 'request-40', '0000000000000000000000000000000000000000000000000000000000000028', 'team-1', 'model-5', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000007', false, 1790000040, 'running', 'running', 1, 'worker-1', 'token-40', 'cpu-1', 1790000140, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(42, 'job-41', 'request-41', '0000000000000000000000000000000000000000000000000000000000000029', 'team-2', 'model-6', '{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000008', true, 1790000041, 'cancelled', 'done', 0, '', '', '', NULL, 1790000241, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(44, 'job-43', 'request-43', '000000000000000000000000000000000000000000000000000000000000002b', 'team-1', 'model-1', '{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '000000000000000000000000000000000000000000000000000000000000000a', false, 1790000043, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(45, 'job-44', 'request-44', '000000000000000000000000000000000000000000000000000000000000002c', 'team-2', 'model-2', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000000', false, 1790000044, 'succeeded', 'done', 1, 'worker-1', 'token-44', 'cpu-1', 1790000144, 1790000244, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(46, 'job-45', 'request-45', '000000000000000000000000000000000000000000000000000000000000002d', 'team-0', 'model-3', '{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000001', true, 1790000045, 'failed', 'done', 1, 'worker-1', 'token-45', 'cpu-1', 1790000145, 1790000245, 'WORKER_LOST', 'its workers disappeared', false, false, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '{"rack": "3"}', 0),
	(47, 'job-46', 'request-46', '000000000000000000000000000000000000000000000000000000000000002e', 'team-1', 'model-4', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000002', false, 1790000046, 'running', 'running', 1, 'worker-1', 'token-46', 'cpu-1', 1790000146, NULL, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(48, 'job-47', 'request-47', '000000000000000000000000000000000000000000000000000000000000002f', 'team-2', 'model-5', '{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000003', false, 1790000047, 'cancelled', 'done', 0, '', '', '', NULL, 1790000247, NULL, NULL, false, false, 2, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0),
	(49, 'job-48', 'request-48', '0000000000000000000000000000000000000000000000000000000000000030', 'team-0', 'model-6', '{}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000004', false, 1790000048, 'succeeded', 'done', 1, 'worker-1', 'token-48', 'cpu-1', 1790000148, 1790000248, NULL, NULL, false, true, 3, 'launcher', 'ipv4:127.0.0.1:1', 'worker', '', 0),
	(50, 'job-49', 'request-49', '0000000000000000000000000000000000000000000000000000000000000031', 'team-1', 'model-0', '{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}', '2.13.0', '0000000000000000000000000000000000000000000000000000000000000005', true, 1790000049, 'queued', 'queued', 0, '', '', '', NULL, NULL, NULL, NULL, false, false, 1, 'launcher', 'ipv4:127.0.0.1:1', '', '', 0);
INSERT INTO labels VALUES
	('commit', 'c1', 'job-01'),
	('straße', '☃ ''quoted''; --', 'job-01'),
	('commit', 'c3', 'job-03'),
	('straße', '☃ ''quoted''; --', 'job-03'),
	('commit', 'c0', 'job-05'),
	('straße', '☃ ''quoted''; --', 'job-05'),
	('commit', 'c2', 'job-07'),
	('straße', '☃ ''quoted''; --', 'job-07'),
	('commit', 'c4', 'job-09'),
	('straße', '☃ ''quoted''; --', 'job-09'),
	('commit', 'c1', 'job-11'),
	('straße', '☃ ''quoted''; --', 'job-11'),
	('commit', 'c3', 'job-13'),
	('straße', '☃ ''quoted''; --', 'job-13'),
	('commit', 'c0', 'job-15'),
	('straße', '☃ ''quoted''; --', 'job-15'),
	('commit', 'c2', 'job-17'),
	('straße', '☃ ''quoted''; --', 'job-17'),
	('commit', 'c4', 'job-19'),
	('straße', '☃ ''quoted''; --', 'job-19'),
	('commit', 'c1', 'job-21'),
	('straße', '☃ ''quoted''; --', 'job-21'),
	('commit', 'c3', 'job-23'),
	('straße', '☃ ''quoted''; --', 'job-23'),
	('commit', 'c0', 'job-25'),
	('straße', '☃ ''quoted''; --', 'job-25'),
	('commit', 'c2', 'job-27'),
	('straße', '☃ ''quoted''; --', 'job-27'),
	('commit', 'c4', 'job-29'),
	('straße', '☃ ''quoted''; --', 'job-29'),
	('commit', 'c1', 'job-31'),
	('straße', '☃ ''quoted''; --', 'job-31'),
	('commit', 'c3', 'job-33'),
	('straße', '☃ ''quoted''; --', 'job-33'),
	('commit', 'c0', 'job-35'),
	('straße', '☃ ''quoted''; --', 'job-35'),
	('commit', 'c2', 'job-37'),
	('straße', '☃ ''quoted''; --', 'job-37'),
	('commit', 'c4', 'job-39'),
	('straße', '☃ ''quoted''; --', 'job-39'),
	('commit', 'c1', 'job-41'),
	('straße', '☃ ''quoted''; --', 'job-41'),
	('commit', 'c3', 'job-43'),
	('straße', '☃ ''quoted''; --', 'job-43'),
	('commit', 'c0', 'job-45'),
	('straße', '☃ ''quoted''; --', 'job-45'),
	('commit', 'c2', 'job-47'),
	('straße', '☃ ''quoted''; --', 'job-47'),
	('commit', 'c4', 'job-49'),
	('straße', '☃ ''quoted''; --', 'job-49');
INSERT INTO payloads VALUES
	('job-00', 'request', '\x0a09726571756573742d3012076d6f64656c2d301a067465616d2d30'),
	('job-00', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-01', 'request', '\x0a09726571756573742d3112076d6f64656c2d311a067465616d2d31'),
	('job-02', 'request', '\x0a09726571756573742d3212076d6f64656c2d321a067465616d2d32'),
	('job-02', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-03', 'request', '\x0a09726571756573742d3312076d6f64656c2d331a067465616d2d30'),
	('job-04', 'request', '\x0a09726571756573742d3412076d6f64656c2d341a067465616d2d31'),
	('job-05', 'request', '\x0a09726571756573742d3512076d6f64656c2d351a067465616d2d32'),
	('job-06', 'request', '\x0a09726571756573742d3612076d6f64656c2d361a067465616d2d30'),
	('job-06', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-07', 'request', '\x0a09726571756573742d3712076d6f64656c2d301a067465616d2d31'),
	('job-08', 'request', '\x0a09726571756573742d3812076d6f64656c2d311a067465616d2d32'),
	('job-08', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-09', 'request', '\x0a09726571756573742d3912076d6f64656c2d321a067465616d2d30'),
	('job-10', 'request', '\x0a0a726571756573742d313012076d6f64656c2d331a067465616d2d31'),
	('job-11', 'request', '\x0a0a726571756573742d313112076d6f64656c2d341a067465616d2d32'),
	('job-12', 'request', '\x0a0a726571756573742d313212076d6f64656c2d351a067465616d2d30'),
	('job-12', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-13', 'request', '\x0a0a726571756573742d313312076d6f64656c2d361a067465616d2d31'),
	('job-14', 'request', '\x0a0a726571756573742d313412076d6f64656c2d301a067465616d2d32'),
	('job-14', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-15', 'request', '\x0a0a726571756573742d313512076d6f64656c2d311a067465616d2d30'),
	('job-16', 'request', '\x0a0a726571756573742d313612076d6f64656c2d321a067465616d2d31'),
	('job-17', 'request', '\x0a0a726571756573742d313712076d6f64656c2d331a067465616d2d32'),
	('job-18', 'request', '\x0a0a726571756573742d313812076d6f64656c2d341a067465616d2d30'),
	('job-18', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-19', 'request', '\x0a0a726571756573742d313912076d6f64656c2d351a067465616d2d31'),
	('job-20', 'request', '\x0a0a726571756573742d323012076d6f64656c2d361a067465616d2d32'),
	('job-20', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-21', 'request', '\x0a0a726571756573742d323112076d6f64656c2d301a067465616d2d30'),
	('job-22', 'request', '\x0a0a726571756573742d323212076d6f64656c2d311a067465616d2d31'),
	('job-23', 'request', '\x0a0a726571756573742d323312076d6f64656c2d321a067465616d2d32'),
	('job-24', 'request', '\x0a0a726571756573742d323412076d6f64656c2d331a067465616d2d30'),
	('job-24', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-25', 'request', '\x0a0a726571756573742d323512076d6f64656c2d341a067465616d2d31'),
	('job-26', 'request', '\x0a0a726571756573742d323612076d6f64656c2d351a067465616d2d32'),
	('job-26', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-27', 'request', '\x0a0a726571756573742d323712076d6f64656c2d361a067465616d2d30'),
	('job-28', 'request', '\x0a0a726571756573742d323812076d6f64656c2d301a067465616d2d31'),
	('job-29', 'request', '\x0a0a726571756573742d323912076d6f64656c2d311a067465616d2d32'),
	('job-30', 'request', '\x0a0a726571756573742d333012076d6f64656c2d321a067465616d2d30'),
	('job-30', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-31', 'request', '\x0a0a726571756573742d333112076d6f64656c2d331a067465616d2d31'),
	('job-32', 'request', '\x0a0a726571756573742d333212076d6f64656c2d341a067465616d2d32'),
	('job-32', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-33', 'request', '\x0a0a726571756573742d333312076d6f64656c2d351a067465616d2d30'),
	('job-34', 'request', '\x0a0a726571756573742d333412076d6f64656c2d361a067465616d2d31'),
	('job-35', 'request', '\x0a0a726571756573742d333512076d6f64656c2d301a067465616d2d32'),
	('job-36', 'request', '\x0a0a726571756573742d333612076d6f64656c2d311a067465616d2d30'),
	('job-36', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-37', 'request', '\x0a0a726571756573742d333712076d6f64656c2d321a067465616d2d31'),
	('job-38', 'request', '\x0a0a726571756573742d333812076d6f64656c2d331a067465616d2d32'),
	('job-38', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-39', 'request', '\x0a0a726571756573742d333912076d6f64656c2d341a067465616d2d30'),
	('job-40', 'request', '\x0a0a726571756573742d343012076d6f64656c2d351a067465616d2d31'),
	('job-41', 'request', '\x0a0a726571756573742d343112076d6f64656c2d361a067465616d2d32'),
	('job-42', 'request', '\x0a0a726571756573742d343212076d6f64656c2d301a067465616d2d30'),
	('job-42', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-43', 'request', '\x0a0a726571756573742d343312076d6f64656c2d311a067465616d2d31'),
	('job-44', 'request', '\x0a0a726571756573742d343412076d6f64656c2d321a067465616d2d32'),
	('job-44', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-45', 'request', '\x0a0a726571756573742d343512076d6f64656c2d331a067465616d2d30'),
	('job-46', 'request', '\x0a0a726571756573742d343612076d6f64656c2d341a067465616d2d31'),
	('job-47', 'request', '\x0a0a726571756573742d343712076d6f64656c2d351a067465616d2d32'),
	('job-48', 'request', '\x0a0a726571756573742d343812076d6f64656c2d361a067465616d2d30'),
	('job-48', 'result', '\x12064641535445523a1b09000000000000e03f119a9999999999d93f19333333333333e33f'),
	('job-49', 'request', '\x0a0a726571756573742d343912076d6f64656c2d301a067465616d2d31');
INSERT INTO workers VALUES
	('worker-0', '2.13.0', 'cpu-0', '0.1.0', '["my.servers"]', 'isolated', '', 1790000000),
	('worker-1', '2.13.0', 'cpu-1', '0.1.0', '["my.servers"]', 'isolated', '{"rack": "3"}', 1790000001),
	('worker-2', '2.13.0', 'cpu-2', '0.1.0', '["my.servers"]', 'isolated', '{"rack": "3"}', 1790000002);
SELECT pg_catalog.setval('jobs_number_seq', 50, true);
ALTER TABLE ONLY calls_in_flight
    ADD CONSTRAINT calls_in_flight_pkey PRIMARY KEY (namespace, service);
ALTER TABLE ONLY events
    ADD CONSTRAINT events_pkey PRIMARY KEY (job_id, sequence);
ALTER TABLE ONLY fxlib_version
    ADD CONSTRAINT fxlib_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY holdings
    ADD CONSTRAINT holdings_pkey PRIMARY KEY (namespace, sha256);
ALTER TABLE ONLY jobs
    ADD CONSTRAINT jobs_id_key UNIQUE (id);
ALTER TABLE ONLY jobs
    ADD CONSTRAINT jobs_namespace_request_id_key UNIQUE (namespace, request_id);
ALTER TABLE ONLY jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (number);
ALTER TABLE ONLY labels
    ADD CONSTRAINT labels_pkey PRIMARY KEY (key, value, job_id);
ALTER TABLE ONLY live_reports
    ADD CONSTRAINT live_reports_pkey PRIMARY KEY (tenant);
ALTER TABLE ONLY payloads
    ADD CONSTRAINT payloads_pkey PRIMARY KEY (job_id, kind);
ALTER TABLE ONLY workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (id);
CREATE INDEX holdings_by_blob ON holdings USING btree (sha256);
CREATE INDEX jobs_by_answer ON jobs USING btree (cache_key, state, finished_at);
CREATE INDEX jobs_by_finish ON jobs USING btree (state, finished_at);
CREATE INDEX jobs_by_namespace ON jobs USING btree (namespace, number);
CREATE INDEX jobs_by_state ON jobs USING btree (state, torch_version, namespace, number);
CREATE INDEX jobs_by_turn ON jobs USING btree (namespace, started_at) WHERE (NOT cached);
ALTER TABLE ONLY events
    ADD CONSTRAINT events_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY labels
    ADD CONSTRAINT labels_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs(id) ON DELETE CASCADE;
ALTER TABLE ONLY payloads
    ADD CONSTRAINT payloads_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs(id) ON DELETE CASCADE;
