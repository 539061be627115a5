"""The pass that folds batch norms into the layer beside them, its matching and its legality.

Linear layers themselves are recognized in `fxlib.analysis.layers.linear_layers`.
"""
