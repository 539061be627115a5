"""What the processes of a worker hand each other about one job: its folder, its candidates, and its progress.

How these processes are started and ended is in `process`, what they do in `rewrite` and `trial`.
"""
