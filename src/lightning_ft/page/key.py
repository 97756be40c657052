"""The key to the status page: whoever has it may look, and nothing else."""

from __future__ import annotations

import hashlib
import hmac


def key_of(token: str) -> str:
    """Return the key of a job's page. The job's token can't be found out from it."""
    return hmac.new(token.encode(errors="surrogateescape"), b"lightning_ft status page", hashlib.sha256).hexdigest()
