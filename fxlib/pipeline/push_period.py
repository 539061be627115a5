"""How many steps there are to a push, so that a read made ahead knows whether it has to wait for one."""

from __future__ import annotations


class PushPeriod:
    """The number of steps for each push, as last observed; a loop that accumulates gradients has several.

    Attributes:
        steps: number of steps for each push; None before the first push.
        pushes: number of pushes so far.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        self.pushes = 0
        self._over = 0
        """Number of steps that were over since the last push."""

    def step_over(self) -> None:
        """Note that a step is over."""
        self._over += 1

    def covered(self, *, in_loop: bool) -> int:
        """Return the number of steps that a push made now covers.

        Args:
            in_loop: whether a pipeline tells when steps are over: then the running one is not over yet.
        """
        return max(1, self._over + in_loop)

    def pushed(self, *, in_loop: bool) -> None:
        """Note that the gradients of all steps so far were pushed; `in_loop` as for `covered`."""
        self.pushes += 1
        self.steps = self.covered(in_loop=in_loop)
        self._over = -1 if in_loop else 0

    def pushes_before(self, forwards: int, *, pushed: bool) -> int:
        """Return how many pushes are expected before the forward that comes after so many others.

        A wrong guess costs a wasted read, since at each push the reads are made again that may not miss it.

        Args:
            forwards: number of forwards before that one.
            pushed: whether the push of this step was just made.
        """
        if pushed:
            return forwards // (self.steps or 1)
        if self.steps is None:
            return 0 if self._over > 0 else forwards
        return (self._over + forwards) // self.steps
