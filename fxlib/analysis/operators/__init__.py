"""What one operator or leaf module does, out of torch's schemas and written tables, and how its call is written.

Nothing here knows a whole graph.
"""
