"""The errors of this package. Bottom of the import order: imports nothing.

ParityError
├── CaptureRefused      the region does something that a CUDA graph cannot record
├── NotCertified        the allowlist does not hold this family, task or mode (also a NotImplementedError)
└── StaleGraph          a replay would read memory that is gone
"""


class ParityError(Exception):
    """Base of all errors raised on purpose by this package."""


class CaptureRefused(ParityError, RuntimeError):
    """A capture met something that a CUDA graph cannot record.

    ``cause``: slug (``host-sync``, ``h2d-copy``, ``d2h-copy``, ``data-dependent-shape``, ``side-stream``, ``input-mutation``...).
    ``where``: ``file:line code`` of the innermost frame outside torch and this package, or empty.
    """

    def __init__(self, cause: str, message: str, where: str = "") -> None:
        super().__init__(f"{message} [{cause}{f' at {where}' if where else ''}]")
        self.cause = cause
        self.where = where
        self.message = message


class NotCertified(ParityError, NotImplementedError):
    """The allowlist has no certificate for what was asked."""


class StaleGraph(ParityError, RuntimeError):
    """A captured graph reads memory whose owner is gone."""
