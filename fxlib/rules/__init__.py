"""Rewrite rules: what to look for in a program, and what to put in its place.

The pass that applies them is `fxlib.passes.local.rewrite_rules`.
"""

from fxlib.rules.rule import GUARDS, Guard, Match, Rule, register_guard

__all__ = ["GUARDS", "Guard", "Match", "Rule", "register_guard"]
