"""What worker processes are asked to do in tests. They import this module by its name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.images.source import Encoded


@dataclass(frozen=True)
class Echo:
    """Do what the payload says, and write down that it was begun."""

    log: str = ""

    def __call__(self, payload: Any, encoded: Encoded | None) -> Any:
        what, value = payload
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {what} {value}\n")
        if what == "say":
            return value
        if what == "bytes":
            return encoded.content if encoded else b"not fetched"
        if what == "fail":
            raise ItemError("corrupt", value)
        if what == "end the run":
            raise RunError(value)
        if what == "bug":
            raise ZeroDivisionError(value)
        if what == "hang":
            wait_for_ever()
        if what == "sleep":
            time.sleep(value)
            return os.getpid()
        if what == "signal":
            os.kill(os.getpid(), value)
            wait_for_ever()
        if what == "exit":
            os._exit(value)
        if what == "signal once":  # the file remembers the first time
            first = not Path(value).exists()
            Path(value).touch()
            if first:
                os.kill(os.getpid(), signal.SIGKILL)
                wait_for_ever()
            return "second time"
        if what == "modules":
            import sys

            return sorted(sys.modules)
        raise ValueError(what)

    def fetch(self, payload: Any) -> Callable[[], Encoded] | None:
        what, value = payload
        return (lambda: Encoded(value, None)) if what == "bytes" else None


def wait_for_ever() -> None:
    """As a decoder does that never returns."""
    while True:
        time.sleep(60)
