"""Named lists of passes, and the alternatives to them that a worker tries.

The passes themselves live in `fxlib.passes`.
"""

from fxlib.recipes.recipes import RECIPES, PlanningRequest, Recipe, Rewrite, apply, from_passes, get

__all__ = ["RECIPES", "PlanningRequest", "Recipe", "Rewrite", "apply", "from_passes", "get"]
