"""The gRPC services for launchers, workers and blobs. Each method checks its fields, converts them, and makes one call.

The called modules make the decisions, and `interceptor` turns errors into statuses.
"""
