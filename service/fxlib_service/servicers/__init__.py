"""The gRPC services for launchers, workers and blobs. Each method checks its fields, converts them, and makes one call.

Decisions are made in the modules that they call, and `interceptor` turns errors into statuses.
"""
