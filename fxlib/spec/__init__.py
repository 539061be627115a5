"""The data of a job: workload, inputs, servers, contracts, trial options, profile, report.

Nothing here runs a module or communicates; `fxlib.protocol` turns this data into the protocol's messages.
"""
