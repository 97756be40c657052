"""Has `Trainer(strategy="ft_ddp")` work in a script that does not import lightning_ft.

Lightning knows no entry point for strategies. torch calls those of the group `torch.backends` at the end of its own
import (read in torch 2.13, `torch/__init__.py`, `_import_device_backends`; there since 2.5). This one asks to be told
when `lightning.pytorch` has been imported, and has lightning_ft register its names then. It is a package of its own
because importing `lightning_ft` registers with torch, too, which is not ready at that moment.

`TORCH_DEVICE_BACKEND_AUTOLOAD=0` turns it off. Whatever goes wrong here must not break `import torch`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

logger = logging.getLogger("lightning_ft")


def register_when_lightning_is_imported() -> None:
    """Have lightning_ft imported right after `lightning.pytorch`; costs a millisecond, and never raises."""
    try:
        import wrapt

        wrapt.register_post_import_hook(_register, "lightning.pytorch")
    except Exception as error:  # noqa: BLE001 - see above
        _tell(error)


def _register(_lightning: ModuleType) -> None:
    if "lightning_ft" not in sys.modules:  # else it is registered, or is being imported right now
        try:
            importlib.import_module("lightning_ft")
        except Exception as error:  # noqa: BLE001 - nor may it break `import lightning`
            _tell(error)


def _tell(error: Exception) -> None:
    logger.debug("strategy='ft_ddp' is not known before `import lightning_ft`: %r", error)
