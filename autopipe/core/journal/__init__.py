"""The journal of a service: requests with an idempotency key survive `kill -9`."""

from autopipe.core.journal.journal import Journal
from autopipe.core.journal.record import Record, Status
from autopipe.core.journal.store import JournalError

__all__ = ["Journal", "JournalError", "Record", "Status"]
