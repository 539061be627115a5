"""The dashboard: a separate process that shows a service's workers, queue, jobs and models in a browser, and as JSON.

It queries the service like any client (`fxlib.client`), holds no state of its own, and never touches the store. It
needs the extra `fxlib[dashboard]`.
"""
