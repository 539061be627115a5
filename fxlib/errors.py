"""Every error that fxlib raises on purpose: what is wrong, where, and what to do about it."""

from __future__ import annotations


class FxlibError(Exception):
    """Base of the tree. `where` names the location: a node, a field, or file:line of the user's model."""

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        """Compose the sentence that a person reads: location, problem, remedy."""
        text = f"{where}: {message}" if where else message
        super().__init__(f"{text.rstrip('.')}. {hint}" if hint else text)
        self.where = where
        self.hint = hint


def of_system(error: OSError) -> FxlibError:
    """Return the message of a failed system call as a sentence: which file, and what is wrong with it."""
    where = " and ".join(str(each) for each in (error.filename, error.filename2) if each is not None)
    return FxlibError(error.strerror or str(error) or type(error).__name__, where=where)


class OptionError(FxlibError):
    """An option of the service or of a worker is wrong; the message names the flag, the variable or the file's key."""

    def __init__(self, message: str, *, option: str, where: str = "", hint: str = "") -> None:
        """Keep the option's name; `where` is its flag, unless the value came from elsewhere."""
        super().__init__(message, where=where or f"--{option}", hint=hint)
        self.option, self._message = option, message

    def given_by(self, where: str) -> OptionError:
        """Return the same error about a value that comes from `where`."""
        return OptionError(self._message, option=self.option, where=where, hint=self.hint)


class CaptureError(FxlibError):
    """The model holds something that cannot be recorded faithfully; the message names the user's file and line."""


class ContractError(FxlibError):
    """A remote function's contract contradicts itself or names something that does not exist."""


class WireError(FxlibError):
    """A graph, or a part of it, cannot be encoded, or received bytes are not a valid graph; it names node and field."""


class LimitError(WireError):
    """Received data exceeds a limit (nodes, nesting, bytes, shapes)."""


class OpaqueError(FxlibError):
    """Something was called that only the capturing process has; the message names the class or function."""


class PassError(FxlibError):
    """A pass broke its own declaration, or does not apply to this module."""


class WorkloadError(FxlibError):
    """A workload does not describe a step that can run; the message names the field."""


class RemoteError(FxlibError):
    """Something between the launcher and the service went wrong."""


class ServiceUnavailableError(RemoteError):
    """The service cannot be reached, or did not answer within the deadline."""


class CredentialError(RemoteError):
    """The token for the service cannot be read, or may not be sent over this connection."""


class RejectedError(RemoteError):
    """The service refused the request; the message says which field and why. `code` is from its error catalogue."""

    def __init__(self, message: str, *, code: str = "", where: str = "", hint: str = "") -> None:
        """Keep the code for programs."""
        super().__init__(message, where=where, hint=hint)
        self.code = code


class JobFailedError(RemoteError):
    """The job ended without an answer; the message carries the service's reason."""


class FxlibWarning(UserWarning):
    """Something kept the original module in use, and the training job goes on with it."""
