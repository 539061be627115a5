BEGIN TRANSACTION;
CREATE TABLE calls_in_flight (
	namespace VARCHAR(64) NOT NULL, 
	service VARCHAR(64) NOT NULL, 
	calls INTEGER NOT NULL, 
	told_at DOUBLE NOT NULL, 
	PRIMARY KEY (namespace, service)
);
CREATE TABLE events (
	job_id VARCHAR(64) NOT NULL, 
	sequence BIGINT NOT NULL, 
	at DOUBLE NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	phase VARCHAR(64) NOT NULL, 
	message TEXT NOT NULL, 
	progress DOUBLE NOT NULL, 
	PRIMARY KEY (job_id, sequence), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "events" VALUES('job-00',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-00',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-00',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-01',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-02',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-02',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-02',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-03',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-03',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-03',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-04',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-04',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-05',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-05',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-06',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-06',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-06',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-07',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-08',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-08',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-08',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-09',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-09',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-09',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-10',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-10',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-11',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-11',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-12',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-12',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-12',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-13',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-14',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-14',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-14',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-15',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-15',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-15',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-16',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-16',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-17',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-17',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-18',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-18',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-18',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-19',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-20',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-20',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-20',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-21',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-21',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-21',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-22',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-22',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-23',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-23',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-24',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-24',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-24',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-25',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-26',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-26',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-26',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-27',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-27',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-27',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-28',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-28',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-29',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-29',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-30',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-30',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-30',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-31',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-32',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-32',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-32',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-33',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-33',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-33',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-34',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-34',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-35',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-35',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-36',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-36',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-36',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-37',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-38',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-38',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-38',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-39',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-39',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-39',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-40',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-40',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-41',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-41',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-42',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-42',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-42',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-43',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-44',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-44',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-44',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-45',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-45',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-45',3,1790000300.0,'failed','failed','it is failed
now',-1.0);
INSERT INTO "events" VALUES('job-46',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-46',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-47',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-47',2,1790000200.0,'cancelled','cancelled','it is cancelled
now',-1.0);
INSERT INTO "events" VALUES('job-48',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
INSERT INTO "events" VALUES('job-48',2,1790000200.0,'running','running','it is running
now',-1.0);
INSERT INTO "events" VALUES('job-48',3,1790000300.0,'succeeded','succeeded','it is succeeded
now',-1.0);
INSERT INTO "events" VALUES('job-49',1,1790000100.0,'queued','queued','it is queued
now',-1.0);
CREATE TABLE fxlib_about (
	schema_version INTEGER DEFAULT '5' NOT NULL, 
	swept_at DOUBLE DEFAULT '0' NOT NULL
);
INSERT INTO "fxlib_about" VALUES(5,0.0);
CREATE TABLE fxlib_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT fxlib_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "fxlib_version" VALUES('0007');
CREATE TABLE holdings (
	namespace VARCHAR(64) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	size BIGINT NOT NULL, 
	PRIMARY KEY (namespace, sha256)
);
INSERT INTO "holdings" VALUES('team-0','0000000000000000000000000000000000000000000000000000000000000000',1000);
INSERT INTO "holdings" VALUES('team-1','0000000000000000000000000000000000000000000000000000000000000001',1001);
INSERT INTO "holdings" VALUES('team-2','0000000000000000000000000000000000000000000000000000000000000002',1002);
INSERT INTO "holdings" VALUES('team-0','0000000000000000000000000000000000000000000000000000000000000003',1003);
INSERT INTO "holdings" VALUES('team-1','0000000000000000000000000000000000000000000000000000000000000004',1004);
INSERT INTO "holdings" VALUES('team-2','0000000000000000000000000000000000000000000000000000000000000005',1005);
INSERT INTO "holdings" VALUES('team-0','0000000000000000000000000000000000000000000000000000000000000006',1006);
INSERT INTO "holdings" VALUES('team-1','0000000000000000000000000000000000000000000000000000000000000007',1007);
INSERT INTO "holdings" VALUES('team-2','0000000000000000000000000000000000000000000000000000000000000008',1008);
INSERT INTO "holdings" VALUES('team-0','0000000000000000000000000000000000000000000000000000000000000009',1009);
INSERT INTO "holdings" VALUES('team-1','000000000000000000000000000000000000000000000000000000000000000a',1010);
INSERT INTO "holdings" VALUES('team-2','000000000000000000000000000000000000000000000000000000000000000b',1011);
INSERT INTO "holdings" VALUES('team-0','000000000000000000000000000000000000000000000000000000000000000c',1012);
INSERT INTO "holdings" VALUES('team-1','000000000000000000000000000000000000000000000000000000000000000d',1013);
INSERT INTO "holdings" VALUES('team-2','000000000000000000000000000000000000000000000000000000000000000e',1014);
INSERT INTO "holdings" VALUES('team-0','000000000000000000000000000000000000000000000000000000000000000f',1015);
INSERT INTO "holdings" VALUES('team-1','0000000000000000000000000000000000000000000000000000000000000010',1016);
INSERT INTO "holdings" VALUES('team-2','0000000000000000000000000000000000000000000000000000000000000011',1017);
INSERT INTO "holdings" VALUES('team-0','0000000000000000000000000000000000000000000000000000000000000012',1018);
INSERT INTO "holdings" VALUES('team-1','0000000000000000000000000000000000000000000000000000000000000013',1019);
CREATE TABLE jobs (
	number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	id VARCHAR(64) NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	request_digest VARCHAR(64) NOT NULL, 
	namespace VARCHAR(64) NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	labels JSON NOT NULL, 
	torch_version VARCHAR(64) NOT NULL, 
	cache_key VARCHAR(64) NOT NULL, 
	fresh BOOLEAN NOT NULL, 
	created_at DOUBLE NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	phase VARCHAR(64) NOT NULL, 
	attempts INTEGER NOT NULL, 
	worker_id VARCHAR(256) NOT NULL, 
	token VARCHAR(64) NOT NULL, 
	hardware TEXT NOT NULL, 
	started_at DOUBLE, 
	finished_at DOUBLE, 
	failure_code VARCHAR(64), 
	failure_message TEXT, 
	cached BOOLEAN NOT NULL, 
	reusable BOOLEAN NOT NULL, 
	last_sequence BIGINT NOT NULL, 
	asked_by VARCHAR(64) DEFAULT '' NOT NULL, 
	asked_from VARCHAR(256) DEFAULT '' NOT NULL, 
	measured_by VARCHAR(64) DEFAULT '' NOT NULL, 
	labels_asked TEXT DEFAULT '' NOT NULL, 
	leased_until DOUBLE DEFAULT '0' NOT NULL, 
	UNIQUE (namespace, request_id), 
	UNIQUE (id)
);
INSERT INTO "jobs" VALUES(1,'job-00','request-0','0000000000000000000000000000000000000000000000000000000000000000','team-0','model-0','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000000',0,1790000000.0,'succeeded','done',1,'worker-1','token-0','cpu-1',1790000100.0,1790000200.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(2,'job-01','request-1','0000000000000000000000000000000000000000000000000000000000000001','team-1','model-1','{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000001',1,1790000001.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(3,'job-02','request-2','0000000000000000000000000000000000000000000000000000000000000002','team-2','model-2','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000002',0,1790000002.0,'succeeded','done',1,'worker-1','token-2','cpu-1',1790000102.0,1790000202.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(4,'job-03','request-3','0000000000000000000000000000000000000000000000000000000000000003','team-0','model-3','{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000003',0,1790000003.0,'failed','done',1,'worker-1','token-3','cpu-1',1790000103.0,1790000203.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(5,'job-04','request-4','0000000000000000000000000000000000000000000000000000000000000004','team-1','model-4','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000004',0,1790000004.0,'running','running',1,'worker-1','token-4','cpu-1',1790000104.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(6,'job-05','request-5','0000000000000000000000000000000000000000000000000000000000000005','team-2','model-5','{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000005',1,1790000005.0,'cancelled','done',0,'','','',NULL,1790000205.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(7,'job-06','request-6','0000000000000000000000000000000000000000000000000000000000000006','team-0','model-6','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000006',0,1790000006.0,'succeeded','done',1,'worker-1','token-6','cpu-1',1790000106.0,1790000206.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(8,'job-07','request-7','0000000000000000000000000000000000000000000000000000000000000007','team-1','model-0','{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000007',0,1790000007.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(9,'job-08','request-8','0000000000000000000000000000000000000000000000000000000000000008','team-2','model-1','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000008',0,1790000008.0,'succeeded','done',1,'worker-1','token-8','cpu-1',1790000108.0,1790000208.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(10,'job-09','request-9','0000000000000000000000000000000000000000000000000000000000000009','team-0','model-2','{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000009',1,1790000009.0,'failed','done',1,'worker-1','token-9','cpu-1',1790000109.0,1790000209.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(11,'job-10','request-10','000000000000000000000000000000000000000000000000000000000000000a','team-1','model-3','{}','2.13.0','000000000000000000000000000000000000000000000000000000000000000a',0,1790000010.0,'running','running',1,'worker-1','token-10','cpu-1',1790000110.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(12,'job-11','request-11','000000000000000000000000000000000000000000000000000000000000000b','team-2','model-4','{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000000',0,1790000011.0,'cancelled','done',0,'','','',NULL,1790000211.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(13,'job-12','request-12','000000000000000000000000000000000000000000000000000000000000000c','team-0','model-5','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000001',0,1790000012.0,'succeeded','done',1,'worker-1','token-12','cpu-1',1790000112.0,1790000212.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(14,'job-13','request-13','000000000000000000000000000000000000000000000000000000000000000d','team-1','model-6','{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000002',1,1790000013.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(15,'job-14','request-14','000000000000000000000000000000000000000000000000000000000000000e','team-2','model-0','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000003',0,1790000014.0,'succeeded','done',1,'worker-1','token-14','cpu-1',1790000114.0,1790000214.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(16,'job-15','request-15','000000000000000000000000000000000000000000000000000000000000000f','team-0','model-1','{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000004',0,1790000015.0,'failed','done',1,'worker-1','token-15','cpu-1',1790000115.0,1790000215.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(17,'job-16','request-16','0000000000000000000000000000000000000000000000000000000000000010','team-1','model-2','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000005',0,1790000016.0,'running','running',1,'worker-1','token-16','cpu-1',1790000116.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(18,'job-17','request-17','0000000000000000000000000000000000000000000000000000000000000011','team-2','model-3','{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000006',1,1790000017.0,'cancelled','done',0,'','','',NULL,1790000217.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(19,'job-18','request-18','0000000000000000000000000000000000000000000000000000000000000012','team-0','model-4','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000007',0,1790000018.0,'succeeded','done',1,'worker-1','token-18','cpu-1',1790000118.0,1790000218.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(20,'job-19','request-19','0000000000000000000000000000000000000000000000000000000000000013','team-1','model-5','{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000008',0,1790000019.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(21,'job-20','request-20','0000000000000000000000000000000000000000000000000000000000000014','team-2','model-6','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000009',0,1790000020.0,'succeeded','done',1,'worker-1','token-20','cpu-1',1790000120.0,1790000220.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(22,'job-21','request-21','0000000000000000000000000000000000000000000000000000000000000015','team-0','model-0','{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','000000000000000000000000000000000000000000000000000000000000000a',1,1790000021.0,'failed','done',1,'worker-1','token-21','cpu-1',1790000121.0,1790000221.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(23,'job-22','request-22','0000000000000000000000000000000000000000000000000000000000000016','team-1','model-1','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000000',0,1790000022.0,'running','running',1,'worker-1','token-22','cpu-1',1790000122.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(24,'job-23','request-23','0000000000000000000000000000000000000000000000000000000000000017','team-2','model-2','{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000001',0,1790000023.0,'cancelled','done',0,'','','',NULL,1790000223.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(25,'job-24','request-24','0000000000000000000000000000000000000000000000000000000000000018','team-0','model-3','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000002',0,1790000024.0,'succeeded','done',1,'worker-1','token-24','cpu-1',1790000124.0,1790000224.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(26,'job-25','request-25','0000000000000000000000000000000000000000000000000000000000000019','team-1','model-4','{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000003',1,1790000025.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(27,'job-26','request-26','000000000000000000000000000000000000000000000000000000000000001a','team-2','model-5','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000004',0,1790000026.0,'succeeded','done',1,'worker-1','token-26','cpu-1',1790000126.0,1790000226.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(28,'job-27','request-27','000000000000000000000000000000000000000000000000000000000000001b','team-0','model-6','{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000005',0,1790000027.0,'failed','done',1,'worker-1','token-27','cpu-1',1790000127.0,1790000227.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(29,'job-28','request-28','000000000000000000000000000000000000000000000000000000000000001c','team-1','model-0','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000006',0,1790000028.0,'running','running',1,'worker-1','token-28','cpu-1',1790000128.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(30,'job-29','request-29','000000000000000000000000000000000000000000000000000000000000001d','team-2','model-1','{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000007',1,1790000029.0,'cancelled','done',0,'','','',NULL,1790000229.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(31,'job-30','request-30','000000000000000000000000000000000000000000000000000000000000001e','team-0','model-2','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000008',0,1790000030.0,'succeeded','done',1,'worker-1','token-30','cpu-1',1790000130.0,1790000230.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(32,'job-31','request-31','000000000000000000000000000000000000000000000000000000000000001f','team-1','model-3','{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000009',0,1790000031.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(33,'job-32','request-32','0000000000000000000000000000000000000000000000000000000000000020','team-2','model-4','{}','2.13.0','000000000000000000000000000000000000000000000000000000000000000a',0,1790000032.0,'succeeded','done',1,'worker-1','token-32','cpu-1',1790000132.0,1790000232.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(34,'job-33','request-33','0000000000000000000000000000000000000000000000000000000000000021','team-0','model-5','{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000000',1,1790000033.0,'failed','done',1,'worker-1','token-33','cpu-1',1790000133.0,1790000233.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(35,'job-34','request-34','0000000000000000000000000000000000000000000000000000000000000022','team-1','model-6','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000001',0,1790000034.0,'running','running',1,'worker-1','token-34','cpu-1',1790000134.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(36,'job-35','request-35','0000000000000000000000000000000000000000000000000000000000000023','team-2','model-0','{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000002',0,1790000035.0,'cancelled','done',0,'','','',NULL,1790000235.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(37,'job-36','request-36','0000000000000000000000000000000000000000000000000000000000000024','team-0','model-1','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000003',0,1790000036.0,'succeeded','done',1,'worker-1','token-36','cpu-1',1790000136.0,1790000236.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(38,'job-37','request-37','0000000000000000000000000000000000000000000000000000000000000025','team-1','model-2','{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000004',1,1790000037.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(39,'job-38','request-38','0000000000000000000000000000000000000000000000000000000000000026','team-2','model-3','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000005',0,1790000038.0,'succeeded','done',1,'worker-1','token-38','cpu-1',1790000138.0,1790000238.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(40,'job-39','request-39','0000000000000000000000000000000000000000000000000000000000000027','team-0','model-4','{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000006',0,1790000039.0,'failed','done',1,'worker-1','token-39','cpu-1',1790000139.0,1790000239.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(41,'job-40','request-40','0000000000000000000000000000000000000000000000000000000000000028','team-1','model-5','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000007',0,1790000040.0,'running','running',1,'worker-1','token-40','cpu-1',1790000140.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(42,'job-41','request-41','0000000000000000000000000000000000000000000000000000000000000029','team-2','model-6','{"commit": "c1", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000008',1,1790000041.0,'cancelled','done',0,'','','',NULL,1790000241.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(43,'job-42','request-42','000000000000000000000000000000000000000000000000000000000000002a','team-0','model-0','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000009',0,1790000042.0,'succeeded','done',1,'worker-1','token-42','cpu-1',1790000142.0,1790000242.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(44,'job-43','request-43','000000000000000000000000000000000000000000000000000000000000002b','team-1','model-1','{"commit": "c3", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','000000000000000000000000000000000000000000000000000000000000000a',0,1790000043.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(45,'job-44','request-44','000000000000000000000000000000000000000000000000000000000000002c','team-2','model-2','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000000',0,1790000044.0,'succeeded','done',1,'worker-1','token-44','cpu-1',1790000144.0,1790000244.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(46,'job-45','request-45','000000000000000000000000000000000000000000000000000000000000002d','team-0','model-3','{"commit": "c0", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000001',1,1790000045.0,'failed','done',1,'worker-1','token-45','cpu-1',1790000145.0,1790000245.0,'WORKER_LOST','its workers disappeared',0,0,3,'launcher','ipv4:127.0.0.1:1','worker','{"rack": "3"}',0.0);
INSERT INTO "jobs" VALUES(47,'job-46','request-46','000000000000000000000000000000000000000000000000000000000000002e','team-1','model-4','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000002',0,1790000046.0,'running','running',1,'worker-1','token-46','cpu-1',1790000146.0,NULL,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(48,'job-47','request-47','000000000000000000000000000000000000000000000000000000000000002f','team-2','model-5','{"commit": "c2", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000003',0,1790000047.0,'cancelled','done',0,'','','',NULL,1790000247.0,NULL,NULL,0,0,2,'launcher','ipv4:127.0.0.1:1','','',0.0);
INSERT INTO "jobs" VALUES(49,'job-48','request-48','0000000000000000000000000000000000000000000000000000000000000030','team-0','model-6','{}','2.13.0','0000000000000000000000000000000000000000000000000000000000000004',0,1790000048.0,'succeeded','done',1,'worker-1','token-48','cpu-1',1790000148.0,1790000248.0,NULL,NULL,0,1,3,'launcher','ipv4:127.0.0.1:1','worker','',0.0);
INSERT INTO "jobs" VALUES(50,'job-49','request-49','0000000000000000000000000000000000000000000000000000000000000031','team-1','model-0','{"commit": "c4", "stra\u00dfe": "\u2603 ''quoted''; --"}','2.13.0','0000000000000000000000000000000000000000000000000000000000000005',1,1790000049.0,'queued','queued',0,'','','',NULL,NULL,NULL,NULL,0,0,1,'launcher','ipv4:127.0.0.1:1','','',0.0);
CREATE TABLE labels (
	"key" VARCHAR(256) NOT NULL, 
	value VARCHAR(256) NOT NULL, 
	job_id VARCHAR(64) NOT NULL, 
	PRIMARY KEY ("key", value, job_id), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "labels" VALUES('commit','c1','job-01');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-01');
INSERT INTO "labels" VALUES('commit','c3','job-03');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-03');
INSERT INTO "labels" VALUES('commit','c0','job-05');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-05');
INSERT INTO "labels" VALUES('commit','c2','job-07');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-07');
INSERT INTO "labels" VALUES('commit','c4','job-09');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-09');
INSERT INTO "labels" VALUES('commit','c1','job-11');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-11');
INSERT INTO "labels" VALUES('commit','c3','job-13');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-13');
INSERT INTO "labels" VALUES('commit','c0','job-15');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-15');
INSERT INTO "labels" VALUES('commit','c2','job-17');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-17');
INSERT INTO "labels" VALUES('commit','c4','job-19');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-19');
INSERT INTO "labels" VALUES('commit','c1','job-21');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-21');
INSERT INTO "labels" VALUES('commit','c3','job-23');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-23');
INSERT INTO "labels" VALUES('commit','c0','job-25');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-25');
INSERT INTO "labels" VALUES('commit','c2','job-27');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-27');
INSERT INTO "labels" VALUES('commit','c4','job-29');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-29');
INSERT INTO "labels" VALUES('commit','c1','job-31');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-31');
INSERT INTO "labels" VALUES('commit','c3','job-33');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-33');
INSERT INTO "labels" VALUES('commit','c0','job-35');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-35');
INSERT INTO "labels" VALUES('commit','c2','job-37');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-37');
INSERT INTO "labels" VALUES('commit','c4','job-39');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-39');
INSERT INTO "labels" VALUES('commit','c1','job-41');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-41');
INSERT INTO "labels" VALUES('commit','c3','job-43');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-43');
INSERT INTO "labels" VALUES('commit','c0','job-45');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-45');
INSERT INTO "labels" VALUES('commit','c2','job-47');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-47');
INSERT INTO "labels" VALUES('commit','c4','job-49');
INSERT INTO "labels" VALUES('straße','☃ ''quoted''; --','job-49');
CREATE TABLE live_reports (
	tenant VARCHAR(256) NOT NULL, 
	due_at DOUBLE NOT NULL, 
	PRIMARY KEY (tenant)
);
CREATE TABLE payloads (
	job_id VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	body BLOB NOT NULL, 
	PRIMARY KEY (job_id, kind), 
	FOREIGN KEY(job_id) REFERENCES jobs (id) ON DELETE CASCADE
);
INSERT INTO "payloads" VALUES('job-00','request',X'0A09726571756573742D3012076D6F64656C2D301A067465616D2D30');
INSERT INTO "payloads" VALUES('job-00','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-01','request',X'0A09726571756573742D3112076D6F64656C2D311A067465616D2D31');
INSERT INTO "payloads" VALUES('job-02','request',X'0A09726571756573742D3212076D6F64656C2D321A067465616D2D32');
INSERT INTO "payloads" VALUES('job-02','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-03','request',X'0A09726571756573742D3312076D6F64656C2D331A067465616D2D30');
INSERT INTO "payloads" VALUES('job-04','request',X'0A09726571756573742D3412076D6F64656C2D341A067465616D2D31');
INSERT INTO "payloads" VALUES('job-05','request',X'0A09726571756573742D3512076D6F64656C2D351A067465616D2D32');
INSERT INTO "payloads" VALUES('job-06','request',X'0A09726571756573742D3612076D6F64656C2D361A067465616D2D30');
INSERT INTO "payloads" VALUES('job-06','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-07','request',X'0A09726571756573742D3712076D6F64656C2D301A067465616D2D31');
INSERT INTO "payloads" VALUES('job-08','request',X'0A09726571756573742D3812076D6F64656C2D311A067465616D2D32');
INSERT INTO "payloads" VALUES('job-08','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-09','request',X'0A09726571756573742D3912076D6F64656C2D321A067465616D2D30');
INSERT INTO "payloads" VALUES('job-10','request',X'0A0A726571756573742D313012076D6F64656C2D331A067465616D2D31');
INSERT INTO "payloads" VALUES('job-11','request',X'0A0A726571756573742D313112076D6F64656C2D341A067465616D2D32');
INSERT INTO "payloads" VALUES('job-12','request',X'0A0A726571756573742D313212076D6F64656C2D351A067465616D2D30');
INSERT INTO "payloads" VALUES('job-12','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-13','request',X'0A0A726571756573742D313312076D6F64656C2D361A067465616D2D31');
INSERT INTO "payloads" VALUES('job-14','request',X'0A0A726571756573742D313412076D6F64656C2D301A067465616D2D32');
INSERT INTO "payloads" VALUES('job-14','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-15','request',X'0A0A726571756573742D313512076D6F64656C2D311A067465616D2D30');
INSERT INTO "payloads" VALUES('job-16','request',X'0A0A726571756573742D313612076D6F64656C2D321A067465616D2D31');
INSERT INTO "payloads" VALUES('job-17','request',X'0A0A726571756573742D313712076D6F64656C2D331A067465616D2D32');
INSERT INTO "payloads" VALUES('job-18','request',X'0A0A726571756573742D313812076D6F64656C2D341A067465616D2D30');
INSERT INTO "payloads" VALUES('job-18','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-19','request',X'0A0A726571756573742D313912076D6F64656C2D351A067465616D2D31');
INSERT INTO "payloads" VALUES('job-20','request',X'0A0A726571756573742D323012076D6F64656C2D361A067465616D2D32');
INSERT INTO "payloads" VALUES('job-20','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-21','request',X'0A0A726571756573742D323112076D6F64656C2D301A067465616D2D30');
INSERT INTO "payloads" VALUES('job-22','request',X'0A0A726571756573742D323212076D6F64656C2D311A067465616D2D31');
INSERT INTO "payloads" VALUES('job-23','request',X'0A0A726571756573742D323312076D6F64656C2D321A067465616D2D32');
INSERT INTO "payloads" VALUES('job-24','request',X'0A0A726571756573742D323412076D6F64656C2D331A067465616D2D30');
INSERT INTO "payloads" VALUES('job-24','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-25','request',X'0A0A726571756573742D323512076D6F64656C2D341A067465616D2D31');
INSERT INTO "payloads" VALUES('job-26','request',X'0A0A726571756573742D323612076D6F64656C2D351A067465616D2D32');
INSERT INTO "payloads" VALUES('job-26','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-27','request',X'0A0A726571756573742D323712076D6F64656C2D361A067465616D2D30');
INSERT INTO "payloads" VALUES('job-28','request',X'0A0A726571756573742D323812076D6F64656C2D301A067465616D2D31');
INSERT INTO "payloads" VALUES('job-29','request',X'0A0A726571756573742D323912076D6F64656C2D311A067465616D2D32');
INSERT INTO "payloads" VALUES('job-30','request',X'0A0A726571756573742D333012076D6F64656C2D321A067465616D2D30');
INSERT INTO "payloads" VALUES('job-30','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-31','request',X'0A0A726571756573742D333112076D6F64656C2D331A067465616D2D31');
INSERT INTO "payloads" VALUES('job-32','request',X'0A0A726571756573742D333212076D6F64656C2D341A067465616D2D32');
INSERT INTO "payloads" VALUES('job-32','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-33','request',X'0A0A726571756573742D333312076D6F64656C2D351A067465616D2D30');
INSERT INTO "payloads" VALUES('job-34','request',X'0A0A726571756573742D333412076D6F64656C2D361A067465616D2D31');
INSERT INTO "payloads" VALUES('job-35','request',X'0A0A726571756573742D333512076D6F64656C2D301A067465616D2D32');
INSERT INTO "payloads" VALUES('job-36','request',X'0A0A726571756573742D333612076D6F64656C2D311A067465616D2D30');
INSERT INTO "payloads" VALUES('job-36','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-37','request',X'0A0A726571756573742D333712076D6F64656C2D321A067465616D2D31');
INSERT INTO "payloads" VALUES('job-38','request',X'0A0A726571756573742D333812076D6F64656C2D331A067465616D2D32');
INSERT INTO "payloads" VALUES('job-38','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-39','request',X'0A0A726571756573742D333912076D6F64656C2D341A067465616D2D30');
INSERT INTO "payloads" VALUES('job-40','request',X'0A0A726571756573742D343012076D6F64656C2D351A067465616D2D31');
INSERT INTO "payloads" VALUES('job-41','request',X'0A0A726571756573742D343112076D6F64656C2D361A067465616D2D32');
INSERT INTO "payloads" VALUES('job-42','request',X'0A0A726571756573742D343212076D6F64656C2D301A067465616D2D30');
INSERT INTO "payloads" VALUES('job-42','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-43','request',X'0A0A726571756573742D343312076D6F64656C2D311A067465616D2D31');
INSERT INTO "payloads" VALUES('job-44','request',X'0A0A726571756573742D343412076D6F64656C2D321A067465616D2D32');
INSERT INTO "payloads" VALUES('job-44','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-45','request',X'0A0A726571756573742D343512076D6F64656C2D331A067465616D2D30');
INSERT INTO "payloads" VALUES('job-46','request',X'0A0A726571756573742D343612076D6F64656C2D341A067465616D2D31');
INSERT INTO "payloads" VALUES('job-47','request',X'0A0A726571756573742D343712076D6F64656C2D351A067465616D2D32');
INSERT INTO "payloads" VALUES('job-48','request',X'0A0A726571756573742D343812076D6F64656C2D361A067465616D2D30');
INSERT INTO "payloads" VALUES('job-48','result',X'12064641535445523A1B09000000000000E03F119A9999999999D93F19333333333333E33F');
INSERT INTO "payloads" VALUES('job-49','request',X'0A0A726571756573742D343912076D6F64656C2D301A067465616D2D31');
CREATE TABLE workers (
	id VARCHAR(256) NOT NULL, 
	torch_version VARCHAR(64) NOT NULL, 
	hardware TEXT NOT NULL, 
	fxlib_version VARCHAR(64) NOT NULL, 
	allowed_modules JSON NOT NULL, 
	containment VARCHAR(64) DEFAULT '' NOT NULL, 
	labels TEXT DEFAULT '' NOT NULL, 
	seen_at DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "workers" VALUES('worker-0','2.13.0','cpu-0','0.1.0','["my.servers"]','isolated','',1790000000.0);
INSERT INTO "workers" VALUES('worker-1','2.13.0','cpu-1','0.1.0','["my.servers"]','isolated','{"rack": "3"}',1790000001.0);
INSERT INTO "workers" VALUES('worker-2','2.13.0','cpu-2','0.1.0','["my.servers"]','isolated','{"rack": "3"}',1790000002.0);
CREATE INDEX jobs_by_state ON jobs (state, torch_version, namespace, number);
CREATE INDEX jobs_by_finish ON jobs (state, finished_at);
CREATE INDEX jobs_by_turn ON jobs (namespace, started_at) WHERE cached = 0;
CREATE INDEX jobs_by_namespace ON jobs (namespace, number);
CREATE INDEX jobs_by_answer ON jobs (cache_key, state, finished_at);
CREATE INDEX holdings_by_blob ON holdings (sha256);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',50);
COMMIT;
