"""Imported last by the process that others are forked from: does once what each of them would do when it begins."""

import gc

from fxlib.protocol.recipe import catalogue_to_proto

catalogue_to_proto()  # a service describes all passes, by their sources
# Whatever collects garbage writes to all objects that it looks at, and so has a process copy them.
gc.collect()
gc.freeze()
