"""What a job is, as plain data: workload, inputs, servers, contracts, trial options, profile, report.

Nothing here runs a module or speaks to anybody; the messages of the protocol are made of it in `fxlib.protocol`.
"""
