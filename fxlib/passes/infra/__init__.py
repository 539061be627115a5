"""What every pass is built on: the base class, the invariants it holds a pass to, and edits that several passes make.

No pass lives here.
"""
