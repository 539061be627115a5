"""A training job with parameter servers of its own: plain functions and a plain class of `torch.distributed.rpc`.

`python -m examples.own_servers.train` runs it on one machine, with a service and a worker beside it.
"""
