"""What is between this process and its servers besides the calls of a forward: gradients that came and are to go.

A call to a server must find it in the state in which the program as written would have found it. So before each call,
`settle` waits for the gradients that are on their way there, and tells whoever holds others back, or has sent them
ahead of the program, that a call comes before the push.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Sender(Protocol):
    """Whoever has gradients for a server that the program has not pushed yet."""

    thread: int | None
    """The program's thread that they belong to."""

    def called(self, server: str, thread: int) -> None:
        """A call to `server` is about to begin, in `thread`.

        Raises:
            FxlibError: the call would find gradients that, in the program as written, are pushed after it.
        """


class Traveller(Protocol):
    """Gradients on their way to a server."""

    def settle(self) -> None:
        """Block until they have arrived, or failed."""


class Underway:
    """Senders and travellers by server. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._senders: dict[str, weakref.WeakSet[Sender]] = {}  # weak: a module may be dropped in the middle of a step
        self._travellers: dict[str, list[Traveller]] = {}

    def open(self, server: str, sender: Sender) -> list[Sender]:
        """Note that gradients for a server have come and are not pushed yet; return others of whom that is true."""
        with self._lock:
            senders = self._senders.setdefault(server, weakref.WeakSet())
            others = [each for each in senders if each is not sender]
            senders.add(sender)
        return others

    def close(self, server: str, sender: Sender) -> None:
        """Note that the program has pushed them."""
        with self._lock:
            senders = self._senders.get(server, weakref.WeakSet())
            senders.discard(sender)
            if not senders:
                self._senders.pop(server, None)

    def depart(self, server: str, traveller: Traveller) -> None:
        """Note that gradients are on their way to a server."""
        with self._lock:
            self._travellers.setdefault(server, []).append(traveller)

    def arrive(self, server: str, traveller: Traveller) -> None:
        """Note that they have arrived."""
        with self._lock:
            left = [each for each in self._travellers.get(server, ()) if each is not traveller]
            if left:
                self._travellers[server] = left
            else:
                self._travellers.pop(server, None)

    def settle(self, server: str) -> None:
        """To be called before each call to `server`.

        Raises:
            FxlibError: see `Sender.called`.
        """
        if not self._senders and not self._travellers:
            return
        with self._lock:
            senders, travellers = list(self._senders.get(server, ())), list(self._travellers.get(server, ()))
        for sender in senders:
            sender.called(server, threading.get_ident())
        for traveller in travellers:
            traveller.settle()


UNDERWAY = Underway()
"""Of this process: a server does not ask which module's gradients or calls reach it."""
