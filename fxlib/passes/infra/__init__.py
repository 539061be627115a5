"""The foundation of all passes: the base class, the invariants it enforces, and edits that several passes make.

No pass lives here.
"""
