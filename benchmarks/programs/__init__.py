"""Public parameter-server programs, unmodified, through the whole loop: `python -m benchmarks.programs --sources DIR`.

No source of theirs is here. What is here says where a program's file is found, with what arguments its model is made,
and how an expert would write its forward.
"""
