"""The dashboard: a process of its own that shows a service's workers, queue, jobs and models in a browser, and as JSON.

It asks the service as any client does (`fxlib.client`), holds no state of its own, and never touches the store. It
needs the extra `fxlib[dashboard]`.
"""
