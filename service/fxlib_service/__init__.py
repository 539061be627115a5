"""The optimization service: it takes jobs over gRPC, stores them, leases them to workers, and returns the answers.

It rewrites and measures nothing. Workers do that, and the service knows them only through the protocol.
"""
