"""Where jobs are kept: the interface of a job store, and the one in a SQL database.

How a job may change is decided in `lifecycle`; a store keeps what it is told, all of it or nothing.
"""
