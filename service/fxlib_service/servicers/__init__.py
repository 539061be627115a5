"""The gRPC services of launchers, workers and blobs: each method checks its fields, converts, and calls.

What is decided lies in the modules that they call; how an error becomes a status, in `interceptor`.
"""
