"""What has nothing to do with remote calls: nests of containers, plain tensors, comparisons, the hardware at hand.

Nothing here imports the rest of fxlib but its errors.
"""
