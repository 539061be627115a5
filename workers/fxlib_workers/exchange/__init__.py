"""What the processes of a worker hand each other about one job, and in which form.

How these processes are started and ended is in `process`, what they do in `rewrite` and `trial`.
"""
