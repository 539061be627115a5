"""Rewrite rules: what to look for in a program, and what to put in its place."""

from fxlib.rules.guards import GUARDS, Guard, Match, register_guard
from fxlib.rules.rule import Rule

__all__ = ["GUARDS", "Guard", "Match", "Rule", "register_guard"]
