"""A module whose import starts a thread, which no process may have that forks others."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()


def main(*_: object) -> None:
    """Do nothing."""
