"""The process in which one graph is rewritten: fresh, limited, and without a way out but its answer."""
