"""Named lists of passes, and the variants of them that a worker tries.

The passes themselves live in `fxlib.passes`.
"""

from fxlib.recipes.recipes import RECIPES, Recipe, Rewrite, apply, from_passes, get

__all__ = ["RECIPES", "Recipe", "Rewrite", "apply", "from_passes", "get"]
